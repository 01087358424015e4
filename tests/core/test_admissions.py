"""Admissions: who is admitted, who is not and why; borrowed leases; the races of one request's life."""

from itertools import product

import pytest

from pd_transfer.core.admissions import (
    ADMISSION_TABLE,
    AbortReceive,
    Admission,
    AdmissionBook,
    AdmissionState,
    AskAgain,
    Decline,
    Declined,
    LoadEnded,
    LoadStarted,
    PeerBecameReady,
    StartReceive,
    TokensFound,
)
from pd_transfer.core.layout import block_runs
from pd_transfer.core.messages import MAX_LEASES_PER_MESSAGE, Hello, Refused, Release, Renew
from pd_transfer.core.outcomes import Outcome
from pd_transfer.core.params import LeaseId, RequestId, parse_grant, seal_grant
from pd_transfer.core.peers import ConnectPeer, PeerBook, PeerLost, PeerPolicy, PeerState, RetirePeer, SendMessage
from pd_transfer.errors import InvalidTransitionError
from tests.core.examples import (
    DECODE_ENGINE,
    DIGEST,
    KEY,
    NUM_TOKENS,
    OTHER_PREFILL,
    PREFILL,
    make_engine,
    make_grant,
    make_layout,
    make_params,
    make_welcome,
)

R1, R2, R3 = RequestId("r1"), RequestId("r2"), RequestId("r3")
HELLO = SendMessage(PREFILL, Hello(DECODE_ENGINE))
GRANT = make_grant()
NEEDED = (block_runs([4, 5, 6]), block_runs([0, 7, 8]))
RENEWAL_SECONDS, MEMORY_SECONDS = 3, 120


def renew(*lease_ids: str) -> SendMessage:
    return SendMessage(PREFILL, Renew(tuple(map(LeaseId, lease_ids))))


def release(*lease_ids: str) -> SendMessage:
    return SendMessage(PREFILL, Release(tuple(map(LeaseId, lease_ids))))


class Rig:
    """A decode engine's two books."""

    def __init__(self) -> None:
        self.peers = PeerBook(PeerPolicy(handshake_seconds=5, backoff_seconds=1, rejection_seconds=30), DECODE_ENGINE)
        self.book = AdmissionBook(self.peers, RENEWAL_SECONDS, MEMORY_SECONDS)

    def welcome(self, now=0, **changes) -> list:
        return self.peers.receive(PREFILL, make_welcome(**changes), now)

    def arrive(self, request_id=R1, grant=GRANT, now=0, **changes) -> list:
        return self.book.arrive(request_id, make_params(grant, **changes), DIGEST, NUM_TOKENS, now)

    def admit(self, request_id=R1, grant=GRANT, now=0):
        """Arrive, with the peer READY, and be promised all tokens."""
        self.arrive(request_id, grant, now)
        self.welcome(now)
        assert self.book.ask(request_id, 0, now) == (TokensFound(NUM_TOKENS), [])
        return self.peers.find(PREFILL)

    def load(self, request_id=R1, grant=GRANT, now=0):
        peer = self.admit(request_id, grant, now)
        assert self.book.allocated(request_id, NUM_TOKENS, NEEDED, now) == [
            StartReceive(request_id, peer.key, grant, NEEDED, NUM_TOKENS)
        ]
        return peer

    def assert_idle(self) -> None:
        assert (self.book.num_admissions, self.book.num_borrowed_leases, self.book.next_deadline()) == (0, 0, None)
        assert all(peer.num_users == 0 for peer in self.peers.peers())

    def assert_declined(self, outcome: Outcome, reason: str, request_id=R1) -> None:
        assert self.book.declined == [Decline(request_id, outcome, reason)]
        assert self.book.outcomes == {outcome: 1}


# ---------------------------------------------------------------------------------------------------------------- table

S = AdmissionState
LEGAL = {
    (S.WAITING, PeerBecameReady): S.ADMITTED,
    (S.WAITING, Declined): S.ENDED,
    (S.ADMITTED, PeerLost): S.WAITING,
    (S.ADMITTED, LoadStarted): S.LOADING,
    (S.ADMITTED, Declined): S.ENDED,
    (S.LOADING, LoadEnded): S.ENDED,
}
EVENTS = (PeerBecameReady(), PeerLost(), Declined(Outcome.WITHDRAWN, ""), LoadStarted(), LoadEnded())


