"""No read that overlapped a reuse of its blocks is taken for good: real NIXL, blocks that are written all the time."""

import pytest

from tests.faults.stale_bed import (
    WAYS,
    CarelessPrefill,
    HastyReader,
    Prefill,
    Reader,
    UncheckedReader,
    read_while_reused,
)

pytestmark = pytest.mark.nixl

NUM_READS, MAX_READS = 200, 2000
FEW = 10
"""Fewer reads of a kind than this prove nothing about it."""


@pytest.fixture(params=WAYS.values(), ids=WAYS)
def way(request):
    return request.param


def is_conclusive(tally):
    enough = tally.num_reads >= NUM_READS and tally.num_good >= FEW and tally.num_stale_torn >= FEW
    return enough or tally.num_reads >= MAX_READS


def test_what_was_torn_is_never_taken_for_good(way):
    tally = read_while_reused(way, is_conclusive)
    print(tally)
    assert tally.num_good_wrong == 0
    assert tally.num_good >= FEW
    assert tally.num_stale_torn >= FEW, "too few reads overlapped a reuse"


CONTROLS = {
    "every word is taken for the granted one": (UncheckedReader, Prefill),
    "the word is read before the KV": (HastyReader, Prefill),
    "prefill reuses blocks before the word has changed": (Reader, CarelessPrefill),
}


def is_caught(tally):
    return tally.num_good_torn >= FEW or tally.num_reads >= NUM_READS


@pytest.mark.parametrize(("reader_class", "prefill_class"), CONTROLS.values(), ids=CONTROLS)
def test_control_without_the_check_torn_kv_is_taken_for_good(way, reader_class, prefill_class):
    tally = read_while_reused(way, is_caught, reader_class, prefill_class)
    print(tally)
    assert tally.num_good_torn > 0
