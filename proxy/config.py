"""The settings of the proxy."""

from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

_MIB = 1 << 20


class ConfigError(Exception):
    """A mistake of the operator, in words for the operator."""


@dataclass(frozen=True, slots=True)
class Timeouts:
    """How long the proxy waits, in seconds."""

    connect_seconds: float = 5.0
    """For a TCP connection to an engine."""
    prefill_seconds: float = 300.0
    """For the whole answer of prefill."""
    decode_seconds: float = 1800.0
    """For decode's first byte. Without streaming that is the whole generation."""
    idle_seconds: float = 300.0
    """Between two pieces of an answer that has begun."""
    drain_seconds: float = 30.0
    """For open requests, once the proxy was told to stop."""
    health_seconds: float = 1.0
    """Between two checks of an engine's health."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How much the proxy takes on."""

    max_body_bytes: int = 64 * _MIB
    max_prompts: int = 1024
    """In one completion request."""
    max_in_flight: int = 16384
    """Requests that are served at once."""
    max_queued: int = 4096
    """Requests that wait because so many are served."""
    queue_seconds: float = 30.0
    """For a request's turn."""


@dataclass(frozen=True, slots=True)
class RoutingConfig:
    """Which engines get a request. The policies are names in ``routing.POLICIES``."""

    prefill_policy: str = "least-tokens"
    decode_policy: str = "least-tokens"
    min_remote_tokens: int = 0
    """Shorter prompts are computed by decode. Compared with an estimate: four bytes are about a token."""
    decode_only_fallback: bool = False
    """Whether decode computes prompts when no prefill engine is left. Off, they are refused with 503."""
    num_ranks: int = 0
    """The data-parallel size of every engine, if requests are to name a rank; otherwise 0."""

    @property
    def looks_at_hints(self) -> bool:
        """Whether a policy looks at what a request says about where its KV may be."""
        return any(policy.endswith("-affinity") for policy in (self.prefill_policy, self.decode_policy))


@dataclass(frozen=True, slots=True)
class ProxyConfig:
    """Everything that the operator decides. Addresses are base addresses without a trailing slash."""

    prefill_urls: tuple[str, ...]
    decode_urls: tuple[str, ...]
    host: str = "127.0.0.1"
    port: int = 8080
    timeouts: Timeouts = Timeouts()
    limits: Limits = Limits()
    routing: RoutingConfig = RoutingConfig()
    config_file: Path | None = None
    """Read again when it changes."""
    admin_token_file: Path | None = None
    """Holds the token of the admin API, which is off without one."""
    otlp_endpoint: str | None = None
    """Where spans go, an OTLP/HTTP address; None for no spans."""
    canary_seconds: float = 0.0
    """How long the start-up canary waits for engines to be up; 0 for no canary."""
    arguments: tuple[str, ...] = field(default=(), compare=False, repr=False)
    """The command line, to be read again together with the file."""


def engine_url(text: str) -> str:
    """Check and normalise an engine's base address. Raises ``ValueError`` with what is wrong and what to write."""
    parts = urlsplit(text)
    if parts.scheme not in {"http", "https"}:
        raise ValueError(f"{text!r} is not an address of an engine: write http://HOST:PORT")
    try:
        port = parts.port
    except ValueError as error:
        raise ValueError(f"{text!r} has no valid port: {error}") from error
    if not parts.hostname or port == 0:
        raise ValueError(f"{text!r} names no host and port: write http://HOST:PORT")
    try:
        parts.hostname.encode("idna")
    except UnicodeError as error:
        raise ValueError(f"{text!r} has no valid host: {error}") from error
    if parts.query or parts.fragment or parts.username is not None or parts.password is not None:
        raise ValueError(f"{text!r} must not have a user, a query or a fragment: write http://HOST:PORT")
    if any(character.isspace() for character in text):
        raise ValueError(f"{text!r} contains a space")
    if parts.path.rstrip("/").endswith("/v1"):
        raise ValueError(f"{text!r} ends in /v1: give the address of the engine itself, {text.rstrip('/')[:-3]}")
    return text.rstrip("/")
