"""Leases: the table, deadlines, limits, and the order in which words change and blocks come free."""

from itertools import product

import pytest

from pd_transfer.core.leases import (
    LEASE_TABLE,
    Lease,
    LeaseBook,
    LeaseExpired,
    LeasePolicy,
    LeaseReleased,
    LeaseReset,
    LeaseState,
    WordBatch,
    WordChange,
    WordConfirmed,
)
from pd_transfer.core.outcomes import Outcome
from pd_transfer.core.params import LeaseId
from pd_transfer.errors import InvalidTransitionError

A, B, C = LeaseId("a"), LeaseId("b"), LeaseId("c")
POLICY = LeasePolicy(unclaimed_seconds=10, renewal_seconds=30, max_seconds=120, max_pool_fraction=0.5)


def make_book(num_blocks: int = 100, num_slots: int = 4, num_ranks: int = 1) -> LeaseBook:
    return LeaseBook(POLICY, num_blocks, num_slots, num_ranks)


def retire(book: LeaseBook, now: float = 0) -> list[int]:
    """One step of the engine: the words travel and every rank confirms."""
    batch = book.take_word_changes()
    return [] if batch is None else book.confirm(batch.batch_id, 1, now)


# ---------------------------------------------------------------------------------------------------------------- table

HELD, RETIRING, RETIRED = LeaseState.HELD, LeaseState.RETIRING, LeaseState.RETIRED
LEGAL = {
    (HELD, LeaseReleased): RETIRING,
    (HELD, LeaseExpired): RETIRING,
    (HELD, LeaseReset): RETIRING,
    (RETIRING, WordConfirmed): RETIRED,
}
EVENTS = (LeaseReleased, LeaseExpired, LeaseReset, WordConfirmed)


@pytest.mark.parametrize(("state", "kind"), list(product(LeaseState, EVENTS)))
def test_every_transition(state, kind):
    lease = Lease(A, (1,), 0, 0, opened_at=0, deadline=10, state=state)
    if (state, kind) in LEGAL:
        lease.advance(kind(), now=1)
        assert lease.state is LEGAL[state, kind]
        assert len(lease.story.entries) == 1
    else:
        with pytest.raises(InvalidTransitionError, match=f"{kind.__name__} is not allowed in {state.name}"):
            lease.advance(kind(), now=1)
        assert lease.state is state
        assert lease.story.entries == ()
    assert LEASE_TABLE.entries == LEGAL


# ------------------------------------------------------------------------------------------------------------ one lease


def test_a_lease_from_beginning_to_end():
    book = make_book()
    lease = book.open(A, [5, 6, 5], now=0)
    assert lease.block_ids == (5, 6)
    assert (book.num_leases, book.num_leased_blocks, book.is_retiring) == (1, 2, False)
    book.release([A], now=1)
    assert (book.num_leases, book.num_leased_blocks, book.is_retiring) == (1, 0, True)
    batch = book.take_word_changes()
    assert batch == WordBatch(1, (WordChange(lease.slot, lease.generation + 1),))
    assert (book.num_leases, book.num_leased_blocks, book.is_retiring) == (1, 0, True)
    assert book.confirm(1, 1, now=2) == [5, 6]
    assert (book.num_leases, book.num_leased_blocks, book.is_retiring) == (0, 0, False)
    assert [entry.event for entry in lease.story.entries] == ["LeaseReleased", "WordConfirmed"]
    assert book.outcomes == {Outcome.LEASE_OPENED: 1, Outcome.LEASE_RELEASED: 1}


def test_word_changes_are_handed_out_once():
    book = make_book()
    assert book.take_word_changes() is None
    book.open(A, [5], 0)
    assert book.take_word_changes() is None
    book.release([A], 1)
    assert book.take_word_changes() is not None
    assert book.take_word_changes() is None


def test_blocks_come_free_when_the_last_rank_has_confirmed():
    book = make_book(num_ranks=3)
    book.open(A, [5], 0)
    book.release([A], 1)
    batch = book.take_word_changes()
    assert book.confirm(batch.batch_id, 1, 2) == []
    assert book.num_leases == 1
    assert book.confirm(batch.batch_id, 2, 3) == [5]


def test_a_lease_that_ends_makes_room_before_its_words_have_changed():
    """An engine that was idle changes them in the step in which the next prompt finishes."""
    book = make_book()
    limit = list(range(1, 1 + book._max_leased_blocks))
    assert book.open(A, limit, 0)
    assert book.open(LeaseId("next"), [999], 1) is None
    book.release([A], 1)
    assert book.open(LeaseId("next"), limit, 1)


def test_an_unknown_batch_is_a_bug_and_changes_nothing():
    book = make_book()
    book.open(A, [5], 0)
    book.release([A], 1)
    batch = book.take_word_changes()
    with pytest.raises(KeyError):
        book.confirm(batch.batch_id + 1, 1, 2)
    assert book.num_leases == 1
    assert book.confirm(batch.batch_id, 1, 2) == [5]
    with pytest.raises(KeyError):
        book.confirm(batch.batch_id, 1, 3)


# ---------------------------------------------------------------------------------------------------------------- slots


def test_a_slot_is_used_again_only_after_its_change_is_confirmed():
    book = make_book(num_slots=1)
    first = book.open(A, [5], 0)
    book.release([A], 1)
    assert book.open(B, [6], 1) is None
    batch = book.take_word_changes()
    assert book.open(B, [6], 1) is None
    book.confirm(batch.batch_id, 1, 2)
    second = book.open(B, [6], 3)
    assert (second.slot, second.generation) == (first.slot, first.generation + 1)
    assert batch.changes == (WordChange(second.slot, second.generation),)  # its word has the granted value already


