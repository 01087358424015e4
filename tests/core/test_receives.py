"""Receives: the table, proof by lease word, draining, deadlines, and every race in both orders."""

from itertools import product

import numpy as np
import pytest

from pd_transfer.core.machine import Story
from pd_transfer.core.outcomes import Outcome
from pd_transfer.core.params import PeerKey, RequestId
from pd_transfer.core.plan import ReadPlan, Uncovered
from pd_transfer.core.receives import (
    RECEIVE_TABLE,
    AbortRequested,
    AgentDestroyed,
    DeadlinePassed,
    DrainedAfterAbort,
    DrainedAfterFailure,
    FailedForGood,
    NotCovered,
    PeerReconnected,
    ReadCompleted,
    RebuildAgent,
    ReceiveBook,
    ReceivePolicy,
    ReceiveRequest,
    ReceiveState,
    ReconnectPeer,
    ReportReceive,
    SubmitRead,
    SubmitWordRead,
    TransferFailed,
    WordArrived,
    WordChanged,
    WordMatched,
)
from pd_transfer.errors import InvalidTransitionError

R1, R2 = RequestId("r1"), RequestId("r2")
PEER, OTHER_PEER = PeerKey("peer#1"), PeerKey("other#2")
WORD = 0x7_0000_000B
PLAN = ReadPlan(np.arange(3, dtype=np.int32), np.arange(3, dtype=np.int32), 768, 3, (3,))
POLICY = ReceivePolicy(read_seconds=30, drain_seconds=20)
TIMED_OUT = "no answer from peer#1 within 30 s"


def request(request_id: RequestId = R1, peer: PeerKey = PEER, plan: ReadPlan | Uncovered = PLAN) -> ReceiveRequest:
    return ReceiveRequest(request_id, peer, plan, slot=3, expected_word=WORD, num_tokens=40)


REQUEST = request()


def report(outcome: Outcome, reason: str, seconds: float) -> ReportReceive:
    return ReportReceive(REQUEST, outcome, reason, seconds)


def reading(now: float = 0) -> ReceiveBook:
    book = ReceiveBook(POLICY)
    assert book.start(REQUEST, now) == [SubmitRead(REQUEST, PLAN)]
    return book


def verifying() -> ReceiveBook:
    book = reading()
    assert book.handle(ReadCompleted(R1), 1) == [SubmitWordRead(REQUEST)]
    return book


def retrying(make_book=reading) -> ReceiveBook:
    book = make_book()
    assert book.handle(TransferFailed(R1, "reset"), 2) == [ReconnectPeer(PEER)]
    return book


def lose(book: ReceiveBook) -> None:
    """Both tries of R1 fail."""
    book.handle(TransferFailed(R1, "reset"), 2)
    book.not_reconnected(PEER, "refused", 2)


def is_idle(book: ReceiveBook) -> bool:
    return (book.request_ids, book.num_quarantined_blocks, book.next_deadline()) == ((), 0, None)


# ---------------------------------------------------------------------------------------------------------------- table

S = ReceiveState
LEGAL = {
    (S.TRANSFERRING, ReadCompleted): S.VERIFYING,
    (S.TRANSFERRING, NotCovered): S.FAILED,
    (S.TRANSFERRING, TransferFailed): S.WAITING,
    (S.TRANSFERRING, AgentDestroyed): S.WAITING,
    (S.VERIFYING, AgentDestroyed): S.WAITING,
    (S.TRANSFERRING, FailedForGood): S.FAILED,
    (S.TRANSFERRING, DeadlinePassed): S.DRAINING,
    (S.TRANSFERRING, AbortRequested): S.DRAINING,
    (S.VERIFYING, WordMatched): S.COMPLETED,
    (S.VERIFYING, WordChanged): S.FAILED,
    (S.VERIFYING, TransferFailed): S.WAITING,
    (S.VERIFYING, FailedForGood): S.FAILED,
    (S.VERIFYING, DeadlinePassed): S.DRAINING,
    (S.VERIFYING, AbortRequested): S.DRAINING,
    (S.WAITING, PeerReconnected): S.TRANSFERRING,
    (S.WAITING, FailedForGood): S.FAILED,
    (S.WAITING, DeadlinePassed): S.FAILED,
    (S.WAITING, AbortRequested): S.ABORTED,
    (S.DRAINING, DrainedAfterFailure): S.FAILED,
    (S.DRAINING, DrainedAfterAbort): S.ABORTED,
}
EVENTS = (
    ReadCompleted(R1),
    WordMatched(),
    WordChanged(),
    NotCovered(),
    TransferFailed(R1, ""),
    AgentDestroyed(),
    PeerReconnected(),
    FailedForGood(),
    AbortRequested(R1),
    DeadlinePassed(),
    DrainedAfterFailure(),
    DrainedAfterAbort(),
)


