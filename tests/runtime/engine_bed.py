"""Scheduler processes of one or more engines on a memory side channel, with one clock that a test moves."""

import threading
from collections import Counter
from contextlib import ExitStack

from pd_transfer.core.admissions import AdmissionBook, AskAgain
from pd_transfer.core.layout import EngineLayout, MemoryRange, RemoteMemory
from pd_transfer.core.leases import LeaseBook, LeasePolicy
from pd_transfer.core.messages import EngineDescription, ServedRank
from pd_transfer.core.params import Address, RemotePrefill, RequestId, parse_params
from pd_transfer.core.peers import PeerBook, PeerPolicy
from pd_transfer.runtime.decode import DecodeSide
from pd_transfer.runtime.orders import WorkerReport
from pd_transfer.runtime.prefill import FinishedPrompt, PrefillSide
from pd_transfer.runtime.scheduler import SchedulerRuntime
from pd_transfer.sidechannel.memory import MemoryNetwork, MemorySideChannel
from tests.runtime.builders import BOOT_WORD, engine, eventually, hybrid_layout

HANDSHAKE_SECONDS, BACKOFF_SECONDS, REJECTION_SECONDS = 5.0, 1.0, 30.0
UNCLAIMED_SECONDS, RENEWED_SECONDS, MAX_SECONDS = 10.0, 30.0, 120.0
RENEWAL_SECONDS = 3.0
NUM_TOKENS, DIGEST = 16, b"d" * 32
TABLES = ((3, 4, 5, 9), (0, 0, 7, 8))
LEASED = (3, 4, 5, 9, 7, 8)
THREAD_NAME = "pd-transfer-side-channel"


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def described_ranks(description: EngineDescription) -> tuple[ServedRank, ...]:
    """Workers that nobody will read from."""
    words = MemoryRange(1 << 20, 8 * description.layout.num_blocks)
    region = MemoryRange(4096, description.layout.region_bytes)
    return tuple(
        ServedRank(RemoteMemory(f"agent-{rank}", b"metadata", region, words), BOOT_WORD)
        for rank in range(description.num_ranks)
    )


def make_prefill_side(
    description: EngineDescription, address: Address, ranks: tuple[ServedRank, ...] = ()
) -> PrefillSide:
    """The prefill half of an engine; by default its workers are only described."""
    layout = description.layout
    policy = LeasePolicy(UNCLAIMED_SECONDS, RENEWED_SECONDS, MAX_SECONDS, max_pool_fraction=0.5)
    leases = LeaseBook(policy, layout.num_blocks, layout.num_blocks, description.num_ranks)
    return PrefillSide(description, ranks or described_ranks(description), leases, address)


def make_decode_side(description: EngineDescription, is_allowed=lambda address: True) -> DecodeSide:
    peers = PeerBook(PeerPolicy(HANDSHAKE_SECONDS, BACKOFF_SECONDS, REJECTION_SECONDS), description)
    return DecodeSide(peers, AdmissionBook(peers, RENEWAL_SECONDS, MAX_SECONDS), is_allowed)


def remote_prefill(params) -> RemotePrefill:
    """What a client's JSON becomes."""
    parsed = parse_params(params)
    assert isinstance(parsed, RemotePrefill)
    return parsed


