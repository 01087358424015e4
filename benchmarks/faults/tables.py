"""Results as a reader wants them: one row a case, what it came to with each connector, and the sums."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby

from benchmarks.faults.bed import (
    ANSWER_SECONDS,
    DRAIN_SECONDS,
    HANDSHAKE_SECONDS,
    HELD_SECONDS,
    LEASE_SECONDS,
    POLICY,
    READ_SECONDS,
    RECOVERY_SECONDS,
    Connector,
)
from benchmarks.faults.play import Answer, Case, Kind, Result
from benchmarks.report import Cell, Table
from tests.faults.verdicts import Verdict

Results = Mapping[Connector, Mapping[str, Result]]
TITLES = {Connector.BUILTIN: "built-in", Connector.OURS: "ours"}
SLOW_SECONDS = 2.0
NOT_PLAYED = "not played"


def told(result: Result) -> str:
    """What a case came to, in one cell."""
    if result.problem:
        return f"could not be played: {result.problem}"
    parts = [_answers(result), *result.facts]
    parts += [f"**{name} died**" for name in result.deaths]
    parts += [f"**{name} held {number} blocks for good**" for name, number in result.held.items()]
    if result.aftermath:
        parts.append(f"**until a restart: {result.aftermath}**")
    return "; ".join(filter(None, parts)) or "nothing amiss"


def _answers(result: Result) -> str:
    verdicts = sorted(result.answers, key=lambda answer: list(Verdict).index(Verdict(answer.verdict)))
    parts = []
    for verdict, group in groupby(verdicts, key=lambda answer: Verdict(answer.verdict)):
        answers = list(group)
        text = f"{len(answers)} {verdict}"
        if verdict in (Verdict.WRONG, Verdict.HANG):
            text = f"**{text}**"
        if verdict is Verdict.WRONG:
            text += _how_wrong(answers)
        if verdict is Verdict.EXACT:
            text += _how(result, len(answers))
        slowest = max(answer.seconds for answer in answers)
        if verdict is not Verdict.HANG and slowest > SLOW_SECONDS:
            text += f", after {slowest:.0f} s"
        parts.append(text)
    return ", ".join(parts)


def _how_wrong(answers: Sequence[Answer]) -> str:
    num_texts = sum(answer.is_other_text for answer in answers)
    worst = max(answer.off_by or 0.0 for answer in answers)
    return f" ({num_texts or 'none'} with another text; first token off by up to {worst:.2g})"


def _how(result: Result, num_exact: int) -> str:
    """Where the KV of exact answers came from, if that is known."""
    if result.num_reads is None or result.num(Verdict.WRONG):
        return ""
    if result.num_reads == 0:
        return " (computed by decode)"
    return " (KV moved)" if result.num_reads >= num_exact else f" (KV moved for {result.num_reads})"


def cases_table(cases: Iterable[Case], results: Results) -> Table:
    """Side by side."""
    rows = [
        (case.about, case.kind.value, *(_cell(results, connector, case, told) for connector in Connector))
        for case in cases
    ]
    return Table("What each case came to", ("case", "kind", *TITLES.values()), tuple(rows))


def counters_table(cases: Iterable[Case], results: Results) -> Table:
    """What an operator sees of each case in the engines' metrics."""

    def counted(result: Result) -> str:
        return ", ".join(f"{name} {count}" for name, count in result.counted.items()) or "nothing"

    rows = [(case.name, *(_cell(results, connector, case, counted) for connector in Connector)) for case in cases]
    return Table("What the engines counted", ("case", *TITLES.values()), tuple(rows))


def _cell(results: Results, connector: Connector, case: Case, tell: Callable[[Result], str]) -> str:
    result = results.get(connector, {}).get(case.name)
    return NOT_PLAYED if result is None else tell(result)