@pytest.mark.parametrize(("state", "event"), list(product(AdmissionState, EVENTS)))
def test_every_transition(state, event):
    admission = Admission(R1, PREFILL, parse_grant(seal_grant(GRANT, KEY)), deadline=5, state=state)
    if (state, type(event)) in LEGAL:
        admission.advance(event, now=1)
        assert admission.state is LEGAL[state, type(event)]
        assert len(admission.story.entries) == 1
    else:
        with pytest.raises(InvalidTransitionError, match=f"{type(event).__name__} is not allowed in {state.name}"):
            admission.advance(event, now=1)
        assert admission.state is state
        assert admission.story.entries == ()
    assert ADMISSION_TABLE.entries == LEGAL


# ----------------------------------------------------------------------------------------------------------- good paths


def test_a_request_from_arrival_to_release():
    rig = Rig()
    assert rig.arrive(now=0) == [HELLO, renew("lease-1")]
    assert rig.book.ask(R1, 0, 1) == (AskAgain(), [])
    rig.welcome(2)
    assert rig.book.ask(R1, 16, 3) == (TokensFound(NUM_TOKENS - 16), [])
    assert rig.book.num_local_tokens(R1) == 16
    peer = rig.peers.find(PREFILL)
    receive = StartReceive(R1, peer.key, GRANT, NEEDED, 24)
    assert rig.book.allocated(R1, 24, NEEDED, 4) == [receive]
    assert rig.book.is_loading(R1)
    assert (rig.book.num_admissions, rig.book.num_borrowed_leases, peer.num_users) == (1, 1, 1)
    assert rig.book.load_ended(R1, 5) == [release("lease-1")]
    assert not rig.book.is_loading(R1)
    rig.assert_idle()
    assert rig.book.declined == []


def test_a_known_peer_costs_no_round_trip():
    rig = Rig()
    rig.peers.greet(PREFILL, 0)
    rig.welcome(0)
    assert rig.arrive(now=1) == [renew("lease-1")]
    assert rig.book.ask(R1, 0, 1) == (TokensFound(NUM_TOKENS), [])


def test_asking_again_gives_the_newest_answer():
    rig = Rig()
    rig.admit()
    assert rig.book.ask(R1, 32, 1) == (TokensFound(8), [])
    assert rig.book.ask(R1, 0, 2) == (TokensFound(NUM_TOKENS), [])
    assert rig.book.ask(R1, 48, 3) == (TokensFound(0), [])  # decode has even the last token's block
    assert rig.peers.find(PREFILL).num_users == 1


def test_nothing_to_read_releases_the_lease():
    rig = Rig()
    rig.admit()
    assert rig.book.allocated(R1, 0, ((), ()), 1) == [release("lease-1")]
    rig.assert_idle()
    rig.assert_declined(Outcome.NOTHING_TO_READ, "no token is to be loaded")


def test_nothing_to_read_releases_the_lease_even_before_the_peer_is_ready():
    """Another connector has the tokens, or vLLM never asked."""
    rig = Rig()
    rig.arrive()
    assert rig.book.allocated(R1, 0, ((), ()), 1) == [release("lease-1")]
    rig.assert_idle()


def test_tokens_of_another_connector_are_not_ours():
    rig = Rig()
    rig.arrive()
    assert rig.book.allocated(R1, 16, NEEDED, 1) == []
    assert not rig.book.is_loading(R1)


def test_vllm_speaks_of_the_allocation_again_after_the_load():
    rig = Rig()
    rig.load()
    assert rig.book.allocated(R1, 0, ((), ()), 1) == []
    assert rig.book.ask(R1, 0, 1) == (TokensFound(0), [])
    rig.book.load_ended(R1, 2)
    assert rig.book.allocated(R1, 0, ((), ()), 3) == []


def test_requests_that_are_not_ours():
    rig = Rig()
    assert rig.book.ask(R1, 0, 0) == (TokensFound(0), [])
    assert rig.book.allocated(R1, 16, NEEDED, 0) == []
    assert rig.book.request_ended(R1, 0) == []
    assert rig.book.load_ended(R1, 0) == []
    assert rig.book.num_local_tokens(R1) == 0
    assert not rig.book.is_loading(R1)


# ------------------------------------------------------------------------------------------------------------- declined


def test_a_malformed_grant():
    rig = Rig()
    assert rig.arrive(grant="no grant") == []
    rig.assert_idle()
    rig.assert_declined(Outcome.GRANT_MALFORMED, "the grant is not base64")


@pytest.mark.parametrize(
    ("grant", "num_tokens"), [(make_grant(num_tokens=NUM_TOKENS + 1), 41), (make_grant(prompt_digest=b"e" * 32), 40)]
)
def test_a_grant_for_another_prompt(grant, num_tokens):
    rig = Rig()
    assert rig.arrive(grant=grant) == []
    rig.assert_idle()
    reason = f"the grant is for another prompt ({num_tokens} tokens, this request has 40)"
    rig.assert_declined(Outcome.GRANT_OTHER_PROMPT, reason)


