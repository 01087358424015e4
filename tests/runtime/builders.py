"""What the runtime's tests stand on: a small hybrid layout, workers' memory, grants and welcomes, and an oracle."""

import threading
import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from pd_transfer.core.admissions import StartReceive
from pd_transfer.core.layout import (
    EngineLayout,
    GroupLayout,
    LayerLayout,
    MemoryRange,
    block_runs,
    descriptor_rows,
)
from pd_transfer.core.lease_words import LeaseWords
from pd_transfer.core.leases import WordBatch, WordChange
from pd_transfer.core.messages import EngineDescription, ModelIdentity, ServedRank, Welcome
from pd_transfer.core.params import EngineId, Grant, LeaseId, PeerKey, RequestId
from pd_transfer.core.peers import ConnectPeer
from pd_transfer.transport.base import ServeTransport
from pd_transfer.transport.memory import MemoryFabric, MemoryServeTransport

DEADLINE_SECONDS = 30.0
"""How long a test waits for what must happen; far longer than it takes."""

Tables = Sequence[Sequence[int]]
"""One block table per group; 0 is the null block."""

BOOT_WORD = 0xABCD1234


def eventually(what: str, is_true: Callable[[], object]) -> None:
    """Wait for another thread to make something true."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not is_true():
        assert time.monotonic() < deadline, f"not within {DEADLINE_SECONDS} s: {what}"
        time.sleep(0.001)


def hybrid_layout(num_blocks: int, window_page_bytes: int = 64) -> EngineLayout:
    """Full attention and sliding window, two layers each, sharing their bytes; the window's pages are padded to 80."""
    stride = 80
    layers = [
        LayerLayout(f"{name}.{index}", index * num_blocks * stride, stride, page_bytes, f"{name} {page_bytes}")
        for name, page_bytes in (("full", stride), ("window", window_page_bytes))
        for index in range(2)
    ]
    groups = (GroupLayout(4, tuple(layers[:2])), GroupLayout(8, tuple(layers[2:])))
    return EngineLayout(num_blocks, 2 * num_blocks * stride, groups)


class Memory:
    """The bytes of one worker, at first random, laid out as blocks."""

    def __init__(self, layout: EngineLayout, seed: int) -> None:
        self.layout = layout
        self.bytes = np.random.default_rng(seed).integers(0, 256, layout.region_bytes, dtype=np.uint8)
        self.region = range_of(self.bytes)
        self.rows = descriptor_rows(layout, self.region.address)

    def page(self, layer: LayerLayout, block_id: int, content: np.ndarray | None = None) -> np.ndarray:
        """The bytes of one block of a layer, in ``content`` if it is given."""
        start = layer.offset_bytes + block_id * layer.block_stride_bytes
        return (self.bytes if content is None else content)[start : start + layer.page_bytes]


def range_of(array: np.ndarray) -> MemoryRange:
    return MemoryRange(array.ctypes.data, array.nbytes)


def content_after_read(local: Memory, needed: Tables, remote: Memory, granted: Tables) -> np.ndarray:
    """What the local bytes must become: position by position, layer by layer. Independent of ``core.plan``."""
    content = local.bytes.copy()
    sources = {
        layer.name: (layer, table)
        for group, table in zip(remote.layout.groups, granted, strict=True)
        for layer in group.layers
    }
    for group, table in zip(local.layout.groups, needed, strict=True):
        for layer in group.layers:
            source, source_table = sources[layer.name]
            for position, block_id in enumerate(table):
                if block_id != 0:
                    local.page(layer, block_id, content)[:] = remote.page(source, source_table[position])
    return content


def engine(
    layout: EngineLayout, engine_id: str = "prefill", boot: str = "boot-1", num_ranks: int = 1, weights: str = "w"
) -> EngineDescription:
    model = ModelIdentity("model", "config", tuple(f"{weights}{rank}" for rank in range(num_ranks)))
    return EngineDescription(EngineId(engine_id), boot, model, layout, num_ranks)


class PrefillWorker:
    """What a prefill rank has: KV, lease words, and a transport that serves both."""

    def __init__(
        self,
        layout: EngineLayout,
        seed: int,
        serve: Callable[[MemoryRange, MemoryRange], ServeTransport],
        boot_word: int = BOOT_WORD,
    ) -> None:
        self.memory = Memory(layout, seed)
        self._table = np.zeros(layout.num_blocks, dtype=np.uint64)
        self.words = LeaseWords(self._table, boot_word, lambda: None)
        self.transport = serve(self.memory.region, range_of(self._table))
        self.served = ServedRank(self.transport.remote_memory, boot_word)

    @classmethod
    def in_memory(cls, fabric: MemoryFabric, layout: EngineLayout, seed: int = 1) -> "PrefillWorker":
        return cls(layout, seed, lambda region, words: MemoryServeTransport(fabric, "prefill", region, words))

    def change_word(self, slot: int, generation: int) -> None:
        """What ends a lease."""
        self.words.store([WordBatch(1, (WordChange(slot, generation),))])


def connect_order(key: str, layout: EngineLayout, ranks: Iterable[ServedRank]) -> ConnectPeer:
    ranks = tuple(ranks)
    return ConnectPeer(PeerKey(key), Welcome(engine(layout, num_ranks=len(ranks)), ranks, b"key" * 8))


def grant(layout: EngineLayout, granted: Tables, slot: int = 0, generation: int = 0, num_tokens: int = 16) -> Grant:
    groups = tuple(block_runs(table) for table in granted)
    return Grant("boot-1", LeaseId("lease"), slot, generation, num_tokens, b"digest", layout.digest(), groups)


def receive_order(request_id: str, key: str, offer: Grant, needed: Tables) -> StartReceive:
    runs = tuple(block_runs(table) for table in needed)
    return StartReceive(RequestId(request_id), PeerKey(key), offer, runs, offer.num_tokens)


class Gate:
    """A fence that a test opens. ``looked_at`` is set once somebody has asked whether it has passed."""

    def __init__(self) -> None:
        self.is_open = False
        self.looked_at = threading.Event()

    def has_passed(self) -> bool:
        self.looked_at.set()
        return self.is_open
