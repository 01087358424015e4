"""The log's lines are those that ``logging`` would write."""

import logging
import sys

import pytest

from proxy.log_lines import CheapFormatter

USUAL = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")


def record(message, *args, exc_info=None, created=1_700_000_000.5):
    made = logging.LogRecord("proxy.test", logging.WARNING, "", 0, message, args, exc_info)
    made.created = created
    made.msecs = (created - int(created)) * 1000
    return made


@pytest.mark.parametrize("created", [1_700_000_000.0, 1_700_000_000.9996, 1_700_000_001.25, 1_700_000_000.5])
@pytest.mark.parametrize("made", [("plain",), ("100 %",), ("%s of %d", "a", 2)], ids=str)
def test_lines(made, created):
    ours = CheapFormatter()
    for _ in range(2):
        assert ours.format(record(*made, created=created)) == USUAL.format(record(*made, created=created))


def test_a_line_with_a_traceback():
    try:
        raise ZeroDivisionError
    except ZeroDivisionError:
        error = sys.exc_info()
    assert CheapFormatter().format(record("bug", exc_info=error)) == USUAL.format(record("bug", exc_info=error))
