"""The two engines of a soak, without vLLM: everything of ours is real, the model is a fingerprint.

Prefill is a process of its own: side channel over ZeroMQ, leases, lease words, NIXL. Decode is this process: side
channel, admissions, and a pull thread over NIXL. Both keep their blocks as vLLM does: prefill until the lease has
retired, decode until the receive was reported.
"""

import multiprocessing
import random
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import psutil

from pd_transfer.core.admissions import AdmissionBook, AskAgain
from pd_transfer.core.layout import block_runs
from pd_transfer.core.lease_words import LeaseWords
from pd_transfer.core.leases import LeaseBook, LeasePolicy
from pd_transfer.core.messages import ServedRank
from pd_transfer.core.outcomes import Level, Outcome, Outcomes
from pd_transfer.core.params import Address, RequestId
from pd_transfer.core.peers import PeerBook, PeerPolicy
from pd_transfer.core.receives import ReceivePolicy, ReceiveRequest
from pd_transfer.runtime.decode import DecodeSide
from pd_transfer.runtime.prefill import FinishedPrompt, PrefillSide
from pd_transfer.runtime.scheduler import SchedulerRuntime
from pd_transfer.runtime.worker import NoFence, PullLoop, PullThread
from pd_transfer.sidechannel.zmq import ZmqSideChannel
from pd_transfer.transport.nixl import NixlPullTransport, NixlServeTransport
from tests.faults.pages import TOKENS_PER_BLOCK, Pages
from tests.runtime.builders import DEADLINE_SECONDS, engine, range_of
from tests.runtime.engine_bed import remote_prefill

NUM_LAYERS, PAGE_BYTES = 4, 16 * 1024
NUM_BLOCKS = 257
"""Of either engine."""
HOST = "127.0.0.1"
STEP_SECONDS = 0.001
"""The engines' forward pass."""
LEASES = LeasePolicy(unclaimed_seconds=1.0, renewal_seconds=1.0, max_seconds=20.0, max_pool_fraction=0.5)
RENEWAL_SECONDS = 0.3
PEERS = PeerPolicy(handshake_seconds=5.0, backoff_seconds=0.2, rejection_seconds=30.0)
RECEIVES = ReceivePolicy(read_seconds=5.0, drain_seconds=5.0)


@dataclass(frozen=True, slots=True)
class Usage:
    """What a process holds of the machine."""

    rss_bytes: int
    num_fds: int
    num_threads: int

    @classmethod
    def of(cls, process: psutil.Process) -> "Usage":
        """At this moment."""
        return cls(process.memory_info().rss, process.num_fds(), process.num_threads())


@dataclass(frozen=True)
class Held:
    """What an engine has not given back: all of it must be zero once nothing is asked of it."""

    levels: Counter[Level]
    num_blocks: int

    def __bool__(self) -> bool:
        return bool(+self.levels) or self.num_blocks != 0


def digest_of(prompt: int) -> bytes:
    """What both engines know a prompt by."""
    return prompt.to_bytes(32, "little")


# Prefill, in a process of its own


