"""Which engine gets a request: pure functions over a snapshot of the loads, and the rules for another attempt.

Room for the next feature: a policy is a function and its name in ``POLICIES``; what it has to know of a request is a
field of ``Hints``, filled by ``affinity``.
"""

import enum
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from hashlib import blake2b
from typing import NamedTuple

from proxy.errors import EngineFailedError, FailureKind
from proxy.health import Standing


class Role(enum.StrEnum):
    """What an engine does for us."""

    PREFILL = "prefill"
    DECODE = "decode"


class EngineLoad(NamedTuple):
    """What one engine is doing at the moment a request arrives, as far as this proxy knows."""

    url: str
    requests: int = 0
    tokens: int = 0
    """In flight; for an engine with several ranks, per rank."""
    standing: Standing = Standing.UP


class Hints(NamedTuple):
    """What a policy may look at beside the loads. Keys have at most 64 bytes; empty ones say nothing."""

    prefix: bytes = b""
    """Equal for prompts that begin alike."""
    session: bytes = b""
    """Equal for requests of one conversation."""
    turn: int = 0
    """How many choices were made so far; breaks ties."""


NO_HINTS = Hints()

Policy = Callable[[Sequence[EngineLoad], Hints], EngineLoad]
"""Chooses one of at least one loads."""


def least_tokens(loads: Sequence[EngineLoad], hints: Hints) -> EngineLoad:
    """The engine with the fewest tokens in flight, then the fewest requests; equals take turns."""
    return min(_rotated(loads, hints.turn), key=lambda load: (load.tokens, load.requests))


def round_robin(loads: Sequence[EngineLoad], hints: Hints) -> EngineLoad:
    """Every engine in turn, whatever it is doing."""
    return loads[hints.turn % len(loads)]


def prefix_affinity(loads: Sequence[EngineLoad], hints: Hints) -> EngineLoad:
    """The same engine for prompts that begin alike, so that its prefix cache is used, unless it has too much to do."""
    return _affine(loads, hints, hints.prefix)


def session_affinity(loads: Sequence[EngineLoad], hints: Hints) -> EngineLoad:
    """The same engine for all requests of a session, unless it has too much to do."""
    return _affine(loads, hints, hints.session)


POLICIES: Mapping[str, Policy] = {
    "least-tokens": least_tokens,
    "round-robin": round_robin,
    "prefix-affinity": prefix_affinity,
    "session-affinity": session_affinity,
}

AFFINITY_SLACK_TOKENS = 4096
AFFINITY_OVERLOAD = 1.5
"""An engine is passed over while its tokens exceed this many times the average, plus the slack: what a warm cache saves
is not worth waiting behind everybody else."""


def _affine(loads: Sequence[EngineLoad], hints: Hints, key: bytes) -> EngineLoad:
    """Rendezvous hashing with a bound on the load: when engines come or go, only their own keys move."""
    if not key:
        return least_tokens(loads, hints)
    bound = AFFINITY_SLACK_TOKENS + AFFINITY_OVERLOAD * sum(load.tokens for load in loads) / len(loads)
    # The average is never above the bound, so at least one engine is within it.
    within = [load for load in loads if load.tokens <= bound]
    return max(within, key=lambda load: blake2b(load.url.encode(), key=key).digest())


TRUSTED = frozenset({Standing.UP, Standing.UNKNOWN})
"""Engines of these standings share the requests."""


def pick(loads: Sequence[EngineLoad], excluded: AbstractSet[str], policy: Policy, hints: Hints) -> str | None:
    """The address of the engine to use, or None if there is none that may be used.

    Suspect engines are left out as long as there is another one: an engine that refuses connections always has the
    least load, and would draw every request. Engines that are down or draining are never used.
    """
    allowed = [load for load in loads if load.url not in excluded]
    trusted = [load for load in allowed if load.standing in TRUSTED]
    usable = trusted or [load for load in allowed if load.standing is Standing.SUSPECT]
    return policy(usable, hints).url if usable else None


def _rotated(loads: Sequence[EngineLoad], turn: int) -> Sequence[EngineLoad]:
    first = turn % len(loads)
    return [*loads[first:], *loads[:first]]


MAX_ATTEMPTS = 3
"""Attempts on one leg: an engine, a second one, and one to spare for a keep-alive connection that had just closed."""

_FINAL_KINDS = frozenset({FailureKind.TIMED_OUT, FailureKind.OWN})
_SAYS_USABLE = frozenset({FailureKind.TIMED_OUT, FailureKind.BUSY, FailureKind.OWN})


class Attempts:
    """Which engines one leg of one request may still be sent to.

    An engine that was not reachable, or that answered, is not asked again. One whose connection broke is asked once
    more: the connection may have been an idle one that the engine was just closing. ``ask_again`` is about one whose
    answer could not be used. A timeout ends the leg: the client has already waited as long as it is meant to. So does
    a lack of the proxy's own, which every engine would meet.
    """

    def __init__(self) -> None:
        self.excluded: set[str] = set()
        self.last: EngineFailedError | None = None
        self._lost: set[str] = set()
        self._broken: dict[str, int] = {}
        self._count = 0
        self._kinds: set[FailureKind] = set()

    def failed(self, url: str, failure: EngineFailedError) -> None:
        """Note that the attempt on ``url`` failed."""
        self._count += 1
        self.last = failure
        self._kinds.add(failure.kind)
        if failure.kind is FailureKind.LOST and url not in self._lost:
            self._lost.add(url)
        else:
            self.excluded.add(url)
        if failure.kind is FailureKind.BROKEN:
            self._broken[url] = self._broken.get(url, 0) + 1

    def ask_again(self) -> None:
        """Allow engines that gave one unusable answer, for a leg that has none left and something new to ask with."""
        self.excluded -= {url for url, times in self._broken.items() if times == 1}

    @property
    def none_usable(self) -> bool:
        """Whether all attempts found engines out of service, rather than slow, busy, or not to be reached by us."""
        return self._kinds.isdisjoint(_SAYS_USABLE)

    @property
    def over(self) -> bool:
        """Whether no further attempt is allowed, whatever engines are left."""
        final = self.last is not None and self.last.kind in _FINAL_KINDS
        return final or self._count >= MAX_ATTEMPTS
