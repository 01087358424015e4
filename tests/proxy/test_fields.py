"""What every field of a client's body becomes on the two legs, endpoint by endpoint."""

import json

import pytest

from proxy import fields, relay
from proxy.endpoints import ENDPOINTS
from proxy.fields import Treatment

SIX_KEYS = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
STREAM = {"stream": (True, False), "stream_options": ({"include_usage": True}, None)}

# For every endpoint and every field with a rule about the prefill leg: what a client may send, and what prefill then
# gets (None: nothing). A dot leads into a nested object.
PREFILL_ROWS = {
    "completions": STREAM
    | {
        "max_tokens": (100, 1),
        "max_completion_tokens": (100, 1),
        "stream_interval": (5, None),
        "min_tokens": (10, None),
        "min_completion_tokens": (10, None),
        "n": (4, 1),
        "best_of": (4, None),
        "logprobs": (5, None),
        "top_logprobs": (5, None),
        "logprob_token_ids": ([1], None),
        "return_token_ids": (True, None),
        "return_prompt_text": (True, None),
    },
    "responses": STREAM
    | {
        "max_output_tokens": (100, 1),
        "store": (True, False),
        "include": (["message.output_text.logprobs"], None),
        "top_logprobs": (5, None),
        "enable_response_messages": (True, None),
    },
    "messages": STREAM | {"max_tokens": (100, 1)},
    "generate": STREAM
    | {
        "return_token_ids": (True, None),
        "output_mode": ("text", None),
        "sampling_params.max_tokens": (100, 1),
        "sampling_params.min_tokens": (10, None),
        "sampling_params.n": (4, 1),
        "sampling_params.logprobs": (5, None),
        "sampling_params.logprob_token_ids": ([1], None),
        "sampling_params.stream_interval": (5, None),
    },
}
PREFILL_ROWS["chat"] = PREFILL_ROWS["completions"]

# What prefill gets in any case.
ALWAYS = {
    "completions": {"max_tokens": 1, "stream": False},
    "chat": {"max_tokens": 1, "stream": False},
    "responses": {"max_output_tokens": 1, "stream": False, "store": False},
    "messages": {"max_tokens": 1, "stream": False},
    "generate": {"stream": False},
}

# For every endpoint and every field for which one engine answers all: values that ask for that, and values that do not.
WHOLE_ROWS = {
    "completions": {
        "echo": ([True], [False, None]),
        "prompt_logprobs": ([1, 0, -1], [None]),
        "prompt_embeds": (["AAAA"], [None]),
        "use_beam_search": ([True], [False, None]),
    },
    "responses": {
        "previous_response_id": (["resp_1"], [None]),
        "background": ([True], [False, None]),
    },
    "messages": {},
    "generate": {
        "sampling_params.prompt_logprobs": ([1, 0, -1], [None]),
        "sampling_params.prompt_logprob_token_ids": ([[1]], [None]),
    },
}
WHOLE_ROWS["chat"] = WHOLE_ROWS["completions"]

BY_NAME = {endpoint.name: endpoint for endpoint in ENDPOINTS.values()}


def named_rules(rules, prefix=""):
    for name, rule in rules.fields.items():
        yield prefix + name, rule
    for name, inner in rules.nested.items():
        yield from named_rules(inner, f"{prefix}{name}.")


def body_with(name, value):
    """A body in which the field with this dotted name has this value."""
    *parents, last = name.split(".")
    body = {last: value}
    for parent in reversed(parents):
        body = {parent: body}
    return {"prompt": "p", **body}


def parsed(value):
    return relay.parse_body(json.dumps(value).encode())


def prefill_leg(endpoint, value):
    return json.loads(relay.prefill_body(parsed(value), BY_NAME[endpoint].rules))


def test_every_endpoint_has_its_rows():
    assert PREFILL_ROWS.keys() == ALWAYS.keys() == WHOLE_ROWS.keys() == BY_NAME.keys()


@pytest.mark.parametrize("endpoint", BY_NAME)
def test_every_rule_has_its_row_and_a_reason(endpoint):
    rules = dict(named_rules(BY_NAME[endpoint].rules))
    by_treatment = {
        treatment: {name for name, rule in rules.items() if rule.treatment is treatment} for treatment in Treatment
    }
    shaped = by_treatment[Treatment.SET] | by_treatment[Treatment.CAP] | by_treatment[Treatment.DROP]
    assert PREFILL_ROWS[endpoint].keys() == shaped
    assert WHOLE_ROWS[endpoint].keys() == by_treatment[Treatment.WHOLE]
    assert by_treatment[Treatment.STRIP] == fields.STRIPPED.keys()
    assert all(rule.reason for rule in rules.values())


