"""The proxy's promises beyond answers, with real engines: clients that leave, members that change, what is told."""

import json
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.e2e.pair import (
    BYTES_VERIFIED,
    TOKENS_VERIFIED,
    Pair,
    assert_nothing_held,
    gain,
    outcome,
    running_pair,
    same_settings,
)
from tests.e2e.proxy_stack import curl, proxy_of, records, running_proxy, until
from tests.stack.engines import ServerProcess, complete, completion_body, free_port
from tests.stack.exactness import TOP_LOGPROBS, difference, generated, random_prompt

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

ANSWER: dict[str, Any] = {"max_tokens": 4, "logprobs": TOP_LOGPROBS, "ignore_eos": True}
TOKEN = "a token of an operator"
AUTHORIZED = {"Authorization": f"Bearer {TOKEN}"}


@pytest.fixture(scope="module")
def pair(random_models: Mapping[str, Path]) -> Iterator[Pair]:
    arguments = ("--block-size", "32", "--enable-prompt-tokens-details")
    with running_pair("proxy-life", *same_settings(random_models["hybrid"], *arguments)) as running:
        yield running


@pytest.fixture(scope="module")
def proxy(pair: Pair) -> Iterator[ServerProcess]:
    with running_proxy([pair.prefill], [pair.decode], pair.logs) as server:
        yield server


def assert_exact(pair: Pair, proxy: ServerProcess, salt: str) -> None:
    prompt = random_prompt(150, seed=40, num_words=250)

    def ask() -> None:
        got = generated(complete(proxy.url, prompt, cache_salt=salt, **ANSWER))
        assert difference(got, generated(pair.single(prompt, salt, **ANSWER))) == 0.0

    assert gain(pair.decode, ask, {TOKENS_VERIFIED: 149})[TOKENS_VERIFIED] == 149


# Clients that leave


def leave(url: str, body: Mapping[str, Any], seconds: float, num_events: int | None = None, part: float = 1.0) -> bytes:
    """Send a part of a request and hang up, after some time or some events of its answer; what came of that."""
    host, port = url.removeprefix("http://").split(":")
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(data)}\r\n\r\n"
    came = b""
    deadline = time.monotonic() + seconds
    with socket.create_connection((host, int(port))) as client:
        client.sendall(head.encode() + data[: int(part * len(data))])
        while (left := deadline - time.monotonic()) > 0 and (num_events is None or came.count(b"data: ") < num_events):
            client.settimeout(left)
            try:
                piece = client.recv(65536)
            except TimeoutError:
                break
            if not piece:
                break
            came += piece
    return came


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_client_that_leaves_at_any_moment_strands_nothing(pair: Pair, proxy: ServerProcess, stream: bool) -> None:
    body = completion_body(random_prompt(1500, seed=41, num_words=250), max_tokens=40, ignore_eos=True, stream=stream)
    # The first one may be slow, because the engines have not met before.
    for salt in ("met", "timed"):
        begin = time.monotonic()
        timed = body | {"cache_salt": f"{salt} {stream}"}
        requests.post(proxy.url + "/v1/completions", json=timed, timeout=60).raise_for_status()
    seconds = time.monotonic() - begin
    assert_nothing_held(pair)  # the release of that request is counted before the others
    num_before = len(records(proxy))

    def leave_often() -> None:
        leave(proxy.url, body, 0.1, part=0.5)
        for step in range(12):
            leave(proxy.url, body | {"cache_salt": f"left {stream} {step}"}, seconds * step / 12)
        for num_events in (1, 5) if stream else ():
            left = body | {"cache_salt": f"events {num_events}"}
            assert b"[DONE]" not in leave(proxy.url, left, 60.0, num_events)
        assert_nothing_held(pair)

    gained = gain(pair.prefill, leave_often, {})
    ended = {name: gained.get(outcome(name), 0.0) for name in ("lease_opened", "lease_released", "lease_expired")}
    assert ended["lease_opened"] == ended["lease_released"] + ended["lease_expired"]
    assert ended["lease_released"] > 0
    left = [record["outcome"] for record in records(proxy)[num_before:]]
    assert left.count("client_gone") >= 5
    metrics = proxy.metrics()
    assert metrics["pd_proxy_in_flight_requests"] == 0
    assert {value for name, value in metrics.items() if name.startswith("pd_proxy_engine_requests")} == {0.0}


# Members


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(TOKEN + "\n")
    return path


def administer(proxy: ServerProcess, method: str, path: str, engine: ServerProcess) -> dict[str, Any]:
    """A call of the admin API about a decode engine; what the list says of it afterwards."""
    named = {"role": "decode", "url": engine.url}
    reply = requests.request(method, proxy.url + path, json=named, headers=AUTHORIZED, timeout=10)
    assert reply.status_code == 200, reply.text
    return next((entry for entry in reply.json()["engines"] if entry["url"] == engine.url), {})


def status_of_a_request(proxy: ServerProcess) -> int:
    body = completion_body([5, 6, 7], max_tokens=1)
    return requests.post(proxy.url + "/v1/completions", json=body, timeout=60).status_code


