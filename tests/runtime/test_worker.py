"""A decode worker's pull side: the loop driven turn by turn, and the thread that runs it."""

import dataclasses
import threading
import time
from collections import Counter

import numpy as np
import pytest

from pd_transfer.core.admissions import AbortReceive
from pd_transfer.core.outcomes import Level, Outcome, Quantity
from pd_transfer.core.params import PeerKey, RequestId
from pd_transfer.core.peers import RetirePeer
from pd_transfer.errors import TransportError
from pd_transfer.runtime.orders import StepOrders, WorkerReport
from pd_transfer.runtime.worker import NoFence, PullThread
from tests.runtime.builders import DEADLINE_SECONDS, Gate, eventually
from tests.runtime.pull_bed import (
    DRAIN_SECONDS,
    NOTHING_NEEDED,
    NUM_BYTES,
    NUM_DESCRIPTORS,
    OTHER_NEEDED,
    OTHER_PEER,
    PEER,
    READ_SECONDS,
    Bed,
)


@pytest.fixture
def bed():
    bed = Bed()
    yield bed
    bed.assert_at_rest()


def endings(report):
    return {str(result.request_id): result.outcome for result in report.results}


# Good receives


def test_reads_the_kv_and_then_the_word(bed):
    bed.connect()
    expected = bed.expected()
    bed.fabric.hold_new = True
    assert not bed.turn(bed.receive()).results
    (read,) = bed.fabric.reads
    assert (read.landing, len(read.copies)) == (None, NUM_DESCRIPTORS)
    read.let_go()
    assert not bed.turn(after=0.5).results, "reported before the word has arrived"
    (word_read,) = bed.fabric.reads
    assert word_read.landing is not None
    np.testing.assert_array_equal(bed.local.bytes, expected)
    word_read.let_go()
    (result,) = bed.turn(after=0.25).results
    assert (result.request_id, result.outcome, result.reason) == ("a", Outcome.RECEIVE_VERIFIED, "")
    assert result.num_blocks_by_group == (4, 2)
    assert result.quantities == {
        Quantity.TOKENS_VERIFIED: 16,
        Quantity.BYTES_VERIFIED: NUM_BYTES,
        Quantity.DESCRIPTORS: NUM_DESCRIPTORS,
        # Blocks 1, 2 come from 3, 4: one run in a dense layer. Padded layers never merge.
        Quantity.DESCRIPTORS_MERGED: 2 * 3 + 2 * 2,
        Quantity.READ_MICROSECONDS: 750_000,
    }
    np.testing.assert_array_equal(bed.local.bytes, expected)


def test_what_the_word_is_read_for_is_the_state_after_the_last_byte(bed):
    """The lease ends between the last byte and the word read: too late to trust, so it must be refused."""
    bed.connect()
    bed.after_read = lambda request: bed.prefill.change_word(slot=0, generation=1)
    assert endings(bed.finish(bed.receive())) == {"a": Outcome.RECEIVE_STALE}


def test_a_plan_with_nothing_to_read_still_reads_the_word(bed):
    bed.connect()
    bed.fabric.hold_new = True
    bed.turn(bed.receive(needed=NOTHING_NEEDED))
    (read,) = bed.fabric.reads
    assert read.landing is not None
    bed.fabric.let_go()
    (result,) = bed.turn().results
    assert result.outcome is Outcome.RECEIVE_VERIFIED
    assert (result.quantities[Quantity.BYTES_VERIFIED], result.num_blocks_by_group) == (0, (0, 0))
    np.testing.assert_array_equal(bed.local.bytes, bed.before)


def test_nothing_to_read_and_the_lease_is_over(bed):
    bed.connect()
    bed.prefill.change_word(slot=0, generation=1)
    report = bed.turn(bed.receive(needed=NOTHING_NEEDED))
    assert endings(report) == {"a": Outcome.RECEIVE_STALE}


def test_many_receives_share_the_loop(bed):
    bed.connect()
    bed.connect(OTHER_PEER, bed.other_prefill)
    bed.fabric.hold_new = True
    bed.turn(bed.receive("a"), bed.receive("b", OTHER_PEER, OTHER_NEEDED))
    bed.fabric.reads[1].let_go()
    bed.turn()
    bed.fabric.reads[1].let_go()
    assert endings(bed.turn()) == {"b": Outcome.RECEIVE_VERIFIED}
    bed.fabric.let_go()
    assert endings(bed.finish()) == {"a": Outcome.RECEIVE_VERIFIED}


