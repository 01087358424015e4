"""Starts real ``vllm serve`` engines and the proxy, and stops them by the ids that it started.

For the demo, the end-to-end tests and the benchmarks. Every process writes to a log of its own in one folder.
"""

import contextlib
import ctypes
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import requests

REPOSITORY = Path(__file__).resolve().parents[2]
START_SECONDS = 300.0
STOP_SECONDS = 20.0

PREFILL_ROLE, DECODE_ROLE, BOTH_ROLES = "kv_producer", "kv_consumer", "kv_both"


class StackError(Exception):
    """A process did not start or answer; the message ends with the tail of its log."""


_PORTS = range(12000, 30000)
"""Below the ports that the kernel gives to outgoing connections, so that none of those takes one first."""


def free_port() -> int:
    """A port that nobody listens on at this moment."""
    while True:
        port = random.choice(_PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def _die_with_parent() -> None:
    """Ask the kernel to end this process when the one that started it ends, however that happens."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1


def transfer_config(role: str, extra: Mapping[str, Any] | None = None, policy: str = "recompute") -> dict[str, Any]:
    """What ``--kv-transfer-config`` takes."""
    return {
        "kv_connector": "PdConnector",
        "kv_connector_module_path": "pd_transfer.vllm.connector",
        "kv_role": role,
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": dict(extra or {}),
    }


def _own_environment() -> dict[str, str]:
    """The caller's environment without its settings for vLLM: what an engine logs and does is decided here alone."""
    return {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}


class ServerProcess:
    """One process that serves HTTP: started at construction, ready after ``wait_ready``."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        port: int,
        logs: Path,
        environment: Mapping[str, str] | None = None,
        host: str = "127.0.0.1",
    ) -> None:
        self.name = name
        self.port = port
        self.url = f"http://{host}:{port}"
        self.log_path = logs / f"{name}.log"
        logs.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("w") as log:
            self._process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**_own_environment(), **(environment or {})},
                cwd=REPOSITORY,
                # A group to signal, but no session of its own: Linux schedules sessions against each other (autogroup),
                # and 6.18 can starve one for a minute while another spins on the same core.
                process_group=0,
                preexec_fn=_die_with_parent,
            )

    @property
    def pid(self) -> int:
        """The id of the process that was started; its children are in the same process group."""
        return self._process.pid

    def metrics(self) -> dict[str, float]:
        """The server's counters and gauges, by name and distinguishing labels; see ``parse_metrics``."""
        return parse_metrics(requests.get(self.url + "/metrics", timeout=10).text)

    def log_tail(self, num_lines: int = 15) -> str:
        """The end of the log."""
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-num_lines:])

    @property
    def has_ended(self) -> bool:
        """Whether the process that was started is gone."""
        return self._process.poll() is not None

    def wait_ready(self, path: str = "/health", seconds: float = START_SECONDS) -> Self:
        """Wait until the server answers. Raises StackError."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise StackError(f"{self.name} ended with code {self._process.returncode}\n{self.log_tail()}")
            with contextlib.suppress(requests.RequestException):
                if requests.get(self.url + path, timeout=5).status_code == 200:
                    return self
            time.sleep(0.2)
        raise StackError(f"{self.name} was not ready within {seconds:.0f} s\n{self.log_tail()}")

    def signal(self, number: int) -> None:
        """Send a signal to the process and its children."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def stop(self) -> None:
        """Ask the process group to end, then make it. Idempotent."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_SECONDS)
        # vLLM's children share the group; whoever is left must not outlive us.
        self.signal(signal.SIGKILL)
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


@dataclass(frozen=True)
class EngineSettings:
    """One ``vllm serve``. ``cores`` is what ``VLLM_CPU_OMP_THREADS_BIND`` takes; None starts without a connector."""

    model: Path
    role: str | None = None
    cores: str = "0"
    extra: Mapping[str, Any] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    policy: str = "recompute"
    kv_transfer_config: Mapping[str, Any] | None = None
    """Instead of the one that ``role``, ``extra`` and ``policy`` make."""
    environment: Mapping[str, str] = field(default_factory=dict)
    host: str = "127.0.0.1"
    """Where others reach it: another address when ``prefix`` starts it in a network namespace."""
    port: int = 0
    """Of HTTP; 0 is any free one."""
    prefix: tuple[str, ...] = ()
    """What stands before the command."""


class Engine(ServerProcess):
    """A ``vllm serve`` on the CPU."""

    def __init__(self, name: str, settings: EngineSettings, logs: Path) -> None:
        port = settings.port or free_port()
        arguments = ["serve", str(settings.model), "--port", str(port), "--served-model-name", "model"]
        arguments += ["--enforce-eager", "--dtype", "bfloat16", "--max-logprobs", "50", *settings.arguments]
        config = settings.kv_transfer_config
        if config is None and settings.role is not None:
            config = transfer_config(settings.role, settings.extra, settings.policy)
        if config is not None:
            arguments += ["--kv-transfer-config", json.dumps(config)]
        environment = {
            "VLLM_CPU_OMP_THREADS_BIND": settings.cores,
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "VLLM_SERVER_DEV_MODE": "1",
            **settings.environment,
        }
        self.settings = settings
        command = [*settings.prefix, str(Path(sys.executable).parent / "vllm"), *arguments]
        super().__init__(name, command, port, logs, environment, settings.host)

    def complete(self, prompt: Sequence[int] | str, **fields: Any) -> dict[str, Any]:
        """Post one completion request and return the reply; greedy, with token ids as keys. Raises on an HTTP error."""
        return complete(self.url, prompt, **fields)

    def step(self) -> None:
        """Make the engine step once: an idle engine neither frees retired blocks nor refreshes its gauges."""
        self.complete([7, 8, 9], max_tokens=1, cache_salt=f"step-{time.monotonic_ns()}")


class Proxy(ServerProcess):
    """The project's proxy in front of some engines."""

    def __init__(self, prefill: Sequence[ServerProcess], decode: Sequence[ServerProcess], logs: Path) -> None:
        port = free_port()
        command = [sys.executable, "-m", "proxy", "--port", str(port)]
        command += [part for engine in prefill for part in ("--prefill", engine.url)]
        command += [part for engine in decode for part in ("--decode", engine.url)]
        super().__init__("proxy", command, port, logs)


