"""A NIXL agent with types, and with NIXL's errors turned into ours. The only module that imports nixl."""

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from types import ModuleType
from typing import Any
from uuid import uuid4

import numpy as np

from pd_transfer.core.layout import DescriptorRow, MemoryRange
from pd_transfer.errors import ConfigError, TransportError
from pd_transfer.transport.base import Indices


class NixlAgent:
    """One native agent with a UCX backend, under a name of its own. What NIXL raises leaves here as TransportError.

    The bindings are used without NIXL's Python wrapper for two reasons. The wrapper's configuration sets the progress
    thread's delay to 0, which burns a core, and offers no way to change it. And its handles keep the native agent
    alive, whereas ``destroy`` must stop reads that are under way.
    """

    def __init__(
        self,
        name: str,
        backend_params: Mapping[str, str],
        *,
        progress_seconds: float | None = None,
        capture_telemetry: bool = False,
    ) -> None:
        self.name = f"{name}-{uuid4().hex}"
        self._nixl = _bindings()
        self._capture_telemetry = capture_telemetry
        self._native: Any = None
        config = self._nixl.nixlAgentConfig()
        config.useProgThread = progress_seconds is not None
        config.pthrDelay = round((progress_seconds or 0) * 1e6)
        config.useListenThread = False
        # Without it, a second thread in the agent is a segmentation fault.
        config.syncMode = self._nixl.NIXL_THREAD_SYNC_STRICT
        config.captureTelemetry = capture_telemetry
        try:
            self._native = self._nixl.nixlAgent(self.name, config)
        except RuntimeError as error:
            raise TransportError(f"NIXL cannot make an agent: {error}") from error
        self._backends = [self._call("createBackend", "UCX", dict(backend_params))]

    def _call(self, method: str, *args: object) -> Any:  # noqa: ANN401 - NIXL has no types
        # Only the method's name goes into the frame: an exception keeps its frames alive, and a reference to the native
        # agent in one of them would let that survive ``destroy``. The bindings raise whatever C++ threw: not only
        # NIXL's errors, but ValueError, IndexError, MemoryError and so on.
        try:
            return getattr(self._native, method)(*args)
        except Exception as error:
            raise TransportError(f"NIXL {method}: {type(error).__name__}: {error}") from error

    def register(self, memory_range: MemoryRange) -> None:
        entry = (memory_range.address, memory_range.length_bytes, memory_range.device_id, "")
        self._call("registerMem", self._nixl.nixlRegDList(self._kind(memory_range), [entry]), self._backends)

    def metadata(self) -> bytes:
        metadata: bytes = self._call("getLocalMD")
        return metadata

    def load(self, metadata: bytes) -> str:
        """Connect to the agent that the metadata describes; returns its name."""
        name: bytes = self._call("loadRemoteMD", metadata)
        return name.decode(errors="replace")

    def forget(self, agent_name: str) -> None:
        with suppress(TransportError):
            self._call("invalidateRemoteMD", agent_name)

    def prepare(self, agent_name: str | None, rows: Sequence[DescriptorRow], memory_range: MemoryRange) -> int:
        """Make a list of descriptors in local (None) or a peer's memory; the order of rows is the order of indices."""
        device = memory_range.device_id
        table = np.array([(r.address, r.length_bytes, device, r.stride_bytes, r.count) for r in rows], dtype=np.uint64)
        owner = self._nixl.NIXL_INIT_AGENT if agent_name is None else agent_name
        handle: int = self._call("prepXferDlist", owner, self._kind(memory_range), table, self._backends)
        return handle

    def release_list(self, handle: int) -> None:
        with suppress(TransportError):
            self._call("releasedDlistH", handle)

    def start_read(self, local: int, local_indices: Indices, remote: int, remote_indices: Indices) -> int:
        operation = self._nixl.NIXL_READ
        handle: int = self._call(
            "makeXferReq", operation, local, local_indices, remote, remote_indices, "", self._backends, False
        )
        try:
            self._call("postXferReq", handle, "")
        except TransportError:
            self.release_read(handle)
            raise
        return handle

    def is_done(self, handle: int) -> bool:
        status = self._call("getXferStatus", handle)
        if status == self._nixl.NIXL_SUCCESS:
            return True
        if status == self._nixl.NIXL_IN_PROG:
            return False
        raise TransportError(f"NIXL getXferStatus: {status}")

    def num_descriptors(self, handle: int) -> int | None:
        """Descriptors after merging."""
        return int(self._call("getXferTelemetry", handle).descCount) if self._capture_telemetry else None

    def release_read(self, handle: int) -> None:
        """Free the handle of a read that is over. Another read would go on, unseen."""
        with suppress(TransportError):
            self._call("releaseXferReq", handle)

    def destroy(self) -> None:
        """End the agent's threads and connections, and with them every read. Idempotent."""
        self._native = None

    def _kind(self, memory_range: MemoryRange) -> object:
        kind: object = getattr(self._nixl, f"{memory_range.kind}_SEG")
        return kind


@cache
def _bindings() -> ModuleType:
    """The native module of the NIXL that fits this process.

    The package ``nixl`` chooses by the CUDA version, for which it may import torch: a second or two. Where only one
    variant is installed there is no choice to make.
    """
    variants = [name for name in ("nixl_cu12", "nixl_cu13", "nixl_rocm") if importlib.util.find_spec(name)]
    package = variants[0] if len(variants) == 1 else "nixl"
    try:
        return importlib.import_module(f"{package}._bindings")
    except ImportError as error:
        raise ConfigError(f"NIXL cannot be imported ({error}); install nixl with the variant for your CUDA") from error
