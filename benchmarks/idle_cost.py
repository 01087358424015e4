"""What an idle pair of engines costs, in percent of a core: without a connector, with ours, and with leases waiting.

Run it on a quiet machine: ``scripts/bench idle``. The exit status is 0 when our engines cost at
most 1.5 % of a core more than an engine without a connector, in every situation. ``--connector NixlConnector`` measures
vLLM's built-in connector the same way, for comparison; it is not held to the limit.
"""

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

from benchmarks.report import RESULTS, Cell, Table, new_report, show, write
from tests.stack.engines import (
    DECODE_ROLE,
    PREFILL_ROLE,
    REPOSITORY,
    Engine,
    EngineSettings,
    running,
    transfer_config,
)
from tests.stack.exactness import hand_off, random_prompt

MODEL = REPOSITORY / "tests" / "models" / "tiny_hybrid"
LOGS = REPOSITORY / "logs" / "idle_cost"
LIMIT_PERCENT = 1.5
SETTLE_SECONDS = 5.0
"""After a step, vLLM's worker spins for up to a second."""
NUM_LEASES = 100
PATIENT = {"lease_unclaimed_seconds": 3600.0, "lease_renewal_seconds": 3600.0, "lease_max_seconds": 3600.0}


def cpu_seconds(engine: Engine) -> float:
    """CPU time used so far by an engine and its children."""
    root = psutil.Process(engine.pid)
    times = [process.cpu_times() for process in (root, *root.children(recursive=True))]
    return sum(t.user + t.system for t in times)


def measure(engines: Sequence[Engine], seconds: float) -> list[float]:
    """Percent of a core that each engine uses over a while."""
    time.sleep(SETTLE_SECONDS)
    begin, before = time.monotonic(), [cpu_seconds(engine) for engine in engines]
    time.sleep(seconds)
    elapsed = time.monotonic() - begin
    return [100.0 * (cpu_seconds(engine) - start) / elapsed for engine, start in zip(engines, before, strict=True)]


def connector_config(name: str, role: str) -> Mapping[str, Any]:
    """Ours, patient enough for leases to wait, or the built-in one."""
    if name == "PdConnector":
        return transfer_config(role, PATIENT)
    return {"kv_connector": name, "kv_role": role, "kv_connector_extra_config": {"kv_lease_duration": 3600}}


def start(name: str, cores: str, config: Mapping[str, Any] | None) -> Engine:
    """One engine; its side channel takes any free port."""
    settings = EngineSettings(MODEL, cores=cores, kv_transfer_config=config, arguments=("--block-size", "32"))
    return Engine(name, settings, LOGS)


def measure_baseline(seconds: float) -> float:
    """An engine without a connector, after one request."""
    with running(engine := start("baseline", "0", None)):
        engine.wait_ready()
        engine.step()
        return measure([engine], seconds)[0]


def measure_pair(connector: str, seconds: float) -> dict[str, list[float]]:
    """Prefill and decode, idle after a hand-off, and with leases waiting that nobody claims."""
    prefill = start("prefill", "0", connector_config(connector, PREFILL_ROLE))
    decode = start("decode", "1", connector_config(connector, DECODE_ROLE))
    with running(prefill, decode):
        prefill.wait_ready()
        decode.wait_ready()
        prompt = random_prompt(100)
        decode.complete(prompt, max_tokens=2, kv_transfer_params=hand_off(prefill.url, prompt))
        found = {"idle": measure([prefill, decode], seconds)}
        for seed in range(NUM_LEASES):
            hand_off(prefill.url, random_prompt(40, seed=seed + 1))
        if connector == "PdConnector":
            prefill.step()
            held = prefill.metrics()["pd_transfer:held/leases"]
            if held != NUM_LEASES:
                raise SystemExit(f"{held:.0f} leases wait, not {NUM_LEASES}: the figure would mean nothing")
        found[f"{NUM_LEASES} leases waiting"] = measure([prefill, decode], seconds)
        return found


def main(arguments: Sequence[str]) -> int:
    """Measure, and leave a report."""
    parser = argparse.ArgumentParser(prog="scripts/bench idle", description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="length of each measurement")
    parser.add_argument("--connector", default="PdConnector", choices=("PdConnector", "NixlConnector"))
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for idle.json and idle.md")
    options = parser.parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else 100)
    with console.status("an engine without a connector"):
        baseline = measure_baseline(options.seconds)
    with console.status(f"two engines with {options.connector}"):
        found = measure_pair(options.connector, options.seconds)
    rows: list[tuple[Cell, ...]] = [("no connector", baseline, "", "")]
    rows += [(situation, *percents, max(percents) - baseline) for situation, percents in found.items()]
    worst = max(0.0, *(max(percents) - baseline for percents in found.values()))
    columns = ("situation", "prefill", "decode", "most above baseline")
    table = Table(f"{options.connector}, idle: percent of a core", columns, tuple(rows))
    note = f"Limit of ours: {LIMIT_PERCENT} % above an engine without a connector; the worst here is {worst:.2f} %."
    report = new_report("idle", arguments, [table], [note])
    show(report, console)
    write(report, options.out)
    return 0 if worst <= LIMIT_PERCENT or options.connector != "PdConnector" else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
