"""The body of a message that is coming in."""

import asyncio

from proxy.http1.flow import BUFFERED_BYTES, Incoming


class Body:
    """Pieces in the order in which they come. The sender is held back while nobody reads them."""

    __slots__ = ("_discards", "_error", "_incoming", "_loop", "_pieces", "_size", "_waiter", "has_ended")

    def __init__(self, loop: asyncio.AbstractEventLoop, incoming: Incoming) -> None:
        self.has_ended = False
        """Whether all of it is here; maybe it was not read yet."""
        self._loop = loop
        self._incoming = incoming
        self._pieces: list[bytes] = []
        self._size = 0
        self._discards = False
        self._error: tuple[type[Exception], tuple[object, ...]] | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def at_end(self) -> bool:
        """Whether all of it was read."""
        return self.has_ended and not self._pieces

    @property
    def is_ready(self) -> bool:
        """Whether the next piece, the end or an error is here."""
        return self.has_ended or bool(self._pieces) or self._error is not None

    def feed(self, piece: bytes) -> None:
        """A piece has come."""
        if self._discards:
            return
        self._pieces.append(piece)
        self._size += len(piece)
        if self._size > BUFFERED_BYTES:
            self._incoming.hold(self)
        self._wake()

    def end(self) -> None:
        """The last piece has come."""
        self.has_ended = True
        self._incoming.let_go(self)
        self._wake()

    def fail(self, error: type[Exception], *about: object) -> None:
        """Nothing more will come. Readers get what came, and then this error, a new one each time: an error that is
        raised holds on to the reader's frame, and the body would hold on to both.
        """
        if not self.has_ended:
            self._error = self._error or (error, about)
            self._incoming.let_go(self)
            self._wake()

    def discard(self) -> None:
        """Nobody reads any more."""
        self._discards = True
        self._pieces.clear()
        self._incoming.let_go(self)

    async def next_piece(self) -> bytes:
        """What has come since the last time, empty at the end. One task at a time reads."""
        while not self._pieces:
            if self.has_ended:
                return b""
            if self._error is not None:
                kind, about = self._error
                raise kind(*about)
            self._waiter = self._loop.create_future()
            await self._waiter
        pieces = self._pieces
        piece = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        self._size = 0
        self._incoming.let_go(self)
        return piece

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
