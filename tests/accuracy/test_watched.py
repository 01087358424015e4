"""The controls' damage does what it says, to the right bytes, and fingerprints name what is there."""

import ctypes
import json
from pathlib import Path

import numpy as np
import pytest

from pd_transfer.core.layout import DescriptorRow
from pd_transfer.core.params import PeerKey, Transfer

pytestmark = pytest.mark.vllm

NUM_BLOCKS, PAGE = 8, 16
LAYERS_BY_GROUP = (2, 1)
PEER = PeerKey("peer")


class Reads:
    """A pull transport whose reads are over at once; the memory has what the test put there."""

    def __init__(self) -> None:
        self.submitted: list[list[int]] = []

    def submit_read(self, key, local, remote):
        assert len(local) == len(remote)
        self.submitted.append(local.tolist())
        return Transfer(len(self.submitted))

    def poll(self, transfer):
        return True


class Bench:
    """Three layers in two groups over one buffer, every byte of a block its descriptor index."""

    def __init__(self, damage: dict | None = None, log: Path | None = None) -> None:
        from benchmarks.accuracy.watched import Blocks, Damage, WatchedPull

        self.buffer = ctypes.create_string_buffer(sum(LAYERS_BY_GROUP) * NUM_BLOCKS * PAGE)
        base = ctypes.addressof(self.buffer)
        rows = [DescriptorRow(base + layer * NUM_BLOCKS * PAGE, PAGE, PAGE, NUM_BLOCKS) for layer in range(3)]
        self.blocks = Blocks(rows, LAYERS_BY_GROUP)
        self.inner = Reads()
        self.pull = WatchedPull(self.inner, self.blocks, Damage(**damage) if damage else None, log)

    def read(self, *blocks_by_group: list[int], fill: int = 1) -> None:
        """Read blocks of each group; what arrives is ``fill``."""
        rows = [0, 0, 1]
        local = [row * NUM_BLOCKS + block for row, group in enumerate(rows) for block in blocks_by_group[group]]
        indices = np.asarray(local, dtype=np.int32)
        for index in local:
            ctypes.memset(ctypes.addressof(self.buffer) + index * PAGE, fill, PAGE)
        assert self.pull.poll(self.pull.submit_read(PEER, indices, indices))

    def content(self) -> list[list[int]]:
        """The first byte of each block, layer by layer; every block is of one value."""
        blocks = [self.buffer.raw[i : i + PAGE] for i in range(0, len(self.buffer.raw), PAGE)]
        assert all(len(set(block)) == 1 for block in blocks)
        values = [block[0] for block in blocks]
        return [values[i : i + NUM_BLOCKS] for i in range(0, len(values), NUM_BLOCKS)]


def test_without_orders_nothing_is_touched():
    bench = Bench()
    bench.read([1, 2], [3])
    assert bench.content() == [[0, 1, 1, 0, 0, 0, 0, 0]] * 2 + [[0, 0, 0, 1, 0, 0, 0, 0]]


def test_zero_spoils_one_block_in_every_layer_of_its_group():
    bench = Bench({"kind": "zero", "group": 0, "position": -1})
    bench.read([5, 2], [3])
    assert bench.content() == [[0, 0, 0, 0, 0, 1, 0, 0]] * 2 + [[0, 0, 0, 1, 0, 0, 0, 0]]


def test_a_position_that_was_not_read_is_left_alone():
    bench = Bench({"kind": "zero", "group": 1, "position": -2})
    bench.read([5], [3])
    assert bench.content()[2][3] == 1


def test_swap_passes_blocks_on():
    bench = Bench({"kind": "swap", "group": 1, "position": 0})
    bench.read([1], [3], fill=1)
    bench.read([2], [4], fill=2)
    bench.read([3], [5], fill=3)
    assert bench.content()[2] == [0, 0, 0, 1, 1, 2, 0, 0]
    assert bench.content()[0] == [0, 1, 2, 3, 0, 0, 0, 0]


def test_skip_does_not_read_the_group():
    bench = Bench({"kind": "skip", "group": 0})
    bench.read([1, 2], [3])
    assert bench.inner.submitted == [[2 * NUM_BLOCKS + 3]]


def test_fingerprints_name_the_content_block_by_block(tmp_path):
    bench = Bench({"kind": "zero", "group": 0, "position": 1}, tmp_path / "log")
    bench.read([1, 2], [3])
    bench.read([4, 5], [6])
    first, second = map(json.loads, (tmp_path / "log").read_text().splitlines())
    assert first == second
    assert first[0][0] != first[0][1]
    assert first == [[bench.blocks.fingerprint(0, 1), bench.blocks.fingerprint(0, 2)], [bench.blocks.fingerprint(1, 3)]]
