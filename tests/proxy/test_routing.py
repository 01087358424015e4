"""How an engine is chosen, and which one may be asked again."""

import itertools

import pytest

from proxy.errors import EngineFailedError, FailureKind
from proxy.health import Standing
from proxy.routing import (
    AFFINITY_SLACK_TOKENS,
    MAX_ATTEMPTS,
    POLICIES,
    Attempts,
    EngineLoad,
    Hints,
    least_tokens,
    pick,
    prefix_affinity,
    round_robin,
    session_affinity,
)


def loads(*tokens):
    return [EngineLoad(url, tokens=count) for url, count in zip("abcdef", tokens, strict=False)]


@pytest.mark.parametrize("tokens", list(itertools.product([0, 5, 9], repeat=3)))
@pytest.mark.parametrize("turn", range(4))
def test_the_fewest_tokens_win(tokens, turn):
    assert least_tokens(loads(*tokens), Hints(turn=turn)).tokens == min(tokens)


def test_equal_loads_take_turns():
    assert [least_tokens(loads(3, 3, 9), Hints(turn=turn)).url for turn in range(6)] == ["a", "b", "a", "a", "b", "a"]
    assert [least_tokens(loads(0, 0), Hints(turn=turn)).url for turn in range(4)] == ["a", "b", "a", "b"]


def test_equal_tokens_leave_it_to_the_requests():
    engines = [EngineLoad("a", requests=2, tokens=5), EngineLoad("b", requests=1, tokens=5)]
    assert {least_tokens(engines, Hints(turn=turn)).url for turn in range(4)} == {"b"}


def test_round_robin_ignores_loads():
    assert [round_robin(loads(100, 0, 0), Hints(turn=turn)).url for turn in range(5)] == ["a", "b", "c", "a", "b"]


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
@pytest.mark.parametrize("turn", range(3))
def test_picking_is_pure_and_never_takes_an_excluded_engine(policy, turn):
    engines = loads(0, 1, 2)
    for size in range(4):
        for excluded in itertools.combinations("abc", size):
            url = pick(engines, set(excluded), policy, Hints(b"prefix", b"session", turn))
            assert (url is None) is (size == 3)
            assert url not in excluded
            assert url == pick(engines, set(excluded), policy, Hints(b"prefix", b"session", turn))


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
@pytest.mark.parametrize("turn", range(3))
def test_a_suspect_engine_is_the_last_resort(policy, turn):
    hints = Hints(b"prefix", b"session", turn)
    suspect = EngineLoad("bad", standing=Standing.SUSPECT)
    assert pick([suspect, EngineLoad("good", tokens=10**6)], set(), policy, hints) == "good"
    assert pick([suspect, EngineLoad("new", standing=Standing.UNKNOWN)], set(), policy, hints) == "new"
    assert pick([suspect, EngineLoad("good")], {"good"}, policy, hints) == "bad"
    assert pick([suspect], set(), policy, hints) == "bad"


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
@pytest.mark.parametrize("standing", [Standing.DOWN, Standing.DRAINING])
def test_an_engine_out_of_rotation_is_never_used(policy, standing):
    out = EngineLoad("out", standing=standing)
    suspect = EngineLoad("bad", standing=Standing.SUSPECT)
    assert pick([out], set(), policy, Hints()) is None
    assert pick([out, suspect], set(), policy, Hints()) == "bad"
    assert pick([out, EngineLoad("good", tokens=10**6)], set(), policy, Hints()) == "good"


AFFINE = [
    (prefix_affinity, lambda key: Hints(prefix=key, session=b"other")),
    (session_affinity, lambda key: Hints(prefix=b"other", session=key)),
]
KEYS = [bytes([number]) * 16 for number in range(100)]


