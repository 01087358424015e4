"""Admissions: decode's requests whose KV is to be pulled, and the leases that they borrow. Lives in the scheduler.

A request is admitted when its grant is genuine, names its own prompt and comes from a READY peer. Its lease is renewed
from the moment the request is seen, and released once the last local request that uses it needs it no longer. A
request that cannot be admitted is computed locally: the answer to vLLM is "no tokens", never an error.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, auto

from pd_transfer.core.layout import BlockRuns
from pd_transfer.core.machine import Story, TransitionTable
from pd_transfer.core.messages import MAX_LEASES_PER_MESSAGE, Release, Renew
from pd_transfer.core.outcomes import Outcome, Outcomes
from pd_transfer.core.params import Address, Grant, LeaseId, PeerKey, RemotePrefill, RequestId, SealedGrant, parse_grant
from pd_transfer.core.peers import Peer, PeerAction, PeerBook, PeerLost, PeerState, SendMessage


class AdmissionState(Enum):
    """WAITING: for the peer. ADMITTED: tokens are promised. LOADING: workers read. ENDED: the lease is not used."""

    WAITING = auto()
    ADMITTED = auto()
    LOADING = auto()
    ENDED = auto()


@dataclass(frozen=True, slots=True)
class PeerBecameReady:
    """The grant is genuine and its peer can be read from."""


@dataclass(frozen=True, slots=True)
class Declined:
    """The request is computed locally, for the reason given."""

    outcome: Outcome
    reason: str


@dataclass(frozen=True, slots=True)
class LoadStarted:
    """Blocks are allocated and workers are told to read."""


@dataclass(frozen=True, slots=True)
class LoadEnded:
    """Every rank has reported: nothing reads for this request any more."""


ADMISSION_TABLE = TransitionTable(
    "admission",
    {
        (AdmissionState.WAITING, PeerBecameReady): AdmissionState.ADMITTED,
        (AdmissionState.WAITING, Declined): AdmissionState.ENDED,
        (AdmissionState.ADMITTED, PeerLost): AdmissionState.WAITING,
        (AdmissionState.ADMITTED, LoadStarted): AdmissionState.LOADING,
        (AdmissionState.ADMITTED, Declined): AdmissionState.ENDED,
        (AdmissionState.LOADING, LoadEnded): AdmissionState.ENDED,
    },
)


@dataclass(frozen=True, slots=True)
class StartReceive:
    """Every worker shall read ``needed[i]`` of its i-th group from the blocks that the grant offers."""

    request_id: RequestId
    peer: PeerKey
    grant: Grant
    needed: tuple[BlockRuns, ...]
    num_tokens: int


@dataclass(frozen=True, slots=True)
class AbortReceive:
    """Every worker shall give up a request's receive and report it once it has drained."""

    request_id: RequestId


AdmissionAction = PeerAction | StartReceive | AbortReceive


@dataclass(slots=True)
class BorrowedLease:
    """A lease that local requests use: the n samples of one client request share it."""

    address: Address
    next_renewal: float
    users: set[RequestId] = field(default_factory=set)
    is_gone: bool = False


@dataclass(slots=True)
class Admission:
    """One request. ``num_local_tokens`` is what vLLM said it has itself when it last asked.

    ``deadline`` ends the time in which it is kept waiting for its peer. ``is_proven`` once its seal has been checked.
    """

    request_id: RequestId
    address: Address
    sealed: SealedGrant
    deadline: float
    state: AdmissionState = AdmissionState.WAITING
    peer: Peer | None = None
    is_proven: bool = False
    num_local_tokens: int = 0
    story: Story = field(default_factory=lambda: Story("admission"))

    def advance(self, event: object, now: float) -> None:
        """Follow the table. Raises InvalidTransitionError, and then nothing has changed."""
        new = ADMISSION_TABLE.next_state(self.state, event, self.story)
        self.story.record(now, event, self.state, new)
        self.state = new


@dataclass(frozen=True, slots=True)
class AskAgain:
    """It is not known yet how many tokens will come."""


@dataclass(frozen=True, slots=True)
class TokensFound:
    """``num_tokens`` tokens beyond the local ones will be loaded; 0 means that nothing will."""

    num_tokens: int


@dataclass(frozen=True, slots=True)
class Decline:
    """Why one request is computed locally: for the log."""

    request_id: RequestId
    outcome: Outcome
    reason: str


