"""Connectors that vLLM loads when a pair is measured: they do what their parents do, and note what a pull took.

Only with NOTES_VARIABLE in its environment does an engine note anything. A note is a line of JSON in the file that it
names:

    {"half": "scheduler", "request": "cmpl-...", "seconds": 0.004, "hooks": {"on_new_request": [1, 0.0001], ...}}

``seconds`` lead from vLLM's allocation of the blocks to vLLM's hearing that they are filled, on the scheduler's clock.
``hooks`` are the calls of the connector since the engine last was idle: how many, and the CPU time of the half's thread
in them, in seconds. Both connectors are watched alike.
"""

import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from enum import Enum
from pathlib import Path
from typing import Any, Protocol

import msgspec

Hook = Callable[..., Any]
Around = Callable[[], AbstractContextManager[None]]

NOTES_VARIABLE = "PDT_BENCHMARK_NOTES"
IDLE_SECONDS = 0.01
"""An engine that was not in its connector for so long was idle: one that waits for a pull steps every millisecond."""

SCHEDULER_HOOKS = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
)
STEP_HOOK = "build_connector_meta"
"""vLLM calls it once in each step of a scheduler."""
WORKER_HOOKS = (
    "bind_connector_metadata",
    "start_load_kv",
    "get_transfer_results",
    "get_block_ids_with_load_errors",
    "build_connector_worker_meta",
)


class Calls(msgspec.Struct, array_like=True):
    """Of one hook. ``seconds`` are CPU time."""

    count: int = 0
    seconds: float = 0.0


class Note(msgspec.Struct, frozen=True):
    """One line of the file. ``seconds`` is 0 in a worker's."""

    half: str
    request: str
    seconds: float
    hooks: dict[str, Calls]


class Notebook:
    """Notes of one half of one engine. Clocks are arguments, so that tests need not wait."""

    def __init__(
        self,
        path: Path,
        half: str,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._path = path
        self._half = half
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._allocated: dict[str, float] = {}
        self._hooks: dict[str, Calls] = {}
        self._last_end = 0.0

    @contextlib.contextmanager
    def inside(self, hook: str) -> Iterator[None]:
        """Around every call of the connector."""
        if self._clock() - self._last_end > IDLE_SECONDS:
            self._hooks = {}
        calls = self._hooks.setdefault(hook, Calls())
        begin = self._cpu_clock()
        try:
            yield
        finally:
            calls.count += 1
            calls.seconds += self._cpu_clock() - begin
            self._last_end = self._clock()

    def allocated(self, request: str) -> None:
        """vLLM has allocated blocks that are to be filled."""
        self._allocated[request] = self._clock()

    def filled(self, requests: Iterable[str]) -> None:
        """Note requests whose blocks are filled; those of a scheduler must have been allocated."""
        now = self._clock()
        for request in requests:
            seconds = now - self._allocated.pop(request, now)
            line = msgspec.json.encode(Note(self._half, request, seconds, self._hooks))
            with self._path.open("ab") as file:
                file.write(line + b"\n")


def read_notes(path: Path) -> list[Note]:
    """All notes so far; none when there is no such file."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        return []
    return [msgspec.json.decode(line, type=Note) for line in lines]


@contextlib.contextmanager
def affinity_kept() -> Iterator[None]:
    """``os.sched_setaffinity`` is a no-op meanwhile."""
    real = os.sched_setaffinity
    os.sched_setaffinity = lambda *_: None
    try:
        yield
    finally:
        os.sched_setaffinity = real


def watched(parent: type[Any], name: str, around_start: Around = contextlib.nullcontext) -> type[Any]:
    """A connector class called ``name`` that does as ``parent`` does and keeps a notebook if it is asked to."""

    def start(self: object, vllm_config: object, role: Enum, kv_cache_config: object) -> None:
        with around_start():
            parent.__init__(self, vllm_config, role, kv_cache_config)
        if path := os.environ.get(NOTES_VARIABLE):
            half = role.name.lower()
            watch(self, half, Notebook(Path(path), half))

    return type(name, (parent,), {"__init__": start, "__module__": __name__, "__doc__": parent.__doc__})


def watch(connector: object, half: str, notebook: Notebook) -> None:
    """Replace hooks on the object, so that an engine that notes nothing runs its parent's code alone."""
    hooks = {
        name: _timed(getattr(connector, name), notebook, name)
        for name in (SCHEDULER_HOOKS if half == "scheduler" else WORKER_HOOKS)
    }
    if half == "scheduler":
        hooks["update_state_after_alloc"] = _noting_allocation(hooks["update_state_after_alloc"], notebook)
        hooks["update_connector_output"] = _noting_output(hooks["update_connector_output"], notebook)
    else:
        hooks["get_transfer_results"] = _noting_results(hooks["get_transfer_results"], notebook)
    for name, hook in hooks.items():
        setattr(connector, name, hook)


class _Request(Protocol):
    request_id: str


class _Output(Protocol):
    finished_recving: set[str] | None
    failed_recving: set[str] | None


def _timed(hook: Hook, notebook: Notebook, name: str) -> Hook:
    def timed(*arguments: object, **named: object) -> object:
        with notebook.inside(name):
            return hook(*arguments, **named)

    return timed


def _noting_allocation(hook: Hook, notebook: Notebook) -> Hook:
    def noting(request: _Request, blocks: object, num_external_tokens: int) -> object:
        if num_external_tokens > 0:
            notebook.allocated(request.request_id)
        return hook(request, blocks, num_external_tokens)

    return noting


def _good(output: _Output) -> set[str]:
    """What has ended and did not fail."""
    return (output.finished_recving or set()) - (output.failed_recving or set())


def _noting_output(hook: Hook, notebook: Notebook) -> Hook:
    def noting(connector_output: _Output) -> object:
        result = hook(connector_output)
        notebook.filled(_good(connector_output))
        return result

    return noting


def _noting_results(hook: Hook, notebook: Notebook) -> Hook:
    def noting(finished_req_ids: set[str]) -> _Output:
        results: _Output = hook(finished_req_ids)
        notebook.filled(_good(results))
        return results

    return noting


def __getattr__(name: str) -> type[Any]:
    """The connectors themselves, made when vLLM asks for them: what reads notes needs no vLLM."""
    return _connector(name)


@functools.cache
def _connector(name: str) -> type[Any]:
    if name == "PdConnector":
        from pd_transfer.vllm.connector import PdConnector

        return watched(PdConnector, name)
    if name in ("NixlConnector", "UnpinnedNixlConnector"):
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlConnector

        return watched(NixlConnector, name, affinity_kept if name.startswith("Unpinned") else contextlib.nullcontext)
    raise AttributeError(name)
