"""Members, their loads, and the choice among them."""

import logging

import pytest

from proxy.errors import FailureKind
from proxy.health import FIRST_EJECTION_SECONDS, Check, Standing
from proxy.registry import FORGET_SECONDS, Load, Origin, Registry
from proxy.routing import EngineLoad, Role, least_tokens, round_robin


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def registry(clock):
    found = Registry(dict.fromkeys(Role, least_tokens), clock)
    found.add(Role.PREFILL, ["p0", "p1"])
    found.add(Role.DECODE, ["d0"])
    return found


def picks(registry, count=4, role=Role.PREFILL):
    return {registry.pick(role, set()).url for _ in range(count)}


def test_loads_count_from_the_choice_to_the_end(registry):
    first = Load(registry.find(Role.PREFILL, "p0"), 100)
    second = Load(registry.find(Role.PREFILL, "p1"), 10)
    assert [(load.requests, load.tokens) for load in registry.loads(Role.PREFILL)] == [(1, 100), (1, 10)]
    assert registry.pick(Role.PREFILL, set()).url == "p1"
    first.end()
    first.end()
    second.end()
    assert [(load.requests, load.tokens) for load in registry.loads(Role.PREFILL)] == [(0, 0), (0, 0)]


def test_roles_take_turns_on_their_own(registry):
    assert [registry.pick(Role.PREFILL, set()).url for _ in range(3)] == ["p0", "p1", "p0"]
    assert registry.pick(Role.DECODE, set()).url == "d0"
    assert registry.pick(Role.PREFILL, set()).url == "p1"


def test_a_failed_engine_is_avoided_for_a_while(registry, clock):
    engine = registry.find(Role.PREFILL, "p0")
    registry.failed(engine, FailureKind.LOST)
    registry.failed(engine, FailureKind.LOST)
    assert engine.ejections == 1
    assert picks(registry) == {"p1"}
    clock.now += FIRST_EJECTION_SECONDS
    assert picks(registry) == {"p0", "p1"}


def test_an_engine_that_was_ejected_is_tried_by_one_request_at_a_time(clock):
    registry = Registry(dict.fromkeys(Role, round_robin), clock)
    registry.add(Role.PREFILL, ["p0", "p1"])
    engine = registry.find(Role.PREFILL, "p0")
    registry.checked(engine, Check.WELL)
    earlier = Load(engine, 1)
    registry.failed(engine, FailureKind.LOST)
    clock.now += FIRST_EJECTION_SECONDS
    # What began before the ejection tries nothing.
    assert picks(registry) == {"p0", "p1"}
    trial = Load(engine, 1)
    assert picks(registry) == {"p1"}
    assert registry.is_up(Role.PREFILL)
    trial.end()
    assert picks(registry) == {"p0", "p1"}
    trial = Load(engine, 1)
    engine.health.answered()
    assert picks(registry) == {"p0", "p1"}
    trial.end()
    earlier.end()
    assert engine.trials == 0


def test_an_engine_on_trial_is_taken_all_the_same_when_there_is_no_other(registry, clock):
    engine = registry.find(Role.DECODE, "d0")
    registry.failed(engine, FailureKind.LOST)
    clock.now += FIRST_EJECTION_SECONDS
    Load(engine, 1)
    assert registry.pick(Role.DECODE, set()) is engine


def test_checks_take_engines_out_and_bring_them_back(registry, caplog):
    caplog.set_level(logging.WARNING)
    engine = registry.find(Role.PREFILL, "p0")
    assert not registry.is_up(Role.PREFILL)
    registry.checked(engine, Check.WELL)
    assert registry.is_up(Role.PREFILL)
    registry.checked(engine, Check.UNWELL)
    registry.checked(engine, Check.UNWELL)
    assert picks(registry) == {"p1"}
    assert not registry.is_up(Role.PREFILL)
    registry.checked(engine, Check.WELL)
    assert picks(registry) == {"p0", "p1"}
    assert engine.ejections == 1
    assert [record.getMessage() for record in caplog.records] == [
        "prefill engine p0 was unknown and is up",
        "prefill engine p0 was up and is suspect",
        "prefill engine p0 was suspect and is down",
        "prefill engine p0 was down and is up",
    ]


def test_a_draining_engine_gets_nothing_new_until_it_is_added_again(registry):
    engine = registry.find(Role.PREFILL, "p0")
    load = Load(engine, 5)
    assert registry.drain(Role.PREFILL, "p0")
    assert picks(registry) == {"p1"}
    assert registry.loads(Role.PREFILL)[0] == EngineLoad("p0", 1, 5, Standing.DRAINING)
    registry.add(Role.PREFILL, ["p0"])
    assert registry.find(Role.PREFILL, "p0") is engine
    assert engine.requests == 1
    load.end()
    assert picks(registry) == {"p0", "p1"}


def test_a_removed_engine_is_gone_and_what_its_requests_report_reaches_nobody_else(registry):
    old = registry.find(Role.DECODE, "d0")
    load = Load(old, 5)
    assert registry.remove(Role.DECODE, "d0")
    assert registry.pick(Role.DECODE, set()) is None
    registry.add(Role.DECODE, ["d0"])
    new = registry.find(Role.DECODE, "d0")
    registry.failed(old, FailureKind.LOST)
    load.end()
    assert registry.loads(Role.DECODE) == [EngineLoad("d0", 0, 0, Standing.UNKNOWN)]
    assert new is not old