# Lost receives


def test_word_changed(bed):
    bed.connect()
    bed.prefill.change_word(slot=5, generation=8)
    report = bed.finish(bed.receive(slot=5, generation=7))
    assert endings(report) == {"a": Outcome.RECEIVE_STALE}
    assert "granted was 0xabcd123400000007" in report.results[0].reason
    assert not report.troubled_peers, "an ended lease is not the peer's trouble"
    assert not report.results[0].quantities


def test_word_of_another_boot(bed):
    bed.connect()
    bed.prefill.words.revoke_all()
    assert endings(bed.finish(bed.receive())) == {"a": Outcome.RECEIVE_STALE}


def test_a_block_that_was_not_granted_is_not_read(bed):
    bed.connect()
    report = bed.turn(bed.receive(granted=((3, 4, 5, 9), (0, 0, 7, 0))))
    assert endings(report) == {"a": Outcome.RECEIVE_UNCOVERED}
    assert not report.troubled_peers
    np.testing.assert_array_equal(bed.local.bytes, bed.before)


def test_a_peer_that_was_never_connected(bed):
    report = bed.turn(bed.receive())
    assert endings(report) == {"a": Outcome.RECEIVE_UNCOVERED}
    assert "not connected" in report.results[0].reason


def test_failing_add_peer(bed):
    bed.prefill.transport.close()
    assert bed.turn(bed.connect_order()).troubled_peers == {PEER}
    report = bed.turn(bed.receive())
    assert endings(report) == {"a": Outcome.RECEIVE_FAILED}
    assert not report.troubled_peers, "said twice"
    assert endings(bed.turn(RetirePeer(PeerKey(PEER)), bed.receive("b"))) == {"b": Outcome.RECEIVE_UNCOVERED}


def test_failing_submit(bed):
    bed.connect()
    bed.prefill.transport.close()
    report = bed.turn(bed.receive())
    assert endings(report) == {"a": Outcome.RECEIVE_FAILED}
    assert report.troubled_peers == {PEER}


def test_failing_submit_of_the_word_read(bed):
    bed.connect()
    report = bed.finish(bed.receive(slot=10_000))
    assert endings(report) == {"a": Outcome.RECEIVE_FAILED}
    assert "no lease word" in report.results[0].reason


@pytest.mark.parametrize("num_reads_before", [0, 1], ids=["kv", "word"])
def test_failing_poll(bed, num_reads_before):
    bed.connect()
    bed.fabric.hold_new = True
    bed.turn(bed.receive())
    for _ in range(num_reads_before):
        bed.fabric.reads[0].let_go()
        bed.turn()
    bed.prefill.transport.close()
    report = bed.turn()
    assert endings(report) == {"a": Outcome.RECEIVE_FAILED}
    assert report.troubled_peers == {PEER}


# Second tries


@pytest.mark.parametrize("num_reads_before", [0, 1], ids=["kv", "word"])
def test_a_read_that_fails_is_tried_once_more(bed, num_reads_before):
    bed.connect()
    expected = bed.expected()
    bed.fabric.hold_new = True
    bed.turn(bed.receive())
    for _ in range(num_reads_before):
        bed.fabric.reads[0].let_go()
        bed.turn()
    bed.fabric.reads[0].fail("the cable")
    bed.fabric.hold_new = False
    report = bed.turn()
    assert (report.outcomes, report.troubled_peers) == ({Outcome.RECEIVE_RETRIED: 1}, set())
    assert endings(bed.finish()) == {"a": Outcome.RECEIVE_VERIFIED}
    np.testing.assert_array_equal(bed.local.bytes, expected)


def test_a_read_that_fails_twice_is_the_peers_trouble(bed):
    bed.connect()
    bed.fabric.hold_new = True
    bed.turn(bed.receive())
    bed.fabric.reads[0].fail("the cable")
    bed.turn()
    for read in bed.fabric.reads:
        read.fail("the cable, again")
    report = bed.turn()
    assert endings(report) == {"a": Outcome.RECEIVE_FAILED}
    assert report.results[0].reason == "the cable, again; before that: the cable"
    assert report.troubled_peers == {PEER}


