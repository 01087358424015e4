"""The command line: what it accepts, and what it says about mistakes."""

import pytest

from proxy.config import Limits, ProxyConfig, RoutingConfig, Timeouts, engine_url, parse_arguments

ENGINES = ["--prefill", "http://p:1", "--decode", "http://d:1"]


def test_the_defaults_are_those_of_the_configuration():
    assert parse_arguments(ENGINES) == ProxyConfig(prefill_urls=("http://p:1",), decode_urls=("http://d:1",))


def test_everything_can_be_set():
    more = (
        "--prefill https://p:2/base/ --decode http://[::1]:3 --host 0.0.0.0 --port 0 --policy round-robin"
        " --connect-timeout-seconds 1 --prefill-timeout-seconds 2 --decode-timeout-seconds 3"
        " --idle-timeout-seconds 4 --drain-timeout-seconds 0.5 --health-interval-seconds 0.6"
        " --max-body-bytes 10 --max-prompts 11 --max-in-flight 12 --max-queued 0 --queue-timeout-seconds 13"
        " --decode-policy session-affinity --min-remote-tokens 14 --fallback decode-only --data-parallel-ranks 15"
    )
    config = parse_arguments([*ENGINES, *more.split()])
    assert config == ProxyConfig(
        prefill_urls=("http://p:1", "https://p:2/base"),
        decode_urls=("http://d:1", "http://[::1]:3"),
        host="0.0.0.0",
        port=0,
        timeouts=Timeouts(1, 2, 3, 4, 0.5, 0.6),
        limits=Limits(10, 11, 12, 0, 13),
        routing=RoutingConfig("round-robin", "session-affinity", 14, decode_only_fallback=True, num_ranks=15),
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
        ([*ENGINES, "--port", "x"], "invalid"),
        ([*ENGINES, "--prefill-timeout-seconds", "0"], "positive number"),
        ([*ENGINES, "--prefill-timeout-seconds", "nan"], "positive number"),
        ([*ENGINES, "--prefill-timeout-seconds", "inf"], "positive number"),
        ([*ENGINES, "--max-prompts", "0"], "at least 1"),
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
    for option in ("--prefill URL", "--decode URL", "--port", "--policy", "--decode-timeout-seconds"):
        assert option in text
    assert "8080" in text
    assert "==SUPPRESS==" not in text
