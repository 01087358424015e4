"""What decode has to read, found the slow way: query by query, which past token does which layer still look at.

It knows positions, windows and vLLM's block tables; nothing of the connector's plan.
"""

from collections.abc import Sequence

import numpy as np
from vllm.v1.kv_cache_interface import FullAttentionSpec

from tests.adapter.harness import Engine


def needed_positions(num_tokens: int, window: int | None, num_local: int = 0) -> set[int]:
    """The positions that a layer must be given: looked at from the last prompt token on, and not computed there."""
    return {
        position
        for query in range(num_tokens - 1, num_tokens + 2)
        for position in range(num_tokens - 1)
        if num_local <= position <= query and (window is None or query - position < window)
    }


def page(engine: Engine, layer: str, block: int, rank: int = 0) -> slice:
    """Where vLLM's own view of a layer has a block, in the rank's memory."""
    cache = engine.workers[rank].caches[layer]
    start = cache.data_ptr() - engine.workers[rank].memory.ctypes.data + block * cache.stride(0) * cache.element_size()
    return slice(start, start + cache[block].nbytes)


def pages_to_read(
    prefill: Engine, decode: Engine, ids: tuple[str, str], num_tokens: int, num_local: int = 0
) -> list[tuple[str, int, int]]:
    """(layer, prefill's block, decode's block) of all that a request with ``ids`` there and here has to read."""
    pages = []
    for group, spec in enumerate(decode.kv_cache_config.kv_cache_groups):
        size = spec.kv_cache_spec.block_size
        for layer in spec.layer_names:
            window = decode.settings.layers[layer].window
            if isinstance(spec.kv_cache_spec, FullAttentionSpec):
                # Without the hybrid manager vLLM keeps, and may share as a prefix, all blocks of a sliding layer too.
                window = None
            needed = needed_positions(num_tokens, window, num_local)
            pages += [
                (layer, prefill.tables[ids[0]][group][index], decode.tables[ids[1]][group][index])
                for index in sorted({position // size for position in needed})
            ]
    return pages


def num_bytes(engine: Engine, pages: Sequence[tuple[str, int, int]]) -> int:
    """The bytes of these pages on all ranks."""
    return sum(engine.workers[0].caches[layer][0].nbytes for layer, _, _ in pages) * engine.settings.num_ranks


def memory_after(
    before: np.ndarray, prefill: Engine, decode: Engine, pages: Sequence[tuple[str, int, int]], rank: int = 0
) -> np.ndarray:
    """Decode's memory as it must be after the read: those pages are prefill's, every other byte is what it was."""
    after = before.copy()
    for layer, source, destination in pages:
        assert source
        assert destination
        after[page(decode, layer, destination, rank)] = prefill.workers[rank].memory[page(prefill, layer, source, rank)]
    return after
