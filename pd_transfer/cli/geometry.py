"""How vLLM 0.32 arranges a model's layers in KV cache groups, and which blocks it keeps of a prompt.

The rules are vLLM's (``v1/core/kv_cache_utils`` and ``single_type_kv_cache_manager``); a test compares the groups with
what vLLM itself makes of the same layers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from pd_transfer.cli.models import Attention, LayerKind, Model
from pd_transfer.core.layout import EngineLayout, GroupLayout, LayerLayout


@dataclass(frozen=True, slots=True)
class Group:
    """Layers that share a block table. All attend alike; their pages may differ when the model has one group.

    A block of a layer takes ``stride_bytes``: its own bytes, or the longest page's if vLLM pads it.
    """

    block_size_tokens: int
    layers: tuple[int, ...]
    kinds: tuple[LayerKind, ...]
    stride_bytes: int | None

    @property
    def attention(self) -> Attention:
        """What the layers look at."""
        return self.kinds[0].attention

    @property
    def reach_tokens(self) -> int | None:
        """The window or chunk."""
        return self.kinds[0].reach_tokens

    def page_bytes(self) -> list[int]:
        """The bytes of one block of each layer, without padding."""
        return [self.block_size_tokens * kind.token_bytes for kind in self.kinds]


def flattened(model: Model) -> Model:
    """The model as vLLM sees it with the hybrid manager switched off: all layers are full attention."""
    layers = tuple(
        kind if kind.attention is Attention.MLA else replace(kind, attention=Attention.FULL, reach_tokens=None)
        for kind in model.layers
    )
    return replace(model, layers=layers)


def kv_groups(model: Model, block_size_tokens: int) -> list[Group]:
    """The model's KV cache groups, in vLLM's order. Blocks of layers with smaller pages hold more tokens."""
    if len({(kind.attention, kind.reach_tokens) for kind in model.layers}) == 1:
        return [Group(block_size_tokens, tuple(range(len(model.layers))), model.layers, None)]
    longest = block_size_tokens * max(kind.token_bytes for kind in model.layers)
    alike: dict[LayerKind, list[int]] = {}
    for layer, kind in enumerate(model.layers):
        alike.setdefault(kind, []).append(layer)
    groups = []
    for kind, layers in alike.items():
        page = block_size_tokens * kind.token_bytes
        scale = longest // page if longest % page == 0 else 1
        num_groups = -(-len(layers) // _group_size(list(alike.values())))
        for first in range(num_groups):
            members = tuple(layers[first::num_groups])
            groups.append(Group(block_size_tokens * scale, members, (kind,) * len(members), longest))
    return groups


def _group_size(alike: Sequence[Sequence[int]]) -> int:
    """Layers per group: of the rarest kind as many as there are, unless all kinds are about equally frequent."""
    fewest, most = min(map(len, alike)), max(map(len, alike))
    return most if most < fewest * 1.5 else fewest


def engine_layout(groups: Sequence[Group], num_blocks: int) -> EngineLayout:
    """Layer-outer, as the connector asks vLLM to lay out its cache; groups alias from byte 0."""
    layouts, region_bytes = [], 0
    for group in groups:
        layers, offset = [], 0
        for layer, page in zip(group.layers, group.page_bytes(), strict=True):
            stride = group.stride_bytes or page
            layers.append(LayerLayout(f"layers.{layer}", offset, stride, page, group.attention))
            offset += stride * num_blocks
        layouts.append(GroupLayout(group.block_size_tokens, tuple(layers)))
        region_bytes = max(region_bytes, offset)
    return EngineLayout(num_blocks, region_bytes, tuple(layouts))


def first_kept(group: Group, num_tokens: int) -> int:
    """The first position of a block table that vLLM keeps once ``num_tokens`` tokens are there; null before it."""
    if group.attention is Attention.SLIDING and group.reach_tokens:
        return max(0, num_tokens - group.reach_tokens + 1) // group.block_size_tokens
    if group.attention is Attention.CHUNKED and group.reach_tokens:
        return num_tokens // group.reach_tokens * group.reach_tokens // group.block_size_tokens
    return 0


def num_positions(group: Group, num_tokens: int) -> int:
    """The length of the block table."""
    return -(-num_tokens // group.block_size_tokens)


Numbering = Callable[[int], int]
"""Position in a block table -> block id, less the group's first one. Strictly increasing."""


def block_tables(groups: Sequence[Group], num_tokens: int, numbering: Numbering) -> list[list[int]]:
    """The groups' block tables for a prompt, one after the other in the pool; 0 is the null block."""
    tables, base = [], 1
    for group in groups:
        length, first = num_positions(group, num_tokens), first_kept(group, num_tokens)
        tables.append([0] * first + [base + numbering(position) for position in range(first, length)])
        base += numbering(length)
    return tables
