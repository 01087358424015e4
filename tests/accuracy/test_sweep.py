"""One configuration of the sweep, as a person runs it."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.stack.engines import REPOSITORY

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

TASKS = ("pd_far", "pd_near", "pd_mix", "pd_shared", "pd_choice")
NUM_DOCUMENTS = 15


def sweep(logs: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(REPOSITORY / "scripts" / "accuracy_sweep"), "--logs", str(logs), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_lm_eval_through_prefill_and_decode_equals_the_single_engine_sample_by_sample():
    logs = REPOSITORY / "logs" / "e2e" / "accuracy"
    chosen = ("--configuration", "concurrency-16", "--limit", str(NUM_DOCUMENTS))
    result = sweep(logs, "--one-process", *chosen)
    assert result.returncode == 0, result.stdout + result.stderr
    rows = {row["task"]: row for row in json.loads((logs / "table.json").read_text())}
    assert tuple(rows) == TASKS
    for task, row in rows.items():
        assert row["equal"] == row["samples"] == NUM_DOCUMENTS
        assert row["tokens_loaded"] == row["tokens_expected"]
        # The proxy has log probabilities of a prompt answered by one engine: nothing is moved.
        assert (row["tokens_loaded"] > 0) == (task != "pd_choice")
        (score,) = row["prefill_decode"].values()
        assert score > 0.9
