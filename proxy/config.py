"""The settings of the proxy, and its command line."""

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TypeVar
from urllib.parse import urlsplit

from proxy.routing import POLICIES

_MIB = 1 << 20
_LAST_PORT = 65535
_T = TypeVar("_T")


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
    """Between two checks of an engine's health, and for the answer to one."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How much the proxy takes on."""

    max_body_bytes: int = 64 * _MIB
    max_prompts: int = 1024
    """In one completion request."""
    max_in_flight: int = 4096
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
    if parts.query or parts.fragment or parts.username is not None or parts.password is not None:
        raise ValueError(f"{text!r} must not have a user, a query or a fragment: write http://HOST:PORT")
    if any(character.isspace() for character in text):
        raise ValueError(f"{text!r} contains a space")
    if parts.path.rstrip("/").endswith("/v1"):
        raise ValueError(f"{text!r} ends in /v1: give the address of the engine itself, {text.rstrip('/')[:-3]}")
    return text.rstrip("/")


def parse_arguments(arguments: Sequence[str]) -> ProxyConfig:
    """The configuration that the command line asks for. A mistake ends the program with a message and status 2."""
    parser = _parser()
    given = parser.parse_args(arguments)
    for role, urls in (("prefill", given.prefill), ("decode", given.decode)):
        if repeated := sorted({url for url in urls if urls.count(url) > 1}):
            parser.error(f"--{role} {repeated[0]} is given twice")
    return ProxyConfig(
        prefill_urls=tuple(given.prefill),
        decode_urls=tuple(given.decode),
        host=given.host,
        port=given.port,
        timeouts=Timeouts(**{field.name: getattr(given, field.name) for field in fields(Timeouts)}),
        limits=Limits(**{field.name: getattr(given, field.name) for field in fields(Limits)}),
        routing=RoutingConfig(
            prefill_policy=getattr(given, "prefill_policy", given.policy),
            decode_policy=getattr(given, "decode_policy", given.policy),
            min_remote_tokens=given.min_remote_tokens,
            decode_only_fallback=given.fallback == "decode-only",
            num_ranks=given.data_parallel_ranks,
        ),
    )


def _parser() -> argparse.ArgumentParser:
    defaults = ProxyConfig(prefill_urls=(), decode_urls=())
    parser = argparse.ArgumentParser(
        prog="pd-proxy",
        description="Route OpenAI-style requests to vLLM engines that prefill and vLLM engines that decode.",
        epilog="Example: pd-proxy --prefill http://10.0.0.1:8000 --decode http://10.0.0.2:8000",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    for role in ("prefill", "decode"):
        add(
            f"--{role}",
            action="append",
            required=True,
            type=_argument(engine_url),
            metavar="URL",
            default=argparse.SUPPRESS,
            help=f"base address of a {role} engine; repeat it for more engines",
        )
    add("--host", default=defaults.host, help="address to listen on; 0.0.0.0 for all")
    add("--port", type=_argument(_port), default=defaults.port, help="port to listen on; 0 takes a free one")
    _add_routing(parser)
    _add_timeouts(parser, defaults.timeouts)
    _add_limits(parser, defaults.limits)
    return parser


def _add_routing(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("routing")
    add = group.add_argument
    add("--policy", choices=sorted(POLICIES), default="least-tokens", help="how an engine is chosen")
    for role in ("prefill", "decode"):
        add(
            f"--{role}-policy",
            choices=sorted(POLICIES),
            default=argparse.SUPPRESS,
            help=f"how a {role} engine is chosen, if not by --policy",
        )
    add(
        "--min-remote-tokens",
        type=_argument(_number),
        default=0,
        metavar="TOKENS",
        help="prompts shorter than about this are computed by decode, without a prefill engine",
    )
    add(
        "--fallback",
        choices=("none", "decode-only"),
        default="none",
        help="when no prefill engine is left: refuse requests (503), or let decode compute the prompts",
    )
    add(
        "--data-parallel-ranks",
        type=_argument(_number),
        default=0,
        metavar="COUNT",
        help="data-parallel size of each engine: requests name the rank with the least to do; 0 leaves that to it",
    )


def _add_timeouts(parser: argparse.ArgumentParser, defaults: Timeouts) -> None:
    group = parser.add_argument_group("time")
    for name, what in (
        ("connect", "longest wait for a connection to an engine"),
        ("prefill", "longest wait for the whole answer of a prefill engine"),
        ("decode", "longest wait for the first byte of a decode engine (all of it without streaming)"),
        ("idle", "longest wait between two pieces of an answer"),
        ("drain", "longest wait for open requests after SIGTERM or Ctrl-C"),
        ("health", "between two checks of an engine's health, and longest wait for its answer"),
    ):
        option = "--health-interval-seconds" if name == "health" else f"--{name}-timeout-seconds"
        group.add_argument(
            option,
            dest=f"{name}_seconds",
            type=_argument(_seconds),
            default=getattr(defaults, f"{name}_seconds"),
            metavar="SECONDS",
            help=what,
        )


def _add_limits(parser: argparse.ArgumentParser, defaults: Limits) -> None:
    group = parser.add_argument_group("limits")
    for option, convert, unit, what in (
        ("--max-body-bytes", _count, "BYTES", "largest request body"),
        ("--max-prompts", _count, "COUNT", "most prompts in one completion request"),
        ("--max-in-flight", _count, "COUNT", "most requests that are served at once"),
        ("--max-queued", _number, "COUNT", "most requests that wait for their turn; one more is refused with 429"),
    ):
        name = option.removeprefix("--").replace("-", "_")
        group.add_argument(option, type=_argument(convert), default=getattr(defaults, name), metavar=unit, help=what)
    group.add_argument(
        "--queue-timeout-seconds",
        dest="queue_seconds",
        type=_argument(_seconds),
        default=defaults.queue_seconds,
        metavar="SECONDS",
        help="longest wait of a request for its turn; then it is refused with 503",
    )


def _argument(convert: Callable[[str], _T]) -> Callable[[str], _T]:
    """Let argparse print the message of a ``ValueError``, which it would otherwise hide."""

    def converted(text: str) -> _T:
        try:
            return convert(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return converted


def _port(text: str) -> int:
    port = int(text)
    if not 0 <= port <= _LAST_PORT:
        raise ValueError(f"{port} is not a port: 0 to {_LAST_PORT}")
    return port


def _seconds(text: str) -> float:
    seconds = float(text)
    # Written so that it refuses nan as well.
    if not 0 < seconds < math.inf:
        raise ValueError(f"{text} is not a time: write a positive number of seconds")
    return seconds


def _count(text: str) -> int:
    count = int(text)
    if count < 1:
        raise ValueError(f"{count} is too small: at least 1")
    return count


def _number(text: str) -> int:
    number = int(text)
    if number < 0:
        raise ValueError(f"{number} is negative: at least 0")
    return number
