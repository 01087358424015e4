"""Plays one case on a bed, and writes down what came of it."""

import contextlib
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

import msgspec
import requests

from tests.faults.bed import Question
from tests.faults.verdicts import Oracle, Reply, Verdict, judge
from tests.stack.engines import StackError
from tests.stack.exactness import generated


class Kind(StrEnum):
    """Who is to blame, as far as anybody is."""

    NONE = "no fault"
    ORDINARY = "ordinary fault"
    ROUTER = "router's mistake"
    BAD_PARAMS = "bad params"
    STRANGER = "stranger"


class Answer(msgspec.Struct, frozen=True):
    """One choice of one answer of decode.

    ``verdict`` and ``detail`` are those of the fault matrix. ``off_by``: the largest difference of the first token's
    log probabilities to the single engine's, over the tokens that both list; None without an answer.
    """

    verdict: str
    detail: str
    seconds: float
    off_by: float | None = None

    @property
    def is_other_text(self) -> bool:
        """Whether a wrong answer is visibly so, and not only in its log probabilities."""
        return re.search(r"token \d+ is", self.detail) is not None


class Result(msgspec.Struct, kw_only=True):
    """What came of a case with one connector.

    ``num_reads``: times that decode received KV while the case was played, unknown (None) when decode has died of it.
    ``held``: blocks in use after every lease must be over, by engine. ``counted``: what the engines' own metrics say.
    ``aftermath``: why the pair hands nothing over any more; empty when it does, or when the case has ended an engine.
    ``problem``: why the case could not be played, and nothing else counts then. ``when`` and ``commit`` of the run.
    """

    answers: list[Answer] = []
    facts: list[str] = []
    num_reads: int | None = None
    deaths: list[str] = []
    held: dict[str, int] = {}
    counted: dict[str, int] = {}
    aftermath: str = ""
    problem: str = ""
    seconds: float = 0.0
    when: str = ""
    commit: str = ""

    def num(self, verdict: Verdict) -> int:
        """How many answers got a verdict."""
        return sum(answer.verdict == verdict for answer in self.answers)


Counts = Mapping[str, tuple[int, dict[str, int], int]]
"""By engine: its life, what it has counted, and how many times it has received KV."""


class Bed(Protocol):
    """What a case may do to a pair of engines; ``SidedBed`` does it to real ones."""

    side_channel: tuple[str, int]
    has_greeted: bool
    is_broken: bool

    def question(self, num_tokens: int = ..., seed: int = ...) -> Question: ...
    def hand_off(self, question: Question) -> dict[str, Any]: ...
    def ask(self, body: Mapping[str, Any]) -> Reply: ...
    def ask_prefill(self, prompts: Sequence[Sequence[int]], salt: str) -> Mapping[str, Any]: ...
    def ask_and_leave(self, body: Mapping[str, Any]) -> None: ...
    def churn(self) -> None: ...
    def forget(self, name: str) -> None: ...
    def kill(self, name: str) -> None: ...
    def paused(self, name: str) -> contextlib.AbstractContextManager[None]: ...
    def restart(self, name: str) -> object: ...
    def restart_with_same_id(self, name: str) -> None: ...
    def heal(self, except_for: Sequence[str] = ...) -> None: ...
    def dead(self, patience_seconds: float = ...) -> list[str]: ...
    def counts(self) -> Counts: ...
    def wait_free(self, name: str, seconds: float = ...) -> tuple[float, int]: ...
    def still_held(self) -> dict[str, int]: ...
    def why_no_recovery(self) -> str: ...


class NotPlayedError(Exception):
    """A case could not put its fault in place, so that it shows nothing."""


