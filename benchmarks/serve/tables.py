"""The table that serving benchmarks print, and the ratios that have a target."""

import statistics
from collections.abc import Sequence

from benchmarks.pairs import BUILT_IN, OURS, UNPINNED
from benchmarks.report import Cell, Table
from benchmarks.serve.life import NUM_WARMUPS, PULLS, TITLES, Life, Run

COLUMNS = {
    "duration": "s",
    "request_throughput": "req/s",
    "output_throughput": "output tok/s",
    "total_token_throughput": "total tok/s",
    **{
        f"{which}_{what}_ms": f"{what.upper()} {which}, ms"
        for what in ("ttft", "tpot", "itl")
        for which in ("mean", "median", "p99")
    },
}
RIVALS = (UNPINNED.name, BUILT_IN.name)
TARGET_CONCURRENCY = 10
LEAST_THROUGHPUT = 1.05
MOST_TTFT_P99 = 1.0


def runs(lives: Sequence[Life], name: str, concurrency: int) -> list[Run]:
    """Of all rounds."""
    return [run for life in lives if life.contender == name for run in life.runs if run.concurrency == concurrency]


def median(found: Sequence[Run], figure: str) -> float | None:
    """Over the rounds that ended; None when none did."""
    values = [run.figures[figure] for run in found if run.figures is not None]
    return statistics.median(values) if values else None


def concurrencies(lives: Sequence[Life]) -> list[int]:
    """All that were asked for."""
    return sorted({run.concurrency for life in lives for run in life.runs})


def names(lives: Sequence[Life]) -> list[str]:
    """All that were measured: the single engine first, then ours."""
    measured = {life.contender for life in lives}
    return [name for name in TITLES if name in measured]


def serving_table(lives: Sequence[Life], concurrency: int) -> Table:
    """Medians over rounds, each connector a row."""
    rows: list[tuple[Cell, ...]] = []
    for name in names(lives):
        found = runs(lives, name, concurrency)
        ended = [run for run in found if run.figures is not None]
        cells = [_cell(median(found, figure)) for figure in COLUMNS]
        pulls = sum(run.pulls for run in ended) if name in PULLS else ""
        asked = sum(int(run.figures["completed"]) + NUM_WARMUPS for run in ended if run.figures is not None)
        failed = sum(int(run.figures["failed"]) for run in ended if run.figures is not None)
        rows.append((TITLES[name], *cells, f"{len(ended)} of {len(found)}", asked, failed, pulls))
    headings = ("", *COLUMNS.values(), "runs that ended", "requests", "failed", "pulls")
    return Table(f"{concurrency} at a time, medians over rounds", headings, tuple(rows))


def _cell(value: float | None) -> Cell:
    return "" if value is None else round(value, 2)


def spread_table(lives: Sequence[Life]) -> Table:
    """Requests per second of every round, in the order of time."""
    rows: list[tuple[Cell, ...]] = []
    for life in lives:
        cells = {run.concurrency: run.figures["request_throughput"] if run.figures else None for run in life.runs}
        values = (_cell(cells.get(each)) for each in concurrencies(lives))
        rows.append((life.round, TITLES[life.contender], *values, round(life.other_work, 1)))
    headings = ("round", "", *(f"req/s at {each}" for each in concurrencies(lives)), "other work, % of a core")
    return Table("Every round", headings, tuple(rows))


def ratios_table(lives: Sequence[Life]) -> Table:
    """Ours over each rival. Only one concurrency has targets."""
    rows: list[tuple[Cell, ...]] = []
    for concurrency in concurrencies(lives):
        for rival in RIVALS:
            ours, theirs = (runs(lives, name, concurrency) for name in (OURS.name, rival))
            throughput = _ratio(median(ours, "request_throughput"), median(theirs, "request_throughput"))
            ttft = _ratio(median(ours, "p99_ttft_ms"), median(theirs, "p99_ttft_ms"))
            if throughput is None or ttft is None:
                continue
            verdict = ""
            if concurrency == TARGET_CONCURRENCY:
                verdict = "met" if throughput >= LEAST_THROUGHPUT and ttft < MOST_TTFT_P99 else "missed"
            rows.append((concurrency, TITLES[rival], round(throughput, 3), round(ttft, 3), verdict))
    headings = ("at a time", "ours over", f"req/s (at least {LEAST_THROUGHPUT})", "TTFT p99 (below 1)", "verdict")
    return Table("Ratios", headings, tuple(rows))


def _ratio(ours: float | None, theirs: float | None) -> float | None:
    return None if ours is None or not theirs else ours / theirs


def all_tables(lives: Sequence[Life]) -> list[Table]:
    """Everything that a report shows."""
    return [
        ratios_table(lives),
        *(serving_table(lives, concurrency) for concurrency in concurrencies(lives)),
        spread_table(lives),
    ]
