"""Exactness in other configurations: other models, no prefix cache, chunked prefill, hybrid manager off, two ranks.

The oracle is the same history on one engine (see ``Pair.single_same_history``): where prefill cuts a prompt into
chunks, results on a CPU depend on the cut.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.e2e.pair import TINY_HYBRID, TOKENS_VERIFIED, Pair, gain, outcome, running_pair, same_settings
from tests.stack.engines import BOTH_ROLES
from tests.stack.exactness import TOP_LOGPROBS, difference, hand_off, random_prompt, tokens

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

BLOCK_32 = ("--block-size", "32")
LENGTHS = (2, 33, 100, 127, 128, 159, 160, 191, 223, 500, 1000)


@dataclass(frozen=True)
class Configuration:
    """A model and the arguments of both engines."""

    model: str
    arguments: tuple[str, ...] = ()
    num_words: int = 250
    is_kv_both: bool = False


CONFIGURATIONS = {
    "random-hybrid-uncached-chunked": Configuration(
        "hybrid", (*BLOCK_32, "--no-enable-prefix-caching", "--max-num-batched-tokens", "96", "--max-num-seqs", "8")
    ),
    "hybrid-manager-off": Configuration("hybrid", (*BLOCK_32, "--disable-hybrid-kv-cache-manager")),
    "single-group-kv-both": Configuration("single_group", BLOCK_32, is_kv_both=True),
    "block-64": Configuration("hybrid", ("--block-size", "64")),
}


@pytest.fixture(scope="module", params=CONFIGURATIONS)
def pair(request: pytest.FixtureRequest, random_models: Mapping[str, Path]) -> Iterator[Pair]:
    configuration = CONFIGURATIONS[request.param]
    prefill, decode = same_settings(random_models[configuration.model], *configuration.arguments)
    if configuration.is_kv_both:
        prefill, decode = replace(prefill, role=BOTH_ROLES), replace(decode, role=BOTH_ROLES)
    with running_pair(request.param, prefill, decode) as running:
        yield running


def test_equals_the_same_history_on_one_engine(pair: Pair) -> None:
    def ask() -> None:
        for num_tokens in LENGTHS:
            prompt = random_prompt(num_tokens, seed=21, num_words=250)
            salt = f"{num_tokens}"
            assert difference(pair.moved_first(prompt, salt), pair.single_same_history(prompt, salt)) == 0.0

    num_moved = sum(num_tokens - 1 for num_tokens in LENGTHS)
    assert gain(pair.decode, ask, {TOKENS_VERIFIED: num_moved})[TOKENS_VERIFIED] == num_moved


@pytest.fixture
def mismatched(random_models: Mapping[str, Path]) -> Iterator[Pair]:
    prefill, decode = same_settings(random_models["hybrid"], *BLOCK_32)
    other = replace(decode, model=random_models["hybrid_other_weights"])
    with running_pair("other-weights", prefill, other) as running:
        yield running


def test_other_weights_of_the_same_shape_are_refused(mismatched: Pair) -> None:
    prompt = random_prompt(150, seed=22, num_words=250)
    fields = {"max_tokens": 4, "logprobs": TOP_LOGPROBS}

    def ask() -> None:
        params = hand_off(mismatched.prefill.url, prompt, cache_salt="a")
        reply = mismatched.decode.complete(prompt, cache_salt="a", kv_transfer_params=params, **fields)
        assert tokens(reply) == tokens(mismatched.decode.complete(prompt, cache_salt="b", **fields))

    gained = gain(mismatched.decode, ask, {outcome("peer_refused"): 1})
    assert gained[outcome("peer_refused")] == 1
    assert gained.get(TOKENS_VERIFIED, 0) == 0
    assert "the weights differ" in mismatched.decode.log_path.read_text()


@pytest.fixture
def two_ranks() -> Iterator[Pair]:
    prefill, decode = same_settings(TINY_HYBRID, *BLOCK_32, "--tensor-parallel-size", "2")
    with running_pair("two-ranks", replace(prefill, cores="0|1"), replace(decode, cores="0|1")) as running:
        yield running


@pytest.mark.slow
def test_two_ranks_to_two_ranks(two_ranks: Pair) -> None:
    def ask() -> None:
        for num_tokens in (33, 128, 159, 300):
            prompt = random_prompt(num_tokens, seed=23)
            got = two_ranks.moved_first(prompt, f"{num_tokens}")
            assert difference(got, two_ranks.single_same_history(prompt, f"{num_tokens}")) == 0.0

    num_moved = sum((32, 127, 158, 299))
    assert gain(two_ranks.decode, ask, {TOKENS_VERIFIED: num_moved})[TOKENS_VERIFIED] == num_moved
