"""Where the bytes of a KV block are: layers, groups, regions, and the rows of descriptors over them.

A *region* is one registered range of memory: the single backing storage that all layers of a worker share. A *layer*
is a strided view of it: block ``b`` of a layer starts at ``offset_bytes + b * block_stride_bytes``. Layers of
different groups alias the same bytes, because a block id belongs to one group at a time.

The types cross the wire in ``core.messages``, hence ``msgspec.Struct``.
"""

import hashlib
import operator
import struct
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, NewType, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

Entry = TypeVar("Entry")

_MAX_DESCRIPTORS = 2**31 - 1
"""A descriptor's index is an int32."""


class MemoryKind(StrEnum):
    """What kind of memory a range lies in, in NIXL's words."""

    DRAM = "DRAM"
    VRAM = "VRAM"


class MemoryRange(msgspec.Struct, frozen=True):
    """``length_bytes`` bytes at ``address`` on device ``device_id`` (0 for DRAM) of one process."""

    address: int
    length_bytes: int
    kind: MemoryKind = MemoryKind.DRAM
    device_id: int = 0


class RemoteMemory(msgspec.Struct, frozen=True):
    """What a serving worker tells its readers: how to reach its agent, its KV region, and its table of lease words."""

    agent_name: str
    agent_metadata: bytes
    region: MemoryRange
    words: MemoryRange


@dataclass(frozen=True, slots=True)
class DescriptorRow:
    """``count`` descriptors of ``length_bytes`` each, ``stride_bytes`` apart, the first at ``address``."""

    address: int
    length_bytes: int
    stride_bytes: int
    count: int


BlockRuns = NewType("BlockRuns", bytes)
"""Part of a block table as runs of consecutive blocks: little-endian int32 triples ``(index, block_id, count)``.

Position ``index + k`` of the table holds ``block_id + k``. Bytes, because there may be thousands of runs: as objects
they would be built and pickled one by one on the engines' own threads (docs/adr/0011).
"""

RUN_BYTES = 12


def pack_runs(runs: Sequence[int]) -> BlockRuns:
    """``index, block_id, count, index, ...`` as BlockRuns. Raises struct.error beyond 32 bits."""
    return BlockRuns(struct.pack(f"<{len(runs)}i", *runs))


def unpack_runs(runs: bytes) -> npt.NDArray[np.int32]:
    """A row ``(index, block_id, count)`` for each run. ``runs`` has a multiple of RUN_BYTES bytes."""
    return np.frombuffer(runs, dtype="<i4").reshape(-1, 3)


def block_runs(block_ids: Sequence[int], first_index: int = 0) -> BlockRuns:
    """A block table (position ``first_index + i`` holds ``block_ids[i]``) as runs; the null block 0 is left out."""
    runs: list[int] = []
    num_nulls = num_leading_nulls(block_ids, operator.not_)
    start, expected = first_index + num_nulls, 0
    for index, block_id in enumerate(block_ids[num_nulls:], start):
        if block_id == expected:
            expected += 1 if block_id else 0
            continue
        if expected:
            runs += (start, expected - (index - start), index - start)
        start, expected = index, block_id and block_id + 1
    if expected:
        end = first_index + len(block_ids)
        runs += (start, expected - (end - start), end - start)
    return pack_runs(runs)


def num_leading_nulls(table: Sequence[Entry], is_null: Callable[[Entry], bool]) -> int:
    """How many entries at the front of a block table are null. 0 where they are not all one object.

    A sliding window's table has thousands of them in front of a few blocks, and vLLM's null block is one object: that
    they are equal is seen without a call for each.
    """
    end = bisect_left(table, True, key=lambda entry: not is_null(entry))
    return end if end and table[:end].count(table[0]) == end else 0


class LayerLayout(msgspec.Struct, frozen=True):
    """One attention layer: where its blocks lie in the region, and what their bytes mean.

    ``page_bytes`` is the data of one block without padding. ``fingerprint`` names everything that makes the bytes
    mean what they mean (spec class, dtype, block size, heads, head size, layout, packing); two layers can exchange
    blocks exactly when their names and fingerprints are equal.
    """

    name: str
    offset_bytes: int
    block_stride_bytes: int
    page_bytes: int
    fingerprint: str


