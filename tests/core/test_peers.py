"""Peers: the table, handshakes that succeed, fail or come too late, restarts, and what workers are told."""

from itertools import product

import msgspec
import pytest

from pd_transfer.core.messages import Hello, Refused, Released, Renewed, Welcome
from pd_transfer.core.outcomes import Outcome
from pd_transfer.core.params import Address, PeerKey
from pd_transfer.core.peers import (
    PEER_TABLE,
    ConnectPeer,
    HandshakeTimedOut,
    LastUserLeft,
    Peer,
    PeerBook,
    PeerLost,
    PeerPolicy,
    PeerRejected,
    PeerState,
    ReadsFailed,
    RetirePeer,
    SendMessage,
    StillDraining,
    WelcomeAccepted,
)
from pd_transfer.errors import InvalidTransitionError
from tests.core.examples import DECODE_ENGINE, OTHER_PREFILL, PREFILL, make_engine, make_welcome

HELLO = SendMessage(PREFILL, Hello(DECODE_ENGINE))
WELCOME = make_welcome()
RESTARTED = make_welcome(make_engine(boot="boot-2"), key=b"another key")
MISFIT = make_welcome(make_engine(boot="boot-3", config_digest="config-2"))
POLICY = PeerPolicy(handshake_seconds=5, backoff_seconds=1, rejection_seconds=30)


def make_book() -> PeerBook:
    return PeerBook(POLICY, DECODE_ENGINE)


def ready_book(welcome: Welcome = WELCOME) -> tuple[PeerBook, Peer]:
    """A book with one READY peer, greeted and welcomed at time 0."""
    book = make_book()
    book.greet(PREFILL, 0)
    book.receive(PREFILL, welcome, 0)
    return book, book.find(PREFILL)


def states(book: PeerBook) -> list[PeerState]:
    return [peer.state for peer in book.peers()]


# ---------------------------------------------------------------------------------------------------------------- table

S = PeerState
LEGAL = {
    (S.HANDSHAKING, WelcomeAccepted): S.READY,
    (S.HANDSHAKING, PeerRejected): S.REJECTED,
    (S.HANDSHAKING, HandshakeTimedOut): S.BACKING_OFF,
    (S.HANDSHAKING, StillDraining): S.BACKING_OFF,
    (S.HANDSHAKING, ReadsFailed): S.BACKING_OFF,
    (S.READY, PeerLost): S.RETIRING,
    (S.RETIRING, LastUserLeft): S.RETIRED,
}
EVENTS = (WelcomeAccepted, PeerRejected, HandshakeTimedOut, StillDraining, ReadsFailed, PeerLost, LastUserLeft)


@pytest.mark.parametrize(("state", "kind"), list(product(PeerState, EVENTS)))
def test_every_transition(state, kind):
    peer = Peer(PeerKey("p"), PREFILL, 0, state)
    if (state, kind) in LEGAL:
        peer.advance(kind(), now=1)
        assert peer.state is LEGAL[state, kind]
        assert len(peer.story.entries) == 1
    else:
        with pytest.raises(InvalidTransitionError, match=f"{kind.__name__} is not allowed in {state.name}"):
            peer.advance(kind(), now=1)
        assert peer.state is state
        assert peer.story.entries == ()
    assert PEER_TABLE.entries == LEGAL


# ------------------------------------------------------------------------------------------------------------ handshake


def test_a_handshake():
    book = make_book()
    assert book.find(PREFILL) is None
    assert book.greet(PREFILL, 0) == [HELLO]
    peer = book.find(PREFILL)
    assert (peer.state, peer.welcome) == (S.HANDSHAKING, None)
    assert book.receive(PREFILL, WELCOME, 1) == [ConnectPeer(peer.key, WELCOME)]
    assert (peer.state, peer.welcome) == (S.READY, WELCOME)
    assert str(peer.story).startswith("story of peer 10.0.0.1:5600#1:")


def test_nobody_is_greeted_twice():
    book = make_book()
    book.greet(PREFILL, 0)
    assert book.greet(PREFILL, 1) == []
    book.receive(PREFILL, WELCOME, 2)
    assert book.greet(PREFILL, 3) == []


