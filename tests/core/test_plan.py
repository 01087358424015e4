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
    BlockRun,
    EngineLayout,
    GroupLayout,
    LayerLayout,
    block_runs,
    descriptor_rows,
    layout_mismatch,
)
from pd_transfer.core.plan import ReadPlan, Uncovered, needed_runs, num_merged, plan_read
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
GEMMA_ROWS = descriptor_rows(GEMMA, 1 << 30)


def gemma_plan(num_prompt_tokens: int, local_ids: Iterator[int], remote_ids: Iterator[int]) -> ReadPlan:
    """Prefill holds all tokens but the last; decode has none of them."""
    num_tokens = num_prompt_tokens - 1
    needed, granted = [], []
    for window in GEMMA_WINDOWS:
        local = vllm_table(num_tokens, BLOCK, window, local_ids)
        needed.append(needed_runs(local, BLOCK, 0, num_tokens))
        granted.append(block_runs(vllm_table(num_tokens, BLOCK, window, remote_ids)))
    plan = plan_read(GEMMA, GEMMA, needed, granted)
    assert isinstance(plan, ReadPlan)
    return plan


def test_seed_example_flat():
    """Without the hybrid manager: one group of 34 layers, every block of every layer."""
    flat = make_layout([*SLIDING, *FULL], num_blocks=NUM_BLOCKS, block_size_tokens=BLOCK)
    runs = block_runs(range(1, 64))
    assert len(plan_read(flat, flat, [runs], [runs]).local) == 63 * 34 == 2142


def test_seed_example_hybrid():
    plan = gemma_plan(PROMPT_TOKENS, count(1), count(1))
    assert plan.num_blocks_by_group == (17, 17, 17, 17, 17, 17, 63)
    with_padding_read = sum(plan.num_blocks_by_group) * 5
    assert with_padding_read == (6 * 17 + 63) * 5 == 825
    assert len(plan.local) == len(plan.remote) == 29 * 17 + 5 * 63 == 808
    assert plan.num_bytes == 808 * PAGE_BYTES


def test_seed_example_merges_to_a_run_per_layer_when_ids_are_contiguous():
    plan = gemma_plan(PROMPT_TOKENS, count(1), count(500))
    assert num_merged(plan, GEMMA_ROWS, GEMMA_ROWS) == 34


@pytest.mark.parametrize(("local_step", "remote_step"), [(2, 2), (1, 2), (2, 1), (1, -1)])
def test_seed_example_does_not_merge_when_ids_lie_apart(local_step, remote_step):
    """One scattered side is enough."""
    plan = gemma_plan(PROMPT_TOKENS, count(1, local_step), count(5000, remote_step))
    assert num_merged(plan, GEMMA_ROWS, GEMMA_ROWS) == 808


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
    (run,) = needed_runs(table, BLOCK, 0, num_tokens)
    assert range(run.index, run.index + run.count) == window_blocks


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
    plan = plan_read(local, remote, needed, [block_runs(table) for table in case.remote.tables])
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
    assert all(local_block and remote_block for _, local_block, remote_block in least)


# ------------------------------------------------------------------------------------------------------------ positions


def runs(*entries: tuple[int, int, int]) -> tuple[BlockRun, ...]:
    return tuple(BlockRun(*entry) for entry in entries)


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
    plan = plan_read(ONE_LAYER, ONE_LAYER, [needed], [granted])
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
        (runs((0, 5, 1)), runs((0, 1 << 63, 1)), 0),
        (runs((0, 5, 1)), runs((-(1 << 62), 1, 1 << 63)), 0),
    ],
)
def test_what_is_not_granted_is_named(needed, granted, position):
    local = make_layout(["other"], ["a"])
    remote = make_layout(["a"], ["other"])
    plan = plan_read(local, remote, [(), needed], [granted, ()])
    assert plan == Uncovered(f"group 1 needs the block at position {position}, which is not granted")


def test_a_grant_for_another_number_of_groups():
    assert plan_read(LAYOUT, LAYOUT, [(), ()], [()]) == Uncovered("the grant lists 1 groups, the peer has 2")
    assert plan_read(LAYOUT, LAYOUT, [()], [(), ()]) == Uncovered(
        "1 groups of blocks are to be filled, this engine has 2"
    )


def test_groups_are_matched_by_their_layers():
    """A local group may span remote ones, and the other way round; an empty group costs nothing."""
    local = make_layout(["a", "b"], ["c"], ["d"])
    remote = make_layout(["d", "c"], ["b"], ["a"], num_blocks=50)
    plan = plan_read(
        local, remote, [runs((0, 5, 1)), runs((1, 7, 1)), ()], [runs((0, 20, 2)), runs((0, 30, 1)), runs((0, 40, 1))]
    )
    assert reads(plan, local, remote) == {("a", 5, 40), ("b", 5, 30), ("c", 7, 21)}
    assert plan.num_blocks_by_group == (1, 1, 0)


def test_nothing_needed_is_a_plan_without_descriptors():
    plan = plan_read(LAYOUT, LAYOUT, [(), ()], [(), ()])
    assert (len(plan.local), plan.num_bytes, plan.num_blocks_by_group) == (0, 0, (0, 0))
    assert num_merged(plan, descriptor_rows(LAYOUT, 0), descriptor_rows(LAYOUT, 0)) == 0


def test_only_blocks_between_the_local_tokens_and_the_last_are_needed():
    table = [0, 4, 0, 0, 7, 8]
    assert needed_runs(table, 16, 0, 80) == runs((1, 4, 1), (4, 7, 1))
    assert needed_runs(table, 16, 32, 81) == runs((4, 7, 2))
    assert needed_runs(table, 16, 80, 80) == ()
    assert needed_runs(table, 16, 70, 79) == runs((4, 7, 1))  # a block that is present in part is read again
    assert needed_runs((), 16, 0, 80) == ()


# -------------------------------------------------------------------------------------------------------------- merging


def merged(pairs: Sequence[tuple[int, int]], local: EngineLayout, remote: EngineLayout) -> int:
    indices = np.array(pairs, dtype=np.int32).reshape(-1, 2)
    plan = ReadPlan(indices[:, 0], indices[:, 1], 0, ())
    return num_merged(plan, descriptor_rows(local, 0), descriptor_rows(remote, 0))


TWO_LAYERS = make_layout(["a", "b"], num_blocks=10)


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        ([(1, 1)], 1),
        ([(1, 5), (2, 6), (3, 7)], 1),
        ([(1, 5), (2, 7)], 2),
        ([(1, 5), (3, 6)], 2),
        ([(2, 5), (1, 4)], 2),
        ([(9, 5), (10, 6)], 2),  # from one layer to the next, locally
        ([(5, 9), (6, 10)], 2),  # and remotely
        ([(1, 1), (2, 2), (11, 11), (12, 12)], 2),
    ],
)
def test_neighbours_merge_within_a_layer(pairs, expected):
    assert merged(pairs, TWO_LAYERS, TWO_LAYERS) == expected


def test_blocks_with_gaps_between_them_do_not_merge():
    layers = tuple(LayerLayout(name, slot * 256, 512, 256, "bf16") for slot, name in enumerate("ab"))
    interleaved = EngineLayout(10, 5120, (GroupLayout(16, layers),))
    neighbours = [(1, 1), (2, 2), (3, 3)]
    assert merged(neighbours, TWO_LAYERS, interleaved) == 3
    assert merged(neighbours, interleaved, TWO_LAYERS) == 3
