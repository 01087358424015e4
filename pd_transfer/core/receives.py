"""Receives: one request's KV on its way into a decode worker's blocks. Lives in the worker, driven by its I/O thread.

A receive reads the KV, then, in a second transfer after the last byte has arrived, the lease word. Only an unchanged
word makes it good. A transfer cannot be aborted: a receive that failed or is no longer wanted drains, and is reported
(its blocks are free to be used again) only when no transfer can still write to them.

A receive whose transfer fails begins anew, once, after its peer has been connected anew: what broke may have been the
connection alone. Its deadline stays, and its lease word still decides (docs/adr/0008). A transfer that ended with the
agent says nothing about its peer, and costs no try.

At most one transfer of a receive is outstanding, so events and actions name the request.
"""

from dataclasses import dataclass, field
from enum import Enum, auto

from pd_transfer.core.machine import Story, TransitionTable
from pd_transfer.core.outcomes import Outcome
from pd_transfer.core.params import PeerKey, RequestId
from pd_transfer.core.plan import ReadPlan, Uncovered


class ReceiveState(Enum):
    """TRANSFERRING: KV is arriving. VERIFYING: the word is. WAITING: nothing is, until the peer is connected anew.
    DRAINING: lost, waiting for the transfer to end."""

    TRANSFERRING = auto()
    VERIFYING = auto()
    WAITING = auto()
    DRAINING = auto()
    COMPLETED = auto()
    FAILED = auto()
    ABORTED = auto()


@dataclass(frozen=True, slots=True)
class ReceiveRequest:
    """What to read for one request, where from, and the lease word that proves it."""

    request_id: RequestId
    peer: PeerKey
    plan: ReadPlan | Uncovered
    slot: int
    expected_word: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class ReadCompleted:
    """Every byte of KV has arrived."""

    request_id: RequestId


@dataclass(frozen=True, slots=True)
class WordArrived:
    """The lease word has arrived."""

    request_id: RequestId
    value: int


@dataclass(frozen=True, slots=True)
class TransferFailed:
    """The outstanding transfer failed or could not start: nothing of it can write any more."""

    request_id: RequestId
    reason: str


@dataclass(frozen=True, slots=True)
class AbortRequested:
    """The request is no longer wanted."""

    request_id: RequestId


@dataclass(frozen=True, slots=True)
class WordMatched:
    """The word is the granted one."""


@dataclass(frozen=True, slots=True)
class WordChanged:
    """The word is another one: the lease was over."""


@dataclass(frozen=True, slots=True)
class NotCovered:
    """The plan could not be made; nothing was submitted."""


@dataclass(frozen=True, slots=True)
class AgentDestroyed:
    """The outstanding transfer ended with the pull agent, which another one had kept from draining."""


@dataclass(frozen=True, slots=True)
class PeerReconnected:
    """The peer has been connected anew."""


@dataclass(frozen=True, slots=True)
class FailedForGood:
    """The transfer failed, and there is no other try."""


@dataclass(frozen=True, slots=True)
class DeadlinePassed:
    """The receive has taken too long."""


@dataclass(frozen=True, slots=True)
class DrainedAfterFailure:
    """The last transfer of a failed receive has ended."""


@dataclass(frozen=True, slots=True)
class DrainedAfterAbort:
    """The last transfer of an aborted receive has ended."""


ReceiveEvent = ReadCompleted | WordArrived | TransferFailed | AbortRequested

RECEIVE_TABLE = TransitionTable(
    "receive",
    {
        (ReceiveState.TRANSFERRING, ReadCompleted): ReceiveState.VERIFYING,
        (ReceiveState.VERIFYING, WordMatched): ReceiveState.COMPLETED,
        (ReceiveState.VERIFYING, WordChanged): ReceiveState.FAILED,
        (ReceiveState.TRANSFERRING, NotCovered): ReceiveState.FAILED,
        (ReceiveState.TRANSFERRING, TransferFailed): ReceiveState.WAITING,
        (ReceiveState.VERIFYING, TransferFailed): ReceiveState.WAITING,
        (ReceiveState.TRANSFERRING, AgentDestroyed): ReceiveState.WAITING,
        (ReceiveState.VERIFYING, AgentDestroyed): ReceiveState.WAITING,
        (ReceiveState.TRANSFERRING, FailedForGood): ReceiveState.FAILED,
        (ReceiveState.VERIFYING, FailedForGood): ReceiveState.FAILED,
        (ReceiveState.WAITING, PeerReconnected): ReceiveState.TRANSFERRING,
        (ReceiveState.WAITING, FailedForGood): ReceiveState.FAILED,
        (ReceiveState.WAITING, DeadlinePassed): ReceiveState.FAILED,
        (ReceiveState.WAITING, AbortRequested): ReceiveState.ABORTED,
        (ReceiveState.TRANSFERRING, DeadlinePassed): ReceiveState.DRAINING,
        (ReceiveState.VERIFYING, DeadlinePassed): ReceiveState.DRAINING,
        (ReceiveState.TRANSFERRING, AbortRequested): ReceiveState.DRAINING,
        (ReceiveState.VERIFYING, AbortRequested): ReceiveState.DRAINING,
        (ReceiveState.DRAINING, DrainedAfterFailure): ReceiveState.FAILED,
        (ReceiveState.DRAINING, DrainedAfterAbort): ReceiveState.ABORTED,
    },
)

