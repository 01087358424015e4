"""Two processes with real NIXL, pinned to two cores: one that serves memory, and this one, which reads it.

The serving process is the one that the contract tests have. Whatever reads here is checked once: as many bytes must
arrive as its descriptors name.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from benchmarks.transfer.sampling import Read, Watch, wait
from pd_transfer.core.layout import DescriptorRow, MemoryRange
from pd_transfer.core.params import PeerKey
from pd_transfer.runtime.worker import FAST_POLL_COUNT, POLL_SECONDS, SLOW_POLL_SECONDS
from pd_transfer.transport.base import Indices
from pd_transfer.transport.nixl import NixlPullTransport
from pd_transfer.transport.nixl_agent import NixlAgent
from tests.contracts.transport_serving_process import ServingProcess

PEER = PeerKey("peer")
WORD_SLOT = 0
_FILL = 1

RowsOf = Callable[[int], list[DescriptorRow]]
"""The descriptors of a region that begins at an address."""


@dataclass(frozen=True)
class Way:
    """How bytes travel and who has which core.

    Together: all threads of the reading process share one core, and the caller pauses between polls as the connector's
    I/O thread does. Apart: NIXL's worker thread has the serving process's core, which a read over CMA leaves idle, and
    the caller polls without a pause. TCP needs that core for the serving process.
    """

    name: str
    engine_config: str = ""
    is_apart: bool = False

    @property
    def backend_params(self) -> dict[str, str]:
        """What NIXL's UCX backend is told."""
        return {"engine_config": self.engine_config} if self.engine_config else {}

    @property
    def pauses(self) -> Callable[[int], float] | None:
        """Seconds after the n-th poll."""
        return None if self.is_apart else _io_thread_pause


CMA_TOGETHER, CMA_APART, TCP = Way("CMA, one core"), Way("CMA, two cores", is_apart=True), Way("TCP", "TLS=tcp")
WAYS = (CMA_TOGETHER, CMA_APART, TCP)


def _io_thread_pause(num_polls: int) -> float:
    return POLL_SECONDS if num_polls <= FAST_POLL_COUNT else SLOW_POLL_SECONDS


@dataclass(frozen=True)
class Cores:
    """Where the processes run."""

    serving: int
    reading: int


@contextmanager
def on_core(core: int) -> Iterator[None]:
    """This thread, and what it starts, runs on one core."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


class Bed:
    """The reading process's memory, and the serving process's, equally large. ``opened`` makes one."""

    def __init__(self, way: Way, cores: Cores, process: ServingProcess, region_bytes: int) -> None:
        self.way = way
        self.memory = process.remote_memory
        self.bytes = np.zeros(region_bytes, dtype=np.uint8)
        self.region = MemoryRange(self.bytes.ctypes.data, region_bytes)
        self._cores = cores
        self._readers: list[PullReader | PlainReader] = []

    @classmethod
    @contextmanager
    def opened(cls, way: Way, cores: Cores, region_bytes: int) -> Iterator["Bed"]:
        """Both processes on their cores; both end with the block."""
        with on_core(cores.serving):
            process = ServingProcess(region_bytes, way.engine_config)
        with process, on_core(cores.reading):
            # Pages that were never written do not exist, and are not read as fast as others.
            process.command(f"fill {_FILL}")
            process.answer()
            bed = cls(way, cores, process, region_bytes)
            try:
                yield bed
            finally:
                bed.close()

    def ours(self, rows_of: RowsOf, params: Mapping[str, str] | None = None) -> "PullReader":
        """A reader as the connector's, told more if need be."""
        reader = PullReader(self, self.pull_transport(rows_of(self.region.address), params), rows_of)
        self._readers.append(reader)
        return reader

    def pull_transport(self, rows: list[DescriptorRow], params: Mapping[str, str] | None = None) -> NixlPullTransport:
        """The connector's own transport; its worker thread runs where the way says."""
        told = self.way.backend_params | dict(params or {})
        with on_core(self._cores.serving if self.way.is_apart else self._cores.reading):
            return NixlPullTransport("bench-pull", self.region, rows, backend_params=told)

    def plain(self, rows_of: RowsOf, params: Mapping[str, str] | None = None) -> "PlainReader":
        """A reader that leaves NIXL at its defaults, without a progress thread, which would take a core from all."""
        reader = PlainReader(self, self.way.backend_params | dict(params or {}), rows_of)
        self._readers.append(reader)
        return reader

    def check(self, what: str, read: Callable[[], object], num_bytes: int) -> None:
        """Raises RuntimeError unless a read brings so many bytes."""
        self.bytes[:] = 0
        read()
        found = int(np.count_nonzero(self.bytes.view(np.bool_)))
        if found != num_bytes:
            raise RuntimeError(f"{what} brought {found} bytes, not {num_bytes}")

    def close(self) -> None:
        """End all readers."""
        for reader in self._readers:
            reader.close()


