"""The fault matrix: real prefill and decode engines, broken on purpose at every stage; one table.

Every answer has to be the single engine's or an explicit error, within a deadline, with nothing held afterwards. Run it
with ``scripts/faults``; the exit status is 0 only when there is no wrong answer, hang, leak, death or surprise.
"""

import argparse
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.faults.bed import POLICIES, TRANSPORTS, running_bed
from tests.faults.matrix import BEDS, cases_of, judge_damage
from tests.faults.run import Case, outcome_names, run_case
from tests.faults.verdicts import Row, Verdict
from tests.stack.engines import REPOSITORY, StackError

RANDOMISED = Path("tests/faults/test_randomised.py")


def chosen(options: argparse.Namespace) -> Iterator[tuple[str, str, list[Case]]]:
    """The beds that have something to do, and what."""
    for transport, policy in BEDS:
        if options.transport in (None, transport) and options.policy in (None, policy):
            cases = list(cases_of(transport, options.only))
            if cases:
                yield transport, policy, cases


def run_bed(console: Console, transport: str, policy: str, cases: list[Case]) -> list[Row]:
    """Run the cases of one pair of engines, each line as it ends. Raises StackError."""
    rows = []
    with console.status(f"{transport} {policy}: starting two engines") as status, running_bed(transport, policy) as bed:
        control = judge_damage(bed)
        row = Row("control_damaged_blocks", transport, policy)
        if control.verdict is not Verdict.WRONG:
            row.problems.append(f"damaged blocks were judged {control.verdict}: the verdicts prove nothing")
        console.print(f"{transport} {policy}: control: damaged blocks are judged {control.verdict}")
        rows.append(row)
        for number, case in enumerate(cases, 1):
            status.update(f"{transport} {policy}: {number} of {len(cases)}: {case.name}")
            row = run_case(bed, case)
            rows.append(row)
            say(console, row)
    return rows


def say(console: Console, row: Row) -> None:
    """One line about a case that has ended, and its problems."""
    console.print(
        f"  {_mark(row)} {row.name} ({row.seconds:.1f} s) {row.skipped or outcome_names(row)}", highlight=False
    )
    for problem in row.problems:
        console.print(f"      [red]{problem}[/red]", highlight=False, soft_wrap=True)


def _mark(row: Row) -> str:
    if row.skipped:
        return "[yellow]skipped[/yellow]"
    return "[red]BAD    [/red]" if row.problems else "[green]good   [/green]"


def table(rows: list[Row]) -> Table:
    """One row per case and bed."""
    made = Table(title="Faults: what each case came to")
    for heading in ("transport", "policy", "case", "", "answers", "what decode counted", "s"):
        made.add_column(heading, justify="right" if heading == "s" else "left", overflow="fold")
    for row in rows:
        answers = " ".join(f"{row.num(verdict)} {verdict}" for verdict in Verdict if row.num(verdict))
        told = row.skipped or outcome_names(row)
        made.add_row(row.transport, row.policy, row.name, _mark(row), answers, told, f"{row.seconds:.1f}")
    return made


def totals(rows: list[Row]) -> Table:
    """The sums; those that must be zero are named."""
    made = Table(title="In all")
    made.add_column("")
    made.add_column("number", justify="right")
    played = [row for row in rows if not row.skipped]
    for what, number in (
        ("cases", len(played)),
        ("skipped", len(rows) - len(played)),
        ("exact answers", sum(row.num(Verdict.EXACT) for row in rows)),
        ("explicit errors", sum(row.num(Verdict.ERROR) for row in rows)),
        ("connections lost with an engine that was killed", sum(row.num(Verdict.LOST) for row in rows)),
        ("prefill aborted by UCX, as it is known to", sum(row.num_aborts for row in rows)),
    ):
        made.add_row(what, str(number))
    for what, number in (
        ("wrong answers", sum(row.num(Verdict.WRONG) for row in rows)),
        ("hangs past the deadline", sum(row.num_hangs for row in rows)),
        ("leaks", sum(row.num_leaks for row in rows)),
        ("engine deaths", sum(row.num_deaths for row in rows)),
        ("cases with any problem", sum(bool(row.problems) for row in rows)),
    ):
        made.add_row(f"{what} (must be 0)", f"[{'red' if number else 'green'}]{number}[/]")
    return made


def run_randomised(console: Console) -> bool:
    """The fast version with the shipped fakes, if it is there; whether it passed."""
    if not (REPOSITORY / RANDOMISED).exists():
        return True
    with console.status("randomised cases with the shipped fakes"):
        command = [sys.executable, "-m", "pytest", "-q", "--no-header", str(RANDOMISED)]
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    console.print(f"randomised cases with the shipped fakes: {lines[-1] if lines else done.stderr[-500:]}")
    return done.returncode == 0


def main() -> int:
    """Run what the arguments choose."""
    parser = argparse.ArgumentParser(prog="scripts/faults", description=__doc__)
    parser.add_argument("--transport", choices=list(TRANSPORTS), help="only NIXL over this")
    parser.add_argument("--policy", choices=POLICIES, help="only this kv_load_failure_policy")
    parser.add_argument("--only", metavar="NAME", nargs="+", default=[""], help="only cases whose name contains a NAME")
    parser.add_argument("--list", action="store_true", help="print the cases and what happens in them, and end")
    options = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 170)
    if options.list:
        for transport, policy, cases in chosen(options):
            for case in cases:
                console.print(f"{transport} {policy} {case.name}: {case.about}", highlight=False, markup=False)
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    rows: list[Row] = []
    try:
        for transport, policy, cases in chosen(options):
            rows += run_bed(console, transport, policy, cases)
    except StackError as error:
        console.print(f"[red]{error}[/red]", highlight=False)
        return 1
    except KeyboardInterrupt:
        console.print("Stopped.")
        return 130
    finally:
        if rows:
            console.print(table(rows), totals(rows))
            console.print("The engines' logs are in logs/faults.")
    passed = options.only != [""] or run_randomised(console)
    return 0 if rows and passed and not any(row.problems for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
