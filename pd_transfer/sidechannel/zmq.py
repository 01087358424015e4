"""The side channel over ZeroMQ: one ROUTER that serves, one DEALER per asked address.

The caller's thread does everything in ``poll`` and the sends; libzmq's own I/O threads move the bytes. A request is one
frame; a ROUTER puts the asker's routing id, our ``origin``, in front of it. Anything else is dropped and counted.

A DEALER lives as long as its connection. libzmq would reconnect by itself and deliver old requests to whoever listens
then; instead a broken connection closes its DEALER, so that ``ConnectionLost`` is the truth about what was asked.

What libzmq does not bound: the number of frames of one incoming message, and the number of connections. Only keys keep
strangers from using that: with them, a ``Gate`` stands before the ROUTER.
"""

import contextlib
import errno
import ipaddress
import math
import re
import socket
import threading
import time
from dataclasses import dataclass

import zmq
from zmq.utils.monitor import recv_monitor_message

from pd_transfer.core.params import Address
from pd_transfer.errors import SideChannelError
from pd_transfer.sidechannel.base import (
    MAX_MESSAGE_BYTES,
    ConnectionLost,
    Received,
    ReplyReceived,
    RequestReceived,
)
from pd_transfer.sidechannel.curve import CurveKeys
from pd_transfer.sidechannel.gate import Gate

LINGER_MILLISECONDS = 200
"""How long a closing socket may still deliver: enough for a last Release, and a shutdown nobody notices."""

RECEIVE_QUEUE = 64
"""Unread messages per connection before TCP pushes back, and messages that one ``poll`` takes from a socket. Times
``MAX_MESSAGE_BYTES`` it bounds what a hostile peer can park here: 1 GiB per connection."""

MAX_PEERS = 512
"""Addresses asked at a time, by default. Each costs four descriptors; the addresses come from clients, so that their
number must have a bound."""

_OPTIONS: dict[int, int | bytes] = {
    zmq.LINGER: LINGER_MILLISECONDS,
    zmq.MAXMSGSIZE: MAX_MESSAGE_BYTES,
    zmq.RCVHWM: RECEIVE_QUEUE,
    # A step may release a thousand leases at once.
    zmq.SNDHWM: 4096,
    # A stranger who connects and says nothing is shown out.
    zmq.HANDSHAKE_IVL: 10_000,
    # Any name here makes libzmq refuse ZMTP 1 and 2, whose greeting is so short that HTTP or noise passes for messages.
    zmq.ZAP_DOMAIN: b"pd_transfer",
}

_ROUTER_OPTIONS: dict[int, int | bytes] = {
    # A reply to a peer that is gone, or whose queue is full, fails and is counted; otherwise it vanishes silently.
    zmq.ROUTER_MANDATORY: 1,
    # A stranger who claims a routing id in use is refused instead of receiving another asker's replies.
    zmq.ROUTER_HANDOVER: 0,
}

_DEALER_OPTIONS: dict[int, int | bytes] = {
    # Connecting takes a while; the first request must wait for it. IMMEDIATE would refuse it.
    zmq.IMMEDIATE: 0,
    # Where nobody listens yet: a refused connection costs microseconds, so that one a second is not worth saving.
    zmq.RECONNECT_IVL: 100,
    zmq.RECONNECT_IVL_MAX: 1000,
    # Where nobody answers the SYN: the system's own retries wait up to a minute for a host that is back.
    zmq.CONNECT_TIMEOUT: 5000,
}

_MAIN_IO_THREAD = 0b01
_NAMES_IO_THREAD = 0b10
"""Affinities. libzmq resolves a peer's name on the I/O thread that connects, which then waits for the resolver (libzmq
issue 3243). Named peers share a thread of their own, so that a slow resolver delays only them."""

