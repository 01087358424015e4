"""The side channel's codec, and who fits whom."""

from random import Random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_transfer.core.layout import MemoryRange
from pd_transfer.core.messages import (
    MAX_LEASES_PER_MESSAGE,
    Hello,
    Malformed,
    Message,
    Refused,
    Release,
    Released,
    Renew,
    Renewed,
    Welcome,
    decode,
    encode,
    incompatibility,
    invalid_welcome,
    one_line,
    printable,
)
from tests.core.examples import DECODE_ENGINE, LAYOUT, make_engine, make_layout, make_rank, make_welcome

MESSAGES = [
    Hello(DECODE_ENGINE),
    make_welcome(make_engine(num_ranks=2)),
    Refused("the model differs"),
    Renew(("a", "b")),
    Renewed(("a",)),
    Release(("a",)),
    Released(()),
]

# ---------------------------------------------------------------------------------------------------------------- codec


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_messages_round_trip(message):
    assert decode(encode(message)) == message


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (b"", "the message is empty"),
        (b"\x02" + encode(Renewed(()))[1:], "the peer speaks protocol version 2, this engine speaks 1"),
        (b"GET / HTTP/1.1", "the peer speaks protocol version 71, this engine speaks 1"),
    ],
)
def test_other_protocols_are_malformed(payload, reason):
    assert decode(payload) == Malformed(reason)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xc1",
        encode(Renewed(()))[1:] + b"\0",
        msgspec.msgpack.encode({"type": "Steal"}),
        msgspec.msgpack.encode({"type": "Malformed", "reason": "is never sent"}),
        msgspec.msgpack.encode(["Refused", "no"]),
        msgspec.msgpack.encode({"reason": "whose?"}),
        msgspec.msgpack.encode({"type": "Renewed", "gone": [1]}),
        b"\x82\xa4type\xa7Refused\xa6reason\xa1\xff",  # not UTF-8
        b"\x82\xa4type\xa5Renew\xa9lease_ids\xdd\xff\xff\xff\xff",  # claims 2**32 - 1 leases
    ],
)
def test_other_content_is_malformed(content):
    message = decode(b"\x01" + content)
    assert isinstance(message, Malformed)
    assert message.reason.startswith("not a message: ")


def test_deep_nesting_in_an_unknown_field_is_malformed():
    payload = b"\x01\x83\xa4type\xa7Refused\xa6reason\xa0\xa1x" + b"\x91" * 100_000
    assert decode(payload) == Malformed("not a message: nested too deeply")


@pytest.mark.parametrize("kind", [Renew, Release])
def test_leases_in_a_message_are_bounded(kind):
    allowed, too_many = (kind(("x",) * count) for count in (MAX_LEASES_PER_MESSAGE, MAX_LEASES_PER_MESSAGE + 1))
    assert decode(encode(allowed)) == allowed
    assert decode(encode(too_many)) == Malformed("1025 leases in one message, at most 1024")


def test_unknown_fields_are_ignored():
    """A later version may say more."""
    payload = b"\x01" + msgspec.msgpack.encode({"type": "Refused", "reason": "no", "since": 2026})
    assert decode(payload) == Refused("no")


def paths(node: object) -> list[tuple[object, ...]]:
    """Every place in a tree of dicts and lists."""
    children = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    return [(), *((key, *rest) for key, child in children for rest in paths(child))]


def without(tree: object, path: tuple[object, ...]) -> object:
    """The tree without what is at the path."""
    if not path:
        return None
    keep = dict(tree) if isinstance(tree, dict) else list(tree)
    if len(path) == 1:
        del keep[path[0]]
    else:
        keep[path[0]] = without(keep[path[0]], path[1:])
    return keep


def replaced(tree: object, path: tuple[object, ...], value: object) -> object:
    """The tree with another value at the path."""
    if not path:
        return value
    keep = dict(tree) if isinstance(tree, dict) else list(tree)
    keep[path[0]] = replaced(keep[path[0]], path[1:], value)
    return keep


VALUES = [None, True, 0, 1, -1, 2**31, 2**64 - 1, -(2**63), 0.5, 5.0, float("nan"), "", "x", b"", b"\xff", [], [[]], {}]
TREES = [msgspec.msgpack.decode(encode(message)[1:]) for message in MESSAGES]


def mutated_structure(random: Random) -> bytes:
    """A message with some of its parts replaced, removed, or exchanged for parts of another one."""
    tree = random.choice(TREES)
    for _ in range(random.randint(1, 3)):
        path = random.choice(paths(tree))
        change = random.choice(["replace", "remove", "exchange"])
        if change == "replace":
            tree = replaced(tree, path, random.choice(VALUES))
        elif change == "remove":
            tree = without(tree, path)
        else:
            part = random.choice(TREES)
            for step in random.choice(paths(part)):
                part = part[step]
            tree = replaced(tree, path, part)
    return b"\x01" + msgspec.msgpack.encode(tree)


