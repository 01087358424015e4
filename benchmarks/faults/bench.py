"""``scripts/bench faults``: the same faults against vLLM's built-in NIXL connector and against ours, side by side.

Real engines on CPU cores, one pair after the other. Only what clients, routers, operators and strangers can do from
outside is done, so that both are treated alike. It is data, not a gate: the exit status is 0 when every chosen case
could be played. Cases and connectors that are not chosen keep what an earlier run left in the folder.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from benchmarks.faults import tables
from benchmarks.faults.bed import TRANSPORTS, Connector, running_sided_bed
from benchmarks.faults.cases import CASES
from benchmarks.faults.play import Case, Result, run_case
from benchmarks.report import RESULTS, Report, new_report, read, show, write
from tests.stack.engines import StackError

NAME = "faults"
Book = dict[Connector, dict[str, Result]]


def chosen(words: Sequence[str]) -> list[Case]:
    """The cases whose name contains one of the words, in the order in which they are played."""
    return [case for case in CASES.values() if any(word in case.name for word in words)]


def earlier(folder: Path, transport: str) -> Book:
    """What a run has left in a folder; nothing where there is no report, or one of another shape or transport."""
    try:
        data = read(folder / f"{NAME}.json").data
        return msgspec.convert(data["results"], Book) if data["transport"] == transport else {}
    except (OSError, msgspec.DecodeError, msgspec.ValidationError, KeyError):
        return {}


def missing(cases: Sequence[Case], results: Mapping[str, Result]) -> list[Case]:
    """The cases that have not been played, or in vain."""
    return [case for case in cases if case.name not in results or results[case.name].problem]


def made(arguments: Sequence[str], book: Mapping[Connector, Mapping[str, Result]], transport: str) -> Report:
    """The report of all that is known."""
    found = {
        connector: {name: results[name] for name in CASES if name in results} for connector, results in book.items()
    }
    data: dict[str, Any] = {"transport": transport, "results": msgspec.to_builtins(found)}
    cases = list(CASES.values())
    return new_report(
        NAME,
        # Repeated as a whole: what was missing once is missing no more.
        [argument for argument in arguments if argument != "--missing"],
        [tables.cases_table(cases, found), tables.totals_table(found), tables.counters_table(cases, found)],
        tables.NOTES,
        tables.assumptions(transport),
        data,
    )


def play(
    console: Console, connector: Connector, transport: str, cases: Sequence[Case], store: Callable[..., None]
) -> None:
    """Play the cases on one pair, and store each as it ends. Raises StackError."""
    console.print(f"{connector}: starting two engines")
    with running_sided_bed(connector, transport) as bed:
        for number, case in enumerate(cases, 1):
            console.print(f"{connector}: {number} of {len(cases)}: {case.about}", highlight=False, markup=False)
            result = run_case(bed, case)
            store(connector, case, result)
            text = f"    {tables.told(result)} ({result.seconds:.0f} s)"
            console.print(text, highlight=False, markup=False)


def main(arguments: Sequence[str]) -> int:
    """Play, and leave a report, even of a run that is cut short."""
    parser = argparse.ArgumentParser(prog="scripts/bench faults", description=__doc__)
    parser.add_argument("--connector", choices=list(Connector), type=Connector, help="only this one")
    parser.add_argument("--only", metavar="NAME", nargs="+", default=[""], help="only cases whose name contains a NAME")
    parser.add_argument("--missing", action="store_true", help="only cases of which the folder has no result")
    parser.add_argument("--transport", choices=list(TRANSPORTS), default="tcp", help="UCX between the engines (tcp)")
    parser.add_argument("--list", action="store_true", help="print the cases, and end")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for faults.json and faults.md")
    options = parser.parse_args(arguments)
    console = Console(width=None if Console().is_terminal else 160)
    cases = chosen(options.only)
    if options.list:
        for case in cases:
            console.print(f"{case.name}: {case.about}", highlight=False, markup=False)
        return 0
    book, stamp = earlier(options.out, options.transport), new_report(NAME, [], [])

    def store(connector: Connector, case: Case, result: Result) -> None:
        result.when, result.commit = stamp.date, stamp.versions["pd_transfer"]
        book.setdefault(connector, {})[case.name] = result
        write(made(arguments, book, options.transport), options.out)

    connectors = [options.connector] if options.connector else list(Connector)
    try:
        for connector in connectors:
            left = missing(cases, book.get(connector, {})) if options.missing else cases
            if left:
                play(console, connector, options.transport, left, store)
    except StackError as error:
        console.print(str(error), highlight=False, markup=False)
        return 1
    except KeyboardInterrupt:
        console.print("Stopped; what was played is stored.")
        return 130
    report = made(arguments, book, options.transport)
    show(report, console)
    console.print(f"written: {', '.join(map(str, write(report, options.out)))}")
    return int(any(book[connector][case.name].problem for connector in connectors for case in cases))
