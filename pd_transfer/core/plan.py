"""What to read: token positions -> pairs of blocks -> descriptor indices, and how many runs they merge into."""

from collections.abc import Sequence
from itertools import chain, groupby
from operator import attrgetter
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from pd_transfer.core.layout import BlockRun, DescriptorRow, EngineLayout, block_runs

Indices = npt.NDArray[np.int32]

_BY_INDEX = attrgetter("index")
_NO_BLOCKS = BlockRun(-1, 0, 0)
_MAX_POSITION = 2**30


class ReadPlan(msgspec.Struct, frozen=True):
    """Descriptor ``remote[i]`` is read into descriptor ``local[i]``; layer-major, positions ascending in a layer."""

    local: Indices
    remote: Indices
    num_bytes: int
    num_blocks_by_group: tuple[int, ...]


class Uncovered(msgspec.Struct, frozen=True):
    """The grant does not offer a block that decode needs; ``reason`` names group and position."""

    reason: str


def needed_runs(
    block_ids: Sequence[int], block_size_tokens: int, num_local_tokens: int, num_tokens: int
) -> tuple[BlockRun, ...]:
    """The blocks of one group's table that must be filled so that tokens [num_local_tokens, num_tokens) are present.

    ``block_ids`` is the table, with 0 where nothing may be written. There vLLM has its null block, which says that
    attention reaches no further, or a hashed one, which is shared and right as it came from the prefix cache.
    """
    first = num_local_tokens // block_size_tokens
    end = -(-num_tokens // block_size_tokens)
    return block_runs(block_ids[first:end], first)


def plan_read(
    local: EngineLayout,
    remote: EngineLayout,
    needed: Sequence[Sequence[BlockRun]],
    granted: Sequence[Sequence[BlockRun]],
) -> ReadPlan | Uncovered:
    """Pair the needed blocks of each local group with the granted ones by position, layer by layer.

    Groups are matched by their layers, so the two sides may group layers differently. ``needed[i]`` belongs to
    ``local.groups[i]``, its positions ascend; ``granted[i]`` belongs to ``remote.groups[i]``, in any order. The layouts
    have passed ``layout_mismatch``.
    """
    if len(needed) != len(local.groups):
        return Uncovered(f"{len(needed)} groups of blocks are to be filled, this engine has {len(local.groups)}")
    if len(granted) != len(remote.groups):
        return Uncovered(f"the grant lists {len(granted)} groups, the peer has {len(remote.groups)}")
    sites = _layer_sites(remote)
    wanted = [_columns(runs) for runs in needed]
    counts = tuple(int(columns.counts.sum()) for columns in wanted)
    num_descriptors = sum(count * len(group.layers) for count, group in zip(counts, local.groups, strict=True))
    to, of = np.empty(num_descriptors, dtype=np.int32), np.empty(num_descriptors, dtype=np.int32)
    start, row = 0, 0
    for group_index, group in enumerate(local.groups):
        paired: dict[int, tuple[Indices, Indices]] = {}
        for remote_group, layers in groupby(group.layers, lambda layer: sites[layer.name][1]):
            if remote_group not in paired:
                pair = _pair(wanted[group_index], granted[remote_group], remote.num_blocks)
                if isinstance(pair, int):
                    return Uncovered(f"group {group_index} needs the block at position {pair}, which is not granted")
                paired[remote_group] = pair
            remote_rows = [sites[layer.name][0] for layer in layers]
            rows = range(row, row + len(remote_rows))
            stop = start + len(rows) * counts[group_index]
            _fill(to[start:stop], rows, local.num_blocks, paired[remote_group][0])
            _fill(of[start:stop], remote_rows, remote.num_blocks, paired[remote_group][1])
            start, row = stop, rows.stop
    num_bytes = sum(
        count * layer.page_bytes for count, group in zip(counts, local.groups, strict=True) for layer in group.layers
    )
    return ReadPlan(to, of, num_bytes, counts)


def _fill(out: Indices, rows: Sequence[int], num_blocks: int, block_ids: Indices) -> None:
    """The descriptors of some blocks in several rows, row by row."""
    firsts = np.array(rows, dtype=np.int32) * np.int32(num_blocks)
    np.add.outer(firsts, block_ids, out=out.reshape(len(rows), len(block_ids)))


def _layer_sites(layout: EngineLayout) -> dict[str, tuple[int, int]]:
    """Layer name -> (descriptor row, group index)."""
    groups = [index for index, group in enumerate(layout.groups) for _ in group.layers]
    return {layer.name: (row, groups[row]) for row, layer in enumerate(layout.layers())}


class _Columns(NamedTuple):
    """Runs as columns: a prompt of 128k tokens may have thousands, and a loop over them takes tens of milliseconds."""

    indices: Indices
    block_ids: Indices
    counts: Indices

    def spread(self) -> tuple[Indices, Indices]:
        """The position and the block id of every block."""
        before = np.cumsum(self.counts, dtype=np.int32) - self.counts
        steps = np.arange(self.counts.sum(), dtype=np.int32)
        positions = steps + np.repeat(self.indices - before, self.counts)
        return positions, steps + np.repeat(self.block_ids - before, self.counts)


def _columns(runs: Sequence[BlockRun]) -> _Columns:
    numbers = chain.from_iterable(map(msgspec.structs.astuple, runs))
    table = np.fromiter(numbers, dtype=np.int32, count=3 * len(runs)).reshape(-1, 3)
    return _Columns(table[:, 0], table[:, 1], table[:, 2])


def _pair(wanted: _Columns, granted: Sequence[BlockRun], num_remote_blocks: int) -> tuple[Indices, Indices] | int:
    """Local and remote block ids, position by position; the first position that is not granted otherwise."""
    positions, local_ids = wanted.spread()
    offers = _columns(_offers(granted, num_remote_blocks))
    bounds = np.searchsorted(positions, offers.indices)
    num_positions = np.concatenate([bounds[1:], [len(positions)]]) - bounds
    is_missing = positions >= np.repeat(offers.indices + offers.counts, num_positions)
    if is_missing.any():
        return int(positions[is_missing.argmax()])
    return local_ids, positions + np.repeat(offers.block_ids - offers.indices, num_positions)


def _offers(granted: Sequence[BlockRun], num_blocks: int) -> list[BlockRun]:
    """The runs that name only blocks of the pool, at positions that a table can have; block 0 is never read.

    They ascend. The first one comes before all positions and has no blocks, so that each position has one before it.
    """
    runs = [
        run
        for run in granted
        if 0 <= run.index < _MAX_POSITION and run.count > 0 and 0 < run.block_id <= num_blocks - run.count
    ]
    return sorted([_NO_BLOCKS, *runs], key=_BY_INDEX)


def num_merged(plan: ReadPlan, local_rows: Sequence[DescriptorRow], remote_rows: Sequence[DescriptorRow]) -> int:
    """How many descriptors are left when neighbours merge, by NIXL's rule.

    Two consecutive descriptors merge when both indices grow by one within one row and both rows are dense (stride
    equals length). Source: design notes on NIXL 1.5.1, measured.
    """
    if len(plan.local) == 0:
        return 0
    local_row, local_dense = _rows_of(plan.local, local_rows)
    remote_row, remote_dense = _rows_of(plan.remote, remote_rows)
    joins = (
        (np.diff(plan.local) == 1)
        & (np.diff(plan.remote) == 1)
        & (np.diff(local_row) == 0)
        & (np.diff(remote_row) == 0)
        & local_dense[1:]
        & remote_dense[1:]
    )
    return int(len(plan.local) - np.count_nonzero(joins))


def _rows_of(indices: Indices, rows: Sequence[DescriptorRow]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    # Of the indices' own type: NumPy would convert them all otherwise.
    ends = np.cumsum([row.count for row in rows], dtype=np.int32)
    row_of = np.searchsorted(ends, indices, side="right")
    dense = np.asarray([row.stride_bytes == row.length_bytes for row in rows])
    return row_of, dense[row_of]