# --------------------------------------------------------------------------------------------------------------- limits


def test_at_most_a_share_of_the_pool_is_under_lease():
    book = make_book(num_blocks=10)
    assert book.open(A, [1, 2, 3, 4], 0)
    assert book.open(B, [5, 6], 0) is None
    assert book.open(B, [3, 4, 5], 0)  # shared blocks count once
    assert book.num_leased_blocks == 5
    assert book.open(C, [5], 0)
    assert book.outcomes[Outcome.HAND_OFF_OVER_LIMIT] == 1


def test_blocks_that_leases_share_count_until_the_last_one_ends():
    book = make_book()
    book.open(A, [1, 2], 0)
    book.open(B, [2, 3], 0)
    book.release([A], 1)
    assert retire(book) == [1, 2]  # a reference each; block 2 has another one
    assert book.num_leased_blocks == 2
    book.release([B], 1)
    assert retire(book) == [2, 3]
    assert book.num_leased_blocks == 0


def test_a_lease_that_is_not_opened_leaves_nothing():
    book = make_book(num_blocks=4)
    assert book.open(A, [1, 2, 3], 0) is None
    assert (book.num_leases, book.num_leased_blocks, book.next_deadline()) == (0, 0, None)
    assert book.open(B, [1, 2], 0)


# ------------------------------------------------------------------------------------------------------------ deadlines


def test_an_unclaimed_lease_expires():
    book = make_book()
    book.open(A, [5], now=100)
    assert book.next_deadline() == 110
    book.expire(109.9)
    assert not book.is_retiring
    book.expire(110)
    assert book.is_retiring
    assert book.next_deadline() is None
    assert book.outcomes[Outcome.LEASE_EXPIRED] == 1


def test_renewals_extend_up_to_the_limit_and_never_shorten():
    book = make_book()
    lease = book.open(A, [5], now=0)
    deadlines = []
    for now in (1, 2, 30, 59, 88, 110, 119):
        assert book.renew([A], now) == ()
        deadlines.append(lease.deadline)
    assert deadlines == [31, 32, 60, 89, 118, 120, 120]
    assert book.renew([A], 120) == (A,)


def test_a_short_renewal_does_not_cut_the_first_wait():
    book = LeaseBook(
        LeasePolicy(unclaimed_seconds=100, renewal_seconds=5, max_seconds=120, max_pool_fraction=0.5), 100, 4, 1
    )
    lease = book.open(A, [5], 0)
    book.renew([A], 1)
    assert lease.deadline == 100


def test_renewals_name_what_is_gone():
    book = make_book()
    book.open(A, [1], now=0)
    book.open(B, [2], now=5)
    book.open(C, [3], now=9)
    book.release([C], now=9)
    assert book.renew([A, B, C, LeaseId("never")], now=12) == (A, C, LeaseId("never"))


def test_the_earliest_deadline_is_next():
    book = make_book()
    book.open(A, [1], now=0)
    book.open(B, [2], now=5)
    assert book.next_deadline() == 10
    book.renew([A], 6)
    assert book.next_deadline() == 15


def test_reset_ends_every_lease():
    book = make_book()
    book.open(A, [1], 0)
    book.open(B, [2], 0)
    book.reset(1)
    assert sorted(retire(book)) == [1, 2]
    assert book.outcomes[Outcome.LEASE_RESET] == 2


# ---------------------------------------------------------------------------------------------------------------- races

ENDINGS = {
    "release": (lambda book: book.release([A], 20), Outcome.LEASE_RELEASED),
    "expiry": (lambda book: book.expire(20), Outcome.LEASE_EXPIRED),
    "reset": (lambda book: book.reset(20), Outcome.LEASE_RESET),
}


@pytest.mark.parametrize("steps_between", [False, True])
@pytest.mark.parametrize("second", ENDINGS)
@pytest.mark.parametrize("first", ENDINGS)
def test_the_first_end_wins_and_is_the_only_one(first, second, steps_between):
    book = make_book()
    book.open(A, [5], 0)
    end, outcome = ENDINGS[first]
    end(book)
    freed = retire(book) if steps_between else []
    ENDINGS[second][0](book)
    assert freed + retire(book) == [5]
    assert book.outcomes == {Outcome.LEASE_OPENED: 1, outcome: 1}


@pytest.mark.parametrize("end", ENDINGS)
def test_a_renewal_after_the_end_says_gone(end):
    book = make_book()
    book.open(A, [5], 0)
    ENDINGS[end][0](book)
    assert book.renew([A], 21) == (A,)
    retire(book)
    assert book.renew([A], 22) == (A,)


def test_unknown_and_repeated_releases_are_ignored():
    book = make_book()
    book.open(A, [5], 0)
    book.release([LeaseId("never"), A, A], 1)
    book.release([A], 1)
    assert retire(book) == [5]
    assert book.outcomes[Outcome.LEASE_RELEASED] == 1


def test_ends_between_two_steps_travel_with_the_second():
    book = make_book()
    first, second = book.open(A, [1], 0), book.open(B, [2], 0)
    book.release([A], 1)
    early = book.take_word_changes()
    book.release([B], 2)
    late = book.take_word_changes()
    assert [batch.changes[0].slot for batch in (early, late)] == [first.slot, second.slot]
    assert book.confirm(late.batch_id, 1, 3) == [2]  # steps may overlap, and answer in any order
    assert book.confirm(early.batch_id, 1, 3) == [1]
