"""Both ends of an HTTP/1.1 connection on bare asyncio protocols and httptools.

So little is done here that what is measured is the proxy in between. One request at a time on a connection, as every
HTTP client does it; a peer that breaks the rules breaks the benchmark.
"""

import asyncio
import time
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import httptools

Answering = Callable[[asyncio.Transport, bytes, bytes], None]
"""Gets a request's path and body, and writes the answer to the transport, now or later."""


class Served(asyncio.Protocol):
    """The server's end."""

    def __init__(self, answering: Answering) -> None:
        self._answering = answering
        self._parser = httptools.HttpRequestParser(self)
        self._path = b""
        self._body: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the event loop."""
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        """Called by the event loop."""
        self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        """Called by the parser, as are the methods below."""
        self._path = b""
        self._body = []

    def on_url(self, url: bytes) -> None:
        """A piece of the path."""
        self._path += url

    def on_body(self, piece: bytes) -> None:
        """A piece of the body."""
        self._body.append(piece)

    def on_message_complete(self) -> None:
        """The request is here."""
        self._answering(self._transport, self._path, b"".join(self._body))


class Answer(NamedTuple):
    """What came back for one request."""

    status: int
    first_byte: float
    """When the first byte of the body came, by ``time.perf_counter``."""
    pieces: list[bytes]
    """The body, as it was read from the socket."""

    @property
    def body(self) -> bytes:
        """All of the body."""
        return b"".join(self.pieces)


class Asking(asyncio.Protocol):
    """The client's end."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._answered: asyncio.Future[Answer] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the event loop."""
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]

    def ask(self, request: bytes) -> asyncio.Future[Answer]:
        """Send a request, head and body. The future raises ConnectionError if the connection ends before the answer."""
        self._parser = httptools.HttpResponseParser(self)
        self._pieces: list[bytes] = []
        self._first_byte = 0.0
        self._answered = self._loop.create_future()
        self._transport.write(request)
        return self._answered

    def close(self) -> None:
        """Hang up."""
        self._transport.close()

    def data_received(self, data: bytes) -> None:
        """Called by the event loop."""
        self._parser.feed_data(data)

    def connection_lost(self, error: Exception | None) -> None:
        """Called by the event loop."""
        if self._answered is not None and not self._answered.done():
            self._answered.set_exception(ConnectionError(f"the connection ended before the answer: {error}"))

    def on_body(self, piece: bytes) -> None:
        """Called by the parser, as is the method below."""
        if not self._pieces:
            self._first_byte = time.perf_counter()
        self._pieces.append(piece)

    def on_message_complete(self) -> None:
        """The answer is here."""
        if self._answered is not None and not self._answered.done():
            self._answered.set_result(Answer(self._parser.get_status_code(), self._first_byte, self._pieces))


Connection = TypeVar("Connection", bound=Asking)


async def connect(host: str, port: int, factory: Callable[[], Connection]) -> Connection:
    """A connection to a server."""
    _, protocol = await asyncio.get_running_loop().create_connection(factory, host, port)
    return protocol


def post(path: str, body: bytes) -> bytes:
    """A request as the openai client would send it, without what no proxy looks at."""
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nAccept: application/json\r\n"
        f"Authorization: Bearer none\r\nUser-Agent: benchmark\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def whole(body: bytes, status: bytes = b"200 OK") -> bytes:
    """An answer of JSON."""
    return b"HTTP/1.1 %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body)


EVENT_STREAM = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
)
END_OF_STREAM = b"0\r\n\r\n"


def chunk(piece: bytes) -> bytes:
    """A piece of a stream."""
    return b"%x\r\n%s\r\n" % (len(piece), piece)