class _Prefill:
    """Scheduler and only worker of one life of the engine."""

    def __init__(self, port: int, backend_params: dict[str, str]) -> None:
        self._pages = Pages(NUM_LAYERS, NUM_BLOCKS, NUM_BLOCKS, PAGE_BYTES)
        self._table = np.zeros(NUM_BLOCKS, dtype=np.uint64)
        boot_word, lock = secrets.randbits(32), threading.Lock()

        def fence() -> None:
            with lock:
                pass

        self._words = LeaseWords(self._table, boot_word, fence)
        self._transport = NixlServeTransport(
            "soak-serve", self._pages.region, range_of(self._table), backend_params=backend_params
        )
        side_channel = ZmqSideChannel(Address(HOST, port))
        self.port = side_channel.bound_port
        side = PrefillSide(
            engine(self._pages.layout, boot=secrets.token_hex(8)),
            (ServedRank(self._transport.remote_memory, boot_word),),
            LeaseBook(LEASES, NUM_BLOCKS, NUM_BLOCKS, num_ranks=1),
            Address(HOST, self.port),
        )
        self._runtime = SchedulerRuntime(side, None, side_channel)
        self._runtime.start()
        self._free = set(range(1, NUM_BLOCKS))

    def hand_off(self, prompt: int, num_blocks: int) -> tuple[dict[str, Any], tuple[int, ...]] | None:
        """Compute a prompt and put it under a lease: params and block table; None when there is no room."""
        if len(self._free) < num_blocks:
            return None
        table = tuple(random.sample(sorted(self._free), num_blocks))
        self._pages.write(prompt, table)
        finished = FinishedPrompt(RequestId(f"p{prompt}"), num_blocks * TOKENS_PER_BLOCK, digest_of(prompt), (table,))
        with self._runtime.prefill() as (half, now):
            params = half.hand_off(finished, now)
        if params is None:
            return None
        self._free.difference_update(table)
        return params, table

    def end_leases(self) -> None:
        """What vLLM's reset of the prefix cache does."""
        with self._runtime.prefill() as (half, now):
            half.leases.reset(now)

    def step(self) -> None:
        """Words change with a step; its output frees the blocks."""
        with self._runtime.prefill() as (half, now):
            half.leases.expire(now)
            batch = half.leases.take_word_changes()
        self._words.store([batch] if batch else [])
        with self._runtime.prefill() as (half, now):
            for batch_id in self._words.take_confirmed():
                self._free.update(half.leases.confirm(batch_id, 1, now))

    def ledger(self) -> tuple[Held, Outcomes]:
        """What is held, and what was counted since the last call."""
        collected = self._runtime.collect()
        return Held(collected.levels, NUM_BLOCKS - 1 - len(self._free)), collected.outcomes


def _serve(pipe: Connection, port: int, backend_params: dict[str, str]) -> None:
    prefill = _Prefill(port, backend_params)
    pipe.send(prefill.port)
    while True:
        if pipe.poll(STEP_SECONDS):
            method, *arguments = pipe.recv()
            pipe.send(getattr(prefill, method)(*arguments))
        prefill.step()


class PrefillProcess:
    """One life of the prefill engine. ``port`` 0 is any; the next life gets the one that this life was given."""

    def __init__(self, port: int, backend_params: dict[str, str]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, port, backend_params), daemon=True)
        self._process.start()
        theirs.close()
        self._started_at = time.monotonic()
        self._psutil = psutil.Process(self._process.pid)
        self.port: int | None = None

    @property
    def is_ready(self) -> bool:
        """Whether it serves; from then on ``port`` is known."""
        if self.port is None and self._pipe.poll():
            self.port = self._pipe.recv()
        assert self.port is not None or time.monotonic() < self._started_at + DEADLINE_SECONDS
        return self.port is not None

    def call(self, method: str, *arguments: object) -> Any:
        """Ask the process for something that it does between two steps."""
        self._pipe.send((method, *arguments))
        assert self._pipe.poll(DEADLINE_SECONDS), f"prefill does not answer to {method}"
        return self._pipe.recv()

    def usage(self) -> Usage:
        """What the process holds of the machine."""
        return Usage.of(self._psutil)

    def kill(self) -> None:
        """End it, whatever it is doing: it dies a moment later."""
        self._process.kill()

    def close(self) -> None:
        """Forget a process that was killed."""
        self._process.join()
        self._process.close()
        self._pipe.close()


# Decode, in this process


class AbortAt(Enum):
    """Where in its life a request is aborted."""

    NEVER = auto()
    DOOR = auto()
    """The serving layer turns it away."""
    ASKING = auto()
    FOUND = auto()
    ORDERED = auto()
    READING = auto()


@dataclass(slots=True)
class Request:
    """One request: ``granted`` is prefill's block table, ``table`` decode's, empty until it is allocated."""

    request_id: RequestId
    prompt: int
    granted: Sequence[int]
    abort_at: AbortAt
    table: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        """All of its prompt."""
        return len(self.granted) * TOKENS_PER_BLOCK