def completion_body(prompt: Sequence[int] | str, **fields: Any) -> dict[str, Any]:
    """A greedy completion request that answers with token ids as keys."""
    return {"model": "model", "prompt": prompt, "temperature": 0, "return_tokens_as_token_ids": True, **fields}


def complete(url: str, prompt: Sequence[int] | str, **fields: Any) -> dict[str, Any]:
    """Post one completion request to an engine or a proxy and return the reply."""
    reply = requests.post(url + "/v1/completions", json=completion_body(prompt, **fields), timeout=120)
    reply.raise_for_status()
    answer: dict[str, Any] = reply.json()
    return answer


_METRIC = re.compile(r"^(?P<name>[a-z_:]+)(?:\{(?P<labels>.*)\})? (?P<value>\S+)$")
_LABEL = re.compile(r'(\w+)="([^"]*)"')


def parse_metrics(text: str) -> dict[str, float]:
    """Prometheus text -> {"name" or "name/label value": value}; labels that name the engine or model are dropped."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        if match := _METRIC.match(line):
            labels = {k: v for k, v in _LABEL.findall(match["labels"] or "") if k not in ("engine", "model_name")}
            key = "/".join([match["name"], *labels.values()])
            found[key] = found.get(key, 0.0) + float(match["value"])
    return found


@contextlib.contextmanager
def running(*servers: ServerProcess) -> Iterator[None]:
    """Stop the servers at the end, whatever happens; the last one first."""
    with contextlib.ExitStack() as stack:
        for server in servers:
            stack.callback(server.stop)
        yield
