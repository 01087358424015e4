"""NIXL as a transport.

Two kinds of agent, because the default one is neither safe with two threads nor quiet when idle. The serving agent has
a progress thread that sleeps between events, and knows no peer. The pulling agent has no progress thread; one worker
thread of its UCX backend carries out the reads, so that a read on the same host does not block the caller for as long
as it copies, and sleeps when there are none.

NIXL reports errors by raising, and has no time-outs: a read from a peer that hangs is outstanding until ``rebuild``.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pd_transfer.core.layout import DescriptorRow, MemoryRange, RemoteMemory
from pd_transfer.core.lease_words import WORD_BYTES
from pd_transfer.core.params import PeerKey, Transfer
from pd_transfer.errors import TransportError
from pd_transfer.transport.base import Indices, invalid_remote, invalid_rows
from pd_transfer.transport.nixl_agent import NixlAgent

_NUM_LANDING_WORDS = 4096
_WASTE = np.array([_NUM_LANDING_WORDS, _NUM_LANDING_WORDS + 1], dtype=np.int32)
"""Landing words that nobody looks at. Two, because a read of one descriptor is not for the worker thread."""
_DRAIN_SECONDS = 2.0
"""How long ``rebuild`` and ``close`` wait while no outstanding read ends. A copy on the same host is a matter of ms."""
_PULL_BACKEND_PARAMS = {"num_threads": "1", "split_batch_size": "2"}
"""A read goes to the worker thread when at least ``split_batch_size`` descriptors are left after merging. A lease word,
which is one, does not wait there behind others' KV (docs/adr/0012)."""
_PULL_ENGINE_CONFIG = "KEEPALIVE_INTERVAL=inf"
"""UCX asks every 20 s over TCP, even on one host, whether a peer lives, and the next read ends only once that peer has
taken part. A pulling agent need not ask: a read from a dead peer fails by itself, one from a stopped peer in time."""


class NixlServeTransport:
    """Serves a KV region and a table of lease words to whoever has the metadata.

    ``backend_params`` go to NIXL's UCX backend as they are; its ``engine_config`` takes UCX settings. The progress
    thread sleeps until an event, at most ``progress_seconds``: that costs idle processor time and delays connections,
    not reads. Raises TransportError when NIXL refuses memory or parameters, ConfigError when there is no usable NIXL.
    """

    def __init__(
        self,
        name: str,
        region: MemoryRange,
        words: MemoryRange,
        *,
        progress_seconds: float = 0.005,
        backend_params: Mapping[str, str] | None = None,
    ) -> None:
        if progress_seconds < 0.001:
            raise ValueError("NIXL rounds a shorter sleep to none, and then spins on a core")
        self._agent = NixlAgent(name, backend_params or {}, progress_seconds=progress_seconds)
        try:
            self._agent.register(region)
            self._agent.register(words)
            metadata = self._agent.metadata()
        except TransportError:
            self._agent.destroy()
            raise
        self._remote_memory = RemoteMemory(self._agent.name, metadata, region, words)

    @property
    def remote_memory(self) -> RemoteMemory:
        """See ``ServeTransport``."""
        return self._remote_memory

    def close(self) -> None:
        """See ``ServeTransport``."""
        self._agent.destroy()


