"""What stands for the model: it writes recognisable KV, and checks every KV that attention would look at.

The bytes that a token's KV gets depend on the layer, the rank and all tokens up to it, as real KV does; so does the
token that is sampled. A block that was not filled, was filled with another prompt, or lies at another position is
therefore noticed wherever it is used.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig

from tests.adapter.geometry import VOCABULARY, Layer

_MASK = (1 << 64) - 1
_ODD = 0x9E3779B97F4A7C15


def _mix(value: int) -> int:
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    return value ^ (value >> 27)


def prefix_hashes(tokens: Iterable[int], before: int = 1) -> list[int]:
    """For each token a number that names it and all tokens before it."""
    hashes = []
    for token in tokens:
        before = _mix(before * _ODD + token + 1 & _MASK)
        hashes.append(before)
    return hashes


def prompt_of(num_tokens: int, seed: int = 0) -> list[int]:
    """A prompt; different seeds differ from the first token on."""
    return [(x * 7 + x // 3 + seed * 131) % (VOCABULARY - 10) for x in range(num_tokens)]


def next_token(tokens: Iterable[int]) -> int:
    """What the model samples after these tokens."""
    return prefix_hashes(tokens)[-1] % (VOCABULARY - 10)


def continuation(prompt: list[int], count: int) -> list[int]:
    """What an engine that computes everything itself answers."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class LayerSite(NamedTuple):
    """One layer's KV in this rank: ``view[block, head, token]`` are the bytes of a token."""

    name: str
    view: np.ndarray
    window: int | None
    key: int


@dataclass
class Running:
    """A request as the model runner knows it."""

    tokens: list[int]
    num_prompt_tokens: int
    tables: list[list[int]]
    num_computed: int
    hashes: list[int] = field(default_factory=list)

    def prefix_hashes(self) -> np.ndarray:
        missing = self.tokens[len(self.hashes) :]
        self.hashes += prefix_hashes(missing, self.hashes[-1] if self.hashes else 1)
        return np.array(self.hashes, dtype=np.uint64)


class FakeRunner:
    """One rank's model runner."""

    def __init__(
        self, rank: int, caches: Mapping[str, torch.Tensor], config: KVCacheConfig, layers: Mapping[str, Layer]
    ) -> None:
        self.requests: dict[str, Running] = {}
        self.block_sizes = [group.kv_cache_spec.block_size for group in config.kv_cache_groups]
        self.groups = [
            [
                LayerSite(
                    name,
                    caches[name].view(torch.uint8).numpy(),
                    layers[name].window,
                    prefix_hashes([rank, *name.encode()])[-1],
                )
                for name in group.layer_names
            ]
            for group in config.kv_cache_groups
        ]

    def run(self, output: SchedulerOutput) -> dict[str, list[int]]:
        """The forward pass of one step. Returns the sampled token of every request that has one."""
        self._update(output)
        sampled = {}
        for request_id, count in output.num_scheduled_tokens.items():
            request = self.requests[request_id]
            start, end = request.num_computed, request.num_computed + count
            hashes = request.prefix_hashes()
            for group, sites in enumerate(self.groups):
                for site in sites:
                    self._write(site, request.tables[group], self.block_sizes[group], hashes, range(start, end))
                    first = 0 if site.window is None else max(0, start - site.window + 1)
                    wrong = self.wrong_positions(site, group, request.tables[group], hashes, range(first, end))
                    assert not wrong, (
                        f"{request_id}, tokens {start}..{end - 1}: {site.name} would attend to wrong KV at {wrong}"
                    )
            request.num_computed = end
            sampled[request_id] = []
            if end == len(request.tokens):
                request.tokens.append(int(hashes[-1]) % (VOCABULARY - 10))
                sampled[request_id] = [request.tokens[-1]]
        return sampled

    def fill(self, tables: Sequence[list[int]], tokens: list[int], count: int) -> None:
        """Write the KV of the first tokens wherever a request's tables have a block for it, as a load does."""
        hashes = np.array(prefix_hashes(tokens), dtype=np.uint64)
        for group, sites in enumerate(self.groups):
            size = self.block_sizes[group]
            positions = [position for position in range(count) if tables[group][position // size]]
            for site in sites:
                self._write(site, tables[group], size, hashes, positions)

    def _update(self, output: SchedulerOutput) -> None:
        for request_id in output.finished_req_ids:
            self.requests.pop(request_id, None)
        for new in output.scheduled_new_reqs:
            tokens = list(new.prompt_token_ids or [0] * new.prompt_len)
            tables = [list(table) for table in new.block_ids]
            self.requests[new.req_id] = Running(tokens, len(tokens), tables, new.num_computed_tokens)
        cached = output.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids):
            request = self.requests[request_id]
            new_blocks = cached.new_block_ids[index]
            if request_id in cached.resumed_req_ids:
                request.tables = [list(table) for table in new_blocks]
                del request.tokens[request.num_prompt_tokens + cached.num_output_tokens[index] :]
                del request.hashes[len(request.tokens) :]
            elif new_blocks is not None:
                for table, more in zip(request.tables, new_blocks, strict=True):
                    table.extend(more)
            request.num_computed = cached.num_computed_tokens[index]

    def _write(
        self, site: LayerSite, table: list[int], size: int, hashes: np.ndarray, positions: Sequence[int]
    ) -> None:
        at = np.asarray(positions)
        blocks = np.asarray(table)[at // size]
        assert (blocks > 0).all(), f"{site.name} has no block for its new tokens"
        site.view[blocks, :, at % size] = _kv(site, hashes[at])

    def wrong_positions(
        self, site: LayerSite, group: int, table: list[int], hashes: np.ndarray, positions: range
    ) -> list[int]:
        """The positions whose KV is not what the model would have computed for these tokens."""
        size = self.block_sizes[group]
        at = np.asarray(positions)
        blocks = np.asarray(table)[at // size]
        good = (site.view[blocks, :, at % size] == _kv(site, hashes[at])).all(axis=(1, 2)) & (blocks > 0)
        return at[~good].tolist()


def _kv(site: LayerSite, hashes: np.ndarray) -> np.ndarray:
    """``[token, head, byte]``: what the layer's KV of the tokens looks like."""
    _, num_heads, _, num_bytes = site.view.shape
    words = np.arange(1, num_heads * num_bytes // 8 + 1, dtype=np.uint64) * np.uint64(_ODD)
    values = (hashes[:, None] ^ np.uint64(site.key)) * np.uint64(_ODD) ^ words[None, :]
    return values.view(np.uint8).reshape(len(hashes), num_heads, num_bytes)
