"""From a body to the two legs, and what is read from it on the way."""

import json

import msgspec
import pytest

from proxy import relay
from proxy.errors import ProxyError


def body_of(value):
    return relay.parse_body(json.dumps(value).encode())


def test_params_go_to_decode_as_prefill_wrote_them():
    params = b'{"grant":"x", "unknown": [1.50,  null]}'
    reply = b'{"id":"1","choices":[],"kv_transfer_params":' + params + b"}"
    handed = relay.read_prefill_reply(reply).params
    assert bytes(handed) == params
    decode = relay.decode_body(body_of({"prompt": "p"}), handed)
    assert decode == b'{"prompt":"p","kv_transfer_params":' + params + b"}"


@pytest.mark.parametrize("offered", [b"null", b"{}", b"[]", b"7", b'"text"', b"true"])
def test_a_reply_may_offer_no_handoff(offered):
    assert relay.read_prefill_reply(b'{"kv_transfer_params":' + offered + b"}").params is None


def test_a_reply_without_the_field_offers_no_handoff():
    assert relay.read_prefill_reply(b'{"id":"1"}') == (None, "1", 0, 0, 0)


@pytest.mark.parametrize("reply", [b"", b"[]", b"nonsense", b'{"a":' * 100_000 + b"1" + b"}" * 100_000])
def test_a_reply_that_is_no_object_is_an_error(reply):
    with pytest.raises(ValueError, match=r".+"):
        relay.read_prefill_reply(reply)


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"1", b'{"a":}', b'{"a":NaN}', b'{"a":1}x', b"\xef\xbb\xbf{}", b'{"\xff":1}']
)
def test_what_is_no_json_object_is_refused(data):
    with pytest.raises(ProxyError) as refusal:
        relay.parse_body(data)
    assert refusal.value.status == 400


def test_nesting_without_end_is_refused():
    with pytest.raises(ProxyError) as refusal:
        relay.parse_body(b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}")
    assert refusal.value.status == 400


def test_of_repeated_keys_the_last_counts_and_all_are_stripped():
    body = relay.parse_body(b'{"n":1,"kv_transfer_params":{"a":1},"n":2,"kv_transfer_params":{"b":2}}')
    assert json.loads(relay.decode_body(relay.strip_transfer_params(body), None)) == {"n": 2}


@pytest.mark.parametrize(
    ("sent", "left"),
    [
        ({"a": 1, "kv_transfer_params": {"x": 1}}, {"a": 1}),
        ({"a": 1, "kv_transfer_params": None}, {"a": 1}),
        ({"ec_transfer_params": {}}, {}),
        ({"vllm_xargs": {"kv_transfer_params": "x", "b": 1}}, {"vllm_xargs": {"b": 1}}),
        ({"vllm_xargs": {"ec_transfer_params": "x"}}, {"vllm_xargs": {}}),
        (
            {"sampling_params": {"n": 1, "extra_args": {"kv_transfer_params": {}}}},
            {"sampling_params": {"n": 1, "extra_args": {}}},
        ),
        ({"kv_transfer_params": 1, "vllm_xargs": {"kv_transfer_params": 1}}, {"vllm_xargs": {}}),
    ],
)
def test_transfer_params_are_stripped_wherever_they_are(sent, left):
    stripped = relay.strip_transfer_params(body_of(sent))
    assert json.loads(relay.decode_body(stripped, None)) == left


def test_an_escaped_name_does_not_hide_transfer_params():
    body = relay.parse_body(b'{"kv\\u005ftransfer_params":{"x":1}}')
    assert relay.strip_transfer_params(body) == {}


@pytest.mark.parametrize(
    "sent",
    [
        {"a": 1},
        {"vllm_xargs": {"b": 1}},
        {"vllm_xargs": None},
        {"vllm_xargs": [1]},
        {"sampling_params": {"n": 1}},
        {"sampling_params": {"extra_args": "text"}},
        {"messages": [{"kv_transfer_params": "words of a user"}]},
    ],
)
def test_a_body_without_transfer_params_stays_the_same_object(sent):
    body = body_of(sent)
    assert relay.strip_transfer_params(body) is body


