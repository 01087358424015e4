"""The canary: real NIXL between processes, no model. Every block of prefill bears a fingerprint; decode is compared
byte by byte with what must have arrived, and with what it held before everywhere else.

``PrefillProcess`` is one prefill rank in a process of its own; ``DecodeRank`` is one decode rank here.
"""

import multiprocessing
import time
from dataclasses import dataclass
from random import Random
from zlib import crc32

import numpy as np

from pd_transfer.core.layout import EngineLayout, GroupLayout, LayerLayout
from pd_transfer.core.receives import ReceivePolicy
from pd_transfer.runtime.orders import WorkerReport
from pd_transfer.runtime.worker import PullLoop
from tests.runtime.builders import DEADLINE_SECONDS, Memory, PrefillWorker

BOOT_WORDS = (0x1111AAAA, 0x2222BBBB)
BLOCK_SIZES = (8, 16, 32)


@dataclass(frozen=True)
class Geometry:
    """Two engines that hold the same layers differently, and one prompt's block tables on both.

    ``granted[i]`` and ``needed[i]`` are tables of the i-th group of the respective layout; 0 is the null block.
    """

    seed: int
    remote: EngineLayout
    local: EngineLayout
    granted: tuple[tuple[int, ...], ...]
    needed: tuple[tuple[int, ...], ...]
    num_tokens: int

    def pairs(self):
        """(local layer, local block, block of the same layer on prefill) for everything that is to be read."""
        granted_by_layer = {
            layer.name: table
            for group, table in zip(self.remote.groups, self.granted, strict=True)
            for layer in group.layers
        }
        for group, table in zip(self.local.groups, self.needed, strict=True):
            for layer in group.layers:
                for position, block_id in enumerate(table):
                    if block_id:
                        yield layer, block_id, granted_by_layer[layer.name][position]


@dataclass(frozen=True)
class _Kind:
    """Layers that share a block table and a block size."""

    block_size: int
    pages: dict[str, int]
    num_null: int


def random_geometry(seed: int) -> Geometry:
    """Groups that alias each other's bytes, of several block sizes, with and without padding, in two arrangements."""
    random = Random(seed)
    num_tokens = random.randrange(1, 200)
    kinds = [_random_kind(random, f"kind{number}", num_tokens) for number in range(random.randrange(1, 4))]
    # Prefill may hold the layers of one kind in two groups: layers are matched by name, not groups by index.
    remote_kinds = [part for kind in kinds for part in _split(random, kind)]
    random.shuffle(remote_kinds)
    granted, num_remote = _tables(random, [(_positions(kind, num_tokens), kind.num_null) for kind in remote_kinds])
    needed, num_local = _tables(random, [(_positions(kind, num_tokens), kind.num_null) for kind in kinds])
    return Geometry(
        seed,
        _layout(random, remote_kinds, num_remote),
        _layout(random, kinds, num_local),
        granted,
        tuple(_without_cached(random, table) for table in needed),
        num_tokens,
    )


