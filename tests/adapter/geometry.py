"""KV cache geometries, and vLLM's configuration for an engine that has one: everything short of weights."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from vllm.config import CacheConfig, ModelConfig, ParallelConfig, SchedulerConfig, VllmConfig
from vllm.config.kv_transfer import KVTransferConfig
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheSpec, SlidingWindowSpec

MAX_MODEL_LEN = 512
VOCABULARY = 512


@dataclass(frozen=True)
class Layer:
    """One attention layer; ``window`` None attends to everything."""

    window: int | None = None
    block_size: int = 16
    num_heads: int = 1

    def spec(self) -> KVCacheSpec:
        shape = {
            "block_size": self.block_size,
            "num_kv_heads": self.num_heads,
            "head_size": 16,
            "dtype": torch.bfloat16,
        }
        if self.window is None:
            return FullAttentionSpec(**shape)
        return SlidingWindowSpec(**shape, sliding_window=self.window)


def layered(layers: list[Layer]) -> dict[str, Layer]:
    return {f"model.layers.{index}": layer for index, layer in enumerate(layers)}


def hybrid(num_layers: int = 12, period: int = 6, window: int = 64, block_size: int = 16) -> dict[str, Layer]:
    """Every ``period``-th layer is full attention, the others slide: 12 and 6 make five sliding groups, one full."""
    return layered([Layer(None if (i + 1) % period == 0 else window, block_size) for i in range(num_layers)])


HYBRID = hybrid()
SINGLE = layered([Layer()] * 4)
MIXED_BLOCKS = layered([Layer(64, 16, num_heads=2), Layer(64, 16, num_heads=2), Layer(None, 16, num_heads=1)] * 2)
"""vLLM makes pages equally long: the full layers, with half the heads, get blocks of 32 tokens."""

UNEQUAL_HEADS = layered([Layer(None, num_heads=1), Layer(None, num_heads=2)] * 2)
"""One group all the same, whose layers have pages of their own."""
PADDED = layered([Layer(64, num_heads=2), Layer(None, num_heads=3)] * 2)
"""Pages that no block sizes make equally long: the shorter ones are padded."""


@dataclass(frozen=True)
class Settings:
    """One engine. ``siblings`` are other connectors' configurations: ours then is a child of MultiConnector.

    ``pipelined`` schedules a step before the last one's output is processed, as an asynchronous scheduler does.
    ``aggregated``: a multi-process executor; without it the one worker's output goes to the scheduler as is.
    ``retention``: where vLLM keeps prefixes of sliding windows; 0 is only at a prompt's end, None everywhere.
    """

    model: Path
    role: str = "kv_both"
    policy: str = "recompute"
    extra: Mapping[str, Any] = field(default_factory=dict)
    layers: Mapping[str, Layer] = field(default_factory=lambda: HYBRID)
    num_blocks: int = 700
    num_ranks: int = 1
    max_step_tokens: int = MAX_MODEL_LEN
    max_requests: int = 16
    prefix_caching: bool = True
    retention: int | None = 0
    hybrid_manager: bool = True
    layout: str = "LBHNC"
    pipelined: bool = False
    aggregated: bool = True
    siblings: tuple[Mapping[str, Any], ...] = ()
    sibling_first: bool = False
    connector: tuple[str, str] = ("FakeWorldConnector", "tests.adapter.outside")


def write_model(folder: Path, weight: float = 0.0, **changes: Any) -> Path:
    """A checkpoint folder of a small Gemma 3: its configuration, and one number for its weights."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 12,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "sliding_window": 64,
        "max_position_embeddings": 4096,
        "query_pre_attn_scalar": 16,
    }
    (folder / "config.json").write_text(json.dumps({**settings, **changes}))
    save_file({"weight": torch.tensor([weight], dtype=torch.bfloat16)}, folder / "model.safetensors")
    return folder


def transfer_config(name: str, settings: Settings) -> KVTransferConfig:
    connector, module = settings.connector
    ours = {
        "kv_connector": connector,
        "kv_connector_module_path": module,
        "kv_role": settings.role,
        "kv_connector_extra_config": dict(settings.extra),
    }
    common = {"engine_id": name, "kv_load_failure_policy": settings.policy}
    if not settings.siblings:
        return KVTransferConfig(**ours, **common)
    siblings = [dict(sibling) for sibling in settings.siblings]
    children = [*siblings, ours] if settings.sibling_first else [ours, *siblings]
    multi = {"kv_connector": "MultiConnector", "kv_role": "kv_both"}
    return KVTransferConfig(**multi, **common, kv_connector_extra_config={"connectors": children})


def engine_config(name: str, settings: Settings) -> VllmConfig:
    model = ModelConfig(
        model=str(settings.model),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=MAX_MODEL_LEN,
        enforce_eager=True,
    )
    config = VllmConfig(
        model_config=model,
        scheduler_config=SchedulerConfig(
            max_num_seqs=settings.max_requests,
            max_num_batched_tokens=settings.max_step_tokens,
            max_model_len=MAX_MODEL_LEN,
            is_encoder_decoder=False,
            disable_hybrid_kv_cache_manager=not settings.hybrid_manager,
        ),
        cache_config=CacheConfig(
            block_size=min(layer.block_size for layer in settings.layers.values()),
            enable_prefix_caching=settings.prefix_caching,
            prefix_cache_retention_interval=settings.retention,
            num_gpu_blocks_override=settings.num_blocks,
        ),
        parallel_config=ParallelConfig(tensor_parallel_size=settings.num_ranks),
        kv_transfer_config=transfer_config(name, settings),
    )
    # The CPU platform switches it off; a GPU engine has it on.
    config.scheduler_config.async_scheduling = settings.pipelined
    # What vLLM settles with the attention backends; LBHNC is the connector's wish.
    config.cache_config.kv_cache_layout = settings.layout
    return config


def kv_cache_configs(config: VllmConfig, settings: Settings) -> tuple[list[KVCacheConfig], KVCacheConfig, int, int]:
    """As vLLM's engine core does it: the workers' configs, the scheduler's, its block size, and the hashes'."""
    specs = [{name: layer.spec() for name, layer in settings.layers.items()} for _ in range(settings.num_ranks)]
    workers = kv_cache_utils.get_kv_cache_configs(config, specs, [1 << 30] * settings.num_ranks)
    for worker in workers:
        worker.kv_cache_layout = config.cache_config.kv_cache_layout
    scheduler = kv_cache_utils.generate_scheduler_kv_cache_config(workers)
    config.cache_config.num_gpu_blocks = scheduler.num_blocks
    config.cache_config.block_size = min(group.kv_cache_spec.block_size for group in scheduler.kv_cache_groups)
    block_size, hash_block_size = kv_cache_utils.resolve_kv_cache_block_sizes(scheduler, config)
    for each in (*workers, scheduler):
        each.hash_block_size = hash_block_size
    return workers, scheduler, block_size, hash_block_size