class NixlPullTransport:
    """Reads peers' blocks into ``rows``, which must lie in ``region`` (ValueError otherwise).

    ``backend_params`` as in ``NixlServeTransport``. With ``capture_telemetry``, ``num_descriptors`` can tell how well a
    read was merged. To submit a read of blocks is to wait for the worker thread: up to as long as the reads that are
    under way take. A lease word does not go there.
    """

    def __init__(
        self,
        name: str,
        region: MemoryRange,
        rows: Sequence[DescriptorRow],
        *,
        backend_params: Mapping[str, str] | None = None,
        capture_telemetry: bool = False,
    ) -> None:
        if reason := invalid_rows(rows, region):
            raise ValueError(reason)
        self._settings = _Settings(name, region, tuple(rows), dict(backend_params or {}), capture_telemetry)
        self._initiator: _Initiator | None = _Initiator(self._settings)
        self._peers: dict[PeerKey, _Peer] = {}
        self._reads: dict[Transfer, _Read] = {}
        self._num_submitted = 0
        self._is_closed = False

    def add_peer(self, key: PeerKey, memory: RemoteMemory, rows: Sequence[DescriptorRow]) -> None:
        """See ``PullTransport``. Connecting takes some 10 ms.

        When it fails while there are other peers, the same agent cannot be added before the next ``rebuild``. The
        metadata must come from a peer that is trusted: UCX does not survive every change to its bytes.
        """
        if key in self._peers:
            raise ValueError(f"peer {key} exists already")
        if reason := invalid_remote(memory, rows):
            raise TransportError(reason)
        initiator = self._initiator or self._make_initiator()
        try:
            self._peers[key] = initiator.connect(memory, rows)
        except TransportError:
            # See _Initiator.connect. With other peers, the price of a new agent is too high.
            if not self._peers:
                self.rebuild()
            raise

    def remove_peer(self, key: PeerKey) -> None:
        """See ``PullTransport``."""
        if any(isinstance(read, _Outstanding) and read.key == key for read in self._reads.values()):
            raise ValueError(f"a read from peer {key} is outstanding")
        peer = self._peers.pop(key, None)
        if peer is not None and self._initiator is not None:
            self._initiator.disconnect(peer)

    def submit_read(self, key: PeerKey, local: Indices, remote: Indices) -> Transfer:
        """See ``PullTransport``."""
        initiator, peer = self._open(), self._peer(key)
        handle = initiator.agent.start_read(initiator.blocks, local, peer.blocks, remote)
        return self._remember(_Outstanding(key, handle, None))

    def submit_word_read(self, key: PeerKey, slot: int) -> Transfer:
        """See ``PullTransport``. Raises TransportError also while 4096 word reads are outstanding."""
        initiator, peer = self._open(), self._peer(key)
        if not 0 <= slot < peer.num_words:
            raise TransportError(f"peer {key} has no lease word {slot}")
        landing = initiator.landing.take()
        try:
            where = initiator.landing.descriptors
            handle = initiator.agent.start_read(where, _index(landing), peer.words, _index(slot))
        except TransportError:
            initiator.landing.give_back(landing)
            raise
        return self._remember(_Outstanding(key, handle, landing))

    def submit_warm_up(self, key: PeerKey) -> Transfer:
        """See ``PullTransport``. The word read and this one use two workers of UCX, each with its own connection."""
        initiator, peer = self._open(), self._peer(key)
        twice = np.zeros(2, dtype=np.int32)
        handle = initiator.agent.start_read(initiator.landing.descriptors, _WASTE, peer.words, twice)
        return self._remember(_Outstanding(key, handle, None))

    def poll(self, transfer: Transfer) -> bool:
        """See ``PullTransport``."""
        read = self._read(transfer)
        if isinstance(read, _Outstanding):
            read = self._reads[transfer] = self._open().advance(read)
        if isinstance(read, _Failed):
            raise TransportError(read.reason)
        return isinstance(read, _Done)

    def take_word(self, transfer: Transfer) -> int:
        """See ``PullTransport``."""
        read = self._read(transfer)
        if not isinstance(read, _Done) or read.word is None:
            raise ValueError(f"transfer {transfer} is not a finished word read")
        del self._reads[transfer]
        return read.word

    def num_descriptors(self, transfer: Transfer) -> int | None:
        """How many descriptors NIXL merged a finished read into; None without telemetry."""
        read = self._read(transfer)
        return read.num_descriptors if isinstance(read, _Done) else None

    def release(self, transfer: Transfer) -> None:
        """See ``PullTransport``."""
        if not isinstance(self._reads.get(transfer), _Outstanding):
            self._reads.pop(transfer, None)

    def num_outstanding(self) -> int:
        """See ``PullTransport``."""
        return len(self._reads)

    def rebuild(self) -> None:
        """See ``PullTransport``. Registers the region anew.

        Takes two seconds when a peer hangs. Over TCP, that peer may abort when it comes back: a bug of UCX.
        """
        self._destroy()
        self._make_initiator()

    def close(self) -> None:
        """See ``PullTransport``."""
        self._is_closed = True
        self._destroy()

    def _make_initiator(self) -> "_Initiator":
        if self._is_closed:
            raise TransportError("the transport is closed")
        self._initiator = _Initiator(self._settings)
        return self._initiator

    def _destroy(self) -> None:
        if self._initiator is None:
            return
        initiator, self._initiator = self._initiator, None
        outstanding = {transfer: read for transfer, read in self._reads.items() if isinstance(read, _Outstanding)}
        self._reads |= dict.fromkeys(outstanding, _Failed("the agent was destroyed"))
        initiator.destroy([read.handle for read in outstanding.values()], list(self._peers.values()))
        self._peers.clear()

    def _open(self) -> "_Initiator":
        if self._initiator is None:
            raise TransportError("there is no agent")
        return self._initiator

    def _peer(self, key: PeerKey) -> "_Peer":
        try:
            return self._peers[key]
        except KeyError:
            raise TransportError(f"peer {key} is unknown") from None

    def _read(self, transfer: Transfer) -> "_Read":
        try:
            return self._reads[transfer]
        except KeyError:
            raise ValueError(f"transfer {transfer} is unknown or released") from None

    def _remember(self, read: "_Outstanding") -> Transfer:
        self._num_submitted += 1
        transfer = Transfer(self._num_submitted)
        self._reads[transfer] = read
        return transfer


