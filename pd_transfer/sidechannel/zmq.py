"""The side channel over ZeroMQ: one ROUTER that serves, one DEALER per asked address.

The caller's thread does everything in ``poll`` and the sends; libzmq's own I/O threads move the bytes. A request is one
frame; a ROUTER puts the asker's routing id, our ``origin``, in front of it. Anything else is dropped and counted.

What libzmq does not bound: the number of frames of one incoming message, and the number of connections. Only keys keep
strangers from using that: with them, a ``Gate`` stands before the ROUTER.
"""

import contextlib
import errno
import math
import resource
import socket
import threading
import time
from collections.abc import Collection

import zmq

from pd_transfer.core.params import Address
from pd_transfer.errors import SideChannelError
from pd_transfer.sidechannel.base import Received, RequestReceived
from pd_transfer.sidechannel.curve import CurveKeys
from pd_transfer.sidechannel.dealers import Dealers, is_valid, num_places
from pd_transfer.sidechannel.gate import Gate
from pd_transfer.sidechannel.sockets import NUM_IO_THREADS, new_dealer, new_router, send, take

_LONGEST_WAIT_SECONDS = 3600.0
"""``poll`` waits in pieces of this length, because libzmq's timeout is a C integer of milliseconds."""


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
    three times ``heartbeat_seconds``. ``max_peers`` addresses are asked at a time (as ``num_places`` says, by default),
    and ``reserved`` ones beside them.

    Addresses to ask should be literal. Names resolve to IPv4 only, a slow resolver delays all named peers, and
    ``close`` waits for it.

    Raises SideChannelError when the address cannot be bound or the keys are malformed.
    """

    def __init__(
        self,
        bind: Address | None = None,
        keys: CurveKeys | None = None,
        heartbeat_seconds: float = 5.0,
        max_peers: int | None = None,
        reserved: Collection[Address] = (),
    ) -> None:
        self.bound_port: int | None = None
        self._num_dropped = 0
        self._router: zmq.Socket[bytes] | None = None
        self._gate: Gate | None = None
        if max_peers is None:
            max_peers = num_places(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        self._context = zmq.Context(io_threads=NUM_IO_THREADS)
        # A DEALER and two ends of a monitor per peer, and as much again for peers that are still lingering.
        self._context.set(zmq.MAX_SOCKETS, 6 * (max_peers + len(reserved)) + 16)
        self._waker = _Waker()
        self._poller = zmq.Poller()
        self._poller.register(self._waker.fileno(), zmq.POLLIN)
        self._dealers = Dealers(self._context, self._poller, keys, heartbeat_seconds, max_peers, reserved)
        try:
            self._open(bind, keys, heartbeat_seconds)
        except BaseException:
            self.close()
            raise

    @property
    def num_dropped(self) -> int:
        """See ``base.SideChannel``."""
        return self._num_dropped + self._dealers.num_dropped

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
        if not self._context.closed:
            self._dealers.send(address, payload)

    def send_reply(self, origin: bytes, payload: bytes) -> None:
        """See ``base.SideChannel``."""
        if self._context.closed:
            return
        if self._router is None or not send(self._router, [origin, payload]):
            self._num_dropped += 1

    def disconnect(self, address: Address) -> None:
        """See ``base.SideChannel``."""
        self._dealers.disconnect(address)

    def wake(self) -> None:
        """See ``base.SideChannel``."""
        self._waker.wake()

    def close(self) -> None:
        """See ``base.SideChannel``."""
        if self._context.closed:
            return
        self._waker.close()
        self._dealers.close()
        if self._gate is not None:
            self._gate.close()
        # The context knows every socket that is still open and waits for all of them to linger.
        self._context.destroy()

    def _open(self, bind: Address | None, keys: CurveKeys | None, heartbeat_seconds: float) -> None:
        try:
            # Malformed client keys show now, not at the first request.
            new_dealer(self._context, heartbeat_seconds, keys).close()
            router = None if bind is None else new_router(self._context, heartbeat_seconds, keys)
        except zmq.ZMQError as error:
            raise SideChannelError(
                f"Cannot set up ZeroMQ ({error}). With CURVE keys: each must be 40 characters of Z85, as 'pdt keys' "
                "makes them."
            ) from error
        if bind is None or router is None:
            return
        if keys is not None:
            self._gate = Gate(self._context, router, keys.clients.values())
            for watched in self._gate.sockets:
                self._poller.register(watched, zmq.POLLIN)
        self.bound_port = _bind(router, bind)
        self._poller.register(router, zmq.POLLIN)
        self._router = router

    def _receive(self, ready: dict[object, int]) -> list[Received]:
        received: list[Received] = []
        if self._gate is not None and any(watched in ready for watched in self._gate.sockets):
            self._gate.work()
        if self._router is not None and self._router in ready:
            messages, num_dropped = take(self._router, 2)
            self._num_dropped += num_dropped
            received += [RequestReceived(origin, payload) for origin, payload in messages]
        return received + self._dealers.receive(ready)


_BIND_ADVICE = {
    errno.EADDRINUSE: "the port is in use. Stop whoever uses it, or choose another port (0 picks a free one).",
    errno.EADDRNOTAVAIL: "this machine has no such address. Bind one of its own, or 0.0.0.0 for all of them.",
    errno.ENODEV: "the host is not an address of this machine. Bind one of its own, or 0.0.0.0 for all of them.",
    errno.EACCES: "this user may not use that port. Choose one above 1023 (0 picks a free one).",
    errno.EINVAL: "that is not an IP address and a port from 0 to 65535.",
}


def _bind(router: zmq.Socket[bytes], address: Address) -> int:
    """Bind and return the port. Raises SideChannelError with a sentence for the operator."""
    if not is_valid(address):
        raise SideChannelError(f"Cannot listen on {address}: {_BIND_ADVICE[errno.EINVAL]}")
    router.setsockopt(zmq.IPV6, int(":" in address.host))
    try:
        router.bind(f"tcp://{address}")
    except zmq.ZMQError as error:
        advice = _BIND_ADVICE.get(error.errno or 0, f"{error}. Check the host and the port.")
        raise SideChannelError(f"Cannot listen on {address}: {advice}") from error
    return int(router.getsockopt_string(zmq.LAST_ENDPOINT).rsplit(":", 1)[1])
