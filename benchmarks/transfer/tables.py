"""What was measured, as tables, and how it stands to the targets."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from benchmarks.report import Cell, Table
from benchmarks.transfer.bed import Way
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
    Behind,
    Cells,
    key,
    split_key,
)
from benchmarks.transfer.sampling import Read, column, ratio, spread
from benchmarks.transfer.subject import Subject
from benchmarks.transfer.ucx import Line

Row = tuple[Cell, ...]


class Pulls(NamedTuple):
    """One subject on one bed."""

    way: Way
    subject: Subject
    cells: Cells


class Receives(NamedTuple):
    """The same with the connector's own thread; by size asked for and numbering."""

    way: Way
    subject: Subject
    samples: Mapping[tuple[int, str], Sequence[Receive]]


class Words(NamedTuple):
    """Pulls without and with the word."""

    way: Way
    samples: Mapping[str, Sequence[Read]]


class Behinds(NamedTuple):
    """Words that are asked for behind a large read."""

    way: Way
    samples: Mapping[str, Sequence[Behind]]


def pulls_table(found: Pulls) -> Table:
    """Time and goodput of every pull, and ratios of goodput, and the built-in worker's time for the same blocks."""
    columns = (
        "MiB",
        "blocks",
        "descriptors, merged",
        "ms",
        "p99",
        "GiB/s",
        f"goodput over {LARGE}",
        f"over {LARGE_PLAIN}",
        "over memcpy",
        "built-in's descriptors, merged",
        "built-in's time over ours",
    )
    rows: list[Row] = []
    for reading in found.subject.readings:
        cell, num_bytes = found.cells[reading.size_mib], reading.plan.num_bytes
        ours = cell[key(OURS, reading.numbering)]
        time = spread(ours)
        rows.append(
            (
                num_bytes / 2**20,
                reading.numbering,
                f"{len(reading.plan.local):,}, {reading.plan.num_merged:,}",
                time.median * 1e3,
                time.p99 * 1e3,
                num_bytes / 2**30 / time.median,
                *(ratio(cell[other], ours).median for other in (LARGE, LARGE_PLAIN, MEMCPY)),
                f"{len(reading.built_in):,}, {reading.num_built_in_merged:,}",
                ratio(cell[key(BUILT_IN, reading.numbering)], ours).median,
            )
        )
    return Table(f"Pulls: {found.way.name}, {found.subject.name}", columns, tuple(rows))


def measures_table(found: Sequence[Pulls]) -> Table:
    """What the pulls are measured against."""
    columns = ("way", "geometry", "MiB", *(f"{name}, GiB/s" for name in (LARGE, LARGE_PLAIN, MEMCPY)))
    rows: list[Row] = []
    for each in found:
        for size, cell in each.cells.items():
            num_bytes = next(r.plan.num_bytes for r in each.subject.readings if r.size_mib == size)
            speeds = [num_bytes / 2**30 / spread(cell[name]).median for name in (LARGE, LARGE_PLAIN, MEMCPY)]
            rows.append((each.way.name, each.subject.name, num_bytes / 2**20, *speeds))
    return Table("One large READ, and memcpy", columns, tuple(rows))


def posting_table(found: Sequence[Pulls]) -> Table:
    """The calling thread: how long submit_read keeps it, and what the pull costs it in CPU time."""
    columns = (
        "way",
        "geometry",
        "MiB",
        "blocks",
        "submit_read, µs",
        "p99",
        "of it CPU",
        "CPU of the pull",
        "p99",
        "built-in: post, µs",
        "CPU of the pull",
    )
    rows: list[Row] = []
    for each in found:
        for reading in each.subject.readings:
            cell = each.cells[reading.size_mib]
            ours, built_in = cell[key(OURS, reading.numbering)], cell[key(BUILT_IN, reading.numbering)]
            posts = [*spread(ours, "post_seconds"), spread(ours, "post_cpu_seconds").median]
            theirs = [spread(built_in, field).median for field in ("post_seconds", "cpu_seconds")]
            size = reading.plan.num_bytes / 2**20
            rows.append(
                (
                    *(each.way.name, each.subject.name, size, reading.numbering),
                    *_microseconds(posts),
                    # A caller that never pauses uses its core all the time.
                    *(("", "") if each.way.is_apart else _microseconds(spread(ours, "cpu_seconds"))),
                    *_microseconds(theirs),
                )
            )
    return Table("Posting, and the calling thread's CPU time, in µs", columns, tuple(rows))


def receives_table(found: Sequence[Receives]) -> Table:
    """A decode worker's threads for one receive."""
    columns = ("way", "geometry", "MiB", "blocks", "vLLM's thread", "p99", "our I/O thread", "p99", "the plan alone")
    rows: list[Row] = []
    for each in found:
        for reading in each.subject.readings:
            samples = each.samples[reading.size_mib, reading.numbering]
            seconds = [
                *spread(samples, "engine_seconds"),
                *spread(samples, "io_seconds"),
                spread(samples, "plan_seconds").median,
            ]
            size = reading.plan.num_bytes / 2**20
            rows.append((each.way.name, each.subject.name, size, reading.numbering, *_microseconds(seconds)))
    return Table("CPU time of a decode worker's threads for one receive, in µs", columns, tuple(rows))


def words_table(found: Sequence[Words]) -> Table:
    """What the lease word adds to a pull."""
    columns = ("way", "split_batch_size", "pull, ms", "with the word", "p99", "added, µs", "added, %", "word alone, µs")
    rows: list[Row] = []
    for way, samples in found:
        for split in SPLITS:
            pull, both, word = (samples[split_key(what, split)] for what in (PULL, PULL_AND_WORD, WORD))
            alone, together = spread(pull).median, spread(both)
            rows.append(
                (
                    way.name,
                    split,
                    alone * 1e3,
                    together.median * 1e3,
                    together.p99 * 1e3,
                    (together.median - alone) * 1e6,
                    (ratio(both, pull).median - 1) * 100,
                    spread(word).median * 1e6,
                )
            )
    return Table("The lease word after a pull", columns, tuple(rows))


def behind_table(found: Sequence[Behinds]) -> Table:
    """A word that is asked for while a large read is under way."""
    columns = (
        "way",
        "blocks of the large read, split_batch_size",
        "word, µs",
        "p99",
        "its submission, µs",
        "came after the large read, %",
        "large read, ms",
        "p99",
    )
    rows: list[Row] = []
    for way, by_variant in found:
        for name, samples in by_variant.items():
            word, read = spread(samples, "word_seconds"), spread(samples, "read_seconds")
            post = spread(samples, "word_post_seconds").median
            late = float(column(samples, "is_behind").mean())
            rows.append((way.name, name, *_microseconds((*word, post)), late * 100, *(s * 1e3 for s in read)))
    return Table("A lease word while a large read is under way", columns, tuple(rows))


def reference_table(lines: Sequence[Line]) -> Table:
    """UCX without NIXL."""
    rows = tuple((line.test, line.way, line.num_bytes / 2**20, line.gib_per_second) for line in lines)
    return Table("ucx_perftest", ("test", "way", "MiB", "GiB/s"), rows)


def _microseconds(seconds: Iterable[float]) -> list[float]:
    return [each * 1e6 for each in seconds]