_FINAL = frozenset({ReceiveState.COMPLETED, ReceiveState.FAILED, ReceiveState.ABORTED})


@dataclass(frozen=True, slots=True)
class SubmitRead:
    """Start reading the receive's KV. ``why_again`` is empty unless it was begun before."""

    request: ReceiveRequest
    plan: ReadPlan
    why_again: str = ""


@dataclass(frozen=True, slots=True)
class SubmitWordRead:
    """Start reading the receive's lease word."""

    request: ReceiveRequest


@dataclass(frozen=True, slots=True)
class ReconnectPeer:
    """Connect a peer anew, once nothing is read from it; then tell the book how that went."""

    peer: PeerKey


@dataclass(frozen=True, slots=True)
class ReportReceive:
    """The receive is over: no transfer of it can write any more. Exactly one per receive."""

    request: ReceiveRequest
    outcome: Outcome
    reason: str
    seconds: float


@dataclass(frozen=True, slots=True)
class RebuildAgent:
    """Transfers from these peers will not end: destroy the pull agent, and then say so with ``agent_destroyed``."""

    peers: frozenset[PeerKey]
    reason: str


ReceiveAction = SubmitRead | SubmitWordRead | ReconnectPeer | ReportReceive | RebuildAgent


@dataclass(frozen=True, slots=True)
class ReceivePolicy:
    """How long a receive may take before it is given up, and then its last transfer before the agent is destroyed."""

    read_seconds: float
    drain_seconds: float


@dataclass(slots=True)
class Receive:
    """One receive. ``loss`` says why it is lost, once it is; ``why_again`` why it was begun anew, or has to be."""

    request: ReceiveRequest
    started_at: float
    deadline: float
    state: ReceiveState = ReceiveState.TRANSFERRING
    loss: tuple[Outcome, str] | None = None
    is_second_try: bool = False
    why_again: str = ""
    story: Story = field(default_factory=lambda: Story("receive"))


