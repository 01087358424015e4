"""The command line: what it accepts, and what it says about mistakes."""

import contextlib
import io
import re
from dataclasses import replace

import pytest

from proxy.command_line import configuration, parse_arguments
from proxy.config import ConfigError, Limits, ProxyConfig, RoutingConfig, Timeouts, engine_url
from proxy.settings_file import text_of

ENGINES = ["--prefill", "http://p:1", "--decode", "http://d:1"]


def test_the_defaults_are_those_of_the_configuration():
    assert parse_arguments(ENGINES) == ProxyConfig(prefill_urls=("http://p:1",), decode_urls=("http://d:1",))


EVERYTHING = (
    "--prefill https://p:2/base/ --decode http://[::1]:3 --host 0.0.0.0 --port 0 --policy round-robin"
    " --connect-timeout-seconds 1 --prefill-timeout-seconds 2 --decode-timeout-seconds 3"
    " --idle-timeout-seconds 4 --drain-timeout-seconds 0.5 --health-interval-seconds 0.6"
    " --max-body-bytes 10 --max-prompts 11 --max-in-flight 12 --max-queued 0 --queue-timeout-seconds 13"
    " --decode-policy session-affinity --min-remote-tokens 14 --fallback decode-only --data-parallel-ranks 15"
    " --canary 16"
)


def test_everything_can_be_set():
    config = parse_arguments([*ENGINES, *EVERYTHING.split()])
    assert config == ProxyConfig(
        prefill_urls=("http://p:1", "https://p:2/base"),
        decode_urls=("http://d:1", "http://[::1]:3"),
        host="0.0.0.0",
        port=0,
        timeouts=Timeouts(1, 2, 3, 4, 0.5, 0.6),
        limits=Limits(10, 11, 12, 0, 13),
        routing=RoutingConfig("round-robin", "session-affinity", 14, decode_only_fallback=True, num_ranks=15),
        canary_seconds=16,
    )


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("localhost:8000", "write http://HOST:PORT"),
        ("ftp://host:1", "write http://HOST:PORT"),
        ("", "write http://HOST:PORT"),
        ("http://", "names no host"),
        ("http://:80", "names no host"),
        ("http://host:99999", "no valid port"),
        ("http://host:abc", "no valid port"),
        ("http://host:0", "names no host and port"),
        ("http://host:1/?a=b", "query"),
        ("http://host:1/#x", "fragment"),
        ("http://user:secret@host:1", "user"),
        ("http://d..svc:8200", "no valid host"),
        ("http://" + "d" * 64 + ".svc", "no valid host"),
        ("http://ho st:1", "space"),
        ("http://host:8000/v1", "give the address of the engine itself, http://host:8000"),
        ("http://host:8000/v1/", "give the address of the engine itself, http://host:8000"),
    ],
)
def test_a_bad_address_is_explained(url, told):
    with pytest.raises(ValueError, match=told.replace("?", r"\?")):
        engine_url(url)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "--prefill"),
        (ENGINES[:2], "--decode"),
        ([*ENGINES, "--prefill", "host:1"], "'host:1' is not an address of an engine"),
        ([*ENGINES, "--decode", "http://d:1/"], "--decode http://d:1 is given twice"),
        ([*ENGINES, "--port", "70000"], "70000 is not a port"),
        ([*ENGINES, "--port", "x"], "'x' is not a whole number"),
        ([*ENGINES, "--prefill-timeout-seconds", "0"], "positive number"),
        ([*ENGINES, "--prefill-timeout-seconds", "nan"], "positive number"),
        ([*ENGINES, "--prefill-timeout-seconds", "inf"], "positive number"),
        ([*ENGINES, "--prefill-timeout-seconds", "5m"], "5m is not a time: write a positive number of seconds"),
        ([*ENGINES, "--max-prompts", "0"], "at least 1"),
        ([*ENGINES, "--max-prompts", "1.5"], "'1.5' is not a whole number"),
        ([*ENGINES, "--policy", "magic"], "least-tokens"),
        ([*ENGINES, "--max-queued", "-1"], "-1 is negative"),
        ([*ENGINES, "--fallback", "maybe"], "decode-only"),
    ],
)
def test_a_mistake_on_the_command_line_is_explained(arguments, told, capsys):
    with pytest.raises(SystemExit) as ended:
        parse_arguments(arguments)
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


