"""Micro-benchmarks in processes of their own, by pyperf, which is imported only where it is used: it is an extra."""

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from benchmarks.report import REPOSITORY


class Seconds(NamedTuple):
    """CPU time of one call, on the one thread that makes it."""

    least: float
    median: float


def measure(module: str) -> dict[str, Seconds]:
    """Run a module whose main is ``serve``; every benchmark by its name, in seconds a call."""
    import pyperf

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        command = [sys.executable, "-m", module, "--quiet", "--output", str(out)]
        subprocess.run(command, cwd=REPOSITORY, check=True, stdout=subprocess.DEVNULL)
        found = pyperf.BenchmarkSuite.load(str(out)).get_benchmarks()
    return {each.get_name(): Seconds(min(each.get_values()), statistics.median(each.get_values())) for each in found}


def serve(functions: Mapping[str, Callable[[], object]]) -> None:
    """The other end of ``measure``: pyperf starts the module anew for every few values it takes.

    CPU time, not wall time: what else runs on the machine disturbs it less.
    """
    import pyperf

    runner = pyperf.Runner(processes=3, values=3, warmups=1, min_time=0.02)
    for name, function in functions.items():
        runner.bench_time_func(name, _cpu_time, function)


def _cpu_time(loops: int, function: Callable[[], object]) -> float:
    start = time.thread_time()
    for _ in range(loops):
        function()
    return time.thread_time() - start
