"""A side channel inside one process, for tests and simulations: deterministic, and faults happen on command.

Messages arrive at once unless they are held. A test holds messages, looks at them (``held``), drops, duplicates or
reorders them, and delivers or releases the rest; it cuts connections and kills endpoints. Nothing here reads a clock,
except that ``poll`` with a timeout waits for other threads.
"""

from collections import deque
from dataclasses import dataclass
from threading import TIMEOUT_MAX, Condition, RLock

from pd_transfer.core.params import Address
from pd_transfer.errors import SideChannelError
from pd_transfer.sidechannel.base import (
    MAX_MESSAGE_BYTES,
    ConnectionLost,
    Received,
    ReplyReceived,
    RequestReceived,
)

FIRST_EPHEMERAL_PORT = 49152


@dataclass(frozen=True, slots=True, eq=False)
class _Connection:
    """One asker's connection to one server. It is open as long as the network lists it under its origin."""

    origin: bytes
    asker: "MemorySideChannel"
    address: Address
    server: "MemorySideChannel"


@dataclass(frozen=True, slots=True)
class HeldMessage:
    """A message on its way. ``address`` is the server's, also for a reply."""

    connection: _Connection
    is_reply: bool
    payload: bytes

    @property
    def address(self) -> Address:
        """The address that was asked."""
        return self.connection.address


class MemoryNetwork:
    """What endpoints of one test share. All methods may be called by any thread."""

    def __init__(self) -> None:
        self._changed = Condition(RLock())
        self._servers: dict[Address, MemorySideChannel] = {}
        self._connections: dict[bytes, _Connection] = {}
        self._held: list[HeldMessage] = []
        self._holds_all = False
        self._held_addresses: set[Address] = set()
        self._num_origins = 0

    # Test controls: messages

    @property
    def held(self) -> tuple[HeldMessage, ...]:
        """The messages on their way, oldest first; the indices below count in it."""
        with self._changed:
            return tuple(self._held)

    def hold(self, address: Address | None = None) -> None:
        """From now on, hold requests to ``address`` and replies from there (None: everything) instead of delivering."""
        with self._changed:
            if address is None:
                self._holds_all = True
            else:
                self._held_addresses.add(address)

    def release(self) -> None:
        """Deliver everything that is held, oldest first, and hold nothing any more."""
        with self._changed:
            self._holds_all = False
            self._held_addresses.clear()
            while self._held:
                self.deliver()

    def deliver(self, index: int = 0) -> None:
        """Deliver one held message."""
        with self._changed:
            self._deliver(self._held.pop(index))

    def drop(self, index: int = 0) -> None:
        """Lose one held message."""
        with self._changed:
            del self._held[index]

    def duplicate(self, index: int = 0) -> None:
        """Hold a second copy of one held message, behind all others."""
        with self._changed:
            self._held.append(self._held[index])

    def move(self, index: int, new_index: int) -> None:
        """Reorder: the held message at ``index`` becomes the one at ``new_index``."""
        with self._changed:
            self._held.insert(new_index, self._held.pop(index))

    # Test controls: connections and endpoints

    def cut(self, address: Address, asker: "MemorySideChannel | None" = None) -> None:
        """Break the connections to ``address`` (of one asker, or of all); the askers see ConnectionLost."""
        with self._changed:
            for connection in self._connections_where(address=address, asker=asker):
                self._disconnect(connection)
                connection.asker._arrive(ConnectionLost(address))

    def kill(self, endpoint: "MemorySideChannel") -> None:
        """End an endpoint as its process's death would: whoever was connected to it sees ConnectionLost."""
        endpoint.close()

    # What endpoints call

    def _bind(self, endpoint: "MemorySideChannel", address: Address) -> Address:
        with self._changed:
            if address.port == 0:
                used = {server.port for server in self._servers}
                port = next(port for port in range(FIRST_EPHEMERAL_PORT, 65536) if port not in used)
                address = Address(address.host, port)
            if address in self._servers:
                raise SideChannelError(
                    f"Cannot listen on {address}: the port is in use. Stop whoever uses it, or choose another port "
                    "(0 picks a free one)."
                )
            self._servers[address] = endpoint
            return address

    def _request(self, asker: "MemorySideChannel", address: Address, payload: bytes) -> bool:
        """Send a request; False when nobody listens there. A server with another key counts it and sees nothing."""
        server = self._servers.get(address)
        if server is None:
            return False
        if server._key != asker._key:
            server.num_refused += 1
            return True
        connections = self._connections_where(address=address, asker=asker)
        if connections:
            connection = connections[0]
        else:
            self._num_origins += 1
            connection = _Connection(b"origin-%d" % self._num_origins, asker, address, server)
            self._connections[connection.origin] = connection
        self._send(HeldMessage(connection, is_reply=False, payload=payload))
        return True

    def _reply(self, server: "MemorySideChannel", origin: bytes, payload: bytes) -> bool:
        """Send a reply; False when the asker is gone."""
        connection = self._connections.get(origin)
        if connection is None or connection.server is not server:
            return False
        self._send(HeldMessage(connection, is_reply=True, payload=payload))
        return True

    def _send(self, message: HeldMessage) -> None:
        if self._holds_all or message.address in self._held_addresses:
            self._held.append(message)
        else:
            self._deliver(message)

    def _deliver(self, message: HeldMessage) -> None:
        connection = message.connection
        if message.is_reply:
            connection.asker._arrive(ReplyReceived(connection.address, message.payload))
        else:
            connection.server._arrive(RequestReceived(connection.origin, message.payload))

    def _connections_where(
        self, address: Address | None = None, asker: "MemorySideChannel | None" = None
    ) -> list[_Connection]:
        return [
            connection
            for connection in self._connections.values()
            if (address is None or address == connection.address) and (asker is None or asker is connection.asker)
        ]

    def _disconnect(self, connection: _Connection) -> None:
        del self._connections[connection.origin]
        self._held = [message for message in self._held if message.connection is not connection]

    def _remove(self, endpoint: "MemorySideChannel", address: Address | None) -> None:
        for connection in self._connections_where(asker=endpoint):
            self._disconnect(connection)
        if address is not None:
            self.cut(address)
            del self._servers[address]


