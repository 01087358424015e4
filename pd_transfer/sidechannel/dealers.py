"""Whom the side channel asks: one DEALER per address, and which of them have a place.

A DEALER lives as long as its connection. libzmq would reconnect by itself and deliver old requests to whoever listens
then; instead a broken connection closes its DEALER, so that ``ConnectionLost`` is the truth about what was asked.
"""

import contextlib
import ipaddress
import logging
import re
from collections.abc import Collection
from dataclasses import dataclass

import zmq
from zmq.utils.monitor import recv_monitor_message

from pd_transfer.core.params import Address
from pd_transfer.sidechannel.base import ConnectionLost, Received, ReplyReceived
from pd_transfer.sidechannel.curve import CurveKeys
from pd_transfer.sidechannel.sockets import (
    LINGER_MILLISECONDS,
    MAIN_IO_THREAD,
    NAMES_IO_THREAD,
    new_dealer,
    send,
    take,
)

logger = logging.getLogger("pd_transfer.sidechannel")

_HOST = re.compile(r"[A-Za-z0-9._-]+|[0-9A-Fa-f:.]+(%[A-Za-z0-9._-]+)?")
"""No '*', ';' or '/': libzmq's endpoints give them a meaning, and hosts come from clients."""


@dataclass(slots=True)
class _Peer:
    """One asked address: its DEALER, the monitor that tells of its connection, and whether that was ever up."""

    address: Address
    dealer: "zmq.Socket[bytes]"
    monitor: "zmq.Socket[bytes]"
    established: bool = False

    def close(self, linger_milliseconds: int) -> None:
        self.dealer.disable_monitor()
        self.monitor.close(linger=0)
        self.dealer.close(linger=linger_milliseconds)

    def is_lost(self) -> bool:
        """Take in what the monitor says; True once the connection broke."""
        with contextlib.suppress(zmq.Again):
            while True:
                event = recv_monitor_message(self.monitor, zmq.NOBLOCK)["event"]
                if event == zmq.EVENT_DISCONNECTED:
                    return True
                self.established = True
        return False


def num_places(file_limit: int) -> int:
    """Addresses asked at a time, beside the reserved ones, where a process may open that many files (-1: any number).

    The addresses come from clients, so that their number must have a bound. Each costs four files: together, half of
    what there are. Each costs some 75 KiB too: 4096 are enough for any deployment that is known.
    """
    return 4096 if file_limit < 0 else min(max(file_limit // 8, 16), 4096)


class Dealers:
    """All asked addresses; their sockets are in ``poller``.

    At most ``max_peers`` at a time, and ``reserved`` ones beside them. When all places are taken, the oldest address
    whose connection was never up gives up its own: requests name addresses before anybody has checked who wrote them,
    and addresses where nobody answers must not keep out those where somebody would.
    """

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        poller: zmq.Poller,
        keys: CurveKeys | None,
        heartbeat_seconds: float,
        max_peers: int,
        reserved: Collection[Address],
    ) -> None:
        self.num_dropped = 0
        self._context = context
        self._poller = poller
        self._keys = keys
        self._heartbeat_seconds = heartbeat_seconds
        self._max_peers = max_peers
        self._reserved = frozenset(reserved)
        self._peers: dict[Address, _Peer] = {}
        self._was_full = False

    def send(self, address: Address, payload: bytes) -> None:
        """Send, connecting on first use; counted as dropped when the address makes no sense or has no place."""
        peer = self._peers.get(address) or self._connect(address)
        if peer is None or not send(peer.dealer, [payload]):
            self.num_dropped += 1

    def receive(self, ready: dict[object, int]) -> list[Received]:
        """What has arrived at those of our sockets that are ready."""
        received: list[Received] = []
        for peer in list(self._peers.values()):
            if peer.dealer in ready or peer.monitor in ready:
                received += self._receive_from(peer)
        return received

    def disconnect(self, address: Address, linger_milliseconds: int = LINGER_MILLISECONDS) -> None:
        """Close the connection to an address, if there is one."""
        peer = self._peers.pop(address, None)
        if peer is not None:
            self._poller.unregister(peer.dealer)
            self._poller.unregister(peer.monitor)
            peer.close(linger_milliseconds)

    def close(self) -> None:
        """Disconnect from everybody."""
        for address in list(self._peers):
            self.disconnect(address)

    def _connect(self, address: Address) -> _Peer | None:
        """Start connecting; None when the address makes no sense, or there is no place."""
        if not is_valid(address) or address.port == 0 or not self._has_place(address):
            return None
        try:
            peer = self._open_peer(address)
        except zmq.ZMQError:  # libzmq does not like the address either, or the process is out of descriptors
            return None
        self._poller.register(peer.dealer, zmq.POLLIN)
        self._poller.register(peer.monitor, zmq.POLLIN)
        self._peers[address] = peer
        return peer

    def _has_place(self, address: Address) -> bool:
        """Whether there is a place for a new address; may take that of another."""
        if address in self._reserved:
            return True
        others = [peer for peer in self._peers.values() if peer.address not in self._reserved]
        if len(others) < self._max_peers:
            return True
        if not self._was_full:
            self._was_full = True
            logger.warning(
                "requests have named more than %d addresses at a time: from now on the oldest that does not answer is "
                "given up for the next. Name prefill engines in 'peers', which have places of their own, and look for "
                "clients that write kv_transfer_params themselves. Not logged again",
                self._max_peers,
            )
        silent = next((peer for peer in others if not peer.established), None)
        if silent is None:
            return False
        self.disconnect(silent.address, linger_milliseconds=0)
        return True

    def _open_peer(self, address: Address) -> _Peer:
        with contextlib.ExitStack() as undo:
            dealer = new_dealer(self._context, self._heartbeat_seconds, self._keys)
            undo.enter_context(contextlib.closing(dealer))
            dealer.setsockopt(zmq.IPV6, int(":" in address.host))
            dealer.setsockopt(zmq.AFFINITY, NAMES_IO_THREAD if _is_name(address.host) else MAIN_IO_THREAD)
            # Before connecting, so that no event is missed.
            monitor = undo.enter_context(
                contextlib.closing(dealer.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED))
            )
            dealer.connect(f"tcp://{address}")
            undo.pop_all()
            return _Peer(address, dealer, monitor)

    def _receive_from(self, peer: _Peer) -> list[Received]:
        # The monitor first: the replies that came before the break are then certainly in the DEALER.
        lost = peer.is_lost()
        messages, num_dropped = take(peer.dealer, 1)
        self.num_dropped += num_dropped
        received: list[Received] = [ReplyReceived(peer.address, payload) for (payload,) in messages]
        if lost:
            self.disconnect(peer.address, linger_milliseconds=0)
            # Never up means that whoever listens there is no side channel of ours: as good as nobody.
            if peer.established:
                received.append(ConnectionLost(peer.address))
        return received


def is_valid(address: Address) -> bool:
    """Whether libzmq's endpoints mean by an address what we do."""
    host, port = address
    return bool(_HOST.fullmatch(host)) and not (":" in host and _is_name(host)) and 0 <= port < 65536


def _is_name(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return True
    return False
