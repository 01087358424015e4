"""What planning one pull costs: Gemma-3-27b, 128k tokens, blocks of 16. Run by ``benchmarks.micro``."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.micro import serve
from pd_transfer.cli.geometry import kv_groups
from pd_transfer.cli.models import load_model
from pd_transfer.cli.transfers import NUMBERINGS, make_pull
from pd_transfer.core.layout import block_runs, descriptor_rows
from pd_transfer.core.plan import num_merged, plan_read

MODEL = Path(__file__).parent / "models" / "gemma-3-27b.json"
NUM_TOKENS = 128 * 1024
BLOCK_SIZE = 16

PLAN, NEEDED, GRANT, MERGED = (
    "decode worker: plan_read",
    "decode scheduler: needed_runs",
    "prefill scheduler: block_runs",
    "decode worker: num_merged",
)


def functions(num_tokens: int = NUM_TOKENS) -> dict[str, Callable[[], object]]:
    """``STEP, NUMBERING`` -> one call of it."""
    found: dict[str, Callable[[], object]] = {}
    groups = kv_groups(load_model(MODEL), BLOCK_SIZE)
    for name, numbering in NUMBERINGS.items():
        pull = make_pull(groups, num_tokens, numbering)
        plan, rows, needed = pull.plan(), descriptor_rows(pull.layout, 0), pull.needed()
        found[f"{PLAN}, {name}"] = partial(plan_read, pull.layout, pull.layout, needed, pull.granted)
        found[f"{NEEDED}, {name}"] = pull.needed
        found[f"{GRANT}, {name}"] = lambda pull=pull: [block_runs(table) for table in pull.tables]
        found[f"{MERGED}, {name}"] = partial(num_merged, plan, rows, rows)
    return found


if __name__ == "__main__":
    serve(functions())
