"""kv_transfer_params from anywhere, sealed grants, and the digest that binds a grant to its prompt."""

import base64

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pd_transfer.core.params import (
    Address,
    EngineId,
    InvalidParams,
    MultimodalSpan,
    OfferedKv,
    RemoteDecode,
    RemotePrefill,
    RequestId,
    SealedGrant,
    hand_off_params,
    parse_grant,
    parse_params,
    prompt_digest,
    seal_grant,
)
from tests.core.examples import KEY, make_grant

GOOD = {
    "do_remote_prefill": True,
    "remote_engine_id": "prefill-a",
    "remote_host": "10.0.0.1",
    "remote_port": 5600,
    "grant": "opaque",
}
PARSED = RemotePrefill(EngineId("prefill-a"), Address("10.0.0.1", 5600), "opaque")

# --------------------------------------------------------------------------------------------------------------- params


def test_addresses_are_written_as_people_write_them():
    assert str(Address("10.0.0.1", 5600)) == "10.0.0.1:5600"
    assert str(Address("fe80::1", 5600)) == "[fe80::1]:5600"


@pytest.mark.parametrize(
    ("raw", "parsed"),
    [
        (None, None),
        ({}, None),
        ({"do_remote_decode": False, "do_remote_prefill": False}, None),
        ({"do_remote_prefill": 1}, None),
        ({"do_remote_decode": "true"}, None),
        ({"do_remote_decode": True}, RemoteDecode()),
        (GOOD, PARSED),
        ({**GOOD, "remote_port": 5600.0, "tp_size": 2.0, "surprise": [None]}, PARSED),
        ({**GOOD, "do_remote_decode": True}, RemoteDecode()),
        ([], InvalidParams("kv_transfer_params is a list, not an object")),
        ("{}", InvalidParams("kv_transfer_params is a str, not an object")),
    ],
)
def test_parse_params(raw, parsed):
    assert parse_params(raw) == parsed


@pytest.mark.parametrize(
    "port", [None, True, False, "5600", 0, -1, 65536, 1e300, 5600.5, float("nan"), float("inf"), []]
)
def test_ports_that_are_none(port):
    assert parse_params({**GOOD, "remote_port": port}) == InvalidParams("remote_port is missing or not a port number")


@pytest.mark.parametrize(("key", "max_chars"), [("remote_engine_id", 1024), ("remote_host", 255), ("grant", 1 << 20)])
def test_strings_are_required_and_bounded(key, max_chars):
    assert isinstance(parse_params({**GOOD, key: "x" * max_chars}), RemotePrefill)
    reason = InvalidParams(f"{key} is missing, not a string, or longer than {max_chars} characters")
    for value in (None, "", 5, ["x"], "x" * (max_chars + 1)):
        assert parse_params({**GOOD, key: value}) == reason
    assert parse_params({name: value for name, value in GOOD.items() if name != key}) == reason


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)
ANY_PARAMS = st.builds(
    lambda known, flags, extra: {**extra, **known, **flags},
    st.dictionaries(st.sampled_from(sorted(GOOD)), JSON),
    st.dictionaries(st.sampled_from(["do_remote_prefill", "do_remote_decode"]), st.booleans()),
    st.dictionaries(st.text(), JSON, max_size=3),
)


@given(JSON | ANY_PARAMS)
def test_json_of_any_shape_never_raises(raw):
    parsed = parse_params(raw)
    assert parsed is None or isinstance(parsed, RemoteDecode | RemotePrefill | InvalidParams)
    if isinstance(parsed, RemotePrefill):
        assert isinstance(parse_grant(parsed.grant), str | SealedGrant)


@pytest.mark.parametrize("as_a_router_sends_it", [lambda port: port, float])
def test_what_prefill_answers_is_what_decode_reads(as_a_router_sends_it):
    address, size = Address("10.0.0.1", 5600), OfferedKv(num_tokens=999, num_bytes=7)
    params = hand_off_params(EngineId("prefill-a"), RequestId("r"), address, 2, size, "opaque")
    assert params["remote_block_ids"]  # vLLM and routers only look whether it is empty
    assert (params["remote_num_tokens"], params["remote_num_bytes"]) == (999, 7)
    params["remote_port"] = as_a_router_sends_it(params["remote_port"])
    assert parse_params(params) == PARSED


# --------------------------------------------------------------------------------------------------------------- grants


def unsealed(raw: bytes) -> SealedGrant | str:
    return parse_grant(base64.urlsafe_b64encode(raw).decode())


GRANT = make_grant()
TEXT = seal_grant(GRANT, KEY)
RAW = base64.urlsafe_b64decode(TEXT)


def test_grants_round_trip():
    sealed = parse_grant(TEXT)
    assert isinstance(sealed, SealedGrant)
    assert sealed.claimed == GRANT
    assert sealed.is_genuine(KEY)


def test_another_key_did_not_seal_it():
    assert not parse_grant(TEXT).is_genuine(b"another key")
    assert not parse_grant(seal_grant(GRANT, b"another key")).is_genuine(KEY)


