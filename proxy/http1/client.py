"""A connection to an engine: one request at a time, and its answer."""

import asyncio
from collections.abc import AsyncIterable
from typing import Protocol, cast

import httptools

from proxy.http1 import heads
from proxy.http1.body import Body
from proxy.http1.errors import StaleConnectionError
from proxy.http1.flow import Incoming, Outgoing
from proxy.http1.heads import LAST_CHUNK, MOST_HEAD_BYTES, Headers, chunk
from proxy.http1.response import EngineResponse
from proxy.http1.timing import Deadline

RequestBody = bytes | AsyncIterable[bytes] | None

_INFORMATIONAL = range(100, 200)
_SWITCHING = 101
_JOINED_BYTES = 1 << 16
"""A smaller body is copied behind its head, which costs less than a second write."""


class Owner(Protocol):
    """Who keeps connections between two requests."""

    def keep(self, connection: "EngineConnection") -> None:
        """It is free."""

    def forget(self, connection: "EngineConnection") -> None:
        """It is lost."""


class EngineConnection(asyncio.Protocol):
    """One connection. Its owner lends it to one request at a time."""

    def __init__(self, owner: Owner) -> None:
        self.is_new = True
        """Whether it brought no answer yet."""
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self._answer = _Answer(self)
        self._waiter: asyncio.Future[EngineResponse] | None = None
        self._response: EngineResponse | None = None
        self._sender: asyncio.Task[None] | None = None
        self._is_silent = True
        """Whether no byte came since the request."""
        self.deadline = Deadline(self._loop, self._too_late)

    @property
    def is_usable(self) -> bool:
        """Whether a request may be sent."""
        return not (self._outgoing.is_lost or self._outgoing.transport.is_closing())

    async def exchange(self, method: str, head: bytes, body: RequestBody, seconds: float) -> EngineResponse:
        """Send a request; the answer, when its head is here.

        All of the answer has to come within so many seconds, unless its reader says otherwise. Raises ``TimeoutError``
        and ``ConnectionError``, a ``StaleConnectionError`` if the connection was not new and not one byte came. Hangs
        up if it is cancelled.
        """
        waiter: asyncio.Future[EngineResponse] = self._loop.create_future()
        self._waiter = waiter
        self._is_silent = True
        self._answer.begin(method)
        self.deadline.set(seconds)
        try:
            self._send(head, body)
            return await waiter
        except BaseException:
            if self._waiter is waiter:
                self._waiter = None
                self.abort()
            elif waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                # Cancelled with the answer on its way here; the connection may serve somebody else already.
                waiter.result().close()
            raise

    def abort(self) -> None:
        """Hang up at once, and end what is still being sent."""
        if self._sender is not None:
            self._sender.cancel()
        self._outgoing.transport.abort()

    # Called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection is there."""
        # Those of uvloop are no asyncio.Transport by class.
        transport = cast("asyncio.Transport", transport)
        self._incoming = Incoming(self._loop, transport)
        self._outgoing = Outgoing(self._loop, transport)

    def data_received(self, data: bytes) -> None:
        """Something came."""
        self._is_silent = False
        try:
            self._answer.feed(data)
        except httptools.HttpParserError as error:
            self._break(ConnectionResetError, f"the answer is no HTTP: {error.__context__ or error}")
            self.abort()

    def eof_received(self) -> None:
        """The engine will send nothing more."""
        if self._response is not None and self._answer.ends_with_connection:
            self._response.body.end()
        self._break(*self._why_lost())
        self._outgoing.transport.abort()

    def pause_writing(self) -> None:
        """The engine takes less than it is sent."""
        self._outgoing.pause()

    def resume_writing(self) -> None:
        """The engine has caught up."""
        self._outgoing.resume()

    def connection_lost(self, error: Exception | None) -> None:
        """It is over."""
        self._outgoing.lost()
        self._incoming.lost()
        self.deadline.cancel()
        if self._sender is not None:
            self._sender.cancel()
        self._break(*self._why_lost(error))
        self._owner.forget(self)
        # It holds on to this object, and this one to it.
        self._answer.end()

    # Called by the answer's parser

    def head_begins(self) -> None:
        """The first byte of an answer. Raises ``ConnectionResetError`` if nothing was asked."""
        if self._waiter is None:
            raise ConnectionResetError("an answer that nobody asked for")

    def head_ends(self, status: int, headers: Headers) -> Body:
        """The head of the answer is here."""
        body = Body(self._loop, self._incoming)
        waiter, self._waiter = self._waiter, None
        if waiter is None or waiter.done():
            raise ConnectionResetError("an answer that nobody waits for")
        self._response = EngineResponse(status, headers, body, self)
        waiter.set_result(self._response)
        return body

    def answer_ends(self, *, keeps_alive: bool) -> None:
        """All of the answer is here."""
        response, self._response = self._response, None
        if response is not None:
            response.body.end()
            response.is_complete()
        self.is_new = False
        self.deadline.clear()
        is_sent = self._sender is None and not self._outgoing.transport.get_write_buffer_size()
        if keeps_alive and is_sent and self.is_usable:
            self._owner.keep(self)
        else:
            self.abort()

    # The course of a request

    def _send(self, head: bytes, body: RequestBody) -> None:
        out = self._outgoing
        if isinstance(body, bytes) and len(body) < _JOINED_BYTES:
            out.write(head + body)
            return
        out.write(head)
        if isinstance(body, bytes):
            out.write(body)
        elif body is not None:
            self._sender = self._loop.create_task(self._send_pieces(body))

    async def _send_pieces(self, pieces: AsyncIterable[bytes]) -> None:
        try:
            async for piece in pieces:
                if piece:
                    self._outgoing.write(chunk(piece))
                    await self._outgoing.drain()
            self._outgoing.write(LAST_CHUNK)
        except Exception as error:  # noqa: BLE001 - whatever ends the pieces ends the request, and its sender says why
            self._break(ConnectionResetError, f"the request's body broke off: {error!r}")
            self._outgoing.transport.abort()
        finally:
            self._sender = None

    def _too_late(self) -> None:
        self._break(TimeoutError, "no answer in time")
        self.abort()

    def _why_lost(self, error: Exception | None = None) -> tuple[type[Exception], str]:
        if self._is_silent and not self.is_new:
            return StaleConnectionError, "the connection was closed before an answer"
        return ConnectionResetError, f"the connection was closed in an answer: {error or 'in order'}"

    def _break(self, error: type[Exception], about: str) -> None:
        """The answer will not be complete."""
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_exception(error(about))
        if self._response is not None:
            self._response.body.fail(error, about)
            self._response.is_complete()
            self._response = None


