"""``scripts/bench plan``: one table over models and prompts, what planning costs, and a picture."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from benchmarks.micro import Seconds, measure
from benchmarks.plan import timing
from benchmarks.plan.picture import draw
from benchmarks.report import RESULTS, Cell, Table, new_report, show, write
from pd_transfer.cli.models import load_model
from pd_transfer.cli.transfers import NUMBERINGS, Comparison, compare

MERGING = (
    "NIXL merges neighbouring descriptors whoever asks; the built-in connector's figures are before merging, and its "
    "neighbours merge as ours do."
)
MODELS = Path(__file__).parent / "models"
PROMPTS = tuple(1024 * 2**power for power in range(8))
LIMIT_SECONDS = 1e-3

Found = dict[str, dict[int, Comparison]]
"""By model and prompt length."""


def main(arguments: Sequence[str]) -> int:
    """The exit status is 0 when ours moved exactly the least bytes for every model that it serves."""
    parser = argparse.ArgumentParser(prog="scripts/bench plan", description=__doc__)
    parser.add_argument("--block-size", type=int, default=timing.BLOCK_SIZE, help="tokens; default: %(default)s")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for plan.json, plan.md and plan.png")
    options = parser.parse_args(arguments)
    console = Console(width=None if Console().is_terminal else 160)
    with console.status("comparing transfers"):
        found = compare_all(options.block_size)
    with console.status("measuring what planning costs"):
        times = measure("benchmarks.plan.timing")
    faults = excess(found)
    report = new_report(
        "plan",
        arguments,
        [transfers_table(found, options.block_size), times_table(times)],
        [MERGING, *refusals(found), *built_in_faults(found), *faults, verdict(times)],
        data={"seconds": {name: each._asdict() for name, each in times.items()}},
    )
    show(report, console)
    paths = [*write(report, options.out), draw(found, options.block_size, options.out / "plan.png")]
    console.print(f"written: {', '.join(map(str, paths))}")
    return 1 if faults else 0


def compare_all(block_size: int, prompts: Sequence[int] = PROMPTS) -> Found:
    """Every model with every prompt length, on one rank."""
    models = {path.stem: load_model(path) for path in sorted(MODELS.glob("*.json"))}
    return {
        name: {num_tokens: compare(model, num_tokens, block_size) for num_tokens in prompts}
        for name, model in models.items()
    }


def transfers_table(found: Found, block_size: int) -> Table:
    """One row for each model and prompt."""
    columns = ("model", "prompt", "flat MiB", "built-in MiB", "ours MiB", "least MiB", "ours / least")
    columns += ("flat descriptors", "built-in", "ours", *(f"merged, {name}" for name in NUMBERINGS))
    rows = []
    for name, by_length in found.items():
        for num_tokens, each in by_length.items():
            sizes: list[Cell] = [_mebibytes(each.flat.num_bytes), _mebibytes(each.built_in.num_bytes)]
            counts: list[Cell] = [each.flat.num_descriptors, each.built_in.num_descriptors]
            if each.ours is None:
                sizes += ["refused", _mebibytes(each.least.num_bytes), ""]
                counts += ["refused", *[""] * len(NUMBERINGS)]
            else:
                ratio = each.ours.num_bytes / each.least.num_bytes
                sizes += [_mebibytes(each.ours.num_bytes), _mebibytes(each.least.num_bytes), f"{ratio:.2f}"]
                counts += [each.ours.num_descriptors, *each.merged.values()]
            rows.append((name, f"{num_tokens // 1024}k", *sizes, *counts))
    return Table(f"Bytes and descriptors of one prompt's transfer, blocks of {block_size} tokens", columns, tuple(rows))


def times_table(times: dict[str, Seconds]) -> Table:
    """What planning costs one thread, in microseconds."""
    rows = [(name, each.least * 1e6, each.median * 1e6) for name, each in times.items()]
    title = "Planning a pull of 128k tokens of Gemma-3-27b, blocks of 16, CPU time in microseconds"
    return Table(title, ("step, how block ids follow each other", "least", "median"), tuple(rows))


def refusals(found: Found) -> list[str]:
    """One sentence for each model that the connector does not serve."""
    firsts = {name: next(iter(by_length.values())) for name, by_length in found.items()}
    return [f"{name} is refused at start-up: {first.refusal}." for name, first in firsts.items() if first.refusal]


def built_in_faults(found: Found) -> list[str]:
    """Where the built-in connector's figure is no transfer at all."""
    lengths: dict[str, list[str]] = {}
    for name, by_length in found.items():
        for num_tokens, each in by_length.items():
            if each.built_in_fault:
                lengths.setdefault(f"{name}, built-in: {each.built_in_fault}", []).append(f"{num_tokens // 1024}k")
    return [f"{fault} ({', '.join(at)})." for fault, at in lengths.items()]


def excess(found: Found) -> list[str]:
    """Where ours moves other than the least bytes. There must be none."""
    return [
        f"{name}, {num_tokens} tokens: ours moves {each.ours.num_bytes} bytes, the least is {each.least.num_bytes}."
        for name, by_length in found.items()
        for num_tokens, each in by_length.items()
        if each.ours and each.ours.num_bytes != each.least.num_bytes
    ]


def verdict(times: dict[str, Seconds]) -> str:
    """How the planning times stand to their limit."""
    plans = {
        name.removeprefix(f"{timing.PLAN}, "): each for name, each in times.items() if name.startswith(timing.PLAN)
    }
    parts = [
        f"{name} {each.least * 1e3:.2f} ms ({'kept' if each.least < LIMIT_SECONDS else 'missed'})"
        for name, each in plans.items()
    ]
    return f"Planning, least CPU time of its values, against 1 ms: {', '.join(parts)}."


def _mebibytes(num_bytes: int) -> float:
    return num_bytes / 2**20
