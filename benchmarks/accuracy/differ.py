"""Explains a difference: at which position, group and block decode's KV is not the single engine's.

    python -m benchmarks.accuracy.differ logs/accuracy/NAME/differences.json

It takes the prompts that a sweep has found to be answered differently, asks them again one at a time through prefill
and decode, and lets decode write down a fingerprint of every block that it has loaded. A single engine computes the
same prompts, and is asked for the fingerprints of the blocks that hold them. ``--control NAME`` shows that it finds
what there is to find: decode damages its blocks as in that positive control, with prompts of the control's task.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import requests
from rich.console import Console

from benchmarks.accuracy.configurations import (
    CONFIGURATIONS,
    CONTROLS,
    Configuration,
    Machine,
    damage_variables,
    fingerprint_variables,
    running_stack,
    running_watched_single,
)
from benchmarks.accuracy.fingerprints import Held, Loaded, compare
from benchmarks.accuracy.tasks import documents
from pd_transfer.core.params import parse_grant
from tests.stack.engines import REPOSITORY, Engine, StackError, complete
from tests.stack.exactness import hand_off

LOGS = REPOSITORY / "logs" / "accuracy-differ"
MODEL = REPOSITORY / "tests" / "models" / "tiny_hybrid"
NUM_PROMPTS = 4
NUM_DECODED = 48


class Differ:
    """Asks the same prompts on both sides."""

    def __init__(self, machine: Machine, configuration: Configuration, prompts: Sequence[str]) -> None:
        self._machine = machine
        self._configuration = configuration
        self._prompts = prompts

    def loaded(self, watch: Mapping[str, str]) -> list[Loaded]:
        """What prefill and decode answer, and what decode has loaded for it. Raises StackError."""
        log = self._machine.logs / "fingerprints.jsonl"
        found = []
        with running_stack(self._machine, self._configuration, {**watch, **fingerprint_variables(log)}) as stack:
            stack.wait_ready()
            for prompt in self._prompts:
                num_before = len(_lines(log))
                text, _ = _ask(stack.proxy.url, prompt)
                lines = _lines(log)[num_before:]
                if len(lines) != 1:
                    raise StackError(f"decode loaded {len(lines)} times for one prompt: there is nothing to compare")
                found.append(Loaded(text, json.loads(lines[0])))
        return found

    def held(self) -> list[Held]:
        """What a single engine answers, and the blocks that it has computed. Raises StackError.

        It keeps a prompt's blocks under a lease, as for a hand-off, and the grant says which they are.
        """
        found = []
        with running_watched_single(self._machine, self._configuration) as engine:
            for number, prompt in enumerate(self._prompts):
                tables = block_tables(hand_off(engine.url, prompt, cache_salt=f"differ {number}"))
                prints = _fingerprints(engine, [list(table.values()) for table in tables])
                groups = [dict(zip(table, of, strict=True)) for table, of in zip(tables, prints, strict=True)]
                text, num_tokens = _ask(engine.url, prompt)
                found.append(Held(text, num_tokens, groups))
        return found


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def _ask(url: str, prompt: str) -> tuple[str, int]:
    """The greedy answer, and the prompt's number of tokens."""
    reply = complete(url, prompt, max_tokens=NUM_DECODED)
    return str(reply["choices"][0]["text"]), int(reply["usage"]["prompt_tokens"])


def block_tables(params: Mapping[str, Any]) -> list[dict[int, int]]:
    """For each group of a hand-off: position in the block table -> block id. Raises StackError."""
    sealed = parse_grant(params["grant"])
    if isinstance(sealed, str):
        raise StackError(sealed)
    return [
        {run.index + offset: run.block_id + offset for run in runs for offset in range(run.count)}
        for runs in sealed.claimed.groups
    ]


def _fingerprints(engine: Engine, block_ids: list[list[int]]) -> list[list[str]]:
    body = {"method": "block_fingerprints", "args": [json.dumps(block_ids)]}
    reply = requests.post(engine.url + "/collective_rpc", json=body, timeout=60)
    reply.raise_for_status()
    (answer,) = reply.json()["results"]
    return list(answer)


def explain(differ: Differ, watch: Mapping[str, str], block_size: int, console: Console) -> int:
    """Print what differs; the exit status is 1 if anything does."""
    with console.status("prefill and decode answer, and decode names the blocks that it loads"):
        loaded = differ.loaded(watch)
    with console.status("the single engine answers, and names the blocks that it has computed"):
        held = differ.held()
    found = compare(loaded, held, block_size)
    for number, (ours, theirs) in enumerate(zip(loaded, held, strict=True)):
        verdict = "the same answer" if ours.text == theirs.text else "another answer"
        console.print(f"prompt {number}: {theirs.num_tokens} tokens, {verdict}")
    for deviation in found.deviations:
        console.print(deviation.describe(block_size), highlight=False)
    console.print(f"{len(found.deviations)} of {found.num_compared} blocks differ from the single engine's.")
    if not found.deviations:
        console.print("So the answers' difference, if there is one now, does not come from the KV that was loaded.")
    return 1 if found.deviations else 0


def block_size_of(configuration: Configuration) -> int:
    """What the configuration's arguments say."""
    return int(configuration.arguments[configuration.arguments.index("--block-size") + 1])


def explain_differences(
    differences: Path, model: Path, engine_arguments: Sequence[str], logs: Path, console: Console
) -> int:
    """Explain what a sweep has written to a file; the exit status is 1 if blocks differ. Raises StackError."""
    content = json.loads(differences.read_text())
    configuration = CONFIGURATIONS[content["configuration"]]
    prompts = [entry["prompt"] for entry in content["prompts"]]
    differ = Differ(Machine(model, logs, tuple(engine_arguments)), configuration, prompts[:NUM_PROMPTS])
    return explain(differ, {}, block_size_of(configuration), console)


def explain_control(name: str, model: Path, engine_arguments: Sequence[str], logs: Path, console: Console) -> int:
    """Show that the differ finds the damage of a positive control. As ``explain_differences``."""
    control, base = CONTROLS[name], CONFIGURATIONS["base"]
    prompts = [document["prompt"] for document in documents(control.needed_by[0].removeprefix("pd_"))]
    differ = Differ(Machine(model, logs, tuple(engine_arguments)), base, prompts[:NUM_PROMPTS])
    return explain(differ, damage_variables(control), block_size_of(base), console)


def main() -> int:
    """Explain what a sweep found, or a control."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("differences", type=Path, nargs="?", help="what a sweep wrote")
    parser.add_argument("--control", choices=CONTROLS)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--engine-argument", action="append", default=[], metavar="ARG")
    options = parser.parse_args()
    if (options.differences is None) == (options.control is None):
        parser.error("name either a file of differences or a control")
    console = Console(width=None if sys.stdout.isatty() else 150)
    shutil.rmtree(LOGS, ignore_errors=True)
    common = options.model.resolve(), options.engine_argument, LOGS, console
    try:
        if options.control is not None:
            return explain_control(options.control, *common)
        return explain_differences(options.differences, *common)
    except StackError as error:
        console.print(f"[red]{error}[/red]", highlight=False)
        return 2


if __name__ == "__main__":
    sys.exit(main())
