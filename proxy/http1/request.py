"""A client's request, and the answer to it."""

from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import unquote

from proxy.http1 import heads
from proxy.http1.flow import Outgoing
from proxy.http1.heads import Headers

if TYPE_CHECKING:
    from proxy.http1.content import Content
    from proxy.http1.errors import MessageError

_NO_LENGTH = 1 << 62


class Response(NamedTuple):
    """An answer. Without a body, it was written by the request's own ``begin`` and ``write`` already."""

    status: int
    headers: Headers
    body: bytes | None = None
    closes: bool = False
    """Whether the connection ends with it."""


class Request:
    """One request. Its owner reads the body and answers, or has the connection answer with a ``Response``."""

    __slots__ = (
        "_outgoing", "_writer", "content", "headers", "is_http_1_0", "keeps_alive", "method", "path", "refusal",
        "target",
    )  # fmt: skip

    def __init__(self, method: str, target: str, headers: Headers, outgoing: Outgoing) -> None:
        self.method = method
        self.target = target
        """Path and query, as they came; what is no path, as in ``OPTIONS *``, is left as it is."""
        self.path = path_of(target)
        self.headers = headers
        self.content: Content | None = None
        """The body as it comes, None if there is none."""
        self.is_http_1_0 = False
        self.keeps_alive = True
        """Whether the connection may be used for another request."""
        self.refusal: MessageError | None = None
        """Set if this is no request at all, and then this is the answer."""
        self._outgoing = outgoing
        self._writer: _Writer | None = None

    @property
    def content_type(self) -> str:
        """The media type without its parameters, in small letters; empty if there is none."""
        return self.headers.get("Content-Type", "").partition(";")[0].strip().lower()

    @property
    def remote(self) -> str | None:
        """The client's address."""
        peer = self._outgoing.transport.get_extra_info("peername")
        return str(peer[0]) if isinstance(peer, tuple) else None

    @property
    def is_here(self) -> bool:
        """Whether all of the body has come already."""
        return self.content is None or self.content.is_here

    async def read(self, most_bytes: int) -> bytes:
        """The whole body without its coding. Raises ``MessageError``, with status 413 if it is larger."""
        return b"" if self.content is None else await self.content.read(most_bytes)

    def begin(self, status: int, headers: Headers) -> None:
        """Begin the answer; its head goes out together with its first piece."""
        self._begun(status, headers)

    def _begun(self, status: int, headers: Headers) -> "_Writer":
        if self.content is not None and self.content.waits_to_be_told:
            # Nobody knows whether the body comes all the same, so what comes next may be anything.
            self.keeps_alive = False
        writer = self._writer = _Writer(self, status, headers, self._outgoing)
        return writer

    async def write(self, piece: bytes) -> None:
        """Send a piece of the answer's body, and wait while the client takes less than it is sent.

        Raises ``ConnectionResetError`` if the client has left.
        """
        assert self._writer is not None
        self._writer.write(piece)
        if self._outgoing.is_paused:
            await self._outgoing.drain()

    def finish(self, response: Response) -> None:
        """Send what is missing of an answer. Raises ``ConnectionResetError`` if the client has left.

        A whole answer after the beginning of another one cannot be sent: then that one is cut off.
        """
        writer = self._writer
        if writer is not None and response.body is not None:
            self.abort()
            return
        if writer is None:
            if response.closes:
                self.keeps_alive = False
            body = response.body or b""
            if heads.has_body("", response.status):
                response.headers["Content-Length"] = str(len(body))
            writer = self._begun(response.status, response.headers)
            writer.write(body)
        writer.finish()

    def abort(self) -> None:
        """Hang up at once, so that nobody takes the part that was sent for the whole."""
        self._outgoing.abort()


class _Writer:
    """The framing of one answer's body: a length that was announced, chunks, or the end of the connection."""

    __slots__ = ("_chunked", "_has_body", "_head", "_left", "_outgoing")

    def __init__(self, request: Request, status: int, headers: Headers, outgoing: Outgoing) -> None:
        self._outgoing = outgoing
        self._has_body = heads.has_body(request.method, status)
        length = headers.get("Content-Length")
        self._left = _NO_LENGTH if length is None else int(length)
        self._chunked = self._has_body and length is None and not request.is_http_1_0
        lines = ["Transfer-Encoding: chunked"] if self._chunked else []
        if self._has_body and length is None and request.is_http_1_0:
            request.keeps_alive = False
        if not request.keeps_alive:
            lines.append("Connection: close")
        elif request.is_http_1_0:
            lines.append("Connection: keep-alive")
        self._head = heads.response_head(status, headers, lines)

    def write(self, piece: bytes) -> None:
        if not (piece and self._has_body):
            return
        self._left -= len(piece)
        if self._left < 0:
            raise ValueError("an answer is longer than it was to be")
        head, self._head = self._head, b""
        self._outgoing.write(head + (heads.chunk(piece) if self._chunked else piece))

    def finish(self) -> None:
        head, self._head = self._head, b""
        if self._chunked:
            head += heads.LAST_CHUNK
        elif self._has_body and 0 < self._left < _NO_LENGTH // 2:
            # Shorter than it was to be: the end of the connection tells, and nothing else can.
            self._outgoing.abort()
            return
        if head:
            self._outgoing.write(head)


def path_of(target: str) -> str:
    """The path of a target, decoded as servers behind the proxy decode it: what they take for a path is one here."""
    path = target.partition("?")[0]
    return unquote(path) if "%" in path else path
