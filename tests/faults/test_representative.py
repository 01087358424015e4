"""One case of each kind of the fault matrix, with real engines, none of which has to be started anew."""

from collections.abc import Iterator

import pytest

from tests.faults.bed import Bed, running_bed
from tests.faults.matrix import CASES, judge_damage
from tests.faults.run import run_case
from tests.faults.verdicts import Verdict

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

LONG_SECONDS = 60.0
"""For a read. None of these cases waits for its end, and a busy machine may take long to reuse a pool meanwhile."""

NAMES = (
    "nobody_listens",
    "welcome_garbled",
    "cut_at_the_first_hello",
    "release_lost",
    "cut_during_read",
    "lease_expires_during_read",
    "cache_reset_before_word",
    "grant_for_blocks_of_others",
    "blocks_out_of_range_in_the_grant",
    "client_leaves_a_stuck_read",
    "client_leaves_before_word",
    "three_samples",
    "prefill_stopped_before_read",
    "decode_stopped_until_its_blocks_are_anothers",
)


@pytest.fixture(scope="module")
def bed() -> Iterator[Bed]:
    with running_bed("cma", "recompute", LONG_SECONDS) as bed:
        yield bed


def test_damaged_blocks_are_judged_wrong(bed: Bed) -> None:
    assert judge_damage(bed).verdict is Verdict.WRONG


@pytest.mark.parametrize("name", NAMES)
def test_case(bed: Bed, name: str) -> None:
    row = run_case(bed, CASES[name])
    assert not row.problems