@pytest.mark.parametrize(
    ("grant", "key", "outcome", "reason"),
    [
        (GRANT, b"forged", Outcome.GRANT_FORGED, "its seal is not the peer's"),
        (
            make_grant(layout=make_layout(["other"])),
            KEY,
            Outcome.GRANT_OTHER_LAYOUT,
            "it was made for another layout",
        ),
        (
            make_grant(boot="boot-0"),
            KEY,
            Outcome.GRANT_OTHER_BOOT,
            "prefill's boot is boot-1, the grant was sealed by boot-0",
        ),
    ],
)
def test_grants_that_the_peer_did_not_give(grant, key, outcome, reason):
    rig = Rig()
    rig.arrive(grant=grant, key=key)
    rig.welcome()
    released = [] if outcome is Outcome.GRANT_FORGED else [release("lease-1")]  # it may be somebody else's
    assert rig.book.ask(R1, 0, 0.5) == (TokensFound(0), released)
    rig.assert_idle()
    rig.assert_declined(outcome, reason)


def test_a_grant_of_another_boot_is_computed_here_and_the_peer_is_probed():
    """An old grant must not cost a healthy peer; an unnoticed restart must be found out."""
    rig = Rig()
    old_peer = rig.load(R1)
    rig.arrive(R2, make_grant("lease-2", boot="boot-2"), now=9)
    assert rig.book.ask(R2, 0, 9) == (TokensFound(0), [HELLO, release("lease-2")])
    assert old_peer.state is PeerState.READY
    rig.welcome(10, engine=make_engine(boot="boot-2"))
    rig.arrive(R3, make_grant("lease-3", boot="boot-2"), now=11)
    assert rig.book.ask(R3, 0, 11) == (TokensFound(NUM_TOKENS), [])
    assert rig.book.load_ended(R1, 12) == [RetirePeer(old_peer.key), release("lease-1")]


def test_slow_steps_do_not_keep_a_request_of_another_boot_waiting():
    rig = Rig()
    rig.arrive(grant=make_grant(boot="boot-0"))
    rig.welcome(1)
    answer, _ = rig.book.ask(R1, 0, 4)  # long after the peer answered
    assert answer == TokensFound(0)


def test_a_peer_that_refuses():
    rig = Rig()
    rig.arrive()
    rig.peers.receive(PREFILL, Refused("the weights differ"), 1)
    assert rig.book.ask(R1, 0, 1) == (TokensFound(0), [release("lease-1")])
    rig.assert_declined(Outcome.PEER_REFUSED, "refused by the peer: 'the weights differ'")


def test_a_peer_that_does_not_answer():
    rig = Rig()
    rig.arrive()
    rig.peers.pass_time(5)
    assert rig.book.ask(R1, 0, 5) == (TokensFound(0), [release("lease-1")])
    rig.assert_declined(Outcome.PEER_UNREACHABLE, "no answer from 10.0.0.1:5600 within 5 s")


def test_a_peer_that_is_lost_while_a_request_waits_is_greeted_again():
    rig = Rig()
    rig.arrive()
    rig.welcome(1)
    rig.peers.lose(PREFILL, 2)
    assert rig.book.ask(R1, 0, 3) == (AskAgain(), [HELLO])
    rig.welcome(4)
    assert rig.book.ask(R1, 0, 4) == (TokensFound(NUM_TOKENS), [])


def test_a_peer_that_comes_and_goes_does_not_keep_a_request_waiting_for_ever():
    rig = Rig()
    rig.arrive(now=0)
    answers = []
    for now in range(1, 6):
        rig.welcome(now)
        rig.peers.lose(PREFILL, now)
        answers.append(rig.book.ask(R1, 0, now)[0])
    assert answers == [AskAgain()] * 4 + [TokensFound(0)]
    rig.assert_declined(Outcome.PEER_UNREACHABLE, "it took too long to become ready")


def test_silence_that_slow_steps_never_see_does_not_keep_a_request_waiting():
    """The address is given up and forgotten between two questions."""
    rig = Rig()
    rig.arrive(now=0)
    rig.peers.pass_time(5)
    rig.peers.pass_time(6)
    answer, _ = rig.book.ask(R1, 0, 7)
    assert answer == TokensFound(0)


