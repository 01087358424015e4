"""From lives to tables: medians, 99th percentiles, and the ratios that have a target."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from benchmarks.handoff.life import Life, Sample
from benchmarks.pairs import BUILT_IN, CONTENDERS, OURS, UNPINNED
from benchmarks.report import Cell, Table

RIVALS = (UNPINNED, BUILT_IN)
Lives = Sequence[Life]


class Figures(NamedTuple):
    """Of some seconds, in milliseconds."""

    count: int
    median: float
    p99: float


def figures(seconds: Iterable[float]) -> Figures | None:
    """None of nothing. With fewer than 100 values the 99th percentile lies between the two largest."""
    values = [1e3 * each for each in seconds]
    if not values:
        return None
    return Figures(len(values), float(np.percentile(values, 50)), float(np.percentile(values, 99)))


class Column(NamedTuple):
    """What is looked at in a hand-off, in seconds."""

    title: str
    of: Callable[[Sample], float]


HANDED_OFF = Column("hand-off", lambda sample: sample.seconds)
FLOOR = Column("floor", lambda sample: sample.floor)
ABOVE = Column("above the floor", lambda sample: sample.seconds - sample.floor)
PULL = Column("allocation to finished_recving", lambda sample: sample.pull)
TARGET_HOOKS = (
    "build_connector_meta",
    "bind_connector_metadata",
    "start_load_kv",
    "get_transfer_results",
    "get_block_ids_with_load_errors",
    "build_connector_worker_meta",
)
"""Building the orders, posting them and draining what came of them: what the target is for."""
THREADS = Column("orders: built, posted, drained", lambda sample: sum(sample.hooks.get(h, 0.0) for h in TARGET_HOOKS))
ALL_HOOKS = Column("all hooks", lambda sample: sum(sample.hooks.values()))


def samples(lives: Lives, contender: str, kind: str, num_tokens: int | None = None) -> list[Sample]:
    """Of all lives of a contender."""
    return [
        sample
        for life in lives
        if life.contender == contender
        for sample in life.samples
        if sample.kind == kind and num_tokens in (None, sample.num_tokens)
    ]


def contenders(lives: Lives) -> list[str]:
    """Those that were measured, ours first."""
    measured = {life.contender for life in lives}
    return [name for name in CONTENDERS if name in measured]


def times_table(lives: Lives, title: str, kind: str) -> Table:
    """Median and 99th percentile of one kind of hand-off, by length and contender."""
    columns = (HANDED_OFF, FLOOR, ABOVE, PULL)
    headings = [f"{column.title}, {which}" for column in columns for which in ("median", "p99")]
    rows: list[tuple[Cell, ...]] = []
    for num_tokens in sorted({sample.num_tokens for life in lives for sample in life.samples if sample.kind == kind}):
        for name in contenders(lives):
            if found := samples(lives, name, kind, num_tokens):
                cells = [cell for column in columns for cell in _pair(figures(map(column.of, found)))]
                rows.append((num_tokens, CONTENDERS[name].title, len(found), *cells))
    return Table(f"{title}, ms", ("prompt tokens", "connector", "count", *headings), tuple(rows))


def _pair(found: Figures | None) -> tuple[Cell, Cell]:
    return ("", "") if found is None else (round(found.median, 2), round(found.p99, 2))


def contacts_table(lives: Lives) -> Table:
    """First hand-offs between two engines, beside later ones of about the same length."""
    rows: list[tuple[Cell, ...]] = []
    for kind, title in (("contact", "greeted when its first prompt comes"), ("greeted", "greeted at start-up")):
        for name in contenders(lives):
            if found := figures(sample.seconds for sample in samples(lives, name, kind)):
                pull = figures(sample.pull for sample in samples(lives, name, kind))
                rows.append((title, CONTENDERS[name].title, found.count, round(found.median, 1), *_pair(pull)[:1]))
    headings = ("how", "connector", "count", "hand-off, median", "allocation to finished_recving, median")
    return Table("First contact, ms", headings, tuple(rows))


def hooks_table(lives: Lives) -> Table:
    """CPU time of decode's two threads in each hook of the connector, for one pull on an idle engine."""
    idle = {name: samples(lives, name, "idle") for name in contenders(lives)}
    hooks = sorted({hook for found in idle.values() for sample in found for hook in sample.hooks})
    rows: list[tuple[Cell, ...]] = []
    for name, found in idle.items():
        for num_tokens in sorted({sample.num_tokens for sample in found}):
            here = [sample for sample in found if sample.num_tokens == num_tokens]
            spent = (statistics.median(sample.hooks.get(hook, 0.0) for sample in here) for hook in hooks)
            steps = statistics.median(sample.steps for sample in here)
            rows.append((CONTENDERS[name].title, num_tokens, steps, *(round(1e6 * each) for each in spent)))
    return Table(
        "Decode's threads in the connector per pull, µs, medians", ("", "tokens", "steps", *hooks), tuple(rows)
    )


EVENTS = {"alone": "alone", "local": "a cached prompt is answered", "pull": "a pull lands"}


def gaps_table(lives: Lives) -> Table:
    """Times between the tokens of one stream."""
    rows: list[tuple[Cell, ...]] = []
    for name in contenders(lives):
        found = {event: figures(gaps(lives, name, event)) for event in EVENTS}
        for event, title in EVENTS.items():
            if (here := found[event]) is not None:
                against = [_ratio(here.p99, other.p99) if other else "" for other in (found["local"], found["alone"])]
                rows.append((CONTENDERS[name].title, title, here.count, *_pair(here), *against))
    headings = ("connector", "meanwhile", "count", "median", "p99", "p99 / p99 with a cached prompt", "p99 / p99 alone")
    return Table("Between two tokens of a stream on decode, ms", headings, tuple(rows))


