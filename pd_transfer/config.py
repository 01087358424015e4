"""The operator's settings: ``kv_connector_extra_config`` and the environment, checked once, frozen afterwards."""

import difflib
import ipaddress
import re
import socket
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

import msgspec

from pd_transfer.errors import ConfigError

PORT_VARIABLE = "VLLM_NIXL_SIDE_CHANNEL_PORT"
HOST_VARIABLE = "VLLM_NIXL_SIDE_CHANNEL_HOST"


class PdConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Every setting, with its default. Times are seconds.

    side_channel_host / side_channel_port: where a prefill engine's side channel listens; port 0 is any free one.
    advertise_host: what decode engines are told to connect to; by default this host's routable address.
    key_file: this engine's CURVE keys, as ``pdt keys`` makes them. Needed beyond the loopback, unless insecure.
    insecure: allow addresses beyond the loopback without keys.
    peers: prefill engines ("host:port") that a decode engine greets when it starts.
    allowed_peers: hosts and networks (CIDR) that a decode engine may ask beside ``peers``; see ``may_ask``.
    lease_*: how long prefill keeps KV that nobody has asked for, per renewal, and at most; and the share of the pool.
    handshake_seconds, read_seconds, drain_seconds: what a decode engine waits for a Welcome, for a read, and for a
    read that it has given up, before it destroys its agent.
    backoff_seconds, rejection_seconds: how long a peer that did not answer, or did not fit, is left alone.
    register_at: proxies ("http://host:port") that this engine registers at, once it serves.
    register_as: this engine's own HTTP address, for the proxies. register_token_file: holds their admin API's token.
    nixl_backend_params: passed to NIXL's UCX backend, for example {"engine_config": "TLS=tcp"}.
    debug_damage: [group, block position] whose bytes are overwritten after a good read: the tests' positive control.
    """

    side_channel_host: str = ""
    side_channel_port: int = 0
    advertise_host: str = ""
    key_file: str = ""
    insecure: bool = False
    peers: tuple[str, ...] = ()
    allowed_peers: tuple[str, ...] = ()
    lease_unclaimed_seconds: float = 10.0
    lease_renewal_seconds: float = 30.0
    lease_max_seconds: float = 120.0
    lease_max_pool_fraction: float = 0.5
    handshake_seconds: float = 5.0
    backoff_seconds: float = 1.0
    rejection_seconds: float = 30.0
    read_seconds: float = 30.0
    drain_seconds: float = 30.0
    register_at: tuple[str, ...] = ()
    register_as: str = ""
    register_token_file: str = ""
    nixl_backend_params: dict[str, str] = {}
    debug_damage: tuple[int, int] | None = None


def load_config(extra: Mapping[str, Any], environment: Mapping[str, str], data_parallel_rank: int = 0) -> PdConfig:
    """Settings from ``kv_connector_extra_config``, then from the built-in connector's variables, then defaults.

    Raises ConfigError, naming the setting and what to do.
    """
    known = PdConfig.__struct_fields__
    for name in extra:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(known)}."
            raise ConfigError(f"kv_connector_extra_config has no setting {name!r}: {hint}")
    values = dict(extra)
    if "side_channel_host" not in values and HOST_VARIABLE in environment:
        values["side_channel_host"] = environment[HOST_VARIABLE]
    if "side_channel_port" not in values and PORT_VARIABLE in environment:
        values["side_channel_port"] = _port_from(environment[PORT_VARIABLE])
    try:
        config = msgspec.convert(values, PdConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"kv_connector_extra_config: {error}") from error
    if config.side_channel_port:
        # The engines of one host share their settings, and each needs a port of its own.
        config = msgspec.structs.replace(config, side_channel_port=config.side_channel_port + data_parallel_rank)
    _check(config)
    return config


def _port_from(text: str) -> int:
    if not _is_number(text):
        raise ConfigError(f"{PORT_VARIABLE} is {text!r}, not a port number")
    return int(text)


def _is_number(text: str) -> bool:
    """Whether ``int`` reads a port from it; ``str.isdigit`` is true of superscripts too."""
    return text.isdecimal() and len(text) <= 5


def _check(config: PdConfig) -> None:
    if not 0 <= config.side_channel_port < 65536:
        raise ConfigError(f"side_channel_port is {config.side_channel_port}; use 0 (any free port) to 65535")
    for name in config.__struct_fields__:
        value = getattr(config, name)
        if name.endswith("_seconds") and not 0 < value < 86400:
            raise ConfigError(f"{name} is {value}; use more than 0 and less than 86400 seconds")
    if not 0 < config.lease_max_pool_fraction <= 1:
        raise ConfigError(f"lease_max_pool_fraction is {config.lease_max_pool_fraction}; use more than 0 and at most 1")
    _check_trust(config)
    _check_registration(config)


def _check_trust(config: PdConfig) -> None:
    if config.key_file and config.insecure:
        raise ConfigError("key_file and insecure are both set; with keys nothing needs 'insecure': remove it")
    hosts = [("side_channel_host", config.side_channel_host), ("advertise_host", config.advertise_host)]
    hosts += [("peers", parse_host_port(peer)[0]) for peer in config.peers]
    for entry in config.allowed_peers:
        _network_or_host(entry)
        hosts.append(("allowed_peers", entry.partition("/")[0]))
    for setting, host in hosts:
        if host and not _is_trusted(config) and not is_loopback(host):
            raise ConfigError(
                f"{setting} is {host}, which is not the loopback, and the side channel has no keys: set 'key_file' "
                "(make one with 'pdt keys new'), or set 'insecure': true to accept that anyone who reaches the port "
                "can read KV"
            )


def _check_registration(config: PdConfig) -> None:
    needed = {
        "register_as": "set it to this engine's own HTTP address, as the proxies reach it",
        "register_token_file": "set it to a file with the token of the proxies' admin API",
    }
    for setting, advice in needed.items():
        is_set = bool(getattr(config, setting))
        if config.register_at and not is_set:
            raise ConfigError(f"register_at is set and {setting} is not: {advice}")
        if is_set and not config.register_at:
            raise ConfigError(f"{setting} is set and register_at names no proxy: set register_at, or remove {setting}")
    for proxy in config.register_at:
        _check_base_url("register_at", proxy)
        if config.register_at.count(proxy) > 1:
            raise ConfigError(f"register_at names {proxy} twice")
    if config.register_as:
        _check_base_url("register_as", config.register_as)


def _check_base_url(setting: str, text: str) -> None:
    """Raises ConfigError for what is not the address of an HTTP server, to which paths can be appended."""
    advice = "write 'http://host:port'"
    try:
        parts = urlsplit(text)
        has_host = bool(parts.hostname) and parts.port != 0
    except ValueError as error:
        raise ConfigError(f"{setting} has {text!r} ({error}); {advice}") from error
    if parts.scheme not in {"http", "https"} or not has_host or not _URL_CHARACTERS.fullmatch(text):
        raise ConfigError(f"{setting} has {text!r}, which is not an address of HTTP; {advice}")
    if "?" in text or "#" in text or "@" in parts.netloc:
        raise ConfigError(f"{setting} has an address with a user, a query or a fragment; {advice}")
    if parts.path.rstrip("/").endswith("/v1"):
        raise ConfigError(f"{setting} has {text!r}, which ends in /v1; {advice}")


def _is_trusted(config: PdConfig) -> bool:
    """Whether the side channel may leave the loopback: it has keys, or the operator vouches for the network."""
    return bool(config.key_file) or config.insecure


def may_ask(config: PdConfig, host: str, port: int) -> bool:
    """Whether decode may connect to an address that a request's params name; judged without a look-up.

    Clients write params, so with keys only listed addresses are asked: else anybody could have this engine try hosts
    and ports of its network. Without keys and without a list, it is the loopback, or anything if ``insecure``.
    """
    if not config.key_file and not config.allowed_peers:
        return config.insecure or is_loopback(host)
    plain = _plain(host)
    if any((plain, port) == (_plain(name), number) for name, number in map(parse_host_port, config.peers)):
        return True
    return any(_covers(_network_or_host(entry), plain) for entry in config.allowed_peers)


def check_asker(config: PdConfig) -> None:
    """For an engine that only asks. Raises ConfigError when its settings leave it nobody to ask."""
    if config.key_file and not config.peers and not config.allowed_peers:
        raise ConfigError(
            "this engine only receives KV, and with key_file it asks nobody but whom 'peers' and 'allowed_peers' name, "
            "which are both empty: list the prefill engines in 'peers', or their network in 'allowed_peers'"
        )


def _plain(host: str) -> str:
    """One spelling for each address and name."""
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return host.lower()


_URL_CHARACTERS = re.compile("[!-~]+")
_Network = ipaddress.IPv4Network | ipaddress.IPv6Network
_HOST_NAME = re.compile(r"[A-Za-z0-9._-]*[A-Za-z_-][A-Za-z0-9._-]*")


def _network_or_host(entry: str) -> _Network | str:
    """An entry of ``allowed_peers``. Raises ConfigError."""
    try:
        return ipaddress.ip_network(entry)
    except ValueError as error:
        if _HOST_NAME.fullmatch(entry):
            return entry.lower()
        raise ConfigError(
            f"allowed_peers has {entry!r}; write a network such as '10.0.0.0/8', an address or a host name, "
            "without a port"
        ) from error


def _covers(allowed: _Network | str, host: str) -> bool:
    if isinstance(allowed, str):
        return allowed == host
    try:
        return ipaddress.ip_address(host) in allowed
    except ValueError:
        return False


def parse_host_port(text: str) -> tuple[str, int]:
    """``host:port`` or ``[ipv6]:port``. Raises ConfigError."""
    host, separator, port = text.rpartition(":")
    if not separator or not host or not _is_number(port) or not 0 < int(port) < 65536:
        raise ConfigError(f"peers has {text!r}; write 'host:port', for example '10.0.0.5:5600'")
    return host.removeprefix("[").removesuffix("]"), int(port)


def is_loopback(host: str) -> bool:
    """Whether a host name or address is this machine's loopback, judged without a look-up."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def bind_host(config: PdConfig) -> str:
    """Where the side channel listens: the loopback, unless there are keys or the operator said otherwise."""
    if config.side_channel_host:
        return config.side_channel_host
    return "0.0.0.0" if _is_trusted(config) else "127.0.0.1"  # noqa: S104 - with keys, or the operator's word


def routable_address() -> str | None:
    """This host's address on the route to the outside; None without such a route. Nothing is sent for it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # only picks a route
        except OSError:
            return None
        return str(probe.getsockname()[0])


def advertised_host(config: PdConfig, find_address: Callable[[], str | None] = routable_address) -> str:
    """What decode engines are told: where the side channel listens, or ``find_address`` when that is everywhere.

    Raises ConfigError when there is no address to tell.
    """
    if config.advertise_host:
        return config.advertise_host
    bound = bind_host(config)
    if bound not in ("0.0.0.0", "::", "*"):  # noqa: S104 - a comparison
        return bound
    address = find_address()
    if address is None:
        raise ConfigError(
            f"the side channel listens on {bound}, and this host has no default route that would tell its address: "
            "set advertise_host to what decode engines can connect to"
        )
    return address