def test_a_second_try_waits_for_the_other_reads_of_its_peer(bed):
    """Connecting anew while a read is outstanding would forget it, and it would go on writing."""
    bed.connect()
    bed.fabric.hold_new = True
    bed.turn(bed.receive("a"), bed.receive("b", needed=OTHER_NEEDED))
    first, second = bed.fabric.reads
    first.fail("the cable")
    report = bed.turn()
    assert (report.results, report.outcomes) == ([], {}), "it was not tried once more yet"
    assert bed.loop.levels()[Level.RECEIVES] == 2
    second.fail("the cable")
    bed.fabric.hold_new = False
    assert bed.turn().outcomes == {Outcome.RECEIVE_RETRIED: 2}
    assert endings(bed.finish()) == dict.fromkeys(("a", "b"), Outcome.RECEIVE_VERIFIED)


def test_a_busy_peer_does_not_put_a_second_try_off(bed):
    """What comes later waits too, and that is not its second try."""
    bed.connect()
    bed.fabric.hold_new = True
    bed.turn(bed.receive("a"), bed.receive("b", needed=OTHER_NEEDED))
    first, second = bed.fabric.reads
    first.fail("the cable")
    bed.turn()
    bed.turn(bed.receive("c", needed=NOTHING_NEEDED))
    assert bed.fabric.reads == [second]
    bed.fabric.hold_new = False
    second.let_go()
    report = bed.turn(after=READ_SECONDS / 2)
    report.add(bed.finish())
    report.add(bed.finish())
    assert endings(report) == dict.fromkeys(("a", "b", "c"), Outcome.RECEIVE_VERIFIED)
    assert not report.troubled_peers


def test_an_abort_of_a_second_try_that_waits(bed):
    bed.connect()
    bed.fabric.hold_new = True
    bed.turn(bed.receive("a"), bed.receive("b", needed=OTHER_NEEDED))
    bed.fabric.reads[0].fail("the cable")
    bed.turn()
    assert endings(bed.turn(AbortReceive(RequestId("a")))) == {"a": Outcome.RECEIVE_ABORTED}
    bed.fabric.hold_new = False
    bed.fabric.let_go()
    assert endings(bed.finish()) == {"b": Outcome.RECEIVE_VERIFIED}
    assert not bed.turn().troubled_peers


def test_a_peer_that_retires_between_the_tries_stays_for_the_second(bed):
    bed.connect()
    bed.fabric.hold_new = True
    bed.turn(bed.receive("a"), bed.receive("b", needed=OTHER_NEEDED))
    bed.fabric.reads[0].fail("the cable")
    bed.turn(RetirePeer(PeerKey(PEER)))
    bed.fabric.hold_new = False
    bed.fabric.let_go()
    assert endings(bed.finish()) == dict.fromkeys(("a", "b"), Outcome.RECEIVE_VERIFIED)
    assert forgotten(bed)


# Reads that do not end


def test_a_late_read_is_reported_once_it_has_ended(bed):
    bed.connect()
    read = bed.make_stuck()
    assert not bed.turn(after=DRAIN_SECONDS - 0.1).results
    read.let_go()
    report = bed.turn()
    assert endings(report) == {"a": Outcome.RECEIVE_TIMED_OUT}
    assert report.troubled_peers == {PEER}
    assert not report.outcomes


def test_a_late_word_is_not_believed(bed):
    bed.connect()
    bed.fabric.hold_new = True
    bed.turn(bed.receive(needed=NOTHING_NEEDED))
    bed.turn(after=READ_SECONDS)
    bed.fabric.let_go()
    assert endings(bed.turn()) == {"a": Outcome.RECEIVE_TIMED_OUT}


def test_a_read_that_never_ends_costs_the_agent(bed):
    bed.connect()
    bed.connect(OTHER_PEER, bed.other_prefill)
    stuck = bed.make_stuck("a")
    bed.turn(bed.receive("b", OTHER_PEER, OTHER_NEEDED), after=DRAIN_SECONDS - 0.1)
    report = bed.turn(after=0.1)
    assert endings(report) == {"a": Outcome.RECEIVE_TIMED_OUT}
    assert report.troubled_peers == {PEER}
    assert report.outcomes == {Outcome.AGENT_REBUILT: 1, Outcome.RECEIVE_RETRIED: 1}
    stuck.copy_half()
    np.testing.assert_array_equal(bed.local.bytes, bed.before)
    bed.fabric.hold_new = False
    bed.fabric.let_go()
    report = bed.finish()
    assert endings(report) == {"b": Outcome.RECEIVE_VERIFIED}, "its peer was well"
    assert not report.troubled_peers
    assert bed.transport.num_outstanding() == 0, "the agent's reads are still remembered"


