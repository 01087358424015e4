"""The settings of the proxy, and its command line."""

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class ProxyConfig:
    """Everything that the operator decides. Addresses are base addresses without a trailing slash."""

    prefill_urls: tuple[str, ...]
    decode_urls: tuple[str, ...]
    host: str = "127.0.0.1"
    port: int = 8080
    policy: str = "least-tokens"
    timeouts: Timeouts = Timeouts()
    max_body_bytes: int = 64 * _MIB
    max_prompts: int = 1024


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
        policy=given.policy,
        timeouts=Timeouts(
            connect_seconds=given.connect_timeout_seconds,
            prefill_seconds=given.prefill_timeout_seconds,
            decode_seconds=given.decode_timeout_seconds,
            idle_seconds=given.idle_timeout_seconds,
            drain_seconds=given.drain_timeout_seconds,
        ),
        max_body_bytes=given.max_body_bytes,
        max_prompts=given.max_prompts,
    )


def _parser() -> argparse.ArgumentParser:
    defaults = ProxyConfig(prefill_urls=(), decode_urls=())
    timeouts = defaults.timeouts
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
    add("--policy", choices=sorted(POLICIES), default=defaults.policy, help="how an engine is chosen")
    for name, default, what in (
        ("connect", timeouts.connect_seconds, "for a connection to an engine"),
        ("prefill", timeouts.prefill_seconds, "for the whole answer of a prefill engine"),
        ("decode", timeouts.decode_seconds, "for the first byte of a decode engine (all of it without streaming)"),
        ("idle", timeouts.idle_seconds, "between two pieces of an answer"),
        ("drain", timeouts.drain_seconds, "for open requests after SIGTERM or Ctrl-C"),
    ):
        add(
            f"--{name}-timeout-seconds",
            type=_argument(_seconds),
            default=default,
            metavar="SECONDS",
            help=f"longest wait {what}",
        )
    add(
        "--max-body-bytes",
        type=_argument(_count),
        default=defaults.max_body_bytes,
        metavar="BYTES",
        help="largest request body",
    )
    add(
        "--max-prompts",
        type=_argument(_count),
        default=defaults.max_prompts,
        metavar="COUNT",
        help="most prompts in one completion request",
    )
    return parser


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