def test_nobody_can_be_drained_or_removed_twice_or_by_a_wrong_role(registry):
    assert not registry.drain(Role.DECODE, "p0")
    assert not registry.remove(Role.DECODE, "p0")
    assert registry.remove(Role.PREFILL, "p0")
    assert not registry.remove(Role.PREFILL, "p0")
    assert [engine.url for engine in registry.members()] == ["p1", "d0"]
    assert [engine.url for engine in registry.members(Role.DECODE)] == ["d0"]


def test_requests_go_to_the_rank_with_the_least_tokens(registry):
    registry.add(Role.DECODE, ["d1"], num_ranks=2)
    engine = registry.find(Role.DECODE, "d1")
    loads = [Load(engine, tokens) for tokens in (100, 10, 20, 30)]
    assert [load.rank for load in loads] == [0, 1, 1, 1]
    # Compared with other engines, an engine of two ranks is half as busy.
    assert registry.loads(Role.DECODE)[1].tokens == 80
    for load in loads:
        load.end()
    assert engine.rank_tokens == [0, 0]
    assert Load(registry.find(Role.DECODE, "d0"), 1).rank is None


def test_an_engine_that_registers_itself_again_keeps_its_load(registry):
    assert registry.register(Role.DECODE, "d1", num_ranks=2)
    engine = registry.find(Role.DECODE, "d1")
    load = Load(engine, 5)
    assert not registry.register(Role.DECODE, "d1", num_ranks=2)
    assert registry.find(Role.DECODE, "d1") is engine
    assert (engine.requests, engine.rank_tokens) == (1, [5, 0])
    load.end()


def test_an_engine_cannot_undo_what_an_operator_has_decided(registry):
    registry.register(Role.DECODE, "d1")
    registry.drain(Role.DECODE, "d1")
    registry.register(Role.DECODE, "d1")
    assert registry.find(Role.DECODE, "d1").draining
    # An operator's engine may register itself too; it stays when it stops.
    assert not registry.register(Role.DECODE, "d0")
    assert not registry.deregister(Role.DECODE, "d0")
    assert registry.find(Role.DECODE, "d0")


def test_an_engine_takes_itself_out_and_comes_back_as_a_new_one(registry):
    registry.register(Role.DECODE, "d1")
    registry.drain(Role.DECODE, "d1")
    assert registry.deregister(Role.DECODE, "d1")
    assert registry.find(Role.DECODE, "d1") is None
    assert not registry.deregister(Role.DECODE, "d1")
    assert registry.register(Role.DECODE, "d1")
    assert not registry.find(Role.DECODE, "d1").draining


def test_an_operator_who_takes_an_engine_back_does_not_make_it_his(registry):
    registry.register(Role.DECODE, "d1")
    registry.drain(Role.DECODE, "d1")
    registry.add(Role.DECODE, ["d1"])
    assert not registry.find(Role.DECODE, "d1").draining
    assert registry.deregister(Role.DECODE, "d1")


def test_an_engine_that_a_file_names_after_it_registered_is_the_files(registry):
    registry.register(Role.DECODE, "d1")
    registry.add(Role.DECODE, ["d1"], origin=Origin.FILE)
    assert registry.find(Role.DECODE, "d1").origin is Origin.FILE
    assert not registry.deregister(Role.DECODE, "d1")


@pytest.mark.parametrize("bad", [Check.UNWELL, Check.SILENT])
def test_an_engine_that_registered_itself_is_forgotten_when_it_is_dead_for_long(registry, clock, caplog, bad):
    registry.register(Role.DECODE, "d1")
    mine, operators = registry.find(Role.DECODE, "d1"), registry.find(Role.DECODE, "d0")
    registry.checked(mine, Check.WELL)
    for seconds in (FORGET_SECONDS / 2, FORGET_SECONDS / 2):
        clock.now += seconds
        for _ in range(2):
            registry.checked(mine, bad)
            registry.checked(operators, bad)
    assert registry.members(Role.DECODE) == [operators, mine]
    clock.now += 1.0
    registry.checked(mine, bad)
    registry.checked(operators, bad)
    assert registry.members(Role.DECODE) == [operators]
    assert "decode engine d1 is forgotten: it had registered itself, and gave no sign of life for 121 s" in caplog.text
    # The answer to a question that was under way does not touch its successor.
    registry.register(Role.DECODE, "d1")
    clock.now += FORGET_SECONDS + 1.0
    registry.checked(mine, bad)
    assert registry.find(Role.DECODE, "d1")


@pytest.mark.parametrize("sign", ["registers", "is found well", "cannot be asked", "is silent once"])
def test_an_engine_with_a_sign_of_life_is_not_forgotten(registry, clock, sign):
    registry.register(Role.DECODE, "d1")
    engine = registry.find(Role.DECODE, "d1")
    if sign == "cannot be asked":
        registry.checked(engine, Check.UNWELL)
    for _ in range(3):
        clock.now += FORGET_SECONDS + 1.0
        if sign == "registers":
            registry.register(Role.DECODE, "d1")
            registry.checked(engine, Check.UNWELL)
        elif sign == "is found well":
            registry.checked(engine, Check.WELL)
            registry.checked(engine, Check.UNWELL)
        elif sign == "cannot be asked":
            registry.checked(engine, Check.NOT_MADE)
        else:
            registry.checked(engine, Check.SILENT)
            registry.checked(engine, Check.WELL)
    assert registry.find(Role.DECODE, "d1") is engine
