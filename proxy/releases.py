"""Freeing the KV of hand-offs that no decode will use (ADR 0006)."""

import asyncio
import logging
from collections.abc import Coroutine
from contextlib import suppress

import msgspec
from multidict import CIMultiDict

from proxy.engines import EngineClient
from proxy.metrics import Metrics
from proxy.registry import Registry
from proxy.routing import Role

logger = logging.getLogger("proxy.releases")

RELEASE_TIMEOUT_SECONDS = 5.0
"""For one attempt to release. Prefill's own lease ends about as soon, so trying longer gains nothing."""

RELEASES_SECONDS = 10.0
"""For a release as a whole, its turn included, and for all that are under way when the proxy stops."""

MOST_ENGINES = 2
"""So many decode engines are asked for one release."""

MOST_AT_ONCE = 64
"""So many releases ask at once, so that a burst of them does not weigh on engines that are in trouble already."""

LINGER_SECONDS = 0.1
"""How long a prefill goes on for a client that has left: long enough for a reply that is already on its way. Hanging up
on it would not end prefill's lease, since to prefill the request is done; its params are needed for that."""


class Releases:
    """Frees the KV that prefill keeps for decodes that will never come.

    Only a decode engine can tell prefill that it is done with a hand-off (routers cannot: the side channel is between
    engines), so a decode engine is asked to refuse a request that carries the params; see ``relay.release_body``.
    A release never fails a request: if it cannot be made, prefill's lease runs out by itself. Releasing twice, or
    releasing what a decode is just aborting, is harmless: the lease ends once.
    """

    def __init__(
        self, client: EngineClient, registry: Registry, metrics: Metrics, limit_seconds: float = RELEASES_SECONDS
    ) -> None:
        self._client = client
        self._registry = registry
        self._metrics = metrics
        self._limit_seconds = limit_seconds
        self._turns = asyncio.Semaphore(MOST_AT_ONCE)
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, headers: CIMultiDict[str], params: msgspec.Raw) -> None:
        """Begin to release ``params`` in the background, on behalf of the client with these headers."""
        self._start(self._release(headers, params))

    def start_after(self, headers: CIMultiDict[str], prefill: asyncio.Task[msgspec.Raw | None]) -> None:
        """End a prefill that nobody waits for any more, and release what it may have been about to hand off."""
        self._start(self._end_prefill(headers, prefill))

    async def finish(self) -> None:
        """Wait for all releases under way, and end those that take longer than one may."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._limit_seconds):
                while self._tasks:
                    await asyncio.wait(self._tasks)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _end_prefill(self, headers: CIMultiDict[str], prefill: asyncio.Task[msgspec.Raw | None]) -> None:
        await asyncio.wait((prefill,), timeout=LINGER_SECONDS)
        prefill.cancel()
        (outcome,) = await asyncio.gather(prefill, return_exceptions=True)
        if isinstance(outcome, msgspec.Raw):
            await self._release(headers, outcome)

    async def _release(self, headers: CIMultiDict[str], params: msgspec.Raw) -> None:
        released = False
        with suppress(TimeoutError):
            async with asyncio.timeout(self._limit_seconds), self._turns:
                released = await self._ask_engines(headers, params)
        self._metrics.releases.labels("released" if released else "left_to_expire").inc()
        if not released:
            logger.warning("no decode engine could release a hand-off; prefill holds its KV until the lease ends")

    async def _ask_engines(self, headers: CIMultiDict[str], params: msgspec.Raw) -> bool:
        tried: set[str] = set()
        while len(tried) < MOST_ENGINES and (engine := self._registry.pick(Role.DECODE, tried)) is not None:
            tried.add(engine.url)
            if await self._client.release(engine.url, headers, params, RELEASE_TIMEOUT_SECONDS):
                return True
        return False