class _Answer:
    """Cuts bytes into one answer after the other."""

    def __init__(self, connection: EngineConnection) -> None:
        self.ends_with_connection = False
        """Whether nothing but the end of the connection is the end of this answer."""
        self._connection: EngineConnection | None = connection
        self._parser: httptools.HttpResponseParser | None = None
        self._method = ""
        self._fields: list[tuple[bytes, bytes]] = []
        self._body: Body | None = None
        self._keeps_alive = False
        self._in_head = True
        self._bare_bytes = 0

    def begin(self, method: str) -> None:
        """A request was sent."""
        self._method = method
        if self._parser is None:
            self._parser = httptools.HttpResponseParser(self)
        self._bare_bytes = 0

    def end(self) -> None:
        """Nothing more comes."""
        self._parser = None
        self._connection = None

    def feed(self, data: bytes) -> None:
        """What came. Raises httptools' errors."""
        if self._parser is None:
            raise httptools.HttpParserError("an answer that nobody asked for")
        self._bare_bytes += len(data)
        self._parser.feed_data(data)
        if self._bare_bytes > MOST_HEAD_BYTES:
            raise httptools.HttpParserError("a head without an end")

    # Called by httptools

    def on_message_begin(self) -> None:
        """The first byte of an answer, or of one that goes before it."""
        if self._connection is not None:
            self._connection.head_begins()
        self._fields = []
        self._in_head = True

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header field, or one that follows a chunked body and is left out."""
        if self._in_head:
            self._fields.append((name, value))

    def on_headers_complete(self) -> None:
        """The end of the head."""
        assert self._parser is not None
        assert self._connection is not None
        self._in_head = False
        self._bare_bytes = 0
        status = self._parser.get_status_code()
        if status in _INFORMATIONAL:
            if status == _SWITCHING:
                raise httptools.HttpParserError("a protocol that nobody asked for")
            return
        headers = heads.decoded(self._fields)
        self._keeps_alive = self._parser.should_keep_alive()
        has_body = heads.has_body(self._method, status)
        self.ends_with_connection = has_body and not self._is_framed(headers)
        self._body = self._connection.head_ends(status, headers)
        if not has_body:
            # The parser would wait for one, if the head tells how long it is; so the next answer gets a new parser.
            self._parser = None
            self._done()

    def on_body(self, piece: bytes) -> None:
        """Some of the body."""
        self._bare_bytes = 0
        if self._body is not None:
            self._body.feed(piece)

    def on_message_complete(self) -> None:
        """The end of the answer, or of one that goes before it."""
        self._bare_bytes = 0
        if self._body is not None:
            self._done()

    def _done(self) -> None:
        self._body = None
        if self._connection is not None:
            self._connection.answer_ends(keeps_alive=self._keeps_alive and not self.ends_with_connection)

    @staticmethod
    def _is_framed(headers: Headers) -> bool:
        coding = headers.get("Transfer-Encoding")
        return "Content-Length" in headers if coding is None else coding.lower().endswith("chunked")
