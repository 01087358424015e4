"""Each verdict is reached, and a case that is not what its counters say is found out."""

from typing import Any

import pytest

from pd_transfer.core.outcomes import Outcome
from tests.faults.verdicts import LOSSES, PER_REQUEST, Judgement, Oracle, Reply, Row, Verdict, judge, why_unexpected

LOGPROBS = [{"token_id:1": -0.1, "token_id:2": -2.0}, {"token_id:3": -0.7, "token_id:4": -0.75}]
ORACLE = Oracle(["token_id:1", "token_id:3"], LOGPROBS, [{"token_id:1": -0.11, "token_id:2": -1.9}])


def answer(tokens: list[str], first: dict[str, float] = LOGPROBS[0], num_choices: int = 1) -> Reply:
    choice = {"finish_reason": "length", "logprobs": {"tokens": tokens, "top_logprobs": [first, LOGPROBS[1]]}}
    return Reply(200, {"choices": [choice] * num_choices})


def shaped(code: int, **error: Any) -> Reply:
    return Reply(code, {"error": {"message": "no", "type": "InternalServerError", "code": code, **error}})


RIGHT = list(ORACLE.tokens)


@pytest.mark.parametrize(
    ("reply", "alone", "verdict"),
    [
        (answer(RIGHT), True, Verdict.EXACT),
        (answer(RIGHT, dict(ORACLE.same_history[0])), True, Verdict.EXACT),
        (answer(RIGHT, {"token_id:1": -0.100001, "token_id:2": -2.0}), True, Verdict.WRONG),
        (answer(RIGHT, {"token_id:1": -0.100001, "token_id:2": -2.0}), False, Verdict.EXACT),
        (answer(["token_id:1", "token_id:4"]), True, Verdict.WRONG),
        (answer(["token_id:1", "token_id:4"]), False, Verdict.EXACT),
        (answer(["token_id:2", "token_id:3"]), False, Verdict.WRONG),
        (answer(["token_id:1", "token_id:9"]), False, Verdict.WRONG),
        (answer(["token_id:1"]), False, Verdict.WRONG),
        (Reply(200, {"choices": []}), True, Verdict.WRONG),
        (Reply(200, "text"), True, Verdict.WRONG),
        (shaped(500), True, Verdict.ERROR),
        (shaped(500, message=None), True, Verdict.WRONG),
        (Reply(500, "text"), True, Verdict.WRONG),
        (Reply(None, trouble="refused"), True, Verdict.LOST),
        (Reply(None, trouble="late", timed_out=True), True, Verdict.HANG),
    ],
)
def test_verdicts(reply, alone, verdict):
    assert judge(reply, ORACLE, alone).verdict is verdict


def test_every_choice_is_judged():
    assert judge(answer(RIGHT, num_choices=2), ORACLE, num_choices=2).verdict is Verdict.EXACT
    assert judge(answer(RIGHT, num_choices=1), ORACLE, num_choices=2).verdict is Verdict.WRONG


def row(policy: str, outcomes: dict[str, int], *verdicts: Verdict) -> Row:
    return Row("case", "cma", policy, [Judgement(verdict) for verdict in verdicts], outcomes)


STALE = frozenset({"receive_stale"})


@pytest.mark.parametrize(
    ("found", "num_problems"),
    [
        (row("recompute", {"receive_stale": 1}, Verdict.EXACT), 0),
        (row("fail", {"receive_stale": 1}, Verdict.ERROR), 0),
        (row("fail", {"receive_stale": 1}, Verdict.EXACT), 1),
        (row("recompute", {"receive_stale": 1}, Verdict.ERROR), 1),
        (row("recompute", {"receive_verified": 1}, Verdict.EXACT), 1),
        (row("recompute", {}, Verdict.EXACT), 1),
        (row("recompute", {"receive_stale": 2}, Verdict.EXACT), 1),
        (row("recompute", {"receive_stale": 1, "lease_opened": 5}, Verdict.EXACT), 0),
    ],
)
def test_what_is_unexpected(found, num_problems):
    assert len(why_unexpected(found, 1, STALE)) == num_problems


def test_the_outcomes_exist():
    assert set(Outcome) >= PER_REQUEST > LOSSES
