"""Ten thousand random histories of two engines made of the core's books: ``python -m tests.faults.histories``.

What happens is in ``tests.core.events``, what must hold in ``tests.core.system``. A failure names the seed that shows
it again: ``python -m tests.faults.histories --seed SEED --num-histories 1``. The exit status is 1 when there is one.
"""

import argparse
import os
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn
from rich.table import Table

from tests.core.events import HistoryError, Totals, play

NUM_HISTORIES = 10_000
_CHUNK = 50


def play_chunk(first_seed: int, num_histories: int) -> tuple[Totals, list[str]]:
    """Some histories, and what went wrong in them."""
    totals, failures = Totals(), []
    for seed in range(first_seed, first_seed + num_histories):
        try:
            totals.add(play(seed))
        except HistoryError as error:
            failures.append(str(error))
    return totals, failures


def play_many(
    seed: int = 0,
    num_histories: int = NUM_HISTORIES,
    num_jobs: int | None = None,
    progress: Callable[[int], object] = lambda _: None,
) -> tuple[Totals, list[str]]:
    """Histories from ``seed`` on, in ``num_jobs`` processes. ``progress`` is told how many more are done."""
    totals, failures = Totals(), []
    with ProcessPoolExecutor(num_jobs or os.cpu_count(), get_context("spawn")) as pool:
        chunks = {}
        for first in range(0, num_histories, _CHUNK):
            size = min(_CHUNK, num_histories - first)
            chunks[pool.submit(play_chunk, seed + first, size)] = size
        for done in as_completed(chunks):
            more, failed = done.result()
            totals.add(more)
            failures += failed
            progress(chunks[done])
    return totals, failures


def summary(totals: Totals, failures: list[str]) -> dict[str, int]:
    """The figures of a run, in the order in which they are shown."""
    losses = {
        f"  {outcome}": count for outcome, count in sorted(totals.judged.items()) if outcome != "receive_verified"
    }
    refusals = {f"  {outcome}": count for outcome, count in sorted(totals.declined.items())}
    wrong = sum("WrongReadError" in failure for failure in failures)
    leaks = sum(any(name in failure for name in ("I2", "I4", "I9")) for failure in failures)
    return {
        "histories": totals.num_histories + len(failures),
        "steps": totals.num_steps,
        "requests": totals.num_requests,
        "events that met a moment of a read": len(totals.met),
        "reads of a rank, judged exact": totals.judged["receive_verified"],
        "reads of a rank, explicitly lost": sum(losses.values()),
        **losses,
        "requests computed by decode itself": sum(refusals.values()),
        **refusals,
        "requests that died with their decode engine": totals.num_lost,
        "wrong reads (must be 0)": wrong,
        "leaks (must be 0)": leaks,
        "other broken invariants (must be 0)": len(failures) - wrong - leaks,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of the first history")
    parser.add_argument("--num-histories", type=int, default=NUM_HISTORIES)
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    arguments = parser.parse_args()
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns) as bar:
        task = bar.add_task("histories", total=arguments.num_histories)
        totals, failures = play_many(
            arguments.seed, arguments.num_histories, arguments.jobs, lambda count: bar.advance(task, count)
        )
    table = Table("randomised cases with the fakes", "how many")
    for what, count in summary(totals, failures).items():
        table.add_row(what, f"{count:,}")
    console = Console()
    for failure in failures[:20]:
        console.print(failure, markup=False)
    console.print(table)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