def test_peers_are_told_apart_by_address():
    book = make_book()
    book.greet(PREFILL, 0)
    assert book.greet(OTHER_PREFILL, 0) == [SendMessage(OTHER_PREFILL, Hello(DECODE_ENGINE))]
    book.receive(OTHER_PREFILL, WELCOME, 0)
    assert (book.find(PREFILL).state, book.find(OTHER_PREFILL).state) == (S.HANDSHAKING, S.READY)
    assert book.find(PREFILL).key != book.find(OTHER_PREFILL).key


@pytest.mark.parametrize("message", [Hello(DECODE_ENGINE), Renewed(()), Released(())])
def test_other_messages_do_not_disturb_a_handshake(message):
    book = make_book()
    book.greet(PREFILL, 0)
    assert book.receive(PREFILL, message, 1) == []
    assert book.find(PREFILL).state is S.HANDSHAKING


@pytest.mark.parametrize("message", [WELCOME, Refused("no")])
def test_answers_that_nobody_waits_for_are_ignored(message):
    book = make_book()
    assert book.receive(PREFILL, message, 0) == []
    assert book.find(PREFILL) is None
    book.greet(PREFILL, 0)
    book.pass_time(5)
    assert book.receive(PREFILL, message, 5) == []
    assert book.find(PREFILL).state is S.BACKING_OFF


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (Refused("tensor parallel size differs"), "refused by the peer: 'tensor parallel size differs'"),
        (MISFIT, "the model differs: local gemma (config-1), peer gemma (config-2)"),
    ],
)
def test_a_misfit_is_left_alone_for_a_while(answer, reason):
    book = make_book()
    book.greet(PREFILL, 0)
    assert book.receive(PREFILL, answer, 1) == []
    peer = book.find(PREFILL)
    assert (peer.state, peer.reason, peer.welcome) == (S.REJECTED, reason, None)
    assert book.next_deadline() == 31
    assert book.greet(PREFILL, 30.9) == []
    assert book.greet(PREFILL, 31) == [HELLO]


def test_silence_is_answered_with_patience():
    book = make_book()
    book.greet(PREFILL, 0)
    assert book.next_deadline() == book.handshake_seconds == 5
    book.pass_time(4.9)
    assert book.find(PREFILL).state is S.HANDSHAKING
    book.pass_time(5)
    peer = book.find(PREFILL)
    assert (peer.state, peer.reason) == (S.BACKING_OFF, "no answer from 10.0.0.1:5600 within 5 s")
    assert book.outcomes == {Outcome.HANDSHAKE_TIMED_OUT: 1}
    assert book.next_deadline() == 6
    assert book.greet(PREFILL, 5.9) == []
    assert book.greet(PREFILL, 6) == [HELLO]
    assert book.find(PREFILL).key != peer.key


def test_an_address_is_forgotten_when_its_time_is_over():
    book = make_book()
    book.greet(PREFILL, 0)
    book.pass_time(5)
    book.pass_time(6)
    assert book.find(PREFILL) is None
    assert book.next_deadline() is None
    assert book.greet(PREFILL, 6) == [HELLO]


@pytest.mark.parametrize("welcome_first", [True, False])
def test_welcome_and_timeout_in_either_order(welcome_first):
    book = make_book()
    book.greet(PREFILL, 0)
    if welcome_first:
        book.receive(PREFILL, WELCOME, 5)
        book.pass_time(5)
        assert book.find(PREFILL).state is S.READY
    else:
        book.pass_time(5)
        assert book.receive(PREFILL, WELCOME, 5) == []
        assert book.find(PREFILL).state is S.BACKING_OFF


def test_a_ready_peer_does_not_age():
    book, peer = ready_book()
    assert book.next_deadline() is None
    book.pass_time(1e9)
    assert book.find(PREFILL) is peer
    assert peer.state is S.READY


# ----------------------------------------------------------------------------------------------------------------- loss


def test_a_lost_peer_retires_at_once_when_nobody_uses_it():
    book, peer = ready_book()
    assert book.lose(PREFILL, 1) == [RetirePeer(peer.key)]
    assert peer.state is S.RETIRED
    assert book.find(PREFILL) is None
    assert states(book) == []


