"""How an engine is chosen, and which one may be asked again."""

import itertools

import pytest

from proxy.errors import EngineFailedError, FailureKind
from proxy.registry import SUSPECT_SECONDS, Registry
from proxy.routing import MAX_ATTEMPTS, POLICIES, Attempts, EngineLoad, Role, least_tokens, pick, round_robin


def loads(*tokens):
    return [EngineLoad(url, tokens=count) for url, count in zip("abcdef", tokens, strict=False)]


@pytest.mark.parametrize("tokens", list(itertools.product([0, 5, 9], repeat=3)))
@pytest.mark.parametrize("turn", range(4))
def test_the_fewest_tokens_win(tokens, turn):
    assert least_tokens(loads(*tokens), turn).tokens == min(tokens)


def test_equal_loads_take_turns():
    assert [least_tokens(loads(3, 3, 9), turn).url for turn in range(6)] == ["a", "b", "a", "a", "b", "a"]
    assert [least_tokens(loads(0, 0), turn).url for turn in range(4)] == ["a", "b", "a", "b"]


def test_equal_tokens_leave_it_to_the_requests():
    engines = [EngineLoad("a", requests=2, tokens=5), EngineLoad("b", requests=1, tokens=5)]
    assert {least_tokens(engines, turn).url for turn in range(4)} == {"b"}


def test_round_robin_ignores_loads():
    assert [round_robin(loads(100, 0, 0), turn).url for turn in range(5)] == ["a", "b", "c", "a", "b"]


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
@pytest.mark.parametrize("turn", range(3))
def test_picking_is_pure_and_never_takes_an_excluded_engine(policy, turn):
    engines = loads(0, 1, 2)
    for size in range(4):
        for excluded in itertools.combinations("abc", size):
            url = pick(engines, set(excluded), policy, turn)
            assert (url is None) is (size == 3)
            assert url not in excluded
            assert url == pick(engines, set(excluded), policy, turn)


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
@pytest.mark.parametrize("turn", range(3))
def test_a_suspect_engine_is_the_last_resort(policy, turn):
    suspect = EngineLoad("bad", suspect=True)
    assert pick([suspect, EngineLoad("good", tokens=10**6)], set(), policy, turn) == "good"
    assert pick([suspect, EngineLoad("good")], {"good"}, policy, turn) == "bad"
    assert pick([suspect], set(), policy, turn) == "bad"


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
    ],
)
def test_who_may_be_asked_again(kind, asked_again):
    attempts = Attempts()
    attempts.failed("a", failure(kind))
    assert ("a" not in attempts.excluded) is asked_again
    assert attempts.over is (kind is FailureKind.TIMED_OUT)
    assert attempts.last.kind is kind


def test_a_connection_that_breaks_twice_rules_an_engine_out():
    attempts = Attempts()
    attempts.failed("a", failure(FailureKind.LOST))
    attempts.failed("b", failure(FailureKind.LOST))
    assert attempts.excluded == set()
    attempts.failed("a", failure(FailureKind.LOST))
    assert attempts.excluded == {"a"}


def test_attempts_are_limited():
    attempts = Attempts()
    for number in range(MAX_ATTEMPTS):
        assert not attempts.over
        attempts.failed(f"engine-{number}", failure(FailureKind.UNREACHABLE))
    assert attempts.over


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def registry(clock):
    return Registry(["p0", "p1"], ["d0"], least_tokens, clock)


def test_loads_count_from_the_choice_to_the_end(registry):
    first = registry.begin(Role.PREFILL, "p0", 100)
    with registry.load(Role.PREFILL, "p1", 10):
        assert [(load.requests, load.tokens) for load in registry.engines(Role.PREFILL)] == [(1, 100), (1, 10)]
        assert registry.pick(Role.PREFILL, set()) == "p1"
    first.end()
    first.end()
    assert [(load.requests, load.tokens) for load in registry.engines(Role.PREFILL)] == [(0, 0), (0, 0)]


def test_a_load_ends_when_its_request_fails(registry):
    with pytest.raises(ZeroDivisionError), registry.load(Role.DECODE, "d0", 5):
        _ = 1 / 0
    assert registry.engines(Role.DECODE)[0].requests == 0


def test_roles_take_turns_on_their_own(registry):
    assert [registry.pick(Role.PREFILL, set()) for _ in range(3)] == ["p0", "p1", "p0"]
    assert registry.pick(Role.DECODE, set()) == "d0"
    assert registry.pick(Role.PREFILL, set()) == "p1"


def test_a_failed_engine_is_avoided_for_a_while(registry, clock):
    registry.failed(Role.PREFILL, "p0")
    assert {registry.pick(Role.PREFILL, set()) for _ in range(4)} == {"p1"}
    clock.now += SUSPECT_SECONDS
    assert {registry.pick(Role.PREFILL, set()) for _ in range(4)} == {"p0", "p1"}


def test_an_answer_restores_trust_at_once(registry):
    registry.failed(Role.PREFILL, "p0")
    registry.answered(Role.PREFILL, "p0")
    assert {registry.pick(Role.PREFILL, set()) for _ in range(4)} == {"p0", "p1"}
