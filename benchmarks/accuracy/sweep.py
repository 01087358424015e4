"""lm-eval through prefill, decode and proxy, sample by sample against a single engine: ``scripts/accuracy_sweep``.

The exit status is 0 only when every answer is the single engine's, decode loaded exactly the tokens that the prompts
say, and damage shows in the positive controls. Without options all configurations are run, and no controls.
"""

import argparse
import contextlib
import json
import shutil
import signal
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import requests
from rich.console import Console
from rich.status import Status
from rich.table import Table

from benchmarks.accuracy.configurations import (
    CONFIGURATIONS,
    CONTROL_TASKS,
    CONTROLS,
    TASKS,
    Configuration,
    Machine,
    damage_variables,
    running_single,
    running_stack,
)
from benchmarks.accuracy.differ import explain_differences
from benchmarks.accuracy.verdict import TaskRun, Verdict, judge, judge_control, largest_logprob_difference
from tests.stack.engines import REPOSITORY, StackError

MODEL = REPOSITORY / "tests" / "models" / "tiny_hybrid"
LOGS = REPOSITORY / "logs" / "accuracy"
DIFFERENCES = "differences.json"
WIDTH = 150


@dataclass(frozen=True)
class Options:
    """What the command line chose."""

    model: Path
    tasks: tuple[str, ...]
    limit: int | None
    engine_arguments: tuple[str, ...]
    logs: Path
    is_one_single: bool
    is_one_process: bool


class Sweep:
    """Runs configurations one by one; the single engine's answers are asked for once for the same arguments."""

    def __init__(self, options: Options, console: Console) -> None:
        self._options = options
        self._console = console
        with console.status("loading lm-eval"):
            from benchmarks.accuracy.evaluation import Evaluator  # takes seconds; --list need not wait

            self._evaluator = Evaluator(options.model, options.logs / "lm-eval.log")
        self._single: dict[tuple[Configuration, str], TaskRun] = {}

    def machine(self, name: str) -> Machine:
        """Engines whose logs are in a folder of that name."""
        chosen = self._options
        return Machine(chosen.model, chosen.logs / name, chosen.engine_arguments, chosen.is_one_process)

    def keep(self, records: Sequence[Mapping[str, object]]) -> None:
        """Write the rows so far to a file."""
        (self._options.logs / "table.json").write_text(json.dumps(records, indent=1) + "\n")

    def run(self, name: str, configuration: Configuration) -> list[Verdict]:
        """One configuration: all tasks, single engine first. Raises StackError."""
        tasks = self._options.tasks
        verdicts = []
        with (
            self._console.status(f"{name}: starting") as status,
            running_stack(self.machine(name), configuration) as stack,
        ):
            self._ask_single(name, configuration, tasks, status)
            status.update(f"{name}: starting prefill, decode and proxy")
            stack.wait_ready()
            for task in tasks:
                status.update(f"{name}: {task} through prefill and decode")
                before = stack.counters()
                run = self._evaluator.run(stack.proxy.url, task, configuration.concurrency, self._options.limit)
                moved = stack.gained(before, run.num_transferable)
                verdicts.append(judge(self._single[self._oracle(configuration), task], run, moved))
        keep_differences(self._options.logs / name, name, verdicts)
        return verdicts

    def _oracle(self, configuration: Configuration) -> Configuration:
        """The configuration that the single engine has: one with its arguments and load, whatever else it has."""
        chosen = CONFIGURATIONS["base"] if self._options.is_one_single else configuration
        return Configuration("single engine", chosen.arguments, concurrency=chosen.concurrency)

    def _ask_single(self, name: str, configuration: Configuration, tasks: Iterable[str], status: Status) -> None:
        """Start a single engine for what it has not been asked yet, while the other servers start."""
        oracle = self._oracle(configuration)
        missing = [task for task in tasks if (oracle, task) not in self._single]
        if not missing:
            return
        status.update(f"{name}: starting the single engine")
        with running_single(self.machine(name), oracle) as engine:
            for task in missing:
                status.update(f"{name}: {task} on the single engine")
                run = self._evaluator.run(engine.url, task, oracle.concurrency, self._options.limit)
                self._single[oracle, task] = run

    def run_control(self, name: str) -> list[tuple[TaskRun, TaskRun, bool, tuple[str, ...]]]:
        """One positive control: single engine, damaged run, whether the task needs the group, faults."""
        control, configuration = CONTROLS[name], CONFIGURATIONS["base"]
        rows = []
        with (
            self._console.status(f"{name}: starting") as status,
            running_stack(self.machine(f"control-{name}"), configuration, damage_variables(control)) as stack,
        ):
            self._ask_single(f"control-{name}", configuration, CONTROL_TASKS, status)
            status.update(f"{name}: {control.about}")
            stack.wait_ready()
            for task in CONTROL_TASKS:
                single = self._single[self._oracle(configuration), task]
                damaged = self._evaluator.run(stack.proxy.url, task, configuration.concurrency, self._options.limit)
                needs = task in control.needed_by
                rows.append((single, damaged, needs, judge_control(single, damaged, needs)))
        return rows


