"""A decode worker's connections: the peers that its transport knows, and the reads that set them up."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from pd_transfer.core.layout import EngineLayout
from pd_transfer.core.messages import one_line
from pd_transfer.core.params import PeerKey, Transfer
from pd_transfer.core.peers import ConnectPeer
from pd_transfer.core.receives import ReceivePolicy
from pd_transfer.errors import TransportError
from pd_transfer.runtime.remote import RemotePeer
from pd_transfer.transport.base import PullTransport

logger = logging.getLogger("pd_transfer.worker")


@dataclass(frozen=True, slots=True)
class WarmUp:
    """The read that sets a peer's connection up; ``is_late`` once it has missed its first deadline."""

    key: PeerKey
    deadline: float
    is_late: bool = False


class Connections:
    """The peers of one rank. A peer that was blamed is the scheduler's to greet anew, and stays as it is until then."""

    def __init__(self, transport: PullTransport, policy: ReceivePolicy, rank: int, layout: EngineLayout) -> None:
        self._transport = transport
        self._policy = policy
        self._rank = rank
        self._layout = layout
        self._peers: dict[PeerKey, RemotePeer] = {}
        self._warm_ups: dict[Transfer, WarmUp] = {}
        self._broken: set[PeerKey] = set()
        self._blamed: set[PeerKey] = set()
        self._leaving: set[PeerKey] = set()
        self._news: set[PeerKey] = set()

    def find(self, key: PeerKey) -> RemotePeer | None:
        """A peer that was connected, well or not."""
        return self._peers.get(key)

    def connect(self, order: ConnectPeer, now: float) -> None:
        """Make a peer readable, at once or, while another key still names its agent, by ``mend``.

        Trouble is blamed on the peer.
        """
        self._peers[order.key] = RemotePeer.from_welcome(order.welcome, self._rank, self._layout)
        if self._is_taken(order.key):
            self._broken.add(order.key)
        else:
            self._open(order.key, now)

    def _is_taken(self, key: PeerKey) -> bool:
        """Whether a peer that leaves has the same agent: a transport knows an agent under one key."""
        name = self._peers[key].served.memory.agent_name
        leaving = (self._peers[other] for other in self._leaving - {key} if other in self._peers)
        return any(peer.served.memory.agent_name == name for peer in leaving)

    def _open(self, key: PeerKey, now: float) -> str | None:
        peer = self._peers[key]
        try:
            self._transport.add_peer(key, peer.served.memory, peer.rows)
            # First reads set connections up; without them the first request would pay for that.
            for submit in (self._transport.submit_warm_up, lambda key: self._transport.submit_word_read(key, 0)):
                self._warm_ups[submit(key)] = WarmUp(key, now + self._policy.read_seconds)
        except TransportError as error:
            reason = f"cannot connect: {error}"
            self.blame(key, reason)
            return reason
        return None

    def blame(self, key: PeerKey, reason: str) -> None:
        """There is trouble with a peer that only its scheduler can end."""
        if key not in self._blamed:
            logger.warning("trouble with peer %s, it will be greeted anew: %s", key, one_line(reason))
            self._blamed.add(key)
            self._news.add(key)

    def take_blamed(self) -> set[PeerKey]:
        """The peers that were blamed since the last call."""
        news, self._news = self._news, set()
        return news

    def mark_broken(self, key: PeerKey) -> None:
        """A read from a peer failed: ``mend`` shall connect it anew."""
        self._broken.add(key)

    def is_broken(self, key: PeerKey) -> bool:
        """Whether a peer waits for ``mend``: nothing more shall be read from it before."""
        return key in self._broken

    def mend(self, is_read: Callable[[PeerKey], bool], now: float) -> Iterator[tuple[PeerKey, str | None]]:
        """Connect broken peers anew, each as soon as ``is_read`` says that no read from it is outstanding.

        Yields each with the reason why that is not possible, or None.
        """
        warming = {warm_up.key for warm_up in self._warm_ups.values()}
        for key in sorted(self._broken - warming):
            if not is_read(key) and not self._is_taken(key):
                self._broken.discard(key)
                yield key, self._reopen(key, now)

    def _reopen(self, key: PeerKey, now: float) -> str | None:
        if key in self._blamed:
            return "the peer has had trouble before"
        self._transport.remove_peer(key)
        return self._open(key, now)

    def poll(self, now: float) -> str | None:
        """Look at the reads that set connections up. Why the agent must be rebuilt, if one does not end."""
        for transfer, warm_up in list(self._warm_ups.items()):
            try:
                if not self._transport.poll(transfer):
                    if now >= warm_up.deadline and warm_up.is_late:
                        return f"the warm-up read of {warm_up.key} does not end"
                    if now >= warm_up.deadline:
                        self.blame(warm_up.key, "the warm-up read does not end")
                        deadline = now + self._policy.drain_seconds
                        self._warm_ups[transfer] = WarmUp(warm_up.key, deadline, is_late=True)
                    continue
            except TransportError as error:
                self.blame(warm_up.key, f"warm-up read: {error}")
            self._transport.release(transfer)
            del self._warm_ups[transfer]
        return None

    def all_broken(self) -> None:
        """The agent was rebuilt, and knows no peer any more."""
        for transfer in self._warm_ups:
            self._transport.release(transfer)
        self._warm_ups.clear()
        self._broken.update(self._peers)

    def retire(self, key: PeerKey) -> None:
        """The scheduler has no use for a peer any more: ``forget_leaving`` shall forget it."""
        self._leaving.add(key)

    def forget_leaving(self, is_used: Callable[[PeerKey], bool]) -> None:
        """Forget retired peers that no receive uses."""
        warming = {warm_up.key for warm_up in self._warm_ups.values()}
        for key in [key for key in self._leaving if not is_used(key) and key not in warming]:
            for keys in (self._leaving, self._broken, self._blamed):
                keys.discard(key)
            self._peers.pop(key, None)
            self._transport.remove_peer(key)

    @property
    def num_pending(self) -> int:
        """Warm-ups and broken peers, which have to be looked at again soon."""
        return len(self._warm_ups) + len(self._broken)