class GroupLayout(msgspec.Struct, frozen=True):
    """One KV cache group: layers that share a block table, ``block_size_tokens`` tokens a block."""

    block_size_tokens: int
    layers: tuple[LayerLayout, ...]

    @property
    def block_bytes(self) -> int:
        """The data of one block in all layers, without padding, on one rank."""
        return sum(layer.page_bytes for layer in self.layers)


class EngineLayout(msgspec.Struct, frozen=True):
    """The KV geometry of every rank of one engine (homogeneous ranks: one layout serves all)."""

    num_blocks: int
    region_bytes: int
    groups: tuple[GroupLayout, ...]

    def layers(self) -> Iterator[LayerLayout]:
        """All layers, group by group: the order of the descriptor rows."""
        for group in self.groups:
            yield from group.layers

    def digest(self) -> str:
        """16 hex digits that name this layout: a grant quotes them, so that it cannot be read with another layout."""
        return hashlib.sha256(msgspec.msgpack.encode(self)).hexdigest()[:16]


def descriptor_rows(layout: EngineLayout, region_address: int) -> list[DescriptorRow]:
    """Rows of descriptors, layer-major: descriptor ``row * num_blocks + b`` is block ``b`` of the ``row``-th layer.

    Layer-major order is what lets NIXL merge neighbouring blocks into one descriptor.
    """
    return [
        DescriptorRow(
            region_address + layer.offset_bytes, layer.page_bytes, layer.block_stride_bytes, layout.num_blocks
        )
        for layer in layout.layers()
    ]


def layout_mismatch(local: EngineLayout, remote: EngineLayout) -> str | None:
    """Why blocks cannot be exchanged between two layouts, naming both values; None when they can.

    Groups may be arranged differently on the two sides: only layers count. Numbers of blocks may differ.
    """
    local_pages, remote_pages = _pages(local), _pages(remote)
    if missing := sorted(local_pages.keys() ^ remote_pages.keys()):
        side = "locally" if missing[0] in remote_pages else "on the peer"
        return f"layer {missing[0]} does not exist {side} (local {len(local_pages)} layers, peer {len(remote_pages)})"
    for name, page in local_pages.items():
        if page != remote_pages[name]:
            return f"layer {name} has another layout: local {page}, peer {remote_pages[name]}"
    return None


class _Page(NamedTuple):
    """What must be equal for two blocks of a layer to be each other's copies."""

    fingerprint: str
    num_bytes: int
    num_tokens: int

    def __str__(self) -> str:
        return f"{self.fingerprint} ({self.num_bytes} bytes for {self.num_tokens} tokens)"


def _pages(layout: EngineLayout) -> dict[str, _Page]:
    return {
        layer.name: _Page(layer.fingerprint, layer.page_bytes, group.block_size_tokens)
        for group in layout.groups
        for layer in group.layers
    }


def invalid_layout(layout: EngineLayout) -> str | None:
    """Why a layout that came from a peer is not one: a layer outside its region, or a size that is not positive."""
    names = [layer.name for layer in layout.layers()]
    if layout.num_blocks < 1 or layout.region_bytes < 1 or not names:
        return "a layout needs at least one block, one byte and one layer"
    if layout.num_blocks * len(names) > _MAX_DESCRIPTORS:
        return "more blocks than an index can name"
    for group in layout.groups:
        if group.block_size_tokens < 1:
            return f"block size {group.block_size_tokens} is not positive"
        for layer in group.layers:
            if reason := _invalid_layer(layer, layout):
                return reason
    return "a layer is listed twice" if len(set(names)) != len(names) else None


def _invalid_layer(layer: LayerLayout, layout: EngineLayout) -> str | None:
    if layer.offset_bytes < 0 or layer.page_bytes < 1 or layer.block_stride_bytes < layer.page_bytes:
        return f"layer {layer.name} has an impossible offset, page size or stride"
    end = layer.offset_bytes + (layout.num_blocks - 1) * layer.block_stride_bytes + layer.page_bytes
    return f"layer {layer.name} ends outside its region" if end > layout.region_bytes else None
