"""All of the core together, against a hostile network, slow transfers, restarts and aborts: stories, then any order."""

from functools import partial

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    rule,
    run_state_machine_as_test,
)

from pd_transfer.core.outcomes import Outcome
from tests.core.examples import PREFILL
from tests.core.system import NUM_RANKS, System, WrongReadError

# -------------------------------------------------------------------------------------------------------------- stories


def reading(system: System) -> str:
    """A request whose workers have begun to read."""
    system.hand_off(prompt=1)
    request_id = system.arrive(-1)
    system.turn()
    system.ask(request_id)
    for worker in system.workers:
        while worker.orders:
            worker.carry_out()
    assert all(request_id in worker.transfers for worker in system.workers)
    return request_id


def end(system: System, request_id: str) -> set[Outcome]:
    """How the request's receive ended on its ranks, once everything has come to its end."""
    system.finish()
    return set(system.requests[request_id].outcomes.values())


def test_a_request_is_read_and_nothing_is_left():
    system = System()
    assert end(system, reading(system)) == {Outcome.RECEIVE_VERIFIED}


def let_the_blocks_be_reused(system: System) -> None:
    """The lease expires and prefill's next step frees the blocks; they are overwritten at once."""
    system.now += 100
    system.prefill.step(system.now)
    for rank in range(NUM_RANKS):
        system.prefill.store(rank, system.now)


def test_blocks_that_were_reused_during_the_read_are_not_served():
    system = System()
    request_id = reading(system)
    let_the_blocks_be_reused(system)
    assert end(system, request_id) == {Outcome.RECEIVE_STALE}


def test_control_without_the_word_the_wrong_bytes_are_served():
    system = System(checks_words=False)
    request_id = reading(system)
    let_the_blocks_be_reused(system)
    with pytest.raises(WrongReadError, match="somebody else, expected prompt 1, group 0, position 0"):
        end(system, request_id)


def test_a_lease_that_expires_between_read_and_word_is_not_trusted():
    """The bytes are right, but nothing proves it."""
    system = System()
    request_id = reading(system)
    for worker in system.workers:
        worker.progress(request_id, num_copies=9)
        worker.progress(request_id, num_copies=9)
    let_the_blocks_be_reused(system)
    assert end(system, request_id) == {Outcome.RECEIVE_STALE}


def test_words_that_are_not_stored_yet_keep_the_blocks():
    """The lease has ended but only one rank has changed its word: the other one's copy is still right."""
    system = System()
    request_id = reading(system)
    system.now += 100
    system.prefill.step(system.now)
    system.prefill.store(0, system.now)
    for worker in system.workers:
        for _ in range(4):
            worker.progress(request_id, num_copies=9)
    assert [system.requests[request_id].outcomes[rank] for rank in range(NUM_RANKS)] == [
        Outcome.RECEIVE_STALE,
        Outcome.RECEIVE_VERIFIED,
    ]
    system.finish()


def test_memory_that_is_reused_after_a_shutdown_is_not_served():
    system = System()
    request_id = reading(system)
    system.shut_down_prefill()
    assert end(system, request_id) == {Outcome.RECEIVE_STALE}


def test_a_restart_fails_reads_and_old_grants_are_of_no_use():
    system = System()
    request_id = reading(system)
    system.restart_prefill()
    late = system.arrive(-1)
    assert end(system, request_id) == {Outcome.RECEIVE_FAILED}
    assert not system.requests[late].outcomes


def test_a_restart_that_nobody_noticed_costs_one_request():
    system = System()
    system.do(system.peers.greet(PREFILL, 0))
    system.turn()
    system.pass_time(10)
    system.restart_prefill()
    outcomes = []
    for _ in range(2):
        system.hand_off(prompt=2)
        request_id = system.arrive(-1)
        system.ask(request_id)
        system.turn()
        outcomes.append(set(system.requests[request_id].outcomes.values()))
    assert outcomes == [set(), {Outcome.RECEIVE_VERIFIED}]
    system.finish()


def test_a_stuck_read_ends_with_the_agent():
    system = System()
    request_id = reading(system)
    system.workers[0].transfers[request_id].is_stuck = True
    assert end(system, request_id) == {Outcome.RECEIVE_TIMED_OUT, Outcome.RECEIVE_VERIFIED}


@pytest.mark.parametrize("forger", [None, b"forger"])
def test_another_prompts_grant_is_not_read(forger):
    system = System()
    system.hand_off(prompt=1)
    system.turn()
    request_id = system.arrive(-1, prompt=2, forger=forger)
    system.turn()
    system.ask(request_id)
    assert end(system, request_id) == set()


def test_an_aborted_read_keeps_its_blocks_until_it_has_drained():
    system = System()
    request_id = reading(system)
    system.abort(request_id)
    for worker in system.workers:
        worker.carry_out()
    assert system.pool.holders.total() > 0
    assert end(system, request_id) == {Outcome.RECEIVE_ABORTED}


# ------------------------------------------------------------------------------------------------------------ any order

AT = st.integers(0, 7)
"""Picks one of what there is."""


def letters_travel(system: System, count: int, at: int, fate: str) -> None:
    """In any order, and not always once."""
    for _ in range(count):
        for letters, deliver in (
            (system.to_prefill, system.deliver_to_prefill),
            (system.to_decode, system.deliver_to_decode),
        ):
            if letters and fate == "is lost":
                del letters[at % len(letters)]
            elif letters:
                deliver(at % len(letters), keep=fate == "arrives twice")


