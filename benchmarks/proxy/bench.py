"""``scripts/bench proxy``: what a request costs in our proxy, in vLLM's router and in a proxy of the usual kind.

All of them stand in front of the same mock engines in one run, and take turns. The exit status is 0 when every answer
was right and our targets were met. ``--streams N`` measures N open streams in our proxy instead.
"""

import argparse
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

from rich.console import Console

from benchmarks.proxy import streams
from benchmarks.proxy.client import Measured
from benchmarks.proxy.figures import (
    DIRECT,
    LOADS,
    WITH_DIRECT,
    cpu_table,
    failures,
    figures,
    in_short,
    joined,
    speed_table,
    targets,
)
from benchmarks.proxy.stacks import COMMANDS, OURS, Bed, running_bed
from benchmarks.report import RESULTS, Report, new_report, show, write

EVENT_SECONDS = 0.004
_PACKAGES = ("aiohttp", "uvloop", "httptools", "vllm-router", "fastapi", "uvicorn", "httpx")


def main(arguments: Sequence[str]) -> int:
    """Measure, and leave a report."""
    parser = argparse.ArgumentParser(prog="scripts/bench proxy", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="turns of each proxy")
    parser.add_argument("--only", action="append", choices=list(COMMANDS), help="this proxy; may be repeated")
    parser.add_argument("--streams", type=int, metavar="N", help="measure N open streams in our proxy instead")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for proxy.json and proxy.md")
    options = parser.parse_args(arguments)
    console = Console(width=None if Console().is_terminal else 160)
    if options.streams is None:
        names = options.only or list(COMMANDS)
        with running_bed(names, EVENT_SECONDS) as bed, console.status("measuring"):
            runs = measure(bed, names, options.rounds)
        report, good = report_of(runs, arguments)
    else:
        report, good = streams.measure(options.streams, options.only or [OURS], arguments)
    show(report, console)
    console.print(f"written: {', '.join(map(str, write(report, options.out)))}")
    return 0 if good else 1


Runs = Mapping[str, Mapping[str, Sequence[Measured]]]
"""By proxy and load."""


def measure(bed: Bed, names: Sequence[str], rounds: int) -> Runs:
    """All loads on all proxies, in turns."""
    runs: dict[str, dict[str, list[Measured]]] = {name: {load: [] for load in LOADS} for name in (DIRECT, *names)}
    for _ in range(rounds):
        for what, load in LOADS.items():
            for name in (*([DIRECT] if what in WITH_DIRECT else []), *names):
                runs[name][what].append(bed.measure(name, load))
    return runs


def report_of(runs: Runs, arguments: Sequence[str]) -> tuple[Report, bool]:
    """The report, and whether all answers were right and all targets met."""
    found = {name: figures(of, runs[DIRECT]) for name, of in runs.items() if name != DIRECT}
    wrong = failures(runs)
    sentences, met = targets(found)
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in _PACKAGES)
    notes = [*wrong, *sentences, joined(runs), f"Versions: {versions}."]
    data = {name or "direct": {what: in_short(rounds) for what, rounds in of.items()} for name, of in runs.items()}
    return new_report("proxy", arguments, [cpu_table(found), speed_table(found)], notes, data=data), met and not wrong
