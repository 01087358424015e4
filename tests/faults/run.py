"""Runs one case of the matrix on a bed, and judges answers, deadlines, counters, lives and the ledger."""

import contextlib
import functools
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import requests

from tests.faults.bed import Bed, Question
from tests.faults.client import LeavingClient, post
from tests.faults.forwarder import Fault, Forwarder
from tests.faults.stages import Stage
from tests.faults.verdicts import PER_REQUEST, Judgement, Reply, Row, Verdict, judge, num_counted, why_unexpected
from tests.stack.engines import Engine, StackError

_OUTCOME = "pd_transfer:outcomes_total/"
INJECTION_SECONDS = 15.0
"""A fault that is not in place after this is not coming."""


@dataclass(frozen=True)
class Case:
    """A fault at a stage: what happens, in words and as a function.

    ``outcomes`` are those that decode may count for the requests that came with params; none of them when it counts in
    another life. ``decode`` and ``prefill`` name other counters and what they gain at least, ``never`` what decode
    must not count. ``transports`` are those that the fault exists on. With ``kills_decode`` a lost connection is an
    answer. With ``may_abort_prefill`` an agent is destroyed in the middle of a read over TCP, which UCX, at the other
    end, is known not to survive.
    """

    name: str
    about: str
    act: Callable[["Run"], None]
    outcomes: frozenset[str]
    decode: Mapping[str, int] = field(default_factory=dict)
    prefill: Mapping[str, int] = field(default_factory=dict)
    never: frozenset[str] = frozenset()
    transports: Sequence[str] = ("cma", "tcp")
    restarts: bool = False
    needs_link: bool = False
    kills_decode: bool = False
    may_abort_prefill: bool = False


class Book:
    """The cases of one module, by name."""

    def __init__(self) -> None:
        self.cases: dict[str, Case] = {}

    def case(self, *outcomes: str, **options: Any) -> Callable[[Callable[["Run"], None]], Callable[["Run"], None]]:
        """Register a function; see ``Case``. Its name and docstring are the case's."""

        def register(act: Callable[["Run"], None]) -> Callable[["Run"], None]:
            self._add(act.__name__, act.__doc__, act, outcomes, options)
            return act

        return register

    def at_stages(
        self, outcomes: Mapping[Stage, Sequence[str]], **options: Any
    ) -> Callable[[Callable[["Run", Stage], None]], Callable[["Run", Stage], None]]:
        """Register a function of a stage once for each stage that has outcomes."""

        def register(act: Callable[["Run", Stage], None]) -> Callable[["Run", Stage], None]:
            for stage, expected in outcomes.items():
                name = f"{act.__name__}_{stage.replace('-', '_')}"
                about = f"{(act.__doc__ or '').strip().removesuffix('.')} [{stage}]."
                self._add(name, about, functools.partial(_at, act, stage), expected, options)
            return act

        return register

    def _add(
        self,
        name: str,
        about: str | None,
        act: Callable[["Run"], None],
        outcomes: Sequence[str],
        options: Mapping[str, Any],
    ) -> None:
        assert name not in self.cases
        self.cases[name] = Case(name, (about or "").strip().split("\n\n")[0], act, frozenset(outcomes), **options)


def _at(act: Callable[["Run", Stage], None], stage: Stage, run: "Run") -> None:
    act(run, stage)


@dataclass(frozen=True)
class Asked:
    """A request under way."""

    question: Question
    reply: Future[Reply]
    num_choices: int


class NotInjectedError(Exception):
    """A case could not put its fault in place."""


