"""What a client's body says, once its coding is undone."""

import zlib
from collections.abc import Iterator

from proxy.http1.body import Body
from proxy.http1.errors import MessageError
from proxy.http1.flow import Outgoing
from proxy.http1.heads import Headers

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"

_MOST_AT_ONCE = 1 << 18
_GZIP = 16 + zlib.MAX_WBITS


class Decoder:
    """Undoes a ``Content-Encoding``. Raises ``MessageError`` for one that it does not know, and for what is not in it.

    A piece that grows to more than is wanted is handed out in parts, so that a small body cannot become a large one
    unseen.
    """

    def __init__(self, coding: str) -> None:
        if coding not in {"gzip", "x-gzip", "deflate"}:
            raise MessageError(415, f"bodies in the coding {coding!r} are not taken")
        self._is_deflate = coding == "deflate"
        self._inflate = None if self._is_deflate else zlib.decompressobj(_GZIP)

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """The next piece, which is not empty, in parts."""
        if self._inflate is None:
            # Some send what the name says, and some what the standard says: the first bits tell.
            self._inflate = zlib.decompressobj(zlib.MAX_WBITS if piece[0] & 0xF == 8 else -zlib.MAX_WBITS)
        try:
            while True:
                if self._inflate.eof and not self._is_deflate:
                    # What follows the end of a gzip member is another one.
                    self._inflate = zlib.decompressobj(_GZIP)
                part = self._inflate.decompress(piece, _MOST_AT_ONCE)
                yield part
                piece = self._inflate.unconsumed_tail
                if self._inflate.eof:
                    piece = b"" if self._is_deflate else self._inflate.unused_data
                    if not piece:
                        return
                elif not piece and len(part) < _MOST_AT_ONCE:
                    return
        except zlib.error as error:
            raise MessageError(400, f"the body is not in its coding: {error}") from error

    def end(self) -> None:
        """Nothing more comes."""
        if self._inflate is not None and not self._inflate.eof:
            raise MessageError(400, "the body ends in the middle of its coding")


class Content:
    """A client's body, read by whoever serves the request."""

    __slots__ = ("_body", "_decoder", "_outgoing", "_parts", "length", "waits_to_be_told")

    def __init__(self, headers: Headers, body: Body, outgoing: Outgoing) -> None:
        length = headers.get("Content-Length")
        self.length = None if length is None else int(length)
        """As it was announced."""
        self.waits_to_be_told = "Expect" in headers
        """Whether the client sends it only when it is told to, and was not yet."""
        coding = headers.get("Content-Encoding", "").strip().lower()
        self._decoder: Decoder | str | None = None if coding in {"", "identity"} else coding
        self._parts: Iterator[bytes] = iter(())
        self._body = body
        self._outgoing = outgoing

    @property
    def is_here(self) -> bool:
        """Whether all of it has come already."""
        return self._body.has_ended

    async def next_piece(self) -> bytes:
        """What has come since the last time, empty at the end. Raises ``MessageError``."""
        if self.waits_to_be_told:
            self.waits_to_be_told = False
            if not self._body.is_ready:
                self._outgoing.write(_CONTINUE)
        if self._decoder is None:
            return await self._body.next_piece()
        if isinstance(self._decoder, str):
            self._decoder = Decoder(self._decoder)
        while True:
            for part in self._parts:
                if part:
                    return part
            piece = await self._body.next_piece()
            if not piece:
                self._decoder.end()
                return b""
            self._parts = self._decoder.feed(piece)

    async def read(self, most_bytes: int) -> bytes:
        """All of it. Raises ``MessageError``, with status 413 if it is larger."""
        pieces: list[bytes] = []
        size = self.length or 0
        if size <= most_bytes:
            size = 0
            while piece := await self.next_piece():
                size += len(piece)
                if size > most_bytes:
                    break
                pieces.append(piece)
        if size > most_bytes:
            raise MessageError(413, f"the body is larger than {most_bytes} bytes")
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)
