"""The transfer benchmark: what it posts, how it takes turns and judges; and, over real NIXL, that all of it runs."""

import os
from functools import partial

import numpy as np
import pytest

from benchmarks.transfer import ucx
from benchmarks.transfer.bed import CMA_APART, CMA_TOGETHER, TCP, Bed, Cores, on_core
from benchmarks.transfer.receives import Receive
from benchmarks.transfer.runs import (
    BUILT_IN,
    LARGE,
    LARGE_PLAIN,
    MEMCPY,
    OURS,
    PULL,
    PULL_AND_WORD,
    SPLITS,
    WORD,
    Pace,
    key,
    rows_of,
    run_behind,
    run_pulls,
    run_receives,
    run_words,
    split_key,
)
from benchmarks.transfer.sampling import Read, column, interleave, ratio, spread, wait
from benchmarks.transfer.subject import BLOCK_SIZE, MODELS, make_subject, packed, region_rows
from benchmarks.transfer.tables import (
    Behinds,
    Pulls,
    Receives,
    Words,
    behind_table,
    measures_table,
    posting_table,
    pulls_table,
    receives_table,
    words_table,
)
from benchmarks.transfer.verdicts import Verdict, verdicts_table
from pd_transfer.cli.transfers import NUMBERINGS
from pd_transfer.core.layout import descriptor_rows

SIZES = (1, 4)


@pytest.fixture(scope="module", params=MODELS)
def subject(request):
    return make_subject(request.param, MODELS[request.param], SIZES)


@pytest.fixture(scope="module")
def tiny():
    return make_subject("tiny", MODELS["tiny"], (1,))


def touched(rows, indices, region_bytes: int) -> np.ndarray:
    """Which bytes of a region descriptors name, found one by one."""
    found = np.zeros(region_bytes, dtype=bool)
    firsts = np.cumsum([0, *(row.count for row in rows)])
    for index in indices:
        number = np.searchsorted(firsts, index, side="right") - 1
        start = rows[number].address + int(index - firsts[number]) * rows[number].stride_bytes
        assert not found[start : start + rows[number].length_bytes].any()
        found[start : start + rows[number].length_bytes] = True
    return found


def test_readings_have_about_the_bytes_that_were_asked_for(subject):
    assert [(each.size_mib, each.numbering) for each in subject.readings] == [(s, n) for s in SIZES for n in NUMBERINGS]
    one_block = sum(layer.page_bytes for layer in subject.layout.layers())
    for reading in subject.readings:
        assert abs(reading.plan.num_bytes - reading.size_mib * 2**20) <= one_block
        assert reading.pull.num_tokens % BLOCK_SIZE == 0


def test_what_is_posted_names_the_bytes_that_are_counted(subject):
    """And the built-in worker's descriptors cover ours, whole regions of every block."""
    for reading in subject.readings:
        ours = touched(descriptor_rows(subject.layout, 0), reading.plan.local, subject.layout.region_bytes)
        built_in = touched(region_rows(subject.layout, 0), reading.built_in, subject.layout.region_bytes)
        assert np.array_equal(reading.plan.local, reading.plan.remote)
        assert (ours.sum(), built_in.sum()) == (reading.plan.num_bytes, reading.num_built_in_bytes)
        assert not (ours & ~built_in).any()


def test_numberings_merge_as_they_are_named(subject):
    num_layers = len(list(subject.layout.layers()))
    contiguous, _, scattered = (subject.reading(4, name) for name in NUMBERINGS)
    assert contiguous.plan.num_merged == num_layers
    assert contiguous.num_built_in_merged < num_layers
    assert scattered.plan.num_merged == len(scattered.plan.local)
    assert scattered.num_built_in_merged == len(scattered.built_in)


def test_packed_tables_follow_each_other():
    assert packed([[0, 0, 5, 6], [0, 9, 10, 11]], NUMBERINGS["contiguous"]) == [[0, 0, 1, 2], [0, 3, 4, 5]]
    assert packed([[3, 5], [7, 9]], NUMBERINGS["scattered"]) == [[1, 3], [5, 7]]


def test_variants_take_turns_and_the_first_round_does_not_count():
    calls = []

    def variant(name):
        calls.append(name)
        return Read(float(len(calls)), 0.0, 0.0, 0.0)

    found = interleave({name: partial(variant, name) for name in "abc"}, 0.0, least=3)
    assert "".join(calls) == "abcbcacababc"
    assert column(found["a"], "seconds").tolist() == [6.0, 8.0, 10.0]


def test_medians_and_ratios():
    reads = [Read(seconds, 0.0, 0.0, 0.0) for seconds in (1.0, 2.0, 9.0)]
    slower = [Read(seconds, 0.0, 0.0, 0.0) for seconds in (4.0, 4.0, 9.0)]
    assert spread(reads).median == 2.0
    assert spread(reads).p99 == pytest.approx(8.86)
    assert ratio(slower, reads).median == 2.0


def test_waiting_pauses_between_polls():
    answers, pauses = iter([False, False, True]), []
    wait(lambda: next(answers), lambda number: pauses.append(number) or 0.0)
    assert pauses == [1, 2]
    assert CMA_TOGETHER.pauses(1) < CMA_TOGETHER.pauses(1000)
    assert CMA_APART.pauses is None