def test_a_promise_is_withdrawn_when_its_peer_is_lost_before_the_allocation():
    """No read begins at a peer that is known to be gone."""
    rig = Rig()
    old_peer = rig.admit(now=0)
    assert rig.peers.lose(PREFILL, 100) == []
    assert rig.book.ask(R1, 0, 100) == (AskAgain(), [RetirePeer(old_peer.key), HELLO])
    (connect,) = rig.welcome(101)
    assert isinstance(connect, ConnectPeer)
    assert rig.book.ask(R1, 0, 104) == (TokensFound(NUM_TOKENS), [])
    (receive,) = rig.book.allocated(R1, NUM_TOKENS, NEEDED, 104)
    assert receive.peer == connect.key != old_peer.key


def test_a_peer_lost_between_the_promise_and_the_allocation_is_read_from():
    """vLLM waits for the tokens now. The workers know the peer until the load has ended, and find out."""
    rig = Rig()
    peer = rig.admit()
    rig.peers.lose(PREFILL, 1)
    (receive,) = rig.book.allocated(R1, NUM_TOKENS, NEEDED, 1)
    assert receive.peer == peer.key
    assert rig.book.load_ended(R1, 2) == [RetirePeer(peer.key), release("lease-1")]


# --------------------------------------------------------------------------------------------------------------- leases


def test_samples_of_one_request_share_its_lease():
    rig = Rig()
    rig.admit(R1)
    assert rig.arrive(R2) == []  # its lease is renewed already
    assert rig.book.num_borrowed_leases == 1
    rig.book.ask(R2, 0, 0)
    rig.book.allocated(R1, NUM_TOKENS, NEEDED, 0)
    rig.book.allocated(R2, NUM_TOKENS, NEEDED, 0)
    assert rig.book.load_ended(R1, 1) == []
    assert rig.book.load_ended(R2, 2) == [release("lease-1")]
    rig.assert_idle()


def test_a_sample_that_comes_after_the_release_computes_its_prompt():
    rig = Rig()
    rig.load()
    rig.book.load_ended(R1, 1)
    assert rig.arrive(R2, now=1 + MEMORY_SECONDS - 0.1) == []
    rig.assert_declined(Outcome.GRANT_USED, "the grant was used and its lease released", R2)


def test_the_same_request_does_not_arrive_twice():
    rig = Rig()
    rig.load()
    assert rig.arrive(R1) == []
    assert rig.book.is_loading(R1)
    assert rig.book.outcomes[Outcome.GRANT_USED] == 1


def test_released_leases_are_forgotten_after_a_while():
    rig = Rig()
    rig.load(R1, make_grant("lease-1"))
    rig.load(R2, make_grant("lease-2"))
    rig.book.load_ended(R1, 1)
    rig.book.load_ended(R2, 5)
    rig.book.pass_time(1 + MEMORY_SECONDS)
    assert rig.arrive(R3, make_grant("lease-2"), now=121) == []
    assert rig.arrive(R3, make_grant("lease-1"), now=121) == [renew("lease-1")]
    rig.book.pass_time(5 + MEMORY_SECONDS)
    assert rig.arrive(RequestId("r4"), make_grant("lease-2"), now=126) == [renew("lease-2")]


def test_what_was_never_proven_is_not_remembered():
    """Else a client could fill the memory, or spoil a lease that it has only heard of."""
    rig = Rig()
    rig.book.turn_away(make_params(make_grant("lease-1")), 0)
    assert rig.arrive(R1, make_grant("lease-1"), now=1) == [HELLO, renew("lease-1")]
    rig.book.request_ended(R1, 2)
    assert rig.arrive(R2, make_grant("lease-1"), now=3) == [renew("lease-1")]


def test_leases_are_renewed_until_they_are_released():
    rig = Rig()
    rig.arrive(R1, make_grant("lease-1"), now=0)
    rig.arrive(R2, make_grant("lease-2"), now=1)
    assert rig.book.next_deadline() == 3
    assert rig.book.pass_time(2.9) == []
    assert rig.book.pass_time(3) == [renew("lease-1")]
    assert rig.book.pass_time(6) == [renew("lease-1", "lease-2")]
    rig.book.request_ended(R1, 7)
    assert rig.book.pass_time(9) == [renew("lease-2")]
    rig.book.request_ended(R2, 9)
    assert rig.book.pass_time(12) == []


def test_leases_of_several_engines_are_renewed_apart():
    rig = Rig()
    rig.arrive(R1, make_grant("lease-1"))
    rig.arrive(R2, make_grant("lease-2"), address=OTHER_PREFILL)
    assert rig.book.pass_time(3) == [renew("lease-1"), SendMessage(OTHER_PREFILL, Renew((LeaseId("lease-2"),)))]


