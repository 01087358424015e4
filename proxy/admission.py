"""How many requests are served at once, how many may wait for that, and for how long.

The open requests are counted here as well, so that a proxy that is told to stop knows when the last one is done.
"""

import asyncio
from collections import deque
from contextlib import suppress

from proxy.config import Limits
from proxy.errors import ProxyError


class Admission:
    """Lets requests in. First come, first served."""

    def __init__(self, limits: Limits) -> None:
        self.draining = False
        self._limits = limits
        self._in_flight = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def in_flight(self) -> int:
        """How many requests are being served."""
        return self._in_flight

    @property
    def queued(self) -> int:
        """How many requests wait to be served."""
        return len(self._waiting)

    def admitted(self) -> "_Place":
        """Serve one request inside the context.

        Entering it raises ``ProxyError``: 503 while draining, 429 if too many requests wait already, 503 after waiting
        too long.
        """
        return _Place(self)

    async def wait_idle(self) -> None:
        """Return once no request is being served or waits."""
        await self._idle.wait()

    async def enter(self) -> None:
        """See ``admitted``."""
        if self.draining:
            raise ProxyError(503, "The proxy is shutting down")
        if self._in_flight < self._limits.max_in_flight:
            self._in_flight += 1
            self._idle.clear()
            return
        if len(self._waiting) >= self._limits.max_queued:
            raise ProxyError(429, "Too many requests are waiting already")
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            async with asyncio.timeout(self._limits.queue_seconds):
                await turn
        except BaseException as error:
            if turn.cancelled():
                with suppress(ValueError):
                    self._waiting.remove(turn)
            else:
                # The place was handed over just before the wait ended.
                self.leave()
            if isinstance(error, TimeoutError):
                raise ProxyError(503, "The request waited too long for its turn") from error
            raise

    def leave(self) -> None:
        """Hand the place to the next in the queue, or give it up."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._in_flight -= 1
        if not self._in_flight:
            self._idle.set()


class _Place:
    """A request's place inside. A class, since a generator would cost twice as much for every request."""

    __slots__ = ("_admission",)

    def __init__(self, admission: Admission) -> None:
        self._admission = admission

    async def __aenter__(self) -> None:
        await self._admission.enter()

    async def __aexit__(self, *_: object) -> None:
        self._admission.leave()
