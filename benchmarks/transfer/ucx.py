"""Reference lines by UCX's own ``ucx_perftest``: what UCX moves without NIXL and Python. Optional.

The program comes with the wheel ``libucx-cu12``, or is found in PATH.
"""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from benchmarks.transfer.bed import Cores

_WHEEL, _PROGRAM = "libucx-cu12", "ucx_perftest"
_ATTEMPTS, _ATTEMPT_SECONDS = 20, 0.25


class Program(NamedTuple):
    """Where it is, and in which environment it finds its libraries."""

    path: Path
    environment: dict[str, str]
    version: str


class Line(NamedTuple):
    """One test of one size: throughput over the whole test. A write's latency says nothing: it is not waited for."""

    test: str
    way: str
    num_bytes: int
    gib_per_second: float


def find_program() -> Program | None:
    """The wheel's program, or else the one in PATH."""
    try:
        wheel = metadata.distribution(_WHEEL)
    except metadata.PackageNotFoundError:
        found = shutil.which(_PROGRAM)
        return Program(Path(found), dict(os.environ), "found in PATH") if found else None
    path = Path(str(wheel.locate_file(f"libucx/bin/{_PROGRAM}")))
    path.chmod(path.stat().st_mode | 0o111)
    environment = os.environ | {"LD_LIBRARY_PATH": str(path.parent.parent / "lib")}
    return Program(path, environment, f"{_WHEEL} {wheel.version}")


def measure(program: Program, cores: Cores, sizes: Sequence[int], num_reads: int) -> list[Line]:
    """Reads over CMA. Over TCP writes: the program's server sleeps between the steps of an emulated read."""
    lines = []
    for num_bytes in sizes:
        lines.append(_run(program, cores, "ucp_get", "", num_bytes, num_reads))
        lines.append(_run(program, cores, "ucp_put_bw", "tcp", num_bytes, num_reads))
    return lines


def _run(program: Program, cores: Cores, test: str, tls: str, num_bytes: int, num_reads: int) -> Line:
    environment = program.environment | ({"UCX_TLS": tls} if tls else {})
    port = str(_free_port())
    base = [str(program.path), "-p", port]
    # -c would pin them too, but not the threads that UCX starts before.
    server = subprocess.Popen(
        ["taskset", "-c", str(cores.serving), *base],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    asked = ["-t", test, "-s", str(num_bytes), "-n", str(num_reads), "-w", "3", "-f", "-v"]
    try:
        output = _ask(["taskset", "-c", str(cores.reading), *base, "127.0.0.1", *asked], environment)
    finally:
        server.kill()
        server.wait()
    return parse(output, test, tls or "cma", num_bytes)


def _ask(command: Sequence[str], environment: dict[str, str]) -> str:
    """The client's output, once the server listens. RuntimeError when it never does."""
    for _ in range(_ATTEMPTS):
        time.sleep(_ATTEMPT_SECONDS)
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
        if done.returncode == 0:
            return done.stdout
    raise RuntimeError(f"{_PROGRAM}: {done.stderr.strip()}")


def parse(output: str, test: str, way: str, num_bytes: int) -> Line:
    """The program's last line of figures, whose bandwidths are in MiB/s."""
    lines = [line.split(",") for line in output.splitlines() if "," in line]
    figures = dict(zip(lines[-2], map(float, lines[-1]), strict=True))
    return Line(test, way, num_bytes, figures["overall_bw"] / 1024)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