@pytest.mark.parametrize(("state", "event"), list(product(ReceiveState, EVENTS)))
def test_every_transition(state, event):
    story = Story("receive r1")
    if (state, type(event)) in LEGAL:
        assert RECEIVE_TABLE.next_state(state, event, story) is LEGAL[state, type(event)]
    else:
        with pytest.raises(InvalidTransitionError, match=f"{type(event).__name__} is not allowed in {state.name}"):
            RECEIVE_TABLE.next_state(state, event, story)
    assert RECEIVE_TABLE.entries == LEGAL


@pytest.mark.parametrize(
    ("book", "event"),
    [(reading(), WordArrived(R1, WORD)), (reading(), WordArrived(R1, WORD + 1)), (verifying(), ReadCompleted(R1))],
)
def test_events_out_of_order_raise_with_the_story_and_change_nothing(book, event):
    before = (book.request_ids, book.next_deadline(), book.num_quarantined_blocks)
    with pytest.raises(InvalidTransitionError, match="story of receive r1"):
        book.handle(event, 2)
    assert (book.request_ids, book.next_deadline(), book.num_quarantined_blocks) == before
    assert book.handle(TransferFailed(R1, "reset"), 3) == [ReconnectPeer(PEER)]


# --------------------------------------------------------------------------------------------------------- good and bad


def test_a_receive_is_good_only_after_its_word():
    book = reading(now=10)
    assert book.uses(PEER)
    assert not book.uses(OTHER_PEER)
    assert book.handle(ReadCompleted(R1), 11) == [SubmitWordRead(REQUEST)]
    assert book.request_ids == (R1,)
    assert book.handle(WordArrived(R1, WORD), 12) == [report(Outcome.RECEIVE_VERIFIED, "", 2)]
    assert is_idle(book)
    assert not book.uses(PEER)


def test_another_word_means_that_the_lease_was_over():
    reason = "the lease word is 0x70000000c, granted was 0x70000000b"
    book = verifying()
    assert book.handle(WordArrived(R1, WORD + 1), 2) == [report(Outcome.RECEIVE_STALE, reason, 2)]
    assert is_idle(book)


def test_an_uncovered_receive_never_begins():
    book = ReceiveBook(POLICY)
    uncovered = request(plan=Uncovered("group 1 needs the block at position 3, which is not granted"))
    assert book.start(uncovered, 5) == [ReportReceive(uncovered, Outcome.RECEIVE_UNCOVERED, uncovered.plan.reason, 0)]
    assert is_idle(book)


def test_a_request_has_one_receive_at_a_time():
    book = reading()
    with pytest.raises(ValueError, match="r1 is being received already"):
        book.start(request(peer=OTHER_PEER), 1)
    assert not book.uses(OTHER_PEER)
    lose(book)
    assert book.start(REQUEST, 3) == [SubmitRead(REQUEST, PLAN)]


def test_receives_do_not_disturb_each_other():
    book = reading(now=0)
    book.start(request(R2, OTHER_PEER), 5)
    assert book.request_ids == (R1, R2)
    assert book.next_deadline() == 30
    lose(book)
    assert book.request_ids == (R2,)
    assert book.next_deadline() == 35


@pytest.mark.parametrize("event", [ReadCompleted(R1), WordArrived(R1, WORD), TransferFailed(R1, "reset")])
def test_events_without_a_receive_are_a_bug(event):
    with pytest.raises(ValueError, match="no receive for"):
        ReceiveBook(POLICY).handle(event, 0)


# ------------------------------------------------------------------------------------------------------------- retrying


@pytest.mark.parametrize("make_book", [reading, verifying])
def test_a_receive_whose_transfer_fails_begins_anew(make_book):
    book = retrying(make_book)
    assert book.uses(PEER)
    assert book.num_quarantined_blocks == 0
    assert book.reconnected(PEER, 3) == [SubmitRead(REQUEST, PLAN, "reset")]
    assert book.next_deadline() == 30, "a second try gets no time of its own"
    assert book.handle(ReadCompleted(R1), 4) == [SubmitWordRead(REQUEST)]
    assert book.handle(WordArrived(R1, WORD), 5) == [report(Outcome.RECEIVE_VERIFIED, "", 5)]
    assert is_idle(book)


