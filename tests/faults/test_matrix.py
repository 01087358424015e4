"""The fault matrix with real processes, one test per case and bed; run by hand: ``pytest -m faults``."""

from collections.abc import Iterator

import pytest

from tests.faults.bed import Bed, running_bed
from tests.faults.matrix import BEDS, CASES, cases_of, judge_damage
from tests.faults.run import run_case
from tests.faults.verdicts import Verdict

pytestmark = [pytest.mark.faults, pytest.mark.timeout(900)]

ON_BEDS = pytest.mark.parametrize("bed", BEDS, ids="-".join, indirect=True, scope="module")
CASES_ON_BEDS = [
    pytest.param((transport, policy), case.name, id=f"{transport}-{policy}-{case.name}")
    for transport, policy in BEDS
    for case in cases_of(transport)
]


@pytest.fixture(scope="module")
def bed(request: pytest.FixtureRequest) -> Iterator[Bed]:
    with running_bed(*request.param) as bed:
        yield bed


@ON_BEDS
def test_damaged_blocks_are_judged_wrong(bed: Bed) -> None:
    assert judge_damage(bed).verdict is Verdict.WRONG


@pytest.mark.parametrize(("bed", "name"), CASES_ON_BEDS, indirect=["bed"], scope="module")
def test_case(bed: Bed, name: str) -> None:
    row = run_case(bed, CASES[name])
    if row.skipped:
        pytest.skip(row.skipped)
    assert not row.problems