_HOST = re.compile(r"[A-Za-z0-9._-]+|[0-9A-Fa-f:.]+(%[A-Za-z0-9._-]+)?")
"""No '*', ';' or '/': libzmq's endpoints give them a meaning, and hosts come from clients."""

_LONGEST_WAIT_SECONDS = 3600.0
"""``poll`` waits in pieces of this length, because libzmq's timeout is a C integer of milliseconds."""


@dataclass(slots=True)
class _Peer:
    """One asked address: its DEALER, the monitor that tells of its connection, and whether that was ever up."""

    address: Address
    dealer: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]
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


class _Waker:
    """Makes a descriptor readable from any thread. The lock keeps ``wake`` off a descriptor that is just closed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def fileno(self) -> int:
        return self._reader.fileno()

    def wake(self) -> None:
        # A full pair is a wake-up that is still pending; a closed one has nobody to wake.
        with self._lock, contextlib.suppress(OSError):
            self._writer.send(b"\0")

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._reader.recv(4096)

    def close(self) -> None:
        with self._lock:
            self._reader.close()
            self._writer.close()


class ZmqSideChannel:
    """A side channel over TCP; see ``base.SideChannel``.

    ``bind`` makes it serve: an IP address of this machine (``0.0.0.0`` or ``::`` for all) and a port (0: a free one).
    What is advertised to peers is the caller's business. A peer that stops answering heartbeats is lost after at most
    three times ``heartbeat_seconds``.

    Addresses to ask should be literal. Names resolve to IPv4 only, a slow resolver delays all named peers, and
    ``close`` waits for it.

    Raises SideChannelError when the address cannot be bound or the keys are malformed.
    """

    def __init__(
        self,
        bind: Address | None = None,
        keys: CurveKeys | None = None,
        heartbeat_seconds: float = 5.0,
        max_peers: int = MAX_PEERS,
    ) -> None:
        self.bound_port: int | None = None
        self.num_dropped = 0
        self._keys = keys
        self._heartbeat_milliseconds = int(heartbeat_seconds * 1000)
        self._max_peers = max_peers
        self._peers: dict[Address, _Peer] = {}
        self._router: zmq.Socket[bytes] | None = None
        self._gate: Gate | None = None
        self._context = zmq.Context(io_threads=2)
        # A DEALER and two ends of a monitor per peer, and as much again for peers that are still lingering.
        self._context.set(zmq.MAX_SOCKETS, 6 * max_peers + 16)
        self._waker = _Waker()
        self._poller = zmq.Poller()
        self._poller.register(self._waker.fileno(), zmq.POLLIN)
        try:
            self._open(bind)
        except BaseException:
            self.close()
            raise

    @property
    def num_refused(self) -> int:
        """See ``base.SideChannel``."""
        return 0 if self._gate is None else self._gate.num_refused

    def poll(self, timeout_seconds: float | None) -> list[Received]:
        """See ``base.SideChannel``."""
        deadline = math.inf if timeout_seconds is None else time.monotonic() + timeout_seconds
        while not self._context.closed:
            wait_seconds = min(max(deadline - time.monotonic(), 0.0), _LONGEST_WAIT_SECONDS)
            ready = dict(self._poller.poll(math.ceil(wait_seconds * 1000)))
            received = self._receive(ready)
            woken = self._waker.fileno() in ready
            if woken:
                self._waker.clear()
            if received or woken or time.monotonic() >= deadline:
                return received
        return []

    def send_request(self, address: Address, payload: bytes) -> None:
        """See ``base.SideChannel``."""
        if self._context.closed:
            return
        peer = self._peers.get(address) or self._connect(address)
        if peer is None:
            self.num_dropped += 1
        else:
            self._send(peer.dealer, [payload])

    def send_reply(self, origin: bytes, payload: bytes) -> None:
        """See ``base.SideChannel``."""
        if self._context.closed:
            return
        if self._router is None:
            self.num_dropped += 1
        else:
            self._send(self._router, [origin, payload])

    def disconnect(self, address: Address) -> None:
        """See ``base.SideChannel``."""
        self._forget(address, LINGER_MILLISECONDS)

    def wake(self) -> None:
        """See ``base.SideChannel``."""
        self._waker.wake()

    def close(self) -> None:
        """See ``base.SideChannel``."""
        if self._context.closed:
            return
        self._waker.close()
        for address in list(self._peers):
            self.disconnect(address)
        if self._gate is not None:
            self._gate.close()
        # The context knows every socket that is still open and waits for all of them to linger.
        self._context.destroy()

    def _open(self, bind: Address | None) -> None:
        try:
            # Malformed client keys show now, not at the first request.
            self._new_dealer().close()
            router = None if bind is None else self._new_router()
        except zmq.ZMQError as error:
            raise SideChannelError(
                f"Cannot set up ZeroMQ ({error}). With CURVE keys: each must be 40 characters of Z85, as 'pdt keys' "
                "makes them."
            ) from error
        if bind is not None and router is not None:
            self.bound_port = _bind(router, bind)
            self._poller.register(router, zmq.POLLIN)
            self._router = router

    def _new_socket(self, kind: int) -> zmq.Socket[bytes]:
        new = self._context.socket(kind)
        options = _OPTIONS | (_ROUTER_OPTIONS if kind == zmq.ROUTER else _DEALER_OPTIONS)
        for option, value in options.items():
            new.setsockopt(option, value)
        new.setsockopt(zmq.HEARTBEAT_IVL, self._heartbeat_milliseconds)
        new.setsockopt(zmq.HEARTBEAT_TIMEOUT, 2 * self._heartbeat_milliseconds)
        return new

    def _new_router(self) -> zmq.Socket[bytes]:
        router = self._new_socket(zmq.ROUTER)
        router.setsockopt(zmq.AFFINITY, _MAIN_IO_THREAD)
        if self._keys is not None:
            if self._keys.server_secret is None:
                raise SideChannelError(
                    "This engine serves, and its key file has no server_secret: set key_file to the deployment's "
                    "prefill.key."
                )
            router.setsockopt(zmq.CURVE_SERVER, 1)
            router.setsockopt(zmq.CURVE_SECRETKEY, self._keys.server_secret.encode())
            self._gate = Gate(self._context, router, self._keys.clients.values())
            for watched in self._gate.sockets:
                self._poller.register(watched, zmq.POLLIN)
        return router

    def _new_dealer(self) -> zmq.Socket[bytes]:
        dealer = self._new_socket(zmq.DEALER)
        if self._keys is not None:
            dealer.setsockopt(zmq.CURVE_SERVERKEY, self._keys.server_public.encode())
            dealer.setsockopt(zmq.CURVE_PUBLICKEY, self._keys.client_public.encode())
            dealer.setsockopt(zmq.CURVE_SECRETKEY, self._keys.client_secret.encode())
        return dealer

    def _connect(self, address: Address) -> _Peer | None:
        """Start connecting; None when the address makes no sense, or there are too many."""
        if len(self._peers) >= self._max_peers or not _is_valid(address) or address.port == 0:
            return None
        try:
            peer = self._open_peer(address)
        except zmq.ZMQError:  # libzmq does not like the address either, or the process is out of descriptors
            return None
        self._poller.register(peer.dealer, zmq.POLLIN)
        self._poller.register(peer.monitor, zmq.POLLIN)
        self._peers[address] = peer
        return peer

    def _open_peer(self, address: Address) -> _Peer:
        with contextlib.ExitStack() as undo:
            dealer = undo.enter_context(contextlib.closing(self._new_dealer()))
            dealer.setsockopt(zmq.IPV6, int(":" in address.host))
            dealer.setsockopt(zmq.AFFINITY, _NAMES_IO_THREAD if _is_name(address.host) else _MAIN_IO_THREAD)
            # Before connecting, so that no event is missed.
            monitor = undo.enter_context(
                contextlib.closing(dealer.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED))
            )
            dealer.connect(f"tcp://{address}")
            undo.pop_all()
            return _Peer(address, dealer, monitor)

    def _forget(self, address: Address, linger_milliseconds: int) -> None:
        peer = self._peers.pop(address, None)
        if peer is not None:
            self._poller.unregister(peer.dealer)
            self._poller.unregister(peer.monitor)
            peer.close(linger_milliseconds)

    def _send(self, via: zmq.Socket[bytes], frames: list[bytes]) -> None:
        try:
            if len(frames[-1]) <= MAX_MESSAGE_BYTES:
                via.send_multipart(frames, zmq.NOBLOCK)
                return
        except zmq.ZMQError:  # the queue is full, or the asker is gone
            pass
        self.num_dropped += 1

    def _receive(self, ready: dict[object, int]) -> list[Received]:
        received: list[Received] = []
        if self._gate is not None and any(watched in ready for watched in self._gate.sockets):
            self._gate.work()
        if self._router is not None and self._router in ready:
            received += [RequestReceived(origin, payload) for origin, payload in self._take(self._router, 2)]
        for peer in list(self._peers.values()):
            if peer.dealer in ready or peer.monitor in ready:
                received += self._receive_from(peer)
        return received

    def _receive_from(self, peer: _Peer) -> list[Received]:
        # The monitor first: the replies that came before the break are then certainly in the DEALER.
        lost = peer.is_lost()
        received: list[Received] = [ReplyReceived(peer.address, payload) for (payload,) in self._take(peer.dealer, 1)]
        if lost:
            self._forget(peer.address, linger_milliseconds=0)
            # Never up means that whoever listens there is no side channel of ours: as good as nobody.
            if peer.established:
                received.append(ConnectionLost(peer.address))
        return received

    def _take(self, source: zmq.Socket[bytes], num_frames: int) -> list[list[bytes]]:
        """Take what has arrived, without waiting; messages of another number of frames are dropped."""
        messages: list[list[bytes]] = []
        with contextlib.suppress(zmq.Again):
            for _ in range(RECEIVE_QUEUE):
                frames = source.recv_multipart(zmq.NOBLOCK)
                if len(frames) == num_frames:
                    messages.append(frames)
                else:
                    self.num_dropped += 1
        return messages


def _is_valid(address: Address) -> bool:
    host, port = address
    return bool(_HOST.fullmatch(host)) and not (":" in host and _is_name(host)) and 0 <= port < 65536


def _is_name(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return True
    return False


_BIND_ADVICE = {
    errno.EADDRINUSE: "the port is in use. Stop whoever uses it, or choose another port (0 picks a free one).",
    errno.EADDRNOTAVAIL: "this machine has no such address. Bind one of its own, or 0.0.0.0 for all of them.",
    errno.ENODEV: "the host is not an address of this machine. Bind one of its own, or 0.0.0.0 for all of them.",
    errno.EACCES: "this user may not use that port. Choose one above 1023 (0 picks a free one).",
    errno.EINVAL: "that is not an IP address and a port from 0 to 65535.",
}


def _bind(router: zmq.Socket[bytes], address: Address) -> int:
    """Bind and return the port. Raises SideChannelError with a sentence for the operator."""
    if not _is_valid(address):
        raise SideChannelError(f"Cannot listen on {address}: {_BIND_ADVICE[errno.EINVAL]}")
    router.setsockopt(zmq.IPV6, int(":" in address.host))
    try:
        router.bind(f"tcp://{address}")
    except zmq.ZMQError as error:
        advice = _BIND_ADVICE.get(error.errno or 0, f"{error}. Check the host and the port.")
        raise SideChannelError(f"Cannot listen on {address}: {advice}") from error
    return int(router.getsockopt_string(zmq.LAST_ENDPOINT).rsplit(":", 1)[1])
