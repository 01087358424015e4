"""An engine that registers at proxies: what it says when, what it logs, and that it holds nobody up."""

import logging
import socket
import threading
from contextlib import closing
from dataclasses import replace

import pytest

from pd_transfer.errors import ConfigError
from pd_transfer.runtime.registration import Pace, Registrar, Registrations, Role, read_token
from tests.runtime.builders import DEADLINE_SECONDS, eventually
from tests.runtime.fake_proxy import REGISTERED, Asked, fake_proxy

TOKEN = "s3cret-0123456789"
PACE = Pace(start=1.0, repeat=10.0, answer=5.0, goodbye=5.0)
EAGER = replace(PACE, start=0.001, repeat=0.001)


@pytest.fixture
def log(caplog):
    caplog.set_level(logging.DEBUG, logger="pd_transfer")
    yield caplog
    assert TOKEN not in caplog.text


@pytest.fixture
def proxy():
    """It answers for the engine as well."""
    with fake_proxy() as proxy:
        yield proxy


def registrar(proxy, *roles, engine=None, pace=PACE, read=lambda: TOKEN):
    return Registrar(proxy.url + "/", (engine or proxy).url, roles or (Role.DECODE,), read, pace)


def call(method, role, engine):
    return Asked(method, "/admin/registrations", f"Bearer {TOKEN}", {"role": role, "url": engine.url})


def lines(log):
    return [(record.levelname, record.getMessage()) for record in log.records]


def unused_port():
    """A port that nobody listens on, and nobody else gets while the socket is open."""
    held = socket.socket()
    held.bind(("127.0.0.1", 0))
    return held, held.getsockname()[1]


# --------------------------------------------------------------------------------------------------------- what is said


def test_it_registers_once_it_serves_and_repeats_that(proxy, log):
    proxy.health = (503, b"")
    engine = registrar(proxy)
    assert [engine.turn(), engine.turn()] == [PACE.start, PACE.start]
    assert proxy.asked_so_far() == []
    proxy.health = (200, b"")
    assert [engine.turn(), engine.turn()] == [PACE.repeat, PACE.repeat]
    assert proxy.asked_so_far() == [call("POST", "decode", proxy)] * 2
    engine.leave()
    assert proxy.asked_so_far() == [call("DELETE", "decode", proxy)]
    assert lines(log) == [
        ("INFO", f"will register at {proxy.url} when {proxy.url}/health answers well; now: HTTP 503"),
        ("INFO", f"registered at {proxy.url} as decode engine {proxy.url}"),
        ("INFO", f"no longer registered at {proxy.url}"),
    ]


def test_both_roles_are_said(proxy):
    engine = registrar(proxy, Role.PREFILL, Role.DECODE)
    engine.turn()
    engine.leave()
    assert proxy.asked_so_far() == [
        call(method, role, proxy) for method in ("POST", "DELETE") for role in ("prefill", "decode")
    ]


def test_an_engine_that_does_not_answer_any_more_is_not_offered(proxy):
    engine = registrar(proxy)
    engine.turn()
    proxy.asked_so_far()
    proxy.health = (503, b"")
    assert engine.turn() == PACE.start
    assert proxy.asked_so_far() == []
    # The proxy may still have it on its list.
    engine.leave()
    assert proxy.asked_so_far() == [call("DELETE", "decode", proxy)]


def test_an_engine_that_never_served_has_nothing_to_take_back(proxy, log):
    proxy.health = (503, b"")
    engine = registrar(proxy)
    engine.turn()
    engine.leave()
    assert proxy.asked_so_far() == []


def test_it_leaves_once(proxy):
    engine = registrar(proxy)
    engine.turn()
    engine.leave()
    engine.leave()
    assert [asked.method for asked in proxy.asked_so_far()] == ["POST", "DELETE"]


# ------------------------------------------------------------------------------------------------------ what goes wrong


