"""What is read: the seed's own example, the least bytes by brute force, pairing by position, merging."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_transfer.core.layout import (
    BlockRuns,
    DescriptorRow,
    EngineLayout,
    GroupLayout,
    LayerLayout,
    block_runs,
    descriptor_rows,
    layout_mismatch,
    pack_runs,
    unpack_runs,
)
from pd_transfer.core.plan import ReadPlan, ReadPlanner, Uncovered, needed_runs
from tests.core.examples import LAYOUT, PAGE_BYTES, make_layout


def vllm_table(num_tokens: int, block_size: int, window: int | None, block_ids: Iterator[int]) -> list[int]:
    """A group's block table by vLLM's rule: null (0) where no later token attends any more.

    vLLM: ``num_skipped_tokens = max(0, num_computed_tokens - sliding_window + 1)``; full blocks of those are freed.
    """
    num_skipped_tokens = 0 if window is None else max(0, num_tokens - window + 1)
    num_null = num_skipped_tokens // block_size
    num_blocks = -(-num_tokens // block_size)
    return [0] * num_null + [next(block_ids) for _ in range(num_blocks - num_null)]


# --------------------------------------------------------------------------------------------------- the seed's example

WINDOW, BLOCK = 1024, 64
PROMPT_TOKENS = 4000
NUM_BLOCKS = 100_000
SLIDING = [f"sliding.{layer}" for layer in range(29)]
FULL = [f"full.{layer}" for layer in range(5)]
# Gemma-3-4b: 29 sliding layers in 6 groups of 5 (one slot is padding), 5 full ones in a group.
GEMMA_GROUPS = [*(SLIDING[start : start + 5] for start in range(0, 29, 5)), FULL]
GEMMA_WINDOWS = [*[WINDOW] * 6, None]
GEMMA = make_layout(*GEMMA_GROUPS, num_blocks=NUM_BLOCKS, block_size_tokens=BLOCK)


def gemma_plan(num_prompt_tokens: int, local_ids: Iterator[int], remote_ids: Iterator[int]) -> ReadPlan:
    """Prefill holds all tokens but the last; decode has none of them."""
    num_tokens = num_prompt_tokens - 1
    needed, granted = [], []
    for window in GEMMA_WINDOWS:
        local = vllm_table(num_tokens, BLOCK, window, local_ids)
        needed.append(needed_runs(local, BLOCK, 0, num_tokens))
        granted.append(block_runs(vllm_table(num_tokens, BLOCK, window, remote_ids)))
    plan = ReadPlanner(GEMMA, GEMMA).plan(needed, granted)
    assert isinstance(plan, ReadPlan)
    return plan


def test_seed_example_flat():
    """Without the hybrid manager: one group of 34 layers, every block of every layer."""
    flat = make_layout([*SLIDING, *FULL], num_blocks=NUM_BLOCKS, block_size_tokens=BLOCK)
    runs = block_runs(range(1, 64))
    assert len(ReadPlanner(flat, flat).plan([runs], [runs]).local) == 63 * 34 == 2142


def test_seed_example_hybrid():
    plan = gemma_plan(PROMPT_TOKENS, count(1), count(1))
    assert plan.num_blocks_by_group == (17, 17, 17, 17, 17, 17, 63)
    with_padding_read = sum(plan.num_blocks_by_group) * 5
    assert with_padding_read == (6 * 17 + 63) * 5 == 825
    assert len(plan.local) == len(plan.remote) == 29 * 17 + 5 * 63 == 808
    assert plan.num_bytes == 808 * PAGE_BYTES


def test_seed_example_merges_to_a_run_per_layer_when_ids_are_contiguous():
    plan = gemma_plan(PROMPT_TOKENS, count(1), count(500))
    assert plan.num_merged == 34


@pytest.mark.parametrize(("local_step", "remote_step"), [(2, 2), (1, 2), (2, 1), (1, -1)])
def test_seed_example_does_not_merge_when_ids_lie_apart(local_step, remote_step):
    """One scattered side is enough."""
    plan = gemma_plan(PROMPT_TOKENS, count(1, local_step), count(5000, remote_step))
    assert plan.num_merged == 808


@pytest.mark.parametrize(
    ("num_prompt_tokens", "window_blocks"),
    [
        (3968, range(46, 62)),
        (3969, range(46, 62)),
        *((n, range(46, 63)) for n in range(3970, 4032)),
        (4032, range(47, 63)),
        (4033, range(47, 63)),
    ],
)
def test_seed_example_has_17_window_blocks_for_3970_to_4031_prompt_tokens(num_prompt_tokens, window_blocks):
    num_tokens = num_prompt_tokens - 1
    table = vllm_table(num_tokens, BLOCK, WINDOW, count(1))
    ((index, _, num_blocks),) = unpack_runs(needed_runs(table, BLOCK, 0, num_tokens)).tolist()
    assert range(index, index + num_blocks) == window_blocks


# ---------------------------------------------------------------------------------------------------------- least bytes


@dataclass(frozen=True)
class Kind:
    """Layers that are alike. ``window`` None is full attention."""

    name: str
    window: int | None
    block_size: int
    num_layers: int

    def layers(self) -> list[str]:
        return [f"{self.name}.{layer}" for layer in range(self.num_layers)]


@dataclass(frozen=True)
class Group:
    kind: Kind
    layers: tuple[str, ...]


@dataclass(frozen=True)
class Engine:
    """One side: how it groups the layers, and the block table of each group."""

    groups: list[Group]
    num_blocks: int
    tables: list[list[int]]

    def layout(self) -> EngineLayout:
        slots = max(len(group.layers) for group in self.groups)
        stride = slots * 64
        return EngineLayout(
            self.num_blocks,
            self.num_blocks * stride,
            tuple(
                GroupLayout(
                    group.kind.block_size,
                    tuple(
                        LayerLayout(name, slot * 64, stride, 8 + len(group.kind.name), group.kind.name)
                        for slot, name in enumerate(group.layers)
                    ),
                )
                for group in self.groups
            ),
        )

    def at(self, layer: str, position: int) -> int:
        """The block id of a layer's table position."""
        table = next(table for group, table in zip(self.groups, self.tables, strict=True) if layer in group.layers)
        return table[position]


