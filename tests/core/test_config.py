"""Settings: defaults, where they come from, and a sentence for every mistake."""

import contextlib
import ipaddress
import re
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_transfer.config import (
    HOST_VARIABLE,
    PORT_VARIABLE,
    PdConfig,
    advertised_host,
    bind_host,
    check_asker,
    is_loopback,
    load_config,
    may_ask,
    parse_host_port,
    routable_address,
)
from pd_transfer.errors import ConfigError


def test_no_settings_are_the_defaults():
    assert load_config({}, {}) == PdConfig()


def test_settings_may_come_as_json_brings_them():
    extra = {
        "peers": ["127.0.0.5:5600", "[::1]:5600"],
        "read_seconds": 5,
        "nixl_backend_params": {"engine_config": "TLS=tcp"},
        "debug_damage": [1, -1],
    }
    config = load_config(extra, {})
    assert config.peers == ("127.0.0.5:5600", "[::1]:5600")
    assert config.read_seconds == 5.0
    assert config.nixl_backend_params == {"engine_config": "TLS=tcp"}
    assert config.debug_damage == (1, -1)


# ------------------------------------------------------------------------------------------------------ the environment


def test_the_built_in_connectors_variables_are_understood():
    environment = {HOST_VARIABLE: "127.0.0.2", PORT_VARIABLE: "5600"}
    config = load_config({}, environment, data_parallel_rank=3)
    assert (config.side_channel_host, config.side_channel_port) == ("127.0.0.2", 5603)


def test_settings_go_before_the_environment():
    extra = {"side_channel_host": "127.0.0.1", "side_channel_port": 7000}
    config = load_config(extra, {HOST_VARIABLE: "127.0.0.2", PORT_VARIABLE: "junk"})
    assert (config.side_channel_host, config.side_channel_port) == ("127.0.0.1", 7000)


@pytest.mark.parametrize(("port", "expected"), [(7000, 7003), (0, 0)])
def test_every_data_parallel_rank_has_a_port_of_its_own(port, expected):
    """Any free port is one already."""
    assert load_config({"side_channel_port": port}, {}, data_parallel_rank=3).side_channel_port == expected


@pytest.mark.parametrize("text", ["", "junk", "-1", "5600.0", " 5600", "²", "9" * 5000])
def test_a_port_variable_that_is_no_port(text):
    with pytest.raises(ConfigError, match=re.escape(f"{PORT_VARIABLE} is {text!r}, not a port number")):
        load_config({}, {PORT_VARIABLE: text})


# ------------------------------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("extra", "sentence"),
    [
        ({"read_second": 5}, "kv_connector_extra_config has no setting 'read_second': did you mean 'read_seconds'?"),
        ({"zzz": 5}, "kv_connector_extra_config has no setting 'zzz': known are side_channel_host, "),
        ({"read_seconds": "5"}, "kv_connector_extra_config: Expected `float`, got `str` - at `$.read_seconds`"),
        ({"insecure": 1}, "kv_connector_extra_config: Expected `bool`, got `int` - at `$.insecure`"),
        ({"side_channel_port": 65536}, "side_channel_port is 65536; use 0 (any free port) to 65535"),
        ({"side_channel_port": -1}, "side_channel_port is -1; use 0 (any free port) to 65535"),
        ({"read_seconds": 0}, "read_seconds is 0.0; use more than 0 and less than 86400 seconds"),
        ({"drain_seconds": 86400}, "drain_seconds is 86400.0; use more than 0 and less than 86400 seconds"),
        ({"backoff_seconds": float("nan")}, "backoff_seconds is nan; use more than 0 and less than 86400 seconds"),
        ({"lease_max_pool_fraction": 0}, "lease_max_pool_fraction is 0.0; use more than 0 and at most 1"),
        ({"lease_max_pool_fraction": 1.1}, "lease_max_pool_fraction is 1.1; use more than 0 and at most 1"),
        (
            {"key_file": "prefill.key", "insecure": True},
            "key_file and insecure are both set; with keys nothing needs 'insecure': remove it",
        ),
        ({"peers": ["10.0.0.5"]}, "peers has '10.0.0.5'; write 'host:port', for example '10.0.0.5:5600'"),
    ],
)
def test_mistakes_are_named(extra, sentence):
    with pytest.raises(ConfigError) as raised:
        load_config(extra, {})
    assert str(raised.value).startswith(sentence)


