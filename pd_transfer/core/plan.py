"""What to read: token positions -> pairs of blocks -> descriptor indices, and how many runs they merge into."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import groupby
from operator import attrgetter

import msgspec
import numpy as np
import numpy.typing as npt

from pd_transfer.core.layout import BlockRun, DescriptorRow, EngineLayout, block_runs

Indices = npt.NDArray[np.int32]

_BY_INDEX = attrgetter("index")
_NOTHING = BlockRun(0, 0, 0)
"""An offer of no blocks: with it, every position has an offer at or before it."""


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
    ``local.groups[i]``; ``granted[i]`` belongs to ``remote.groups[i]``, in any order. The layouts have passed
    ``layout_mismatch``.
    """
    if len(needed) != len(local.groups):
        return Uncovered(f"{len(needed)} groups of blocks are to be filled, this engine has {len(local.groups)}")
    if len(granted) != len(remote.groups):
        return Uncovered(f"the grant lists {len(granted)} groups, the peer has {len(remote.groups)}")
    sites = _layer_sites(remote)
    counts = tuple(sum(run.count for run in runs) for runs in needed)
    num_descriptors = sum(count * len(group.layers) for count, group in zip(counts, local.groups, strict=True))
    to, of = np.empty(num_descriptors, dtype=np.int32), np.empty(num_descriptors, dtype=np.int32)
    start, row = 0, 0
    for group_index, group in enumerate(local.groups):
        paired: dict[int, tuple[Indices, Indices]] = {}
        for remote_group, layers in groupby(group.layers, lambda layer: sites[layer.name][1]):
            if remote_group not in paired:
                pieces = _pair(needed[group_index], granted[remote_group], remote.num_blocks)
                if isinstance(pieces, int):
                    return Uncovered(f"group {group_index} needs the block at position {pieces}, which is not granted")
                paired[remote_group] = _spread(pieces)
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


def _pair(needed: Sequence[BlockRun], granted: Sequence[BlockRun], num_remote_blocks: int) -> list[int] | int:
    """Pieces that are runs on both sides: first local block, first remote block and count, one after the other.

    The first position that is not granted otherwise.
    """
    offers = sorted([_NOTHING, *granted], key=_BY_INDEX)
    starts = [offer.index for offer in offers]
    pieces: list[int] = []
    for run in needed:
        position, end, shift = run.index, run.index + run.count, run.block_id - run.index
        while position < end:
            offer = offers[bisect_right(starts, position) - 1]
            index, first, count = offer.index, offer.block_id, offer.count
            # Outside the pool nothing is read, nor the null block, whatever a grant says.
            if position >= index + count or not 0 < first <= num_remote_blocks - count:
                return position
            stop = min(end, index + count)
            pieces += (position + shift, first + position - index, stop - position)
            position = stop
    return pieces


def _spread(pieces: list[int]) -> tuple[Indices, Indices]:
    """Local and remote block ids, block by block. At once for all pieces: there may be thousands."""
    table = np.array(pieces, dtype=np.int32).reshape(-1, 3)
    counts = table[:, 2]
    ends = np.cumsum(counts, dtype=np.int32)
    steps = np.arange(ends[-1] if pieces else 0, dtype=np.int32)
    firsts = np.repeat(table[:, :2].T - (ends - counts), counts, axis=1)
    return firsts[0] + steps, firsts[1] + steps


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