class MemorySideChannel:
    """An endpoint of a ``MemoryNetwork``; see ``base.SideChannel``. ``address`` makes it serve (port 0: a free one).

    Raises SideChannelError when another endpoint listens there. Requests to an address where nobody listens are
    dropped, never kept. Endpoints with different ``key`` do not get to talk.
    """

    def __init__(self, network: MemoryNetwork, address: Address | None = None, key: str = "") -> None:
        self.num_dropped = 0
        self.num_refused = 0
        self._key = key
        self._network = network
        self._changed = network._changed
        self._inbox: deque[Received] = deque()
        self._woken = False
        self._closed = False
        self._address = None if address is None else network._bind(self, address)

    @property
    def bound_port(self) -> int | None:
        """See ``base.SideChannel``."""
        return None if self._address is None else self._address.port

    def poll(self, timeout_seconds: float | None) -> list[Received]:
        """See ``base.SideChannel``."""
        timeout = None if timeout_seconds is None else min(timeout_seconds, TIMEOUT_MAX)
        with self._changed:
            self._changed.wait_for(lambda: self._inbox or self._woken or self._closed, timeout)
            received = list(self._inbox)
            self._inbox.clear()
            self._woken = False
            return received

    def send_request(self, address: Address, payload: bytes) -> None:
        """See ``base.SideChannel``."""
        with self._changed:
            if not self._closed and not (
                len(payload) <= MAX_MESSAGE_BYTES and self._network._request(self, address, payload)
            ):
                self.num_dropped += 1

    def send_reply(self, origin: bytes, payload: bytes) -> None:
        """See ``base.SideChannel``."""
        with self._changed:
            if not self._closed and not (
                len(payload) <= MAX_MESSAGE_BYTES and self._network._reply(self, origin, payload)
            ):
                self.num_dropped += 1

    def disconnect(self, address: Address) -> None:
        """See ``base.SideChannel``."""
        with self._changed:
            for connection in self._network._connections_where(address=address, asker=self):
                self._network._disconnect(connection)

    def wake(self) -> None:
        """See ``base.SideChannel``."""
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def close(self) -> None:
        """See ``base.SideChannel``."""
        with self._changed:
            if not self._closed:
                self._closed = True
                self._inbox.clear()
                self._network._remove(self, self._address)
                self._changed.notify_all()

    def _arrive(self, received: Received) -> None:
        self._inbox.append(received)
        self._changed.notify_all()