class Run:
    """What a case does things with. Every request that is asked through it is judged; see ``settle``."""

    def __init__(self, bed: Bed, row: Row, stack: contextlib.ExitStack) -> None:
        self.bed = bed
        self.row = row
        self.num_asked = 0
        self._stack = stack
        self._pool = ThreadPoolExecutor(16)
        stack.callback(self._pool.shutdown)
        self._asked: list[Asked] = []

    def ask(self, question: Question, params: Mapping[str, Any] | None, num_choices: int = 1) -> Asked:
        """Ask decode, in the background."""
        if params is not None:
            self.num_asked += num_choices
        # vLLM refuses several greedy samples; so cold, the likeliest token is chosen all the same.
        more = {"n": num_choices, "temperature": 0.01} if num_choices > 1 else {}
        body = question.body(params, **more)
        reply = self._pool.submit(post, self.bed.decode.url, body, self.bed.answer_seconds)
        asked = Asked(question, reply, num_choices)
        self._asked.append(asked)
        return asked

    def ask_and_leave(self, question: Question, params: Mapping[str, Any]) -> LeavingClient:
        """Ask decode as a client that will hang up."""
        self.num_asked += 1
        return LeavingClient(self.bed.decode.url, question.body(params, stream=True))

    def settle(self, alone: bool = True) -> None:
        """Wait for every answer that is due and judge it. A case that has nothing more to do need not call it."""
        for asked in self._asked:
            reply = asked.reply.result()
            judgement = judge(reply, asked.question.oracle, alone, asked.num_choices)
            self.row.judgements.append(replace(judgement, num_choices=asked.num_choices))
        self._asked.clear()

    def moved(self, question: Question | None = None) -> Question:
        """One hand-off as it should be, judged."""
        question = question or self.bed.question()
        self.ask(question, self.bed.hand_off(question))
        self.settle()
        return question

    def forwarder(self, fault: Fault | None = None) -> Forwarder:
        """A forwarder in front of prefill's side channel, until the case is over."""
        return self._stack.enter_context(Forwarder(self.bed.side_channel, fault))

    @contextlib.contextmanager
    def held(self, stage: Stage, question: Question, params: Mapping[str, Any]) -> Iterator[Asked]:
        """Ask, and keep the read at a stage while inside."""
        with self.bed.stages.holding(stage):
            asked = self.ask(question, params)
            self.wait(stage)
            yield asked

    @contextlib.contextmanager
    def held_at(self, *stages: Stage, seed: int) -> Iterator[None]:
        """Ask once for each stage, and keep each read at its own while inside."""
        questions = [self.bed.question(seed=seed + i) for i in range(len(stages))]
        with contextlib.ExitStack() as holds:
            # From the last stage to the first, so that no read is held before its own.
            for stage, question in zip(sorted(stages, key=list(Stage).index, reverse=True), questions, strict=True):
                holds.enter_context(self.held(stage, question, self.bed.hand_off(question)))
            yield

    def wait(self, stage: Stage, count: int = 1) -> None:
        """Wait until reads are held. Raises NotInjectedError."""
        try:
            self.bed.stages.wait(stage, INJECTION_SECONDS, count)
        except TimeoutError as error:
            raise NotInjectedError(str(error)) from None

    def wait_counted(self, engine: Engine, name: str, since: Mapping[str, float], count: int = 1) -> None:
        """Wait until an engine has counted an outcome since it had these metrics. Raises NotInjectedError."""
        key = _OUTCOME + name
        self.wait_metric(engine, key, since.get(key, 0.0) + count)

    def wait_metric(self, engine: Engine, name: str, value: float) -> None:
        """Wait until a metric has risen so far. Raises NotInjectedError."""
        deadline = time.monotonic() + INJECTION_SECONDS
        while self.bed.metrics(engine).get(name, 0.0) < value:
            if time.monotonic() > deadline:
                raise NotInjectedError(f"{engine.name}: {name} did not rise to {value}")
            time.sleep(0.02)

    def must(self, is_so: bool, what: str) -> None:
        """Raise NotInjectedError unless the fault is what it should be."""
        if not is_so:
            raise NotInjectedError(what)


def run_case(bed: Bed, case: Case) -> Row:
    """Run a case, and see to it that the bed is whole afterwards. Raises StackError when it cannot be."""
    row = Row(case.name, bed.transport, bed.policy)
    if case.needs_link and bed.link is None:
        row.skipped = "needs network namespaces"
        return row
    began = time.monotonic()
    bed.stages.clear()
    before = bed.counters()
    num_asked = _act(bed, case, row)
    _bury(bed, case, row)
    try:
        _judge_counters(bed, case, row, before, num_asked)
        _judge_answers(case, row)
        _judge_aftermath(bed, row)
    except (requests.RequestException, ValueError) as error:
        row.problems.append(f"afterwards: {error!r}")
        _bury(bed, case, row)
    row.seconds = time.monotonic() - began
    return row