def keep_differences(folder: Path, name: str, verdicts: Sequence[Verdict]) -> None:
    """Write the prompts that were answered differently to a file that the differ reads."""
    prompts = [
        {"task": verdict.task, "sample": number, "prompt": sample.prompts[0]}
        for verdict in verdicts
        if verdict.single.is_generation
        for number in verdict.different
        if (sample := verdict.single.samples.get(number)) is not None
    ]
    if prompts:
        content = {"configuration": name, "prompts": prompts}
        (folder / DIFFERENCES).write_text(json.dumps(content, indent=1))


def as_record(name: str, verdict: Verdict) -> dict[str, object]:
    """A row of the table for programs."""
    return {
        "configuration": name,
        "task": verdict.task,
        "single": dict(verdict.single.scores),
        "prefill_decode": dict(verdict.moved_run.scores),
        "samples": len(verdict.single.samples),
        "equal": verdict.num_equal,
        "tokens_loaded": verdict.moved.num_tokens,
        "tokens_expected": verdict.num_expected,
        "tokens_cached": verdict.moved.num_cached,
        "bytes_moved": verdict.moved.num_bytes,
        "faults": list(verdict.faults),
    }


def make_table() -> Table:
    """The sweep's one table, empty."""
    table = Table(title="Accuracy through prefill and decode, against a single engine")
    table.add_column("configuration")
    table.add_column("task")
    for heading in (
        "single\nengine",
        "prefill/\ndecode",
        "differ-\nence",
        "samples\nequal",
        "max |Δ\nlogprob|",
        "tokens\nloaded",
        "the prompts\nsay",
        "in decode's\nown cache",
        "MiB\nmoved",
        "",
    ):
        table.add_column(heading, justify="right")
    return table


def add_rows(table: Table, name: str, verdicts: Sequence[Verdict]) -> None:
    """One row for each task of a configuration."""
    for verdict in verdicts:
        single, moved = verdict.single, verdict.moved_run
        logprobs = "" if single.is_generation else f"{largest_logprob_difference(single, moved):.4f}"
        table.add_row(
            name,
            single.task,
            f"{single.score:.3f}",
            f"{moved.score:.3f}",
            f"{moved.score - single.score:+.3f}",
            f"{verdict.num_equal} of {len(single.samples)}",
            logprobs,
            f"{verdict.moved.num_tokens:,}",
            f"{verdict.num_expected:,}",
            f"{verdict.moved.num_cached:,}",
            f"{verdict.moved.num_bytes / 2**20:.1f}",
            "[red]INVALID[/red]" if verdict.faults else "valid",
        )
    table.add_section()


def run_all(sweep: Sweep, names: Sequence[str], console: Console) -> list[str]:
    """Run configurations and print the table, of those that were run if one cannot be; returns what is wrong."""
    table, faults, records = make_table(), [], []
    try:
        for name in names:
            begin = time.monotonic()
            verdicts = sweep.run(name, CONFIGURATIONS[name])
            found = [f"{name} {verdict.task}: {fault}" for verdict in verdicts for fault in verdict.faults]
            faults += found
            console.print(f"{name}: {'INVALID' if found else 'valid'}, {time.monotonic() - begin:.0f} s")
            add_rows(table, name, verdicts)
            records += [as_record(name, verdict) for verdict in verdicts]
            sweep.keep(records)
    finally:
        console.print(table)
    return faults