@pytest.mark.parametrize(
    ("endpoint", "name"), [(endpoint, name) for endpoint in PREFILL_ROWS for name in PREFILL_ROWS[endpoint]]
)
def test_a_field_with_a_rule_on_the_prefill_leg(endpoint, name):
    sent, expected = PREFILL_ROWS[endpoint][name]
    wanted = {"prompt": "p", **ALWAYS[endpoint], "kv_transfer_params": SIX_KEYS}
    if "." in name:
        parent, field = name.split(".")
        inner = {"max_tokens": 1} | ({} if expected is None else {field: expected})
        wanted[parent] = inner
    elif expected is not None:
        wanted[name] = expected
    assert prefill_leg(endpoint, body_with(name, sent)) == wanted


@pytest.mark.parametrize(
    ("endpoint", "name"), [(endpoint, name) for endpoint in PREFILL_ROWS for name in PREFILL_ROWS[endpoint]]
)
def test_a_field_with_a_rule_reaches_decode_as_it_was_sent(endpoint, name):
    sent = body_with(name, PREFILL_ROWS[endpoint][name][0])
    assert json.loads(relay.decode_body(parsed(sent), None)) == sent


@pytest.mark.parametrize("endpoint", BY_NAME)
def test_capped_fields_are_not_invented(endpoint):
    assert prefill_leg(endpoint, {"a": 1}) == {"a": 1, **ALWAYS[endpoint], "kv_transfer_params": SIX_KEYS}


@pytest.mark.parametrize("endpoint", BY_NAME)
@pytest.mark.parametrize("name", fields.STRIPPED)
def test_stripped_fields_reach_prefill_from_nobody(endpoint, name):
    leg = prefill_leg(endpoint, {name: {"remote_host": "evil"}})
    assert leg.pop("kv_transfer_params") == SIX_KEYS
    assert leg == ALWAYS[endpoint]


@pytest.mark.parametrize(
    ("endpoint", "name", "value", "whole"),
    [
        (endpoint, name, value, whole)
        for endpoint, rows in WHOLE_ROWS.items()
        for name, (asking, not_asking) in rows.items()
        for values, whole in ((asking, True), (not_asking, False))
        for value in values
    ],
)
def test_which_requests_one_engine_must_answer(endpoint, name, value, whole):
    assert BY_NAME[endpoint].rules.needs_one_engine(parsed(body_with(name, value))) is whole


@pytest.mark.parametrize("endpoint", BY_NAME)
def test_an_ordinary_request_is_shared(endpoint):
    body = {"prompt": "p", "logprobs": 5, "n": 3, "sampling_params": {"n": 2, "logprobs": 1}}
    assert not BY_NAME[endpoint].rules.needs_one_engine(parsed(body))


@pytest.mark.parametrize("value", [None, 7, "text", [1]])
def test_a_nested_value_that_is_no_object_is_the_engine_s_to_refuse(value):
    body = {"token_ids": [1], "sampling_params": value}
    assert prefill_leg("generate", body)["sampling_params"] == value
    assert not BY_NAME["generate"].rules.needs_one_engine(parsed(body))


UNRULED = [
    "model",
    "messages",
    "input",
    "token_ids",
    "system",
    "instructions",
    "tools",
    "tool_choice",
    "response_format",
    "structured_outputs",
    "thinking",
    "reasoning",
    "chat_template_kwargs",
    "add_generation_prompt",
    "cache_salt",
    "mm_processor_kwargs",
    "features",
    "stop",
    "seed",
    "temperature",
    "logit_bias",
    "allowed_token_ids",
    "truncate_prompt_tokens",
    "priority",
    "never_heard_of",
]


@pytest.mark.parametrize("endpoint", BY_NAME)
@pytest.mark.parametrize("name", UNRULED)
def test_what_shapes_the_prompt_or_has_no_rule_is_the_same_on_both_legs(endpoint, name):
    sent = {"a": [1, {"b": None}]}
    assert prefill_leg(endpoint, {name: sent}) == {name: sent, **ALWAYS[endpoint], "kv_transfer_params": SIX_KEYS}
    assert json.loads(relay.decode_body(parsed({name: sent}), None)) == {name: sent}


@pytest.mark.parametrize("endpoint", BY_NAME)
def test_nested_bytes_are_not_touched(endpoint):
    nested = b'{"z": 1.50, "a":[ 1e2,"\\u00e9"],\n"z2":12345678901234567890}'
    body = relay.parse_body(b'{"tools": ' + nested + b',"sampling_params":{"structured_outputs":' + nested + b"}}")
    assert relay.prefill_body(body, BY_NAME[endpoint].rules).count(nested) == 2
    assert relay.decode_body(body, None).count(nested) == 2
