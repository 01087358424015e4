"""vLLM's KV cache configuration -> our layout; and what is refused at start-up, with the reason."""

from collections.abc import Mapping

import torch
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from pd_transfer.core.layout import EngineLayout, GroupLayout, LayerLayout, MemoryKind, MemoryRange
from pd_transfer.errors import UnsupportedError

_SUPPORTED_SPECS = (FullAttentionSpec, SlidingWindowSpec)


def check_engine(config: VllmConfig) -> None:
    """Refuse engine settings that docs/limits.md rules out. Raises UnsupportedError."""
    parallel = config.parallel_config
    refusals = {
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "decode context parallelism": parallel.decode_context_parallel_size > 1,
        "prefill context parallelism": parallel.prefill_context_parallel_size > 1,
        "sleep mode": bool(config.model_config.enable_sleep_mode),
        "an encoder-decoder model": bool(config.model_config.is_encoder_decoder),
        "dynamic KV scales (calculate_kv_scales)": bool(getattr(config.cache_config, "calculate_kv_scales", False)),
    }
    for what, is_used in refusals.items():
        if is_used:
            raise UnsupportedError(f"pd_transfer does not support {what}; see docs/limits.md. Switch it off.")


def check_cache(config: KVCacheConfig) -> None:
    """Refuse layouts that spread a block, and groups other than plain full or sliding-window attention.

    Raises UnsupportedError.
    """
    if config.kv_cache_layout is not None and not KVCacheLayout[config.kv_cache_layout].is_block_compact:
        raise UnsupportedError(
            f"KV cache layout {config.kv_cache_layout} spreads a block's bytes; pd_transfer reads whole blocks. "
            "Unset VLLM_KV_CACHE_LAYOUT, or set it to LBHNC; see docs/limits.md."
        )
    for index, group in enumerate(config.kv_cache_groups):
        if not group.enable_kv_transfer or group.host_resident:
            raise UnsupportedError(_refusal(index, group, "its cache does not take part in KV transfer"))
        for spec in _layer_specs(group).values():
            if getattr(spec, "non_causal", False):
                # A prompt's first token sees its last one, so the KV of n-1 tokens is not the KV of n tokens.
                raise UnsupportedError(_refusal(index, group, "its attention is not causal"))
            if type(spec) not in _SUPPORTED_SPECS:
                reason = f"{type(spec).__name__} is not supported, only FullAttentionSpec and SlidingWindowSpec"
                raise UnsupportedError(_refusal(index, group, reason))


def _refusal(index: int, group: KVCacheGroupSpec, reason: str) -> str:
    names = ", ".join(group.layer_names[:3]) + (", ..." if len(group.layer_names) > 3 else "")
    return f"pd_transfer cannot transfer KV cache group {index} ({names}): {reason}; see docs/limits.md."


def _layer_specs(group: KVCacheGroupSpec) -> dict[str, KVCacheSpec]:
    spec = group.kv_cache_spec
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return {name: spec.kv_cache_specs[name] for name in group.layer_names}
    return dict.fromkeys(group.layer_names, spec)


def engine_layout(config: KVCacheConfig, region_bytes: int, packing: str) -> EngineLayout:
    """Where every layer's blocks lie in the one backing storage, from the configuration alone.

    ``packing`` names how a backend arranges the bytes inside a page; it is part of every layer's fingerprint.
    """
    check_cache(config)
    places = {
        name: (tensor.offset + index * tensor.layer_stride, tensor.block_stride)
        for tensor in config.kv_cache_tensors
        for index, name in enumerate(tensor.layers)
    }
    groups = []
    for group in config.kv_cache_groups:
        layers = tuple(
            LayerLayout(name, *places[name], spec.unpadded_page_size_bytes, _fingerprint(spec, config, packing))
            for name, spec in _layer_specs(group).items()
            if isinstance(spec, AttentionSpec)
        )
        groups.append(GroupLayout(group.kv_cache_spec.block_size, layers))
    return EngineLayout(config.num_blocks, region_bytes, tuple(groups))


def _fingerprint(spec: AttentionSpec, config: KVCacheConfig, packing: str) -> str:
    parts = {
        "spec": type(spec).__name__,
        "dtype": str(spec.dtype).removeprefix("torch."),
        "block": spec.block_size,
        "heads": spec.num_heads,
        "head_size": spec.head_size,
        "head_size_v": spec.head_size_v,
        "window": getattr(spec, "sliding_window", None),
        "quant": spec.kv_quant_mode.name,
        "state_bytes": spec.state_content_size_bytes,
        "layout": config.kv_cache_layout,
        "packing": packing,
    }
    return " ".join(f"{key}={value}" for key, value in parts.items())


def packing_of(config: VllmConfig, kv_cache_config: KVCacheConfig, kv_caches: Mapping[str, torch.Tensor]) -> str:
    """How this machine's attention backends arrange bytes inside a page; equal specs do not say it.

    Backends order K, V and heads in their own ways, and may cut a block into kernel blocks. On a CPU vLLM chooses the
    arrangement by instruction set.
    """
    layers = config.compilation_config.static_forward_context
    backends = {
        backend.get_name() for name in kv_caches if (backend := getattr(layers.get(name), "attn_backend", None))
    }
    cuts = {tensor.shape[0] // kv_cache_config.num_blocks for tensor in kv_caches.values()}
    parts = [*sorted(backends), f"cut{'+'.join(map(str, sorted(cuts)))}"]
    return ",".join([*parts, *_cpu_packings(config, kv_cache_config)])


def _cpu_packings(config: VllmConfig, kv_cache_config: KVCacheConfig) -> list[str]:
    if not current_platform.is_cpu():
        return []
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    cache_dtype = config.cache_config.cache_dtype
    kinds = {
        _get_attn_isa(spec.dtype, spec.block_size, spec.head_size, cache_dtype)
        for group in kv_cache_config.kv_cache_groups
        for spec in _layer_specs(group).values()
        if isinstance(spec, AttentionSpec)
    }
    return sorted(f"cpu_{kind}" for kind in kinds)


def backing_region(kv_caches: Mapping[str, torch.Tensor], layout: EngineLayout) -> MemoryRange:
    """The one storage behind all layers. Raises UnsupportedError when the tensors do not lie where the layout says."""
    storages = {kv_caches[layer.name].untyped_storage().data_ptr() for layer in layout.layers()}
    if len(storages) != 1:
        raise UnsupportedError(f"the KV cache lies in {len(storages)} storages; pd_transfer registers exactly one")
    (address,) = storages
    first = next(layout.layers())
    tensor = kv_caches[first.name]
    for layer in layout.layers():
        found = kv_caches[layer.name].data_ptr() - address
        if found != layer.offset_bytes:
            raise UnsupportedError(f"layer {layer.name} lies at byte {found}, its layout says {layer.offset_bytes}")
    is_host = tensor.device.type == "cpu"
    return MemoryRange(
        address=address,
        length_bytes=tensor.untyped_storage().nbytes(),
        kind=MemoryKind.DRAM if is_host else MemoryKind.VRAM,
        device_id=0 if is_host else (tensor.device.index or 0),
    )