def run_controls(sweep: Sweep, names: Sequence[str], console: Console) -> list[str]:
    """Run positive controls and print their table; returns what is wrong."""
    table = Table("control", "damage", "task", "needs it", "single engine", "damaged", "", title="Positive controls")
    faults = []
    try:
        for name in names:
            rows = sweep.run_control(name)
            console.print(f"{name}: {'INVALID' if any(found for *_, found in rows) else 'seen'}")
            for single, damaged, needs, found in rows:
                faults += [f"control {name}: {fault}" for fault in found]
                verdict = "[red]INVALID[/red]" if found else "seen" if needs else "unharmed"
                row = (f"{single.score:.3f}", f"{damaged.score:.3f}", verdict)
                table.add_row(name, CONTROLS[name].about, single.task, "yes" if needs else "no", *row)
            table.add_section()
    finally:
        console.print(table)
    return faults


def explain_all(options: Options, console: Console) -> None:
    """For each configuration with other answers, name the blocks whose KV differs from the single engine's."""
    for path in sorted(options.logs.glob(f"*/{DIFFERENCES}")):
        console.print(f"{path.parent.name}: which blocks differ (again: python -m benchmarks.accuracy.differ {path})")
        try:
            explain_differences(path, options.model, options.engine_arguments, path.parent / "differ", console)
        except (StackError, requests.RequestException) as error:
            console.print(f"the differ cannot tell: {error}", style="red", highlight=False, markup=False)


def list_configurations(console: Console) -> None:
    """Print all names with what they are."""
    for name, configuration in CONFIGURATIONS.items():
        console.print(f"  {name:16} {configuration.about}", highlight=False)
    for name, control in CONTROLS.items():
        console.print(f"  {name:16} control: {control.about}", highlight=False)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="scripts/accuracy_sweep", description=__doc__)
    parser.add_argument(
        "--configuration",
        action="append",
        choices=CONFIGURATIONS,
        metavar="NAME",
        help="only this one; may be repeated",
    )
    parser.add_argument("--list", action="store_true", help="list configurations and controls")
    parser.add_argument("--controls", action="store_true", help="the positive controls too, after the configurations")
    parser.add_argument(
        "--control", action="append", choices=CONTROLS, metavar="NAME", help="this positive control; may be repeated"
    )
    parser.add_argument("--model", type=Path, default=MODEL, help="folder of a model; default: the committed one")
    parser.add_argument("--tasks", default=",".join(TASKS), help="lm-eval tasks, with commas between")
    parser.add_argument("--limit", type=int, help="only so many documents of each task")
    parser.add_argument(
        "--engine-argument", action="append", default=[], metavar="ARG", help="one more word for every vllm serve"
    )
    parser.add_argument(
        "--one-single-engine",
        action="store_true",
        help="hold every configuration to the answers of one single engine with base's arguments: faster",
    )
    parser.add_argument(
        "--one-process", action="store_true", help="every engine is one process instead of three: starts faster"
    )
    parser.add_argument("--logs", type=Path, default=LOGS, help="folder for logs and results; emptied first")
    return parser.parse_args(arguments)


def main() -> int:
    """Run what was chosen and print the tables."""
    chosen = parse()
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    if chosen.list:
        list_configurations(console)
        return 0
    options = Options(
        chosen.model.resolve(),
        tuple(chosen.tasks.split(",")),
        chosen.limit,
        tuple(chosen.engine_argument),
        chosen.logs.resolve(),
        chosen.one_single_engine,
        chosen.one_process,
    )
    controls = list(CONTROLS) if chosen.controls else chosen.control or []
    names = chosen.configuration or ([] if chosen.control else list(CONFIGURATIONS))
    shutil.rmtree(options.logs, ignore_errors=True)
    options.logs.mkdir(parents=True)
    faults: list[str] = []
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with contextlib.chdir(REPOSITORY):
            sweep = Sweep(options, console)
            if names:
                faults += run_all(sweep, names, console)
            if controls:
                faults += run_controls(sweep, controls, console)
            explain_all(options, console)
    except StackError as error:
        faults.append(str(error))
    except KeyboardInterrupt:
        console.print(f"Stopped. The logs are in {options.logs}.")
        return 130
    for fault in faults:
        console.print(fault, style="red", highlight=False, markup=False)
    console.print(
        "INVALID" if faults else "Every answer is the single engine's; every token was loaded as it had to be."
    )
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