@pytest.mark.parametrize("num_reads", [0, 1])
def test_there_is_no_third_try(num_reads):
    book = retrying()
    book.reconnected(PEER, 3)
    for _ in range(num_reads):
        book.handle(ReadCompleted(R1), 4)
    both = "again; before that: reset"
    assert book.handle(TransferFailed(R1, "again"), 5) == [report(Outcome.RECEIVE_FAILED, both, 5)]
    assert is_idle(book)


def test_the_word_decides_on_the_second_try_too():
    book = retrying()
    book.reconnected(PEER, 3)
    book.handle(ReadCompleted(R1), 4)
    (stale,) = book.handle(WordArrived(R1, WORD + 1), 5)
    assert stale.outcome is Outcome.RECEIVE_STALE


def test_a_peer_that_cannot_be_reached_ends_the_receive():
    both = "refused; before that: reset"
    assert retrying().not_reconnected(PEER, "refused", 3) == [report(Outcome.RECEIVE_FAILED, both, 3)]


def test_only_the_failed_receives_of_the_peer_begin_anew():
    book = retrying()
    book.start(request(R2), 2)
    assert book.reconnected(OTHER_PEER, 3) == book.not_reconnected(OTHER_PEER, "refused", 3) == []
    assert book.reconnected(PEER, 3) == [SubmitRead(REQUEST, PLAN, "reset")]
    assert book.reconnected(PEER, 4) == [], "it is being read already"


def test_a_receive_may_wait_for_its_peer_from_the_start():
    """Others' reads would put off the moment in which the peer can be connected anew."""
    book = ReceiveBook(POLICY)
    assert book.start(REQUEST, 0, waits=True) == []
    assert book.reconnected(PEER, 3) == [SubmitRead(REQUEST, PLAN)]
    assert book.handle(TransferFailed(R1, "reset"), 4) == [ReconnectPeer(PEER)], "that was its first try"
    book = ReceiveBook(POLICY)
    book.start(REQUEST, 0, waits=True)
    assert book.not_reconnected(PEER, "refused", 3) == [report(Outcome.RECEIVE_FAILED, "refused", 3)]


@pytest.mark.parametrize("make_book", [reading, verifying])
def test_a_transfer_that_ended_with_the_agent_costs_no_try(make_book):
    book = make_book()
    assert book.agent_destroyed("rebuilt", 2) == []
    assert book.agent_destroyed("rebuilt again", 2) == [], "nothing was under way"
    assert book.reconnected(PEER, 3) == [SubmitRead(REQUEST, PLAN, "rebuilt")]
    assert book.handle(TransferFailed(R1, "reset"), 4) == [ReconnectPeer(PEER)]
    assert book.reconnected(PEER, 5) == [SubmitRead(REQUEST, PLAN, "reset")]


def test_waiting_for_a_second_try_has_a_deadline():
    book = retrying()
    assert book.pass_time(29.9) == []
    assert book.pass_time(30) == [report(Outcome.RECEIVE_TIMED_OUT, TIMED_OUT, 30)]
    assert is_idle(book)
    assert book.reconnected(PEER, 31) == []


def test_an_abort_before_the_second_try_is_reported_at_once():
    book = retrying()
    assert book.handle(AbortRequested(R1), 3) == [report(Outcome.RECEIVE_ABORTED, "the request ended", 3)]
    assert is_idle(book)


def test_after_a_bug_every_receive_is_over():
    book = retrying()
    book.start(request(R2), 2)
    book.start(request(RequestId("r3")), 2)
    book.handle(AbortRequested(RequestId("r3")), 3)
    reports = book.fail_all("a bug", 4)
    assert [action.outcome for action in reports] == [
        Outcome.RECEIVE_FAILED,
        Outcome.RECEIVE_FAILED,
        Outcome.RECEIVE_ABORTED,
    ]
    assert is_idle(book)


# ------------------------------------------------------------------------------------------------------------- draining

