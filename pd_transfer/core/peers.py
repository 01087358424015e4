"""Peers: the prefill engines that a decode engine reads from. Lives in the decode scheduler.

One ``Peer`` is one handshake. It is built whole from a Welcome that has passed every check, or it never becomes READY.
A restarted engine, or one whose connection broke, is another peer with another key. Retired peers stay until the last
request that reads from them has ended; then the workers forget them.

Workers know an engine under one key at a time, because a transport connects to an agent once. So an engine that
answers at a second address is the same peer, and one that is still being drained is not connected anew.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, auto

from pd_transfer.core.machine import Story, TransitionTable
from pd_transfer.core.messages import (
    EngineDescription,
    Hello,
    Message,
    Refused,
    Request,
    Welcome,
    invalid_welcome,
    printable,
)
from pd_transfer.core.outcomes import Outcome, Outcomes
from pd_transfer.core.params import Address, PeerKey


class PeerState(Enum):
    """READY is the only state in which KV may be read from a peer."""

    HANDSHAKING = auto()
    READY = auto()
    BACKING_OFF = auto()
    REJECTED = auto()
    RETIRING = auto()
    RETIRED = auto()


@dataclass(frozen=True, slots=True)
class WelcomeAccepted:
    """The peer's Welcome has passed every check."""


@dataclass(frozen=True, slots=True)
class PeerRejected:
    """The peer refused us, or its Welcome does not fit."""


@dataclass(frozen=True, slots=True)
class HandshakeTimedOut:
    """No Welcome came in time."""


@dataclass(frozen=True, slots=True)
class StillDraining:
    """The peer welcomes us, but its last connection is not yet forgotten: requests still read from it."""


@dataclass(frozen=True, slots=True)
class ReadsFailed:
    """A worker had trouble with the peer's last connection: do not greet it at once."""


@dataclass(frozen=True, slots=True)
class PeerLost:
    """The connection broke, a worker had trouble with the peer, or it has restarted."""


@dataclass(frozen=True, slots=True)
class LastUserLeft:
    """No request reads from the retiring peer any more."""


PEER_TABLE = TransitionTable(
    "peer",
    {
        (PeerState.HANDSHAKING, WelcomeAccepted): PeerState.READY,
        (PeerState.HANDSHAKING, PeerRejected): PeerState.REJECTED,
        (PeerState.HANDSHAKING, HandshakeTimedOut): PeerState.BACKING_OFF,
        (PeerState.HANDSHAKING, StillDraining): PeerState.BACKING_OFF,
        (PeerState.HANDSHAKING, ReadsFailed): PeerState.BACKING_OFF,
        (PeerState.READY, PeerLost): PeerState.RETIRING,
        (PeerState.RETIRING, LastUserLeft): PeerState.RETIRED,
    },
)


@dataclass(frozen=True, slots=True)
class SendMessage:
    """Send a message to the side channel at ``address``."""

    address: Address
    message: Request


@dataclass(frozen=True, slots=True)
class ConnectPeer:
    """Every worker shall make the peer readable, rank by rank."""

    key: PeerKey
    welcome: Welcome


@dataclass(frozen=True, slots=True)
class RetirePeer:
    """Every worker shall forget the peer; nothing reads from it any more."""

    key: PeerKey


PeerAction = SendMessage | ConnectPeer | RetirePeer


@dataclass(frozen=True, slots=True)
class PeerPolicy:
    """How long to wait for a Welcome, and how long not to try again after silence or after a misfit.

    ``repeat_seconds`` lie between two Hellos of a handshake whose connection breaks.
    """

    handshake_seconds: float
    backoff_seconds: float
    rejection_seconds: float
    repeat_seconds: float = 0.2


