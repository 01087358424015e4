"""The engines that the proxy knows, and what it has in flight on each of them.

Engines come and go while requests run: a request keeps the ``Engine`` it was given, and what it reports about an engine
that has been removed, or replaced by another one at the same address, reaches the old object and nobody else.

Room for the next feature: what routing should know about an engine is a field of ``EngineLoad``, filled by ``load``;
whoever decides about members calls ``add``, ``drain`` and ``remove``. An engine that decides for itself calls
``register`` and ``deregister``, which change nothing that an operator has decided.
"""

import enum
import logging
import time
from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet

from proxy.errors import FailureKind
from proxy.health import Check, Health, Standing
from proxy.routing import NO_HINTS, TRUSTED, EngineLoad, Hints, Policy, Role, pick

logger = logging.getLogger("proxy.registry")

FORGET_SECONDS = 120.0
"""An engine that registered itself is forgotten after so long without a sign of life: nobody else will remove it."""


class Origin(enum.StrEnum):
    """Who made an engine a member."""

    COMMAND_LINE = "command_line"
    FILE = "file"
    ADMIN = "admin"
    """An operator, by the admin API."""
    REGISTERED = "registered"
    """The engine itself: it may take itself out, and is forgotten when it is dead for long."""


class Engine:
    """One engine in one role. ``num_ranks`` is its data-parallel size, if requests are to name a rank; else 0."""

    def __init__(self, role: Role, url: str, num_ranks: int = 0, origin: Origin = Origin.COMMAND_LINE) -> None:
        self.role = role
        self.url = url
        self.origin = origin
        self.health = Health()
        self.draining = False
        self.last_sign = 0.0
        """When an engine that registered itself last did so or was found well; means nothing for others."""
        self.offers_handoffs = True
        """Whether its last prefill came with a hand-off; True until it is known."""
        self.ejections = 0
        self.requests = 0
        self.trials = 0
        """How many of its open requests began while it was on trial."""
        self.tokens = 0
        self.rank_tokens = [0] * num_ranks

    def standing(self, now: float) -> Standing:
        """How far the engine is in rotation."""
        return Standing.DRAINING if self.draining else self.health.standing(now)

    def load(self, now: float) -> EngineLoad:
        """What routing needs to know. While a request tries an engine that was ejected, it is suspect for all others:
        if it is still dead, it costs one request and not a burst of them.
        """
        tokens = self.tokens // max(1, len(self.rank_tokens))
        standing = self.standing(now)
        if standing in TRUSTED and self.health.on_trial and self.trials:
            standing = Standing.SUSPECT
        return EngineLoad(self.url, self.requests, tokens, standing)


class Load:
    """A request's share of an engine's load, from the moment the engine is chosen until ``end``.

    It goes to the rank with the fewest tokens; ``rank`` is None for an engine whose ranks nobody named.
    """

    def __init__(self, engine: Engine, tokens: int) -> None:
        self.url = engine.url
        self.rank = min(range(len(engine.rank_tokens)), key=engine.rank_tokens.__getitem__, default=None)
        self._engine: Engine | None = engine
        self._tokens = tokens
        self._on_trial = engine.health.on_trial
        self._count(engine, 1)

    def end(self) -> None:
        """Take the share off. Ending twice is harmless."""
        if self._engine is not None:
            self._count(self._engine, -1)
            self._engine = None

    def _count(self, engine: Engine, sign: int) -> None:
        engine.requests += sign
        engine.tokens += sign * self._tokens
        engine.trials += sign * self._on_trial
        if self.rank is not None:
            engine.rank_tokens[self.rank] += sign * self._tokens


