"""Layouts: block runs, descriptor rows, and what is refused."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_transfer.core.layout import (
    DescriptorRow,
    EngineLayout,
    GroupLayout,
    LayerLayout,
    block_runs,
    descriptor_rows,
    invalid_layout,
    layout_mismatch,
    num_leading_nulls,
    pack_runs,
    unpack_runs,
)
from tests.core.examples import LAYOUT, make_layout


@pytest.mark.parametrize(
    ("block_ids", "runs"),
    [
        ([], []),
        ([0, 0], []),
        ([4], [(0, 4, 1)]),
        ([4, 5, 6], [(0, 4, 3)]),
        ([0, 0, 4, 5], [(2, 4, 2)]),
        ([4, 0, 5], [(0, 4, 1), (2, 5, 1)]),
        ([4, 5, 9, 10], [(0, 4, 2), (2, 9, 2)]),
        ([6, 5, 4], [(0, 6, 1), (1, 5, 1), (2, 4, 1)]),
        ([0, 1], [(1, 1, 1)]),
    ],
)
def test_block_runs(block_ids, runs):
    assert unpack_runs(block_runs(block_ids)).tolist() == [list(run) for run in runs]
    assert pack_runs([number for run in runs for number in run]) == block_runs(block_ids)


def test_block_runs_start_where_they_are_told():
    assert block_runs([0, 4, 5], first_index=7) == pack_runs([8, 4, 2])


@given(st.lists(st.integers(0, 6)), st.integers(0, 100))
def test_block_runs_say_the_same_as_the_table(block_ids, first_index):
    runs = unpack_runs(block_runs(block_ids, first_index)).tolist()
    entries = {index + step: block_id + step for index, block_id, count in runs for step in range(count)}
    assert entries == {index: block for index, block in enumerate(block_ids, first_index) if block}


def test_leading_nulls_are_counted_where_they_are_one_object():
    null, block = object(), object()
    assert num_leading_nulls([null] * 5 + [block], lambda entry: entry is null) == 5
    assert num_leading_nulls([null] * 5, lambda entry: entry is null) == 5
    assert num_leading_nulls([block, null], lambda entry: entry is null) == 0
    assert num_leading_nulls([], lambda entry: entry is null) == 0
    # A block between nulls is not skipped, wherever the search has looked.
    assert num_leading_nulls([null, block, null, null, null, block], lambda entry: entry is null) in (0, 1)
    assert num_leading_nulls([object(), object()], lambda entry: entry is not block) == 0


def test_layers_and_rows_go_group_by_group():
    assert [layer.name for layer in LAYOUT.layers()] == ["full.0", "full.1", "sliding.0", "sliding.1"]
    rows = descriptor_rows(LAYOUT, region_address=1 << 20)
    assert rows[1] == DescriptorRow((1 << 20) + 100 * 256, length_bytes=256, stride_bytes=256, count=100)
    assert rows[:2] == rows[2:]  # layers of different groups alias


def test_digest_names_the_whole_layout():
    digests = {
        layout.digest()
        for layout in (
            LAYOUT,
            make_layout(["full.0"], ["full.1", "sliding.0", "sliding.1"]),
            msgspec.structs.replace(LAYOUT, num_blocks=99),
            make_layout(["full.0", "full.1"], ["sliding.0", "sliding.1"], block_size_tokens=32),
        )
    }
    assert len(digests) == 4
    assert all(len(digest) == 16 for digest in digests)
    assert LAYOUT.digest() == make_layout(["full.0", "full.1"], ["sliding.0", "sliding.1"]).digest()


def change_layer(layout: EngineLayout, name: str, **changes) -> EngineLayout:
    groups = tuple(
        msgspec.structs.replace(
            group,
            layers=tuple(
                msgspec.structs.replace(layer, **changes) if layer.name == name else layer for layer in group.layers
            ),
        )
        for group in layout.groups
    )
    return msgspec.structs.replace(layout, groups=groups)


def test_other_grouping_order_and_number_of_blocks_fit():
    other = make_layout(["sliding.1"], ["sliding.0"], ["full.1", "full.0"], num_blocks=7)
    assert layout_mismatch(LAYOUT, other) is None


@pytest.mark.parametrize(
    ("remote", "reason"),
    [
        (
            make_layout(["full.0", "full.1"], ["sliding.0"]),
            "layer sliding.1 does not exist on the peer (local 4 layers, peer 3)",
        ),
        (
            make_layout(["full.0", "full.1"], ["extra", "sliding.0", "sliding.1"]),
            "layer extra does not exist locally (local 4 layers, peer 5)",
        ),
    ],
)
def test_missing_layers_are_named(remote, reason):
    assert layout_mismatch(LAYOUT, remote) == reason


# Blocks are paired by position, so another block size would pair other tokens.
WIDER_GROUPS = tuple(msgspec.structs.replace(group, block_size_tokens=32) for group in LAYOUT.groups)


@pytest.mark.parametrize(
    ("remote", "peer"),
    [
        (change_layer(LAYOUT, "full.0", fingerprint="fp8"), "fp8 (256 bytes for 16 tokens)"),
        (change_layer(LAYOUT, "full.0", page_bytes=128), "bf16 (128 bytes for 16 tokens)"),
        (msgspec.structs.replace(LAYOUT, groups=WIDER_GROUPS), "bf16 (256 bytes for 32 tokens)"),
    ],
)
def test_mismatch_names_both_values(remote, peer):
    reason = f"layer full.0 has another layout: local bf16 (256 bytes for 16 tokens), peer {peer}"
    assert layout_mismatch(LAYOUT, remote) == reason


def one_layer(num_blocks=10, region_bytes=1000, block_size_tokens=16, **changes) -> EngineLayout:
    layer = msgspec.structs.replace(LayerLayout("a", 0, 100, 100, "bf16"), **changes)
    return EngineLayout(num_blocks, region_bytes, (GroupLayout(block_size_tokens, (layer,)),))


IMPOSSIBLE = "layer a has an impossible offset, page size or stride"
NOTHING = "a layout needs at least one block, one byte and one layer"


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        (LAYOUT, None),
        (one_layer(), None),
        (one_layer(page_bytes=50), None),
        (one_layer(num_blocks=0), NOTHING),
        (one_layer(num_blocks=-1), NOTHING),
        (one_layer(region_bytes=0), NOTHING),
        (EngineLayout(10, 1000, ()), NOTHING),
        (EngineLayout(10, 1000, (GroupLayout(16, ()),)), NOTHING),
        (one_layer(block_size_tokens=0), "block size 0 is not positive"),
        (one_layer(block_size_tokens=-16), "block size -16 is not positive"),
        (one_layer(offset_bytes=-1), IMPOSSIBLE),
        (one_layer(page_bytes=0), IMPOSSIBLE),
        (one_layer(page_bytes=101), IMPOSSIBLE),
        (one_layer(block_stride_bytes=-100), IMPOSSIBLE),
        (one_layer(offset_bytes=1), "layer a ends outside its region"),
        (one_layer(num_blocks=11), "layer a ends outside its region"),
        (one_layer(num_blocks=2**31, region_bytes=2**62), "more blocks than an index can name"),
        (make_layout(["a", "b"], ["a"]), "a layer is listed twice"),
        (make_layout(["a", "a"]), "a layer is listed twice"),
    ],
)
def test_layouts_from_peers_are_checked(layout, reason):
    assert invalid_layout(layout) == reason
