"""What an answer is worth, and what one case of the matrix came to."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from tests.stack.exactness import difference, generated, tokens

TIE_LOGPROB = 0.2
"""Results on a CPU depend on what else is in the batch. Where two tokens of the single engine are closer than this, a
request in company may choose either; one that is alone may not."""


class Verdict(StrEnum):
    """EXACT: the single engine's answer. ERROR: an error that says so. LOST: the connection went with its engine.

    WRONG: another answer, or an error of no known shape. HANG: no answer before the deadline.
    """

    EXACT = "exact"
    ERROR = "error"
    LOST = "lost"
    WRONG = "wrong"
    HANG = "hang"


@dataclass(frozen=True)
class Reply:
    """What a client saw. ``status`` is None without an HTTP answer; ``trouble`` then says why."""

    status: int | None
    body: Any = None
    trouble: str = ""
    timed_out: bool = False


@dataclass(frozen=True)
class Oracle:
    """The single engine's answer. ``same_history`` is its first token when the last prompt token is computed apart.

    A hand-off computes in the latter way, decode alone in the former; each is bit for bit one of the two.
    """

    tokens: Sequence[str]
    logprobs: Sequence[Mapping[str, float]]
    same_history: Sequence[Mapping[str, float]]


@dataclass(frozen=True)
class Judgement:
    """A verdict and its reason, on an answer of some choices."""

    verdict: Verdict
    detail: str = ""
    num_choices: int = 1


def judge(reply: Reply, oracle: Oracle, alone: bool = True, num_choices: int = 1) -> Judgement:
    """The verdict on a reply. ``alone``: nothing else ran beside it, so that bits can be compared, not tokens only."""
    if reply.timed_out:
        return Judgement(Verdict.HANG, reply.trouble)
    if reply.status is None:
        return Judgement(Verdict.LOST, reply.trouble)
    if reply.status != 200:
        return _judge_error(reply)
    for choice in range(num_choices):
        try:
            wrong = _why_wrong(reply.body, oracle, alone, choice)
        except (KeyError, IndexError, TypeError) as error:
            wrong = f"not an answer: {error!r} in {str(reply.body)[:200]}"
        if wrong:
            return Judgement(Verdict.WRONG, f"choice {choice}: {wrong}")
    return Judgement(Verdict.EXACT)


def _judge_error(reply: Reply) -> Judgement:
    error = reply.body.get("error") if isinstance(reply.body, dict) else None
    if isinstance(error, dict) and isinstance(error.get("message"), str) and error.get("code") == reply.status:
        return Judgement(Verdict.ERROR, f"{reply.status} {error.get('type')}: {error['message']}")
    return Judgement(Verdict.WRONG, f"an error without OpenAI's shape: {reply.status} {str(reply.body)[:200]}")


def _why_wrong(body: Mapping[str, Any], oracle: Oracle, alone: bool, choice: int) -> str:
    if body["choices"][choice]["finish_reason"] == "error":
        return "finish_reason is error, with status 200"
    got = tokens(body, choice)
    if len(got) != len(oracle.tokens):
        return f"{len(got)} tokens, of {len(oracle.tokens)}"
    for place, (ours, theirs) in enumerate(zip(got, oracle.tokens, strict=True)):
        if ours != theirs:
            if not alone and _is_tie(oracle.logprobs[place], ours, theirs):
                return ""  # what follows another token cannot be compared
            return f"token {place} is {ours}, not {theirs}"
    if alone:
        first = generated(body, choice)[:1]
        worst = min(difference(first, want) for want in (oracle.logprobs[:1], oracle.same_history))
        if worst != 0.0:
            return f"the first token's log probabilities differ by {worst}"
    return ""


def _is_tie(top: Mapping[str, float], ours: str, theirs: str) -> bool:
    return ours in top and top[theirs] - top[ours] < TIE_LOGPROB


LOSSES = frozenset({"receive_stale", "receive_failed", "receive_timed_out", "receive_uncovered"})
"""Outcomes after which the policy decides what the client gets."""
PER_REQUEST = LOSSES | {
    "params_invalid",
    "grant_malformed",
    "grant_forged",
    "grant_other_prompt",
    "grant_other_layout",
    "grant_other_boot",
    "grant_used",
    "grant_expired",
    "peer_unreachable",
    "peer_refused",
    "peer_not_allowed",
    "nothing_to_read",
    "withdrawn",
    "receive_verified",
    "receive_aborted",
}
"""Of these decode counts exactly one for each request that comes with params."""


@dataclass
class Row:
    """One case as it went. It is good when ``problems`` is empty; the numbers tell what kind they are of.

    ``num_aborts`` counts deaths that UCX is known for, which are no problem of ours; docs/operations.md tells of them.
    """

    name: str
    transport: str
    policy: str
    judgements: list[Judgement] = field(default_factory=list)
    outcomes: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    num_hangs: int = 0
    num_leaks: int = 0
    num_deaths: int = 0
    num_aborts: int = 0
    seconds: float = 0.0
    skipped: str = ""

    def num(self, verdict: Verdict) -> int:
        """How many answers got a verdict."""
        return sum(judgement.verdict is verdict for judgement in self.judgements)


def num_counted(row: Row) -> int:
    """How many requests decode has counted."""
    return sum(count for name, count in row.outcomes.items() if name in PER_REQUEST)


def why_unexpected(row: Row, num_asked: int, allowed: frozenset[str]) -> list[str]:
    """What of a case's verdicts and counters is not as the outcomes and the policy demand."""
    counted = {name: count for name, count in row.outcomes.items() if name in PER_REQUEST}
    problems = []
    if others := {name: count for name, count in counted.items() if name not in allowed}:
        problems.append(f"counted {others}, of {sorted(allowed)}: was the fault injected?")
    if sum(counted.values()) != num_asked:
        problems.append(f"{num_asked} requests had params, {counted} were counted")
    num_lost = sum(counted.get(name, 0) for name in LOSSES)
    num_errors = sum(judgement.num_choices for judgement in row.judgements if judgement.verdict is Verdict.ERROR)
    if num_errors != (num_lost if row.policy == "fail" else 0):
        problems.append(f"{num_errors} errors under {row.policy}, with {num_lost} reads lost")
    return problems