REGISTRATION = {
    "register_at": ["http://proxy:8000", "https://[fd00::1]/pd/"],
    "register_as": "http://10.0.0.5:8100",
    "register_token_file": "token",
}


def test_an_engine_registers_at_several_proxies():
    config = load_config(REGISTRATION, {})
    assert config.register_at == ("http://proxy:8000", "https://[fd00::1]/pd/")
    assert (config.register_as, config.register_token_file) == ("http://10.0.0.5:8100", "token")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"register_as": ""}, "register_at is set and register_as is not: set it to this engine's own HTTP address"),
        ({"register_token_file": ""}, "register_at is set and register_token_file is not: set it to a file with the"),
        ({"register_at": []}, "register_as is set and register_at names no proxy: set register_at, or remove"),
        ({"register_at": [], "register_as": ""}, "register_token_file is set and register_at names no proxy"),
        ({"register_at": "http://proxy:8000"}, "kv_connector_extra_config: Expected `array`, got `str`"),
        ({"register_at": ["http://p:1"] * 2}, "register_at names http://p:1 twice"),
        ({"register_at": ["http://p:1", "p:1"]}, "register_at has 'p:1', which is not an address of HTTP; write 'http"),
        ({"register_as": "http://e:8100/v1/"}, "register_as has 'http://e:8100/v1/', which ends in /v1; write 'http"),
        ({"register_as": "http://user:word@e:1"}, "register_as has an address with a user, a query or a fragment"),
        ({"register_as": "http://e:70000"}, "register_as has 'http://e:70000' (Port out of range 0-65535); write 'htt"),
    ],
)
def test_a_registration_that_cannot_work_is_explained(changes, sentence):
    with pytest.raises(ConfigError) as raised:
        load_config(REGISTRATION | changes, {})
    assert str(raised.value).startswith(sentence)


@pytest.mark.parametrize("setting", ["register_at", "register_as"])
@pytest.mark.parametrize(
    "address",
    [
        "e",
        "//e:1",
        "ftp://e:1",
        "http://",
        "http://:1",
        "http://e:0",
        "http://e:x",
        "http://e :1",
        "http://\u00e9:1",
        "http://[::1",
        "http://e:1?x",
        "http://e:1#x",
        "http://e:1/\n",
        "http://@e:1",
    ],
)
def test_what_is_no_address_to_register(setting, address):
    values = REGISTRATION | {setting: [address] if setting == "register_at" else address}
    with pytest.raises(ConfigError, match=f"{setting} has .*write 'http://host:port'"):
        load_config(values, {})


def test_a_variables_port_may_be_too_large_for_the_last_data_parallel_rank():
    with pytest.raises(ConfigError, match="side_channel_port is 65536"):
        load_config({}, {PORT_VARIABLE: "65535"}, data_parallel_rank=1)


@given(st.dictionaries(st.sampled_from(PdConfig.__struct_fields__) | st.text(), st.none() | st.integers() | st.text()))
def test_any_settings_are_taken_or_refused(extra):
    with contextlib.suppress(ConfigError):
        assert isinstance(load_config(extra, {}), PdConfig)


# --------------------------------------------------------------------------------------------------- hosts and security


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("10.0.0.5:5600", ("10.0.0.5", 5600)),
        ("prefill-0.svc:1", ("prefill-0.svc", 1)),
        ("[fe80::1]:65535", ("fe80::1", 65535)),
    ],
)
def test_host_and_port(text, parsed):
    assert parse_host_port(text) == parsed