def test_a_release_names_no_real_model_and_carries_the_params():
    body = json.loads(relay.release_body(msgspec.Raw(b'{"grant":"x","do_remote_prefill":true}')))
    assert body["kv_transfer_params"] == {"grant": "x", "do_remote_prefill": True}
    assert body["model"] == "pd-proxy/released"
    # Should an engine serve that name after all, it does as little as possible.
    assert body["max_tokens"] == 1


@pytest.mark.parametrize(
    ("usage", "tokens"),
    [
        ({"prompt_tokens": 7}, 7),
        ({"input_tokens": 8}, 8),
        ({}, 0),
        (None, 0),
        ("many", 0),
        ({"prompt_tokens": None}, 0),
        ({"prompt_tokens": -1}, 0),
        ({"prompt_tokens": 10**400}, 1 << 53),
    ],
)
def test_a_prefill_reply_tells_its_id_and_the_length_of_the_prompt(usage, tokens):
    reply = json.dumps({"id": "cmpl-1", "usage": usage}).encode()
    assert relay.read_prefill_reply(reply) == (None, "cmpl-1", tokens, 0, 0)


@pytest.mark.parametrize(("told", "count"), [({}, 0), (7, 7), (7.0, 7), ([], 0)])
def test_a_prefill_reply_tells_how_much_decode_may_read(told, count):
    size = {"remote_num_tokens": told, "remote_num_bytes": told} if told != {} else {}
    reply = json.dumps({"kv_transfer_params": {"do_remote_prefill": True, **size}}).encode()
    prefilled = relay.read_prefill_reply(reply)
    assert (prefilled.handoff_tokens, prefilled.handoff_bytes) == (count, count)


@pytest.mark.parametrize(
    ("sent", "found"), [({}, ""), ({"request_id": "a"}, "a"), ({"request_id": None}, ""), ({"request_id": 1}, "")]
)
def test_a_text_of_a_body(sent, found):
    assert relay.text_field(body_of(sent), "request_id") == found


@pytest.mark.parametrize(
    ("value", "read"), [(3, 3), (3.0, 3), ("3", 3), (None, 9), ("x", 9), ([1], 9), (True, 9), (3.5, 9)]
)
def test_integers_are_read_as_vllm_reads_them(value, read):
    assert relay.int_field(body_of({"n": value}), "n", 9) == read
    assert relay.int_field({}, "n", 9) == 9


def test_invalid_text_in_a_field_is_not_our_problem():
    body = relay.parse_body(b'{"request_id":"\xff","n":"\xff"}')
    assert relay.text_field(body, "request_id") == ""
    assert relay.int_field(body, "n", 1) == 1


@pytest.mark.parametrize(
    ("sent", "tokens"),
    [
        ({}, 1),
        ({"prompt": "x" * 400}, 101),
        ({"prompt": list(range(50))}, 50),
        ({"messages": [{"role": "user", "content": "x" * 400}]}, 109),
        ({"input": "x" * 400, "instructions": "x" * 400}, 202),
        ({"token_ids": list(range(50))}, 50),
    ],
)
def test_prompt_tokens_are_estimated(sent, tokens):
    assert relay.estimated_prompt_tokens(body_of(sent)) == pytest.approx(tokens, abs=3)


@pytest.mark.parametrize(
    ("sent", "tokens"),
    [
        ({}, 256),
        ({"max_tokens": 10}, 10),
        ({"max_tokens": 10, "max_completion_tokens": 20}, 20),
        ({"max_tokens": 10, "n": 3}, 30),
        ({"max_tokens": -5, "n": 0}, 1),
        ({"max_tokens": None}, 256),
        ({"max_output_tokens": 30}, 30),
        ({"sampling_params": {"max_tokens": 7, "n": 2}}, 14),
        ({"sampling_params": None}, 256),
        ({"max_tokens": 10**400}, 1 << 20),
        ({"max_tokens": 3, "n": 10**400}, 3 << 10),
    ],
)
def test_output_tokens_are_estimated(sent, tokens):
    assert relay.estimated_output_tokens(body_of(sent)) == tokens
