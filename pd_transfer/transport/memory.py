"""A transport within one process, for tests: it copies real bytes between real addresses, and does nothing by itself.

One ``MemoryFabric`` stands for the network. By default a read is complete when it is first polled. A test takes hold
of reads through the fabric: those under way are in ``fabric.reads``, those to come obey ``hold_new``, ``fail_new`` and
``latency_polls``. There is no thread and no clock, so every run is the same.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

from pd_transfer.core.layout import DescriptorRow, MemoryRange, RemoteMemory
from pd_transfer.core.lease_words import WORD_BYTES
from pd_transfer.core.params import PeerKey, Transfer
from pd_transfer.errors import TransportError
from pd_transfer.transport.base import Indices, invalid_remote, invalid_rows


class _Descriptor(NamedTuple):
    address: int
    length_bytes: int


class _Copy(NamedTuple):
    source: int
    destination: int
    length_bytes: int


@dataclass(eq=False, slots=True)
class MemoryRead:
    """One read of blocks or of a word, in the hands of a test."""

    transfer: Transfer
    agent_name: str
    copies: tuple[_Copy, ...]
    landing: ctypes.c_uint64 | None
    """Where a lease word lands; None for a read of blocks."""
    held: bool
    polls_left: int
    failure: str | None
    is_over: bool = False
    """Whether a poll has said that it is done or failed, or its agent was destroyed: it writes no more."""

    def hold(self) -> None:
        """Keep the read outstanding until ``let_go``."""
        self.held = True

    def let_go(self) -> None:
        """Let the read complete."""
        self.held = False

    def fail(self, reason: str) -> None:
        """Make the next poll raise; what was written stays. A read that is over does not change any more."""
        if not self.is_over:
            self.failure = reason

    def copy_half(self) -> None:
        """Write the first half of every block now; the read stays outstanding. Nothing once it is done or failed."""
        if not self.is_over and self.failure is None:
            for copy in self.copies:
                ctypes.memmove(copy.destination, copy.source, copy.length_bytes // 2)

    def advance(self) -> bool:
        """One poll: what ``PullTransport.poll`` says of this read."""
        if self.failure is not None:
            self.is_over = True
            raise TransportError(self.failure)
        if self.is_over:
            return True
        if self.held:
            return False
        if self.polls_left > 0:
            self.polls_left -= 1
            return False
        for copy in self.copies:
            ctypes.memmove(copy.destination, copy.source, copy.length_bytes)
        self.is_over = True
        return True


@dataclass(eq=False)
class MemoryFabric:
    """The network between the transports of one test, and the test's controls over it."""

    hold_new: bool = False
    """Reads that are submitted from now on stay outstanding until they are let go."""
    fail_new: str | None = None
    """Reads that are submitted from now on fail, for this reason, when they are first polled."""
    latency_polls: int = 0
    """How many polls call a read outstanding before it completes."""
    _serving: dict[str, RemoteMemory] = field(default_factory=dict)
    _reads: list[MemoryRead] = field(default_factory=list)
    _numbers: "count[int]" = field(default_factory=lambda: count(1))

    @property
    def reads(self) -> list[MemoryRead]:
        """The reads that are not over, oldest first."""
        self._reads = [read for read in self._reads if not read.is_over]
        return list(self._reads)

    def let_go(self) -> None:
        """Hold no read any more, neither new ones nor those under way."""
        self.hold_new = False
        for read in self.reads:
            read.let_go()

    def kill(self, agent_name: str) -> None:
        """The serving process is gone: reads from it fail, and it cannot be reached any more."""
        self._serving.pop(agent_name, None)
        for read in self.reads:
            if read.agent_name == agent_name:
                read.fail(f"the connection to agent {agent_name} broke")

    def serve(self, name: str, region: MemoryRange, words: MemoryRange) -> RemoteMemory:
        """For a serving transport: announce memory under an agent name that is used once."""
        agent_name = f"{name}-{next(self._numbers)}"
        memory = RemoteMemory(agent_name, f"memory agent {agent_name}".encode(), region, words)
        self._serving[agent_name] = memory
        return memory

    def connect(self, memory: RemoteMemory) -> None:
        """For a pulling transport: raise TransportError unless exactly this memory is being served."""
        if self._serving.get(memory.agent_name) != memory:
            raise TransportError(f"agent {memory.agent_name} cannot be reached, or its metadata is wrong")

    def start(self, agent_name: str, copies: tuple[_Copy, ...], landing: ctypes.c_uint64 | None = None) -> MemoryRead:
        """For a pulling transport: put a read under way."""
        if agent_name not in self._serving:
            raise TransportError(f"the connection to agent {agent_name} is broken")
        transfer = Transfer(next(self._numbers))
        read = MemoryRead(transfer, agent_name, copies, landing, self.hold_new, self.latency_polls, self.fail_new)
        self._reads.append(read)
        return read


class MemoryServeTransport:
    """Serves a region and a table of lease words of this process."""

    def __init__(self, fabric: MemoryFabric, name: str, region: MemoryRange, words: MemoryRange) -> None:
        self._fabric = fabric
        self._remote_memory = fabric.serve(name, region, words)

    @property
    def remote_memory(self) -> RemoteMemory:
        """See ``ServeTransport``."""
        return self._remote_memory

    def close(self) -> None:
        """See ``ServeTransport``."""
        self._fabric.kill(self._remote_memory.agent_name)