class AdmissionBook:
    """All admissions of one decode engine. Every method returns what to do; the caller does it."""

    def __init__(self, peers: PeerBook, renewal_seconds: float, memory_seconds: float) -> None:
        """``renewal_seconds`` between renewals; released leases are remembered for ``memory_seconds``."""
        self._peers = peers
        self._renewal_seconds = renewal_seconds
        self._memory_seconds = memory_seconds
        self._admissions: dict[RequestId, Admission] = {}
        self._leases: dict[LeaseId, BorrowedLease] = {}
        self._released: dict[LeaseId, float] = {}
        self.outcomes: Outcomes = Counter()
        self.declined: list[Decline] = []

    def arrive(
        self, request_id: RequestId, params: RemotePrefill, digest: bytes, num_tokens: int, now: float
    ) -> list[AdmissionAction]:
        """A request wants KV for its first ``num_tokens`` tokens, whose digest is ``digest``."""
        sealed = parse_grant(params.grant)
        if isinstance(sealed, str):
            return self._refuse(request_id, Outcome.GRANT_MALFORMED, sealed)
        grant = sealed.claimed
        if grant.num_tokens != num_tokens or grant.prompt_digest != digest:
            reason = f"the grant is for another prompt ({grant.num_tokens} tokens, this request has {num_tokens})"
            return self._refuse(request_id, Outcome.GRANT_OTHER_PROMPT, reason)
        if grant.lease_id in self._released or request_id in self._admissions:
            return self._refuse(request_id, Outcome.GRANT_USED, "the grant was used and its lease released")
        admission = Admission(request_id, params.address, sealed, now + self._peers.handshake_seconds)
        admission.story.subject = f"admission {request_id}"
        self._admissions[request_id] = admission
        actions: list[AdmissionAction] = list(self._peers.greet(params.address, now))
        lease = self._leases.get(grant.lease_id)
        if lease is None:
            lease = self._leases[grant.lease_id] = BorrowedLease(params.address, now + self._renewal_seconds)
            actions.append(SendMessage(params.address, Renew((grant.lease_id,))))
        lease.users.add(request_id)
        return actions

    def _refuse(self, request_id: RequestId, outcome: Outcome, reason: str) -> list[AdmissionAction]:
        self.outcomes[outcome] += 1
        self.declined.append(Decline(request_id, outcome, reason))
        return []

    def turn_away(self, params: RemotePrefill, now: float) -> list[AdmissionAction]:
        """The serving layer rejected a request: its lease is released at once."""
        sealed = parse_grant(params.grant)
        if isinstance(sealed, str) or sealed.claimed.lease_id in self._leases:
            return []
        return [SendMessage(params.address, Release((sealed.claimed.lease_id,)))]

    def ask(
        self, request_id: RequestId, num_local_tokens: int, now: float
    ) -> tuple[AskAgain | TokensFound, list[AdmissionAction]]:
        """How many tokens beyond ``num_local_tokens`` will be loaded. May be asked any number of times."""
        admission = self._admissions.get(request_id)
        if admission is None or admission.state is AdmissionState.LOADING:
            return TokensFound(0), []
        actions: list[AdmissionAction] = []
        if admission.peer is not None and admission.peer.state is not PeerState.READY:
            admission.advance(PeerLost(), now)
            admission.deadline = now + self._peers.handshake_seconds
            actions += self._leave_peer(admission, now)
        if admission.state is AdmissionState.WAITING:
            actions += self._try_admit(admission, now)
        if admission.state is AdmissionState.WAITING and now >= admission.deadline:
            actions += self._decline(admission, Outcome.PEER_UNREACHABLE, "it took too long to become ready", now)
        if admission.state is AdmissionState.WAITING:
            return AskAgain(), actions
        if admission.state is AdmissionState.ENDED:
            return TokensFound(0), actions
        if self._leases[admission.sealed.claimed.lease_id].is_gone:
            return TokensFound(0), actions + self._decline(admission, Outcome.GRANT_EXPIRED, "its lease is over", now)
        admission.num_local_tokens = num_local_tokens
        return TokensFound(max(0, admission.sealed.claimed.num_tokens - num_local_tokens)), actions

    def _try_admit(self, admission: Admission, now: float) -> list[AdmissionAction]:
        peer = self._peers.find(admission.address)
        if peer is None:
            # Its connection broke after it had been greeted for this request.
            return list(self._peers.greet(admission.address, now))
        if peer.state is PeerState.HANDSHAKING:
            return []
        if peer.state is not PeerState.READY or peer.welcome is None:
            refused = peer.state is PeerState.REJECTED
            outcome = Outcome.PEER_REFUSED if refused else Outcome.PEER_UNREACHABLE
            return self._decline(admission, outcome, peer.reason, now)
        sealed, grant, welcome = admission.sealed, admission.sealed.claimed, peer.welcome
        if grant.engine_boot != welcome.engine.engine_boot:
            reason = f"prefill's boot is {welcome.engine.engine_boot}, the grant was sealed by {grant.engine_boot}"
            # Usually the grant is old; but the engine may have restarted unnoticed, and later grants need its welcome.
            probe = self._peers.probe(admission.address, now)
            return [*probe, *self._decline(admission, Outcome.GRANT_OTHER_BOOT, reason, now)]
        if not sealed.is_genuine(welcome.grant_key):
            return self._decline(admission, Outcome.GRANT_FORGED, "its seal is not the peer's", now)
        if grant.layout_digest != welcome.engine.layout.digest():
            return self._decline(admission, Outcome.GRANT_OTHER_LAYOUT, "it was made for another layout", now)
        admission.advance(PeerBecameReady(), now)
        admission.peer = peer
        admission.is_proven = True
        self._peers.join(peer)
        return []

    def allocated(
        self, request_id: RequestId, num_external_tokens: int, needed: tuple[BlockRuns, ...], now: float
    ) -> list[AdmissionAction]:
        """vLLM has allocated blocks and waits for ``num_external_tokens`` tokens; 0 means that it waits for none."""
        admission = self._admissions.get(request_id)
        if admission is None or admission.state is AdmissionState.LOADING:
            return []
        if num_external_tokens == 0:
            return self._decline(admission, Outcome.NOTHING_TO_READ, "no token is to be loaded", now)
        if admission.peer is None:
            return []  # the tokens are another connector's: nothing was promised here
        admission.advance(LoadStarted(), now)
        receive = StartReceive(request_id, admission.peer.key, admission.sealed.claimed, needed, num_external_tokens)
        return [receive]

    def num_local_tokens(self, request_id: RequestId) -> int:
        """What vLLM said it has itself of a request's prompt, when it last asked."""
        admission = self._admissions.get(request_id)
        return admission.num_local_tokens if admission else 0

    def is_loading(self, request_id: RequestId) -> bool:
        """Whether workers still read for a request."""
        admission = self._admissions.get(request_id)
        return admission is not None and admission.state is AdmissionState.LOADING

    def request_ended(self, request_id: RequestId, now: float) -> list[AdmissionAction]:
        """vLLM has finished or aborted a request. A read under way is drained first."""
        admission = self._admissions.get(request_id)
        if admission is None:
            return []
        if admission.state is AdmissionState.LOADING:
            return [AbortReceive(request_id)]
        return self._decline(admission, Outcome.WITHDRAWN, "the request ended first", now)

    def load_ended(self, request_id: RequestId, now: float) -> list[AdmissionAction]:
        """Every rank has reported a request's receive, good or not."""
        admission = self._admissions.get(request_id)
        if admission is None:
            return []
        return self._end(admission, LoadEnded(), now)

    def _decline(self, admission: Admission, outcome: Outcome, reason: str, now: float) -> list[AdmissionAction]:
        self._refuse(admission.request_id, outcome, reason)
        return self._end(admission, Declined(outcome, reason), now)

    def _end(self, admission: Admission, event: Declined | LoadEnded, now: float) -> list[AdmissionAction]:
        admission.advance(event, now)
        del self._admissions[admission.request_id]
        actions = self._leave_peer(admission, now)
        lease_id = admission.sealed.claimed.lease_id
        lease = self._leases[lease_id]
        lease.users.discard(admission.request_id)
        if not lease.users:
            del self._leases[lease_id]
            if admission.is_proven:
                self._released[lease_id] = now + self._memory_seconds
            # A forged grant is no reason to end somebody's lease.
            if not isinstance(event, Declined) or event.outcome is not Outcome.GRANT_FORGED:
                actions.append(SendMessage(lease.address, Release((lease_id,))))
        return actions

    def _leave_peer(self, admission: Admission, now: float) -> list[AdmissionAction]:
        peer, admission.peer = admission.peer, None
        return [] if peer is None else list(self._peers.leave(peer, now))

    def leases_gone(self, address: Address, lease_ids: Iterable[LeaseId]) -> None:
        """The engine at an address holds these leases no more. Reads under way are judged by their word."""
        for lease_id in lease_ids:
            lease = self._leases.get(lease_id)
            if lease is not None and lease.address == address:
                lease.is_gone = True

    def pass_time(self, now: float) -> list[AdmissionAction]:
        """Renew what is due and forget what was released long ago."""
        while self._released and next(iter(self._released.values())) <= now:
            del self._released[next(iter(self._released))]
        due: dict[Address, list[LeaseId]] = {}
        for lease_id, lease in self._leases.items():
            if lease.next_renewal <= now and not lease.is_gone:
                lease.next_renewal = now + self._renewal_seconds
                due.setdefault(lease.address, []).append(lease_id)
        return [
            SendMessage(address, Renew(tuple(lease_ids[start : start + MAX_LEASES_PER_MESSAGE])))
            for address, lease_ids in due.items()
            for start in range(0, len(lease_ids), MAX_LEASES_PER_MESSAGE)
        ]

    def next_deadline(self) -> float | None:
        """When ``pass_time`` next has a lease to renew."""
        return min((lease.next_renewal for lease in self._leases.values() if not lease.is_gone), default=None)

    @property
    def num_admissions(self) -> int:
        """Requests between their arrival and the end of their read."""
        return len(self._admissions)

    @property
    def num_borrowed_leases(self) -> int:
        """Leases that are renewed."""
        return len(self._leases)