def test_pauses_grow_while_the_proxy_refuses_and_shrink_when_it_takes_us(proxy, log):
    proxy.answer = (401, b'{"error":{"message":"the token\\nis wrong","type":"AuthenticationError"}}')
    engine = registrar(proxy)
    assert [engine.turn() for _ in range(6)] == [1.0, 2.0, 4.0, 8.0, 10.0, 10.0]
    proxy.answer = REGISTERED
    assert engine.turn() == PACE.repeat
    proxy.answer = (500, b"\xff nonsense")
    assert [engine.turn(), engine.turn()] == [1.0, 2.0]
    # A line for each change, and none for more of the same.
    cannot = f"cannot register at {proxy.url}, trying again and again: "
    assert lines(log) == [
        ("WARNING", cannot + r"HTTP 401 'the token\nis wrong'"),
        ("INFO", f"registered at {proxy.url} as decode engine {proxy.url}"),
        ("WARNING", cannot + "HTTP 500"),
    ]


@pytest.mark.parametrize("answer", [b'{"error":{"message":null}}', b'{"error":"no"}', b'{"error":{"message":"\xff"}}'])
def test_an_answer_of_any_shape_is_a_refusal(proxy, log, answer):
    proxy.answer = (400, answer)
    assert registrar(proxy).turn() == PACE.start
    assert lines(log)[0][1].endswith("again: HTTP 400")


def test_what_a_refusal_says_is_bounded(proxy, log):
    proxy.answer = (400, b'{"error":{"message":"%s"}}' % (b"x" * 10_000))
    registrar(proxy).turn()
    assert len(log.text) < 1000


def test_a_redirect_does_not_get_the_token(proxy, log):
    with fake_proxy() as elsewhere:
        proxy.answer = (307, b"")
        proxy.answer_headers = {"Location": elsewhere.url + "/admin/registrations"}
        assert registrar(proxy).turn() == PACE.start
        assert elsewhere.asked_so_far() == []
    assert lines(log)[0][1].endswith("again: HTTP 307")


def test_proxies_of_the_environment_are_not_used(proxy, monkeypatch):
    held, port = unused_port()
    with closing(held):
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{port}")
        assert registrar(proxy).turn() == PACE.repeat


@pytest.mark.parametrize("which", ["engine", "proxy"])
def test_nobody_listens(proxy, log, which):
    held, port = unused_port()
    url = f"http://127.0.0.1:{port}"
    engine, at = (url, proxy.url) if which == "engine" else (proxy.url, url)
    with closing(held):
        assert Registrar(at, engine, (Role.DECODE,), lambda: TOKEN, PACE).turn() == PACE.start
    assert "Connection refused" in log.text
    assert proxy.asked_so_far() == []


def test_an_ipv6_address_needs_no_port(proxy, log):
    Registrar(proxy.url, "http://[::1]", (Role.DECODE,), lambda: TOKEN, PACE).turn()
    assert "Name or service not known" not in log.text


@pytest.mark.parametrize("said", [b"", b"\x1b[31mnonsense\r\n\r\n"], ids=["nothing", "no HTTP"])
@pytest.mark.parametrize("which", ["engine", "proxy"])
def test_somebody_who_speaks_no_http(proxy, log, which, said):
    def strange():
        connection, _ = listening.accept()
        with connection:
            connection.recv(1 << 16)
            connection.sendall(said)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(DEADLINE_SECONDS)
        stranger = threading.Thread(target=strange)
        stranger.start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        engine, at = (url, proxy.url) if which == "engine" else (proxy.url, url)
        made = Registrar(at, engine, (Role.DECODE,), lambda: TOKEN, PACE)
        assert made.turn() == PACE.start
        stranger.join()
    ((_, line),) = lines(log)
    assert line.isprintable()


