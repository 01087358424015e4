"""What goes out on a connection."""

import asyncio

from proxy.http1.timing import Deadline

BUFFERED_BYTES = 1 << 16
"""So much may wait on one connection, in each direction, before whoever sends it is held back."""


class Outgoing:
    """A transport to write to. A peer that takes nothing for ``stall_seconds`` is hung up on."""

    __slots__ = ("_deadline", "_loop", "_stall_seconds", "_waiter", "is_lost", "is_paused", "transport")

    def __init__(
        self, loop: asyncio.AbstractEventLoop, transport: asyncio.Transport, stall_seconds: float | None = None
    ) -> None:
        self.transport = transport
        self.is_lost = False
        self.is_paused = False
        self._loop = loop
        self._stall_seconds = stall_seconds
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
                self._deadline = Deadline(self._loop, self.transport.abort)
            self._deadline.set(self._stall_seconds)

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
