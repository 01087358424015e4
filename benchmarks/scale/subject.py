"""The engines of the simulation: Gemma-3-27b, 128k tokens, blocks of 16; their descriptions, leases and grants."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from pd_transfer.cli.geometry import engine_layout, kv_groups
from pd_transfer.cli.models import load_model
from pd_transfer.cli.transfers import NUMBERINGS, Pull, make_pull
from pd_transfer.core.layout import EngineLayout, LayerLayout, MemoryRange, RemoteMemory
from pd_transfer.core.messages import EngineDescription, ModelIdentity, ServedRank, Welcome
from pd_transfer.core.params import Address, EngineId, Grant, LeaseId, seal_grant

MODEL = Path(__file__).parents[1] / "plan" / "models" / "gemma-3-27b.json"
KEY = b"k" * 32

# As long as what vLLM's classes yield: fingerprints are most of a layout's bytes.
_NAME = "language_model.model.layers.{}.self_attn.attn"
_FINGERPRINT = (
    "spec={} dtype=bfloat16 block=16 heads=16 head_size=128 head_size_v=128 window=1024 quant=NONE state_bytes=0 "
    "layout=LBHNC packing=FLASH_ATTN,cut1"
)
_METADATA_BYTES = 535
"""NIXL's metadata of an agent with one region and one table of words."""


@dataclass(frozen=True)
class Subject:
    """One kind of engine. ``kv_bytes`` is the KV memory of one rank."""

    num_tokens: int = 128 * 1024
    block_size_tokens: int = 16
    kv_bytes: int = 40 * 2**30

    @cached_property
    def num_blocks(self) -> int:
        """Blocks in the pool."""
        groups = kv_groups(load_model(MODEL), self.block_size_tokens)
        return self.kv_bytes // max(sum(group.page_bytes()) for group in groups)

    @cached_property
    def layout(self) -> EngineLayout:
        """With names and fingerprints of the length that real ones have."""
        bare = engine_layout(kv_groups(load_model(MODEL), self.block_size_tokens), self.num_blocks)
        return EngineLayout(
            bare.num_blocks,
            bare.region_bytes,
            tuple(
                type(group)(group.block_size_tokens, tuple(_named(layer) for layer in group.layers))
                for group in bare.groups
            ),
        )

    def pull(self, numbering: str) -> Pull:
        """One prompt's pull, its blocks numbered in some way."""
        groups = kv_groups(load_model(MODEL), self.block_size_tokens)
        return make_pull(groups, self.num_tokens, NUMBERINGS[numbering])

    def block_ids(self) -> tuple[int, ...]:
        """The blocks that one prompt keeps under lease."""
        return tuple(block_id for table in self.pull("contiguous").tables for block_id in table if block_id)

    def engine(self, number: int) -> EngineDescription:
        """The ``number``-th engine."""
        identity = ModelIdentity("gemma-3-27b-it", "c" * 64, ("w" * 64,))
        return EngineDescription(EngineId(f"{number:032x}"), f"{number:016x}", identity, self.layout, 1)

    def welcome(self, number: int) -> Welcome:
        """What the ``number``-th engine answers."""
        region = MemoryRange(1 << 40, self.layout.region_bytes)
        words = MemoryRange(1 << 30, 8 * self.num_blocks)
        memory = RemoteMemory(f"{number:032x}", bytes(_METADATA_BYTES), region, words)
        return Welcome(self.engine(number), (ServedRank(memory, number),), KEY)

    def grant(self, numbering: str) -> str:
        """The sealed grant of one prompt."""
        granted = self.pull(numbering).granted
        grant = Grant("b" * 16, LeaseId("e" * 32), 1, 1, self.num_tokens - 1, bytes(32), "d" * 16, granted)
        return seal_grant(grant, KEY)


def address(number: int) -> Address:
    """Where the ``number``-th engine listens."""
    return Address(f"10.{number >> 16 & 255}.{number >> 8 & 255}.{number & 255}", 5600)


def _named(layer: LayerLayout) -> LayerLayout:
    name, fingerprint = _NAME.format(layer.name.rpartition(".")[2]), _FINGERPRINT.format(layer.fingerprint)
    return LayerLayout(name, layer.offset_bytes, layer.block_stride_bytes, layer.page_bytes, fingerprint)