def test_a_lost_peer_retires_with_its_last_user():
    book, peer = ready_book()
    book.join(peer)
    book.join(peer)
    assert book.lose(PREFILL, 1) == []
    assert peer.state is S.RETIRING
    assert states(book) == [S.RETIRING]
    assert book.leave(peer, 2) == []
    assert book.leave(peer, 3) == [RetirePeer(peer.key)]
    assert states(book) == []


def test_users_may_come_and_go():
    book, peer = ready_book()
    book.join(peer)
    assert book.leave(peer, 1) == []
    assert peer.state is S.READY
    assert book.lose(PREFILL, 2) == [RetirePeer(peer.key)]


def test_only_ready_peers_are_joined():
    book, peer = ready_book()
    book.lose(PREFILL, 1)
    with pytest.raises(AssertionError):
        book.join(peer)


def test_a_loss_during_the_handshake_repeats_the_hello_but_gains_no_time():
    book = make_book()
    book.greet(PREFILL, 0)
    assert book.lose(PREFILL, 3) == []
    assert book.next_deadline() == 3.2
    assert book.pass_time(3.1) == []
    assert book.pass_time(3.2) == [HELLO]
    assert book.next_deadline() == 5
    assert book.pass_time(4) == []


def test_a_peer_that_breaks_every_connection_is_not_greeted_without_pause():
    book = make_book()
    num_hellos = len(book.greet(PREFILL, 0))
    for thousandth in range(5000):
        now = thousandth / 1000
        book.lose(PREFILL, now)
        num_hellos += len(book.pass_time(now))
    assert num_hellos == 25, "five a second"


def test_a_welcome_makes_a_repeated_hello_needless():
    book = make_book()
    book.greet(PREFILL, 0)
    book.lose(PREFILL, 1)
    book.receive(PREFILL, WELCOME, 1.1)
    assert book.pass_time(2) == []
    assert book.next_deadline() is None


@pytest.mark.parametrize("end", ["silence", "refusal"])
def test_nobody_is_greeted_after_the_handshake_is_over(end):
    book = make_book()
    book.greet(PREFILL, 0)
    book.lose(PREFILL, 4.9)
    if end == "silence":
        assert book.pass_time(5) == []
    else:
        book.receive(PREFILL, Refused("no"), 4.95)
    assert book.pass_time(5.2) == []


def test_the_loss_of_who_is_not_connected_changes_nothing():
    book = make_book()
    assert book.lose(PREFILL, 0) == []
    book.greet(PREFILL, 0)
    book.receive(PREFILL, Refused("no"), 0)
    assert book.lose(PREFILL, 1) == []
    assert book.find(PREFILL).state is S.REJECTED


def test_workers_lose_a_peer_by_its_key():
    book, peer = ready_book()
    book.greet(OTHER_PREFILL, 0)
    assert book.lose_key(PeerKey("never"), 1) == []
    book.join(peer)
    assert book.lose_key(peer.key, 1) == []
    assert peer.state is S.RETIRING
    assert book.lose_key(peer.key, 2) == []  # the other rank had trouble too
    assert book.lose(PREFILL, 2) == []  # and the connection broke as well
    assert book.leave(peer, 3) == [RetirePeer(peer.key)]


def test_a_peer_whose_memory_cannot_be_reached_is_left_alone_for_a_while():
    """Its side channel may answer all the same."""
    book, peer = ready_book()
    assert book.lose_key(peer.key, 1) == [RetirePeer(peer.key)]
    shunned = book.find(PREFILL)
    assert (shunned.state, shunned.reason) == (S.BACKING_OFF, "reading from it failed a moment ago")
    assert [entry.event for entry in shunned.story.entries] == ["ReadsFailed"]
    assert book.greet(PREFILL, 1.9) == []
    assert book.greet(PREFILL, 2) == [HELLO]


def test_a_lost_peer_that_has_restarted_is_another_peer():
    book, old = ready_book()
    book.join(old)
    book.lose(PREFILL, 1)
    assert book.greet(PREFILL, 1) == [HELLO]
    fresh = book.find(PREFILL)
    assert book.receive(PREFILL, RESTARTED, 2) == [ConnectPeer(fresh.key, RESTARTED)]
    assert fresh.key != old.key
    assert sorted(state.name for state in states(book)) == ["READY", "RETIRING"]
    assert book.leave(old, 3) == [RetirePeer(old.key)]
    assert fresh.state is S.READY


