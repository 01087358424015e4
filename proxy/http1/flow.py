"""What comes in on a connection and what goes out: each is held back while the other side is slower."""

import asyncio
import socket
import struct

from proxy.http1.timing import Deadline

BUFFERED_BYTES = 1 << 16
"""So much may wait on one connection, in each direction, before whoever sends it is held back."""

_LOOK_SECONDS = 1.0
"""Between two looks whether a peer has left whose bytes are not read."""
_GONE = frozenset({7, 8})
"""TCP_CLOSE and TCP_CLOSE_WAIT, as ``TCP_INFO`` begins with."""
_RESET = struct.pack("ii", 1, 0)
"""For SO_LINGER: closing resets the connection."""


class Incoming:
    """Reading from a transport, which stops while anybody holds it.

    A peer that leaves meanwhile is noticed within ``_LOOK_SECONDS`` once all that it sent has arrived, if
    ``is_watched``: its departure stands behind bytes that nobody reads.
    """

    __slots__ = ("_holders", "_is_watched", "_look", "_loop", "_transport")

    def __init__(
        self, loop: asyncio.AbstractEventLoop, transport: asyncio.Transport, *, is_watched: bool = False
    ) -> None:
        self._loop = loop
        self._transport = transport
        self._is_watched = is_watched
        self._holders: set[object] = set()
        self._look: Deadline | None = None

    def hold(self, holder: object) -> None:
        """Read nothing more until the holder, and every other one, has let go."""
        if self._transport.is_closing():
            return
        if not self._holders:
            self._transport.pause_reading()
            self._watch()
        self._holders.add(holder)

    def let_go(self, holder: object) -> None:
        """For this holder, reading may go on."""
        if holder in self._holders:
            self._holders.discard(holder)
            self._go_on()

    def let_all_go(self) -> None:
        """Reading goes on, whoever holds it."""
        self._holders.clear()
        self._go_on()

    def lost(self) -> None:
        """There is no peer any more."""
        self._holders.clear()
        if self._look is not None:
            self._look.cancel()

    def _go_on(self) -> None:
        if not self._holders and not self._transport.is_closing():
            self._transport.resume_reading()
            if self._look is not None:
                self._look.clear()

    def _watch(self) -> None:
        if self._is_watched:
            if self._look is None:
                self._look = Deadline(self._loop, self._abort_if_gone)
            self._look.set(_LOOK_SECONDS)

    def _abort_if_gone(self) -> None:
        if self._transport.is_closing():
            return
        if self._transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] in _GONE:
            self._transport.abort()
        else:
            self._watch()


class Outgoing:
    """A transport to write to. A peer that takes nothing for ``stall_seconds`` is hung up on."""

    __slots__ = ("_deadline", "_loop", "_size", "_stall_seconds", "_waiter", "is_lost", "is_paused", "transport")

    def __init__(
        self, loop: asyncio.AbstractEventLoop, transport: asyncio.Transport, stall_seconds: float | None = None
    ) -> None:
        self.transport = transport
        self.is_lost = False
        self.is_paused = False
        self._loop = loop
        self._stall_seconds = stall_seconds
        self._size = 0
        """How much was left when last the peer was given its time."""
        self._deadline: Deadline | None = None
        self._waiter: asyncio.Future[None] | None = None
        transport.set_write_buffer_limits(BUFFERED_BYTES)

    def write(self, data: bytes) -> None:
        """Send, now or when the peer takes it. Raises ``ConnectionResetError`` if the connection is lost."""
        if self.transport.is_closing():
            raise ConnectionResetError("the connection is lost")
        self.transport.write(data)

    async def drain(self) -> None:
        """Wait until most of what was written is taken. One task at a time waits."""
        while self.is_paused:
            self._waiter = self._loop.create_future()
            await self._waiter
        if self.is_lost:
            raise ConnectionResetError("the connection is lost")

    def pause(self) -> None:
        """The peer takes less than is written."""
        self.is_paused = True
        if self._stall_seconds is not None:
            if self._deadline is None:
                self._deadline = Deadline(self._loop, self._hurry)
            self._size = self.transport.get_write_buffer_size()
            self._deadline.set(self._stall_seconds)

    def _hurry(self) -> None:
        assert self._deadline is not None
        assert self._stall_seconds is not None
        size = self.transport.get_write_buffer_size()
        if size < self._size:
            self._size = size
            self._deadline.set(self._stall_seconds)
        else:
            self.abort()

    def abort(self) -> None:
        """Hang up at once, in a way that a peer cannot take for the end of an answer that has no other end."""
        if not self.transport.is_closing():
            self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self.transport.abort()

    def resume(self) -> None:
        """The peer has caught up."""
        self.is_paused = False
        if self._deadline is not None:
            self._deadline.clear()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def lost(self) -> None:
        """There is no peer any more; whoever waits is told."""
        self.is_lost = True
        self.resume()
        if self._deadline is not None:
            self._deadline.cancel()
