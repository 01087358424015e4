"""What happened to one request on its way through two engines, for logs, spans and the status page.

Whoever serves the request writes it down; nobody decides anything by it.
"""

import enum
from dataclasses import dataclass, field

from proxy.routing import Role


class Mode(enum.StrEnum):
    """Where the prompt was computed, and why there."""

    REMOTE = "remote"
    """On a prefill engine, whose KV decode read."""
    SHORT = "short"
    """On decode: shorter than ``--min-remote-tokens``."""
    WHOLE = "whole"
    """On decode: one engine has to answer all of this request."""
    NOT_OFFERED = "not_offered"
    """On both: prefill offered no hand-off."""
    FALLBACK = "fallback"
    """On decode: no prefill engine was left, and ``--fallback decode-only`` allows it."""


@dataclass(slots=True)
class LegStory:
    """One leg. ``seconds`` is for its last attempt: prefill's whole answer, decode's first byte."""

    engine: str = ""
    rank: int | None = None
    request_id: str = ""
    attempts: int = 0
    seconds: float | None = None


@dataclass(slots=True)
class Story:
    """One prompt. ``prompt_tokens`` are those that prefill counted, ``handoff_tokens`` those whose KV it offered,
    ``handoff_bytes`` the size of that."""

    mode: Mode = Mode.REMOTE
    prompt_tokens: int = 0
    handoff_tokens: int = 0
    handoff_bytes: int = 0
    legs: dict[Role, LegStory] = field(default_factory=lambda: {role: LegStory() for role in Role})

    def attempt(self, role: Role, engine: str, rank: int | None) -> None:
        """A leg is sent to an engine."""
        leg = self.legs[role]
        leg.engine, leg.rank = engine, rank
        leg.attempts += 1

    def succeeded(self, role: Role, seconds: float) -> None:
        """A leg's last attempt brought an answer."""
        self.legs[role].seconds = seconds

    def decoded(self, request_id: str) -> None:
        """Decode said which request it was to itself."""
        self.legs[Role.DECODE].request_id = request_id

    def prefilled(self, request_id: str, prompt_tokens: int, handoff_tokens: int, handoff_bytes: int) -> None:
        """Prefill said which request it was to itself, how long the prompt is, and how much of it decode may read."""
        self.legs[Role.PREFILL].request_id = request_id
        self.prompt_tokens = prompt_tokens
        self.handoff_tokens = handoff_tokens
        self.handoff_bytes = handoff_bytes