def mutated_bytes(random: Random) -> bytes:
    """A message with some of its bytes overwritten, inserted or cut off."""
    raw = bytearray(encode(random.choice(MESSAGES)))
    for _ in range(random.randint(1, 4)):
        position = random.randint(0, len(raw))
        raw[position : position + random.randint(0, 3)] = random.randbytes(random.randint(0, 3))
    return bytes(raw[: random.randint(0, len(raw))]) if random.random() < 0.3 else bytes(raw)


# A true Random is seeded once per example: ten times faster than one whose every choice can shrink.
RANDOM = st.randoms(use_true_random=True)


@settings(max_examples=2000)
@given(
    st.binary() | st.binary().map(lambda raw: b"\x01" + raw) | RANDOM.map(mutated_bytes) | RANDOM.map(mutated_structure)
)
def test_bytes_from_outside_never_raise(payload):
    """Nor does anything that a scheduler does with them next."""
    message = decode(payload)
    assert isinstance(message, Message | Malformed)
    match message:
        case Hello(engine):
            incompatibility(DECODE_ENGINE, engine)
        case Welcome():
            invalid_welcome(DECODE_ENGINE, message)


# -------------------------------------------------------------------------------------------------------- compatibility


def test_engines_that_fit():
    assert incompatibility(DECODE_ENGINE, make_engine()) is None
    assert invalid_welcome(DECODE_ENGINE, make_welcome()) is None


def test_only_what_kv_depends_on_must_be_equal():
    model = msgspec.structs.replace(DECODE_ENGINE.model, name="/mnt/elsewhere/gemma")
    layout = make_layout(["sliding.0"], ["full.0", "full.1", "sliding.1"], num_blocks=7)
    remote = msgspec.structs.replace(make_engine(layout=layout), model=model)
    assert incompatibility(DECODE_ENGINE, remote) is None


@pytest.mark.parametrize(
    ("remote", "reason"),
    [
        (make_engine(num_ranks=2), "tensor parallel size differs: local 1, peer 2"),
        (
            make_engine(layout=msgspec.structs.replace(LAYOUT, region_bytes=100)),
            "the peer's layout is invalid: layer full.0 ends outside its region",
        ),
        (
            make_engine(layout=make_layout(["full.0"])),
            "layer full.1 does not exist on the peer (local 4 layers, peer 1)",
        ),
        (
            make_engine(config_digest="config-2"),
            "the model differs: local gemma (config-1), peer gemma (config-2)",
        ),
        (
            make_engine(weights_digests=["other weights"]),
            "the weights differ: local ('weights of rank 0',), peer ('other weights',)",
        ),
    ],
)
def test_what_does_not_fit_is_named_with_both_values(remote, reason):
    assert incompatibility(DECODE_ENGINE, remote) == reason
    assert invalid_welcome(DECODE_ENGINE, make_welcome(remote)) == reason


def test_a_welcome_serves_every_rank_and_the_whole_region():
    welcome = make_welcome()
    twice = msgspec.structs.replace(welcome, ranks=(make_rank(0), make_rank(1)))
    assert invalid_welcome(DECODE_ENGINE, twice) == "2 ranks are served, 1 are promised"
    none = msgspec.structs.replace(welcome, ranks=())
    assert invalid_welcome(DECODE_ENGINE, none) == "0 ranks are served, 1 are promised"
    region = MemoryRange(1 << 20, LAYOUT.region_bytes - 1)
    memory = msgspec.structs.replace(welcome.ranks[0].memory, region=region)
    short = msgspec.structs.replace(welcome, ranks=(msgspec.structs.replace(welcome.ranks[0], memory=memory),))
    assert invalid_welcome(DECODE_ENGINE, short) == "a served region is shorter than the layout's 51200 bytes"


def test_a_peers_text_is_one_short_line_of_a_log():
    assert printable("no") == "'no'"
    assert "\n" not in printable("no\nERROR all is lost")
    assert len(printable("x" * 100_000)) < 600


def test_a_sentence_that_quotes_a_peer_stays_in_its_line():
    assert one_line("the lease's word is é") == "the lease's word is é"
    assert one_line("no\nERROR \x1b[2J \ud800") == "no\\nERROR \\x1b[2J \\ud800"
    assert len(one_line("x" * 100_000)) < 600


def test_a_welcome_shows_whose_it_is_and_none_of_its_secrets():
    welcome = make_welcome(make_engine(num_ranks=2))
    for shown in (repr([welcome]), repr(list(welcome.__rich_repr__()))):
        assert_shows_no_secret(welcome, shown)


def assert_shows_no_secret(welcome, shown):
    assert repr(welcome.engine.engine_id) in shown
    for secret in (welcome.grant_key, welcome.ranks[0].memory.agent_metadata, welcome.ranks[0].memory.region.address):
        assert repr(secret) not in shown
        assert repr(secret) in repr(msgspec.structs.astuple(welcome)), "the control"
