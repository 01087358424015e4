"""Small layouts, engines and grants that the core's tests share."""

from collections.abc import Sequence

from pd_transfer.core.layout import (
    BlockRuns,
    EngineLayout,
    GroupLayout,
    LayerLayout,
    MemoryRange,
    RemoteMemory,
    block_runs,
)
from pd_transfer.core.messages import EngineDescription, ModelIdentity, ServedRank, Welcome
from pd_transfer.core.params import Address, EngineId, Grant, LeaseId, RemotePrefill, seal_grant

PAGE_BYTES = 256
PREFILL = Address("10.0.0.1", 5600)
OTHER_PREFILL = Address("10.0.0.2", 5600)
KEY = b"k" * 32


def make_layout(*groups: Sequence[str], num_blocks: int = 100, block_size_tokens: int = 16) -> EngineLayout:
    """One group per sequence of layer names. Layers of different groups alias; a layer's blocks are dense."""
    layer_bytes = num_blocks * PAGE_BYTES
    return EngineLayout(
        num_blocks,
        max(len(names) for names in groups) * layer_bytes,
        tuple(
            GroupLayout(
                block_size_tokens,
                tuple(
                    LayerLayout(name, slot * layer_bytes, PAGE_BYTES, PAGE_BYTES, "bf16")
                    for slot, name in enumerate(names)
                ),
            )
            for names in groups
        ),
    )


LAYOUT = make_layout(["full.0", "full.1"], ["sliding.0", "sliding.1"])


def make_engine(
    engine_id: str = "prefill-a",
    boot: str = "boot-1",
    layout: EngineLayout = LAYOUT,
    num_ranks: int = 1,
    config_digest: str = "config-1",
    weights_digests: Sequence[str] | None = None,
) -> EngineDescription:
    if weights_digests is None:
        weights_digests = [f"weights of rank {rank}" for rank in range(num_ranks)]
    model = ModelIdentity("gemma", config_digest, tuple(weights_digests))
    return EngineDescription(EngineId(engine_id), boot, model, layout, num_ranks)


DECODE_ENGINE = make_engine("decode-a", "boot-d")


def make_rank(rank: int = 0, boot_word: int = 7, layout: EngineLayout = LAYOUT) -> ServedRank:
    memory = RemoteMemory(
        f"agent-{rank}", b"metadata", MemoryRange(1 << 20, layout.region_bytes), MemoryRange(1 << 16, 8 * 64)
    )
    return ServedRank(memory, boot_word)


def make_welcome(engine: EngineDescription | None = None, key: bytes = KEY) -> Welcome:
    engine = engine or make_engine()
    ranks = tuple(make_rank(rank, layout=engine.layout) for rank in range(engine.num_ranks))
    return Welcome(engine, ranks, key)


DIGEST = b"d" * 32
NUM_TOKENS = 40


GRANTED = (block_runs([5, 6, 7]), block_runs([0, 8, 9]))


def make_grant(
    lease_id: str = "lease-1",
    boot: str = "boot-1",
    num_tokens: int = NUM_TOKENS,
    prompt_digest: bytes = DIGEST,
    layout: EngineLayout = LAYOUT,
    groups: tuple[BlockRuns, ...] = GRANTED,
) -> Grant:
    return Grant(boot, LeaseId(lease_id), 3, 11, num_tokens, prompt_digest, layout.digest(), groups)


def make_params(grant: Grant | str, key: bytes = KEY, address: Address = PREFILL) -> RemotePrefill:
    """What arrives at decode; a grant given as text is passed on as it is."""
    return RemotePrefill(EngineId("prefill-a"), address, grant if isinstance(grant, str) else seal_grant(grant, key))