@pytest.mark.parametrize(
    "text",
    ["", ":", "host", "host:", ":5600", "host:0", "host:65536", "host:-1", "host:x", "host:²", "h:" + "9" * 5000],
)
def test_not_a_host_and_port(text):
    with pytest.raises(ConfigError, match="write 'host:port'"):
        parse_host_port(text)


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("localhost", True),
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("10.0.0.5", False),
        ("0.0.0.0", False),
        ("::", False),
        ("prefill-0", False),
        ("", False),
    ],
)
def test_is_loopback(host, expected):
    assert is_loopback(host) is expected


@pytest.mark.parametrize(
    ("setting", "local", "beyond"),
    [
        ("side_channel_host", "127.0.0.1", "10.0.0.5"),
        ("advertise_host", "127.0.0.1", "10.0.0.5"),
        ("peers", ["127.0.0.1:5600"], ["127.0.0.1:5600", "10.0.0.5:5600"]),
        ("allowed_peers", ["127.0.0.0/8", "::1", "localhost"], ["127.0.0.1", "10.0.0.5"]),
        ("allowed_peers", [], ["0.0.0.0/0"]),
        ("allowed_peers", [], ["prefill-0"]),
    ],
)
def test_beyond_the_loopback_needs_keys_or_an_explicit_word(setting, local, beyond):
    with pytest.raises(ConfigError, match=rf"{setting} is .*, .*'key_file'.*pdt keys new.* set 'insecure': true"):
        load_config({setting: beyond}, {})
    assert load_config({setting: beyond, "insecure": True}, {})
    assert load_config({setting: beyond, "key_file": "prefill.key"}, {})
    assert load_config({setting: local}, {})


@pytest.mark.parametrize("entry", ["", "10.0.0.5:5600", "10.0.0.5/8", "10.0.0.0/33", "[::1]", "a b", "*", "10.0.0.x/8"])
def test_what_cannot_be_allowed(entry):
    with pytest.raises(ConfigError, match=re.escape(f"allowed_peers has {entry!r}; write a network")):
        load_config({"allowed_peers": [entry], "insecure": True}, {})


# Whom decode may ask: the settings, who may be, who may not. Strings are hosts, at port 5600.
POLICIES = {
    "nothing set": ({}, ["127.0.0.1", "::1", "localhost"], ["10.0.0.5", "prefill-0", "0.0.0.0", ""]),
    "insecure": ({"insecure": True}, ["10.0.0.5", "prefill-0", "127.0.0.1"], []),
    "insecure and a list": (
        {"insecure": True, "allowed_peers": ["10.0.0.0/8"]},
        ["10.0.0.5", "10.255.255.255"],
        ["11.0.0.0", "prefill-0", "127.0.0.1", "::ffff:10.0.0.5", "10.0.0.0/8", "10.0.0.5 "],
    ),
    "a list of names": (
        {"insecure": True, "allowed_peers": ["prefill-0.svc", "fd00::/8"]},
        ["prefill-0.svc", "PREFILL-0.svc", "fd12::1"],
        ["x.prefill-0.svc", "prefill-0", "10.0.0.5", "fe80::1"],
    ),
    "the loopback and a list": ({"allowed_peers": ["127.0.0.2"]}, ["127.0.0.2"], ["127.0.0.1", "10.0.0.5"]),
    "keys": ({"key_file": "k"}, [], ["127.0.0.1", "localhost", "10.0.0.5", "prefill-0"]),
    "keys and a list": ({"key_file": "k", "allowed_peers": ["10.0.0.5"]}, ["10.0.0.5"], ["10.0.0.6", "127.0.0.1"]),
    "keys and any address": (
        {"key_file": "k", "allowed_peers": ["0.0.0.0/0", "::/0"]},
        ["10.0.0.5", "::1"],
        ["prefill-0"],
    ),
    "spellings": (
        {"key_file": "k", "peers": ["Prefill-0:5600", "[2001:DB8:0::1]:5600"], "allowed_peers": ["PREFILL-1"]},
        ["prefill-0", "PREFILL-0", "2001:db8::1", "2001:0db8::0001", "Prefill-1"],
        ["prefill-2", "2001:db8::2", "[2001:db8::1]"],
    ),
    "keys and a peer": ({"key_file": "k", "peers": ["prefill-0:5600"]}, ["prefill-0"], ["10.0.0.5"]),
}