class Registry:
    """All engines by role. Loads are counted here, when an engine is chosen, and never polled: a burst of requests
    must not all see the same idle engine.
    """

    def __init__(self, policies: dict[Role, Policy], clock: Callable[[], float] = time.monotonic) -> None:
        self._engines: dict[Role, dict[str, Engine]] = {role: {} for role in Role}
        self._policies = policies
        self._clock = clock
        self._turns = dict.fromkeys(Role, 0)

    def members(self, *roles: Role) -> list[Engine]:
        """The engines of these roles, of all without one, in the order in which they came."""
        return [engine for role in roles or Role for engine in self._engines[role].values()]

    def find(self, role: Role, url: str) -> Engine | None:
        """A member, if there is one at this address."""
        return self._engines[role].get(url)

    def loads(self, role: Role) -> list[EngineLoad]:
        """The loads of a role's engines, in the order in which these came."""
        now = self._clock()
        return [engine.load(now) for engine in self._engines[role].values()]

    def standings(self) -> list[tuple[Engine, Standing]]:
        """All engines with how far they are in rotation now."""
        now = self._clock()
        return [(engine, engine.standing(now)) for engine in self.members()]

    def add(self, role: Role, urls: Iterable[str], num_ranks: int = 0, origin: Origin = Origin.COMMAND_LINE) -> None:
        """Take engines into rotation, also those that were draining; a member's load, health and origin are kept.

        Only a file's engine is the file's, although it was faster to register itself: the file says what is to stay.
        """
        for url in urls:
            known = self._engines[role].setdefault(url, Engine(role, url, num_ranks, origin))
            known.draining = False
            if origin is Origin.FILE and known.origin is Origin.REGISTERED:
                known.origin = origin

    def register(self, role: Role, url: str, num_ranks: int = 0) -> bool:
        """An engine says that it serves; whether it is a new member. One that an operator drains goes on draining."""
        is_new = url not in self._engines[role]
        known = self._engines[role].setdefault(url, Engine(role, url, num_ranks, Origin.REGISTERED))
        known.last_sign = self._clock()
        return is_new

    def deregister(self, role: Role, url: str) -> bool:
        """An engine says that it stops; whether it is forgotten, as those are that came by ``register``."""
        known = self._engines[role].get(url)
        return known is not None and known.origin is Origin.REGISTERED and self.remove(role, url)

    def drain(self, role: Role, url: str) -> bool:
        """Give an engine no new requests; whether there is such an engine. Its open ones go on."""
        engine = self._engines[role].get(url)
        if engine is not None:
            engine.draining = True
        return engine is not None

    def remove(self, role: Role, url: str) -> bool:
        """Forget an engine; whether there was one. Its open requests go on, since they have what they need."""
        return self._engines[role].pop(url, None) is not None

    def pick(self, role: Role, excluded: AbstractSet[str], hints: Hints = NO_HINTS) -> Engine | None:
        """Choose an engine, or None if none may be used."""
        turn = self._turns[role]
        self._turns[role] = turn + 1
        url = pick(self.loads(role), excluded, self._policies[role], Hints(hints.prefix, hints.session, turn))
        return None if url is None else self._engines[role][url]

    def is_up(self, role: Role) -> bool:
        """Whether at least one engine of a role is known to be up."""
        now = self._clock()
        return any(engine.standing(now) is Standing.UP for engine in self.members(role))

    def failed(self, engine: Engine, kind: FailureKind) -> None:
        """A request failed on an engine."""
        if engine.health.failed(kind, self._clock()):
            engine.ejections += 1
            logger.warning("%s engine %s is avoided for a while: %s", engine.role, engine.url, kind.value)

    def checked(self, engine: Engine, found: Check) -> None:
        """A check of an engine's health has ended. It may be the last one of an engine that registered itself."""
        now = self._clock()
        before = engine.standing(now)
        engine.health.checked(found)
        after = engine.standing(now)
        if after is not before:
            engine.ejections += before in TRUSTED and after not in TRUSTED
            logger.warning("%s engine %s was %s and is %s", engine.role, engine.url, before, after)
        if engine.origin is not Origin.REGISTERED:
            return
        if found is Check.WELL:
            engine.last_sign = now
        elif found is not Check.NOT_MADE and engine.health.standing(now) not in TRUSTED:
            self._forget_after(engine, now - engine.last_sign)

    def _forget_after(self, engine: Engine, silent_seconds: float) -> None:
        if silent_seconds > FORGET_SECONDS and self.find(engine.role, engine.url) is engine:
            self.remove(engine.role, engine.url)
            logger.warning(
                "%s engine %s is forgotten: it had registered itself, and gave no sign of life for %.0f s",
                engine.role,
                engine.url,
                silent_seconds,
            )
