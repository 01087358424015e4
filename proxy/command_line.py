"""The command line of the proxy, and the file that holds the same options.

Room for the next feature: an option is a field of one of the classes in ``config`` and an ``add`` in its group here;
the file, the help and the checks follow from that.
"""

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import NoReturn, TypeVar

from proxy.config import ConfigError, Limits, ProxyConfig, RoutingConfig, Timeouts, engine_url
from proxy.routing import POLICIES, Role
from proxy.settings_file import arguments_of_file

_LAST_PORT = 65535
_T = TypeVar("_T")


def parse_arguments(arguments: Sequence[str]) -> ProxyConfig:
    """The configuration that the command line asks for. A mistake ends the program with a message and status 2."""
    try:
        return configuration(arguments)
    except ConfigError as error:
        parser = _parser()
        parser.exit(2, f"{parser.format_usage()}{parser.prog}: error: {error}\n")


def configuration(arguments: Sequence[str]) -> ProxyConfig:
    """The configuration of a command line and of the file that it names. Raises ``ConfigError``."""
    parser = _parser()
    given = parser.parse_args(arguments)
    if given.config is not None:
        of_file = arguments_of_file(given.config)
        _check_file(parser, given.config, of_file)
        # What the command line says comes later, so it counts.
        given = parser.parse_args([*of_file, *arguments])
    for role, urls in (("prefill", given.prefill), ("decode", given.decode)):
        if repeated := sorted({url for url in urls if urls.count(url) > 1}):
            raise ConfigError(f"--{role} {repeated[0]} is given twice")
        if not urls and given.admin_token_file is None:
            raise ConfigError(f"give at least one --{role} URL, or an --admin-token-file to add engines later")
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
        config_file=given.config,
        admin_token_file=given.admin_token_file,
        otlp_endpoint=given.otlp_endpoint,
        canary_seconds=given.canary,
        arguments=tuple(arguments),
    )


def engines_named(arguments: Sequence[str]) -> dict[Role, list[str]]:
    """The engines on a command line that was read before, without those in the file that it names."""
    given = _parser().parse_args(arguments)
    return {Role.PREFILL: given.prefill, Role.DECODE: given.decode}


def _check_file(parser: argparse.ArgumentParser, path: Path, arguments: Sequence[str]) -> None:
    """Raises ``ConfigError``, with the name of the file, if its settings are no options by themselves."""
    try:
        _, unknown = parser.parse_known_args(arguments)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    if unknown:
        name = unknown[0].partition("=")[0].removeprefix("--")
        raise ConfigError(f"{path}: {name} is no option: pd-proxy --help lists them")


class _Formatter(argparse.ArgumentDefaultsHelpFormatter):
    """Tells defaults, but not that there is none."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return super()._get_help_string(action) if action.default else action.help


class _Parser(argparse.ArgumentParser):
    """Reports mistakes to its caller, who may be a running proxy, instead of ending the program."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def _parser() -> argparse.ArgumentParser:
    defaults = ProxyConfig(prefill_urls=(), decode_urls=())
    parser = _Parser(
        prog="pd-proxy",
        usage="pd-proxy --prefill URL [--prefill URL ...] --decode URL [--decode URL ...] [option ...]\n"
        "       pd-proxy --config FILE [option ...]",
        description="Route requests of the OpenAI and Anthropic APIs to vLLM engines: each prompt is computed on a "
        "prefill engine and answered by a decode engine that reads its KV.",
        epilog="Example: pd-proxy --prefill http://10.0.0.1:8000 --decode http://10.0.0.2:8000. While it runs, /status "
        "is a page for people, /metrics is for Prometheus, /health and /ready are for what starts it; SIGTERM drains "
        "it. docs/proxy.md says the rest.",
        formatter_class=_Formatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    for role in ("prefill", "decode"):
        add(
            f"--{role}",
            action="append",
            type=_argument(engine_url),
            metavar="URL",
            default=[],
            help=f"base address of a {role} engine; repeat it for more engines",
        )
    add("--host", default=defaults.host, help="address to listen on; 0.0.0.0 for all")
    add("--port", type=_argument(_port), default=defaults.port, help="port to listen on; 0 takes a free one")
    add(
        "--config",
        type=Path,
        metavar="FILE",
        help="file of these options, as name = value (TOML), or name: value (YAML, if FILE ends in .yaml or .yml); "
        "engines come and go when it changes, other settings need a restart",
    )
    add(
        "--admin-token-file",
        type=Path,
        metavar="FILE",
        help="switch on the admin API, to add, drain and remove engines, and with it engines that register themselves: "
        "for whoever sends the bearer token in FILE (at least 16 characters)",
    )
    add(
        "--otlp-endpoint",
        metavar="URL",
        help="send OpenTelemetry spans to this OTLP/HTTP address, as http://HOST:4318/v1/traces; needs pip install "
        "'pd_transfer[tracing]'",
    )
    add(
        "--canary",
        type=_argument(_seconds),
        default=defaults.canary_seconds,
        metavar="SECONDS",
        help="before listening, wait up to SECONDS for the engines to be up, then move KV through every pair of them; "
        "where none moves, end with status 1; the API key of the engines, if they have one, is that in VLLM_API_KEY",
    )
    _add_routing(parser)
    _add_timeouts(parser, defaults.timeouts)
    _add_limits(parser, defaults.limits)
    return parser


def _add_routing(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("routing")
    add = group.add_argument
    add(
        "--policy",
        choices=sorted(POLICIES),
        metavar="POLICY",
        default="least-tokens",
        help="how an engine is chosen: least-tokens (the one with the fewest tokens in flight), round-robin, "
        "prefix-affinity (the same one for prompts that begin alike), session-affinity (the same one for an "
        "X-Session-ID header or a user)",
    )
    for role in ("prefill", "decode"):
        add(
            f"--{role}-policy",
            choices=sorted(POLICIES),
            metavar="POLICY",
            default=argparse.SUPPRESS,
            help=f"how a {role} engine is chosen, if not by --policy",
        )
    add(
        "--min-remote-tokens",
        type=_argument(_number),
        default=0,
        metavar="TOKENS",
        help="prompts shorter than about this are computed by decode, without a prefill engine; 0 for none",
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
        ("health", "between two checks of an engine's health; a dead engine is out of rotation within two of them"),
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
    port = _whole(text)
    if not 0 <= port <= _LAST_PORT:
        raise ValueError(f"{port} is not a port: 0 to {_LAST_PORT}")
    return port


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    # Written so that it refuses nan as well.
    if not 0 < seconds < math.inf:
        raise ValueError(f"{text} is not a time: write a positive number of seconds")
    return seconds


def _count(text: str) -> int:
    count = _whole(text)
    if count < 1:
        raise ValueError(f"{count} is too small: at least 1")
    return count


def _number(text: str) -> int:
    number = _whole(text)
    if number < 0:
        raise ValueError(f"{number} is negative: at least 0")
    return number


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise ValueError(f"{text!r} is not a whole number") from error
