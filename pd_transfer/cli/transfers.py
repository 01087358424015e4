"""Blocks, bytes and descriptors of one prompt's transfer: flat, built-in, ours, and the least that is needed."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from pd_transfer.cli.geometry import (
    Group,
    Numbering,
    block_tables,
    engine_layout,
    first_kept,
    flattened,
    kv_groups,
    num_positions,
)
from pd_transfer.cli.models import Attention, Model
from pd_transfer.core.layout import BlockRuns, EngineLayout, block_runs
from pd_transfer.core.plan import ReadPlan, ReadPlanner, needed_runs

NUMBERINGS: dict[str, Numbering] = {
    "contiguous": lambda position: position,
    "runs of 8": lambda position: position + position // 8,
    "scattered": lambda position: 2 * position,
}
"""How block ids may follow each other, on both sides alike: all in one run, runs of eight, no two neighbours."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """One way to bring a prompt to one rank. ``num_blocks`` has one number for each group."""

    num_blocks: tuple[int, ...]
    num_descriptors: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """One rank's share of a prompt's transfer, in several ways.

    ``flat`` is what vLLM's connector does with the hybrid manager off; its ``num_blocks`` are the whole prompt's.
    ``refusal`` says why ours does not serve the model; then ``ours`` is None and ``merged`` empty. ``merged`` has the
    descriptors left after merging, by the names of ``NUMBERINGS``. ``built_in_fault``: what the built-in connector gets
    wrong at this length.
    """

    groups: tuple[Group, ...]
    flat: Transfer
    built_in: Transfer
    ours: Transfer | None
    merged: dict[str, int]
    least: Transfer
    refusal: str | None
    built_in_fault: str | None


@dataclass(frozen=True, slots=True)
class Pull:
    """What ``ReadPlanner`` is given for one prompt, of which decode has nothing yet."""

    layout: EngineLayout
    tables: list[list[int]]
    granted: tuple[BlockRuns, ...]
    num_tokens: int

    def needed(self) -> list[BlockRuns]:
        """The blocks that decode asks for, group by group."""
        return [
            needed_runs(table, group.block_size_tokens, 0, self.num_tokens)
            for table, group in zip(self.tables, self.layout.groups, strict=True)
        ]

    def plan(self) -> ReadPlan:
        """The connector's own plan for it."""
        plan = ReadPlanner(self.layout, self.layout).plan(self.needed(), self.granted)
        assert isinstance(plan, ReadPlan)
        return plan


def refusal(model: Model) -> str | None:
    """Why the connector does not start with a model; None when it does."""
    names = {Attention.MLA: "MLAAttentionSpec", Attention.CHUNKED: "ChunkedLocalAttentionSpec"}
    for kind in model.layers:
        if kind.attention in names:
            return f"{names[kind.attention]} is not supported, only FullAttentionSpec and SlidingWindowSpec"
    return None


def make_pull(groups: Sequence[Group], num_prompt_tokens: int, numbering: Numbering) -> Pull:
    """One prompt's pull. All tokens but the last travel: decode computes that one to get its logits."""
    num_tokens = num_prompt_tokens - 1
    tables = block_tables(groups, num_tokens, numbering)
    num_blocks = 2 + max(max(table) for table in tables)
    granted = tuple(block_runs(table) for table in tables)
    return Pull(engine_layout(groups, num_blocks), tables, granted, num_tokens)


def compare(model: Model, num_prompt_tokens: int, block_size_tokens: int) -> Comparison:
    """All figures for a model on one rank. ``num_prompt_tokens`` is at least 2: of one token nothing is handed off."""
    groups = tuple(kv_groups(model, block_size_tokens))
    why_not = refusal(model)
    ours, merged = None, {}
    if why_not is None:
        for name, numbering in NUMBERINGS.items():
            plan = make_pull(groups, num_prompt_tokens, numbering).plan()
            merged[name] = plan.num_merged
            ours = Transfer(plan.num_blocks_by_group, len(plan.local), plan.num_bytes)
    return Comparison(
        groups,
        _flat(model, groups, num_prompt_tokens, block_size_tokens),
        _built_in(groups, num_prompt_tokens),
        ours,
        merged,
        _least(groups, num_prompt_tokens),
        why_not,
        _built_in_fault(groups, num_prompt_tokens),
    )


def _flat(model: Model, groups: Sequence[Group], num_prompt_tokens: int, block_size_tokens: int) -> Transfer:
    (whole,) = kv_groups(flattened(model), block_size_tokens)
    count = num_positions(whole, num_prompt_tokens)
    by_group = tuple(num_positions(group, num_prompt_tokens) for group in groups)
    return Transfer(by_group, count * len(whole.layers), count * sum(whole.page_bytes()))


def _built_in(groups: Sequence[Group], num_prompt_tokens: int) -> Transfer:
    """vLLM 0.32's connector sends what decode allocated for all tokens, a window cut to its blocks and one.

    It reads a group's blocks in every region that groups share, whether the group has a layer there or not.
    """
    counts = []
    num_descriptors = num_bytes = 0
    num_shared = sorted(len(group.layers) for group in groups)[-2] if len(groups) > 1 else 0
    for group in groups:
        count = num_positions(group, num_prompt_tokens) - first_kept(group, num_prompt_tokens)
        if group.attention is Attention.SLIDING and group.reach_tokens:
            count = min(count, -(-group.reach_tokens // group.block_size_tokens) + 1)
        pages = group.page_bytes()
        num_padding = max(0, num_shared - len(pages))
        counts.append(count)
        num_descriptors += count * (len(pages) + num_padding)
        num_bytes += count * (sum(pages) + num_padding * max(pages))
    return Transfer(tuple(counts), num_descriptors, num_bytes)


def _built_in_fault(groups: Sequence[Group], num_prompt_tokens: int) -> str | None:
    for group in groups:
        if group.attention is Attention.CHUNKED and group.reach_tokens and num_prompt_tokens % group.reach_tokens == 0:
            return "the decode engine dies: a chunk ends with the prompt, and its groups have no block to fill"
        needed = attended_positions(group, num_prompt_tokens)
        if group.attention is Attention.SLIDING and needed and min(needed) < first_kept(group, num_prompt_tokens):
            return "it lacks a block of the window that the last prompt token still looks at"
    return None


def attended_positions(group: Group, num_prompt_tokens: int) -> frozenset[int]:
    """The blocks that the last token of a prompt looks at, found token by token, itself excepted.

    Knows what attention does and nothing of block tables or plans, so that it can judge them.
    """
    return _attended(group.attention, group.reach_tokens, group.block_size_tokens, num_prompt_tokens)


@lru_cache(maxsize=16)
def _attended(
    attention: Attention, reach: int | None, block_size_tokens: int, num_prompt_tokens: int
) -> frozenset[int]:
    query, found = num_prompt_tokens - 1, set()
    for token in range(query):
        in_window = attention is not Attention.SLIDING or reach is None or query - token < reach
        in_chunk = attention is not Attention.CHUNKED or reach is None or query // reach == token // reach
        if in_window and in_chunk:
            found.add(token // block_size_tokens)
    return frozenset(found)


def _least(groups: Sequence[Group], num_prompt_tokens: int) -> Transfer:
    """What no transfer of whole blocks can do without; in descriptors: one for each block of each layer."""
    counts = tuple(len(attended_positions(group, num_prompt_tokens)) for group in groups)
    return Transfer(
        counts,
        sum(count * len(group.layers) for group, count in zip(groups, counts, strict=True)),
        sum(count * sum(group.page_bytes()) for group, count in zip(groups, counts, strict=True)),
    )
