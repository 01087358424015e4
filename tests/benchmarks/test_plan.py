"""The table over models, and what it says of a transfer that is not the least."""

from dataclasses import replace

import pytest

from benchmarks.micro import Seconds
from benchmarks.plan import timing

pytest.importorskip("matplotlib")

from benchmarks.plan.bench import (
    MODELS,
    built_in_faults,
    compare_all,
    excess,
    refusals,
    times_table,
    transfers_table,
    verdict,
)
from benchmarks.plan.picture import SHOWN, draw


@pytest.fixture(scope="module")
def found():
    return compare_all(16, (1024, 8192))


def test_every_model_has_its_rows(found):
    table = transfers_table(found, 16)
    assert [row[:2] for row in table.rows] == [
        (path.stem, length) for path in sorted(MODELS.glob("*.json")) for length in ("1k", "8k")
    ]
    assert {len(row) for row in table.rows} == {len(table.columns)}
    assert {row[0] for row in table.rows if row[4] == "refused"} == {"llama-4-scout-like", "deepseek-v3"}
    assert {row[6] for row in table.rows} == {"1.00", ""}


def test_refusals_and_faults_are_named(found):
    assert [sentence.split()[0] for sentence in refusals(found)] == ["deepseek-v3", "llama-4-scout-like"]
    (fault,) = built_in_faults(found)
    assert fault.startswith("llama-4-scout-like, built-in: the decode engine dies")
    assert fault.endswith("(8k).")


def test_bytes_beyond_the_least_are_found(found):
    assert excess(found) == []
    each = found["llama-3-8b"][1024]
    more = replace(each, ours=replace(each.ours, num_bytes=each.ours.num_bytes + 1))
    (sentence,) = excess({"llama-3-8b": {1024: more}})
    assert "llama-3-8b, 1024 tokens" in sentence


def test_the_picture(found, tmp_path):
    assert set(SHOWN) <= found.keys()
    assert draw(found, 16, tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_what_is_timed_runs():
    functions = timing.functions(4096)
    assert len(functions) == 9
    results = {name: function() for name, function in functions.items()}
    plan = results[f"{timing.PLAN}, contiguous"]
    assert len(plan.local) > plan.num_merged == 62
    assert results[f"{timing.NEEDED}, scattered"] == results[f"{timing.GRANT}, scattered"]


def test_the_verdict_on_times():
    times = {f"{timing.PLAN}, contiguous": Seconds(0.9e-3, 2e-3), f"{timing.PLAN}, scattered": Seconds(1.1e-3, 2e-3)}
    assert verdict(times).endswith("contiguous 0.90 ms (kept), scattered 1.10 ms (missed).")
    assert times_table(times).rows[0] == (f"{timing.PLAN}, contiguous", 900.0, 2000.0)
