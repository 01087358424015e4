"""``scripts/bench transfer``: pulls over real NIXL between two processes on one machine, without an engine.

Our transport against one large READ, against memcpy, and against the built-in worker's descriptors for the same
blocks; over CMA and over TCP. In every experiment the variants take turns.
"""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from benchmarks.report import RESULTS, Table, new_report, show, write
from benchmarks.transfer import ucx
from benchmarks.transfer.bed import CMA_APART, CMA_TOGETHER, TCP, WAYS, Cores
from benchmarks.transfer.runs import FULL, QUICK, Pace, run_behind, run_pulls, run_receives, run_words
from benchmarks.transfer.subject import BLOCK_SIZE, MODELS, SIZES_MIB, Subject, make_subject
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
    reference_table,
    words_table,
)
from benchmarks.transfer.verdicts import verdicts_table

WORD_MIB = 4
WORD_SUBJECT = "gemma-3-4b"
REFERENCE_SIZES = tuple(size * 2**20 for size in SIZES_MIB)


def main(arguments: Sequence[str]) -> int:
    """The exit status is 0 when every read brought the bytes that it named, whatever the targets."""
    parser = argparse.ArgumentParser(prog="scripts/bench transfer", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a minute instead of five; fewer samples, wider spreads")
    parser.add_argument(
        "--cores", type=int, nargs=2, metavar=("SERVING", "READING"), help="default: the first two of this process"
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for transfer.json and transfer.md")
    options = parser.parse_args(arguments)
    own = sorted(os.sched_getaffinity(0))
    if options.cores is None and len(own) < 2:
        parser.error("two cores are needed")
    cores, pace = Cores(*(options.cores or own[:2])), QUICK if options.quick else FULL
    console = Console(width=None if Console().is_terminal else 180)
    subjects = [make_subject(name, path) for name, path in MODELS.items()]
    tables = measure(subjects, cores, pace, console)
    reference, note = refer(cores, pace, console)
    report = new_report("transfer", arguments, [*tables, *reference], [*explanations(), note], assumptions(cores))
    show(report, console)
    console.print(f"written: {', '.join(map(str, write(report, options.out)))}")
    return 0


def measure(subjects: Sequence[Subject], cores: Cores, pace: Pace, console: Console) -> list[Table]:
    """All experiments over NIXL, one after the other. Raises RuntimeError when a read brought other bytes."""
    pulls, receives, words, behinds = [], [], [], []
    for way in WAYS:
        for subject in subjects:
            with console.status(f"pulls: {way.name}, {subject.name}"):
                pulls.append(Pulls(way, subject, run_pulls(way, cores, subject, pace)))
    for way in (CMA_TOGETHER, TCP):
        for subject in subjects:
            with console.status(f"receives: {way.name}, {subject.name}"):
                receives.append(Receives(way, subject, run_receives(way, cores, subject, pace)))
    subject = next(each for each in subjects if each.name == WORD_SUBJECT)
    small = subject.reading(WORD_MIB, "contiguous")
    large = [subject.reading(max(SIZES_MIB), numbering) for numbering in ("contiguous", "scattered")]
    for way in WAYS:
        with console.status(f"lease words: {way.name}"):
            words.append(Words(way, run_words(way, cores, small, subject, pace)))
            behinds.append(Behinds(way, run_behind(way, cores, large, subject, pace)))
    return [
        verdicts_table(pulls, receives, words),
        *map(pulls_table, pulls),
        measures_table(pulls),
        posting_table(pulls),
        receives_table(receives),
        words_table(words),
        behind_table(behinds),
    ]


def refer(cores: Cores, pace: Pace, console: Console) -> tuple[list[Table], str]:
    """UCX's own figures, and where they come from or why there are none."""
    program = ucx.find_program()
    if program is None:
        return [], "ucx_perftest is not installed (wheel libucx-cu12), so that its reference lines are absent."
    with console.status("ucx_perftest"):
        lines = ucx.measure(program, cores, REFERENCE_SIZES, 5 * pace.least)
    return [reference_table(lines)], f"ucx_perftest: {program.version}; NIXL brings its own UCX."


def assumptions(cores: Cores) -> dict[str, str | int | float]:
    """What the tables do not say."""
    return {
        "tokens of a block": BLOCK_SIZE,
        "core of the serving process": cores.serving,
        "core of the reading process": cores.reading,
        CMA_APART.name: "NIXL's worker thread runs on the serving process's core; the caller polls without a pause",
        f"{CMA_TOGETHER.name}, {TCP.name}": "the caller and the worker thread share a core; it polls as our I/O thread",
        "memory": "NumPy arrays of both processes, in huge pages where the kernel gives them",
        "plain agent": "NIXL's defaults, but no progress thread: one that polls would take a core from all variants",
        "built-in": "its descriptors on an agent as vLLM makes it, but for the progress thread; no notification",
    }


def explanations() -> list[str]:
    """How to read the tables."""
    return [
        "Medians and p99 of one run; ratios are medians of ratios round by round, over 1 where ours is the faster.",
        "On one core the worker thread may take over as soon as it is woken: submit_read then returns late.",
        "submit_read waits until the worker thread has posted every descriptor; it uses no CPU meanwhile.",
        "The built-in worker reads a group's blocks in every region that groups share: for gemma-3-4b 3 % more bytes.",
    ]