def test_every_flipped_bit_is_noticed():
    for position in range(len(RAW)):
        for bit in range(8):
            damaged = bytearray(RAW)
            damaged[position] ^= 1 << bit
            sealed = unsealed(bytes(damaged))
            assert isinstance(sealed, str) or not sealed.is_genuine(KEY), (position, bit)


def test_every_truncation_is_noticed():
    for length in range(len(RAW)):
        sealed = unsealed(RAW[:length])
        assert isinstance(sealed, str) or not sealed.is_genuine(KEY), length


@given(st.binary(min_size=1, max_size=8))
def test_what_is_appended_is_noticed(tail):
    sealed = unsealed(RAW + tail)
    assert isinstance(sealed, str) or not sealed.is_genuine(KEY)


@given(st.integers(0, len(TEXT) - 1), st.characters(codec="utf-8"))
def test_a_changed_character_changes_nothing_or_is_noticed(position, character):
    sealed = parse_grant(TEXT[:position] + character + TEXT[position + 1 :])
    assert isinstance(sealed, str) or not sealed.is_genuine(KEY) or sealed.claimed == GRANT


def test_a_forged_content_needs_the_key():
    payload = msgspec.msgpack.encode(make_grant(lease_id="somebody else's"))
    sealed = unsealed(RAW[:17] + payload)
    assert sealed.claimed.lease_id == "somebody else's"
    assert not sealed.is_genuine(KEY)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "the grant has version none, this engine reads version 2"),
        (TEXT[:-1], "the grant is not base64"),
        ("\ud800", "the grant is not base64"),
        ("grün", "the grant is not base64"),
        (base64.urlsafe_b64encode(b"\1" + RAW[1:]).decode(), "the grant has version 1, this engine reads version 2"),
        (base64.urlsafe_b64encode(RAW[:1]).decode(), "the grant's content is malformed"),
        (base64.urlsafe_b64encode(RAW[:-1]).decode(), "the grant's content is malformed"),
    ],
)
def test_texts_that_are_no_grants(text, reason):
    assert parse_grant(text) == reason


def test_runs_of_a_grant_are_whole():
    *others, (first, *rest) = msgspec.structs.astuple(GRANT)
    payload = msgspec.msgpack.encode([*others, [first[:-1], *rest]])
    assert unsealed(RAW[:17] + payload) == "the grant's content is malformed"


@pytest.mark.parametrize("claims", [{"lease_id": "x" * 65}, {"boot": "x" * 65}])
def test_what_is_remembered_of_a_grant_is_short(claims):
    assert parse_grant(seal_grant(make_grant(**claims), KEY)) == "the grant's content is malformed"


def test_deeply_nested_content_is_malformed():
    payload = msgspec.msgpack.encode(GRANT)
    nested = bytes([payload[0] + 1]) + payload[1:] + b"\x91" * 100_000  # a field too many, which is skipped
    assert unsealed(RAW[:17] + nested) == "the grant's content is malformed"


@given(st.text() | st.binary().map(lambda raw: base64.urlsafe_b64encode(b"\1" + raw).decode()))
@example("====")
@example("\0")
def test_any_text_never_raises(text):
    assert isinstance(parse_grant(text), str | SealedGrant)


# --------------------------------------------------------------------------------------------------------------- digest

PROMPT = {
    "token_ids": [5, 6, 7],
    "lora_name": None,
    "cache_salt": None,
    "multimodal": [MultimodalSpan("cat.png", 1, 1)],
}


@pytest.mark.parametrize(
    "change",
    [
        {"token_ids": [5, 6, 8]},
        {"token_ids": [5, 6]},
        {"token_ids": [5, 6, 7, 0]},
        {"token_ids": [6, 5, 7]},
        {"lora_name": ""},
        {"lora_name": "None"},
        {"lora_name": "poet"},
        {"cache_salt": ""},
        {"cache_salt": "None"},
        {"cache_salt": "poet"},
        {"multimodal": []},
        {"multimodal": [MultimodalSpan("dog.png", 1, 1)]},
        {"multimodal": [MultimodalSpan("cat.png", 0, 1)]},
        {"multimodal": [MultimodalSpan("cat.png", 1, 2)]},
        {"multimodal": [MultimodalSpan("cat.png", 1, 1)] * 2},
    ],
)
def test_prompt_digest_depends_on_everything(change):
    assert prompt_digest(**PROMPT) == prompt_digest(**PROMPT)
    assert prompt_digest(**{**PROMPT, **change}) != prompt_digest(**PROMPT)


def test_lora_name_and_cache_salt_are_not_confused():
    assert prompt_digest([1], "a", None, []) != prompt_digest([1], None, "a", [])
    assert prompt_digest([1], "ab", "c", []) != prompt_digest([1], "a", "bc", [])


def test_prompt_digest_takes_any_text():
    """Half a surrogate pair is legal in JSON."""
    assert prompt_digest([1], None, "\ud800", []) != prompt_digest([1], None, "\ud801", [])