def test_after_a_rebuild_the_peer_that_hung_is_left_to_the_scheduler(bed):
    bed.connect()
    bed.make_stuck()
    bed.turn(after=DRAIN_SECONDS)
    bed.fabric.let_go()
    report = bed.turn(bed.receive("b"))
    assert endings(report) == {"b": Outcome.RECEIVE_FAILED}
    assert report.results[0].reason.startswith("the peer has had trouble before")
    bed.turn(RetirePeer(PeerKey(PEER)), bed.connect_order("prefill:1#3"))
    assert endings(bed.finish(bed.receive("c", "prefill:1#3"))) == {"c": Outcome.RECEIVE_VERIFIED}


def test_the_peer_of_an_aborted_read_that_hung_is_left_to_the_scheduler(bed):
    bed.connect()
    bed.connect(OTHER_PEER, bed.other_prefill)
    bed.fabric.hold_new = True
    bed.turn(bed.receive())
    bed.turn(AbortReceive(RequestId("a")))
    report = bed.turn(after=DRAIN_SECONDS)
    assert endings(report) == {"a": Outcome.RECEIVE_ABORTED}
    assert report.troubled_peers == {PEER}
    warmed_up = {warm_up.agent_name for warm_up in bed.fabric.reads}
    assert warmed_up == {bed.other_prefill.served.memory.agent_name}, "the peer that hangs is not read from"
    bed.fabric.let_go()
    assert not bed.turn().troubled_peers


# Aborts


@pytest.mark.parametrize("num_reads_before", [0, 1], ids=["transferring", "verifying"])
def test_abort_drains(bed, num_reads_before):
    bed.connect()
    bed.fabric.hold_new = True
    bed.turn(bed.receive())
    for _ in range(num_reads_before):
        bed.fabric.reads[0].let_go()
        bed.turn()
    assert not bed.turn(AbortReceive(RequestId("a"))).results, "its blocks may still be written to"
    bed.fabric.reads[0].let_go()
    report = bed.turn()
    assert endings(report) == {"a": Outcome.RECEIVE_ABORTED}
    assert not report.troubled_peers


def test_abort_while_draining_changes_nothing(bed):
    bed.connect()
    read = bed.make_stuck()
    assert not bed.turn(AbortReceive(RequestId("a"))).results
    read.let_go()
    assert endings(bed.turn()) == {"a": Outcome.RECEIVE_TIMED_OUT}


def test_an_aborted_read_that_never_ends_costs_the_agent(bed):
    bed.connect()
    bed.fabric.hold_new = True
    bed.turn(bed.receive())
    bed.turn(AbortReceive(RequestId("a")))
    report = bed.turn(after=DRAIN_SECONDS)
    assert endings(report) == {"a": Outcome.RECEIVE_ABORTED}
    assert report.outcomes == {Outcome.AGENT_REBUILT: 1}


def test_abort_in_the_step_that_starts_the_receive(bed):
    bed.connect()
    assert endings(bed.turn(bed.receive(), AbortReceive(RequestId("a")))) == {"a": Outcome.RECEIVE_ABORTED}


def test_abort_of_an_unknown_or_ended_request_is_ignored(bed):
    bed.connect()
    bed.turn(AbortReceive(RequestId("never seen")))
    bed.finish(bed.receive())
    report = bed.turn(AbortReceive(RequestId("a")))
    assert not report.results
    assert not report.outcomes


# Warm-ups


def test_failing_warm_up(bed):
    bed.fabric.fail_new = "the cable"
    assert bed.turn(bed.connect_order()).troubled_peers == {PEER}


def test_warm_up_that_cannot_start(bed):
    bed.transport.plant("submit_word_read", error=TransportError)
    assert bed.turn(bed.connect_order()).troubled_peers == {PEER}
    bed.turn(RetirePeer(PeerKey(PEER)))
    assert forgotten(bed)


def test_peer_dies_during_its_warm_up(bed):
    bed.fabric.hold_new = True
    bed.turn(bed.connect_order())
    bed.prefill.transport.close()
    assert bed.turn().troubled_peers == {PEER}


