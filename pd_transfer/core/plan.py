"""What to read: token positions -> pairs of blocks -> descriptor indices, and how many runs they merge into."""

from collections.abc import Sequence
from itertools import chain
from operator import attrgetter
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from pd_transfer.core.layout import BlockRun, DescriptorRow, EngineLayout, block_runs

Indices = npt.NDArray[np.int32]

_BY_INDEX = attrgetter("index")
_BEFORE_ALL: Indices = np.array([-1], dtype=np.int32)
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


class TableBlock(NamedTuple):
    """One entry of a local block table. A hashed block is shared and must not be written."""

    block_id: int
    is_hashed: bool


def needed_runs(
    table: Sequence[TableBlock], block_size_tokens: int, num_local_tokens: int, num_tokens: int
) -> tuple[BlockRun, ...]:
    """The blocks of one group's table that must be filled so that tokens [num_local_tokens, num_tokens) are present.

    vLLM's table already says what attention can still reach: out-of-window entries are the null block. What is hashed
    came from the prefix cache and is right as it is.
    """
    first = num_local_tokens // block_size_tokens
    end = -(-num_tokens // block_size_tokens)
    wanted = [0 if is_hashed else block_id for block_id, is_hashed in table[first:end]]
    return block_runs(wanted, first)


def plan_read(
    local: EngineLayout,
    remote: EngineLayout,
    needed: Sequence[Sequence[BlockRun]],
    granted: Sequence[Sequence[BlockRun]],
) -> ReadPlan | Uncovered:
    """Pair the needed blocks of each local group with the granted ones by position, layer by layer.

    Groups are matched by their layers, so the two sides may group layers differently. ``needed[i]`` belongs to
    ``local.groups[i]`` and ``granted[i]`` to ``remote.groups[i]``; the layouts have passed ``layout_mismatch``.
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
    start, row, num_bytes = 0, 0, 0
    for group_index, group in enumerate(local.groups):
        paired: dict[int, tuple[Indices, Indices]] = {}
        for layer in group.layers:
            remote_row, remote_group = sites[layer.name]
            if remote_group not in paired:
                pair = _pair(wanted[group_index], granted[remote_group], remote.num_blocks)
                if isinstance(pair, int):
                    return Uncovered(f"group {group_index} needs the block at position {pair}, which is not granted")
                paired[remote_group] = pair
            local_ids, remote_ids = paired[remote_group]
            stop = start + len(local_ids)
            np.add(local_ids, np.int32(row * local.num_blocks), out=to[start:stop])
            np.add(remote_ids, np.int32(remote_row * remote.num_blocks), out=of[start:stop])
            num_bytes += len(local_ids) * layer.page_bytes
            start, row = stop, row + 1
    return ReadPlan(to, of, num_bytes, counts)


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
    offers = _columns(sorted((run for run in granted if _is_offer(run, num_remote_blocks)), key=_BY_INDEX))
    # Before the first offer comes one of no blocks, so that every position has an offer at or before it.
    starts = np.concatenate([_BEFORE_ALL, offers.indices])
    ends = np.concatenate([_BEFORE_ALL, offers.indices + offers.counts])
    shifts = np.concatenate([_BEFORE_ALL, offers.block_ids - offers.indices])
    at = np.searchsorted(starts, positions, side="right") - 1
    is_missing = positions >= ends[at]
    if is_missing.any():
        return int(positions[is_missing.argmax()])
    return local_ids, positions + shifts[at]


def _is_offer(run: BlockRun, num_blocks: int) -> bool:
    """Whether a run names only blocks of the pool, at positions that a table can have; block 0 is never read."""
    return 0 <= run.index < _MAX_POSITION and run.count > 0 and 0 < run.block_id <= num_blocks - run.count


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