def _random_kind(random: Random, name: str, num_tokens: int) -> _Kind:
    block_size = random.choice(BLOCK_SIZES)
    page_bytes = random.choice((48, 64, 1000, 4096))
    pages = {f"{name}.{layer}": page_bytes for layer in range(random.randrange(1, 5))}
    num_positions = -(-num_tokens // block_size)
    is_window = random.random() < 0.6
    return _Kind(block_size, pages, random.randrange(num_positions) if is_window else 0)


def _split(random: Random, kind: _Kind) -> list[_Kind]:
    names = list(kind.pages)
    if len(names) < 2 or random.random() < 0.6:
        return [kind]
    return [
        _Kind(kind.block_size, {name: kind.pages[name] for name in part}, kind.num_null)
        for part in (names[:1], names[1:])
    ]


def _positions(kind: _Kind, num_tokens: int) -> int:
    return -(-num_tokens // kind.block_size)


def _tables(random: Random, shapes: list[tuple[int, int]]) -> tuple[tuple[tuple[int, ...], ...], int]:
    """A block table for each (positions, leading nulls), and the size of a pool that holds them and some more."""
    num_used = sum(positions - num_null for positions, num_null in shapes)
    num_blocks = 2 + 2 * num_used + random.randrange(12)  # at most half of a pool may be under lease
    free = list(range(1, num_blocks))
    if random.random() < 0.6:
        random.shuffle(free)
    elif random.random() < 0.5:
        free.reverse()
    tables = []
    for positions, num_null in shapes:
        tables.append((0,) * num_null + tuple(free.pop(0) for _ in range(positions - num_null)))
    return tuple(tables), num_blocks


def _without_cached(random: Random, table: tuple[int, ...]) -> tuple[int, ...]:
    """Decode's prefix cache has some leading blocks already: they are not to be read."""
    num_cached = random.choice((0, 0, random.randrange(len(table) + 1)))
    return (0,) * num_cached + table[num_cached:]


def _layout(random: Random, kinds: list[_Kind], num_blocks: int) -> EngineLayout:
    """Each layer of a group takes another slot; groups share the slots, because a block belongs to one group."""
    num_slots = max(len(kind.pages) for kind in kinds)
    stride = max(page for kind in kinds for page in kind.pages.values()) + random.choice((0, 0, 16, 128))
    lead = random.choice((0, 256))
    is_block_major = random.random() < 0.3
    groups = []
    for kind in kinds:
        slots = random.sample(range(num_slots), len(kind.pages))
        layers = tuple(
            LayerLayout(
                name,
                lead + slot * stride * (1 if is_block_major else num_blocks),
                stride * (num_slots if is_block_major else 1),
                page_bytes,
                f"{kind.block_size} {page_bytes}",
            )
            for slot, (name, page_bytes) in zip(slots, kind.pages.items(), strict=True)
        )
        groups.append(GroupLayout(kind.block_size, layers))
    return EngineLayout(num_blocks, lead + num_slots * num_blocks * stride, tuple(groups))


def fingerprint(seed: int, rank: int, layer: LayerLayout, block_id: int) -> np.ndarray:
    """The bytes that one block of one layer bears on one prefill rank."""
    random = np.random.default_rng((seed, rank, crc32(layer.name.encode()), block_id))
    return random.integers(0, 256, layer.page_bytes, dtype=np.uint8)


def write_fingerprints(memory: Memory, geometry: Geometry, rank: int) -> None:
    for group, table in zip(memory.layout.groups, geometry.granted, strict=True):
        for layer in group.layers:
            for block_id in filter(None, table):
                memory.page(layer, block_id)[:] = fingerprint(geometry.seed, rank, layer, block_id)


# One prefill rank, in a process of its own


class PrefillProcess:
    """The parent's side. ``rank`` and ``engine_config`` are fixed; geometries come and go."""

    def __init__(self, rank: int, engine_config: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, child_end = context.Pipe()
        self._process = context.Process(target=_serve, args=(child_end, rank, engine_config), daemon=True)
        self._process.start()
        child_end.close()

    def _call(self, *command):
        self._pipe.send(command)
        assert self._pipe.poll(DEADLINE_SECONDS), f"prefill does not answer to {command[0]}"
        return self._pipe.recv()

    def open(self, geometry: Geometry):
        """Serve a geometry's blocks with their fingerprints; the ServedRank."""
        return self._call("open", geometry)

    def store(self, batch):
        """Change lease words, as a step's metadata says; the confirmed batches."""
        return self._call("store", batch)

    def reuse_blocks(self):
        """Overwrite everything, as a prefill engine does with blocks that are free."""
        return self._call("reuse_blocks")

    def close(self) -> None:
        self._pipe.send(None)
        self._process.join(DEADLINE_SECONDS)
        self._process.kill()
        self._process.join()
        self._pipe.close()


class _Server:
    def __init__(self, rank: int, engine_config: str) -> None:
        self._rank = rank
        self._params = {"engine_config": engine_config} if engine_config else {}
        self._worker: PrefillWorker | None = None

    def _make_transport(self, region, words):
        from pd_transfer.transport.nixl import NixlServeTransport

        return NixlServeTransport(f"canary{self._rank}", region, words, backend_params=self._params)

    def open(self, geometry: Geometry):
        self.close()
        seed = geometry.seed * 10 + self._rank
        self._worker = PrefillWorker(geometry.remote, seed, self._make_transport, BOOT_WORDS[self._rank])
        write_fingerprints(self._worker.memory, geometry, self._rank)
        return self._worker.served

    def store(self, batch):
        self._worker.words.store([batch])
        return self._worker.words.take_confirmed()

    def reuse_blocks(self):
        self._worker.memory.bytes[:] = 0

    def close(self):
        if self._worker is not None:
            self._worker.transport.close()


def _serve(pipe, rank: int, engine_config: str) -> None:
    server = _Server(rank, engine_config)
    while (command := pipe.recv()) is not None:
        method, *arguments = command
        pipe.send(getattr(server, method)(*arguments))
    server.close()


# One decode rank


class DecodeRank:
    """A pull loop over real NIXL, and the memory that it writes to."""

    def __init__(self, geometry: Geometry, rank: int, engine_config: str) -> None:
        from pd_transfer.transport.nixl import NixlPullTransport

        self.geometry = geometry
        self.rank = rank
        self.memory = Memory(geometry.local, seed=geometry.seed * 10 + 5 + rank)
        self.before = self.memory.bytes.copy()
        self.after_read = lambda request: None
        params = {"engine_config": engine_config} if engine_config else {}
        self.transport = NixlPullTransport(
            f"canary-decode{rank}",
            self.memory.region,
            self.memory.rows,
            backend_params=params,
            capture_telemetry=True,
        )
        self.loop = PullLoop(
            self.transport,
            ReceivePolicy(read_seconds=30, drain_seconds=30),
            rank,
            geometry.local,
            lambda request: self.after_read(request),
        )

    def run(self, *orders) -> WorkerReport:
        """Carry out orders, and poll until nothing is outstanding; what was reported."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        self.loop.turn(orders, time.monotonic())
        while self.loop.num_outstanding:
            assert time.monotonic() < deadline
            self.loop.turn([], time.monotonic())
        report, self.loop.report = self.loop.report, WorkerReport()
        return report

    def expected(self) -> np.ndarray:
        """The bytes that this rank must hold after a good read."""
        content = self.before.copy()
        for layer, block_id, remote_block_id in self.geometry.pairs():
            page = self.memory.page(layer, block_id, content)
            page[:] = fingerprint(self.geometry.seed, self.rank, layer, remote_block_id)
        return content

    def differences(self) -> list[str]:
        """Every place whose bytes are not what they must be; empty when all is well."""
        wrong = np.flatnonzero(self.memory.bytes != self.expected())
        return sorted({self.place(int(offset)) for offset in wrong})

    def place(self, offset: int) -> str:
        """What lies at a byte of the region: the layers' block, or padding."""
        found = []
        for layer in self.geometry.local.layers():
            block_id, inside = divmod(offset - layer.offset_bytes, layer.block_stride_bytes)
            if 0 <= block_id < self.geometry.local.num_blocks and inside < layer.page_bytes:
                found.append(f"block {block_id} of {layer.name}")
        return ", ".join(found) or "padding"