# How a transfer that nobody wants any more may end: all the same, as long as it ends.
ENDS = [ReadCompleted(R1), WordArrived(R1, WORD), WordArrived(R1, 0), TransferFailed(R1, "reset")]


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("make_book", [reading, verifying])
def test_an_aborted_receive_is_reported_when_its_transfer_has_ended(make_book, end):
    book = make_book()
    assert book.handle(AbortRequested(R1), 2) == []
    assert book.request_ids == (R1,)
    assert book.num_quarantined_blocks == 3
    assert book.uses(PEER)
    assert book.handle(end, 3) == [report(Outcome.RECEIVE_ABORTED, "the request ended", 3)]
    assert is_idle(book)


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("make_book", [reading, verifying])
def test_a_receive_that_took_too_long_is_reported_when_its_transfer_has_ended(make_book, end):
    book = make_book()
    assert book.pass_time(29.9) == []
    assert book.num_quarantined_blocks == 0
    assert book.pass_time(30) == []
    assert book.num_quarantined_blocks == 3
    assert book.next_deadline() == 50
    assert book.handle(end, 31) == [report(Outcome.RECEIVE_TIMED_OUT, TIMED_OUT, 31)]
    assert is_idle(book)


def test_the_deadline_is_for_both_transfers_together():
    book = verifying()
    assert book.next_deadline() == 30


def test_the_agent_is_rebuilt_when_a_transfer_does_not_end():
    book = reading()
    book.start(request(R2, OTHER_PEER), 25)
    book.pass_time(30)
    assert book.pass_time(49.9) == []
    (rebuild,) = book.pass_time(50)
    assert isinstance(rebuild, RebuildAgent)
    assert rebuild.reason.startswith("a transfer did not end within 20 s: story of receive r1:")
    assert rebuild.peers == {PEER}
    (late,) = book.agent_destroyed("rebuilt", 51)
    assert late.outcome is Outcome.RECEIVE_TIMED_OUT
    assert book.request_ids == (R2,), "it was not the one that did not end"


def test_a_rebuild_that_does_not_help_is_asked_for_again():
    book = reading()
    book.pass_time(30)
    assert len(book.pass_time(50)) == 1
    assert book.pass_time(69.9) == []
    assert len(book.pass_time(70)) == 1


def test_several_stuck_transfers_ask_for_one_rebuild():
    book = reading()
    book.start(request(R2, OTHER_PEER), 0)
    book.pass_time(30)
    (rebuild,) = book.pass_time(50)
    assert rebuild.peers == {PEER, OTHER_PEER}


# ---------------------------------------------------------------------------------------------------------------- races


@pytest.mark.parametrize("make_book", [reading, verifying])
def test_abort_and_deadline_in_either_order(make_book):
    book = make_book()
    book.handle(AbortRequested(R1), 30)
    book.pass_time(30)
    assert book.next_deadline() == 50
    assert book.handle(TransferFailed(R1, "reset"), 31) == [report(Outcome.RECEIVE_ABORTED, "the request ended", 31)]

    book = make_book()
    book.pass_time(30)
    assert book.handle(AbortRequested(R1), 30) == []
    assert book.handle(TransferFailed(R1, "reset"), 31) == [report(Outcome.RECEIVE_TIMED_OUT, TIMED_OUT, 31)]


def test_repeated_aborts_and_aborts_of_nothing_are_ignored():
    book = reading()
    assert book.handle(AbortRequested(R2), 1) == []
    assert book.handle(AbortRequested(R1), 1) == []
    assert book.handle(AbortRequested(R1), 2) == []
    assert book.next_deadline() == 21
    assert len(book.handle(ReadCompleted(R1), 3)) == 1
    assert book.handle(AbortRequested(R1), 4) == []


@pytest.mark.parametrize("late", [AbortRequested(R1), None])
@pytest.mark.parametrize("end", [WordArrived(R1, WORD), WordArrived(R1, 0)])
def test_what_comes_after_the_end_changes_nothing(end, late):
    book = verifying()
    assert len(book.handle(end, 30)) == 1
    assert (book.pass_time(30) if late is None else book.handle(late, 30)) == []
    assert is_idle(book)


def test_a_word_that_arrives_with_the_deadline_in_either_order():
    book = verifying()
    (good,) = book.handle(WordArrived(R1, WORD), 30)
    assert good.outcome is Outcome.RECEIVE_VERIFIED
    book = verifying()
    book.pass_time(30)
    (late,) = book.handle(WordArrived(R1, WORD), 30)
    assert late.outcome is Outcome.RECEIVE_TIMED_OUT