class _Peer(NamedTuple):
    memory: RemoteMemory
    descriptors: list[_Descriptor]


class MemoryPullTransport:
    """Reads what other transports of the same fabric serve. ``rows`` must lie in ``region``, else ValueError."""

    def __init__(self, fabric: MemoryFabric, region: MemoryRange, rows: Sequence[DescriptorRow]) -> None:
        if reason := invalid_rows(rows, region):
            raise ValueError(reason)
        self._fabric = fabric
        self._descriptors = _descriptors(rows)
        self._peers: dict[PeerKey, _Peer] = {}
        self._reads: dict[Transfer, MemoryRead] = {}
        self._is_closed = False

    def add_peer(self, key: PeerKey, memory: RemoteMemory, rows: Sequence[DescriptorRow]) -> None:
        """See ``PullTransport``."""
        if key in self._peers:
            raise ValueError(f"peer {key} exists already")
        if self._is_closed:
            raise TransportError("the transport is closed")
        if reason := invalid_remote(memory, rows):
            raise TransportError(reason)
        if any(peer.memory.agent_name == memory.agent_name for peer in self._peers.values()):
            raise TransportError(f"agent {memory.agent_name} belongs to another peer")
        self._fabric.connect(memory)
        self._peers[key] = _Peer(memory, _descriptors(rows))

    def remove_peer(self, key: PeerKey) -> None:
        """See ``PullTransport``."""
        peer = self._peers.get(key)
        if peer is None:
            return
        if any(read.agent_name == peer.memory.agent_name and not read.is_over for read in self._reads.values()):
            raise ValueError(f"a read from peer {key} is outstanding")
        del self._peers[key]

    def submit_read(self, key: PeerKey, local: Indices, remote: Indices) -> Transfer:
        """See ``PullTransport``."""
        peer = self._peer(key)
        if len(local) != len(remote) or len(local) == 0:
            raise TransportError(f"{len(local)} local and {len(remote)} remote indices do not make a read")
        pairs = zip(_select(self._descriptors, local), _select(peer.descriptors, remote), strict=True)
        return self._start(peer, tuple(_pair(destination, source) for destination, source in pairs))

    def submit_word_read(self, key: PeerKey, slot: int) -> Transfer:
        """See ``PullTransport``."""
        peer = self._peer(key)
        words = peer.memory.words
        if not 0 <= slot < words.length_bytes // WORD_BYTES:
            raise TransportError(f"peer {key} has no lease word {slot}")
        landing = ctypes.c_uint64()
        copy = _Copy(words.address + slot * WORD_BYTES, ctypes.addressof(landing), WORD_BYTES)
        return self._start(peer, (copy,), landing)

    def submit_warm_up(self, key: PeerKey) -> Transfer:
        """See ``PullTransport``. Here there is nothing to set up."""
        return self.submit_word_read(key, 0)

    def poll(self, transfer: Transfer) -> bool:
        """See ``PullTransport``."""
        return self._read(transfer).advance()

    def take_word(self, transfer: Transfer) -> int:
        """See ``PullTransport``."""
        read = self._read(transfer)
        if read.landing is None or not read.is_over or read.failure is not None:
            raise ValueError(f"transfer {transfer} is not a finished word read")
        del self._reads[transfer]
        return read.landing.value

    def release(self, transfer: Transfer) -> None:
        """See ``PullTransport``."""
        read = self._reads.get(transfer)
        if read is not None and read.is_over:
            del self._reads[transfer]

    def num_outstanding(self) -> int:
        """See ``PullTransport``."""
        return len(self._reads)

    def rebuild(self) -> None:
        """See ``PullTransport``."""
        if self._is_closed:
            raise TransportError("the transport is closed")
        self._forget_everything()

    def close(self) -> None:
        """See ``PullTransport``."""
        self._is_closed = True
        self._forget_everything()

    def _forget_everything(self) -> None:
        for read in self._reads.values():
            read.fail("the agent was destroyed")
            read.is_over = True
        self._peers.clear()

    def _peer(self, key: PeerKey) -> _Peer:
        try:
            return self._peers[key]
        except KeyError:
            raise TransportError(f"peer {key} is unknown") from None

    def _read(self, transfer: Transfer) -> MemoryRead:
        try:
            return self._reads[transfer]
        except KeyError:
            raise ValueError(f"transfer {transfer} is unknown or released") from None

    def _start(self, peer: _Peer, copies: tuple[_Copy, ...], landing: ctypes.c_uint64 | None = None) -> Transfer:
        read = self._fabric.start(peer.memory.agent_name, copies, landing)
        self._reads[read.transfer] = read
        return read.transfer


def _descriptors(rows: Sequence[DescriptorRow]) -> list[_Descriptor]:
    return [_Descriptor(row.address + i * row.stride_bytes, row.length_bytes) for row in rows for i in range(row.count)]


def _select(descriptors: list[_Descriptor], indices: Indices) -> list[_Descriptor]:
    if indices.min() < 0 or indices.max() >= len(descriptors):
        raise TransportError(f"an index is outside the {len(descriptors)} descriptors")
    return [descriptors[index] for index in indices.tolist()]


def _pair(destination: _Descriptor, source: _Descriptor) -> _Copy:
    if destination.length_bytes != source.length_bytes:
        raise TransportError(f"a local block has {destination.length_bytes} bytes, a remote {source.length_bytes}")
    return _Copy(source.address, destination.address, source.length_bytes)