def test_help_names_every_option_and_its_default(capsys):
    with pytest.raises(SystemExit):
        parse_arguments(["--help"])
    text = capsys.readouterr().out
    for option in ("--prefill URL", "--decode URL", "--port", "--policy", "--decode-timeout-seconds", "TOML", "YAML"):
        assert option in text
    assert "8080" in text
    for nothing in ("==SUPPRESS==", "default: None", "default: []"):
        assert nothing not in text


def written(tmp_path, text, name="proxy.toml"):
    path = tmp_path / name
    path.write_text(text)
    return path


TOML = """
prefill = ["http://p:1", "http://p:2/"]
decode = "http://d:1"
port = 0
idle-timeout-seconds = 2.5
min_remote_tokens = 7
"""
YAML = """
# The same.
prefill:
  - http://p:1
  - http://p:2/
decode: http://d:1
port: 0
idle-timeout-seconds: 2.5
min_remote_tokens: 7
"""


@pytest.mark.parametrize(("name", "text"), [("a.toml", TOML), ("a.conf", TOML), ("a.yaml", YAML), ("a.yml", YAML)])
def test_a_file_holds_the_same_options(tmp_path, name, text):
    path = written(tmp_path, text, name)
    assert parse_arguments(["--config", str(path)]) == ProxyConfig(
        prefill_urls=("http://p:1", "http://p:2"),
        decode_urls=("http://d:1",),
        port=0,
        timeouts=Timeouts(idle_seconds=2.5),
        routing=RoutingConfig(min_remote_tokens=7),
        config_file=path,
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ENGINES,
        [*ENGINES, *EVERYTHING.split()],
        ["--admin-token-file", 'a "b"\\ \u00e9', "--otlp-endpoint", "http://o:1/v1/traces"],
    ],
    ids=["defaults", "everything", "names"],
)
def test_what_is_told_of_a_configuration_is_a_file_that_stands_for_it(tmp_path, arguments):
    config = configuration(arguments)
    path = written(tmp_path, text_of(config))
    assert configuration(["--config", str(path)]) == replace(config, config_file=path)


def options():
    """Every long option that the help names, apart from those that a file cannot hold."""
    help_text = configuration_help()
    return sorted(set(re.findall(r"^  (?:-h, )?--([a-z-]+)", help_text, re.MULTILINE)) - {"help", "config"})


def configuration_help():
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        configuration(["--help"])
    return printed.getvalue()


@pytest.mark.parametrize(("name", "form"), [("a.toml", "{} = '{}'"), ("a.yaml", "{}: '{}'")])
def test_every_option_can_stand_in_a_file(tmp_path, name, form):
    values = {"prefill": "http://p:1", "decode": "http://d:1", "fallback": "decode-only"}
    values |= dict.fromkeys(("policy", "prefill-policy", "decode-policy"), "round-robin")
    text = "\n".join(form.format(option, values.get(option, "1")) for option in options())
    config = configuration(["--config", str(written(tmp_path, text, name))])
    assert config.routing == RoutingConfig("round-robin", "round-robin", 1, decode_only_fallback=True, num_ranks=1)
    assert config.timeouts == Timeouts(1, 1, 1, 1, 1, 1)
    assert config.limits == Limits(1, 1, 1, 1, 1)
    assert (config.host, config.port, config.otlp_endpoint, config.canary_seconds) == ("1", 1, "1", 1)


