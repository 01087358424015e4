"""Hand-offs between real engines: ours beside vLLM's built-in connector. ``scripts/bench handoff``.

Pairs of engines live one after the other, since two pairs cannot be busy at once on two cores: ours, built-in, ours,
built-in. Each life takes three to four minutes and is stored; ``--lives`` says how many to run now, and the next run
goes on where this one ended. The report is made of all that is stored.
"""

import argparse
import sys
from collections.abc import Sequence

from rich.console import Console

from benchmarks.handoff.life import FULL, QUICK, Life, measure
from benchmarks.handoff.tables import all_tables, notes
from benchmarks.pairs import BLOCK_SIZE_TOKENS, CONTENDERS, MODEL, REPOSITORY, Lives, add_life_options
from benchmarks.report import new_report, show, write

LOGS = REPOSITORY / "logs" / "bench" / "handoff"


def main(arguments: Sequence[str]) -> int:
    """Live, and leave a report. The exit status is 0 when anything was measured."""
    parser = argparse.ArgumentParser(prog="scripts/bench handoff", description=__doc__)
    add_life_options(parser, CONTENDERS)
    options = parser.parse_args(arguments)
    folder, plan = (LOGS / "quick", QUICK) if options.quick else (LOGS, FULL)
    kept = Lives(folder, Life)
    if options.fresh:
        kept.forget()
    console = Console(width=None if sys.stdout.isatty() else 180)
    for turn in kept.missing(options.only or list(CONTENDERS), options.rounds)[: options.lives]:
        contender = CONTENDERS[turn.name]
        console.print(f"round {turn.round}: {contender.title}")
        kept.store(turn, measure(contender, turn.round, plan, folder, lambda said: console.print(f"  {said}")))
    if not (lives := kept.stored()):
        console.print("Nothing is stored, and nothing was measured.")
        return 1
    assumptions = {
        "model": MODEL.name,
        "block size, tokens": BLOCK_SIZE_TOKENS,
        "cores of each engine": 1,
        "transport": "NIXL's default on one machine (CMA)",
    }
    report = new_report("handoff", arguments, all_tables(lives), notes(lives), assumptions, {"lives": lives})
    show(report, console)
    write(report, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
