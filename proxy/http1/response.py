"""An engine's answer that is coming in."""

from typing import Protocol

from proxy.http1.body import Body
from proxy.http1.heads import Headers
from proxy.http1.timing import Deadline


class Source(Protocol):
    """The connection that an answer comes from."""

    deadline: Deadline

    def abort(self) -> None:
        """Hang up."""


class EngineResponse:
    """An answer whose head is here. The owner reads it and closes it."""

    __slots__ = ("_source", "body", "content_type", "headers", "status")

    def __init__(self, status: int, headers: Headers, body: Body, source: Source) -> None:
        self.status = status
        self.headers = headers
        self.content_type = headers.get("Content-Type", "").partition(";")[0].strip().lower()
        self.body = body
        self._source: Source | None = source

    async def next_piece(self, seconds: float | None = None) -> bytes:
        """What has come since the last time, empty at the end; nothing is read ahead beyond a buffer.

        Raises ``ConnectionError`` if the body breaks off, and ``TimeoutError`` after so many seconds without a byte, or
        when the time for the whole answer is over.
        """
        if self.body.is_ready or seconds is None or self._source is None:
            return await self.body.next_piece()
        self._source.deadline.set(seconds)
        piece = await self.body.next_piece()
        if self._source is not None:
            # What comes next may be long in being asked for.
            self._source.deadline.clear()
        return piece

    async def read(self) -> bytes:
        """The whole body. Raises like ``next_piece``."""
        piece = await self.body.next_piece()
        if self.body.at_end:
            return piece
        pieces = [piece]
        while piece := await self.body.next_piece():
            pieces.append(piece)
        return b"".join(pieces)

    def lift_limit(self) -> None:
        """The time for the whole answer does not count any more."""
        if self._source is not None:
            self._source.deadline.clear()

    def is_complete(self) -> None:
        """The connection has no more to do with this answer."""
        self._source = None

    def close(self) -> None:
        """Hang up if the answer is not complete; the engine then ends its work on it."""
        if self._source is not None:
            self._source.abort()
            self._source = None