@pytest.mark.parametrize(
    ("is_least", "figures", "row"),
    [
        (True, {"a": 0.95, "b": 0.9}, ("at least 0.9", 0.9, "b", "kept")),
        (True, {"a": 0.95, "b": 0.89}, ("at least 0.9", 0.89, "b", "missed at b")),
        (False, {"a": 0.9, "b": 1.0}, ("at most 0.9", 1.0, "b", "missed at b")),
        (False, {"a": 1.1, "b": 1.0}, ("at most 0.9", 1.1, "a", "missed")),
    ],
)
def test_verdicts(is_least, figures, row):
    assert Verdict("what", 0.9, is_least, figures).row() == ("what", *row)


def read(microseconds: float) -> Read:
    return Read(microseconds * 1e-6, 20e-6, 30e-6, 10e-6)


def made_up_pulls(subject, ours=200.0) -> Pulls:
    cell = {key(OURS, name): [read(ours)] * 3 for name in NUMBERINGS}
    cell |= {key(BUILT_IN, name): [read(2 * ours)] * 3 for name in NUMBERINGS}
    cell |= {name: [read(180)] * 3 for name in (LARGE, LARGE_PLAIN, MEMCPY)}
    return Pulls(CMA_TOGETHER, subject, dict.fromkeys(SIZES, cell))


def test_tables_and_verdicts_of_made_up_samples(subject):
    pulls, slow = made_up_pulls(subject), made_up_pulls(subject, ours=400.0)
    receives = Receives(
        TCP,
        subject,
        {(reading.size_mib, reading.numbering): [Receive(140e-6, 160e-6, 10e-6)] for reading in subject.readings},
    )
    costs = {PULL: 100.0, PULL_AND_WORD: 102.0, WORD: 2.0}
    words = Words(TCP, {split_key(what, split): [read(cost)] for what, cost in costs.items() for split in SPLITS})
    table = verdicts_table([pulls, slow], [receives], [words])
    assert [row[4] for row in table.rows] == [
        *("kept", "kept"),  # 0.9 of a large read
        *("missed", "missed"),  # 0.45
        "kept",  # 140 microseconds
        "kept",  # 2 %
    ]
    tables = [pulls_table(pulls), measures_table([pulls]), posting_table([pulls]), receives_table([receives])]
    for each in [table, *tables, words_table([words])]:
        assert {len(row) for row in each.rows} == {len(each.columns)}
    for row in pulls_table(pulls).rows:
        assert (row[6], row[-1]) == (pytest.approx(0.9), pytest.approx(2.0))


def test_what_ucx_perftest_says():
    output = (
        "iterations,50.0_percentile_lat,avg_lat,overall_lat,avg_bw,overall_bw,avg_mr,overall_mr\n"
        "  50,351.161,724.220,724.220,5523.18,2048.00,1381,1381\n"
    )
    line = ucx.parse(output, "ucp_get", "cma", 4096)
    assert line.gib_per_second == 2.0


# ------------------------------------------------------------------------------------------------------- over real NIXL

LEAST = Pace(cma_cell=0.0, tcp_cell=0.0, words=0.0, behind=0.0, receives=0.0, least=1)


@pytest.fixture
def cores():
    own = sorted(os.sched_getaffinity(0))
    return Cores(own[0], own[-1])


def test_a_thread_returns_to_its_cores(cores):
    before = os.sched_getaffinity(0)
    with on_core(cores.reading):
        assert os.sched_getaffinity(0) == {cores.reading}
    assert os.sched_getaffinity(0) == before


@pytest.mark.nixl
@pytest.mark.parametrize("way", [CMA_TOGETHER, CMA_APART, TCP], ids=lambda way: way.name)
def test_every_experiment_runs(way, cores, tiny):
    """Each read's bytes are counted on the way: see the next test."""
    pulls = Pulls(way, tiny, run_pulls(way, cores, tiny, LEAST))
    receives = Receives(way, tiny, run_receives(way, cores, tiny, LEAST))
    reading = tiny.reading(1, "scattered")
    words = Words(way, run_words(way, cores, reading, tiny, LEAST))
    behinds = Behinds(way, run_behind(way, cores, [reading], tiny, LEAST))
    assert len(verdicts_table([pulls], [receives], [words]).rows) == 4
    assert len(behind_table([behinds]).rows) == 2
    assert all(
        read.seconds >= read.post_seconds > 0 for cell in pulls.cells.values() for s in cell.values() for read in s
    )


@pytest.mark.nixl
def test_a_read_that_brings_other_bytes_is_found(cores, tiny):
    reading = tiny.reading(1, "contiguous")
    with Bed.opened(CMA_TOGETHER, cores, tiny.layout.region_bytes) as bed:
        reader, indices = bed.ours(rows_of(tiny)), reading.plan.local
        bed.check("all", partial(reader.read, indices, indices), reading.plan.num_bytes)
        with pytest.raises(RuntimeError, match="less one brought"):
            bed.check("less one", partial(reader.read, indices[1:], indices[1:]), reading.plan.num_bytes)