class PullReader:
    """NixlPullTransport, used as the connector's I/O thread uses it."""

    def __init__(self, bed: Bed, transport: NixlPullTransport, rows_of: RowsOf) -> None:
        self._pauses = bed.way.pauses
        self.transport = transport
        transport.add_peer(PEER, bed.memory, rows_of(bed.memory.region.address))

    def read(self, local: Indices, remote: Indices) -> Read:
        """Submit, and poll until all is there."""
        watch = Watch()
        transfer = self.transport.submit_read(PEER, local, remote)
        post_seconds, post_cpu = watch.read()
        wait(lambda: self.transport.poll(transfer), self._pauses)
        self.transport.release(transfer)
        seconds, cpu = watch.read()
        return Read(seconds, post_seconds, cpu, post_cpu)

    def read_word(self) -> Read:
        """The same with a lease word."""
        watch = Watch()
        transfer = self.transport.submit_word_read(PEER, WORD_SLOT)
        post_seconds, post_cpu = watch.read()
        wait(lambda: self.transport.poll(transfer), self._pauses)
        self.transport.take_word(transfer)
        seconds, cpu = watch.read()
        return Read(seconds, post_seconds, cpu, post_cpu)

    def read_and_word(self, local: Indices, remote: Indices) -> Read:
        """A read, then the lease word that proves it."""
        first, word = self.read(local, remote), self.read_word()
        return Read(*(a + b for a, b in zip(first, word, strict=True)))

    def close(self) -> None:
        """End it."""
        self.transport.close()


class PlainReader:
    """One agent and two lists of descriptors: the read is posted, and over CMA carried out, on the caller's thread."""

    def __init__(self, bed: Bed, params: Mapping[str, str], rows_of: RowsOf) -> None:
        self._pauses = bed.way.pauses
        self._agent = NixlAgent("bench-plain", params)
        self._agent.register(bed.region)
        name = self._agent.load(bed.memory.agent_metadata)
        self._local = self._agent.prepare(None, rows_of(bed.region.address), bed.region)
        self._remote = self._agent.prepare(name, rows_of(bed.memory.region.address), bed.memory.region)

    def read(self, local: Indices, remote: Indices) -> Read:
        """As ``PullReader.read``."""
        watch = Watch()
        handle = self._agent.start_read(self._local, local, self._remote, remote)
        post_seconds, post_cpu = watch.read()
        wait(lambda: self._agent.is_done(handle), self._pauses)
        self._agent.release_read(handle)
        seconds, cpu = watch.read()
        return Read(seconds, post_seconds, cpu, post_cpu)

    def close(self) -> None:
        """End it."""
        self._agent.destroy()


def copier(bed: Bed, num_bytes: int) -> Callable[[], Read]:
    """One core's memcpy of so many bytes, between two arrays of this process."""
    source, target = np.full(num_bytes, _FILL, dtype=np.uint8), bed.bytes[:num_bytes]

    def copy() -> Read:
        watch = Watch()
        np.copyto(target, source)
        seconds, cpu = watch.read()
        return Read(seconds, seconds, cpu, cpu)

    return copy