class DecodeEngine:
    """Scheduler and only worker. ``step`` is an engine's step: answers, orders, the forward pass, the report."""

    def __init__(
        self, backend_params: dict[str, str], after_read: Callable[[ReceiveRequest], None] = lambda _: None
    ) -> None:
        self.pages = Pages(NUM_LAYERS, NUM_BLOCKS, NUM_BLOCKS, PAGE_BYTES)
        transport = NixlPullTransport("soak-pull", self.pages.region, self.pages.rows, backend_params=backend_params)
        loop = PullLoop(transport, RECEIVES, 0, self.pages.layout, after_read)
        self._pull = PullThread(loop, transport)
        peers = PeerBook(PEERS, engine(self.pages.layout, "decode", "boot-d"))
        side = DecodeSide(peers, AdmissionBook(peers, RENEWAL_SECONDS, LEASES.max_seconds), lambda _: True)
        self._runtime = SchedulerRuntime(None, side, ZmqSideChannel())
        self._runtime.start()
        self._free = set(range(1, NUM_BLOCKS))
        self._asking: dict[RequestId, Request] = {}
        self._loading: dict[RequestId, Request] = {}
        self.num_transfers = 0
        self.num_verified = 0
        self.num_wrong = 0

    @property
    def num_requests(self) -> int:
        """Requests that are not over."""
        return len(self._asking) + len(self._loading)

    def arrive(self, request: Request, params: dict[str, Any]) -> None:
        """A client's request with what prefill answered."""
        digest = digest_of(request.prompt)
        with self._runtime.decode() as (half, now):
            if request.abort_at is AbortAt.DOOR:
                half.turn_away(remote_prefill(params), now)
                return
            half.arrive(request.request_id, remote_prefill(params), digest, request.num_tokens, now)
        self._asking[request.request_id] = request

    def step(self) -> None:
        """Advance every request."""
        for request in list(self._asking.values()):
            self._ask(request)
        self._order()
        for request in self._loading.values():
            if request.abort_at is AbortAt.READING:
                request.abort_at = AbortAt.NEVER
                self._end(request)
        self._order()
        report = self._pull.take_report()
        with self._runtime.decode() as (half, now):
            half.apply(report, [result.request_id for result in report.results], now)
        for result in report.results:
            self._ended(self._loading.pop(result.request_id), result.outcome)

    def _ask(self, request: Request) -> None:
        if request.abort_at is AbortAt.ASKING:
            self._withdraw(request)
            return
        with self._runtime.decode() as (half, now):
            answer = half.ask(request.request_id, 0, now)
        if isinstance(answer, AskAgain) or len(self._free) < len(request.granted):
            return
        if request.abort_at is AbortAt.FOUND or answer.num_tokens == 0:
            self._withdraw(request)
            return
        del self._asking[request.request_id]
        self._loading[request.request_id] = request
        request.table = tuple(random.sample(sorted(self._free), len(request.granted)))
        self._free.difference_update(request.table)
        with self._runtime.decode() as (half, now):
            half.allocated(request.request_id, answer.num_tokens, (block_runs(request.table),), now)
        if request.abort_at is AbortAt.ORDERED:
            self._end(request)

    def _withdraw(self, request: Request) -> None:
        del self._asking[request.request_id]
        self._end(request)

    def _end(self, request: Request) -> None:
        with self._runtime.decode() as (half, now):
            half.request_ended(request.request_id, now)

    def _order(self) -> None:
        with self._runtime.decode() as (half, _):
            orders = half.take_orders()
        self._pull.post(orders, NoFence())

    def _ended(self, request: Request, outcome: Outcome) -> None:
        self.num_transfers += 1
        if outcome is Outcome.RECEIVE_VERIFIED:
            self.num_verified += 1
            self.num_wrong += self.pages.share_of(request.prompt, request.granted, request.table) < 1.0
        self._free.update(request.table)

    def ledger(self) -> tuple[Held, Outcomes]:
        """What is held, and what was counted since the last call."""
        collected = self._runtime.collect()
        return Held(collected.levels, NUM_BLOCKS - 1 - len(self._free)), collected.outcomes

    def close(self) -> None:
        """End reads, then the side channel."""
        self._pull.close()
        self._runtime.close()
