"""Connections to engines that are kept for the next request."""

import asyncio
import ssl
from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple, Self

from proxy.http1 import heads
from proxy.http1.client import EngineConnection, RequestBody
from proxy.http1.errors import ConnectError, StaleConnectionError
from proxy.http1.heads import Headers
from proxy.http1.origin import Origin, origin_of
from proxy.http1.response import EngineResponse

_SAFE_TO_REPEAT = frozenset({"GET", "HEAD", "OPTIONS"})
_USUALLY_WITHOUT_BODY = frozenset({"GET", "HEAD", "OPTIONS", "DELETE"})

Connect = Callable[..., Any]
"""As an event loop's ``create_connection``."""


class Wanted(NamedTuple):
    """A request to an engine. ``target`` is a path below its base address, and the query. The headers say nothing of
    the host and the body's length.
    """

    method: str
    target: str
    headers: Headers
    body: RequestBody = None
    is_repeatable: bool = False
    """Whether it does no harm twice, although its method could."""

    @property
    def may_be_repeated(self) -> bool:
        """Whether it may go out again when nobody knows what became of it."""
        return (self.is_repeatable or self.method in _SAFE_TO_REPEAT) and isinstance(self.body, bytes | None)


class Pool:
    """Sends requests to any number of engines. Use it as a context: at its end all connections are closed."""

    def __init__(self, connect_seconds: float = 5.0, keep_seconds: float = 4.0, connect: Connect | None = None) -> None:
        self._connect_seconds = connect_seconds
        self._keep_seconds = keep_seconds
        self._connect = connect
        self._engines: dict[str, _Engine] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for engine in self._engines.values():
            engine.close()
        # The loop closes sockets in its next round.
        await asyncio.sleep(0)

    async def request(self, url: str, wanted: "Wanted", seconds: float) -> EngineResponse:
        """Send a request to the engine at a base address; its answer, when the head is here.

        A connection that was kept may have ended unseen. If not one byte came on it, the request goes out once more on
        a new connection, provided that doing it twice does no harm. All of the answer has to come within so many
        seconds, unless its reader says otherwise. Raises ``ConnectError``, ``ConnectionError`` and ``TimeoutError``.
        """
        engine = self._engines.get(url)
        if engine is None:
            engine = self._engines[url] = _Engine(origin_of(url), self._keep_seconds)
        head = engine.head(wanted)
        connection = engine.take()
        if connection is not None:
            try:
                return await connection.exchange(wanted.method, head, wanted.body, seconds)
            except StaleConnectionError:
                if not wanted.may_be_repeated:
                    raise
        connection = await self._connected(engine, seconds)
        return await connection.exchange(wanted.method, head, wanted.body, seconds)

    async def _connected(self, engine: "_Engine", seconds: float) -> EngineConnection:
        connect = self._connect or asyncio.get_running_loop().create_connection
        limit = min(self._connect_seconds, seconds)
        try:
            async with asyncio.timeout(limit):
                _, connection = await connect(
                    lambda: EngineConnection(engine), engine.origin.host, engine.origin.port, ssl=engine.tls()
                )
        except TimeoutError as error:
            if seconds < self._connect_seconds:
                raise
            raise ConnectError("no connection in time") from error
        except (OSError, UnicodeError) as error:
            # Names that DNS cannot hold, an empty label for example, are a UnicodeError of the resolver.
            raise ConnectError("no connection") from error
        assert isinstance(connection, EngineConnection)
        engine.add(connection)
        return connection


class _Engine:
    """The connections to one engine. The one that was used last is used next, so that the others can be let go."""

    def __init__(self, origin: Origin, keep_seconds: float) -> None:
        self.origin = origin
        self._keep_seconds = keep_seconds
        self._idle: list[EngineConnection] = []
        self._all: set[EngineConnection] = set()
        self._tls: ssl.SSLContext | None = None

    def head(self, wanted: Wanted) -> bytes:
        if isinstance(wanted.body, bytes):
            framing = f"Content-Length: {len(wanted.body)}"
        elif wanted.body is not None:
            framing = "Transfer-Encoding: chunked"
        else:
            framing = "" if wanted.method in _USUALLY_WITHOUT_BODY else "Content-Length: 0"
        lines = [f"Host: {self.origin.authority}", framing] if framing else [f"Host: {self.origin.authority}"]
        return heads.request_head(wanted.method, self.origin.base_path + wanted.target, wanted.headers, lines)

    def tls(self) -> ssl.SSLContext | None:
        if self._tls is None:
            self._tls = self.origin.tls()
        return self._tls

    def take(self) -> EngineConnection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_usable:
                return connection
        return None

    def add(self, connection: EngineConnection) -> None:
        self._all.add(connection)

    def keep(self, connection: EngineConnection) -> None:
        """It is free."""
        connection.deadline.set(self._keep_seconds)
        self._idle.append(connection)

    def forget(self, connection: EngineConnection) -> None:
        """It is lost."""
        self._all.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    def close(self) -> None:
        for connection in list(self._all):
            connection.abort()
        self._idle.clear()