def test_stuck_warm_up_is_blamed_and_then_costs_the_agent(bed):
    bed.fabric.hold_new = True
    bed.turn(bed.connect_order())
    assert bed.turn(after=READ_SECONDS).troubled_peers == {PEER}
    report = bed.turn(after=DRAIN_SECONDS - 0.1)
    assert (report.troubled_peers, report.outcomes) == (set(), {})
    report = bed.turn(after=0.1)
    assert report.outcomes == {Outcome.AGENT_REBUILT: 1}
    assert bed.transport.num_outstanding() == 0


def test_two_stuck_warm_ups_cost_the_agent_once(bed):
    bed.fabric.hold_new = True
    bed.turn(bed.connect_order(), bed.connect_order(OTHER_PEER, bed.other_prefill))
    assert bed.turn(after=READ_SECONDS).troubled_peers == {PEER, OTHER_PEER}
    assert bed.turn(after=DRAIN_SECONDS).outcomes == {Outcome.AGENT_REBUILT: 1}
    assert not bed.turn(after=DRAIN_SECONDS).outcomes


def test_late_warm_up_ends_after_all(bed):
    bed.fabric.hold_new = True
    bed.turn(bed.connect_order())
    bed.turn(after=READ_SECONDS)
    bed.fabric.let_go()
    report = bed.turn(after=DRAIN_SECONDS)
    assert (report.troubled_peers, report.outcomes) == (set(), {})


# Peers that leave


def forgotten(bed, key=PEER):
    """Whether neither the loop nor the transport remembers a peer: its agent can be added under another key."""
    report = bed.turn(bed.connect_order("probe"))
    free = not report.troubled_peers
    bed.turn(RetirePeer(PeerKey("probe")))
    report = bed.turn(bed.receive(f"probe {len(bed.ordered)}", key))
    return free and "not connected" in report.results[0].reason


def test_a_retired_peer_is_forgotten(bed):
    bed.connect()
    assert not bed.turn(RetirePeer(PeerKey(PEER))).troubled_peers
    assert forgotten(bed)


def test_a_peer_that_retires_during_its_warm_up_stays_until_that_ends(bed):
    bed.fabric.hold_new = True
    bed.turn(bed.connect_order())
    report = bed.turn(RetirePeer(PeerKey(PEER)))
    assert not report.outcomes, "removed while its read is outstanding"
    assert bed.loop.num_outstanding == 2
    bed.fabric.let_go()
    bed.turn()
    assert forgotten(bed)


def test_a_peer_that_retires_during_a_stuck_warm_up_goes_with_the_agent(bed):
    bed.fabric.hold_new = True
    bed.turn(bed.connect_order(), RetirePeer(PeerKey(PEER)))
    bed.turn(after=READ_SECONDS)
    bed.turn(after=DRAIN_SECONDS)
    bed.fabric.let_go()
    assert forgotten(bed)


def test_a_peer_that_retires_during_a_read_stays_until_that_has_drained(bed):
    bed.connect()
    read = bed.make_stuck()
    assert not bed.turn(RetirePeer(PeerKey(PEER))).outcomes
    read.let_go()
    bed.fabric.hold_new = False
    assert endings(bed.turn()) == {"a": Outcome.RECEIVE_TIMED_OUT}
    assert forgotten(bed)


def test_an_agent_comes_back_while_its_former_key_still_warms_up(bed):
    bed.fabric.hold_new = True
    bed.turn(bed.connect_order())
    fresh = "prefill:1#2"
    report = bed.turn(RetirePeer(PeerKey(PEER)), bed.connect_order(fresh), bed.receive("a", fresh))
    assert (report.results, report.troubled_peers) == ([], set())
    bed.fabric.hold_new = False
    bed.fabric.let_go()
    report = bed.finish()
    report.add(bed.finish())
    assert endings(report) == {"a": Outcome.RECEIVE_VERIFIED}
    assert (report.troubled_peers, report.outcomes) == (set(), {})


def test_retiring_an_unknown_peer_is_ignored(bed):
    report = bed.turn(RetirePeer(PeerKey("never seen")))
    assert (report.outcomes, report.troubled_peers) == ({}, set())


# Bugs of ours or of a transport


@pytest.mark.parametrize("method", ["submit_read", "poll", "submit_word_read", "take_word"])
def test_an_internal_error_fails_every_receive_and_no_more(bed, method):
    bed.connect()
    bed.fabric.hold_new = True
    bed.turn(bed.receive("a"))
    bed.fabric.let_go()
    bed.transport.plant(method)
    report = bed.finish(bed.receive("b", needed=OTHER_NEEDED))
    assert not bed.transport.planted, "the error was not met"
    assert set(endings(report)) == {"a", "b"}
    assert Outcome.RECEIVE_FAILED in endings(report).values()
    assert report.outcomes == {Outcome.INTERNAL_ERROR: 1, Outcome.AGENT_REBUILT: 1}
    assert report.troubled_peers == {PEER}
    works_again(bed)


