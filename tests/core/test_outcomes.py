"""Names that are counted: metrics and documentation are made from them."""

import re

import pytest

from pd_transfer.core.outcomes import Level, Outcome, Quantity

NAMES = [*Outcome, *Quantity, *Level]


@pytest.mark.parametrize("name", NAMES)
def test_names_are_fit_for_metrics(name):
    assert re.fullmatch(r"[a-z]+(_[a-z]+)*", name.value)
    assert name.value == name.name.lower()


def test_no_name_means_two_things():
    assert len({name.value for name in NAMES}) == len(NAMES)