def test_a_token_that_is_gone_is_a_refusal_and_one_that_is_back_is_used(proxy, log):
    tokens = iter([ConfigError("register_token_file F cannot be read"), TOKEN])

    def read():
        token = next(tokens)
        if isinstance(token, Exception):
            raise token
        return token

    engine = registrar(proxy, read=read)
    assert [engine.turn(), engine.turn()] == [PACE.start, PACE.repeat]
    assert proxy.asked_so_far() == [call("POST", "decode", proxy)]
    assert lines(log)[0] == (
        "WARNING",
        f"cannot register at {proxy.url}, trying again and again: register_token_file F cannot be read",
    )


def test_a_proxy_that_does_not_hear_the_end_is_named(proxy, log):
    engine = registrar(proxy)
    engine.turn()
    proxy.answer = (500, b"")
    engine.leave()
    assert lines(log)[-1] == ("WARNING", f"{proxy.url} was not told that this engine stops: HTTP 500")


# ---------------------------------------------------------------------------------------------------------- the threads


def test_every_proxy_is_told_while_another_one_hangs(proxy):
    with fake_proxy() as other:
        proxy.may_answer.clear()
        threads = Registrations([registrar(at, engine=other, pace=EAGER) for at in (proxy, other)])
        threads.start()
        assert proxy.next() == call("POST", "decode", other)
        assert [other.next() for _ in range(3)] == [call("POST", "decode", other)] * 3
        proxy.may_answer.set()
        threads.close()
        for each in (proxy, other):
            assert each.asked_so_far()[-1] == call("DELETE", "decode", other)


def test_the_end_does_not_wait_for_a_proxy_that_hangs(proxy):
    def is_running():
        return any(thread.name == "pd-transfer-registration" for thread in threading.enumerate())

    proxy.may_answer.clear()
    threads = Registrations([registrar(proxy, pace=replace(EAGER, answer=DEADLINE_SECONDS, goodbye=0.01))])
    threads.start()
    proxy.next()
    threads.close()
    assert is_running()
    proxy.may_answer.set()
    eventually("the thread ends by itself", lambda: not is_running())


def test_closing_without_a_start_or_twice(proxy):
    threads = Registrations([registrar(proxy)])
    threads.close()
    threads.close()
    assert proxy.asked_so_far() == []
    Registrations().start()
    Registrations().close()


def test_a_bug_does_not_end_a_thread(proxy, log):
    tokens = iter([ValueError("a bug"), TOKEN, ValueError("a bug at the end")])

    def read():
        token = next(tokens)
        if isinstance(token, Exception):
            raise token
        return token

    threads = Registrations([registrar(proxy, pace=EAGER, read=read)])
    threads.start()
    assert proxy.next() == call("POST", "decode", proxy)
    threads.close()
    assert "internal error in a registration" in log.text


# ------------------------------------------------------------------------------------------------------------ the token


def written(path, content, mode=0o600):
    path.write_bytes(content)
    path.chmod(mode)
    return path


def test_a_token_is_what_stands_in_its_file(tmp_path):
    assert read_token(written(tmp_path / "token", f" {TOKEN}\n".encode())) == TOKEN


@pytest.mark.parametrize(
    "content",
    [b"", b"\n", b"short", b"two words of a token", b"0123456789abcdef\r\nX: 1", "0123456789abcdef\u00e9".encode()],
    ids=repr,
)
def test_what_is_no_token_is_not_shown(tmp_path, content):
    with pytest.raises(ConfigError, match=r"token holds no token, .* copy the proxy's --admin-token-file") as raised:
        read_token(written(tmp_path / "token", content))
    assert "0123456789" not in str(raised.value)


def test_a_file_that_others_may_read_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"register_token_file .*token is open to others .* chmod 600"):
        read_token(written(tmp_path / "token", TOKEN.encode(), mode=0o644))


@pytest.mark.parametrize("name", ["missing", "."])
def test_a_file_that_cannot_be_read_is_named(tmp_path, name):
    with pytest.raises(ConfigError, match=r"register_token_file .* cannot be read \((No such file|Is a directory)"):
        read_token(tmp_path / name)
