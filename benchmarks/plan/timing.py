"""What planning one pull costs: Gemma-3-27b, 128k tokens, blocks of 16. Run by ``benchmarks.micro``."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.micro import serve
from pd_transfer.cli.geometry import kv_groups
from pd_transfer.cli.models import load_model
from pd_transfer.cli.transfers import NUMBERINGS, make_pull
from pd_transfer.core.layout import block_runs
from pd_transfer.core.plan import ReadPlanner

MODEL = Path(__file__).parent / "models" / "gemma-3-27b.json"
NUM_TOKENS = 128 * 1024
BLOCK_SIZE = 16

PLAN, NEEDED, GRANT = (
    "decode worker: plan",
    "decode scheduler: needed_runs",
    "prefill scheduler: block_runs",
)


def functions(num_tokens: int = NUM_TOKENS) -> dict[str, Callable[[], object]]:
    """``STEP, NUMBERING`` -> one call of it."""
    found: dict[str, Callable[[], object]] = {}
    groups = kv_groups(load_model(MODEL), BLOCK_SIZE)
    for name, numbering in NUMBERINGS.items():
        pull = make_pull(groups, num_tokens, numbering)
        planner = ReadPlanner(pull.layout, pull.layout)
        found[f"{PLAN}, {name}"] = partial(planner.plan, pull.needed(), pull.granted)
        found[f"{NEEDED}, {name}"] = pull.needed
        found[f"{GRANT}, {name}"] = lambda pull=pull: [block_runs(table) for table in pull.tables]
    return found


if __name__ == "__main__":
    serve(functions())
