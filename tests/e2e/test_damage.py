"""The positive control of every exactness check: one damaged block of one group turns it red."""

from collections.abc import Iterator

import pytest

from tests.e2e.pair import TINY_HYBRID, TOKENS_VERIFIED, Pair, gain, running_pair, same_settings
from tests.stack.exactness import random_prompt

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

SLIDING_GROUP, FULL_GROUP = 0, 5


@pytest.fixture(scope="module", params=[SLIDING_GROUP, FULL_GROUP], ids=["sliding group", "full-attention group"])
def damaged(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """Decode overwrites the third last block that it has read of one group, and notices nothing."""
    extra = {"debug_damage": [request.param, -3]}
    engines = same_settings(TINY_HYBRID, "--block-size", "32", extra=extra)
    with running_pair(f"damage-{request.param}", *engines) as pair:
        yield pair


@pytest.mark.parametrize("num_tokens", [127, 160, 191, 600])
def test_a_damaged_block_is_seen(damaged: Pair, num_tokens: int) -> None:
    def ask() -> None:
        assert damaged.difference_at(random_prompt(num_tokens), f"damage {num_tokens}", num_tokens=2) > 0.0

    gained = gain(damaged.decode, ask, {TOKENS_VERIFIED: num_tokens - 1})
    assert gained[TOKENS_VERIFIED] == num_tokens - 1