@dataclass(slots=True)
class Peer:
    """One handshake with the engine at an address. ``welcome`` is set exactly when it was READY once.

    ``repeat_at`` is when a Hello that was lost with its connection is to be said again; None while none was.
    ``deadline`` ends the wait that the state stands for; for a READY peer, the time in which it is not probed again.
    """

    key: PeerKey
    address: Address
    deadline: float
    state: PeerState = PeerState.HANDSHAKING
    reason: str = ""
    welcome: Welcome | None = None
    num_users: int = 0
    repeat_at: float | None = None
    story: Story = field(default_factory=lambda: Story("peer"))

    def advance(self, event: object, now: float) -> None:
        """Follow the table. Raises InvalidTransitionError, and then nothing has changed."""
        new = PEER_TABLE.next_state(self.state, event, self.story)
        self.story.record(now, event, self.state, new)
        self.state = new


class PeerBook:
    """All peers of one decode engine: the current one per address, and those that retire.

    A READY peer may be the current one of several addresses; its own is the one that was greeted first.
    """

    def __init__(self, policy: PeerPolicy, local: EngineDescription) -> None:
        self._policy = policy
        self._local = local
        self._current: dict[Address, Peer] = {}
        self._retiring: dict[PeerKey, Peer] = {}
        self._num_handshakes = 0
        self.outcomes: Outcomes = Counter()

    @property
    def handshake_seconds(self) -> float:
        """How long a handshake may take."""
        return self._policy.handshake_seconds

    def find(self, address: Address) -> Peer | None:
        """The current peer at an address, whatever its state; None when it was never greeted."""
        return self._current.get(address)

    def greet(self, address: Address, now: float) -> list[PeerAction]:
        """Begin a handshake unless one is under way, done, or was given up a moment ago."""
        peer = self._current.get(address)
        if peer is not None:
            waiting = peer.state in (PeerState.BACKING_OFF, PeerState.REJECTED) and now < peer.deadline
            if waiting or peer.state in (PeerState.HANDSHAKING, PeerState.READY):
                return []
        self._begin(address, now)
        return [SendMessage(address, Hello(self._local))]

    def _begin(self, address: Address, now: float) -> Peer:
        self._num_handshakes += 1
        key = PeerKey(f"{address}#{self._num_handshakes}")
        peer = Peer(key, address, now + self._policy.handshake_seconds)
        peer.story.subject = f"peer {key}"
        self._current[address] = peer
        return peer

    def probe(self, address: Address, now: float) -> list[PeerAction]:
        """A grant names another life of a READY peer's engine: ask which one lives, unless that was done just now."""
        peer = self._current.get(address)
        if peer is None or peer.state is not PeerState.READY or now < peer.deadline:
            return []
        peer.deadline = now + self._policy.backoff_seconds
        return [SendMessage(address, Hello(self._local))]

    def receive(self, address: Address, message: Message, now: float) -> list[PeerAction]:
        """A peer's answer to a Hello. Answers that nobody waits for are ignored."""
        peer = self._current.get(address)
        if peer is None:
            return []
        if peer.state is PeerState.HANDSHAKING:
            if isinstance(message, Refused):
                return self._reject(peer, f"refused by the peer: {printable(message.reason)}", now)
            return self._judge(peer, message, now) if isinstance(message, Welcome) else []
        if not isinstance(message, Welcome) or peer.welcome is None or _is_same_boot(peer.welcome, message):
            return []
        # A READY peer was probed, and it has restarted unnoticed.
        return self._lose(peer, now) + self._judge(self._begin(address, now), message, now)

    def _judge(self, peer: Peer, welcome: Welcome, now: float) -> list[PeerAction]:
        """A Welcome for a peer that is HANDSHAKING."""
        if reason := invalid_welcome(self._local, welcome):
            return self._reject(peer, reason, now)
        known = next((other for other in self.peers() if other.welcome == welcome), None)
        if known is None:
            peer.advance(WelcomeAccepted(), now)
            peer.welcome = welcome
            peer.deadline = now + self._policy.backoff_seconds
            return [ConnectPeer(peer.key, welcome)]
        if known.state is PeerState.READY:
            self._current[peer.address] = known
            return []
        self._back_off(peer, StillDraining(), "requests still read over its last connection", now)
        return []

    def _back_off(self, peer: Peer, event: object, reason: str, now: float) -> None:
        peer.advance(event, now)
        peer.reason = reason
        peer.repeat_at = None
        peer.deadline = now + self._policy.backoff_seconds

    def _reject(self, peer: Peer, reason: str, now: float) -> list[PeerAction]:
        peer.advance(PeerRejected(), now)
        peer.reason = reason
        peer.repeat_at = None
        peer.deadline = now + self._policy.rejection_seconds
        return []

    def lose(self, address: Address, now: float) -> list[PeerAction]:
        """The side channel's connection to an address broke. A handshake under way is repeated by ``pass_time``."""
        peer = self._current.get(address)
        if peer is None:
            return []
        if peer.state is PeerState.HANDSHAKING and peer.repeat_at is None:
            peer.repeat_at = now + self._policy.repeat_seconds
        if peer.state is not PeerState.READY:
            return []
        if address != peer.address:
            del self._current[address]
            return []
        return self._lose(peer, now)

    def lose_key(self, key: PeerKey, now: float) -> list[PeerAction]:
        """A worker had trouble with a peer: it is left alone for a while.

        Its side channel may answer where its memory cannot be reached; greeting it at once would promise tokens to one
        request after another. Trouble with a peer that retires already changes nothing.
        """
        peer = next((peer for peer in self._current.values() if peer.key == key), None)
        if peer is None:
            return []
        actions = self._lose(peer, now)
        self._back_off(self._begin(peer.address, now), ReadsFailed(), "reading from it failed a moment ago", now)
        return actions

    def _lose(self, peer: Peer, now: float) -> list[PeerAction]:
        peer.advance(PeerLost(), now)
        self._current = {address: other for address, other in self._current.items() if other is not peer}
        self._retiring[peer.key] = peer
        return self._retire_unused(peer, now)

    def join(self, peer: Peer) -> None:
        """A request will read from a READY peer."""
        assert peer.state is PeerState.READY
        peer.num_users += 1

    def leave(self, peer: Peer, now: float) -> list[PeerAction]:
        """A request reads from a peer no longer."""
        peer.num_users -= 1
        return self._retire_unused(peer, now) if peer.state is PeerState.RETIRING else []

    def _retire_unused(self, peer: Peer, now: float) -> list[PeerAction]:
        if peer.num_users:
            return []
        peer.advance(LastUserLeft(), now)
        del self._retiring[peer.key]
        return [RetirePeer(peer.key)]

    def pass_time(self, now: float) -> list[PeerAction]:
        """Repeat lost Hellos, give up handshakes that take too long, forget addresses whose time of refusal is over."""
        actions: list[PeerAction] = []
        for peer in [peer for peer in self._current.values() if peer.state is not PeerState.READY]:
            if peer.deadline <= now:
                self._end_wait(peer, now)
            elif peer.repeat_at is not None and peer.repeat_at <= now:
                peer.repeat_at = None
                actions.append(SendMessage(peer.address, Hello(self._local)))
        return actions

    def _end_wait(self, peer: Peer, now: float) -> None:
        if peer.state is PeerState.HANDSHAKING:
            reason = f"no answer from {peer.address} within {self._policy.handshake_seconds} s"
            self._back_off(peer, HandshakeTimedOut(), reason, now)
            self.outcomes[Outcome.HANDSHAKE_TIMED_OUT] += 1
        else:
            del self._current[peer.address]

    def next_deadline(self) -> float | None:
        """When ``pass_time`` next has something to do."""
        waiting = [peer for peer in self._current.values() if peer.state is not PeerState.READY]
        times = [peer.deadline for peer in waiting] + [peer.repeat_at for peer in waiting if peer.repeat_at is not None]
        return min(times, default=None)

    def peers(self) -> Iterator[Peer]:
        """Every peer that is remembered, once."""
        yield from {peer.key: peer for peer in self._current.values()}.values()
        yield from self._retiring.values()


def _is_same_boot(known: Welcome, welcome: Welcome) -> bool:
    return known.engine.engine_boot == welcome.engine.engine_boot