@pytest.mark.parametrize(("extra", "allowed", "others"), POLICIES.values(), ids=POLICIES)
def test_whom_decode_may_ask(extra, allowed, others):
    config = load_config(extra, {})
    assert [host for host in allowed if not may_ask(config, host, 5600)] == []
    assert [host for host in others if may_ask(config, host, 5600)] == []


def test_a_peer_is_allowed_at_its_port_only():
    config = load_config({"key_file": "k", "peers": ["10.0.0.5:5600"]}, {})
    assert [port for port in (22, 5599, 5600, 5601) if may_ask(config, "10.0.0.5", port)] == [5600]


def test_who_only_asks_and_has_keys_is_told_whom():
    with pytest.raises(ConfigError, match="list the prefill engines in 'peers', or their network in 'allowed_peers'"):
        check_asker(PdConfig(key_file="k"))
    check_asker(PdConfig(key_file="k", peers=("10.0.0.5:5600",)))
    check_asker(PdConfig(key_file="k", allowed_peers=("10.0.0.0/8",)))
    check_asker(PdConfig())


@given(st.text(), st.integers())
def test_any_address_is_judged(host, port):
    for extra, _, _ in POLICIES.values():
        assert may_ask(load_config(extra, {}), host, port) in (True, False)


@pytest.mark.parametrize(
    ("config", "bound", "advertised"),
    [
        (PdConfig(), "127.0.0.1", "127.0.0.1"),
        (PdConfig(side_channel_host="127.0.0.2"), "127.0.0.2", "127.0.0.2"),
        (PdConfig(advertise_host="localhost"), "127.0.0.1", "localhost"),
        (PdConfig(insecure=True, side_channel_host="10.0.0.5"), "10.0.0.5", "10.0.0.5"),
        (PdConfig(insecure=True, advertise_host="prefill-0"), "0.0.0.0", "prefill-0"),
        (PdConfig(key_file="prefill.key", advertise_host="prefill-0"), "0.0.0.0", "prefill-0"),
    ],
)
def test_where_to_listen_and_what_to_advertise(config, bound, advertised):
    assert (bind_host(config), advertised_host(config)) == (bound, advertised)


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::"])
def test_who_listens_everywhere_advertises_an_address_that_can_be_reached(host):
    config = PdConfig(insecure=True, side_channel_host=host)
    assert advertised_host(config, lambda: "10.0.0.5") == "10.0.0.5"
    assert advertised_host(PdConfig(), lambda: "10.0.0.5") == "127.0.0.1"


@pytest.mark.parametrize("trust", [{"insecure": True}, {"key_file": "k"}], ids=str)
def test_who_listens_everywhere_and_has_no_route_must_be_told_its_address(trust):
    """The loopback would be a wrong answer that nobody sees: every decode engine would ask itself."""
    with pytest.raises(ConfigError, match=r"listens on 0\.0\.0\.0.* set advertise_host"):
        advertised_host(PdConfig(**trust), lambda: None)
    assert advertised_host(PdConfig(**trust, advertise_host="prefill-0"), lambda: None) == "prefill-0"
    assert advertised_host(PdConfig(**trust, side_channel_host="10.0.0.5"), lambda: None) == "10.0.0.5"
    assert advertised_host(PdConfig(), lambda: None) == "127.0.0.1"


def test_the_routable_address_is_one_of_this_host():
    address = routable_address()
    if address is not None:
        assert not ipaddress.ip_address(address).is_unspecified
        with socket.socket() as own:
            own.bind((address, 0))
