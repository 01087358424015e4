"""What the transport tests share: a small KV geometry over real memory, and one rig for each implementation."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from pd_transfer.core.layout import DescriptorRow, MemoryRange, RemoteMemory
from pd_transfer.core.params import PeerKey, Transfer
from pd_transfer.transport.base import PullTransport, ServeTransport
from pd_transfer.transport.memory import MemoryFabric, MemoryPullTransport, MemoryServeTransport

DENSE_BYTES = 512
PADDED_BYTES = 200
PADDED_STRIDE_BYTES = 256


def memory_range(array) -> MemoryRange:
    return MemoryRange(array.ctypes.data, array.nbytes)


@dataclass
class Blocks:
    """A region of two dense layers and one with padding, each ``num_blocks`` long, full of random bytes."""

    num_blocks: int
    seed: int
    bytes: "np.ndarray" = field(init=False)

    def __post_init__(self):
        size = self.num_blocks * (2 * DENSE_BYTES + PADDED_STRIDE_BYTES)
        self.bytes = np.random.default_rng(self.seed).integers(0, 256, size, dtype=np.uint8)

    @property
    def region(self) -> MemoryRange:
        return memory_range(self.bytes)

    @property
    def rows(self) -> list[DescriptorRow]:
        start, n = self.bytes.ctypes.data, self.num_blocks
        return [
            DescriptorRow(start, DENSE_BYTES, DENSE_BYTES, n),
            DescriptorRow(start + n * DENSE_BYTES, DENSE_BYTES, DENSE_BYTES, n),
            DescriptorRow(start + 2 * n * DENSE_BYTES, PADDED_BYTES, PADDED_STRIDE_BYTES, n),
        ]

    def span(self, index: int) -> slice:
        """The bytes of one descriptor."""
        row = self.rows[index // self.num_blocks]
        start = row.address - self.bytes.ctypes.data + index % self.num_blocks * row.stride_bytes
        return slice(start, start + row.length_bytes)

    def indices(self, blocks: Sequence[int]) -> "np.ndarray":
        """The descriptors of some blocks in every layer."""
        return np.array([layer * self.num_blocks + b for layer in range(3) for b in blocks], dtype=np.int32)


@dataclass
class Served:
    """A serving transport with the memory behind it."""

    blocks: Blocks
    words: "np.ndarray"
    transport: ServeTransport

    @property
    def remote_memory(self) -> RemoteMemory:
        return self.transport.remote_memory


@dataclass
class Rig:
    """One pulling transport, and as many serving ones as a test asks for. ``close`` ends them all."""

    make_serve: Callable[[MemoryRange, MemoryRange], ServeTransport]
    make_pull: Callable[[MemoryRange, Sequence[DescriptorRow]], PullTransport]
    local: Blocks = field(default_factory=lambda: Blocks(24, seed=0))
    served: list[Served] = field(default_factory=list)
    pull: PullTransport = field(init=False)

    def __post_init__(self):
        self.pull = self.make_pull(self.local.region, self.local.rows)

    def serve(self) -> Served:
        seed = len(self.served) + 1
        blocks = Blocks(32, seed)
        words = np.random.default_rng(seed).integers(2**63, 2**64 - 1, 16, dtype=np.uint64)
        self.served.append(Served(blocks, words, self.make_serve(blocks.region, memory_range(words))))
        return self.served[-1]

    def add(self, key: str = "peer") -> Served:
        """Serve, and make it readable under ``key``."""
        served = self.serve()
        self.pull.add_peer(PeerKey(key), served.remote_memory, served.blocks.rows)
        return served

    def close(self) -> None:
        self.pull.close()
        for served in self.served:
            served.transport.close()


def finish(pull: PullTransport, transfer: Transfer, seconds: float = 20) -> None:
    """Poll until the transfer is done; its error passes through."""
    deadline = time.monotonic() + seconds
    while not pull.poll(transfer):
        assert time.monotonic() < deadline, "the transfer is still outstanding"


def read_word(pull: PullTransport, key: str, slot: int) -> int:
    transfer = pull.submit_word_read(PeerKey(key), slot)
    finish(pull, transfer)
    return pull.take_word(transfer)


def memory_rig(fabric: MemoryFabric) -> Rig:
    return Rig(
        lambda region, words: MemoryServeTransport(fabric, "serve", region, words),
        lambda region, rows: MemoryPullTransport(fabric, region, rows),
    )


def indices(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)