def works_again(bed):
    """A peer that is greeted anew can be read from."""
    report = bed.finish(bed.connect_order("again"), bed.receive("later", "again"))
    assert endings(report) == {"later": Outcome.RECEIVE_VERIFIED}
    assert not report.troubled_peers


def test_an_internal_error_in_one_order_does_not_lose_the_others(bed):
    bed.connect()
    broken = dataclasses.replace(bed.receive("broken"), grant=None)
    report = bed.turn(bed.receive("before"), broken, bed.receive("after", needed=OTHER_NEEDED))
    assert endings(report) == dict.fromkeys(("before", "broken", "after"), Outcome.RECEIVE_FAILED)
    assert report.outcomes[Outcome.INTERNAL_ERROR] == 1


def test_an_order_that_comes_twice_is_reported_once(bed):
    bed.connect()
    report = bed.turn(bed.receive("a"), bed.receive("a"))
    assert endings(report) == {"a": Outcome.RECEIVE_FAILED}


@pytest.mark.parametrize("method", ["add_peer", "remove_peer"])
def test_an_internal_error_around_a_peer(bed, method):
    bed.transport.plant(method)
    report = bed.finish(bed.connect_order(), RetirePeer(PeerKey(PEER)))
    assert report.outcomes[Outcome.INTERNAL_ERROR] == 1
    works_again(bed)


def test_an_agent_that_cannot_be_rebuilt_is_closed_and_everything_is_reported(bed):
    bed.connect()
    stuck = bed.make_stuck()
    bed.transport.plant("rebuild")
    report = bed.turn(after=DRAIN_SECONDS)
    assert endings(report) == {"a": Outcome.RECEIVE_TIMED_OUT}
    stuck.copy_half()
    np.testing.assert_array_equal(bed.local.bytes, bed.before)
    report = bed.turn(bed.connect_order("again"), bed.receive("b", "again"))
    assert endings(report) == {"b": Outcome.RECEIVE_FAILED}
    assert "again" in report.troubled_peers


def test_an_agent_that_cannot_be_made_at_once_is_made_for_the_next_connection(bed):
    bed.connect()
    stuck = bed.make_stuck()
    bed.transport.plant("rebuild", error=TransportError)
    report = bed.turn(after=DRAIN_SECONDS)
    assert endings(report) == {"a": Outcome.RECEIVE_TIMED_OUT}
    stuck.copy_half()
    np.testing.assert_array_equal(bed.local.bytes, bed.before)
    bed.fabric.hold_new = False
    bed.turn(RetirePeer(PeerKey(PEER)))
    bed.connect("again")
    assert endings(bed.finish(bed.receive("b", "again"))) == {"b": Outcome.RECEIVE_VERIFIED}


def test_a_closed_transport_ends_every_receive(bed):
    """``rebuild`` then raises TransportError, as its contract says."""
    bed.connect()
    bed.fabric.hold_new = True
    bed.turn(bed.receive())
    bed.transport.close()
    assert endings(bed.turn()) == {"a": Outcome.RECEIVE_FAILED}
    bed.loop.fail_everything(bed.now)
    bed.turn()
    with pytest.raises(TransportError):
        bed.transport.rebuild()


# The thread


@pytest.fixture
def thread(bed):
    thread = PullThread(bed.loop, bed.transport)
    yield thread
    thread.close()
    assert not any(t.name == "pd-transfer-pull" for t in threading.enumerate())


def post(bed, thread, *, fence=None, **orders):
    bed.ordered += [order.request_id for order in orders.get("receives", ())]
    thread.post(StepOrders(**orders), fence or NoFence())


def wait_for_results(thread, count=1):
    """The reports until ``count`` receives have ended, added up."""
    total = WorkerReport()

    def is_there():
        report = thread.take_report()
        total.add(report)
        total.levels = report.levels
        return len(total.results) >= count

    eventually(f"{count} results", is_there)
    return total


def collect(bed, thread, count=1):
    report = wait_for_results(thread, count)
    bed.reported += [result.request_id for result in report.results]
    return report


