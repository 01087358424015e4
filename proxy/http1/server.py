"""Connections of clients: requests in, answers out, in the order in which the requests came.

A request is served by a task of its own from the moment its head is here, and the task is cancelled when the client
leaves. Requests that come meanwhile wait, up to a number; then nothing more is read.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import cast

from proxy.http1 import heads
from proxy.http1.body import Body
from proxy.http1.content import Content
from proxy.http1.errors import MessageError
from proxy.http1.flow import Incoming, Outgoing
from proxy.http1.parsing import Head, RequestParser
from proxy.http1.request import Request, Response
from proxy.http1.timing import Deadline

logger = logging.getLogger("proxy.http1")

MOST_WAITING = 16
"""When so many requests wait on one connection, nothing more is read of it."""

_EXPECTATION = "100-continue"


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a client may take, in seconds."""

    idle_seconds: float = 3600.0
    """Between two requests. Longer than in any client's pool: whoever closes first loses the other's request."""
    head_seconds: float = 60.0
    """From the first byte of a request to the last one of its head."""
    stall_seconds: float = 300.0
    """Without taking anything of an answer."""
    linger_seconds: float = 10.0
    """To send the rest of what nobody wants, before its connection is closed. Closed at once, a client that is still
    sending would lose the answer."""


@dataclass(frozen=True, slots=True)
class Service:
    """What connections need from whoever serves the requests."""

    serve: Callable[[Request], Awaitable[Response]]
    refuse: Callable[[int, str], Response]
    """The answer to what is no request, by status and reason."""
    patience: Patience = Patience()


