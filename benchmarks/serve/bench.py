"""``vllm bench serve`` in front of a single engine, vLLM's built-in connector, and ours. ``scripts/bench serve``.

Engines live one after the other, as in ``scripts/bench handoff``; each life takes two to four minutes and is stored.
``--lives`` says how many to run now, and the next run goes on where this one ended. Both pairs stand behind this
project's proxy, which copies what a prefill engine answers into decode's request without reading it.
"""

import argparse
import sys
from collections.abc import Sequence

from rich.console import Console

from benchmarks.pairs import BLOCK_SIZE_TOKENS, MODEL, REPOSITORY, Lives, add_life_options
from benchmarks.report import new_report, show, write
from benchmarks.serve import dataset
from benchmarks.serve.life import FULL, QUICK, TITLES, Life, measure
from benchmarks.serve.tables import all_tables

LOGS = REPOSITORY / "logs" / "bench" / "serve"
NOTES = (
    "Requests, lengths and words are the same for all in a round; no prompt comes twice, and prefix caching is off.",
    "The single engine has both cores and no proxy in front; each engine of a pair has one core.",
    "The proxy and vLLM's client run on the same two cores, too.",
    "Requests and pulls count the client's warm-up too: equal numbers mean that every prompt was pulled.",
    "With the real conversations: give vLLM's client their file (see docs/performance.md).",
)


def main(arguments: Sequence[str]) -> int:
    """Live, and leave a report. The exit status is 0 when anything was measured."""
    parser = argparse.ArgumentParser(prog="scripts/bench serve", description=__doc__)
    add_life_options(parser, TITLES)
    options = parser.parse_args(arguments)
    folder, plan = (LOGS / "quick", QUICK) if options.quick else (LOGS, FULL)
    kept = Lives(folder, Life)
    if options.fresh:
        kept.forget()
    console = Console(width=None if sys.stdout.isatty() else 250)
    for turn in kept.missing(options.only or list(TITLES), options.rounds)[: options.lives]:
        console.print(f"round {turn.round}: {TITLES[turn.name]}")
        kept.store(turn, measure(turn.name, turn.round, plan, folder, lambda said: console.print(f"  {said}")))
    if not (lives := kept.stored()):
        console.print("Nothing is stored, and nothing was measured.")
        return 1
    assumptions = {
        "model": MODEL.name,
        "block size, tokens": BLOCK_SIZE_TOKENS,
        "mean input, tokens": dataset.MEAN_INPUT_TOKENS,
        "mean output, tokens": dataset.MEAN_OUTPUT_TOKENS * plan.output_scale,
        **{f"prompts at concurrency {each}": count for each, count in plan.num_prompts.items()},
    }
    report = new_report("serve", arguments, all_tables(lives), NOTES, assumptions, {"lives": lives})
    show(report, console)
    write(report, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
