"""The runner finds every kind of problem that a case can have, and none where there is none."""

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import requests

from tests.faults.__main__ import totals
from tests.faults.run import Case, NotInjectedError, run_case
from tests.faults.stages import Stages
from tests.faults.verdicts import Judgement, Row, Verdict

GOOD = Judgement(Verdict.EXACT)
STALE = "pd_transfer:outcomes_total/receive_stale"


@dataclass
class Engine:
    """Stands for an engine, as far as the runner looks at it."""

    life: int = 1
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass
class FakeBed:
    """A bed in name only: what it finds after a case is what a test put here."""

    stages: Stages
    transport: str = "cma"
    policy: str = "recompute"
    link: None = None
    prefill: Engine = field(default_factory=Engine)
    decode: Engine = field(default_factory=Engine)
    recovery: Judgement = GOOD
    left: dict[str, Any] = field(default_factory=dict)
    died: list[str] = field(default_factory=list)
    restarted: list[str] = field(default_factory=list)
    words: str = "its last words"
    settle_seconds: float = 0.0
    answer_seconds: float = 10.0

    def counters(self):
        return {name: (getattr(self, name).life, dict(getattr(self, name).metrics)) for name in ("prefill", "decode")}

    def dead(self, patience_seconds):
        return [name for name in self.died if name not in self.restarted]

    def last_words(self, name):
        return self.words

    def restart(self, name):
        self.restarted.append(name)

    def recovers(self):
        return self.recovery

    def leaks(self):
        return self.left


@pytest.fixture
def bed(tmp_path):
    return FakeBed(Stages(tmp_path))


def stale_once(run) -> None:
    """What a case does: one request, counted and answered."""
    run.num_asked += 1
    run.bed.decode.metrics[STALE] = run.bed.decode.metrics.get(STALE, 0.0) + 1
    run.row.judgements.append(GOOD)


CASE = Case("stale", "", stale_once, frozenset({"receive_stale"}))


def test_a_good_case(bed):
    bed.decode.metrics[STALE] = 5.0
    row = run_case(bed, CASE)
    assert not row.problems
    assert row.outcomes == {"receive_stale": 1}


def test_a_new_life_counts_from_zero(bed):
    bed.decode.metrics[STALE] = 5.0

    def die(run) -> None:
        run.bed.decode = Engine(life=2)
        stale_once(run)

    assert run_case(bed, replace(CASE, act=die)).outcomes == {"receive_stale": 1}


def raising(error):
    def act(run) -> None:
        stale_once(run)
        raise error

    return replace(CASE, act=act)


def with_verdict(verdict):
    def act(run) -> None:
        stale_once(run)
        run.row.judgements[-1] = Judgement(verdict)

    return replace(CASE, act=act)


@pytest.mark.parametrize(
    ("change", "case", "numbers"),
    [
        ({"left": {"decode": {"receives": 1}}}, CASE, (0, 1, 0)),
        ({"died": ["decode"]}, CASE, (0, 0, 1)),
        ({"recovery": Judgement(Verdict.HANG)}, CASE, (1, 0, 0)),
        ({"recovery": Judgement(Verdict.WRONG)}, CASE, (0, 0, 0)),
        ({}, raising(NotInjectedError("no read came")), (0, 0, 0)),
        ({}, with_verdict(Verdict.WRONG), (0, 0, 0)),
        ({}, with_verdict(Verdict.HANG), (1, 0, 0)),
        ({}, with_verdict(Verdict.LOST), (0, 0, 0)),
        ({}, replace(CASE, outcomes=frozenset({"receive_failed"})), (0, 0, 0)),
        ({}, replace(CASE, prefill={"lease_expired": 1}), (0, 0, 0)),
        ({}, replace(CASE, never=frozenset({"receive_stale"})), (0, 0, 0)),
        ({"policy": "fail"}, CASE, (0, 0, 0)),
    ],
)
def test_a_problem_is_found(bed, change, case, numbers):
    for name, value in change.items():
        setattr(bed, name, value)
    row = run_case(bed, case)
    assert len(row.problems) == 1
    assert (row.num_hangs, row.num_leaks, row.num_deaths) == numbers
    assert bed.restarted == bed.died


@pytest.mark.parametrize(
    ("words", "may_abort", "died", "num_aborts"),
    [
        ("[vm:1:0:2] ucp_request.inl:356  Fatal: unexpected error: Endpoint timeout", True, "prefill", 1),
        ("[vm:1:0:2]     stubs.c:107  Assertion `0' failed", True, "prefill", 1),
        ("[vm:1:0:2] ucp_request.inl:356  Fatal: unexpected error: Endpoint timeout", False, "prefill", 0),
        ("[vm:1:0:2] ucp_request.inl:356  Fatal: unexpected error: Endpoint timeout", True, "decode", 0),
        ("Segmentation fault", True, "prefill", 0),
    ],
)
def test_only_the_known_abort_of_ucx_is_no_problem(bed, words, may_abort, died, num_aborts):
    bed.words, bed.died = words, [died]
    row = run_case(bed, replace(CASE, may_abort_prefill=may_abort))
    assert (row.num_aborts, row.num_deaths, len(row.problems)) == (num_aborts, 1 - num_aborts, 1 - num_aborts)
    assert bed.restarted == [died]


def test_an_engine_that_dies_afterwards_is_found(bed):
    def recovers() -> Judgement:
        bed.died = ["prefill"]
        raise requests.ConnectionError

    bed.recovers = recovers
    row = run_case(bed, CASE)
    assert row.num_deaths == 1
    assert bed.restarted == ["prefill"]


def test_a_connection_that_breaks_with_its_engine_is_an_answer(bed):
    case = replace(with_verdict(Verdict.LOST), kills_decode=True)
    assert not run_case(bed, case).problems


def test_a_case_without_its_link_is_skipped(bed):
    row = run_case(bed, replace(CASE, needs_link=True))
    assert row.skipped
    assert not row.judgements


def test_totals_tell_what_must_be_zero():
    good = Row("a", "cma", "fail", judgements=[GOOD])
    bad = Row("b", "cma", "fail", [Judgement(Verdict.WRONG)], problems=["x"], num_leaks=1, num_deaths=1, num_hangs=1)
    must_be_zero = [cell for cell in totals([good, bad]).columns[1].cells if "red" in cell or "green" in cell]
    assert must_be_zero == ["[red]1[/]"] * 5
    assert [cell for cell in totals([good]).columns[1].cells if "green" in cell] == ["[green]0[/]"] * 5
