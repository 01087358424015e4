"""What one more peer, connection or lease takes: bytes, descriptors of files, milliseconds. Measured, not estimated."""

import gc
import pickle
import time
import tracemalloc
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import psutil

from benchmarks.scale.subject import Subject, address
from pd_transfer.core.layout import DescriptorRow, MemoryRange
from pd_transfer.core.leases import LeaseBook, LeasePolicy
from pd_transfer.core.messages import Welcome, decode, encode
from pd_transfer.core.params import Address, LeaseId, PeerKey
from pd_transfer.core.peers import PeerBook, PeerPolicy
from pd_transfer.errors import PdTransferError
from pd_transfer.runtime.remote import RemotePeer
from pd_transfer.sidechannel.zmq import ZmqSideChannel

NUM_SAMPLES = 64
_NUM_AGENTS = 16
_PATIENCE_SECONDS = 20.0


class Connection(NamedTuple):
    """What one more connection takes, both ends in one process."""

    num_bytes: float
    num_files: float
    seconds: float


def allocated(make: Callable[[int], object], count: int = NUM_SAMPLES) -> float:
    """Bytes of Python memory that one more object of a kind takes."""
    make(0)  # what all share is there afterwards
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    kept = [make(number) for number in range(1, count + 1)]
    gc.collect()
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    return grown / len(kept)


def scheduler_peer(subject: Subject) -> float:
    """A peer in decode's scheduler process, as decoded from the wire."""
    book = PeerBook(PeerPolicy(5, 1, 30), subject.engine(0))
    payloads = [encode(subject.welcome(number)) for number in range(NUM_SAMPLES + 1)]

    def greet(number: int) -> object:
        book.greet(address(number), 0.0)
        message = decode(payloads[number])
        assert isinstance(message, Welcome)
        return book.receive(address(number), message, 0.0)

    return allocated(greet)


def worker_peer(subject: Subject) -> float:
    """A peer in decode's worker process: the welcome as the scheduler's order brings it, and its rows."""
    payloads = [pickle.dumps(subject.welcome(number)) for number in range(NUM_SAMPLES + 1)]
    return allocated(lambda number: RemotePeer.from_welcome(pickle.loads(payloads[number]), 0, subject.layout))


def lease(subject: Subject) -> float:
    """A lease of one prompt, with the book's own entries for its blocks."""
    block_ids = subject.block_ids()
    span = max(block_ids) + 1
    book = LeaseBook(LeasePolicy(10, 30, 120, 0.5), 10 * span, 16, 1)
    return allocated(
        lambda number: book.open(LeaseId(f"{number:032x}"), [number * span + b for b in block_ids], 0.0), 4
    )


def side_channel(count: int = NUM_SAMPLES) -> Connection:
    """A ZeroMQ connection, established: the asker's DEALER and its monitor, and the ROUTER's part."""
    server = ZmqSideChannel(Address("0.0.0.0", 0))
    asker = ZmqSideChannel(max_peers=count + 1)
    assert server.bound_port is not None
    process = psutil.Process()
    try:
        # Every address of the loopback is another peer to the asker. The first one costs what the sockets share.
        asker.send_request(Address("127.0.0.1", server.bound_port), b"hello")
        _hear(server, 1)
        gc.collect()
        num_bytes, num_files, start = process.memory_info().rss, process.num_fds(), time.perf_counter()
        for number in range(2, count + 2):
            asker.send_request(Address(f"127.0.0.{number}", server.bound_port), b"hello")
        _hear(server, count)
        seconds = time.perf_counter() - start
        grown = process.memory_info().rss - num_bytes, process.num_fds() - num_files
        return Connection(grown[0] / count, grown[1] / count, seconds / count)
    finally:
        asker.close()
        server.close()


def _hear(server: ZmqSideChannel, count: int) -> None:
    deadline, num_heard = time.monotonic() + _PATIENCE_SECONDS, 0
    while num_heard < count:
        num_heard += len(server.poll(0.1))
        if time.monotonic() > deadline:
            raise SystemExit(f"only {num_heard} of {count} connections were made: the figure would mean nothing")


def nixl_peer(num_rows: int, num_blocks: int) -> Connection | None:
    """A peer of a pulling NIXL agent, its descriptor table included; None where there is no usable NIXL."""
    block_bytes = 64
    region = np.zeros(num_rows * num_blocks * block_bytes, dtype=np.uint8)
    words = np.zeros(num_blocks, dtype=np.uint64)
    start = region.ctypes.data
    rows = [
        DescriptorRow(start + row * num_blocks * block_bytes, block_bytes, block_bytes, num_blocks)
        for row in range(num_rows)
    ]
    ranges = MemoryRange(start, region.nbytes), MemoryRange(words.ctypes.data, words.nbytes)
    try:
        return _connect_agents(ranges, rows)
    except PdTransferError:
        return None


def _connect_agents(ranges: tuple[MemoryRange, MemoryRange], rows: Sequence[DescriptorRow]) -> Connection:
    from pd_transfer.transport.nixl import NixlPullTransport, NixlServeTransport

    served = [NixlServeTransport(f"scale-{number}", *ranges) for number in range(_NUM_AGENTS + 1)]
    pulling = NixlPullTransport("scale-pull", ranges[0], rows)
    process = psutil.Process()
    try:
        # The first one costs what the agent itself needs.
        pulling.add_peer(PeerKey("first"), served[0].remote_memory, rows)
        num_bytes, num_files, start = process.memory_info().rss, process.num_fds(), time.perf_counter()
        for number, transport in enumerate(served[1:]):
            pulling.add_peer(PeerKey(str(number)), transport.remote_memory, rows)
        seconds = time.perf_counter() - start
        grown = process.memory_info().rss - num_bytes, process.num_fds() - num_files
        return Connection(grown[0] / _NUM_AGENTS, grown[1] / _NUM_AGENTS, seconds / _NUM_AGENTS)
    finally:
        pulling.close()
        for transport in served:
            transport.close()
