"""What to read: token positions -> pairs of blocks -> descriptor indices, and how many runs they merge into."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from pd_transfer.core.layout import RUN_BYTES, BlockRuns, EngineLayout, LayerLayout, block_runs, unpack_runs

Indices = npt.NDArray[np.int32]
RunTable = npt.NDArray[np.int32]
Keys = npt.NDArray[np.int64]
_MAX_POSITION = 2**32 - 1


class ReadPlan(msgspec.Struct, frozen=True):
    """Descriptor ``remote[i]`` is read into descriptor ``local[i]``; layer-major, positions ascending in a layer.

    ``num_merged`` descriptors are left when neighbours merge, by NIXL's rule: two consecutive ones do when both indices
    grow by one within one row and both rows are dense (stride equals length). Source: design notes on NIXL 1.5.1,
    measured.
    """

    local: Indices
    remote: Indices
    num_bytes: int
    num_merged: int
    num_blocks_by_group: tuple[int, ...]


class Uncovered(msgspec.Struct, frozen=True):
    """The grant does not offer a block that decode needs; ``reason`` names group and position."""

    reason: str


def needed_runs(block_ids: Sequence[int], block_size_tokens: int, num_local_tokens: int, num_tokens: int) -> BlockRuns:
    """The blocks of one group's table that must be filled so that tokens [num_local_tokens, num_tokens) are present.

    ``block_ids`` is the table, with 0 where nothing may be written. There vLLM has its null block, which says that
    attention reaches no further, or a hashed one, which is shared and right as it came from the prefix cache.
    """
    first = num_local_tokens // block_size_tokens
    end = -(-num_tokens // block_size_tokens)
    return block_runs(block_ids[first:end], first)


@dataclass(frozen=True, slots=True)
class _Pairing:
    """Neighbouring layers of a local group that one remote group has, too.

    ``local_firsts`` and ``remote_firsts``: each layer's descriptor of block 0. ``num_bytes``: of one block of them all.
    ``num_dense``: layers whose blocks lie side by side on both sides.
    """

    local_group: int
    remote_group: int
    local_firsts: Indices
    remote_firsts: Indices
    num_bytes: int
    num_dense: int


class ReadPlanner:
    """Which descriptors of a peer go into which of ours: what two layouts decide, worked out once for all reads.

    Groups are matched by their layers, so the two sides may group layers differently. The layouts have passed
    ``layout_mismatch``.
    """

    def __init__(self, local: EngineLayout, remote: EngineLayout) -> None:
        self._num_local_groups = len(local.groups)
        self._num_remote_groups = len(remote.groups)
        self._num_remote_blocks = remote.num_blocks
        self._pairings = _pairings(local, remote)
        self._bases = np.arange(len(self._pairings) + 1, dtype=np.int64) << 32

    def plan(self, needed: Sequence[BlockRuns], granted: Sequence[BlockRuns]) -> ReadPlan | Uncovered:
        """Pair the needed blocks of each local group with the granted ones by position, layer by layer.

        ``needed[i]`` belongs to the i-th local group; ``granted[i]`` to the i-th remote one, in any order.
        """
        if len(needed) != self._num_local_groups:
            return Uncovered(
                f"{len(needed)} groups of blocks are to be filled, this engine has {self._num_local_groups}"
            )
        if len(granted) != self._num_remote_groups:
            return Uncovered(f"the grant lists {len(granted)} groups, the peer has {self._num_remote_groups}")
        keys, to = _spread(*self._keyed([needed[pairing.local_group] for pairing in self._pairings]))
        offers = self._keyed([granted[pairing.remote_group] for pairing in self._pairings])
        of = _look_up(keys, *_sound(*offers, self._num_remote_blocks))
        if isinstance(of, int):
            group, position = self._pairings[of >> 32].local_group, of & _MAX_POSITION
            return Uncovered(f"group {group} needs the block at position {position}, which is not granted")
        return self._assemble(np.searchsorted(keys, self._bases).tolist(), to, of)

    def _keyed(self, runs: Sequence[BlockRuns]) -> tuple[Keys, RunTable]:
        """Runs, some for each pairing, as one table; and the key of each: pairing and position as one number."""
        table = unpack_runs(b"".join(runs))
        bases: Keys = np.repeat(self._bases[:-1], [len(each) // RUN_BYTES for each in runs])
        return bases + table[:, 0], table

    def _assemble(self, bounds: list[int], to: Indices, of: Indices) -> ReadPlan:
        """From block ids to descriptors. The blocks of the i-th pairing begin at ``bounds[i]``."""
        begins = np.ones(len(to), dtype=np.bool_)
        begins[1:] = (np.diff(to) != 1) | (np.diff(of) != 1)
        counts = [stop - start for start, stop in pairwise(bounds)]
        size = sum(count * len(pairing.local_firsts) for count, pairing in zip(counts, self._pairings, strict=True))
        # One array, so that the next plan finds the memory of the last one: two would be trimmed off the heap's end.
        local, remote = np.empty((2, size), dtype=np.int32)
        num_blocks = [0] * self._num_local_groups
        row = num_bytes = num_merged = 0
        for pairing, start, count in zip(self._pairings, bounds, counts, strict=False):
            shape = num_layers, _ = len(pairing.local_firsts), count
            part, blocks = slice(row, row + num_layers * count), slice(start, start + count)
            np.add.outer(pairing.local_firsts, to[blocks], out=local[part].reshape(shape))
            np.add.outer(pairing.remote_firsts, of[blocks], out=remote[part].reshape(shape))
            # Descriptors of two pairings lie in two rows.
            begins[start : start + 1] = True
            num_runs = int(np.count_nonzero(begins[blocks]))
            num_merged += pairing.num_dense * num_runs + (num_layers - pairing.num_dense) * count
            num_bytes += pairing.num_bytes * count
            num_blocks[pairing.local_group] = count
            row = part.stop
        return ReadPlan(local, remote, num_bytes, num_merged, tuple(num_blocks))


class _Row(NamedTuple):
    """One layer, and where its row of descriptors is."""

    number: int
    group: int
    layer: LayerLayout


def _rows(layout: EngineLayout) -> list[_Row]:
    layers = [(group, layer) for group, each in enumerate(layout.groups) for layer in each.layers]
    return [_Row(number, *row) for number, row in enumerate(layers)]


def _pairings(local: EngineLayout, remote: EngineLayout) -> list[_Pairing]:
    """In the order of the local rows."""
    theirs = {row.layer.name: row for row in _rows(remote)}
    pairs = [(row, theirs[row.layer.name]) for row in _rows(local)]
    return [
        _Pairing(
            local_group,
            remote_group,
            np.array([row.number * local.num_blocks for row, _ in same], dtype=np.int32),
            np.array([row.number * remote.num_blocks for _, row in same], dtype=np.int32),
            sum(row.layer.page_bytes for row, _ in same),
            sum(_is_dense(ours.layer) and _is_dense(theirs.layer) for ours, theirs in same),
        )
        for (local_group, remote_group), part in groupby(pairs, lambda pair: (pair[0].group, pair[1].group))
        for same in [list(part)]
    ]


def _is_dense(layer: LayerLayout) -> bool:
    return layer.block_stride_bytes == layer.page_bytes


def _spread(keys: Keys, table: RunTable) -> tuple[Keys, Indices]:
    """Key and block id of each block of some runs."""
    counts = table[:, 2]
    ends = np.cumsum(counts, dtype=np.int32)
    steps = np.arange(ends[-1] if len(ends) else 0, dtype=np.int32) - np.repeat(ends - counts, counts)
    return np.repeat(keys, counts) + steps, np.repeat(table[:, 1], counts) + steps


def _sound(keys: Keys, table: RunTable, num_blocks: int) -> tuple[Keys, Keys, Indices]:
    """Key, end and first block of those offers that stay in the pool, by key.

    Outside of it nothing is read, nor the null block, whatever a grant says.
    """
    index, first, count = table.T
    is_sound = (index >= 0) & (first > 0) & (count > 0) & (first <= num_blocks - count.astype(np.int64))
    order = np.argsort(keys, kind="stable")
    order = order[is_sound[order]]
    return keys[order], (keys + count)[order], first[order]


def _look_up(keys: Keys, starts: Keys, ends: Keys, firsts: Indices) -> Indices | int:
    """The block that is offered at each key; the first key without one otherwise."""
    if not len(starts):
        return int(keys[0]) if len(keys) else firsts
    at = np.searchsorted(starts, keys, side="right") - 1
    is_covered = (at >= 0) & (keys < ends[at])
    if not is_covered.all():
        return int(keys[is_covered.argmin()])
    return firsts[at] + (keys - starts[at]).astype(np.int32)