def gaps(lives: Lives, contender: str, event: str) -> list[float]:
    """Of all lives of a contender, in seconds."""
    return [gap for life in lives if life.contender == contender for gap in life.gaps.get(event, ())]


def _ratio(ours: float, theirs: float) -> Cell:
    return round(ours / theirs, 3) if theirs > 0 else ""


class Target(NamedTuple):
    """What ours is to be, at most, as a multiple of the built-in connector's."""

    title: str
    kind: str
    column: Column
    median: float | None
    p99: float | None


TARGETS = (
    Target("hand-off, steady, idle", "idle", HANDED_OFF, 0.45, 0.5),
    Target("the same above its floor", "idle", ABOVE, 0.35, None),
    Target("the same from allocation to finished_recving", "idle", PULL, 0.45, 0.5),
    Target("hand-off while decode runs a batch", "loaded", HANDED_OFF, 0.4, None),
    Target("the same above its floor", "loaded", ABOVE, None, None),
    Target("first contact", "contact", HANDED_OFF, 0.5, None),
)
GAP_LIMIT = 1.05
THREADS_LIMIT_MICROSECONDS = 150.0


def ratios_table(lives: Lives) -> Table:
    """Ours over each rival, by length, with the target beside it."""
    rows: list[tuple[Cell, ...]] = []
    for target in TARGETS:
        lengths = sorted({sample.num_tokens for sample in samples(lives, OURS.name, target.kind)})
        for num_tokens in lengths:
            ours = figures(map(target.column.of, samples(lives, OURS.name, target.kind, num_tokens)))
            for rival in RIVALS:
                theirs = figures(map(target.column.of, samples(lives, rival.name, target.kind, num_tokens)))
                if ours is not None and theirs is not None:
                    found = (_ratio(ours.median, theirs.median), _ratio(ours.p99, theirs.p99))
                    rows.append((target.title, num_tokens, rival.title, *_judged(target, found)))
    headings = ("what", "prompt tokens", "ours over", "median", "target", "p99", "target", "verdict")
    return Table("Ratios", headings, tuple(rows))


def _judged(target: Target, found: tuple[Cell, Cell]) -> tuple[Cell, ...]:
    limits = (target.median, target.p99)
    held = [value <= limit for value, limit in zip(found, limits, strict=True) if limit and isinstance(value, float)]
    verdict = "" if not held else "met" if all(held) else "missed"
    return found[0], limits[0] or "", found[1], limits[1] or "", verdict


def own_targets_table(lives: Lives) -> Table:
    """Targets that ours has without a rival."""
    rows: list[tuple[Cell, ...]] = []
    for name in contenders(lives):
        title = CONTENDERS[name].title
        for num_tokens in sorted({sample.num_tokens for sample in samples(lives, name, "idle")}):
            found = figures(map(THREADS.of, samples(lives, name, "idle", num_tokens)))
            if found is not None:
                limit = THREADS_LIMIT_MICROSECONDS
                what = "CPU time of the engine's and the worker's thread per pull, µs"
                median = round(1e3 * found.median)
                verdict = "met" if median <= limit else "missed"
                rows.append((title, f"{what}, {num_tokens} tokens; {THREADS.title}", median, limit, verdict))
            found = figures(map(ALL_HOOKS.of, samples(lives, name, "idle", num_tokens)))
            if found is not None:
                rows.append((title, f"the same, {ALL_HOOKS.title}", round(1e3 * found.median), "", ""))
        pull, local = (figures(gaps(lives, name, event)) for event in ("pull", "local"))
        if pull is not None and local is not None:
            ratio = round(pull.p99 / local.p99, 3)
            what = "p99 between tokens, a pull lands / a cached prompt is answered"
            rows.append((title, what, ratio, GAP_LIMIT, "met" if ratio <= GAP_LIMIT else "missed"))
    return Table("Targets that need no rival", ("connector", "what", "found", "target", "verdict"), tuple(rows))


def all_tables(lives: Lives) -> list[Table]:
    """Everything that a report shows."""
    return [
        ratios_table(lives),
        own_targets_table(lives),
        times_table(lives, "Decode is idle", "idle"),
        times_table(lives, "Decode runs a batch", "loaded"),
        hooks_table(lives),
        contacts_table(lives),
        gaps_table(lives),
        lives_table(lives),
    ]


def lives_table(lives: Lives) -> Table:
    """When and beside what each pair lived."""
    rows: list[tuple[Cell, ...]] = [
        (
            life.round,
            CONTENDERS[life.contender].title,
            round(life.start_seconds, 1),
            len(life.samples),
            len(life.failures),
            round(life.other_work, 1),
        )
        for life in lives
    ]
    headings = ("round", "connector", "start, s", "hand-offs", "failed", "other work, % of a core")
    return Table("Lives, in the order of time", headings, tuple(rows))


def notes(lives: Lives) -> list[str]:
    """What a reader of the tables has to know."""
    failed: Mapping[str, list[str]] = {
        CONTENDERS[name].title: [text for life in lives if life.contender == name for text in life.failures]
        for name in contenders(lives)
    }
    said = [
        "Hand-off: from the end of prefill's answer to decode's first token, as a client of both engines sees it.",
        "Floor: the same request right afterwards without params, when decode has all but its last token in its cache.",
        "Every hand-off is a pull that decode's connector noted; what was no pull is counted as failed.",
        "All hooks: also a request's arrival (grant and prompt are judged), its admission, and its end.",
        "Other work: niced processes on the same two cores, which yield to the engines.",
    ]
    said += [f"Failed with {title}: {text}" for title, texts in failed.items() for text in texts[:3]]
    return said
