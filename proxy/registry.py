"""The engines that the proxy knows, and what it has in flight on each of them."""

import time
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager

from proxy.routing import EngineLoad, Policy, Role, pick

SUSPECT_SECONDS = 5.0
"""How long an engine that failed is avoided. Short, because every request can fall back to another engine anyway."""


class Engine:
    """One engine in one role."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.requests = 0
        self.tokens = 0
        self.suspect_until = 0.0


class Load:
    """A request's share of an engine's load, from the moment the engine is chosen until ``end``."""

    def __init__(self, engine: Engine, tokens: int) -> None:
        self.url = engine.url
        self._engine: Engine | None = engine
        self._tokens = tokens
        engine.requests += 1
        engine.tokens += tokens

    def end(self) -> None:
        """Take the share off. Ending twice is harmless."""
        if self._engine is not None:
            self._engine.requests -= 1
            self._engine.tokens -= self._tokens
            self._engine = None


class Registry:
    """All engines by role. Loads are counted here, when an engine is chosen, and never polled: a burst of requests
    must not all see the same idle engine.
    """

    def __init__(
        self,
        prefill_urls: Sequence[str],
        decode_urls: Sequence[str],
        policy: Policy,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engines = {
            Role.PREFILL: {url: Engine(url) for url in prefill_urls},
            Role.DECODE: {url: Engine(url) for url in decode_urls},
        }
        self._policy = policy
        self._clock = clock
        self._turns = dict.fromkeys(Role, 0)

    def engines(self, role: Role) -> list[EngineLoad]:
        """The engines of a role, in the order in which they were given, with their loads."""
        now = self._clock()
        return [
            EngineLoad(engine.url, engine.requests, engine.tokens, now < engine.suspect_until)
            for engine in self._engines[role].values()
        ]

    def pick(self, role: Role, excluded: AbstractSet[str]) -> str | None:
        """Choose an engine, or None if all are excluded."""
        turn = self._turns[role]
        self._turns[role] = turn + 1
        return pick(self.engines(role), excluded, self._policy, turn)

    def begin(self, role: Role, url: str, tokens: int) -> Load:
        """Count a request of about ``tokens`` tokens on an engine; the caller ends it."""
        return Load(self._engines[role][url], tokens)

    @contextmanager
    def load(self, role: Role, url: str, tokens: int) -> Iterator[None]:
        """Count a request on an engine for as long as the context lasts."""
        load = self.begin(role, url, tokens)
        try:
            yield
        finally:
            load.end()

    def failed(self, role: Role, url: str) -> None:
        """Avoid an engine for a while."""
        self._engines[role][url].suspect_until = self._clock() + SUSPECT_SECONDS

    def answered(self, role: Role, url: str) -> None:
        """Trust an engine again."""
        self._engines[role][url].suspect_until = 0.0