def attended(kind: Kind, num_prompt_tokens: int) -> set[int]:
    """The positions of the blocks that the last token of a prompt attends to, token by token, itself excepted."""
    query = num_prompt_tokens - 1
    return {token // kind.block_size for token in range(query) if kind.window is None or query - token < kind.window}


# No model has a window of one token; vLLM keeps a block for it that nothing attends to.
KINDS = st.lists(
    st.tuples(st.none() | st.integers(2, 40), st.sampled_from([1, 2, 4, 8]), st.integers(1, 5)), min_size=1, max_size=3
).map(lambda kinds: [Kind("abc"[at] * (at + 1), *kind) for at, kind in enumerate(kinds)])


def grouped(kinds: Sequence[Kind], rng: random.Random) -> list[Group]:
    """The layers of each kind in groups of some size, all in some order."""
    groups = []
    for kind in kinds:
        layers, size = kind.layers(), rng.randint(1, kind.num_layers)
        rng.shuffle(layers)
        groups += [Group(kind, tuple(layers[start : start + size])) for start in range(0, len(layers), size)]
    rng.shuffle(groups)
    return groups


def remote_engine(kinds: Sequence[Kind], num_tokens: int, rng: random.Random) -> Engine:
    """Prefill: holds what vLLM keeps; some tables have not been trimmed yet, some go on behind the prompt."""
    groups = grouped(kinds, rng)
    ids = iter(rng.sample(range(1, 2000), 1999))
    tables = []
    for group in groups:
        held = vllm_table(num_tokens, group.kind.block_size, group.kind.window, ids)
        if rng.random() < 0.3:
            held = [block_id or next(ids) for block_id in held]
        tables.append(held + [next(ids) for _ in range(rng.choice([0, 0, 1, 3]))])
    return Engine(groups, 2000, tables)


@dataclass(frozen=True)
class Case:
    """One request: decode has ``num_local_tokens`` itself, and ``hashed`` names blocks that are shared."""

    kinds: list[Kind]
    num_prompt_tokens: int
    num_local_tokens: int
    local: Engine
    remote: Engine
    hashed: frozenset[int]


@st.composite
def cases(draw) -> Case:
    kinds, rng = draw(KINDS), draw(st.randoms(use_true_random=True))
    num_prompt_tokens = draw(st.integers(2, 80))
    num_tokens = num_prompt_tokens - 1
    largest = max(kind.block_size for kind in kinds)
    num_local_tokens = draw(st.integers(0, num_tokens // largest)) * largest
    groups = grouped(kinds, rng)
    ids = iter(rng.sample(range(1, 1000), 999))
    tables = [vllm_table(num_tokens, group.kind.block_size, group.kind.window, ids) for group in groups]
    hashed = set()
    for group, table in zip(groups, tables, strict=True):
        first = num_local_tokens // group.kind.block_size
        hashed |= {block for block in table[:first] if block}
        hashed |= {block for block in table[first:] if block and rng.random() < draw(st.sampled_from([0, 0.2]))}
    local = Engine(groups, 1000, tables)
    return Case(
        kinds, num_prompt_tokens, num_local_tokens, local, remote_engine(kinds, num_tokens, rng), frozenset(hashed)
    )


def reads(plan: ReadPlan, local: EngineLayout, remote: EngineLayout) -> set[tuple[str, int, int]]:
    """(layer, local block, remote block) of each descriptor. Both ends of each must belong to one layer."""
    local_layers, remote_layers = list(local.layers()), list(remote.layers())
    found = set()
    for to, of in zip(plan.local.tolist(), plan.remote.tolist(), strict=True):
        local_row, local_block = divmod(to, local.num_blocks)
        remote_row, remote_block = divmod(of, remote.num_blocks)
        layer = local_layers[local_row].name
        assert layer == remote_layers[remote_row].name
        found.add((layer, local_block, remote_block))
    assert len(found) == len(plan.local)
    return found


@settings(max_examples=300)
@given(cases())
def test_exactly_the_least_is_read(case):
    local, remote = case.local.layout(), case.remote.layout()
    assert layout_mismatch(local, remote) is None
    num_tokens = case.num_prompt_tokens - 1
    needed = [
        needed_runs(
            [0 if block_id in case.hashed else block_id for block_id in table],
            group.kind.block_size,
            case.num_local_tokens,
            num_tokens,
        )
        for group, table in zip(case.local.groups, case.local.tables, strict=True)
    ]
    plan = ReadPlanner(local, remote).plan(needed, [block_runs(table) for table in case.remote.tables])
    assert isinstance(plan, ReadPlan)
    least = {
        (layer, case.local.at(layer, position), case.remote.at(layer, position))
        for kind in case.kinds
        for layer in kind.layers()
        for position in attended(kind, case.num_prompt_tokens)
        if position >= case.num_local_tokens // kind.block_size and case.local.at(layer, position) not in case.hashed
    }
    assert reads(plan, local, remote) == least
    page_bytes = {layer.name: layer.page_bytes for layer in local.layers()}
    assert plan.num_bytes == sum(page_bytes[layer] for layer, _, _ in least)
    assert plan.num_merged == merged_one_by_one(plan, local, remote)
    assert all(local_block and remote_block for _, local_block, remote_block in least)


# ------------------------------------------------------------------------------------------------------------ positions


def runs(*entries: tuple[int, int, int]) -> BlockRuns:
    return pack_runs([number for entry in entries for number in entry])


def pairs(plan: ReadPlan) -> list[tuple[int, int]]:
    """(local, remote) block ids of the first layer."""
    return [
        (to, of) for to, of in zip(plan.local.tolist(), plan.remote.tolist(), strict=True) if to < ONE_LAYER.num_blocks
    ]


ONE_LAYER = make_layout(["a"])


@pytest.mark.parametrize(
    ("needed", "granted", "expected"),
    [
        (runs(), runs(), []),
        (runs(), runs((0, 50, 4)), []),
        (runs((0, 5, 2)), runs((0, 50, 2)), [(5, 50), (6, 51)]),
        # More tokens on the remote side, fewer needed: nothing is aligned by head or tail.
        (runs((1, 5, 2)), runs((0, 50, 9)), [(5, 51), (6, 52)]),
        # Leading nulls, more of them on one side than on the other.
        (runs((3, 5, 2)), runs((2, 50, 3)), [(5, 51), (6, 52)]),
        # Holes on either side.
        (runs((0, 5, 1), (2, 9, 1)), runs((0, 50, 3)), [(5, 50), (9, 52)]),
        (runs((0, 5, 3)), runs((0, 50, 1), (1, 70, 1), (2, 60, 5)), [(5, 50), (6, 70), (7, 60)]),
        # A grant may list its runs in any order.
        (runs((0, 5, 3)), runs((2, 60, 1), (0, 50, 2)), [(5, 50), (6, 51), (7, 60)]),
        (runs((0, 5, 1), (1, 9, 1)), runs((0, 50, 2)), [(5, 50), (9, 51)]),
        (runs((0, 99, 1)), runs((0, 99, 1)), [(99, 99)]),
    ],
)
def test_blocks_are_paired_by_position(needed, granted, expected):
    plan = ReadPlanner(ONE_LAYER, ONE_LAYER).plan([needed], [granted])
    assert pairs(plan) == expected
    assert plan.local.dtype == plan.remote.dtype == np.int32
    assert plan.num_blocks_by_group == (len(expected),)


@pytest.mark.parametrize(
    ("needed", "granted", "position"),
    [
        (runs((0, 5, 1)), runs(), 0),
        (runs((0, 5, 3)), runs((0, 50, 2)), 2),
        (runs((2, 5, 1)), runs((3, 50, 4)), 2),
        (runs((0, 5, 3)), runs((0, 50, 1), (2, 60, 1)), 1),
        # A genuine grant never says these, but nothing may be read outside the pool, nor from the null block.
        (runs((0, 5, 1)), runs((0, 0, 1)), 0),
        (runs((0, 5, 1)), runs((-1, 0, 2)), 0),
        (runs((0, 5, 1)), runs((0, 100, 1)), 0),
        (runs((0, 5, 1)), runs((0, 99, 2)), 0),
        (runs((0, 5, 1)), runs((0, -5, 1)), 0),
        (runs((0, 5, 1)), runs((0, 50, -1)), 0),
        (runs((0, 5, 1)), runs((0, 50, 0)), 0),
        (runs((0, 5, 1)), runs((0, 2**31 - 1, 2**31 - 1)), 0),
        (runs((0, 5, 1)), runs((-(2**31), 1, 2**31 - 1)), 0),
        (runs((0, 5, 1)), runs((2**31 - 1, 1, 2**31 - 1)), 0),
        # Not even for the group before or after it.
        (runs((2**31 - 1, 5, 1)), runs((0, 1, 50)), 2**31 - 1),
    ],
)
def test_what_is_not_granted_is_named(needed, granted, position):
    local = make_layout(["other"], ["a"])
    remote = make_layout(["a"], ["other"])
    plan = ReadPlanner(local, remote).plan([runs(), needed], [granted, runs()])
    assert plan == Uncovered(f"group 1 needs the block at position {position}, which is not granted")


def test_a_grant_for_another_number_of_groups():
    planner = ReadPlanner(LAYOUT, LAYOUT)
    assert planner.plan([runs(), runs()], [runs()]) == Uncovered("the grant lists 1 groups, the peer has 2")
    reason = "1 groups of blocks are to be filled, this engine has 2"
    assert planner.plan([runs()], [runs(), runs()]) == Uncovered(reason)


def test_groups_are_matched_by_their_layers():
    """A local group may span remote ones, and the other way round; an empty group costs nothing."""
    local = make_layout(["a", "b"], ["c"], ["d"])
    remote = make_layout(["d", "c"], ["b"], ["a"], num_blocks=50)
    plan = ReadPlanner(local, remote).plan(
        [runs((0, 5, 1)), runs((1, 7, 1)), runs()], [runs((0, 20, 2)), runs((0, 30, 1)), runs((0, 40, 1))]
    )
    assert reads(plan, local, remote) == {("a", 5, 40), ("b", 5, 30), ("c", 7, 21)}
    assert plan.num_blocks_by_group == (1, 1, 0)


def test_nothing_needed_is_a_plan_without_descriptors():
    plan = ReadPlanner(LAYOUT, LAYOUT).plan([runs(), runs()], [runs(), runs()])
    assert (len(plan.local), plan.num_bytes, plan.num_blocks_by_group) == (0, 0, (0, 0))
    assert plan.num_merged == 0


def test_only_blocks_between_the_local_tokens_and_the_last_are_needed():
    table = [0, 4, 0, 0, 7, 8]
    assert needed_runs(table, 16, 0, 80) == runs((1, 4, 1), (4, 7, 1))
    assert needed_runs(table, 16, 32, 81) == runs((4, 7, 2))
    assert needed_runs(table, 16, 80, 80) == runs()
    assert needed_runs(table, 16, 70, 79) == runs((4, 7, 1))  # a block that is present in part is read again
    assert needed_runs([], 16, 0, 80) == runs()


# -------------------------------------------------------------------------------------------------------------- merging


def merged_one_by_one(plan: ReadPlan, local: EngineLayout, remote: EngineLayout) -> int:
    """NIXL's rule, descriptor by descriptor, on the addresses themselves."""
    local_rows, remote_rows = descriptor_rows(local, 1 << 30), descriptor_rows(remote, 1 << 40)

    def place(index: int, rows: Sequence[DescriptorRow], num_blocks: int) -> tuple[int, int, bool]:
        row = rows[index // num_blocks]
        return index // num_blocks, index % num_blocks, row.stride_bytes == row.length_bytes

    num_merged, last = 0, None
    for to, of in zip(plan.local.tolist(), plan.remote.tolist(), strict=True):
        here = place(to, local_rows, local.num_blocks), place(of, remote_rows, remote.num_blocks)
        joins = last is not None and all(new == (old[0], old[1] + 1, True) for old, new in zip(last, here, strict=True))
        num_merged += not joins
        last = here
    return num_merged


TWO_LAYERS = make_layout(["a", "b"], num_blocks=10)
TWO_GROUPS = make_layout(["a"], ["b"], num_blocks=10)


@pytest.mark.parametrize(
    ("needed", "granted", "expected"),
    [
        (runs((0, 1, 1)), runs((0, 1, 1)), 2),
        (runs((0, 1, 3)), runs((0, 5, 3)), 2),
        (runs((0, 1, 2)), runs((0, 5, 1), (1, 7, 1)), 4),
        (runs((0, 1, 1), (1, 3, 1)), runs((0, 5, 2)), 4),
        (runs((0, 2, 1), (1, 1, 1)), runs((0, 5, 1), (1, 4, 1)), 4),
        (runs((0, 1, 1), (5, 2, 1)), runs((0, 5, 1), (5, 6, 1)), 2),  # not neighbours in the table, but in memory
        (runs((0, 9, 1)), runs((0, 5, 1)), 2),  # from one layer to the next, locally
        (runs((0, 5, 1)), runs((0, 9, 1)), 2),  # and remotely
    ],
)
def test_neighbours_merge_within_a_layer(needed, granted, expected):
    plan = ReadPlanner(TWO_LAYERS, TWO_LAYERS).plan([needed], [granted])
    assert plan.num_merged == merged_one_by_one(plan, TWO_LAYERS, TWO_LAYERS) == expected


def test_the_last_block_of_a_group_and_the_first_of_the_next_do_not_merge():
    plan = ReadPlanner(TWO_GROUPS, TWO_GROUPS).plan([runs((0, 4, 1)), runs((0, 5, 1))], [runs((0, 4, 1))] * 2)
    assert plan.num_merged == 2


def test_blocks_with_gaps_between_them_do_not_merge():
    layers = tuple(LayerLayout(name, slot * 256, 512, 256, "bf16") for slot, name in enumerate("ab"))
    interleaved = EngineLayout(10, 5120, (GroupLayout(16, layers),))
    for local, remote in [(TWO_LAYERS, interleaved), (interleaved, TWO_LAYERS)]:
        assert ReadPlanner(local, remote).plan([runs((0, 1, 3))], [runs((0, 1, 3))]).num_merged == 6