def test_a_burst_of_requests_is_renewed_in_messages_that_the_peer_accepts():
    rig = Rig()
    for number in range(MAX_LEASES_PER_MESSAGE + 1):
        rig.arrive(RequestId(f"r{number}"), make_grant(f"lease-{number}"))
    letters = rig.book.pass_time(3)
    assert [len(letter.message.lease_ids) for letter in letters] == [MAX_LEASES_PER_MESSAGE, 1]


def test_a_lease_that_is_gone_before_the_promise():
    rig = Rig()
    rig.arrive()
    rig.book.leases_gone(PREFILL, [LeaseId("lease-1")])
    assert rig.book.next_deadline() is None
    assert rig.book.pass_time(3) == []
    rig.welcome(3)
    assert rig.book.ask(R1, 0, 3) == (TokensFound(0), [release("lease-1")])
    rig.assert_declined(Outcome.GRANT_EXPIRED, "its lease is over")
    rig.assert_idle()


def test_a_lease_that_is_gone_before_the_allocation():
    rig = Rig()
    rig.admit()
    rig.book.leases_gone(PREFILL, [LeaseId("lease-1")])
    assert rig.book.ask(R1, 0, 1)[0] == TokensFound(0)
    rig.assert_idle()


def test_a_lease_that_is_gone_during_the_read_is_judged_by_its_word():
    rig = Rig()
    rig.load()
    rig.book.leases_gone(PREFILL, [LeaseId("lease-1")])
    assert rig.book.is_loading(R1)
    assert rig.book.load_ended(R1, 1) == [release("lease-1")]


def test_only_the_engine_that_gave_a_lease_can_say_that_it_is_gone():
    rig = Rig()
    rig.admit()
    rig.book.leases_gone(OTHER_PREFILL, [LeaseId("lease-1")])
    rig.book.leases_gone(PREFILL, [LeaseId("never")])
    assert rig.book.ask(R1, 0, 1)[0] == TokensFound(NUM_TOKENS)


# ------------------------------------------------------------------------------------------------------ ends and aborts


def test_a_request_that_ends_while_it_waits():
    rig = Rig()
    rig.arrive()
    assert rig.book.request_ended(R1, 1) == [release("lease-1")]
    rig.assert_idle()
    rig.assert_declined(Outcome.WITHDRAWN, "the request ended first")


def test_a_request_that_ends_after_the_promise():
    rig = Rig()
    peer = rig.admit()
    assert rig.book.request_ended(R1, 1) == [release("lease-1")]
    assert peer.num_users == 0
    rig.assert_idle()


def test_a_request_that_ends_during_its_read_holds_its_lease_until_it_has_drained():
    rig = Rig()
    peer = rig.load()
    assert rig.book.request_ended(R1, 1) == [AbortReceive(R1)]
    assert rig.book.request_ended(R1, 2) == [AbortReceive(R1)]
    assert rig.peers.lose(PREFILL, 2) == []
    assert rig.book.pass_time(3) == [renew("lease-1")]
    assert rig.book.load_ended(R1, 4) == [RetirePeer(peer.key), release("lease-1")]
    rig.assert_idle()


@pytest.mark.parametrize("abort_first", [True, False])
def test_abort_and_end_of_load_in_either_order(abort_first):
    rig = Rig()
    rig.load()
    if abort_first:
        assert rig.book.request_ended(R1, 1) == [AbortReceive(R1)]
        assert rig.book.load_ended(R1, 1) == [release("lease-1")]
    else:
        assert rig.book.load_ended(R1, 1) == [release("lease-1")]
        assert rig.book.request_ended(R1, 1) == []
    rig.assert_idle()


def test_a_load_ends_once():
    rig = Rig()
    rig.load()
    rig.book.load_ended(R1, 1)
    assert rig.book.load_ended(R1, 2) == []


def test_a_load_that_never_began_cannot_end():
    rig = Rig()
    peer = rig.admit()
    with pytest.raises(InvalidTransitionError, match="story of admission r1"):
        rig.book.load_ended(R1, 1)
    assert (rig.book.num_admissions, rig.book.num_borrowed_leases, peer.num_users) == (1, 1, 1)


def test_a_request_that_is_turned_away_releases_its_lease():
    rig = Rig()
    assert rig.book.turn_away(make_params(GRANT), 0) == [release("lease-1")]
    assert rig.book.turn_away(make_params(GRANT), 1) == [release("lease-1")]


def test_a_request_that_is_turned_away_leaves_its_siblings_their_lease():
    rig = Rig()
    rig.admit()
    assert rig.book.turn_away(make_params(GRANT), 0) == []
    assert rig.book.turn_away(make_params("no grant"), 0) == []
