"""Decode's answers from moved KV are bit for bit the single engine's, at every prompt length.

Serial requests without shared prefixes: the oracle is one full computation on one engine. Window 128, block size 32,
five sliding groups of one layer and one full-attention group.
"""

from collections.abc import Iterator

import pytest

from tests.e2e.pair import TINY_HYBRID, TOKENS_VERIFIED, Pair, gain, running_pair, same_settings
from tests.stack.exactness import random_prompt

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

WINDOW, BLOCK = 128, 32
BELOW_WINDOW = range(WINDOW - BLOCK, WINDOW)
ABOVE_WINDOW = range(WINDOW + BLOCK, WINDOW + 2 * BLOCK)
"""Every residue modulo the block size on both sides of the window."""
LENGTHS = (2, 3, BLOCK - 1, BLOCK, BLOCK + 1, *BELOW_WINDOW, WINDOW, WINDOW + 1, *ABOVE_WINDOW, 287, 319, 600, 1025)


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with running_pair("exactness", *same_settings(TINY_HYBRID, "--block-size", str(BLOCK))) as pair:
        yield pair


@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_first_tokens_equal_the_single_engines(pair: Pair, num_tokens: int) -> None:
    def ask() -> None:
        worst = pair.difference_at(random_prompt(num_tokens), f"length {num_tokens}", num_tokens=2)
        assert worst == 0.0

    gained = gain(pair.decode, ask, {TOKENS_VERIFIED: num_tokens - 1})
    assert gained[TOKENS_VERIFIED] == num_tokens - 1


@pytest.mark.parametrize("num_tokens", [100, 159, 700])
def test_two_windows_of_decoded_tokens_equal_the_single_engines(pair: Pair, num_tokens: int) -> None:
    assert pair.difference_at(random_prompt(num_tokens, seed=7), f"long {num_tokens}", num_tokens=2 * WINDOW) == 0.0


def test_a_prompt_of_one_token_is_computed_where_it_is_decoded(pair: Pair) -> None:
    reply = pair.prefill.complete([17], max_tokens=1, kv_transfer_params={"do_remote_decode": True})
    assert not reply.get("kv_transfer_params")
    assert (
        pair.decode.complete([17], max_tokens=4)["choices"][0]["text"]
        == pair.single([17], "one", max_tokens=4)["choices"][0]["text"]
    )