def test_an_engine_is_added_drained_and_removed(pair: Pair, token_file: Path) -> None:
    more = ("--admin-token-file", str(token_file))
    with proxy_of([pair.prefill], [], pair.logs, *more, name="proxy-admin") as proxy:
        proxy.wait_ready(seconds=30)
        assert requests.get(proxy.url + "/admin/engines", timeout=10).status_code == 401
        assert status_of_a_request(proxy) == 503
        assert administer(proxy, "POST", "/admin/engines", pair.decode)["standing"] in ("unknown", "up")
        until(lambda: curl(proxy.url + "/ready")[0] == 200, "ready with the engine that was added")
        assert_exact(pair, proxy, "added")

        body = completion_body([5, 6, 7, 8], max_tokens=60, ignore_eos=True, stream=True)
        with requests.post(proxy.url + "/v1/completions", json=body, stream=True, timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            drained = administer(proxy, "POST", "/admin/engines/drain", pair.decode)
            assert (drained["standing"], drained["requests"]) == ("draining", 1)
            assert status_of_a_request(proxy) == 503
            assert list(filter(None, lines))[-1] == b"data: [DONE]"
        assert administer(proxy, "POST", "/admin/engines/drain", pair.decode)["requests"] == 0
        assert administer(proxy, "DELETE", "/admin/engines", pair.decode) == {}
        assert status_of_a_request(proxy) == 503
        administer(proxy, "POST", "/admin/engines", pair.decode)
        assert_exact(pair, proxy, "added again")


def test_the_configuration_file_is_followed(pair: Pair, tmp_path: Path) -> None:
    file = tmp_path / "proxy.toml"

    def name(url: str) -> None:
        file.write_text(f'prefill = ["{pair.prefill.url}"]\ndecode = ["{url}"]\nhealth-interval-seconds = 0.5\n')

    name(f"http://127.0.0.1:{free_port()}")
    with proxy_of([], [], pair.logs, "--config", str(file), name="proxy-file") as proxy:
        proxy.wait_ready(seconds=30)
        assert status_of_a_request(proxy) == 503
        name(pair.decode.url)
        until(lambda: curl(proxy.url + "/ready")[0] == 200, "ready with the engine of the changed file")
        assert_exact(pair, proxy, "file")
        file.write_text("decode = [")
        until(lambda: "the configuration stays as it is" in proxy.log_path.read_text(), "a line about the mistake")
        assert_exact(pair, proxy, "still")


def test_decode_alone_is_an_explicit_choice(pair: Pair) -> None:
    """A prefill engine that nobody has started; without the option, that is a 503."""
    nobody = f"http://127.0.0.1:{free_port()}"
    for choice, status in (("none", 503), ("decode-only", 200)):
        more = ("--prefill", nobody, "--fallback", choice)
        with proxy_of([], [pair.decode], pair.logs, *more, name=f"proxy-{choice}") as proxy:
            proxy.wait_ready(seconds=30)
            assert status_of_a_request(proxy) == status
            assert proxy.metrics()["pd_proxy_decode_only_fallbacks_total"] == (status == 200)
            assert [told["prompts"][0]["mode"] == "fallback" for told in records(proxy)] == [status == 200]
            assert ("because of --fallback" in proxy.log_path.read_text()) == (status == 200)


# What is told


def test_the_record_of_a_request(pair: Pair, proxy: ServerProcess) -> None:
    prompts = [random_prompt(num_tokens, seed=num_tokens, num_words=250) for num_tokens in (90, 120)]
    body = completion_body(prompts, **ANSWER)  # type: ignore[arg-type]
    url, headers = proxy.url + "/v1/completions", {"X-Request-Id": "asked"}
    replies: list[requests.Response] = []
    ask = lambda: replies.append(requests.post(url, json=body, headers=headers, timeout=60))  # noqa: E731 - for gain
    gained = gain(pair.decode, ask, {TOKENS_VERIFIED: 89 + 119})
    assert replies[0].headers["X-Request-Id"] == "asked"
    until(lambda: [told for told in records(proxy) if told["request_id"] == "asked"], "a record", seconds=5)
    (record,) = [told for told in records(proxy) if told["request_id"] == "asked"]
    assert (record["endpoint"], record["outcome"], record["status"]) == ("completions", "ok", 200)
    assert (record["answer_tokens"], record["num_prompts"], record["error"]) == (8, 2, None)
    assert 0 < record["first_byte_seconds"] <= record["seconds"]
    assert [(told["mode"], told["prompt_tokens"]) for told in record["prompts"]] == [("remote", 90), ("remote", 120)]
    # Neither engine had the prompts before, so that decode read all that it was offered.
    assert sum(told["handoff_bytes"] for told in record["prompts"]) == gained[BYTES_VERIFIED] > 0
    for told in record["prompts"]:
        for role, engine in (("prefill", pair.prefill), ("decode", pair.decode)):
            leg = told["legs"][role]
            assert (leg["engine"], leg["attempts"]) == (engine.url, 1)
            assert leg["request_id"].startswith("cmpl-asked")
            assert 0 < leg["seconds"] <= record["seconds"]


def test_the_usage_has_the_hits_of_prefills_cache(pair: Pair, proxy: ServerProcess) -> None:
    prompt = random_prompt(330, seed=43, num_words=250)

    def num_cached() -> int:
        usage = complete(proxy.url, prompt, cache_salt="hits", max_tokens=1)["usage"]
        return int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)

    assert num_cached() == 0
    # Prefill computes 329 tokens and at least the last one anew.
    assert num_cached() == 320


def test_opentelemetry_is_off_by_default(proxy: ServerProcess) -> None:
    """The process has not even loaded the one library of it that is not plain Python."""
    assert "_upb" not in Path(f"/proc/{proxy.pid}/maps").read_text()
