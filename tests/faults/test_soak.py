"""A small soak is clean; and whatever leaks, stays or is wrong turns its verdict red."""

import ctypes
import os
import threading
from collections import Counter
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest

from pd_transfer.core.outcomes import Level, Outcome
from tests.faults.soak import LASTING_LEVELS, MAX_GROWTH_BYTES, WAYS, Plan, Record, Sample, Soak, memory_growth, verdict
from tests.faults.soak_bed import AbortAt, Held, Usage


def red(record):
    """What is not as it must be."""
    return {check.what for check in verdict(record) if not check.is_good}


def soaked(plan, **planted):
    with closing(Soak(plan, **planted)) as soak:
        return soak.run()


@pytest.mark.nixl
@pytest.mark.parametrize("way", WAYS)
def test_a_small_soak_is_clean(way):
    record = soaked(Plan(num_transfers=100, num_restarts=1, backend_params=WAYS[way]))
    assert red(record) == set()


@pytest.mark.faults
@pytest.mark.timeout(900)
@pytest.mark.parametrize("way", WAYS)
def test_a_soak_is_clean(way):
    record = soaked(Plan(num_transfers=2000, num_restarts=5, backend_params=WAYS[way]))
    assert red(record) == set()
    assert set(record.aborts) == set(AbortAt)
    assert record.busiest[Level.RECEIVES]
    assert record.busiest[Level.TRANSFERS]
    assert record.outcomes[Outcome.RECEIVE_STALE]
    assert record.outcomes[Outcome.RECEIVE_FAILED], "prefill was never killed while it was read from"


class Leak:
    """Loses a descriptor, a thread and some memory for each transfer."""

    def __init__(self):
        self._fds, self._threads, self._memory = [], [], []
        self._end = threading.Event()

    def __call__(self):
        self._fds.append(os.open(os.devnull, os.O_RDONLY))
        self._threads.append(threading.Thread(target=self._end.wait))
        self._threads[-1].start()
        self._memory.append(np.ones(2**18, dtype=np.uint8))

    def close(self):
        self._end.set()
        for thread in self._threads:
            thread.join()
        for fd in self._fds:
            os.close(fd)


@pytest.mark.nixl
def test_control_leaks_are_seen():
    with closing(Leak()) as leak:
        record = soaked(Plan(num_transfers=80, num_restarts=0), after_transfer=leak)
    assert red(record) == {
        "decode: memory gained after warm-up",
        "decode: file descriptors gained",
        "decode: threads gained",
    }


@pytest.mark.nixl
def test_control_wrong_bytes_are_seen():
    rows = []

    def damage(request):
        ctypes.memset(rows[0].address, 0, rows[0].stride_bytes * rows[0].count)

    with closing(Soak(Plan(num_transfers=40, num_restarts=0), after_read=damage)) as soak:
        rows += soak.decode.pages.rows
        assert red(soak.run()) == {"verified with wrong bytes"}


# The verdict alone


def good_record():
    usage = Usage(rss_bytes=2**28, num_fds=40, num_threads=8)
    return Record(
        Plan(num_transfers=100, num_restarts=1),
        num_transfers=100,
        num_restarts=1,
        outcomes=Counter({Outcome.RECEIVE_VERIFIED: 80, Outcome.RECEIVE_ABORTED: 20}),
        samples=[Sample(number, number // 50, usage, usage) for number in range(100)],
        busiest=Counter(LASTING_LEVELS),
        rests=[Sample(number, life, usage, usage) for number, life in ((12, 0), (62, 1), (100, 1))],
    )


def test_a_good_record_is_good():
    assert red(good_record()) == set()


def with_last_rest(record, **usage):
    """The same, but for what both processes hold at the end."""
    *earlier, last = record.rests
    usage = replace(last.decode, **usage)
    return replace(record, rests=[*earlier, replace(last, decode=usage, prefill=usage)])


def growing(record, bytes_per_transfer):
    return replace(
        record,
        samples=[
            replace(sample, decode=replace(sample.decode, rss_bytes=2**28 + sample.num_transfers * bytes_per_transfer))
            for sample in record.samples
        ],
    )


BAD_RECORDS = {
    "transfers": lambda good: replace(good, num_transfers=99),
    "prefill killed and restarted": lambda good: replace(good, num_restarts=0),
    "verified": lambda good: replace(good, outcomes=Counter({Outcome.RECEIVE_ABORTED: 1})),
    "aborted while they were read": lambda good: replace(good, outcomes=Counter({Outcome.RECEIVE_VERIFIED: 1})),
    "verified with wrong bytes": lambda good: replace(good, num_wrong=1),
    "internal errors": lambda good: replace(good, outcomes=good.outcomes + Counter({Outcome.INTERNAL_ERROR: 1})),
    "seen held at some time": lambda good: replace(good, busiest=good.busiest - Counter([Level.LEASES])),
    "decode: blocks not given back": lambda good: replace(good, decode=Held(Counter(), 1)),
    "prefill: blocks not given back": lambda good: replace(good, prefill=Held(Counter(), 1)),
    "decode: memory gained after warm-up": lambda good: growing(good, MAX_GROWTH_BYTES // 70),
}


@pytest.mark.parametrize(("what", "spoil"), BAD_RECORDS.items(), ids=BAD_RECORDS)
def test_control_each_line_can_be_red(what, spoil):
    assert red(spoil(good_record())) == {what}


@pytest.mark.parametrize("level", Level)
@pytest.mark.parametrize("engine", ["decode", "prefill"])
def test_control_whatever_is_held_at_the_end_is_red(engine, level):
    assert red(replace(good_record(), **{engine: Held(Counter({level: 1}), 0)})) == {f"{engine}: held at the end"}


@pytest.mark.parametrize(("usage", "what"), [({"num_fds": 41}, "file descriptors"), ({"num_threads": 9}, "threads")])
def test_control_one_more_at_the_end_is_red(usage, what):
    assert red(with_last_rest(good_record(), **usage)) == {
        f"{engine}: {what} gained" for engine in ("decode", "prefill")
    }


def test_memory_may_grow_at_first_and_scatter_later():
    samples = [(number, min(number, 25) * 2**20 + number % 2) for number in range(101)]
    assert abs(memory_growth(samples)) < 1.0


def test_memory_that_was_not_measured_is_not_good():
    assert memory_growth([]) == float("inf")
    assert memory_growth([(number, 0) for number in range(12)]) == float("inf")
