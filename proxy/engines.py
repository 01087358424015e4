"""Talking to engines: one HTTP request, its answer, and every way in which either can fail.

Nothing here decides what to do about a failure; ``exchange`` does.
"""

import errno
import re
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
from multidict import CIMultiDict

from proxy import relay
from proxy.config import Timeouts
from proxy.dialects import blames_the_client, error_event
from proxy.endpoints import COMPLETIONS, Endpoint
from proxy.errors import Answer, EngineAnswerError, EngineFailedError, FailureKind
from proxy.fields import Body
from proxy.headers import response_headers, without_address
from proxy.health import Check
from proxy.http1.errors import ConnectError
from proxy.http1.pool import Pool, Wanted
from proxy.http1.response import EngineResponse
from proxy.registry import Load
from proxy.routing import NO_HINTS, Hints
from proxy.story import Story
from proxy.upload import ForwardedBody

KEEP_ALIVE_SECONDS = 4.0
"""How long an idle connection is kept. vLLM closes its own after 5 s; a request sent into that close is lost."""

HELD_BACK_BYTES = 4 << 20
"""How much of a plain reply is read before any of it is passed on, so that an engine lost meanwhile can be replaced."""

_ID_WITHIN_BYTES = 1024
_REQUEST_ID = re.compile(rb'"(?:id|request_id)": ?"([\w.:/-]{1,256})"', re.ASCII)
_EVENT_STREAM = "text/event-stream"
_BLANK_LINE = re.compile(rb"\r?\n\r?\n")
_TELLING_BYTES = 64
"""So much of an event tells whether it is an error."""
_BUSY_STATUSES = frozenset({408, 429, 503})
_PASSED_ON_SERVER_ERRORS = frozenset({501})
_OWN_ERRNOS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_FAILURES = (ConnectError, ConnectionError, TimeoutError)
"""What an attempt on an engine may raise."""
_CHECK_BY_KIND = {FailureKind.TIMED_OUT: Check.SILENT, FailureKind.OWN: Check.NOT_MADE}


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """What both legs of a request share. The headers ask for uncompressed answers, because the proxy reads them."""

    endpoint: Endpoint
    headers: CIMultiDict[str]
    body: Body
    hints: Hints = NO_HINTS
    story: Story = field(default_factory=Story)


class Reply:
    """An engine's answer whose first bytes have arrived. The owner reads it and must close it."""

    def __init__(self, response: EngineResponse, head: bytes, idle_seconds: float, load: Load) -> None:
        self._response = response
        self._head = head
        self._idle_seconds = idle_seconds
        self._load = load
        self._tell: Callable[[EngineFailedError], None] | None = None

    def tell_failures_to(self, tell: Callable[[EngineFailedError], None]) -> None:
        """Have ``tell`` called, once, if the body breaks off or stalls."""
        self._tell = tell

    @property
    def status(self) -> int:
        """The HTTP status."""
        return self._response.status

    @property
    def headers(self) -> CIMultiDict[str]:
        """The end-to-end headers; a redirect of the engine to itself leads to the proxy."""
        return without_address(response_headers(self._response.headers), self._load.url)

    @property
    def is_event_stream(self) -> bool:
        """Whether the body is a stream of server-sent events."""
        return self._response.content_type == _EVENT_STREAM

    @property
    def request_id(self) -> str:
        """The engine's own id of the request, for logs, from the first bytes of its answer; ask before reading."""
        found = _REQUEST_ID.search(self._head, 0, _ID_WITHIN_BYTES)
        return found[1].decode() if found else ""

    async def next_chunk(self) -> bytes:
        """The next bytes of the body as they come, empty at its end.

        Raises ``EngineFailedError`` if the body breaks off or stalls. Nothing is read ahead of the consumer beyond the
        connection's buffer, so a slow client slows the engine down.
        """
        if self._head:
            chunk, self._head = self._head, b""
            return chunk
        try:
            return await self._response.next_piece(self._idle_seconds)
        except _FAILURES as error:
            failure = _failure_of(error)
            if self._tell is not None:
                self._tell(failure)
            raise failure from error

    async def read(self) -> bytes:
        """The whole body. Raises like ``next_chunk``."""
        pieces: list[bytes] = []
        while chunk := await self.next_chunk():
            pieces.append(chunk)
        return b"".join(pieces)

    def close(self) -> None:
        """Give the connection back, or drop it if the answer is not complete: then vLLM aborts the request."""
        self._response.close()
        self._load.end()