# ---------------------------------------------------------------------------------------- one engine, one key at a time


def test_an_engine_that_is_still_drained_is_not_connected_anew():
    """A transport connects to an agent once; a second key for it would fail every read."""
    book, old = ready_book()
    book.join(old)
    book.lose(PREFILL, 1)
    book.greet(PREFILL, 1)
    assert book.receive(PREFILL, WELCOME, 2) == []
    peer = book.find(PREFILL)
    assert (peer.state, peer.reason) == (S.BACKING_OFF, "requests still read over its last connection")
    assert book.next_deadline() == 3
    book.leave(old, 2.5)
    assert book.greet(PREFILL, 3) == [HELLO]
    again = book.find(PREFILL)
    assert book.receive(PREFILL, WELCOME, 3) == [ConnectPeer(again.key, WELCOME)]


def test_an_engine_with_two_addresses_is_one_peer():
    """Routers may rewrite the host that params name."""
    book, peer = ready_book()
    book.greet(OTHER_PREFILL, 1)
    assert book.receive(OTHER_PREFILL, WELCOME, 2) == []
    assert book.find(OTHER_PREFILL) is book.find(PREFILL) is peer
    assert states(book) == [S.READY]
    assert book.lose(OTHER_PREFILL, 3) == []
    assert (book.find(OTHER_PREFILL), book.find(PREFILL)) == (None, peer)


def test_losing_a_peer_loses_all_its_addresses():
    book, peer = ready_book()
    book.greet(OTHER_PREFILL, 1)
    book.receive(OTHER_PREFILL, WELCOME, 2)
    assert book.lose(PREFILL, 3) == [RetirePeer(peer.key)]
    assert book.find(OTHER_PREFILL) is book.find(PREFILL) is None


def test_engines_that_merely_claim_the_same_boot_stay_apart():
    book, peer = ready_book()
    liar = msgspec.structs.replace(WELCOME, grant_key=b"a key of its own")
    book.greet(OTHER_PREFILL, 1)
    assert book.receive(OTHER_PREFILL, liar, 2) == [ConnectPeer(book.find(OTHER_PREFILL).key, liar)]
    assert book.find(PREFILL) is peer
    assert peer.welcome == WELCOME


# ---------------------------------------------------------------------------------------------------------------- probe


def test_a_probe_asks_a_ready_peer_but_not_all_the_time():
    book, peer = ready_book()
    assert book.probe(PREFILL, 0.9) == []  # it has just answered
    assert book.probe(PREFILL, 1) == [HELLO]
    assert book.probe(PREFILL, 1.9) == []
    assert book.probe(PREFILL, 2) == [HELLO]
    assert peer.state is S.READY


def test_only_ready_peers_are_probed():
    book = make_book()
    assert book.probe(PREFILL, 9) == []
    book.greet(PREFILL, 9)
    assert book.probe(PREFILL, 20) == []


@pytest.mark.parametrize("message", [WELCOME, Refused("malformed"), Renewed(())])
def test_a_probe_that_brings_no_news_changes_nothing(message):
    book, peer = ready_book()
    book.probe(PREFILL, 1)
    assert book.receive(PREFILL, message, 2) == []
    assert book.find(PREFILL) is peer


def test_a_probe_finds_out_about_a_restart():
    book, old = ready_book()
    book.join(old)
    book.probe(PREFILL, 1)
    actions = book.receive(PREFILL, RESTARTED, 2)
    fresh = book.find(PREFILL)
    assert actions == [ConnectPeer(fresh.key, RESTARTED)]
    assert (old.state, fresh.state) == (S.RETIRING, S.READY)
    assert book.leave(old, 3) == [RetirePeer(old.key)]


def test_a_probe_finds_out_about_a_restart_with_another_model():
    book, old = ready_book()
    book.probe(PREFILL, 1)
    assert book.receive(PREFILL, MISFIT, 2) == [RetirePeer(old.key)]
    assert book.find(PREFILL).state is S.REJECTED


def test_addresses_may_be_ipv6():
    book = make_book()
    book.greet(Address("fe80::1", 5600), 0)
    assert book.find(Address("fe80::1", 5600)).key == "[fe80::1]:5600#1"