@dataclass(frozen=True, slots=True)
class _Settings:
    name: str
    region: MemoryRange
    rows: tuple[DescriptorRow, ...]
    backend_params: dict[str, str]
    capture_telemetry: bool


@dataclass(frozen=True, slots=True)
class _Peer:
    agent_name: str
    blocks: int
    words: int
    num_words: int


@dataclass(frozen=True, slots=True)
class _Outstanding:
    key: PeerKey
    handle: int
    landing: int | None


@dataclass(frozen=True, slots=True)
class _Done:
    word: int | None
    num_descriptors: int | None


@dataclass(frozen=True, slots=True)
class _Failed:
    reason: str


_Read = _Outstanding | _Done | _Failed


class _Initiator:
    """One life of the pulling agent, with everything that dies with it."""

    def __init__(self, settings: _Settings) -> None:
        self._connected: set[str] = set()
        engine_config = ",".join(filter(None, (_PULL_ENGINE_CONFIG, settings.backend_params.get("engine_config"))))
        params = _PULL_BACKEND_PARAMS | settings.backend_params | {"engine_config": engine_config}
        self.agent = NixlAgent(settings.name, params, capture_telemetry=settings.capture_telemetry)
        try:
            self.agent.register(settings.region)
            self.blocks = self.agent.prepare(None, settings.rows, settings.region)
            self.landing = _Landing(self.agent)
        except TransportError:
            self.agent.destroy()
            raise

    def connect(self, memory: RemoteMemory, rows: Sequence[DescriptorRow]) -> _Peer:
        """Load a peer's metadata and prepare its descriptors; all or nothing, as far as NIXL can.

        When NIXL refuses a part of some metadata, its UCX backend remembers the agent that they name, its core does
        not. That agent cannot be loaded any more; had it been connected before, its reads would be lost.
        """
        if any(name.encode() in memory.agent_metadata for name in self._connected):
            raise TransportError(f"agent {memory.agent_name} belongs to another peer, or its metadata name that one")
        num_words = memory.words.length_bytes // WORD_BYTES
        word_row = DescriptorRow(memory.words.address, WORD_BYTES, WORD_BYTES, num_words)
        lists: list[int] = []
        loaded = self.agent.load(memory.agent_metadata)
        if loaded != memory.agent_name:
            self.agent.forget(loaded)
            raise TransportError(f"the metadata of agent {memory.agent_name} are those of {loaded}")
        try:
            lists.append(self.agent.prepare(loaded, rows, memory.region))
            lists.append(self.agent.prepare(loaded, [word_row], memory.words))
        except TransportError:
            for handle in lists:
                self.agent.release_list(handle)
            self.agent.forget(loaded)
            raise
        self._connected.add(loaded)
        blocks, words = lists
        return _Peer(loaded, blocks, words, num_words)

    def disconnect(self, peer: _Peer) -> None:
        """Forget a peer and its descriptors. Never raises."""
        self._release_lists(peer)
        self.agent.forget(peer.agent_name)
        self._connected.discard(peer.agent_name)

    def advance(self, read: _Outstanding) -> _Read:
        """What has become of a read. Its handle and landing slot are free once it is over."""
        outcome: _Done | _Failed
        try:
            if not self.agent.is_done(read.handle):
                return read
            word = None if read.landing is None else self.landing.value(read.landing)
            outcome = _Done(word, self.agent.num_descriptors(read.handle))
        except TransportError as error:
            outcome = _Failed(str(error))
        self.agent.release_read(read.handle)
        if read.landing is not None:
            self.landing.give_back(read.landing)
        return outcome

    def destroy(self, reads: list[int], peers: list[_Peer]) -> None:
        """End everything. Reads that still can end by themselves, do so first.

        UCX aborts this process when it must close a connection in the middle of a copy from the same host, and at
        times the serving process when a TCP connection closes in the middle of a read. Only a peer that hangs leaves a
        read that does not end. The handle of such a read is leaked on purpose: it keeps the connection from being
        closed before UCX is.
        """
        patience = time.monotonic() + _DRAIN_SECONDS
        while reads and time.monotonic() < patience:
            remaining = [handle for handle in reads if not self._has_ended(handle)]
            if len(remaining) < len(reads):
                patience = time.monotonic() + _DRAIN_SECONDS
            reads = remaining
            time.sleep(0.0005)
        for peer in peers:
            self._release_lists(peer)
        self.agent.release_list(self.blocks)
        self.agent.release_list(self.landing.descriptors)
        self.agent.destroy()

    def _has_ended(self, handle: int) -> bool:
        try:
            ended = self.agent.is_done(handle)
        except TransportError:
            ended = True
        if ended:
            self.agent.release_read(handle)
        return ended

    def _release_lists(self, peer: _Peer) -> None:
        self.agent.release_list(peer.blocks)
        self.agent.release_list(peer.words)


class _Landing:
    """Registered memory that lease words land in. A slot belongs to one read until that is over."""

    def __init__(self, agent: NixlAgent) -> None:
        self._words = np.zeros(_NUM_LANDING_WORDS + len(_WASTE), dtype=np.uint64)
        self._free = list(range(_NUM_LANDING_WORDS))
        memory_range = MemoryRange(self._words.ctypes.data, self._words.nbytes)
        agent.register(memory_range)
        row = DescriptorRow(memory_range.address, WORD_BYTES, WORD_BYTES, len(self._words))
        self.descriptors = agent.prepare(None, [row], memory_range)

    def take(self) -> int:
        if not self._free:
            raise TransportError("too many reads of lease words are outstanding")
        return self._free.pop()

    def give_back(self, slot: int) -> None:
        self._free.append(slot)

    def value(self, slot: int) -> int:
        return int(self._words[slot])


def _index(index: int) -> Indices:
    return np.array([index], dtype=np.int32)