class Play:
    """What a case does things with. Every request that is asked through ``ask`` is judged."""

    def __init__(self, bed: Bed, result: Result) -> None:
        self.bed = bed
        self.result = result
        self.before = bed.counts()

    def ask(self, question: Question, params: Mapping[str, Any]) -> Answer:
        """One question to decode, alone."""
        began = time.monotonic()
        reply = self.bed.ask(question.body(params))
        answer = judged(reply, question.oracle, time.monotonic() - began)
        self.result.answers.append(answer)
        return answer

    def ask_in_company(self, body: Mapping[str, Any], oracles: Sequence[Oracle]) -> None:
        """One request of several choices, each judged by its own oracle: by its text, not by the last bit."""
        began = time.monotonic()
        reply = self.bed.ask(body)
        seconds = time.monotonic() - began
        for choice, oracle in enumerate(oracles):
            self.result.answers.append(judged(only_choice(reply, choice), oracle, seconds, alone=False))

    def works(self, question: Question, params: Mapping[str, Any]) -> None:
        """A hand-off that the case builds on and that is not counted. Raises NotPlayedError when it is not exact."""
        reply = self.bed.ask(question.body(params))
        judgement = judge(reply, question.oracle)
        if judgement.verdict is not Verdict.EXACT:
            raise NotPlayedError(f"the hand-off before the fault: {judgement.verdict}: {judgement.detail}")
        self.before = self.bed.counts()

    def is_released(self, name: str) -> float:
        """Wait until an engine has freed its blocks; the seconds. Raises NotPlayedError when it does not."""
        seconds, num_held = self.bed.wait_free(name)
        if num_held:
            raise NotPlayedError(f"{name} still holds {num_held} blocks after {seconds:.0f} s")
        return seconds


def only_choice(reply: Reply, choice: int) -> Reply:
    """The same reply with one of its choices; a reply without that choice stays as it is."""
    body = reply.body
    if not isinstance(body, dict) or reply.status != 200 or len(body.get("choices", [])) <= choice:
        return reply
    return Reply(reply.status, {**body, "choices": [body["choices"][choice]]})


def judged(reply: Reply, oracle: Oracle, seconds: float, alone: bool = True) -> Answer:
    """What a reply is worth, and how far off it is."""
    judgement = judge(reply, oracle, alone)
    return Answer(judgement.verdict.value, judgement.detail, round(seconds, 2), off_by(reply, oracle))


def off_by(reply: Reply, oracle: Oracle) -> float | None:
    """The smaller of the differences to the two ways in which a single engine may have computed the first token."""
    if reply.status != 200:
        return None
    try:
        got = generated(reply.body)[0]
    except (KeyError, IndexError, TypeError):
        return None
    shared = [got.keys() & want.keys() for want in (oracle.logprobs[0], oracle.same_history[0])]
    differences = [
        max(abs(got[token] - want[token]) for token in tokens)
        for want, tokens in zip((oracle.logprobs[0], oracle.same_history[0]), shared, strict=True)
        if tokens
    ]
    return min(differences, default=None)


@dataclass(frozen=True)
class Case:
    """A fault, in words and as a function.

    ``restarts``: engines that the case starts anew itself, dead or alive. ``ends``: those that it ends and leaves so.
    ``needs_new_pair``: decode must not have met prefill yet. ``patience_seconds``: how long after the case an engine
    may take to die of it.
    """

    name: str
    about: str
    kind: Kind
    act: Callable[[Play], None]
    restarts: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    needs_new_pair: bool = False
    patience_seconds: float = 1.0


def run_case(bed: Bed, case: Case) -> Result:
    """Play a case on a pair that is whole, and look at the pair afterwards. Raises StackError when it cannot start."""
    bed.heal(case.restarts)
    if case.needs_new_pair and bed.has_greeted:
        bed.restart("prefill")
    result, began = Result(), time.monotonic()
    play = Play(bed, result)
    try:
        case.act(play)
    except (NotPlayedError, StackError, ValueError, requests.RequestException) as error:
        result.problem = repr(error)
    result.deaths = [name for name in bed.dead(case.patience_seconds) if name not in case.ends]
    result.held = bed.still_held()
    _count(result, play.before, bed.counts())
    if not result.deaths and not case.ends:
        result.aftermath = bed.why_no_recovery()
        if late := bed.dead():
            result.deaths, result.aftermath = late, ""
    bed.is_broken = bool(result.aftermath)
    result.seconds = round(time.monotonic() - began, 1)
    return result


def _count(result: Result, before: Counts, after: Counts) -> None:
    """What the engines have counted since; a new life begins at zero, and a dead engine tells nothing."""
    for name, (life, counts, num_reads) in after.items():
        old_life, old, old_reads = before.get(name, (None, {}, 0))
        if life != old_life:
            old, old_reads = {}, 0
        gained = {key: count - old.get(key, 0) for key, count in counts.items()}
        result.counted |= {f"{name}: {key}": count for key, count in gained.items() if count}
        if name == "decode":
            result.num_reads = num_reads - old_reads
