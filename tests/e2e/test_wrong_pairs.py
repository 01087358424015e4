"""Grants and prompts that do not belong together, hostile params, shared prefixes: exact or refused, never mixed up.

One pair of engines with prefix caching, asked by hand and through vLLM's own router.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.e2e.pair import TINY_HYBRID, TOKENS_VERIFIED, Pair, gain, outcome, running_pair, same_settings
from tests.stack.engines import ServerProcess, complete, free_port, running
from tests.stack.exactness import TOP_LOGPROBS, difference, generated, hand_off, random_prompt, tokens

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

ANSWER: dict[str, Any] = {"max_tokens": 4, "logprobs": TOP_LOGPROBS, "ignore_eos": True}


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with running_pair("wrong-pairs", *same_settings(TINY_HYBRID, "--block-size", "32")) as pair:
        yield pair


def exact(pair: Pair, prompt: list[int], reply: dict[str, Any], salt: str, choice: int = 0) -> bool:
    return difference(generated(reply, choice), generated(pair.single(prompt, salt, **ANSWER))) == 0.0


def test_params_swapped_between_two_requests(pair: Pair) -> None:
    first, second = random_prompt(200, seed=1), random_prompt(200, seed=2)
    params = [hand_off(pair.prefill.url, prompt, cache_salt="swapped") for prompt in (first, second)]

    def ask() -> None:
        for prompt, other in ((first, params[1]), (second, params[0])):
            reply = pair.decode.complete(prompt, cache_salt="swapped", kv_transfer_params=other, **ANSWER)
            assert exact(pair, prompt, reply, "swapped")

    gained = gain(pair.decode, ask, {outcome("grant_other_prompt"): 2})
    assert gained[outcome("grant_other_prompt")] == 2
    assert gained.get(TOKENS_VERIFIED, 0) == 0


def test_a_used_grant_is_refused(pair: Pair) -> None:
    prompt = random_prompt(150, seed=3)
    params = hand_off(pair.prefill.url, prompt, cache_salt="once")
    pair.decode.complete(prompt, cache_salt="once", kv_transfer_params=params, **ANSWER)

    def again() -> None:
        reply = pair.decode.complete(prompt, cache_salt="once", kv_transfer_params=params, **ANSWER)
        assert tokens(reply) == tokens(pair.single(prompt, "once", **ANSWER))

    gained = gain(pair.decode, again, {outcome("grant_used"): 1})
    assert gained[outcome("grant_used")] == 1
    assert gained.get(TOKENS_VERIFIED, 0) == 0


def test_a_forged_grant_is_refused(pair: Pair) -> None:
    prompt = random_prompt(90, seed=4)
    params = hand_off(pair.prefill.url, prompt, cache_salt="forged")
    # The seal is in the characters after the first; the payload stays as it is.
    grant = params["grant"]
    forged = params | {"grant": grant[:4] + ("A" if grant[4] != "A" else "B") + grant[5:]}

    def ask() -> None:
        reply = pair.decode.complete(prompt, cache_salt="forged", kv_transfer_params=forged, **ANSWER)
        assert exact(pair, prompt, reply, "forged")

    assert gain(pair.decode, ask, {outcome("grant_forged"): 1})[outcome("grant_forged")] == 1


@pytest.mark.parametrize(
    "params",
    [
        {"do_remote_prefill": True},
        {"do_remote_prefill": True, "remote_engine_id": ["x"], "remote_host": 1, "remote_port": "a", "grant": {}},
        {
            "do_remote_prefill": True,
            "remote_engine_id": "x",
            "remote_host": "127.0.0.1",
            "remote_port": 1,
            "grant": "x",
        },
        {"do_remote_prefill": True, "remote_block_ids": [], "remote_request_id": 7},
        {"do_remote_prefill": "yes", "do_remote_decode": 1, "unknown": None},
        {},
    ],
)
def test_params_of_any_shape_are_survived(pair: Pair, params: dict[str, Any]) -> None:
    prompt = random_prompt(70, seed=5)
    reply = pair.decode.complete(prompt, cache_salt="any shape", kv_transfer_params=params, **ANSWER)
    assert tokens(reply) == tokens(pair.single(prompt, "any shape", **ANSWER))


def test_an_unreachable_peer_costs_a_deadline_and_nothing_else(pair: Pair) -> None:
    prompt = random_prompt(80, seed=6)
    params = hand_off(pair.prefill.url, prompt, cache_salt="nobody") | {"remote_port": free_port()}

    def ask() -> None:
        reply = pair.decode.complete(prompt, cache_salt="nobody", kv_transfer_params=params, **ANSWER)
        assert exact(pair, prompt, reply, "nobody")

    assert gain(pair.decode, ask, {outcome("peer_unreachable"): 1})[outcome("peer_unreachable")] >= 1


def test_a_list_of_prompts_through_the_vllm_router(pair: Pair) -> None:
    """The router hands the first prompt's params to all of them; the built-in connector then answers from other KV."""
    prompts = [random_prompt(150, seed=11), random_prompt(190, seed=12)]
    port = free_port()
    command = [str(Path(sys.executable).parent / "vllm-router"), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--vllm-pd-disaggregation", "--prefill", pair.prefill.url, "--decode", pair.decode.url]
    with running(router := ServerProcess("vllm-router", command, port, pair.logs)):
        router.wait_ready(seconds=60)

        def ask() -> None:
            reply = complete(router.url, prompts, cache_salt="router", **ANSWER)  # type: ignore[arg-type]
            for choice, prompt in enumerate(prompts):
                # Two prompts at once are batched: compare the tokens.
                assert tokens(reply, choice) == tokens(pair.single(prompt, "router", **ANSWER))

        gained = gain(pair.decode, ask, {outcome("grant_other_prompt"): 1, TOKENS_VERIFIED: len(prompts[0]) - 1})
    assert gained[outcome("grant_other_prompt")] == 1
    assert gained[TOKENS_VERIFIED] == len(prompts[0]) - 1


def test_only_what_is_missing_is_read(pair: Pair) -> None:
    """Decode has the first request's blocks in its prefix cache when the second one continues it."""
    start = random_prompt(321, seed=13)
    longer = start + random_prompt(100, seed=14)
    want = [pair.single_same_history(prompt, "prefix") for prompt in (start, longer)]
    assert difference(pair.moved_first(start, "prefix"), want[0]) == 0.0

    def ask() -> None:
        assert difference(pair.moved_first(longer, "prefix"), want[1]) == 0.0

    num_local = 320
    gained = gain(pair.decode, ask, {TOKENS_VERIFIED: len(longer) - 1 - num_local})
    assert gained[TOKENS_VERIFIED] == len(longer) - 1 - num_local


def test_a_full_hit_reads_nothing_and_releases_the_lease(pair: Pair) -> None:
    prompt = random_prompt(321, seed=15)
    first = pair.moved_first(prompt, "full hit")

    def ask() -> None:
        assert difference(pair.moved_first(prompt, "full hit"), first) == 0.0

    gained = gain(pair.decode, ask, {outcome("nothing_to_read"): 1})
    assert gained[outcome("nothing_to_read")] == 1
    assert gained.get(TOKENS_VERIFIED, 0) == 0


def test_a_client_that_leaves_strands_nothing(pair: Pair) -> None:
    for num_tokens in (100, 400, 900):
        prompt = random_prompt(num_tokens, seed=16)
        params = hand_off(pair.prefill.url, prompt, cache_salt="gone")
        body = {"model": "model", "prompt": prompt, "max_tokens": 400, "stream": True, "kv_transfer_params": params}
        body |= {"cache_salt": "gone", "ignore_eos": True}
        with requests.post(pair.decode.url + "/v1/completions", json=body, stream=True, timeout=60):
            pass  # gone before the first token