class ReceiveBook:
    """All receives of one decode worker: events in, actions out."""

    def __init__(self, policy: ReceivePolicy) -> None:
        self._policy = policy
        self._receives: dict[RequestId, Receive] = {}

    def start(self, request: ReceiveRequest, now: float, *, waits: bool = False) -> list[ReceiveAction]:
        """Begin a receive; with ``waits``, once its peer is connected anew, which a read would put off.

        Raises ValueError when the request has one already.
        """
        if request.request_id in self._receives:
            raise ValueError(f"{request.request_id} is being received already")
        receive = Receive(request, now, now + self._policy.read_seconds)
        receive.story.subject = f"receive {request.request_id}"
        self._receives[request.request_id] = receive
        if isinstance(request.plan, Uncovered):
            return self._lose(receive, NotCovered(), Outcome.RECEIVE_UNCOVERED, request.plan.reason, now)
        if waits:
            receive.state = ReceiveState.WAITING
            return []
        return [SubmitRead(request, request.plan)]

    def handle(self, event: ReceiveEvent, now: float) -> list[ReceiveAction]:
        """Advance the receive that an event names.

        An abort may name a request that has no receive, or whose receive drains already: nothing is left to do then.
        Any other event that the table does not allow raises InvalidTransitionError and changes nothing.
        """
        receive = self._receives.get(event.request_id)
        if isinstance(event, AbortRequested):
            if receive is None or receive.state is ReceiveState.DRAINING:
                return []
            return self._lose(receive, event, Outcome.RECEIVE_ABORTED, "the request ended", now)
        if receive is None:
            raise ValueError(f"no receive for {event!r}")
        if receive.state is ReceiveState.DRAINING:
            return self._drained(receive, now)
        if isinstance(event, TransferFailed):
            return self._try_again(receive, event, now)
        if isinstance(event, ReadCompleted):
            self._advance(receive, event, now)
            return [SubmitWordRead(receive.request)]
        return self._judge(receive, event, now)

    def _try_again(self, receive: Receive, event: TransferFailed, now: float) -> list[ReceiveAction]:
        if receive.is_second_try:
            reason = f"{event.reason}; before that: {receive.why_again}"
            return self._lose(receive, FailedForGood(), Outcome.RECEIVE_FAILED, reason, now)
        self._advance(receive, event, now)
        receive.is_second_try = True
        receive.why_again = event.reason
        return [ReconnectPeer(receive.request.peer)]

    def reconnected(self, peer: PeerKey, now: float) -> list[SubmitRead]:
        """A peer has been connected anew: what waits for it begins, with the KV."""
        actions = []
        for receive in self._waiting(peer):
            self._advance(receive, PeerReconnected(), now)
            assert isinstance(receive.request.plan, ReadPlan)  # without a plan nothing waits
            actions.append(SubmitRead(receive.request, receive.request.plan, receive.why_again))
        return actions

    def not_reconnected(self, peer: PeerKey, reason: str, now: float) -> list[ReceiveAction]:
        """A peer cannot be connected anew: what waits for it is lost."""
        actions: list[ReceiveAction] = []
        for receive in self._waiting(peer):
            whole = f"{reason}; before that: {receive.why_again}" if receive.why_again else reason
            actions += self._lose(receive, FailedForGood(), Outcome.RECEIVE_FAILED, whole, now)
        return actions

    def agent_destroyed(self, reason: str, now: float) -> list[ReceiveAction]:
        """Every transfer has ended: what was lost is reported, what was not begins anew with its peer."""
        actions: list[ReceiveAction] = []
        for receive in list(self._receives.values()):
            if receive.state is ReceiveState.DRAINING:
                actions += self._drained(receive, now)
            elif receive.state is not ReceiveState.WAITING:
                self._advance(receive, AgentDestroyed(), now)
                receive.why_again = reason
        return actions

    def _waiting(self, peer: PeerKey) -> list[Receive]:
        receives = self._receives.values()
        return [r for r in receives if r.state is ReceiveState.WAITING and r.request.peer == peer]

    def fail_all(self, reason: str, now: float) -> list[ReceiveAction]:
        """Every transfer has been ended from outside, because of a bug: every receive is over."""
        actions: list[ReceiveAction] = []
        for receive in list(self._receives.values()):
            if receive.state is ReceiveState.DRAINING:
                actions += self._drained(receive, now)
            else:
                actions += self._lose(receive, FailedForGood(), Outcome.RECEIVE_FAILED, reason, now)
        return actions

    def _judge(self, receive: Receive, event: WordArrived, now: float) -> list[ReceiveAction]:
        expected = receive.request.expected_word
        if event.value != expected:
            reason = f"the lease word is {event.value:#x}, granted was {expected:#x}"
            return self._lose(receive, WordChanged(), Outcome.RECEIVE_STALE, reason, now)
        self._advance(receive, WordMatched(), now)
        return self._report(receive, Outcome.RECEIVE_VERIFIED, "", now)

    def _lose(self, receive: Receive, event: object, outcome: Outcome, reason: str, now: float) -> list[ReceiveAction]:
        self._advance(receive, event, now)
        receive.loss = (outcome, reason)
        if receive.state in _FINAL:
            return self._report(receive, outcome, reason, now)
        receive.deadline = now + self._policy.drain_seconds
        return []

    def _drained(self, receive: Receive, now: float) -> list[ReceiveAction]:
        assert receive.loss is not None  # _lose sets it with the state
        outcome, reason = receive.loss
        aborted = outcome is Outcome.RECEIVE_ABORTED
        self._advance(receive, DrainedAfterAbort() if aborted else DrainedAfterFailure(), now)
        return self._report(receive, outcome, reason, now)

    def _advance(self, receive: Receive, event: object, now: float) -> None:
        new = RECEIVE_TABLE.next_state(receive.state, event, receive.story)
        receive.story.record(now, event, receive.state, new)
        receive.state = new

    def _report(self, receive: Receive, outcome: Outcome, reason: str, now: float) -> list[ReceiveAction]:
        del self._receives[receive.request.request_id]
        return [ReportReceive(receive.request, outcome, reason, now - receive.started_at)]

    def pass_time(self, now: float) -> list[ReceiveAction]:
        """Give up receives whose deadline has passed; ask for the agent's end when one does not drain."""
        stuck: list[Receive] = []
        actions: list[ReceiveAction] = []
        for receive in [receive for receive in self._receives.values() if receive.deadline <= now]:
            if receive.state is ReceiveState.DRAINING:
                stuck.append(receive)
                receive.deadline = now + self._policy.drain_seconds
            else:
                reason = f"no answer from {receive.request.peer} within {self._policy.read_seconds} s"
                actions += self._lose(receive, DeadlinePassed(), Outcome.RECEIVE_TIMED_OUT, reason, now)
        if stuck:
            reason = f"a transfer did not end within {self._policy.drain_seconds} s: {stuck[0].story}"
            actions.append(RebuildAgent(frozenset(receive.request.peer for receive in stuck), reason))
        return actions

    def uses(self, peer: PeerKey) -> bool:
        """Whether a receive still reads from a peer."""
        return any(receive.request.peer == peer for receive in self._receives.values())

    @property
    def request_ids(self) -> tuple[RequestId, ...]:
        """The requests that are being received, oldest first."""
        return tuple(self._receives)

    @property
    def num_quarantined_blocks(self) -> int:
        """Blocks of lost receives that a transfer may still write to, counted per layer."""
        draining = [r for r in self._receives.values() if r.state is ReceiveState.DRAINING]
        return sum(len(r.request.plan.local) for r in draining if isinstance(r.request.plan, ReadPlan))

    def next_deadline(self) -> float | None:
        """When ``pass_time`` next has something to do; None when nothing is being received."""
        return min((receive.deadline for receive in self._receives.values()), default=None)
