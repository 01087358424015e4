"""Asking every engine for its health, again and again."""

import asyncio
import logging
import random
from typing import NoReturn

from proxy.engines import EngineClient
from proxy.health import SILENT_CHECKS, Check
from proxy.registry import Engine, Registry

logger = logging.getLogger("proxy.checks")

EARLIEST = 0.5
"""The part of the interval after which the next round may begin. Rounds are spread, so that the proxies of a fleet do
not ask in step."""
ANSWER = 0.4
"""The part of the interval within which an answer has to come: with the wait for a round, an engine that has fallen
silent is known to be so within two intervals. One that was killed is silent until the last of its threads has ended,
which may take seconds: the kernel takes connections in its name."""


class Checks:
    """Checks the engines of a registry until cancelled.

    A round waits for no answer, so that one silent engine does not keep the others from being checked. An engine that
    refuses connections is suspect after at most one interval. One that is silent is asked again at once.
    """

    def __init__(self, client: EngineClient, registry: Registry, interval_seconds: float) -> None:
        self._client = client
        self._registry = registry
        self._interval_seconds = interval_seconds
        self._under_way: set[Engine] = set()

    async def run(self) -> NoReturn:
        """Never returns."""
        async with asyncio.TaskGroup() as group:
            while True:
                await asyncio.sleep(self._interval_seconds * random.uniform(EARLIEST, 1.0))  # noqa: S311 - no secret
                for engine in self._registry.members():
                    if engine not in self._under_way:
                        self._under_way.add(engine)
                        group.create_task(self._check(engine))

    async def _check(self, engine: Engine) -> None:
        try:
            for _ in range(SILENT_CHECKS):
                found = await self._found(engine)
                self._registry.checked(engine, found)
                if found is not Check.SILENT:
                    return
        finally:
            self._under_way.discard(engine)

    async def _found(self, engine: Engine) -> Check:
        try:
            return await self._client.check(engine.url, ANSWER * self._interval_seconds)
        except Exception:
            # Left to the group, it would end the checks of all engines.
            logger.exception("a bug in the proxy spoilt the check of %s engine %s", engine.role, engine.url)
            return Check.UNWELL