@pytest.mark.parametrize(("policy", "hints"), AFFINE, ids=["prefix", "session"])
def test_equal_keys_meet_at_one_engine_and_keys_are_spread(policy, hints):
    chosen = {key: policy(loads(0, 0, 0, 0), hints(key)).url for key in KEYS}
    assert chosen == {key: policy(loads(9, 0, 300, 2), hints(key)._replace(turn=3)).url for key in KEYS}
    assert all(10 <= list(chosen.values()).count(url) <= 50 for url in "abcd")


@pytest.mark.parametrize(("policy", "hints"), AFFINE, ids=["prefix", "session"])
def test_when_an_engine_leaves_only_its_own_keys_move(policy, hints):
    before = {key: policy(loads(0, 0, 0, 0), hints(key)).url for key in KEYS}
    after = {key: policy(loads(0, 0, 0), hints(key)).url for key in KEYS}
    assert "d" in before.values()
    assert all(after[key] == before[key] for key in KEYS if before[key] != "d")


@pytest.mark.parametrize(("policy", "hints"), AFFINE, ids=["prefix", "session"])
def test_an_engine_with_far_more_to_do_than_the_others_is_passed_over(policy, hints):
    mine = hints(KEYS[0])
    favourite = policy(loads(0, 0), mine).url
    crowd = 4 * AFFINITY_SLACK_TOKENS + 4
    within = [EngineLoad(url, tokens=crowd if url == favourite else crowd // 2) for url in "ab"]
    beyond = [EngineLoad(url, tokens=crowd * 4 if url == favourite else 0) for url in "ab"]
    assert policy(within, mine).url == favourite
    assert policy(beyond, mine).url != favourite


@pytest.mark.parametrize(("policy", "hints"), AFFINE, ids=["prefix", "session"])
def test_without_a_key_the_least_loaded_engine_is_taken(policy, hints):
    assert policy(loads(5, 0, 5), hints(b"")).url == "b"


def failure(kind):
    return EngineFailedError(kind, "x")


@pytest.mark.parametrize(
    ("kind", "asked_again"),
    [
        (FailureKind.UNREACHABLE, False),
        (FailureKind.LOST, True),
        (FailureKind.TIMED_OUT, False),
        (FailureKind.BUSY, False),
        (FailureKind.BROKEN, False),
        (FailureKind.OWN, False),
    ],
)
def test_who_may_be_asked_again(kind, asked_again):
    attempts = Attempts()
    attempts.failed("a", failure(kind))
    assert ("a" not in attempts.excluded) is asked_again
    assert attempts.over is (kind in {FailureKind.TIMED_OUT, FailureKind.OWN})
    assert attempts.last.kind is kind


def test_a_connection_that_breaks_twice_rules_an_engine_out():
    attempts = Attempts()
    attempts.failed("a", failure(FailureKind.LOST))
    attempts.failed("b", failure(FailureKind.LOST))
    assert attempts.excluded == set()
    attempts.failed("a", failure(FailureKind.LOST))
    assert attempts.excluded == {"a"}


def test_an_unusable_answer_is_asked_for_once_more_when_no_other_engine_is_left():
    attempts = Attempts()
    attempts.failed("a", failure(FailureKind.BROKEN))
    attempts.failed("b", failure(FailureKind.BUSY))
    attempts.ask_again()
    assert attempts.excluded == {"b"}
    attempts.failed("a", failure(FailureKind.BROKEN))
    attempts.ask_again()
    assert attempts.excluded == {"a", "b"}


@pytest.mark.parametrize("kind", FailureKind)
def test_engines_that_are_slow_or_busy_are_usable(kind):
    attempts = Attempts()
    assert attempts.none_usable
    attempts.failed("a", failure(kind))
    attempts.failed("b", failure(FailureKind.UNREACHABLE))
    assert attempts.none_usable is (kind in {FailureKind.UNREACHABLE, FailureKind.LOST, FailureKind.BROKEN})


def test_attempts_are_limited():
    attempts = Attempts()
    for number in range(MAX_ATTEMPTS):
        assert not attempts.over
        attempts.failed(f"engine-{number}", failure(FailureKind.UNREACHABLE))
    assert attempts.over