class Engine:
    """One scheduler process. What it counts is kept in ``outcomes`` and ``quantities``."""

    def __init__(self, prefill, decode, side_channel, clock):
        self.side_channel = side_channel
        self.runtime = SchedulerRuntime(prefill, decode, side_channel, clock)
        self.outcomes = Counter()
        self.quantities = Counter()
        self.runtime.start()

    def collect(self):
        collected = self.runtime.collect()
        self.outcomes.update(collected.outcomes)
        self.quantities.update(collected.measured.quantities)
        return collected

    def levels(self):
        """What is held, without what is not."""
        return +self.collect().levels

    # Prefill

    def hand_off(self, request_id="p", tables=TABLES, digest=DIGEST, num_tokens=NUM_TOKENS):
        """A finished prompt's params for the router; its blocks are under a lease."""
        with self.runtime.prefill() as (half, now):
            return half.hand_off(FinishedPrompt(RequestId(request_id), num_tokens, digest, tables), now)

    def lease_deadline(self):
        with self.runtime.prefill() as (half, _):
            return half.leases.next_deadline()

    def retire_leases(self, num_ranks=1):
        """A step: the words change on every rank, and confirmed blocks come free."""
        with self.runtime.prefill() as (half, now):
            half.leases.expire(now)
            batch = half.leases.take_word_changes()
            return half.leases.confirm(batch.batch_id, num_ranks, now) if batch else []

    # Decode

    def greet(self, *addresses):
        with self.runtime.decode() as (half, now):
            half.greet(addresses, now)

    def arrive(self, request_id, params, digest=DIGEST, num_tokens=NUM_TOKENS):
        with self.runtime.decode() as (half, now):
            half.arrive(RequestId(request_id), remote_prefill(params), digest, num_tokens, now)

    def ask(self, request_id, num_local_tokens=0):
        """None while it is not known."""
        with self.runtime.decode() as (half, now):
            answer = half.ask(RequestId(request_id), num_local_tokens, now)
        return None if isinstance(answer, AskAgain) else answer.num_tokens

    def found(self, request_id, num_local_tokens=0):
        """The answer, as soon as it is known."""
        answers = []

        def is_known():
            answers.append(self.ask(request_id, num_local_tokens))
            return answers[-1] is not None

        eventually(f"an answer for {request_id}", is_known)
        return answers[-1]

    def allocated(self, request_id, num_external_tokens, needed=((), ())):
        with self.runtime.decode() as (half, now):
            half.allocated(RequestId(request_id), num_external_tokens, needed, now)

    def end(self, request_id):
        with self.runtime.decode() as (half, now):
            half.request_ended(RequestId(request_id), now)

    def take_orders(self):
        with self.runtime.decode() as (half, _):
            return half.take_orders()

    def apply(self, results=(), ended=(), troubled_peers=()):
        """The workers' answer to a step."""
        report = WorkerReport(results=list(results), troubled_peers=set(troubled_peers))
        with self.runtime.decode() as (half, now):
            half.apply(report, [RequestId(request_id) for request_id in ended], now)


class Engines:
    """All engines of one test. ``close`` ends them, and checks that no thread is left."""

    def __init__(self):
        self.network = MemoryNetwork()
        self.clock = Clock()
        self.layout: EngineLayout = hybrid_layout(16)
        self._engines: list[Engine] = []
        self._open = ExitStack()

    def prefill(self, address=None, **described) -> tuple[Engine, Address]:
        endpoint = MemorySideChannel(self.network, address or Address("prefill", 0))
        address = address or Address("prefill", endpoint.bound_port)
        side = make_prefill_side(engine(self.layout, **described), address)
        return self._add(Engine(side, None, endpoint, self.clock)), address

    def decode(self, side_channel=None, **described) -> Engine:
        side = make_decode_side(engine(self.layout, "decode", "boot-d", **described))
        return self._add(Engine(None, side, side_channel or MemorySideChannel(self.network), self.clock))

    def both(self) -> tuple[Engine, Address]:
        """An engine that serves and pulls."""
        endpoint = MemorySideChannel(self.network, Address("both", 0))
        address = Address("both", endpoint.bound_port)
        description = engine(self.layout, "both")
        return self._add(
            Engine(make_prefill_side(description, address), make_decode_side(description), endpoint, self.clock)
        ), address

    def endpoint(self, address=None) -> MemorySideChannel:
        """A bare endpoint that the test speaks through."""
        endpoint = MemorySideChannel(self.network, address)
        self._open.callback(endpoint.close)
        return endpoint

    def _add(self, added: Engine) -> Engine:
        self._engines.append(added)
        self._open.callback(added.runtime.close)
        return added

    def pass_time(self, seconds):
        self.clock.now += seconds
        for each in self._engines:
            each.side_channel.wake()

    def close(self):
        self._open.close()
        assert not any(thread.name == THREAD_NAME for thread in threading.enumerate())