def worker_gets_on(system: System, rank: int, num_orders: int, num_copies: int, count: int) -> None:
    worker = system.workers[rank]
    for _ in range(min(num_orders, len(worker.orders))):
        worker.carry_out()
    for request_id in list(worker.transfers) * count:
        if request_id in worker.transfers:
            worker.progress(request_id, num_copies)


def decode_steps(system: System, num_local_blocks: int, has_room: bool) -> None:
    system.decode_step()
    for request_id in system.waiting():
        system.ask(request_id, num_local_blocks, has_room)


def prefill_steps(system: System, ranks: tuple[int, ...]) -> None:
    system.prefill.step(system.now)
    for rank in ranks:
        system.prefill.store(rank, system.now)


def wrong_grant_comes(system: System, at: int, prompt: int | None, forger: bytes | None) -> None:
    """An old one, another prompt's, or a forged one."""
    if system.grants:
        system.arrive(-1 - at % len(system.grants), prompt, forger)


def request_is_aborted(system: System, at: int) -> None:
    if under_way := [request_id for request_id, request in system.requests.items() if request.is_under_way]:
        system.abort(under_way[at % len(under_way)])


def transfer_is_stuck_or_fails(system: System, at: int, is_stuck: bool) -> None:
    transfers = [(worker, request_id) for worker in system.workers for request_id in worker.transfers]
    if transfers:
        worker, request_id = transfers[at % len(transfers)]
        if is_stuck:
            worker.transfers[request_id].is_stuck = True
        else:
            worker.fail(request_id)


def junk_arrives(system: System, payload: bytes) -> None:
    system.to_prefill.append(payload)
    system.to_decode.append(payload)


def cache_is_reset(system: System) -> None:
    system.prefill.leases.reset(system.now)


def step(function, **arguments) -> st.SearchStrategy:
    return st.builds(partial, st.just(function), **arguments)


RANKS = tuple(range(NUM_RANKS))
PROGRESS = st.one_of(
    step(letters_travel, count=st.integers(1, 8), at=AT, fate=st.just("arrives")),
    step(
        decode_steps, num_local_blocks=st.sampled_from([0, 0, 1, 2, 3]), has_room=st.sampled_from([True, True, False])
    ),
    step(
        worker_gets_on,
        rank=st.sampled_from(RANKS),
        num_orders=st.integers(1, 9),
        num_copies=st.integers(1, 5),
        count=st.integers(0, 4),
    ),
    step(prefill_steps, ranks=st.sampled_from([RANKS, RANKS, (0,), (1,), ()])),
    step(System.pass_time, seconds=st.sampled_from([0.1, 0.5, 1, 3, 11])),
)
TROUBLE = st.one_of(
    step(letters_travel, count=st.integers(1, 8), at=AT, fate=st.sampled_from(["arrives twice", "is lost"])),
    step(
        wrong_grant_comes,
        at=st.integers(0, 2),
        prompt=st.sampled_from([None, 1, 2, 3]),
        forger=st.sampled_from([None, b"forger"]),
    ),
    step(request_is_aborted, at=AT),
    step(transfer_is_stuck_or_fails, at=AT, is_stuck=st.booleans()),
    step(junk_arrives, payload=st.binary(max_size=20)),
    step(cache_is_reset),
    step(System.lose_connection),
    step(System.shut_down_prefill),
    step(System.restart_prefill),
)


class SystemMachine(RuleBasedStateMachine):
    """Requests come, everything gets on in any order, and there is trouble of every kind, but less of it."""

    checks_words = True

    def __init__(self) -> None:
        super().__init__()
        self.system = System(self.checks_words)

    @rule(prompt=st.integers(1, 3), num_samples=st.integers(0, 2), is_mixed_up=st.sampled_from([False] * 4 + [True]))
    def request_comes(self, prompt, num_samples, is_mixed_up):
        """Prefill computes a prompt, and decode hears of it, or never does, or with the params of another request."""
        self.system.hand_off(prompt)
        for _ in range(num_samples if self.system.grants else 0):
            self.system.arrive(-1, prompt=prompt % 3 + 1 if is_mixed_up else None)

    @rule(steps=st.lists(PROGRESS, min_size=5, max_size=20))
    def everything_gets_on(self, steps):
        for take in steps:
            take(self.system)
            self.system.check()

    @rule(trouble=TROUBLE)
    def trouble_comes(self, trouble):
        trouble(self.system)

    @invariant()
    def check(self):
        self.system.check()

    def teardown(self):
        self.system.finish()


class UnprovenMachine(SystemMachine):
    """The positive control: decode takes every word for the granted one."""

    checks_words = False


@pytest.mark.timeout(600)  # a failing story takes its time to become short
def test_in_any_order():
    run_state_machine_as_test(SystemMachine, settings=settings(max_examples=100, stateful_step_count=40))


def test_control_the_machine_finds_a_wrong_read_when_words_are_not_checked():
    """Within a hundred examples as a rule; the same ones every time."""
    control = settings(max_examples=1000, stateful_step_count=40, phases=[Phase.generate], derandomize=True)
    with pytest.raises(WrongReadError):
        run_state_machine_as_test(UnprovenMachine, settings=control)
