"""From what was measured to tables and verdicts; pure."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from benchmarks.proxy.client import Load, Measured
from benchmarks.proxy.stacks import BARE_AIOHTTP, FASTAPI, OURS, ROUTER
from benchmarks.report import Cell, Table

NUM_EVENTS = 500
DIRECT = ""
"""Instead of a proxy's name: the client asked both engines itself."""

ONE, MANY, STREAM, EVENTS, LARGE = "1 connection", "32 connections", "short streams", "long streams", "1 MB bodies"
LOADS: Mapping[str, Load] = {
    ONE: Load("", seconds=1.0),
    MANY: Load("", connections=32, seconds=2.0),
    STREAM: Load("", seconds=1.0, events=1),
    EVENTS: Load("", connections=24, events=NUM_EVENTS),
    LARGE: Load("", seconds=1.5, body_bytes=1 << 20),
}
WITH_DIRECT = frozenset({ONE, STREAM, LARGE})
"""Loads that the client also puts on the engines themselves."""

MOST_TIMES_ROUTER = 1.5
LEAST_TIMES_BETTER_THAN_FASTAPI = 10.0

Rounds = Mapping[str, Sequence[Measured]]
"""By load; one entry for each round."""


class Figures(msgspec.Struct, frozen=True):
    """Medians of one proxy over all rounds. Times are milliseconds unless they say otherwise."""

    cpu: float
    """CPU time of a request, with 32 connections."""
    cpu_alone: float
    """The same with one."""
    per_second: float
    per_second_alone: float
    first_byte: float
    """What the proxy adds to the time to the first byte, with one connection."""
    stream_first_byte: float
    event_microseconds: float
    """CPU time for each event of a long stream."""
    large_cpu: float
    """CPU time of a request with a body of 1 MB."""
    large_first_byte: float


def figures(of: Rounds, direct: Rounds) -> Figures:
    """The medians of one proxy."""
    cpu = _median(of[MANY], _cpu)
    return Figures(
        cpu=1e3 * cpu,
        cpu_alone=1e3 * _median(of[ONE], _cpu),
        per_second=_median(of[MANY], _per_second),
        per_second_alone=_median(of[ONE], _per_second),
        first_byte=1e3 * _later(of, direct, ONE),
        stream_first_byte=1e3 * _later(of, direct, STREAM),
        # What a stream costs as a request is not an event's doing.
        event_microseconds=1e6 * (_median(of[EVENTS], _cpu) - cpu) / NUM_EVENTS,
        large_cpu=1e3 * _median(of[LARGE], _cpu),
        large_first_byte=1e3 * _later(of, direct, LARGE),
    )


def _median(rounds: Sequence[Measured], figure: Callable[[Measured], float]) -> float:
    return statistics.median(map(figure, rounds))


def _cpu(run: Measured) -> float:
    return run.cpu_seconds / run.num_requests


def _per_second(run: Measured) -> float:
    return run.num_requests / run.seconds


def _first_byte(run: Measured) -> float:
    return statistics.median(run.first_byte_seconds)


def _later(of: Rounds, direct: Rounds, load: str) -> float:
    return _median(of[load], _first_byte) - _median(direct[load], _first_byte)


def cpu_table(found: Mapping[str, Figures]) -> Table:
    """CPU time, user and system, of each proxy's process and its children."""
    columns = ("proxy", "32 connections, ms", "1 connection, ms", "1 MB body, ms", "SSE event, µs", f"times {ROUTER}")
    rows: list[tuple[Cell, ...]] = [
        (name, each.cpu, each.cpu_alone, each.large_cpu, each.event_microseconds, _times(each, found.get(ROUTER)))
        for name, each in found.items()
    ]
    return Table("CPU time of a request", columns, tuple(rows))


def speed_table(found: Mapping[str, Figures]) -> Table:
    """What clients see."""
    columns = ("proxy", "requests/s, 32 connections", "requests/s, 1 connection")
    columns += ("first byte of an answer, ms later", "of a stream, ms later", "after a 1 MB body, ms later")
    rows: list[tuple[Cell, ...]] = [
        (name, each.per_second, each.per_second_alone, each.first_byte, each.stream_first_byte, each.large_first_byte)
        for name, each in found.items()
    ]
    return Table("One proxy on one core, against asking the engines oneself", columns, tuple(rows))


def _times(each: Figures, other: Figures | None) -> Cell:
    return "" if other is None else each.cpu / other.cpu


def targets(found: Mapping[str, Figures]) -> tuple[list[str], bool]:
    """Sentences about our targets, and whether all were met; a target whose rival was left out is none."""
    sentences, met = [], True
    if {OURS, ROUTER} <= found.keys():
        times = found[OURS].cpu / found[ROUTER].cpu
        met &= times <= MOST_TIMES_ROUTER
        sentences.append(
            f"CPU time of a request, {OURS} against {ROUTER}: {times:.2f} times; the target, at most "
            f"{MOST_TIMES_ROUTER}, is {_kept(times <= MOST_TIMES_ROUTER)}."
        )
    if {OURS, FASTAPI} <= found.keys():
        times = found[FASTAPI].cpu / found[OURS].cpu
        met &= times >= LEAST_TIMES_BETTER_THAN_FASTAPI
        sentences.append(
            f"CPU time of a request, {FASTAPI} against {OURS}: {times:.1f} times; the target, at least "
            f"{LEAST_TIMES_BETTER_THAN_FASTAPI:.0f}, is {_kept(times >= LEAST_TIMES_BETTER_THAN_FASTAPI)}."
        )
    if {OURS, BARE_AIOHTTP} <= found.keys():
        share = found[BARE_AIOHTTP].cpu / found[OURS].cpu
        sentences.append(f"aiohttp by itself is {100 * share:.0f} % of what a request costs in {OURS}.")
    return sentences, met


def _kept(is_met: bool) -> str:
    return "met" if is_met else "missed"


def failures(runs: Mapping[str, Rounds]) -> list[str]:
    """A sentence for every proxy that gave wrong answers."""
    sentences = []
    for name, of in runs.items():
        wrong = [run for rounds in of.values() for run in rounds if run.num_failed]
        if wrong:
            number = sum(run.num_failed for run in wrong)
            sentences.append(f"{name or 'the engines'}: {number} answers were wrong, one of them {wrong[0].failure!r}.")
    return sentences


def joined(runs: Mapping[str, Rounds]) -> str:
    """How far the events of long streams were joined on their way; joined ones cost less."""
    share = {
        name: _median(of[EVENTS], lambda run: run.num_pieces / run.num_requests / (NUM_EVENTS + 1))
        for name, of in runs.items()
        if of.get(EVENTS)
    }
    shares = ", ".join(f"{name} {each:.2f}" for name, each in share.items())
    return f"Pieces that the client read for each event of a long stream: {shares}."


def in_short(runs: Iterable[Measured]) -> list[dict[str, float]]:
    """Each run without its single requests."""
    return [
        {
            "seconds": run.seconds,
            "cpu_seconds": run.cpu_seconds,
            "requests": run.num_requests,
            "failed": run.num_failed,
            "pieces": run.num_pieces,
            "first_byte_median_seconds": _first_byte(run),
        }
        for run in runs
    ]
