"""KV whose every 8 bytes name the prompt, the layer, the block and the place in it that they were written for."""

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

from pd_transfer.core.layout import EngineLayout, GroupLayout, LayerLayout, descriptor_rows
from tests.runtime.builders import range_of

TOKENS_PER_BLOCK = 16
_WORD_BYTES = 8
_SEED = 20


class Pages:
    """One worker's KV: ``words[layer, block]`` is one page. ``expected`` is known to every process without being told.

    ``num_source_blocks`` is the size of the pool whose fingerprints are asked for: prefill's, on both sides.
    """

    def __init__(self, num_layers: int, num_blocks: int, num_source_blocks: int, page_bytes: int) -> None:
        layers = tuple(
            LayerLayout(f"layer.{index}", index * num_blocks * page_bytes, page_bytes, page_bytes, f"{page_bytes}")
            for index in range(num_layers)
        )
        region_bytes = num_layers * num_blocks * page_bytes
        self.layout = EngineLayout(num_blocks, region_bytes, (GroupLayout(TOKENS_PER_BLOCK, layers),))
        self.words = np.zeros((num_layers, num_blocks, page_bytes // _WORD_BYTES), dtype=np.uint64)
        self.region = range_of(self.words)
        self.rows = descriptor_rows(self.layout, self.region.address)
        shape = (num_layers, num_source_blocks, page_bytes // _WORD_BYTES)
        self._places = np.random.default_rng(_SEED).integers(0, 2**64, shape, dtype=np.uint64)

    def write(self, prompt: int, table: Sequence[int]) -> None:
        """Prefill computes a prompt: block after block, as slowly as a copy is."""
        mark = _mark(prompt)
        for block_id in table:
            np.bitwise_xor(self._places[:, block_id], mark, out=self.words[:, block_id])

    def share_of(self, prompt: int, granted: Sequence[int], needed: Sequence[int]) -> float:
        """How much of the blocks ``needed`` is what prefill wrote for a prompt into ``granted``: exactly 1.0 if all."""
        expected = self._places[:, granted] ^ _mark(prompt)
        return float(np.mean(self.words[:, needed] == expected))


def _mark(prompt: int) -> np.uint64:
    digest = blake2b(prompt.to_bytes(_WORD_BYTES, "little"), digest_size=_WORD_BYTES).digest()
    return np.uint64(int.from_bytes(digest, "little"))
