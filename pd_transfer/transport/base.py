"""What a transport must do: one-sided reads of KV blocks and of lease words.

A prefill worker *serves* memory and takes no part in a read. A decode worker *pulls*. Each side has one object, owned
by one thread. Only ``add_peer`` waits for the network, and ``rebuild`` and ``close`` for a moment: a submitted read is
polled until it is done or has raised. A read cannot be cancelled; ``rebuild`` is the last resort and fails every read
that is outstanding.

TransportError means that the peer or the network is at fault, ValueError that the caller is.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from pd_transfer.core.layout import DescriptorRow, MemoryKind, MemoryRange, RemoteMemory
from pd_transfer.core.lease_words import WORD_BYTES
from pd_transfer.core.params import PeerKey, Transfer

Indices = npt.NDArray[np.int32]


_ADDRESS_LIMIT = 2**64
_INDEX_LIMIT = 2**31


class ServeTransport(Protocol):
    """The prefill worker's side: keeps memory readable for whoever knows the metadata."""

    @property
    def remote_memory(self) -> RemoteMemory:
        """What readers need; constant for the life of the object."""

    def close(self) -> None:
        """Stop serving. Idempotent, never raises."""


class PullTransport(Protocol):
    """The decode worker's side. One thread calls all methods. Local descriptor rows are fixed at construction."""

    def add_peer(self, key: PeerKey, memory: RemoteMemory, rows: Sequence[DescriptorRow]) -> None:
        """Make a peer's worker readable; ``rows`` are its KV descriptors at their remote addresses.

        Raises TransportError (and leaves nothing behind) when the peer cannot be reached, its description is junk, or
        another key still names its agent; ValueError when the key is in use.
        """

    def remove_peer(self, key: PeerKey) -> None:
        """Forget a peer. Unknown keys are ignored; nothing that the peer or the network does makes it raise.

        Raises ValueError, and keeps the peer, while one of its reads is outstanding: forgetting does not stop a read.
        """

    def submit_read(self, key: PeerKey, local: Indices, remote: Indices) -> Transfer:
        """Start reading remote descriptor ``remote[i]`` into local descriptor ``local[i]`` for every i.

        Both arrays are int32, equally long and not empty. Raises TransportError when it cannot even start: the peer is
        unknown or gone, an index is out of range, or two descriptors differ in length.
        """

    def submit_word_read(self, key: PeerKey, slot: int) -> Transfer:
        """Start reading the peer's lease word ``slot``. Raises TransportError as ``submit_read`` does."""

    def submit_warm_up(self, key: PeerKey) -> Transfer:
        """Start a read that brings nothing, the way that blocks come: the first of them sets a connection up.

        Lease words may come another way, and have to be warmed up by themselves. Raises as ``submit_read`` does.
        """

    def poll(self, transfer: Transfer) -> bool:
        """True once every byte has arrived, False while it is outstanding. Raises TransportError when it failed.

        After True or TransportError the transfer is over: nothing will be written to local memory any more, and
        another poll says the same. Raises ValueError for a transfer that was released, or never submitted.
        """

    def take_word(self, transfer: Transfer) -> int:
        """The value that a finished word read brought; ends the life of the transfer.

        Raises ValueError for any other transfer.
        """

    def release(self, transfer: Transfer) -> None:
        """Forget a transfer that is over. Unknown transfers are ignored; never raises.

        A transfer is over once ``poll`` has said so. Any other stays, and is counted: it may still write.
        """

    def num_outstanding(self) -> int:
        """Transfers submitted and not yet released or taken."""

    def rebuild(self) -> None:
        """Destroy the agent and make a new one: no outstanding read can write any more, all peers are forgotten.

        Outstanding reads fail: the next ``poll`` raises, and they are released as always. May take seconds. Raises
        TransportError when there can be no new agent at this time, as when a network device is down: everything else
        has been done then, and every ``add_peer`` tries again to make one.
        """

    def close(self) -> None:
        """Destroy the agent, as ``rebuild`` does, for good. Idempotent, never raises."""


def invalid_remote(memory: RemoteMemory, rows: Sequence[DescriptorRow]) -> str | None:
    """Why what a peer says of its memory cannot be true, or cannot be read; None when it can."""
    if not memory.agent_name:
        return "a peer's agent needs a name"
    for what, memory_range in (("region", memory.region), ("table of lease words", memory.words)):
        if _is_impossible(memory_range):
            return f"the {what} is not a range of memory: {memory_range}"
    if memory.words.kind is not MemoryKind.DRAM or memory.words.address % WORD_BYTES:
        return "lease words must be aligned words of DRAM"
    if memory.words.length_bytes < WORD_BYTES:
        return "the table of lease words is empty"
    return invalid_rows(rows, memory.region)


def invalid_rows(rows: Sequence[DescriptorRow], region: MemoryRange) -> str | None:
    """Why these rows do not describe blocks inside the region; None when they do.

    Python's integers do not wrap, so that no sum of hostile numbers can pass for an address inside the region.
    """
    if not rows:
        return "there are no descriptors"
    for row in rows:
        if row.count < 1 or row.length_bytes < 1 or row.stride_bytes < row.length_bytes:
            return f"a row has an impossible count, length or stride: {row}"
        end = row.address + (row.count - 1) * row.stride_bytes + row.length_bytes
        if row.address < region.address or end > region.address + region.length_bytes:
            return f"a row lies outside its region: {row}"
    if sum(row.count for row in rows) >= _INDEX_LIMIT:
        return "more descriptors than an index can name"
    return None


def _is_impossible(memory_range: MemoryRange) -> bool:
    end = memory_range.address + memory_range.length_bytes
    return (
        memory_range.address < 1
        or memory_range.length_bytes < 1
        or end > _ADDRESS_LIMIT
        or not 0 <= memory_range.device_id < _INDEX_LIMIT
    )
