"""What is pulled: prompts of real geometries, about as many bytes as asked for, their blocks numbered three ways."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from benchmarks.report import REPOSITORY
from pd_transfer.cli.geometry import (
    Group,
    Numbering,
    block_tables,
    engine_layout,
    first_kept,
    kv_groups,
    num_positions,
)
from pd_transfer.cli.models import load_model
from pd_transfer.cli.transfers import NUMBERINGS, Pull
from pd_transfer.core.layout import DescriptorRow, EngineLayout, block_runs
from pd_transfer.core.plan import Indices, ReadPlan

BLOCK_SIZE = 16
SIZES_MIB = (1, 4, 16, 64)
MODELS = {
    "gemma-3-4b": REPOSITORY / "benchmarks" / "plan" / "models" / "gemma-3-4b.json",
    "tiny": REPOSITORY / "tests" / "models" / "tiny_hybrid",
}
_MOST_BLOCKS = 2**16


@dataclass(frozen=True)
class Reading:
    """One prompt's pull. ``size_mib`` is what was asked for; ``plan.num_bytes`` what it came to."""

    size_mib: int
    numbering: str
    pull: Pull

    @cached_property
    def plan(self) -> ReadPlan:
        """What our worker posts."""
        return self.pull.plan()

    @cached_property
    def built_in(self) -> Indices:
        """What the built-in worker posts for the same blocks: each in every region that groups share.

        Descriptor ``region * num_blocks + block``, region by region, the blocks of all groups one after the other. A
        group with fewer layers than there are regions is read in all of them nevertheless.
        """
        blocks = np.array([block for table in self.pull.tables for block in table if block], dtype=np.int32)
        firsts = np.arange(num_regions(self.pull.layout), dtype=np.int32) * np.int32(self.pull.layout.num_blocks)
        indices: Indices = np.add.outer(firsts, blocks).ravel()
        return indices

    @cached_property
    def num_built_in_merged(self) -> int:
        """Descriptors of the built-in worker's that are left when neighbours merge; its rows have no gaps."""
        rows = self.built_in // self.pull.layout.num_blocks
        return 1 + int(np.count_nonzero((np.diff(self.built_in) != 1) | (np.diff(rows) != 0)))

    @property
    def num_built_in_bytes(self) -> int:
        """What the built-in worker's descriptors bring."""
        return len(self.built_in) * region_rows(self.pull.layout, 0)[0].length_bytes


@dataclass(frozen=True)
class Subject:
    """One geometry with one layout, in which all its readings lie. Both processes have the same."""

    name: str
    layout: EngineLayout
    readings: tuple[Reading, ...]

    def reading(self, size_mib: int, numbering: str) -> Reading:
        """One of them."""
        return next(each for each in self.readings if (each.size_mib, each.numbering) == (size_mib, numbering))


def make_subject(name: str, path: Path, sizes_mib: Sequence[int] = SIZES_MIB) -> Subject:
    """All sizes in all numberings of a model."""
    groups = kv_groups(load_model(path), BLOCK_SIZE)
    lengths = {size: prompt_tokens(groups, size * 2**20) for size in sizes_mib}
    tables = {
        (size, name): packed(block_tables(groups, num_tokens, numbering), numbering)
        for size, num_tokens in lengths.items()
        for name, numbering in NUMBERINGS.items()
    }
    layout = engine_layout(groups, 1 + max(block for each in tables.values() for table in each for block in table))
    readings = [
        Reading(size, name, Pull(layout, each, tuple(map(block_runs, each)), lengths[size]))
        for (size, name), each in tables.items()
    ]
    return Subject(name, layout, tuple(readings))


def packed(tables: Sequence[Sequence[int]], numbering: Numbering) -> list[list[int]]:
    """The tables one after the other, without the blocks that windows have let go: the pool need not hold those."""
    moved, first = [], 1
    for table in tables:
        start = next(block for block in table if block)
        moved.append([block and block - start + first for block in table])
        first = moved[-1][-1] + numbering(len(table)) - numbering(len(table) - 1)
    return moved


def prompt_tokens(groups: Sequence[Group], num_bytes: int) -> int:
    """How many tokens to pull, to come nearest to so many bytes. One block at least."""

    def pulled(num_blocks: int) -> int:
        num_tokens = num_blocks * BLOCK_SIZE
        return sum(
            (num_positions(group, num_tokens) - first_kept(group, num_tokens)) * sum(group.page_bytes())
            for group in groups
        )

    above = bisect_left(range(_MOST_BLOCKS), num_bytes, lo=1, key=pulled)
    nearest = min((max(1, above - 1), above), key=lambda count: abs(pulled(count) - num_bytes))
    return nearest * BLOCK_SIZE


def num_regions(layout: EngineLayout) -> int:
    """Ranges of memory that groups share: one for each place of a layer in its group."""
    return max(len(group.layers) for group in layout.groups)


def region_rows(layout: EngineLayout, address: int) -> list[DescriptorRow]:
    """The built-in worker's descriptors: block by block, padding included."""
    longest = max(layout.groups, key=lambda group: len(group.layers))
    return [
        DescriptorRow(
            address + layer.offset_bytes, layer.block_stride_bytes, layer.block_stride_bytes, layout.num_blocks
        )
        for layer in longest.layers
    ]