def test_thread_receives(bed, thread):
    expected = bed.expected()
    post(bed, thread, connects=[bed.connect_order()], receives=[bed.receive()])
    assert endings(collect(bed, thread)) == {"a": Outcome.RECEIVE_VERIFIED}
    np.testing.assert_array_equal(bed.local.bytes, expected)
    assert not thread.take_report().results, "handed out twice"


def test_thread_wakes_from_idleness(bed, thread):
    post(bed, thread, connects=[bed.connect_order()])
    for number in range(20):
        eventually("idleness", lambda: bed.loop.num_outstanding == 0)
        post(bed, thread, receives=[bed.receive(f"r{number}")])
        assert endings(collect(bed, thread)) == {f"r{number}": Outcome.RECEIVE_VERIFIED}


def test_the_same_engine_retires_and_comes_back_in_one_step(bed, thread):
    """Its side channel broke for a moment while decode was idle: the agent is the same, the key is not."""
    post(bed, thread, connects=[bed.connect_order()], receives=[bed.receive()])
    collect(bed, thread)
    fresh = "prefill:1#2"
    post(bed, thread, retires=[RetirePeer(PeerKey(PEER))], connects=[bed.connect_order(fresh)])
    post(bed, thread, receives=[bed.receive("b", fresh)])
    report = collect(bed, thread)
    assert endings(report) == {"b": Outcome.RECEIVE_VERIFIED}
    assert not report.troubled_peers


@pytest.fixture
def patient(bed):
    """A thread whose reports wait as long as it takes when a step is idle."""
    thread = PullThread(bed.loop, bed.transport, idle_patience_seconds=DEADLINE_SECONDS)
    yield thread
    thread.close()


def test_an_idle_step_waits_for_its_read(bed, patient):
    post(bed, patient, connects=[bed.connect_order()])
    post(bed, patient, receives=[bed.receive()], is_idle=True)
    report = patient.take_report()
    assert endings(report) == {"a": Outcome.RECEIVE_VERIFIED}
    assert not report.levels[Level.RECEIVES]
    bed.reported.append("a")


def test_an_idle_step_waits_for_no_more_than_one_end(bed, patient):
    post(bed, patient, connects=[bed.connect_order()])
    gate = Gate()
    post(bed, patient, receives=[bed.receive()])
    post(bed, patient, receives=[bed.receive("b", needed=OTHER_NEEDED)], fence=gate, is_idle=True)
    assert endings(patient.take_report()) == {"a": Outcome.RECEIVE_VERIFIED}
    gate.is_open = True
    assert endings(patient.take_report()) == {"b": Outcome.RECEIVE_VERIFIED}
    bed.reported += ["a", "b"]


@pytest.mark.parametrize("is_idle", [True, False])
def test_a_step_waits_for_nothing_when_nothing_is_read_or_something_computed(bed, patient, is_idle):
    """It would wait for a deadline that fails this test."""
    post(bed, patient, connects=[bed.connect_order()])
    eventually("idleness", lambda: bed.loop.num_outstanding == 0)
    bed.fabric.hold_new = True
    receives = [] if is_idle else [bed.receive()]
    post(bed, patient, receives=receives, is_idle=is_idle)
    begin = time.monotonic()
    assert not patient.take_report().results
    assert time.monotonic() - begin < DEADLINE_SECONDS
    bed.fabric.let_go()
    collect(bed, patient, len(receives))


def test_an_idle_step_loses_its_patience(bed):
    thread = PullThread(bed.loop, bed.transport, idle_patience_seconds=0.001)
    try:
        bed.fabric.hold_new = True
        post(bed, thread, connects=[bed.connect_order()], receives=[bed.receive()], is_idle=True)
        report = thread.take_report()
        assert not report.results
        assert report.levels[Level.RECEIVES] == 1
        bed.fabric.let_go()
        collect(bed, thread)
    finally:
        thread.close()


def test_a_fence_delays_the_read(bed, thread):
    gate = Gate()
    post(bed, thread, connects=[bed.connect_order()])
    post(bed, thread, receives=[bed.receive()], fence=gate)
    post(bed, thread, receives=[bed.receive("b", needed=OTHER_NEEDED)])
    assert gate.looked_at.wait(10)
    report = thread.take_report()
    assert not report.results
    assert report.levels[Level.RECEIVES] == 2, "what waits behind a fence is held, too"
    np.testing.assert_array_equal(bed.local.bytes, bed.before)
    gate.is_open = True
    report = collect(bed, thread, 2)
    assert endings(report) == {"a": Outcome.RECEIVE_VERIFIED, "b": Outcome.RECEIVE_VERIFIED}