def _act(bed: Bed, case: Case, row: Row) -> int:
    with contextlib.ExitStack() as stack:
        run = Run(bed, row, stack)
        try:
            case.act(run)
        except (NotInjectedError, StackError, ValueError, requests.RequestException) as error:
            row.problems.append(f"the case could not be played: {error!r}")
        finally:
            bed.stages.clear()
        run.settle()
        return run.num_asked


def _bury(bed: Bed, case: Case, row: Row) -> None:
    """Count and restart the engines that died of the case without its own doing: those it kills, it also restarts."""
    for name in bed.dead(patience_seconds=ABORT_SECONDS if case.may_abort_prefill else 0.0):
        words = bed.last_words(name)
        if case.may_abort_prefill and name == "prefill" and _UCX_ABORT.search(words):
            row.num_aborts += 1
        else:
            row.num_deaths += 1
            row.problems.append(f"{name} died: {words[-500:]}")
        bed.restart(name)


ABORT_SECONDS = 5.0
"""An engine whose worker has died says so after this at the latest."""
_UCX_ABORT = re.compile(r"^\[.*\] +\w+\.\w+:\d+ +(Fatal|Assertion)", re.MULTILINE)


def _judge_counters(
    bed: Bed, case: Case, row: Row, before: Mapping[str, tuple[int, dict[str, float]]], num_asked: int
) -> None:
    wanted = {"decode": dict(case.decode), "prefill": dict(case.prefill)}
    deadline = time.monotonic() + bed.settle_seconds
    while True:
        gained = _gained(before, bed.counters())
        row.outcomes = gained["decode"]
        short = {
            f"{engine} {name}": f"{gained[engine].get(name, 0)} of {count}"
            for engine, counts in wanted.items()
            for name, count in counts.items()
            if gained[engine].get(name, 0) < count
        }
        unexpected = why_unexpected(row, num_asked, case.outcomes) if case.outcomes else []
        unexpected += [f"counted {name}" for name in case.never if name in row.outcomes]
        if (not short and (not unexpected or num_counted(row) >= num_asked)) or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    row.problems += unexpected
    if short:
        row.problems.append(f"counters that did not move: {short}")
    row.outcomes |= {f"prefill {name}": gained["prefill"][name] for name in case.prefill if name in gained["prefill"]}


def _gained(
    before: Mapping[str, tuple[int, dict[str, float]]], after: Mapping[str, tuple[int, dict[str, float]]]
) -> dict[str, dict[str, int]]:
    """What outcomes each engine has counted. A new life begins at zero."""
    gained: dict[str, dict[str, int]] = {}
    for name, (life, metrics) in after.items():
        old_life, old = before[name]
        base = old if life == old_life else {}
        counts = {key: int(value - base.get(key, 0.0)) for key, value in metrics.items() if key.startswith(_OUTCOME)}
        gained[name] = {key.removeprefix(_OUTCOME): count for key, count in counts.items() if count}
    return gained


def _judge_answers(case: Case, row: Row) -> None:
    row.num_hangs += row.num(Verdict.HANG)
    for judgement in row.judgements:
        if judgement.verdict in (Verdict.WRONG, Verdict.HANG):
            row.problems.append(f"{judgement.verdict}: {judgement.detail}")
        elif judgement.verdict is Verdict.LOST and not case.kills_decode:
            row.problems.append(f"a connection broke: {judgement.detail}")


def _judge_aftermath(bed: Bed, row: Row) -> None:
    """The pair must move KV again, and then hold nothing."""
    recovery: Judgement = bed.recovers()
    if recovery.verdict is not Verdict.EXACT:
        row.num_hangs += recovery.verdict is Verdict.HANG
        row.problems.append(f"afterwards: {recovery.verdict}: {recovery.detail}")
    if left := bed.leaks():
        row.num_leaks += 1
        row.problems.append(f"still held: {left}")


def outcome_names(row: Row) -> str:
    """The counters of a row that tell its story, for a table."""
    told = {name: count for name, count in row.outcomes.items() if name in PER_REQUEST or name in _TELLING}
    return " ".join(name if count == 1 else f"{name}*{count}" for name, count in told.items())


_TELLING = ("agent_rebuilt", "receive_retried", "message_malformed", "prefill lease_expired", "prefill lease_reset")
