"""A process that serves memory over NIXL, for tests that kill it, stop it, or watch it.

``ServingProcess`` is the test's side. The other side prints its RemoteMemory, then obeys the lines on its stdin:
``fill BYTE`` writes the region once; ``rewrite`` again and again, as a producer does that reuses its blocks, until
``rest``.
"""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import numpy as np

from pd_transfer.core.layout import RemoteMemory
from pd_transfer.transport.nixl import NixlServeTransport
from tests.contracts.transport_rig import memory_range

GENERATION, STABLE = 0, 1
"""Lease words: what the blocks are about to hold, and what they wholly held when last it was written."""


class Rewriter:
    """Fills the region with the low byte of a growing generation; the word changes before the first byte does."""

    def __init__(self, region: np.ndarray, words: np.ndarray):
        self._region, self._words = region, words
        self._fence = threading.Lock()
        self._rest = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def start(self) -> None:
        self._overwrite()
        self._thread.start()

    def rest(self) -> None:
        self._rest.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._rest.wait(0.004):
            self._overwrite()

    def _overwrite(self) -> None:
        generation = int(self._words[GENERATION]) + 1
        self._words[GENERATION] = generation
        with self._fence:
            self._region[:] = generation & 0xFF
        with self._fence:
            self._words[STABLE] = generation


def serve(region_bytes: int, engine_config: str) -> None:
    region, words = np.zeros(region_bytes, dtype=np.uint8), np.zeros(16, dtype=np.uint64)
    params = {"engine_config": engine_config} if engine_config else {}
    transport = NixlServeTransport("serve", memory_range(region), memory_range(words), backend_params=params)
    print(msgspec.json.encode(transport.remote_memory).decode(), flush=True)
    rewriter = Rewriter(region, words)
    for line in sys.stdin:
        match line.split():
            case ["fill", value]:
                region[:] = int(value)
            case ["rewrite"]:
                rewriter = Rewriter(region, words)
                rewriter.start()
            case ["rest"]:
                rewriter.rest()
        print("ok", flush=True)
    transport.close()


class ServingProcess:
    """Owns the process: leaving the ``with`` block ends it, whatever state it is in."""

    def __init__(self, region_bytes: int, engine_config: str = ""):
        self.engine_config = engine_config
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.contracts.transport_serving_process", str(region_bytes), engine_config],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        lines = iter(self._process.stdout.readline, "")
        # NIXL's own log goes to stdout, too.
        description = next(line for line in lines if line.startswith("{"))
        self.remote_memory = msgspec.json.decode(description, type=RemoteMemory)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()
        self._process.stdin.close()
        self._process.stdout.close()

    def command(self, line: str) -> None:
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def answer(self) -> None:
        assert self._process.stdout.readline() == "ok\n"

    def stop(self) -> None:
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    serve(int(sys.argv[1]), sys.argv[2])
