"""The book of strangers: bounded tries, bounded lines, bounded memory."""

import pytest

from pd_transfer.sidechannel.strangers import (
    LET_THROUGH,
    MAX_ADDRESSES,
    MAX_LINES,
    MAX_TRIES,
    WINDOW_SECONDS,
    StrangerBook,
)


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def book(clock):
    return StrangerBook(clock=clock)


def tries(book, host, count):
    return [book.may_try(host) for _ in range(count)]


def test_an_address_is_shut_out_after_its_tries_until_the_window_ends(book, clock):
    assert tries(book, "a", MAX_TRIES + 2) == [True] * MAX_TRIES + [False] * 2
    assert book.may_try("b")
    clock.now += WINDOW_SECONDS - 0.001
    assert not book.may_try("a")
    clock.now += 0.001
    assert tries(book, "a", MAX_TRIES + 1) == [True] * MAX_TRIES + [False]


def test_one_of_ten_is_let_through_so_that_an_engine_behind_the_same_address_gets_in(book):
    """After a restart of prefill nobody is known, and a stranger may use up every window's tries."""
    tries(book, "a", MAX_TRIES)
    assert tries(book, "a", 3 * LET_THROUGH) == ([False] * (LET_THROUGH - 1) + [True]) * 3


def test_where_an_engine_was_admitted_nobody_is_shut_out(book):
    book.admit("a")
    assert all(tries(book, "a", 10 * MAX_TRIES))
    assert not all(tries(book, "b", MAX_TRIES + 1))


def test_an_admission_ends_a_ban(book):
    tries(book, "a", MAX_TRIES + 1)
    book.admit("a")
    assert book.may_try("a")


def test_more_addresses_than_are_remembered_may_try(book):
    for number in range(MAX_ADDRESSES):
        book.may_try(f"{number}")
    assert all(tries(book, "one too many", MAX_TRIES + 1))
    assert not all(tries(book, "0", MAX_TRIES)), "those that are remembered stay bounded"


def test_known_addresses_have_a_bound_too(book):
    for number in range(MAX_ADDRESSES):
        book.admit(f"{number}")
    book.admit("one too many")
    assert not all(tries(book, "one too many", MAX_TRIES + 1))
    assert all(tries(book, "0", MAX_TRIES + 1))


def test_one_line_per_address_and_window(book, clock):
    assert [book.may_log("a"), book.may_log("a"), book.may_log("b")] == [True, False, True]
    clock.now += WINDOW_SECONDS
    assert book.may_log("a")


def test_lines_are_bounded_over_all_addresses(book, clock):
    assert sum(book.may_log(f"{number}") for number in range(10 * MAX_LINES)) == MAX_LINES
    clock.now += WINDOW_SECONDS
    assert book.may_log("late")