def test_the_command_line_counts_and_adds_engines(tmp_path):
    path = written(tmp_path, "prefill = ['http://p:1']\nport = 1\npolicy = 'round-robin'\n")
    config = parse_arguments(["--port", "2", "--config", str(path), *ENGINES[2:], "--prefill", "http://p:2"])
    assert config.port == 2
    assert config.routing.decode_policy == "round-robin"
    assert config.prefill_urls == ("http://p:1", "http://p:2")


@pytest.mark.parametrize(
    ("toml", "yaml", "told"),
    [
        (
            "prefill = 'http://p:1'\ndecode = 'nonsense'",
            "prefill: http://p:1\ndecode: nonsense",
            "argument --decode: 'nonsense' is not an address of an engine: write http://HOST:PORT",
        ),
        ("magic = 1", "magic: 1", "magic is no option: pd-proxy --help lists them"),
        ("fall = 'none'", "fall: none", "fall is no option"),
        ("port = true", "port: true", "port = True is no setting: write a text, a number or a list"),
        ("config = 'other.toml'", "config: other.yaml", "is no setting"),
        ("[prefill]\nurl = 'http://p:1'", "prefill:\n  url: http://p:1", "is no setting"),
        ("prefill = [['http://p:1']]", "prefill: [[http://p:1]]", "is no setting"),
        ("port = 70000", "port: 70000", "argument --port: 70000 is not a port"),
        ("policy = 'magic'", "policy: magic", "argument --policy: invalid choice: 'magic'"),
        ("port = 2026-01-01", "port: 2026-01-01", "is no setting"),
        ("port = 1\nport = 2", "port: 1\nport: 2", ""),
        ("port = = 1", "port: a: b", "(at line 1, column 8)"),
        ("prefill", "prefill", ""),
        ("a = " + "[" * 5000, "a: " + "[" * 5000, "recursion"),
    ],
)
def test_a_mistake_in_the_file_is_explained_with_its_name(tmp_path, toml, yaml, told):
    for path in (written(tmp_path, toml), written(tmp_path, yaml, "proxy.yaml")):
        with pytest.raises(ConfigError) as mistake:
            configuration(["--config", str(path)])
        assert str(mistake.value).startswith(f"{path}: ")
        assert told in str(mistake.value)
        assert "\n" not in str(mistake.value)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("prefill:", "prefill = None is no setting"),
        ("port: 1\nport: 2", "port is given twice: write one list, port: [FIRST, SECOND]"),
        ("- prefill", "write each as NAME: VALUE"),
        ("8000", "write each as NAME: VALUE"),
        ("1: 2", "1 is no option"),
        ("[a]: b", "unhashable"),
        ("port: 1\n---\nport: 2", "expected a single document in the stream but found another document (at line 2"),
        ("port: \x00", "not allowed"),
        ("port: !!python/name:os.system", "could not determine a constructor"),
    ],
)
def test_a_mistake_that_only_yaml_allows_is_explained(tmp_path, text, told):
    with pytest.raises(ConfigError) as mistake:
        configuration(["--config", str(written(tmp_path, text, "proxy.yaml"))])
    assert told in str(mistake.value)


@pytest.mark.parametrize("name", ["empty.toml", "empty.yaml"])
def test_an_empty_file_names_no_engines(tmp_path, name):
    with pytest.raises(ConfigError, match="give at least one --prefill URL"):
        configuration(["--config", str(written(tmp_path, "# nothing\n", name))])


def test_a_file_may_leave_engines_to_the_command_line(tmp_path):
    config = configuration(["--config", str(written(tmp_path, "port: 1", "a.yaml")), *ENGINES])
    assert (config.port, config.prefill_urls) == (1, ("http://p:1",))


def test_a_file_that_is_not_there_is_explained(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        configuration(["--config", str(tmp_path / "missing")])


def test_with_an_admin_token_engines_may_come_later(tmp_path):
    config = configuration(["--admin-token-file", str(tmp_path / "token")])
    assert config == ProxyConfig((), (), admin_token_file=tmp_path / "token")