class Connection(asyncio.Protocol):
    """One client's connection."""

    def __init__(self, service: Service, connections: "set[Connection]") -> None:
        self.task: asyncio.Task[None] | None = None
        """Serves the first of the requests that were not answered yet."""
        self._service = service
        self._connections = connections
        self._loop = asyncio.get_running_loop()
        self._parser: RequestParser | None = RequestParser(self)
        self._requests: deque[Request] = deque()
        self._body: Body | None = None
        """What comes belongs to this body."""
        self._is_deaf = False
        """Whether what comes does not count any more."""

    def hang_up(self) -> None:
        """End the connection. What is being served is cut off; a complete answer goes out, if the loop runs on."""
        if self.task is None:
            self._outgoing.transport.close()
        else:
            self.task.cancel()
            self._outgoing.abort()

    @property
    def is_idle(self) -> bool:
        """Whether nothing is being served, and every answer was handed to the kernel."""
        return self.task is None and not self._outgoing.transport.get_write_buffer_size()

    # Called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client has come."""
        # Those of uvloop are no asyncio.Transport by class.
        transport = cast("asyncio.Transport", transport)
        self._incoming = Incoming(self._loop, transport, is_watched=True)
        self._outgoing = Outgoing(self._loop, transport, self._service.patience.stall_seconds)
        self._deadline = Deadline(self._loop, self._give_up)
        self._deadline.set(self._service.patience.idle_seconds)
        self._connections.add(self)

    def data_received(self, data: bytes) -> None:
        """Something came."""
        if self._is_deaf or self._parser is None:
            return
        try:
            self._parser.feed(data)
        except MessageError as error:
            self._refuse(error)
        except Exception:
            logger.exception("a bug in the proxy, met by what a client sent")
            self._outgoing.abort()

    def eof_received(self) -> None:
        """The client will send nothing more. Whoever waits for an answer does not do that, so this one has left."""
        if self.task is not None:
            self._outgoing.transport.abort()

    def pause_writing(self) -> None:
        """The client takes less than it is sent."""
        self._outgoing.pause()

    def resume_writing(self) -> None:
        """The client has caught up."""
        self._outgoing.resume()

    def connection_lost(self, _error: Exception | None) -> None:
        """The client has left, or was hung up on."""
        self._connections.discard(self)
        self._deadline.cancel()
        self._outgoing.lost()
        self._incoming.lost()
        self._requests.clear()
        # It holds on to this object, and this one to it.
        self._parser = None
        if self._body is not None:
            self._body.fail(ConnectionResetError, "the client has left")
        if self.task is not None:
            self.task.cancel()

    # Called by the parser

    def head_begins(self) -> None:
        """The first byte of a request."""
        if self.task is None:
            self._deadline.set(self._service.patience.head_seconds)

    def head_ends(self, head: Head) -> None:
        """A request, but for its body. Raises ``MessageError``."""
        headers = heads.decoded(head.fields)
        # A target is ASCII: httptools refuses others.
        request = Request(head.method, target_of(head.target.decode()), headers, self._outgoing)
        request.keeps_alive = head.keeps_alive
        request.is_http_1_0 = head.version == "1.0"
        if not request.is_http_1_0 and len(headers.getall("Host", ())) != 1:
            raise MessageError(400, "a request names one Host")
        if headers.get("Expect", _EXPECTATION).lower() != _EXPECTATION:
            raise MessageError(417, "no such expectation can be met")
        codings = ",".join(headers.getall("Transfer-Encoding", ()))
        if codings and request.is_http_1_0:
            # Who speaks HTTP/1.0 in front of this may have found another end of the body.
            raise MessageError(400, "HTTP/1.0 has no Transfer-Encoding")
        if codings and codings.strip().lower() != "chunked":
            raise MessageError(501, f"the Transfer-Encoding {codings!r} is not known")
        if codings or headers.get("Content-Length", "0").strip("0"):
            self._body = Body(self._loop, self._incoming)
            request.content = Content(headers, self._body, self._outgoing)
            request.content.waits_to_be_told &= not request.is_http_1_0
        self._take(request)

    def body_piece(self, piece: bytes) -> None:
        """Some of the body."""
        if self._body is not None:
            self._body.feed(piece)

    def request_ends(self) -> None:
        """All of the body."""
        if self._body is not None:
            self._body.end()
            self._body = None
            if self.task is None:
                self._rest()

    # The course of a connection

    def _take(self, request: Request) -> None:
        self._requests.append(request)
        if self.task is None:
            self._serve_next()
        elif len(self._requests) > MOST_WAITING:
            self._incoming.hold(self)

    def _serve_next(self) -> None:
        self._deadline.clear()
        self.task = self._loop.create_task(self._serve(self._requests[0]))

    async def _serve(self, request: Request) -> None:
        try:
            if request.refusal is None:
                response = await self._service.serve(request)
            else:
                response = self._service.refuse(request.refusal.status, str(request.refusal))
            request.finish(response)
            if self._outgoing.is_paused:
                await self._outgoing.drain()
        except ConnectionError:
            self._outgoing.abort()
        except Exception:
            logger.exception("a bug in the proxy")
            self._outgoing.abort()
        finally:
            self.task = None
        if not self._outgoing.transport.is_closing():
            self._answered(request)

    def _answered(self, request: Request) -> None:
        self._requests.popleft()
        if not request.keeps_alive:
            self._part()
        elif self._requests:
            self._serve_next()
            if len(self._requests) <= MOST_WAITING:
                self._incoming.let_go(self)
        else:
            if self._body is not None:
                self._body.discard()
            self._rest()

    def _rest(self) -> None:
        """Nothing is being served."""
        patience = self._service.patience
        if self._body is not None:
            self._deadline.set(patience.linger_seconds)
        elif self._parser is not None and self._parser.in_head:
            self._deadline.set(patience.head_seconds)
        else:
            self._deadline.set(patience.idle_seconds)

    def _part(self) -> None:
        """Close the connection once the answer is taken."""
        transport = self._outgoing.transport
        if self._body is None and not self._is_deaf:
            self._deadline.set(self._service.patience.stall_seconds)
            transport.close()
            return
        # More is coming, and a socket that is closed on it takes the answer back.
        self._deadline.set(self._service.patience.linger_seconds)
        self._is_deaf = True
        if self._body is not None:
            self._body.discard()
        self._incoming.let_all_go()
        transport.write_eof()

    def _refuse(self, error: MessageError) -> None:
        """What came is no request, or no body of one: after the answers that are due, nothing more is taken."""
        self._is_deaf = True
        body, self._body = self._body, None
        if body is not None and self._requests:
            self._requests[-1].keeps_alive = False
            body.fail(MessageError, error.status, str(error))
        elif body is not None or (self._requests and not self._requests[-1].keeps_alive):
            # The answer was given, or what follows the last request was not to be sent.
            if self.task is None:
                self._part()
        else:
            refused = Request("GET", "/", heads.Headers(), self._outgoing)
            refused.keeps_alive = False
            refused.refusal = error
            self._take(refused)

    def _give_up(self) -> None:
        """The deadline has passed."""
        if self.task is None and not self._is_deaf and self._parser is not None and self._parser.in_head:
            self._refuse(MessageError(408, "the request did not arrive in time"))
        else:
            self._outgoing.transport.abort()


def target_of(target: str) -> str:
    """A target without scheme and host, which are meant for proxies of another kind, and without a fragment."""
    if not target.startswith("/") and "://" in target:
        rest = target.partition("://")[2]
        cut = min((rest.find(mark) for mark in "/?#" if mark in rest), default=len(rest))
        target = rest[cut:] if rest[cut : cut + 1] == "/" else "/" + rest[cut:]
    return target.partition("#")[0] if "#" in target else target