class EngineClient:
    """HTTP to all engines, over one pool of connections."""

    def __init__(self, pool: Pool, timeouts: Timeouts) -> None:
        self._pool = pool
        self._timeouts = timeouts

    async def prefill(self, url: str, headers: CIMultiDict[str], request: EngineRequest) -> relay.Prefilled:
        """Prefill the prompt.

        Raises ``EngineFailedError``, or ``EngineAnswerError`` if the engine refuses the request.
        """
        body = relay.prefill_body(request.body, request.endpoint.rules)
        try:
            # Done twice, it computes the prompt twice, and one of the two hand-offs ends with its lease.
            wanted = Wanted("POST", request.endpoint.path, headers, body, is_repeatable=True)
            response = await self._pool.request(url, wanted, self._timeouts.prefill_seconds)
            try:
                reply = await response.read()
            finally:
                response.close()
        except _FAILURES as error:
            raise _failure_of(error) from error
        _raise_unless_ok(response, reply)
        try:
            return relay.read_prefill_reply(reply)
        except ValueError as error:
            raise EngineFailedError(FailureKind.BROKEN, f"The prefill engine sent no JSON object: {error}") from error

    async def decode(
        self, headers: CIMultiDict[str], request: EngineRequest, params: msgspec.Raw | None, load: Load
    ) -> Reply:
        """Have a request answered by the load's engine, up to the first bytes of the answer.

        The reply owns ``load`` from here on. Raises ``EngineFailedError``, or ``EngineAnswerError`` if the engine
        refuses the request.
        """
        body = relay.decode_body(request.body, params)
        # Params that an engine may have seen are never sent again, not even to the same engine.
        wanted = Wanted("POST", request.endpoint.path, headers, body, is_repeatable=params is None)
        return await self._open(wanted, load, refusals_raise=True)

    async def forward(
        self, method: str, target: str, headers: CIMultiDict[str], body: ForwardedBody, load: Load
    ) -> Reply:
        """Send any other request to an engine. The reply may have any status; apart from that as ``decode``."""
        return await self._open(Wanted(method, target, headers, body), load)

    async def release(self, url: str, headers: CIMultiDict[str], params: msgspec.Raw, timeout_seconds: float) -> bool:
        """Make a decode engine release ``params``; whether it has. Never raises for what an engine does."""
        headers = headers.copy()
        headers["Content-Type"] = "application/json"
        wanted = Wanted("POST", COMPLETIONS.path, headers, relay.release_body(params), is_repeatable=True)
        try:
            response = await self._pool.request(url, wanted, timeout_seconds)
            try:
                await response.read()
            finally:
                response.close()
        except _FAILURES:
            return False
        return response.status == 404 or response.status < 400

    async def check(self, url: str, timeout_seconds: float) -> Check:
        """Ask an engine for its health. Any answer below 500 shows that it serves requests."""
        try:
            response = await self._pool.request(url, Wanted("GET", "/health", CIMultiDict()), timeout_seconds)
        except _FAILURES as error:
            return _CHECK_BY_KIND.get(_failure_of(error).kind, Check.UNWELL)
        response.close()
        return Check.WELL if response.status < 500 else Check.UNWELL

    async def _open(self, wanted: Wanted, load: Load, *, refusals_raise: bool = False) -> Reply:
        try:
            response = await self._pool.request(load.url, wanted, self._timeouts.decode_seconds)
            try:
                if refusals_raise and not _is_success(response.status):
                    _raise_unless_ok(response, await response.read())
                head = await _first_bytes(response)
                if refusals_raise and response.content_type == _EVENT_STREAM:
                    _raise_for_error_event(head)
            except BaseException:
                response.close()
                raise
        except _FAILURES as error:
            raise _failure_of(error) from error
        response.lift_limit()
        return Reply(response, head, self._timeouts.idle_seconds, load)


async def _first_bytes(response: EngineResponse) -> bytes:
    """What has to be here before an answer is passed on: the first event of a stream, or all of a plain reply."""
    head = await response.next_piece()
    if response.content_type == _EVENT_STREAM:
        while len(head) < _TELLING_BYTES and not _BLANK_LINE.search(head) and not response.body.at_end:
            head += await response.next_piece()
        return head
    if response.body.at_end:
        return head
    pieces = [head]
    size = len(head)
    while size < HELD_BACK_BYTES and not response.body.at_end:
        pieces.append(await response.next_piece())
        size += len(pieces[-1])
    return b"".join(pieces)


def _is_success(status: int) -> bool:
    return 200 <= status < 300


def _raise_unless_ok(response: EngineResponse, body: bytes) -> None:
    status = response.status
    if _is_success(status):
        return
    answer = Answer(status, response_headers(response.headers), body)
    if status in _BUSY_STATUSES:
        raise EngineFailedError(FailureKind.BUSY, f"An engine answered {status}", answer)
    if 400 <= status < 500 or status in _PASSED_ON_SERVER_ERRORS:
        raise EngineAnswerError(answer)
    raise EngineFailedError(FailureKind.BROKEN, f"An engine answered {status}: {_excerpt(body)}", answer)


def _raise_for_error_event(head: bytes) -> None:
    """Treat a stream that begins with an error, as after a failed load of KV, like an answer with status 500."""
    error = error_event(_BLANK_LINE.split(head, maxsplit=1)[0])
    if error is not None and not blames_the_client(error):
        raise EngineFailedError(FailureKind.BROKEN, f"An engine's stream began with an error: {_excerpt(error)}")


def _excerpt(body: bytes) -> str:
    """The message of an engine's error, for our own error about it."""
    try:
        return str(msgspec.json.decode(body)["error"]["message"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return body[:200].decode(errors="replace")


def _failure_of(error: Exception) -> EngineFailedError:
    """What one of ``_FAILURES`` says of the attempt."""
    if isinstance(error, ConnectError):
        cause = error.__cause__
        if isinstance(cause, OSError) and cause.errno in _OWN_ERRNOS:
            return EngineFailedError(FailureKind.OWN, "The proxy cannot open another connection")
        return EngineFailedError(FailureKind.UNREACHABLE, "An engine cannot be reached")
    # A time-out of the system's is both.
    if isinstance(error, TimeoutError):
        return EngineFailedError(FailureKind.TIMED_OUT, "An engine did not answer in time")
    return EngineFailedError(FailureKind.LOST, "The connection to an engine broke")
