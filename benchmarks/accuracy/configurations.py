"""The configurations that the sweep goes through, the positive controls, and how their servers are started."""

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.accuracy.verdict import Moved
from tests.stack.engines import (
    BOTH_ROLES,
    DECODE_ROLE,
    PREFILL_ROLE,
    Engine,
    EngineSettings,
    Proxy,
    running,
    transfer_config,
)

TASKS = ("pd_far", "pd_near", "pd_mix", "pd_shared", "pd_choice")
CONTROL_TASKS = ("pd_short_far", "pd_short_near")
SETTLE_SECONDS = 5.0

UNCACHED = "--no-enable-prefix-caching"
WATCHED_MODULE = "benchmarks.accuracy.watched"


def block_size(num_tokens: int) -> tuple[str, ...]:
    """The arguments for a block size."""
    return ("--block-size", str(num_tokens))


@dataclass(frozen=True)
class Configuration:
    """Arguments of all engines, how many there are on each side, how many requests at once, and what NIXL is told."""

    about: str
    arguments: tuple[str, ...] = (*block_size(32), UNCACHED)
    num_prefill: int = 1
    num_decode: int = 1
    concurrency: int = 4
    backend_params: str = ""
    """NIXL's, for UCX."""

    @property
    def extra(self) -> Mapping[str, object]:
        """The connector's settings."""
        return {"nixl_backend_params": {"engine_config": self.backend_params}} if self.backend_params else {}


CONFIGURATIONS = {
    "base": Configuration("blocks of 32, hybrid manager on, no prefix cache, one request at a time", concurrency=1),
    "concurrency-16": Configuration("16 requests at once", concurrency=16),
    "prefix-caching": Configuration("prefix caching on both sides", block_size(32)),
    "hybrid-off": Configuration(
        "hybrid manager off: every layer keeps all blocks",
        (*block_size(32), UNCACHED, "--disable-hybrid-kv-cache-manager"),
    ),
    "block-64": Configuration("blocks of 64", (*block_size(64), UNCACHED)),
    "block-128": Configuration("blocks of 128", (*block_size(128), UNCACHED)),
    "chunked-prefill": Configuration(
        "prompts in chunks of at most 256 tokens",
        (*block_size(32), UNCACHED, "--enable-chunked-prefill", "--max-num-batched-tokens", "256"),
    ),
    "tcp": Configuration("NIXL over TCP", concurrency=16, backend_params="TLS=tcp"),
    "2p2d": Configuration("two prefill and two decode engines", num_prefill=2, num_decode=2, concurrency=16),
}
"""NIXL goes over CMA and shared memory, UCX's choice on one host, where nothing else is said."""


@dataclass(frozen=True)
class Control:
    """Damage to what decode reads, as JSON of ``watched.Damage``, and the tasks that need the damaged group."""

    about: str
    damage: Mapping[str, object]
    needed_by: tuple[str, ...]


_SLIDING_GROUP, _FULL_GROUP = 0, 5
CONTROLS = {
    "sliding-block": Control(
        "one block of one sliding layer is zero",
        {"kind": "zero", "group": _SLIDING_GROUP, "position": -2},
        ("pd_short_near",),
    ),
    "full-block": Control(
        "one block of the full-attention layer is zero",
        {"kind": "zero", "group": _FULL_GROUP, "position": -3},
        ("pd_short_far",),
    ),
    "swapped-blocks": Control(
        "blocks of different requests change places",
        {"kind": "swap", "group": _FULL_GROUP, "position": -3},
        ("pd_short_far",),
    ),
    "skipped-group": Control(
        "one sliding group is not read", {"kind": "skip", "group": _SLIDING_GROUP}, ("pd_short_near",)
    ),
}


@dataclass(frozen=True)
class Machine:
    """What all engines have in common: the model, what this machine or model needs, and how many processes one is."""

    model: Path
    logs: Path
    arguments: tuple[str, ...] = ()
    is_one_process: bool = False
    """Whether an engine is one process: up in a third of the CPU time that its usual three processes take."""

    def engine(self, name: str, configuration: Configuration, role: str | None, cores: str, **settings: Any) -> Engine:
        """Start one engine of a configuration; ``settings`` go to ``EngineSettings``."""
        arguments = (*configuration.arguments, *self.arguments, *settings.pop("arguments", ()))
        extra = configuration.extra if role else {}
        environment = dict(settings.pop("environment", {}))
        if self.is_one_process:
            arguments += ("--distributed-executor-backend", "uni")
            environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        made = EngineSettings(
            self.model, role, cores, extra=extra, arguments=arguments, environment=environment, **settings
        )
        return Engine(name, made, self.logs)


