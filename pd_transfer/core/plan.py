"""What to read: token positions -> pairs of blocks -> descriptor indices, and how many runs they merge into."""

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from pd_transfer.core.layout import BlockRun, DescriptorRow, EngineLayout, block_runs

Indices = npt.NDArray[np.int32]
_NO_IDS: Indices = np.empty(0, dtype=np.int32)


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
    wanted = [0 if block.is_hashed else block.block_id for block in table[first:end]]
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
    local_parts: list[Indices] = []
    remote_parts: list[Indices] = []
    num_bytes, row, counts = 0, 0, []
    for group_index, group in enumerate(local.groups):
        paired: dict[int, tuple[Indices, Indices]] = {}
        for layer in group.layers:
            remote_row, remote_group = sites[layer.name]
            if remote_group not in paired:
                pair = _pair(needed[group_index], granted[remote_group], remote.num_blocks)
                if isinstance(pair, int):
                    return Uncovered(f"group {group_index} needs the block at position {pair}, which is not granted")
                paired[remote_group] = pair
            local_ids, remote_ids = paired[remote_group]
            local_parts.append(local_ids + np.int32(row * local.num_blocks))
            remote_parts.append(remote_ids + np.int32(remote_row * remote.num_blocks))
            num_bytes += len(local_ids) * layer.page_bytes
            row += 1
        counts.append(sum(run.count for run in needed[group_index]))
    return ReadPlan(np.concatenate(local_parts), np.concatenate(remote_parts), num_bytes, tuple(counts))


def _layer_sites(layout: EngineLayout) -> dict[str, tuple[int, int]]:
    """Layer name -> (descriptor row, group index)."""
    groups = [index for index, group in enumerate(layout.groups) for _ in group.layers]
    return {layer.name: (row, groups[row]) for row, layer in enumerate(layout.layers())}


def _pair(
    needed: Sequence[BlockRun], granted: Sequence[BlockRun], num_remote_blocks: int
) -> tuple[Indices, Indices] | int:
    """Local and remote block ids, position by position; the first position that is not granted otherwise."""
    offers = sorted(granted, key=lambda run: run.index)
    starts = [run.index for run in offers]
    local_parts, remote_parts = [_NO_IDS], [_NO_IDS]
    for run in needed:
        position, end = run.index, run.index + run.count
        while position < end:
            at = bisect_right(starts, position) - 1
            if at < 0 or not _offers(offers[at], position, num_remote_blocks):
                return position
            offer = offers[at]
            stop = min(end, offer.index + offer.count)
            local_parts.append(_ids(run, position, stop))
            remote_parts.append(_ids(offer, position, stop))
            position = stop
    return np.concatenate(local_parts), np.concatenate(remote_parts)


def _offers(run: BlockRun, position: int, num_blocks: int) -> bool:
    """Whether the run holds the position and names only blocks of the pool; block 0 is never read."""
    return position < run.index + run.count and 0 < run.block_id <= num_blocks - run.count


def _ids(run: BlockRun, position: int, stop: int) -> Indices:
    first = run.block_id - run.index
    return np.arange(first + position, first + stop, dtype=np.int32)


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
    ends = np.cumsum([row.count for row in rows])
    row_of = np.searchsorted(ends, indices, side="right")
    dense = np.asarray([row.stride_bytes == row.length_bytes for row in rows])
    return row_of, dense[row_of]