def test_a_read_under_way_goes_on_behind_a_closed_fence(bed, thread):
    gate = Gate()
    bed.fabric.hold_new = True
    post(bed, thread, connects=[bed.connect_order()], receives=[bed.receive()])
    eventually("the read", lambda: len(bed.fabric.reads) == 3)
    post(bed, thread, receives=[bed.receive("b", needed=OTHER_NEEDED)], fence=gate)
    bed.fabric.let_go()
    assert endings(collect(bed, thread)) == {"a": Outcome.RECEIVE_VERIFIED}
    gate.is_open = True
    assert endings(collect(bed, thread)) == {"b": Outcome.RECEIVE_VERIFIED}


class BrokenFence:
    def has_passed(self):
        raise RuntimeError("the accelerator is gone")


def test_a_fence_that_raises_fails_what_is_behind_it(bed, thread):
    post(bed, thread, connects=[bed.connect_order()])
    post(bed, thread, receives=[bed.receive()], fence=BrokenFence())
    post(bed, thread, receives=[bed.receive("b", needed=OTHER_NEEDED)])
    report = collect(bed, thread, 2)
    assert endings(report) == {"a": Outcome.RECEIVE_FAILED, "b": Outcome.RECEIVE_VERIFIED}


def test_thread_contains_internal_errors(bed, thread):
    bed.transport.plant("poll")
    post(bed, thread, connects=[bed.connect_order()], receives=[bed.receive()])
    report = collect(bed, thread)
    assert endings(report) == {"a": Outcome.RECEIVE_FAILED}
    assert report.outcomes[Outcome.INTERNAL_ERROR] == 1
    post(bed, thread, connects=[bed.connect_order("again")], receives=[bed.receive("b", "again")])
    assert endings(collect(bed, thread)) == {"b": Outcome.RECEIVE_VERIFIED}


def test_thread_survives_a_rebuild_that_raises(bed, thread):
    bed.transport.plant("poll", "rebuild")
    post(bed, thread, connects=[bed.connect_order()], receives=[bed.receive()])
    assert endings(collect(bed, thread)) == {"a": Outcome.RECEIVE_FAILED}
    assert bed.transport.num_closed == 1
    post(bed, thread, connects=[bed.connect_order("again")], receives=[bed.receive("b", "again")])
    assert endings(collect(bed, thread)) == {"b": Outcome.RECEIVE_FAILED}


def test_thread_gives_up_by_its_clock():
    bed, now = Bed(), [0.0]
    bed.fabric.hold_new = True
    thread = PullThread(bed.loop, bed.transport, clock=lambda: now[0])
    try:
        post(bed, thread, connects=[bed.connect_order()], receives=[bed.receive()])
        eventually("the read", lambda: len(bed.fabric.reads) == 3)
        now[0] += READ_SECONDS
        eventually("draining", lambda: thread.take_report().levels[Level.QUARANTINED_BLOCKS])
        now[0] += DRAIN_SECONDS
        assert endings(collect(bed, thread)) == {"a": Outcome.RECEIVE_TIMED_OUT}
    finally:
        thread.close()
    bed.assert_at_rest()


def test_close_ends_reads_that_are_under_way():
    bed = Bed()
    bed.fabric.hold_new = True
    thread = PullThread(bed.loop, bed.transport)
    post(bed, thread, connects=[bed.connect_order()], receives=[bed.receive()])
    eventually("the read", lambda: len(bed.fabric.reads) == 3)
    read = bed.fabric.reads[2]
    thread.close()
    thread.close()
    read.let_go()
    read.copy_half()
    np.testing.assert_array_equal(bed.local.bytes, bed.before)
    assert not bed.fabric.reads
    thread.post(StepOrders(receives=[bed.receive("late")]), NoFence())
    assert not thread.take_report().results


def test_reports_of_ranks_add_up():
    first = WorkerReport(Counter({1: 1}), [], {PeerKey("x")}, Counter({Level.RECEIVES: 1}), Counter())
    second = WorkerReport(Counter({1: 1, 2: 1}), [], {PeerKey("y")}, Counter({Level.RECEIVES: 2}), Counter())
    first.add(second)
    assert first.confirmed == {1: 2, 2: 1}
    assert first.troubled_peers == {"x", "y"}
    assert first.levels == {Level.RECEIVES: 3}
