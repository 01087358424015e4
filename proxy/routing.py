"""Which engine gets a request: pure functions over a snapshot of the loads, and the rules for another attempt."""

import enum
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from proxy.errors import EngineFailedError, FailureKind


class Role(enum.StrEnum):
    """What an engine does for us."""

    PREFILL = "prefill"
    DECODE = "decode"


class EngineLoad(NamedTuple):
    """What one engine is doing at the moment a request arrives, as far as this proxy knows."""

    url: str
    requests: int = 0
    tokens: int = 0
    suspect: bool = False
    """It failed a moment ago, so that it is only taken when every other one did as well."""


Policy = Callable[[Sequence[EngineLoad], int], EngineLoad]
"""Chooses one of at least one loads. The number counts the choices made so far and breaks ties."""


def least_tokens(loads: Sequence[EngineLoad], turn: int) -> EngineLoad:
    """The engine with the fewest tokens in flight, then the fewest requests; equals take turns."""
    return min(_rotated(loads, turn), key=lambda load: (load.tokens, load.requests))


def round_robin(loads: Sequence[EngineLoad], turn: int) -> EngineLoad:
    """Every engine in turn, whatever it is doing."""
    return loads[turn % len(loads)]


POLICIES: Mapping[str, Policy] = {"least-tokens": least_tokens, "round-robin": round_robin}


def pick(loads: Sequence[EngineLoad], excluded: AbstractSet[str], policy: Policy, turn: int) -> str | None:
    """The address of the engine to use, or None if every engine is excluded.

    Engines that failed a moment ago are left out as long as there is another one: an engine that refuses connections
    always has the least load, and would draw every request.
    """
    allowed = [load for load in loads if load.url not in excluded]
    trusted = [load for load in allowed if not load.suspect] or allowed
    return policy(trusted, turn).url if trusted else None


def _rotated(loads: Sequence[EngineLoad], turn: int) -> Sequence[EngineLoad]:
    first = turn % len(loads)
    return [*loads[first:], *loads[:first]]


MAX_ATTEMPTS = 3
"""Attempts on one leg: an engine, a second one, and one to spare for a keep-alive connection that had just closed."""


class Attempts:
    """Which engines one leg of one request may still be sent to.

    An engine that was not reachable, or that answered, is not asked again. One whose connection broke is asked once
    more: the connection may have been an idle one that the engine was just closing. A timeout ends the leg: the client
    has already waited as long as it is meant to.
    """

    def __init__(self) -> None:
        self.excluded: set[str] = set()
        self.last: EngineFailedError | None = None
        self._lost: set[str] = set()
        self._count = 0

    def failed(self, url: str, failure: EngineFailedError) -> None:
        """Note that the attempt on ``url`` failed."""
        self._count += 1
        self.last = failure
        if failure.kind is FailureKind.LOST and url not in self._lost:
            self._lost.add(url)
        else:
            self.excluded.add(url)

    @property
    def over(self) -> bool:
        """Whether no further attempt is allowed, whatever engines are left."""
        timed_out = self.last is not None and self.last.kind is FailureKind.TIMED_OUT
        return timed_out or self._count >= MAX_ATTEMPTS
