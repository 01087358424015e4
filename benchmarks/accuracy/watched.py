"""The connector with its reads watched: blocks that it read are damaged on purpose, or fingerprinted.

For the sweep's positive controls and for the differ; never for answers that matter. An engine loads it by
``kv_connector_module_path``. What to do comes in environment variables, because the connector's settings are for
operators. It touches host memory of its own process, so it works on CPU engines only.
"""

import ctypes
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
from vllm.distributed.kv_transfer import get_kv_transfer_group

from pd_transfer.config import PdConfig
from pd_transfer.core.layout import DescriptorRow, MemoryRange, RemoteMemory
from pd_transfer.core.params import PeerKey, Transfer
from pd_transfer.transport.base import Indices, PullTransport
from pd_transfer.vllm.connector import PdConnector
from pd_transfer.vllm.parts import Parts, real_parts

DAMAGE_VARIABLE = "PD_ACCURACY_DAMAGE"
FINGERPRINTS_VARIABLE = "PD_ACCURACY_FINGERPRINTS"


class Damage(msgspec.Struct, frozen=True):
    """What to do to a group's blocks that were read.

    zero: one block's bytes become zero. swap: one block gets the bytes that the receive before it had read for the same
    place, and leaves its own to the next. skip: the group is not read at all. ``position`` counts the blocks that are
    read as a list does.
    """

    kind: Literal["zero", "swap", "skip"]
    group: int
    position: int = -1


class Blocks:
    """The local blocks of one engine, by group: where the layers of each lie."""

    def __init__(self, rows: Sequence[DescriptorRow], num_layers_by_group: Sequence[int]) -> None:
        self.rows = rows
        self.num_blocks = rows[0].count
        self.group_of_row = np.repeat(np.arange(len(num_layers_by_group)), num_layers_by_group)
        self.num_groups = len(num_layers_by_group)

    def of_group(self, local: Indices, group: int) -> list[int]:
        """The block ids of a group among descriptor indices, in the order of their positions."""
        first_row = int(np.argmax(self.group_of_row == group))
        row, block = np.divmod(local, self.num_blocks)
        return [int(block_id) for block_id in block[row == first_row]]

    def places(self, group: int, block_id: int) -> list[tuple[int, int]]:
        """Address and length of a block in every layer of its group."""
        rows = [row for row, of in zip(self.rows, self.group_of_row, strict=True) if of == group]
        return [(row.address + block_id * row.stride_bytes, row.length_bytes) for row in rows]

    def read(self, group: int, block_id: int) -> list[bytes]:
        """The bytes of a block in every layer of its group."""
        return [ctypes.string_at(address, length) for address, length in self.places(group, block_id)]

    def write(self, group: int, block_id: int, content: Sequence[bytes]) -> None:
        """Overwrite a block in every layer of its group."""
        for (address, length), data in zip(self.places(group, block_id), content, strict=True):
            ctypes.memmove(address, data, length)

    def fingerprint(self, group: int, block_id: int) -> str:
        """A name of a block's bytes."""
        return hashlib.blake2b(b"".join(self.read(group, block_id)), digest_size=8).hexdigest()


class WatchedPull:
    """A pull transport that does something to the local blocks of every read, when its last byte has arrived."""

    def __init__(self, inner: PullTransport, blocks: Blocks, damage: Damage | None, log: Path | None) -> None:
        self._inner = inner
        self._blocks = blocks
        self._damage = damage
        self._log = log
        self._reads: dict[Transfer, Indices] = {}
        self._left_behind: list[bytes] | None = None

    def submit_read(self, key: PeerKey, local: Indices, remote: Indices) -> Transfer:
        """See ``PullTransport``; without the skipped group."""
        wanted = np.ones(len(local), dtype=bool)
        if self._damage is not None and self._damage.kind == "skip":
            wanted = self._blocks.group_of_row[local // self._blocks.num_blocks] != self._damage.group
        transfer = self._inner.submit_read(key, local[wanted], remote[wanted])
        self._reads[transfer] = local
        return transfer

    def poll(self, transfer: Transfer) -> bool:
        """See ``PullTransport``."""
        if not self._inner.poll(transfer):
            return False
        if (local := self._reads.pop(transfer, None)) is not None:
            self._read_has_ended(local)
        return True

    def _read_has_ended(self, local: Indices) -> None:
        if self._damage is not None and self._damage.kind != "skip":
            self._spoil(self._damage, self._blocks.of_group(local, self._damage.group))
        if self._log is not None:
            groups = range(self._blocks.num_groups)
            found = [[self._blocks.fingerprint(g, b) for b in self._blocks.of_group(local, g)] for g in groups]
            with self._log.open("a") as log:
                log.write(json.dumps(found) + "\n")

    def _spoil(self, damage: Damage, block_ids: Sequence[int]) -> None:
        if not -len(block_ids) <= damage.position < len(block_ids):
            return
        block_id = block_ids[damage.position]
        content = self._blocks.read(damage.group, block_id)
        if damage.kind == "swap":
            if self._left_behind is not None:
                self._blocks.write(damage.group, block_id, self._left_behind)
            self._left_behind = content
        else:
            self._blocks.write(damage.group, block_id, [bytes(len(data)) for data in content])

    def add_peer(self, key: PeerKey, memory: RemoteMemory, rows: Sequence[DescriptorRow]) -> None:
        """See ``PullTransport``, here and below."""
        self._inner.add_peer(key, memory, rows)

    def remove_peer(self, key: PeerKey) -> None:
        self._inner.remove_peer(key)

    def submit_word_read(self, key: PeerKey, slot: int) -> Transfer:
        return self._inner.submit_word_read(key, slot)

    def take_word(self, transfer: Transfer) -> int:
        return self._inner.take_word(transfer)

    def release(self, transfer: Transfer) -> None:
        self._reads.pop(transfer, None)
        self._inner.release(transfer)

    def num_outstanding(self) -> int:
        return self._inner.num_outstanding()

    def rebuild(self) -> None:
        self._inner.rebuild()

    def close(self) -> None:
        self._inner.close()


class WatchedConnector(PdConnector):
    """The connector as it is, but for what happens to blocks that were read."""

    blocks: Blocks | None = None

    def make_parts(self, config: PdConfig) -> Parts:
        """The real parts, with a watched pull side."""
        parts = real_parts(config)
        num_layers = [len(group.layer_names) for group in self._kv_cache_config.kv_cache_groups]
        order, log = os.environ.get(DAMAGE_VARIABLE), os.environ.get(FINGERPRINTS_VARIABLE)
        damage = msgspec.json.decode(order, type=Damage) if order else None

        def pull(name: str, region: MemoryRange, rows: Sequence[DescriptorRow]) -> PullTransport:
            self.blocks = Blocks(rows, num_layers)
            return WatchedPull(parts.pull(name, region, rows), self.blocks, damage, Path(log) if log else None)

        return Parts(parts.open_side_channel, parts.serve, pull)


class FingerprintWorker:
    """Mixed into vLLM's worker by ``--worker-extension-cls``: ``/collective_rpc`` then asks for blocks by their ids."""

    def block_fingerprints(self, request: str) -> list[Any]:
        """``request`` is a JSON list: for each group its block ids. Answers the fingerprints, in the same shape."""
        connector = get_kv_transfer_group()
        assert isinstance(connector, WatchedConnector)
        assert connector.blocks is not None  # only an engine that may pull knows its blocks
        blocks = connector.blocks
        return [[blocks.fingerprint(group, b) for b in ids] for group, ids in enumerate(json.loads(request))]
