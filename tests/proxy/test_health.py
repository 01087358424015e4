"""When an engine is trusted: event lists, and what they add up to."""

import pytest

from proxy.errors import FailureKind
from proxy.health import (
    BROKEN_ANSWERS,
    BUSY_SECONDS,
    FIRST_EJECTION_SECONDS,
    LONGEST_EJECTION_SECONDS,
    SILENT_CHECKS,
    UNWELL_CHECKS,
    Check,
    Health,
    Standing,
)

SERIOUS = [FailureKind.UNREACHABLE, FailureKind.LOST, FailureKind.TIMED_OUT]
NOW = 100.0


@pytest.fixture
def health():
    found = Health()
    found.checked(Check.WELL)
    return found


def test_an_engine_that_nobody_checked_is_unknown():
    assert Health().standing(NOW) is Standing.UNKNOWN


def test_a_good_check_makes_it_up(health):
    assert health.standing(NOW) is Standing.UP


@pytest.mark.parametrize("kind", SERIOUS)
def test_a_serious_failure_ejects_at_once_and_time_ends_it(health, kind):
    assert health.failed(kind, NOW)
    assert health.standing(NOW) is Standing.SUSPECT
    assert health.standing(NOW + FIRST_EJECTION_SECONDS) is Standing.UP


def test_ejections_in_a_row_double_up_to_a_bound(health):
    now, lengths = NOW, []
    for _ in range(100):
        health.failed(FailureKind.LOST, now)
        length = FIRST_EJECTION_SECONDS
        while health.standing(now + length) is Standing.SUSPECT:
            length *= 2 if length < LONGEST_EJECTION_SECONDS / 2 else 1.001
        lengths.append(length)
        now += LONGEST_EJECTION_SECONDS + 1
    assert lengths[:5] == [1, 2, 4, 8, 16]
    assert all(length == pytest.approx(LONGEST_EJECTION_SECONDS, rel=0.01) for length in lengths[5:])


def test_requests_that_fail_together_are_one_failure(health):
    assert [health.failed(FailureKind.LOST, NOW) for _ in range(50)] == [True] + [False] * 49
    assert health.standing(NOW + FIRST_EJECTION_SECONDS) is Standing.UP


def test_an_answer_forgets_everything(health):
    for later in (0, 10, 20):
        health.failed(FailureKind.LOST, NOW + later)
    health.answered()
    assert health.standing(NOW + 20) is Standing.UP
    health.failed(FailureKind.LOST, NOW + 30)
    assert health.standing(NOW + 30 + FIRST_EJECTION_SECONDS) is Standing.UP


def test_broken_answers_eject_only_in_a_row(health):
    for _ in range(BROKEN_ANSWERS - 1):
        assert not health.failed(FailureKind.BROKEN, NOW)
    health.answered()
    for _ in range(BROKEN_ANSWERS - 1):
        health.failed(FailureKind.BROKEN, NOW)
    assert health.standing(NOW) is Standing.UP
    assert health.failed(FailureKind.BROKEN, NOW)
    assert health.standing(NOW) is Standing.SUSPECT


def test_a_busy_engine_is_left_alone_for_a_moment_and_that_does_not_grow(health):
    for later in range(0, 50, 10):
        assert not health.failed(FailureKind.BUSY, NOW + later)
        assert health.standing(NOW + later) is Standing.SUSPECT
        assert health.standing(NOW + later + BUSY_SECONDS) is Standing.UP


def test_being_busy_does_not_shorten_an_ejection(health):
    for _ in range(3):
        health.failed(FailureKind.LOST, NOW)
        health.answered()
    health.failed(FailureKind.LOST, NOW)
    health.failed(FailureKind.LOST, NOW + 1)
    health.failed(FailureKind.BUSY, NOW + 1)
    assert health.standing(NOW + 1 + BUSY_SECONDS) is Standing.SUSPECT


def test_an_unwell_engine_is_down_until_it_is_well_again(health):
    for _ in range(UNWELL_CHECKS - 1):
        health.checked(Check.UNWELL)
        assert health.standing(NOW) is Standing.SUSPECT
    health.checked(Check.UNWELL)
    assert health.standing(NOW) is Standing.DOWN
    health.checked(Check.WELL)
    assert health.standing(NOW) is Standing.UP


def test_silence_makes_suspect_after_some_time_and_never_down(health):
    for _ in range(SILENT_CHECKS - 1):
        health.checked(Check.SILENT)
        assert health.standing(NOW) is Standing.UP
    for _ in range(20):
        health.checked(Check.SILENT)
        assert health.standing(NOW) is Standing.SUSPECT
    health.checked(Check.WELL)
    assert health.standing(NOW) is Standing.UP


def test_what_the_proxy_lacks_is_no_evidence(health):
    health.checked(Check.UNWELL)
    for _ in range(2 * BROKEN_ANSWERS):
        health.checked(Check.NOT_MADE)
        assert not health.failed(FailureKind.OWN, NOW)
    assert health.standing(NOW) is Standing.SUSPECT
    health.checked(Check.WELL)
    assert health.standing(NOW) is Standing.UP


def test_a_good_check_does_not_undo_what_requests_met(health):
    health.failed(FailureKind.LOST, NOW)
    health.checked(Check.WELL)
    assert health.standing(NOW) is Standing.SUSPECT
