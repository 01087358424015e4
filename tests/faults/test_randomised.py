"""Ten thousand random histories: every read is exact or an explicit loss, and nothing is left of any of them."""

import pytest

from tests.core.events import HistoryError, Totals, TrustingBook, play
from tests.faults.histories import NUM_HISTORIES, play_many, summary


@pytest.mark.faults
@pytest.mark.timeout(1800)
def test_ten_thousand_histories():
    totals, failures = play_many(seed=1_000_000)
    assert not failures
    assert totals.num_histories == NUM_HISTORIES
    assert totals.judged["receive_verified"] > NUM_HISTORIES


def test_what_is_counted():
    totals, failures = play_many(seed=7, num_histories=3, num_jobs=1)
    expected = Totals()
    for seed in (7, 8, 9):
        expected.add(play(seed))
    assert (totals, failures) == (expected, [])
    figures = summary(totals, [])
    reads = figures["reads of a rank, judged exact"] + figures["reads of a rank, explicitly lost"]
    assert reads == totals.judged.total() > 0
    assert [figures[what] for what in figures if "must be 0" in what] == [0, 0, 0]


def test_control_failures_are_told_apart():
    with pytest.raises(HistoryError, match=r"seed \d+, step \d+: WrongReadError") as wrong:
        sum(play(seed, TrustingBook).num_steps for seed in range(100))
    figures = summary(Totals(), [str(wrong.value), "seed 1, step 2: AssertionError: I9", "seed 3, step 1: KeyError: 7"])
    assert [figures[what] for what in figures if "must be 0" in what] == [1, 1, 1]
