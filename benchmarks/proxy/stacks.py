"""The proxies that are compared, and the mock engines behind them, as processes on cores of their own."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec

from benchmarks.proxy.client import Load, Measured
from benchmarks.report import REPOSITORY
from tests.stack.engines import ServerProcess, free_port, running

LOGS = REPOSITORY / "logs" / "bench" / "proxy"

OURS, ROUTER, FASTAPI = "pd-proxy", "vllm-router", "FastAPI + httpx"
BARE_AIOHTTP, BARE_PROTOCOLS = "aiohttp, bare", "protocols, bare"

_START_SECONDS = 60.0
_CLIENT_SECONDS = 120.0
_PYTHON = sys.executable

Command = Callable[[int, str, str], list[str]]
"""From a port and the addresses of both engines to what starts a proxy."""


def _ours(port: int, prefill: str, decode: str) -> list[str]:
    return [_PYTHON, "-m", "proxy", "--port", str(port), "--prefill", prefill, "--decode", decode]


def _vllm_router(port: int, prefill: str, decode: str) -> list[str]:
    # Its cheapest policy; the default one keeps a tree of prompts.
    command = [str(Path(_PYTHON).parent / "vllm-router"), "--port", str(port), "--prometheus-port", str(free_port())]
    return [*command, "--policy", "round_robin", "--vllm-pd-disaggregation", "--prefill", prefill, "--decode", decode]


def _module(name: str) -> Command:
    def command(port: int, prefill: str, decode: str) -> list[str]:
        module = f"benchmarks.proxy.{name}"
        return [_PYTHON, "-m", module, "--port", str(port), "--prefill", prefill, "--decode", decode]

    return command


COMMANDS: Mapping[str, Command] = {
    OURS: _ours,
    ROUTER: _vllm_router,
    FASTAPI: _module("rival_fastapi"),
    BARE_AIOHTTP: _module("bare_aiohttp"),
    BARE_PROTOCOLS: _module("bare_protocols"),
}


class Bed(NamedTuple):
    """What runs: two mock engines, and proxies by their names."""

    prefill: ServerProcess
    decode: ServerProcess
    proxies: Mapping[str, ServerProcess]

    def measure(self, name: str, load: Load) -> Measured:
        """Put a load on a proxy. Without a name, the client asks the engines itself."""
        if name:
            proxy = self.proxies[name]
            load = msgspec.structs.replace(load, url=proxy.url, pid=proxy.pid)
        else:
            load = msgspec.structs.replace(load, url=self.prefill.url, decode_url=self.decode.url)
        command = pinned(LOAD_CORE, [_PYTHON, "-m", "benchmarks.proxy.client", msgspec.json.encode(load).decode()])
        done = subprocess.run(command, cwd=REPOSITORY, check=True, stdout=subprocess.PIPE, timeout=_CLIENT_SECONDS)
        return msgspec.json.decode(done.stdout, type=Measured)


@contextmanager
def running_bed(names: Sequence[str], event_seconds: float) -> Iterator[Bed]:
    """Engines and proxies for as long as the context lasts. Raises StackError if one does not start."""
    engines = [_engine(role, event_seconds) for role in ("prefill", "decode")]
    with running(*engines):
        for engine in engines:
            engine.wait_ready(seconds=_START_SECONDS)
        proxies = {name: _proxy(name, *(engine.url for engine in engines)) for name in names}
        with running(*proxies.values()):
            for proxy in proxies.values():
                proxy.wait_ready(seconds=_START_SECONDS)
            yield Bed(engines[0], engines[1], proxies)


def _engine(role: str, event_seconds: float) -> ServerProcess:
    port = free_port()
    command = [_PYTHON, "-m", "benchmarks.proxy.engine", "--port", str(port), "--event-seconds", str(event_seconds)]
    return ServerProcess(role, pinned(LOAD_CORE, command), port, LOGS)


def _proxy(name: str, prefill: str, decode: str) -> ServerProcess:
    port = free_port()
    return ServerProcess(name.replace(" ", "_"), pinned(PROXY_CORE, COMMANDS[name](port, prefill, decode)), port, LOGS)


_CORES = sorted(os.sched_getaffinity(0))
PROXY_CORE, LOAD_CORE = _CORES[-1], _CORES[0]
"""A proxy has one core, and what is needed to measure it another."""


def pinned(core: int, command: Sequence[str]) -> list[str]:
    """A command on one core; what it measures of threads or children is there as well."""
    return ["taskset", "--cpu-list", str(core), *command]