def totals_table(results: Results) -> Table:
    """The sums over the cases that were played."""
    sums: dict[str, Callable[[Result], int]] = {
        "cases": lambda result: 1,
        "exact answers": lambda result: result.num(Verdict.EXACT),
        "explicit errors": lambda result: result.num(Verdict.ERROR),
        "connections lost": lambda result: result.num(Verdict.LOST),
        "wrong answers, with status 200": lambda result: result.num(Verdict.WRONG),
        f"no answer within {ANSWER_SECONDS:.0f} s": lambda result: result.num(Verdict.HANG),
        "cases with an engine death": lambda result: bool(result.deaths),
        "cases with blocks held for good": lambda result: bool(result.held),
        "cases after which no KV moves until a restart": lambda result: bool(result.aftermath),
        "cases with any of the last five": lambda result: is_bad(result),
    }
    rows: list[tuple[Cell, ...]] = []
    for what, number in sums.items():
        row: list[Cell] = [what]
        for connector in Connector:
            played = [result for result in results.get(connector, {}).values() if not result.problem]
            row.append(sum(number(result) for result in played) if played else NOT_PLAYED)
        rows.append(tuple(row))
    return Table("In all", ("what", *TITLES.values()), tuple(rows))


def is_bad(result: Result) -> bool:
    """Whether a case did harm: a wrong answer, a hang, a death, lost blocks, or a pair that moves nothing any more."""
    harm = result.num(Verdict.WRONG) + result.num(Verdict.HANG)
    return bool(harm or result.deaths or result.held or result.aftermath)


def assumptions(transport: str) -> dict[str, Cell]:
    """What both beds have, and where they differ."""
    return {
        "model": "tests/models/tiny_hybrid: 5 layers with a window of 128 tokens, 1 with full attention",
        "engines": "1 prefill, 1 decode, one core each, 300 blocks of 32 tokens, eager, bfloat16",
        "NIXL's UCX": transport,
        "kv_load_failure_policy": POLICY,
        "lease, seconds (kv_lease_duration; lease_unclaimed_seconds, lease_renewal_seconds)": LEASE_SECONDS,
        "ours: handshake_seconds": HANDSHAKE_SECONDS,
        "ours: read_seconds (the built-in connector has no such deadline)": READ_SECONDS,
        "ours: drain_seconds": DRAIN_SECONDS,
        "built-in: CPU cores": "as the operator set them (by itself it would move both workers to one core)",
    }


_KINDS = {
    Kind.NONE: "what clients may ask of any engine",
    Kind.ORDINARY: "processes, networks and clients as they are",
    Kind.ROUTER: "a router that mixes requests up",
    Kind.BAD_PARAMS: (
        "kv_transfer_params as a faulty router makes them, or a client who reaches decode through a router that passes "
        "them on; behind a router that replaces what clients send, no client can play these"
    ),
    Kind.STRANGER: "somebody who reaches the side channel's port",
}

NOTES = (
    (
        "Exact: tokens and, where the request ran alone, every listed log probability of the first token are the "
        "single engine's, bit for bit, in one of its two ways to compute the prompt (whole, or the last token apart). "
        "Wrong: status 200 and another answer, seen in its text or only in the log probabilities of its first token, "
        "whose largest difference is given. Answers in company (n=3, lists of prompts) are judged by their text alone. "
        "The prompts are puzzles whose answers depend on all of their KV."
    ),
    "KV moved: decode received it from prefill. Computed by decode: right, but prefill's work was for nothing.",
    (
        f"No answer: the client waited {ANSWER_SECONDS:.0f} s. The built-in connector promises no deadline for a read, "
        "so that such a request may still be answered when its peer returns; ours is configured here to give up a read "
        f"after {READ_SECONDS:.0f} s (its default is longer)."
    ),
    (
        f"Held for good: blocks in use {HELD_SECONDS:.0f} s after the case, twice the lease, that were not in use "
        f"before. Until a restart: hand-offs of new prompts were tried for {RECOVERY_SECONDS:.0f} s; none was moved."
    ),
    (
        "Engines that died, or moved nothing any more, were started anew for the next case. One run of each case: what "
        "depends on timing may come out otherwise another time. Dates and commits of each case are in the JSON file."
    ),
    *(f"{kind.value.capitalize()}: {what}." for kind, what in _KINDS.items()),
)
