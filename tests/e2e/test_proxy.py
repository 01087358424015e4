"""The proxy in front of real engines: every kind of request is answered as a single engine answers it."""

import contextlib
import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.e2e.pair import (
    TOKENS_VERIFIED,
    Pair,
    assert_nothing_held,
    gain,
    held,
    outcome,
    running_pair,
    same_settings,
)
from tests.stack.engines import Proxy, ServerProcess, complete
from tests.stack.exactness import TOP_LOGPROBS, difference, generated, hand_off, random_prompt, tokens

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

ANSWER: dict[str, Any] = {"max_tokens": 4, "logprobs": TOP_LOGPROBS, "ignore_eos": True}
CHAT: dict[str, Any] = {
    "model": "model",
    "messages": [{"role": "user", "content": "The quick brown fox jumps over the lazy dog. " * 4}],
    "max_tokens": 12,
    "temperature": 0,
    "ignore_eos": True,
}


@pytest.fixture(scope="module")
def pair(random_models: Mapping[str, Path]) -> Iterator[Pair]:
    with running_pair("proxy", *same_settings(random_models["hybrid"], "--block-size", "32")) as running:
        yield running


@pytest.fixture(scope="module")
def proxy(pair: Pair) -> Iterator[ServerProcess]:
    with Proxy([pair.prefill], [pair.decode], pair.logs) as server:
        yield server.wait_ready(seconds=30)


def chunks(response: requests.Response) -> Iterator[dict[str, Any]]:
    """The JSON of every event of a stream that ends in [DONE]."""
    lines = [line.removeprefix(b"data: ") for line in response.iter_lines() if line]
    assert lines.pop() == b"[DONE]"
    yield from map(json.loads, lines)


@pytest.mark.parametrize("num_tokens", [2, 64, 159, 400])
def test_a_completion(pair: Pair, proxy: ServerProcess, num_tokens: int) -> None:
    prompt = random_prompt(num_tokens, seed=30, num_words=250)

    def ask() -> None:
        got = generated(complete(proxy.url, prompt, cache_salt="completion", **ANSWER))
        assert difference(got, generated(pair.single(prompt, "completion", **ANSWER))) == 0.0

    assert gain(pair.decode, ask, {TOKENS_VERIFIED: num_tokens - 1})[TOKENS_VERIFIED] == num_tokens - 1


def test_a_stream_of_completion_chunks(pair: Pair, proxy: ServerProcess) -> None:
    prompt = random_prompt(300, seed=31, num_words=250)
    body = {"model": "model", "prompt": prompt, "temperature": 0, "max_tokens": 20, "stream": True, "ignore_eos": True}

    def ask() -> None:
        with requests.post(proxy.url + "/v1/completions", json=body, stream=True, timeout=60) as response:
            assert response.status_code == 200
            text = "".join(chunk["choices"][0]["text"] for chunk in chunks(response))
        want = pair.single(prompt, "stream", max_tokens=20, ignore_eos=True)
        assert text == want["choices"][0]["text"]

    assert gain(pair.decode, ask, {TOKENS_VERIFIED: 299})[TOKENS_VERIFIED] == 299


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_chat(pair: Pair, proxy: ServerProcess, stream: bool) -> None:
    def text_from(url: str, **fields: Any) -> str:
        with requests.post(url + "/v1/chat/completions", json=CHAT | fields, stream=stream, timeout=60) as response:
            assert response.status_code == 200
            if not stream:
                return str(response.json()["choices"][0]["message"]["content"])
            return "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks(response))

    def ask() -> None:
        salt = f"chat {stream}"
        assert text_from(proxy.url, stream=stream, cache_salt=salt)
        assert text_from(proxy.url, stream=stream, cache_salt=salt + " again") == text_from(
            pair.prefill.url, stream=stream, cache_salt="single " + salt
        )

    assert gain(pair.decode, ask, {TOKENS_VERIFIED: 1})[TOKENS_VERIFIED] > 2 * 128


def test_a_list_of_prompts_through_the_proxy(pair: Pair, proxy: ServerProcess) -> None:
    prompts = [random_prompt(n, seed=8, num_words=250) for n in (140, 210)]

    def ask() -> None:
        reply = complete(proxy.url, prompts, cache_salt="list", **ANSWER)  # type: ignore[arg-type]
        for choice, prompt in enumerate(prompts):
            want = pair.single(prompt, "list", **ANSWER)
            # Two prompts at once are batched: compare the tokens.
            assert tokens(reply, choice) == tokens(want)

    moved = sum(len(prompt) - 1 for prompt in prompts)
    assert gain(pair.decode, ask, {TOKENS_VERIFIED: moved})[TOKENS_VERIFIED] == moved


def test_several_samples_share_one_lease(pair: Pair, proxy: ServerProcess) -> None:
    prompt = random_prompt(170, seed=10, num_words=250)

    def ask() -> None:
        sampled = ANSWER | {"n": 3, "temperature": 0.8, "seed": 5}
        reply = complete(proxy.url, prompt, cache_salt="samples", **sampled)
        want = pair.single(prompt, "samples", **sampled)
        assert [tokens(reply, choice) for choice in range(3)] == [tokens(want, choice) for choice in range(3)]

    assert gain(pair.decode, ask, {TOKENS_VERIFIED: len(prompt) - 1})[TOKENS_VERIFIED] >= len(prompt) - 1


def test_a_rejected_request_releases_its_lease_at_once(pair: Pair) -> None:
    """What the proxy does with params that nobody wants any more (ADR 0006)."""
    prompt = random_prompt(200, seed=32, num_words=250)

    def reject() -> None:
        params = hand_off(pair.prefill.url, prompt, cache_salt="rejected")
        body = {"model": "pd-proxy/released", "prompt": "released", "max_tokens": 1, "kv_transfer_params": params}
        assert requests.post(pair.decode.url + "/v1/completions", json=body, timeout=30).status_code == 404
        deadline = time.monotonic() + 5
        while held(pair.prefill.metrics()).get("pd_transfer:held/leases") and time.monotonic() < deadline:
            pair.prefill.step()

    gained = gain(pair.prefill, reject, {outcome("lease_released"): 1})
    assert gained[outcome("lease_released")] == 1
    assert gained.get(outcome("lease_expired"), 0) == 0


def test_a_client_that_leaves_during_prefill_strands_nothing(pair: Pair, proxy: ServerProcess) -> None:
    body = {"model": "model", "prompt": random_prompt(3000, seed=33, num_words=250), "max_tokens": 50}

    def leave() -> None:
        for patience in (0.02, 0.1, 0.3):
            with contextlib.suppress(requests.Timeout):
                requests.post(proxy.url + "/v1/completions", json=body, timeout=patience)
        assert_nothing_held(pair)

    assert gain(pair.prefill, leave, {}).get(outcome("lease_expired"), 0) == 0
