"""The start-up canary with real engines: one of other weights computes every prompt itself, and is found out."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from tests.e2e.pair import Pair, running_pair, same_settings
from tests.e2e.proxy_stack import proxy_of, until
from tests.stack.engines import complete
from tests.stack.exactness import random_prompt

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def mismatched(random_models: Mapping[str, Path]) -> Iterator[Pair]:
    prefill, decode = same_settings(random_models["hybrid"], "--block-size", "32")
    other = replace(decode, model=random_models["hybrid_other_weights"])
    with running_pair("proxy-canary", prefill, other) as pair:
        yield pair


def test_a_proxy_with_a_canary_does_not_start_where_no_kv_moves(mismatched: Pair) -> None:
    engines = ([mismatched.prefill], [mismatched.decode], mismatched.logs)
    with proxy_of(*engines, "--canary", "60", name="proxy-with") as proxy:
        until(lambda: proxy.has_ended, "the end of the proxy")
    reason = f"no KV moved from {mismatched.prefill.url} to {mismatched.decode.url}: decode counts no loaded tokens"
    assert proxy.log_tail(1) == f"pd-proxy: {reason} (peer_refused)"


def test_a_proxy_without_one_answers_and_says_nothing(mismatched: Pair) -> None:
    """The control: nobody would notice."""
    with proxy_of([mismatched.prefill], [mismatched.decode], mismatched.logs, name="proxy-without") as proxy:
        proxy.wait_ready("/ready", seconds=30)
        prompt = random_prompt(150, seed=45, num_words=250)
        got = complete(proxy.url, prompt, max_tokens=4)["choices"][0]["text"]
        assert got == mismatched.decode.complete(prompt, cache_salt="single", max_tokens=4)["choices"][0]["text"]
