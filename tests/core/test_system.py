"""All of the core together, against a hostile network, slow transfers, restarts and aborts: stories, then any order."""

from collections.abc import Sequence
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
from pd_transfer.core.receives import ReceiveBook
from tests.core.events import (
    PROGRESS,
    TROUBLE,
    Event,
    HastyBook,
    HistoryError,
    Totals,
    TrustingBook,
    junk_arrives,
    play,
    request_comes,
)
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
    system = System(TrustingBook)
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


def test_control_without_the_drain_blocks_are_written_after_they_were_given_back():
    system = System(HastyBook)
    request_id = reading(system)
    system.abort(request_id)
    for worker in system.workers:
        worker.carry_out()
    system.decode_step()
    with pytest.raises(AssertionError, match="I1: a transfer writes to blocks that were given back"):
        end(system, request_id)


def test_a_request_that_was_loaded_is_not_loaded_again_after_a_preemption():
    system = System()
    request_id = reading(system)
    system.turn()
    assert set(system.requests[request_id].outcomes.values()) == {Outcome.RECEIVE_VERIFIED}
    system.preempt(request_id)
    system.finish()


def test_a_decode_engine_that_died_leaves_its_leases_to_expire():
    system = System()
    request_id = reading(system)
    system.restart_decode()
    assert system.prefill.leases.num_leases == 1
    system.finish()
    assert system.requests[request_id].is_lost
    system.hand_off(prompt=2)
    assert end(system, reading(system)) == {Outcome.RECEIVE_VERIFIED}


def test_a_stuck_read_that_gets_on_frees_its_blocks_without_a_new_agent():
    system = System()
    request_id = reading(system)
    (transfer, _) = (worker.transfers[request_id] for worker in system.workers)
    transfer.is_stuck = True
    system.turn()
    system.pass_time(21)
    assert system.pool.holders.total() > 0
    transfer.is_stuck = False
    assert end(system, request_id) == {Outcome.RECEIVE_TIMED_OUT, Outcome.RECEIVE_VERIFIED}


# ------------------------------------------------------------------------------------------------------------ any order


def strategy(events: Sequence[Event]) -> st.SearchStrategy:
    """A step that hypothesis picks."""
    return st.one_of(
        *(
            st.builds(
                partial, st.just(event.happen), **{name: st.sampled_from(of) for name, of in event.choices.items()}
            )
            for event in events
        )
    )


class SystemMachine(RuleBasedStateMachine):
    """Requests come, everything gets on in any order, and there is trouble of every kind, but less of it."""

    make_book = ReceiveBook

    def __init__(self) -> None:
        super().__init__()
        self.system = System(self.make_book)

    @rule(prompt=st.integers(1, 3), num_samples=st.integers(0, 2), is_mixed_up=st.sampled_from([False] * 4 + [True]))
    def request_comes(self, prompt, num_samples, is_mixed_up):
        request_comes(self.system, prompt, num_samples, is_mixed_up)

    @rule(steps=st.lists(strategy(PROGRESS), min_size=5, max_size=20))
    def everything_gets_on(self, steps):
        for take in steps:
            take(self.system)
            self.system.check()

    @rule(trouble=strategy(TROUBLE))
    def trouble_comes(self, trouble):
        trouble(self.system)

    @rule(payload=st.binary(max_size=20))
    def junk_arrives(self, payload):
        junk_arrives(self.system, payload)

    @invariant()
    def check(self):
        self.system.check()

    def teardown(self):
        self.system.finish()


class UnprovenMachine(SystemMachine):
    """The positive control: decode takes every word for the granted one."""

    make_book = TrustingBook


@pytest.mark.timeout(600)  # a failing story takes its time to become short
def test_in_any_order():
    run_state_machine_as_test(SystemMachine, settings=settings(max_examples=50, stateful_step_count=40))


def test_control_the_machine_finds_a_wrong_read_when_words_are_not_checked():
    """Within a hundred examples as a rule; the same ones every time."""
    control = settings(max_examples=1000, stateful_step_count=40, phases=[Phase.generate], derandomize=True)
    with pytest.raises(WrongReadError):
        run_state_machine_as_test(UnprovenMachine, settings=control)


MOMENTS = (
    *("waiting", "ordered", "before the first byte", "between bytes", "after the last byte"),
    *("before the word is read", "after the word is read", "reported by this rank"),
)
READING = [moment for moment in MOMENTS if moment not in ("waiting", "ordered", "reported by this rank")]
REFUSALS = (
    *("grant_forged", "grant_other_prompt", "grant_other_boot", "grant_used", "grant_expired"),
    *("peer_refused", "peer_unreachable", "withdrawn", "nothing_to_read"),
)
EVERYWHERE = ("abort", "a word changes", "the connection breaks", "prefill restarts", "decode restarts")


def test_a_few_hundred_histories_in_which_everything_meets_everything():
    """Both directions of every race: each event comes before and after each moment of a read."""
    totals = Totals()
    for seed in range(200):
        totals.add(play(seed))
    wanted = {(event, moment) for event in EVERYWHERE for moment in MOMENTS}
    wanted |= {(trouble, moment) for trouble in ("fails", "is stuck", "gets on") for moment in READING}
    assert not wanted - set(totals.met)
    assert totals.judged["receive_verified"] > totals.num_histories
    assert not [refusal for refusal in REFUSALS if not totals.declined[refusal]]


@pytest.mark.parametrize(("book", "found"), [(TrustingBook, "WrongReadError"), (HastyBook, "I1")])
def test_control_histories_find_what_a_careless_book_does(book, found):
    with pytest.raises(HistoryError, match=found):
        sum(play(seed, book).num_steps for seed in range(300))