class Stack:
    """Prefill engines, decode engines and the proxy."""

    def __init__(self, prefill: Sequence[Engine], decode: Sequence[Engine], proxy: Proxy) -> None:
        self.prefill = prefill
        self.decode = decode
        self.proxy = proxy

    def wait_ready(self) -> None:
        """Wait for all servers, and for the proxy to have seen its engines. Raises StackError."""
        for engine in (*self.prefill, *self.decode):
            engine.wait_ready()
        self.proxy.wait_ready("/ready")

    def counters(self) -> Moved:
        """The decode engines' counters, added up."""
        found = [engine.metrics() for engine in self.decode]
        names = "pd_transfer:tokens_verified_total", "pd_transfer:bytes_verified_total", "vllm:prefix_cache_hits_total"
        return Moved(*(int(sum(metrics.get(name, 0.0) for metrics in found)) for name in names))

    def gained(self, before: Moved, num_transferable: int) -> Moved:
        """What the counters gained, once loaded and cached tokens make up ``num_transferable``, or some time passed.

        Counters follow an answer by a moment.
        """
        deadline = time.monotonic() + SETTLE_SECONDS
        while True:
            now = self.counters()
            gain = Moved(
                now.num_tokens - before.num_tokens,
                now.num_bytes - before.num_bytes,
                now.num_cached - before.num_cached,
            )
            if gain.num_tokens + gain.num_cached == num_transferable or time.monotonic() > deadline:
                return gain
            time.sleep(0.1)


@contextlib.contextmanager
def running_stack(
    machine: Machine, configuration: Configuration, watch: Mapping[str, str] | None = None
) -> Iterator[Stack]:
    """Start a configuration's servers (``Stack.wait_ready`` waits for them), and stop them whatever happens.

    With ``watch`` (environment variables), decode runs the watched connector.
    """
    decode_settings: dict[str, Any] = {}
    if watch is not None:
        decode_settings = {"kv_transfer_config": watched_config(DECODE_ROLE, configuration), "environment": watch}
    prefill = [
        machine.engine(f"prefill-{i}", configuration, PREFILL_ROLE, "0") for i in range(configuration.num_prefill)
    ]
    decode = [
        machine.engine(f"decode-{i}", configuration, DECODE_ROLE, "1", **decode_settings)
        for i in range(configuration.num_decode)
    ]
    proxy = Proxy(prefill, decode, machine.logs)
    with running(*prefill, *decode, proxy):
        yield Stack(prefill, decode, proxy)


def watched_config(role: str, configuration: Configuration) -> Mapping[str, object]:
    """The transfer config that loads the watched connector."""
    config = transfer_config(role, configuration.extra)
    return {**config, "kv_connector": "WatchedConnector", "kv_connector_module_path": WATCHED_MODULE}


@contextlib.contextmanager
def running_single(machine: Machine, configuration: Configuration) -> Iterator[Engine]:
    """Start one engine without a connector, and stop it whatever happens."""
    engine = machine.engine("single", configuration, None, "0")
    with running(engine):
        yield engine.wait_ready()


@contextlib.contextmanager
def running_watched_single(machine: Machine, configuration: Configuration) -> Iterator[Engine]:
    """Start one engine that can be asked for the fingerprints of its blocks, and stop it whatever happens."""
    config = watched_config(BOTH_ROLES, configuration)
    extension = ("--worker-extension-cls", WATCHED_MODULE + ".FingerprintWorker")
    engine = machine.engine("single", configuration, None, "0", kv_transfer_config=config, arguments=extension)
    with running(engine):
        yield engine.wait_ready()


def damage_variables(control: Control) -> Mapping[str, str]:
    """What tells the watched connector to do a control's damage."""
    return {"PD_ACCURACY_DAMAGE": msgspec.json.encode(control.damage).decode()}


def fingerprint_variables(log: Path) -> Mapping[str, str]:
    """What tells the watched connector to write down the fingerprints of the blocks that it reads."""
    return {"PD_ACCURACY_FINGERPRINTS": str(log)}
