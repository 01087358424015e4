"""Twenty thousand inputs of strangers, to both engines and as params, and faults that the same inputs find."""

import logging

import msgspec
import numpy as np
import pytest

from pd_transfer.core.messages import PROTOCOL_VERSION, Hello, Malformed, Message
from pd_transfer.runtime.prefill import PrefillSide
from pd_transfer.transport.memory import MemoryPullTransport
from tests.faults.fuzzing import FuzzError, World, fits, footprint, watched_log
from tests.runtime.builders import engine, hybrid_layout

NUM_INPUTS = 20_000
CONTROL_INPUTS = 4000
"""Enough to find each of the planted faults."""

KINDS = (
    *("prefill answers Welcome", "prefill answers Refused", "prefill answers Renewed", "prefill answers Released"),
    *("decode finds the peer READY", "decode finds the peer REJECTED", "decode finds the peer BACKING_OFF"),
    *("params read as NoneType", "params read as InvalidParams", "params read as RemoteDecode"),
    *("requests computed locally", "requests promised tokens", "reads: receive_verified", "reads: receive_stale"),
)
"""What a run has to reach; else its inputs are not what they should be."""

_decoder = msgspec.msgpack.Decoder(Message)


def test_nothing_comes_of_twenty_thousand_inputs():
    tally = World(seed=1).run(NUM_INPUTS)
    assert not [kind for kind in KINDS if not tally[kind]]


def test_the_same_seed_is_the_same_run():
    assert World(seed=5).run(500) == World(seed=5).run(500) != World(seed=6).run(500)


def careless(payload: bytes, *guarded: type[Exception]) -> Message | Malformed:
    """A decoder that expects only some errors."""
    if not payload or payload[0] != PROTOCOL_VERSION:
        return Malformed("another version")
    try:
        return _decoder.decode(payload[1:])
    except guarded:
        return Malformed("not a message")


@pytest.mark.parametrize(
    ("guarded", "missed"),
    [((msgspec.DecodeError, UnicodeDecodeError), "RecursionError"), ((RecursionError,), "(Validation|Decode)Error")],
)
def test_control_a_decoder_that_raises_is_found(guarded, missed):
    with pytest.raises(FuzzError, match=f"{missed} with seed 1 at input") as found:
        World(1, lambda payload: careless(payload, *guarded)).run(CONTROL_INPUTS)
    assert "again: scripts/fuzz --seed 1 --num-inputs" in str(found.value)


class Friendly(PrefillSide):
    """Looks at nobody's description."""

    def answer(self, message, now):
        if isinstance(message, Hello):
            return self._welcome
        return super().answer(message, now)


class Hoarding(PrefillSide):
    """Keeps what it is sent."""

    def answer(self, message, now):
        self.kept = [*getattr(self, "kept", ()), message]
        return super().answer(message, now)


class Forgetful(PrefillSide):
    """Ends other leases than those that are named."""

    def answer(self, message, now):
        if isinstance(message, Malformed):
            self.leases.reset(now)
        return super().answer(message, now)


@pytest.mark.parametrize(
    ("worse", "found"),
    [
        (Friendly, "descriptors for a stranger"),
        (Hoarding, "something grows"),
        (Forgetful, "a renewal tells of other leases|a lease is gone that nobody released"),
    ],
)
def test_control_an_engine_that_is_too_kind_is_found(worse, found):
    with pytest.raises(FuzzError, match=found):
        World(1, prefill_class=worse).run(CONTROL_INPUTS)


class Scribbling(MemoryPullTransport):
    """Reads into the next block."""

    def submit_read(self, key, local, remote):
        return super().submit_read(key, local + np.int32(1), remote)


def test_control_a_read_to_the_wrong_place_is_found():
    with pytest.raises(FuzzError, match=r"Arrays are not equal|where nobody asked for it"):
        World(1, pull_class=Scribbling).run(CONTROL_INPUTS)


@pytest.mark.parametrize("line", ["x" * 4000, "two\nlines", "\x1b[2J", "the key is b'secret'", "736563726574"])
def test_control_the_log_is_watched(line):
    with watched_log(lambda: b"secret"), pytest.raises(AssertionError):
        logging.getLogger("pd_transfer.decode").warning(line)


def test_control_fits():
    layout = hybrid_layout(16)
    welcome = World(1).prefill.welcome
    assert fits(welcome, msgspec.structs.replace(welcome, engine=engine(layout, "other", "boot-x")))
    assert not fits(welcome, msgspec.structs.replace(welcome, engine=engine(layout, weights="x")))
    assert not fits(welcome, msgspec.structs.replace(welcome, engine=engine(hybrid_layout(16, 72))))
    assert not fits(welcome, Malformed("junk"))


def test_footprint_counts_what_can_be_reached():
    kept = {"list": [[], []]}
    before = footprint(kept)
    kept["list"].extend([] for _ in range(10))
    assert footprint(kept) == before + 10
