"""Whatever a client writes into kv_transfer_params, the engine goes on and the answer is right."""

import itertools
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.adapter.fake_model import continuation, prompt_of
from tests.adapter.geometry import SINGLE

pytestmark = pytest.mark.vllm

PROMPT = prompt_of(40)
_names = itertools.count()

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
KEYS = [
    "do_remote_prefill",
    "do_remote_decode",
    "remote_engine_id",
    "remote_request_id",
    "remote_host",
    "remote_port",
    "remote_block_ids",
    "tp_size",
    "remote_num_tokens",
    "transfer_mode",
    "grant",
]
objects = st.dictionaries(st.sampled_from(KEYS), json_values | st.sampled_from([True, 1, "true"]), max_size=len(KEYS))


@pytest.fixture
def engines(lab):
    settings = {"layers": SINGLE, "extra": {"handshake_seconds": 0.05, "backoff_seconds": 0.05}}
    prefill, decode = lab.engine("p", **settings), lab.engine("d", **settings)
    lab.introduce(prefill, decode)
    yield prefill, decode
    for engine in (prefill, decode):
        engine.end_leases()


def expect_right_answer(lab, engine, params):
    """A handed-off request answers with one token more or less of its own; every other one as if nothing was asked."""
    name = f"r{next(_names)}"
    result = lab.decode(engine, PROMPT, params, name, max_tokens=2, cache_salt=name)
    if result.params is None:
        assert result.tokens == continuation(PROMPT, 2)
    else:
        assert result.tokens == continuation(PROMPT[:-1], 1)
        engine.end_leases()
    assert not lab.errors.messages


wild = settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])


@wild
@given(params=json_values)
def test_any_json(lab, engines, params):
    expect_right_answer(lab, engines[1], params)


@wild
@given(params=objects)
def test_any_values_of_the_names_that_are_read(lab, engines, params):
    expect_right_answer(lab, engines[1], params)


@wild
@given(changes=objects, missing=st.sets(st.sampled_from(KEYS), max_size=2), data=st.data())
def test_almost_good_params(lab, engines, changes, missing, data):
    prefill, decode = engines
    name = f"r{next(_names)}"
    params = lab.hand_off(prefill, PROMPT, name, cache_salt=name)
    kept = data.draw(st.sets(st.sampled_from(KEYS), max_size=len(changes)))
    mangled = {key: value for key, value in params.items() if key not in missing}
    mangled |= {key: value for key, value in changes.items() if key not in kept}
    result = lab.decode(decode, PROMPT, mangled, name, max_tokens=2, cache_salt=name)
    expected = continuation(PROMPT, 2) if result.params is None else continuation(PROMPT[:-1], 1)
    assert result.tokens == expected
    assert not lab.errors.messages
    for engine in engines:
        engine.end_leases()


@pytest.mark.parametrize(
    "params",
    [
        "text",
        ["do_remote_prefill"],
        [1],
        7,
        1.5,
        True,
        {"do_remote_prefill": True},
        {"do_remote_prefill": True, "remote_engine_id": {}, "remote_host": [], "remote_port": "x", "grant": 0},
        {"do_remote_prefill": True, "do_remote_decode": True},
        {"do_remote_decode": True, "grant": "A" * 10_000},
        json.loads('{"do_remote_prefill": true, "remote_port": 1e400}'),
        json.loads('{"do_remote_prefill": true, "remote_port": NaN}'),
        {"do_remote_prefill": 1},
        {"do_remote_prefill": True, "remote_engine_id": "\ud800", "remote_host": "\0", "remote_port": 1, "grant": "x"},
        {"do_remote_prefill": True, "remote_engine_id": "x", "remote_host": "h", "remote_port": 2**63, "grant": "x"},
    ],
    ids=range(15),
)
def test_shapes_that_have_killed_engines(lab, engines, params):
    """A client reaches vLLM with values that are no object through ``vllm_xargs``, where nothing checks them."""
    expect_right_answer(lab, engines[1], params)


def test_go_routers_write_integers_as_floats_and_change_what_is_not_theirs(lab, engines):
    prefill, decode = engines
    params = lab.hand_off(prefill, PROMPT)
    rewritten = {
        **params,
        "remote_port": float(params["remote_port"]),
        "tp_size": 1.0,
        "remote_block_ids": [[1.0]],
        "remote_num_tokens": 1e9,
        "remote_request_id": "chatcmpl-7",
        "remote_engine_id": "renamed",
        "another": {"router": ["field"]},
    }
    assert lab.decode(decode, PROMPT, rewritten).tokens == continuation(PROMPT, 4)
    assert decode.outcomes == {"receive_verified": 1}


def test_the_address_may_be_another_name_of_the_same_host(lab, engines):
    prefill, decode = engines
    params = {**lab.hand_off(prefill, PROMPT), "remote_host": "localhost"}
    # The fake network knows one name only, so that nobody answers here; a real one finds the engine.
    assert lab.decode(decode, PROMPT, params).tokens == continuation(PROMPT, 4)
    assert decode.outcomes["peer_unreachable"] >= 1
    prefill.end_leases()
