"""A prefill and a decode engine without threads or sockets, and a stranger who speaks to both. Nothing may come of it.

One seed is one run: ``World(seed).run(num_inputs)`` does the same things every time, but for keys and lease ids, which
nobody may be able to guess. A third of the inputs are messages to the prefill engine, a third answers to the decode
engine, a third requests with ``kv_transfer_params``. What must hold is asserted where it could be broken; every
``PROOF_INPUTS`` inputs the two engines, left alone, must be as they were: a handshake succeeds, a transfer is exact,
nothing is held.
"""

import base64
import gc
import itertools
import logging
import os
import types
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pd_transfer.config import is_loopback
from pd_transfer.core.admissions import AdmissionBook, TokensFound
from pd_transfer.core.layout import block_runs
from pd_transfer.core.leases import LeaseBook, LeasePolicy
from pd_transfer.core.messages import (
    Hello,
    Malformed,
    Message,
    Refused,
    Release,
    Released,
    Renew,
    Renewed,
    Reply,
    Welcome,
    decode,
    encode,
)
from pd_transfer.core.outcomes import Level, Outcome
from pd_transfer.core.params import (
    Address,
    InvalidParams,
    LeaseId,
    RemoteDecode,
    RemotePrefill,
    RequestId,
    parse_grant,
    parse_params,
)
from pd_transfer.core.peers import PeerBook, PeerPolicy, PeerState
from pd_transfer.core.receives import ReceivePolicy
from pd_transfer.runtime.decode import DecodeSide
from pd_transfer.runtime.orders import WorkerReport
from pd_transfer.runtime.prefill import FinishedPrompt, PrefillSide
from pd_transfer.runtime.worker import PullLoop
from pd_transfer.transport.memory import MemoryFabric, MemoryPullTransport
from tests.faults.fuzz_inputs import Chance, Params, Payloads
from tests.runtime.builders import Memory, PrefillWorker, content_after_read, engine, hybrid_layout

PROOF_INPUTS = 2000
"""Inputs between two proofs that both engines still work."""
HONEST = Address("127.0.0.1", 5600)
STRANGERS = (Address("127.0.0.1", 5601), Address("127.0.0.1", 5602), Address("::1", 5603))
FORBIDDEN_HOST = "10.1.2.3"
NUM_BLOCKS, NUM_TOKENS, DIGEST = 16, 16, b"d" * 32
TABLES, NEEDED = ((3, 4, 5, 9), (0, 0, 7, 8)), ((1, 2, 6, 7), (0, 0, 4, 5))
LONGEST_LINE = 3000
"""Characters of a log line, whatever a stranger has sent."""
MAX_WAITING = 30

Decode = Callable[[bytes], Message | Malformed]


class FuzzError(AssertionError):
    """An input did what no input may do. The message says how to see it again."""


class WatchedLog(logging.Handler):
    """Formats every line, as a real log would, and remembers what a line must not be."""

    def __init__(self, secret: Callable[[], bytes]) -> None:
        super().__init__()
        self._secret = secret
        self.num_lines = 0

    def emit(self, record: logging.LogRecord) -> None:
        line = record.getMessage()
        self.num_lines += 1
        assert not record.exc_info, f"an exception was contained: {record.exc_info}"
        assert len(line) < LONGEST_LINE, f"a log line of {len(line)} characters"
        assert line.isprintable(), f"a stranger writes into the log: {line!r}"
        secret = self._secret()
        assert str(secret) not in line, "the grant key is in the log"
        assert secret.hex() not in line, "the grant key is in the log"

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        raise


@contextmanager
def watched_log(secret: Callable[[], bytes]) -> Iterator[WatchedLog]:
    """All of our log lines go to a WatchedLog, and nowhere else."""
    logger, handler = logging.getLogger("pd_transfer"), WatchedLog(secret)
    before = logger.handlers, logger.propagate, logger.level
    logger.handlers, logger.propagate = [handler], False
    logger.setLevel(logging.INFO)
    try:
        yield handler
    finally:
        logger.handlers, logger.propagate, level = before
        logger.setLevel(level)


def footprint(*roots: object) -> int:
    """How many objects can be reached from some: what a leak makes grow."""
    skipped = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.FrameType, logging.Logger)
    seen: set[int] = set()
    to_visit = list(roots)
    while to_visit:
        visited = to_visit.pop()
        if id(visited) not in seen and not isinstance(visited, skipped):
            seen.add(id(visited))
            to_visit.extend(gc.get_referents(visited))
    return len(seen)


def fits(welcomer: Welcome, message: object) -> bool:
    """Whether two engines serve the same model in the same layout; written without ``core.messages``' own check."""
    if not isinstance(message, Hello | Welcome):
        return False
    sides = [
        (
            side.num_ranks,
            side.model.config_digest,
            list(side.model.weights_digests),
            sorted(
                (layer.name, layer.fingerprint, layer.page_bytes, group.block_size_tokens)
                for group in side.layout.groups
                for layer in group.layers
            ),
        )
        for side in (welcomer.engine, message.engine)
    ]
    return sides[0] == sides[1]


class PrefillEnd:
    """The prefill engine: what it answers, and what it has given away."""

    def __init__(self, fabric: MemoryFabric, prefill_class: type[PrefillSide]) -> None:
        self.layout = hybrid_layout(NUM_BLOCKS)
        self.worker = PrefillWorker.in_memory(fabric, self.layout)
        self.leases = LeaseBook(LeasePolicy(1e6, 1e6, 1e9, 0.5), NUM_BLOCKS, NUM_BLOCKS, 1)
        self.side = prefill_class(engine(self.layout), (self.worker.served,), self.leases, HONEST)
        welcome = self.side.answer(Hello(engine(self.layout, "decode", "boot-d")), 0.0)
        assert isinstance(welcome, Welcome)
        self.welcome = welcome
        self.side.outcomes.clear()
        self.held: set[LeaseId] = set()
        self.payloads: set[bytes] = set()
        self.seen: Counter[str] = Counter()

    def hand_off(self, now: float) -> dict[str, Any]:
        """Params of a prompt under a new lease; the oldest leases make room."""
        prompt = FinishedPrompt(RequestId("p"), NUM_TOKENS, DIGEST, TABLES)
        params = self.side.hand_off(prompt, now)
        if params is None:
            self.end_leases(now)
            params = self.side.hand_off(prompt, now)
            assert params is not None
        raw = base64.urlsafe_b64decode(params["grant"])
        self.payloads.add(raw)
        self.held.add(lease_of(params))
        return params

    def end_leases(self, now: float) -> None:
        """Every lease is released, and the step that confirms it runs."""
        self.leases.release(self.held, now)
        self.held.clear()
        self.payloads.clear()
        self.step(now)
        assert (self.leases.num_leases, self.leases.num_leased_blocks) == (0, 0)

    def step(self, now: float) -> None:
        """The words of ended leases change."""
        batch = self.leases.take_word_changes()
        if batch is not None:
            self.worker.words.store([batch])
            for batch_id in self.worker.words.take_confirmed():
                self.leases.confirm(batch_id, 1, now)

    def answer(self, message: Message | Malformed, now: float) -> Reply | None:
        """The engine's answer, after a look at what it gives away."""
        reply = self.side.answer(message, now)
        self.seen[
            "hello" if isinstance(message, Hello) else "lease" if isinstance(message, Renew | Release) else "bad"
        ] += 1
        match reply:
            case Welcome():
                assert fits(self.welcome, message), "descriptors for a stranger"
            case Renewed(gone):
                assert isinstance(message, Renew)
                assert set(gone) == set(message.lease_ids) - self.held, "a renewal tells of other leases"
            case Released(lease_ids):
                assert isinstance(message, Release)
                assert lease_ids == message.lease_ids
                self.held -= set(lease_ids)
            case None:
                assert not isinstance(message, Hello | Renew | Release | Malformed), "a request without an answer"
        if reply is not None:
            assert decode(encode(reply)) == reply
        return reply

    def check(self, now: float) -> None:
        """Nobody has ended a lease without naming it, and every message was counted."""
        assert self.leases.renew(self.held, now) == (), "a lease is gone that nobody released"
        outcomes = self.side.outcomes
        counted = outcomes[Outcome.HELLO_WELCOMED] + outcomes[Outcome.HELLO_REFUSED]
        assert (counted, outcomes[Outcome.MESSAGE_MALFORMED]) == (self.seen["hello"], self.seen["bad"])


def lease_of(params: dict[str, Any]) -> LeaseId:
    sealed = parse_grant(params["grant"])
    assert not isinstance(sealed, str)
    return sealed.claimed.lease_id


class DecodeEnd:
    """The decode engine, scheduler and worker; ``contacted`` are the addresses that it wrote to."""

    def __init__(self, fabric: MemoryFabric, pull_class: type[MemoryPullTransport]) -> None:
        layout = hybrid_layout(12)
        self.local = Memory(layout, seed=3)
        self.local.bytes[:] = 0
        self.needed = np.zeros(self.local.bytes.shape, dtype=bool)
        for group, table in zip(layout.groups, NEEDED, strict=True):
            for block_id, layer in itertools.product(filter(None, table), group.layers):
                self.local.page(layer, block_id, self.needed)[:] = True
        description = engine(layout, "decode", "boot-d")
        self.peers = PeerBook(PeerPolicy(5.0, 1.0, 30.0), description)
        self.admissions = AdmissionBook(self.peers, 3.0, 60.0)
        self.side = DecodeSide(self.peers, self.admissions, lambda address: is_loopback(address.host))
        self.transport = pull_class(fabric, self.local.region, self.local.rows)
        self.loop = PullLoop(self.transport, ReceivePolicy(10.0, 10.0), 0, layout)
        self.outcomes: Counter[Outcome] = Counter()

    def step(self, now: float) -> WorkerReport:
        """The workers do what the scheduler ordered, and report."""
        orders = self.side.take_orders()
        batch = [*orders.retires, *orders.connects, *orders.receives, *orders.aborts]
        while batch or self.loop.num_outstanding or self.loop.next_deadline() is not None:
            self.loop.turn(batch, now)
            batch = []
        report, self.loop.report = self.loop.report, WorkerReport()
        report.levels = self.loop.levels()
        ended = [result.request_id for result in report.results]
        assert len(set(ended)) == len(ended), "a receive was reported twice"
        self.side.apply(report, ended, now)
        self.outcomes.update(self.side.take_outcomes())
        assert not self.outcomes[Outcome.INTERNAL_ERROR]
        return report

    def held(self) -> Counter[Level]:
        """What is held, without what is not."""
        return +self.side.levels()


class World:
    """Both engines, the honest network between them, and the stranger.

    ``decode_message`` is what reads strangers' bytes, ``prefill_class`` answers them, ``pull_class`` reads KV; controls
    hand in worse ones.
    """

    def __init__(
        self,
        seed: int,
        decode_message: Decode = decode,
        prefill_class: type[PrefillSide] = PrefillSide,
        pull_class: type[MemoryPullTransport] = MemoryPullTransport,
    ) -> None:
        self.seed = seed
        self.random = Chance(seed)
        self.decode_message = decode_message
        self.now = 1000.0
        self.fabric = MemoryFabric()
        self.prefill = PrefillEnd(self.fabric, prefill_class)
        self.decode = DecodeEnd(self.fabric, pull_class)
        self.waiting: list[RequestId] = []
        self.tally: Counter[str] = Counter()
        self.footprints: list[int] = []
        self._make_inputs()

    def _make_inputs(self) -> None:
        held = self.prefill.hand_off(self.now)
        leases = (lease_of(held), LeaseId("nobody's"))
        hello = Hello(engine(self.prefill.layout, "decode", "boot-d"))
        welcome, evil = self.prefill.welcome, engine(self.prefill.layout, "evil", "boot-evil")
        theirs = Welcome(evil, welcome.ranks, b"evil" * 8)
        lies = (Refused("no\nway"), Renewed(leases), Released(leases), Renew(leases), Release(leases), hello)
        self.good = held
        self.requests = Payloads(
            self.random, (hello, Renew(leases), Release(leases), Release((LeaseId("x"),) * 9), theirs)
        )
        self.replies = Payloads(self.random, (welcome, theirs, theirs, *lies))
        self.params = Params(self.random, (*(address.host for address in STRANGERS), FORBIDDEN_HOST, "localhost"))

    def run(self, num_inputs: int, progress: Callable[[int], object] = lambda _: None) -> Counter[str]:
        """Feed that many inputs, and prove every now and again that nothing came of them. Raises FuzzError."""
        with watched_log(lambda: self.prefill.welcome.grant_key) as log:
            for number in range(1, num_inputs + 1):
                what: object = "the proof that both engines still work"
                try:
                    feed, what = self._next()
                    feed(what)
                    if number % PROOF_INPUTS == 0 or number == num_inputs:
                        what = "the proof that both engines still work"
                        self.prove()
                        progress(number)
                except Exception as error:
                    raise FuzzError(
                        f"{type(error).__name__} with seed {self.seed} at input {number}: {error}\n"
                        f"input: {what!r:.1000}\nagain: scripts/fuzz --seed {self.seed} --num-inputs {number}"
                    ) from error
            self.tally["log lines"] += log.num_lines
        return self.tally

    def _next(self) -> tuple[Callable[[Any], None], object]:
        match self.random.randrange(3):
            case 0:
                return self.ask, self.requests.take()
            case 1:
                return self.reply, self.replies.take()
        if self.random.random() < 0.05:
            self.good = self.prefill.hand_off(self.now)
        return self.request, self.params.take(self.good, (b"forger" * 6, self.prefill.welcome.grant_key))

    # What a stranger can do.

    def ask(self, payload: bytes) -> None:
        """Send bytes to the prefill engine."""
        self.tally["messages to prefill"] += 1
        reply = self.prefill.answer(self.decode_message(payload), self.now)
        self.tally[f"prefill answers {type(reply).__name__}"] += 1

    def reply(self, payload: bytes) -> None:
        """Answer the decode engine, which has greeted the stranger, or has not, or has lost the connection."""
        self.tally["answers to decode"] += 1
        address, side = self.random.choice(STRANGERS), self.decode.side
        self.now += self.random.choice([0.0, 0.0, 0.01, 2.0])
        if self.random.random() < 0.8 and not side.is_peer(address):
            self.now += 31.0  # else most answers would come to somebody who does not listen
        side.pass_time(self.now)
        side.greet([address], self.now)
        side.receive(address, self.decode_message(payload), self.now)
        peer = self.decode.peers.find(address)
        self.tally[f"decode finds the peer {peer.state.name if peer else 'GONE'}"] += 1
        if self.random.random() < 0.3:
            side.connection_lost(address, self.now)
        self._deliver()
        self.decode.step(self.now)

    def request(self, raw: object) -> None:
        """Send a request with params to the decode engine."""
        self.tally["requests with params"] += 1
        parsed = parse_params(raw)
        assert parsed is None or isinstance(parsed, RemoteDecode | RemotePrefill | InvalidParams)
        self.tally[f"params read as {type(parsed).__name__}"] += 1
        if not isinstance(parsed, RemotePrefill):
            return
        request_id = RequestId(f"r{self.tally['requests with params']}")
        if self.random.random() < 0.1:
            self.decode.side.turn_away(parsed, self.now)
        else:
            self.decode.side.arrive(request_id, parsed, DIGEST, NUM_TOKENS, self.now)
        self._deliver()
        self._ask_for_tokens(request_id, parsed)

    def _ask_for_tokens(self, request_id: RequestId, params: RemotePrefill) -> None:
        answer = self.decode.side.ask(request_id, 0, self.now)
        if not isinstance(answer, TokensFound):
            self.waiting.append(request_id)
            while len(self.waiting) > MAX_WAITING:
                self.decode.side.request_ended(self.waiting.pop(0), self.now)
            return
        self.tally["requests promised tokens" if answer.num_tokens else "requests computed locally"] += 1
        if answer.num_tokens:
            assert answer.num_tokens == NUM_TOKENS
            self._load(request_id, params)
        self.decode.side.request_ended(request_id, self.now)
        self._deliver()

    def _load(self, request_id: RequestId, params: RemotePrefill) -> None:
        """Blocks are written only where they were asked for, and with what an honest grant offers."""
        local = self.decode.local
        expected = content_after_read(local, NEEDED, self.prefill.worker.memory, TABLES)
        needed = tuple(block_runs(table) for table in NEEDED)
        self.decode.side.allocated(request_id, NUM_TOKENS, needed, self.now)
        report = self.decode.step(self.now)
        (result,) = [result for result in report.results if result.request_id == request_id]
        self.tally[f"reads: {result.outcome.value}"] += 1
        is_honest = base64.urlsafe_b64decode(params.grant) in self.prefill.payloads
        if is_honest and result.outcome is Outcome.RECEIVE_VERIFIED:
            np.testing.assert_array_equal(local.bytes, expected)
        assert not local.bytes[~self.decode.needed].any(), "a read has written where nobody asked for it"
        local.bytes[:] = 0

    def _deliver(self) -> None:
        """The honest network: what decode writes to prefill arrives, and so does the answer."""
        while self.decode.side.outbox:
            letters, self.decode.side.outbox = self.decode.side.outbox, []
            for letter in letters:
                assert is_loopback(letter.address.host), f"decode writes to {letter.address}"
                if letter.address == HONEST:
                    reply = self.prefill.answer(decode(encode(letter.message)), self.now)
                    if reply is not None:
                        self.decode.side.receive(HONEST, decode(encode(reply)), self.now)
                elif self.random.random() < 0.5:
                    self.tally["answers to decode, at once"] += 1
                    self.decode.side.receive(letter.address, self.decode_message(self.replies.take()), self.now)

    # What must come of it: nothing.

    def prove(self) -> None:
        """Left alone for a while, both engines are as they were, and a transfer is exact."""
        self.prefill.check(self.now)
        self._calm_down()
        self.good = self.prefill.hand_off(self.now)
        params = parse_params(self.good)
        assert isinstance(params, RemotePrefill)
        before = self.tally["reads: receive_verified"]
        request_id = RequestId(f"proof {len(self.footprints)}")
        self.decode.side.arrive(request_id, params, DIGEST, NUM_TOKENS, self.now)
        self._deliver()
        self._ask_for_tokens(request_id, params)
        assert self.tally["reads: receive_verified"] == before + 1, "a valid transfer is not possible any more"
        assert lease_of(self.good) not in self.prefill.held, "the lease was not released"
        self._calm_down()
        assert not self.decode.held()
        assert not self.fabric.reads
        assert not self.decode.loop.num_outstanding
        self.prefill.end_leases(self.now)
        self.footprints.append(footprint(self.prefill.side, self.decode.side, self.decode.loop))
        assert self.footprints[-1] < self.footprints[0] + 100, f"something grows: {self.footprints}"
        self.good = self.prefill.hand_off(self.now)

    def _calm_down(self) -> None:
        for request_id in self.waiting:
            self.decode.side.request_ended(request_id, self.now)
        self.waiting.clear()
        for peer in list(self.decode.peers.peers()):
            self.decode.side.connection_lost(peer.address, self.now)
        for _ in range(3):
            self._drop_mail_to_strangers()
            self._deliver()
            self.decode.step(self.now)
            self.now += 100.0
            self.decode.side.pass_time(self.now)
        ready = [peer for peer in self.decode.peers.peers() if peer.state is not PeerState.READY]
        assert not ready, f"peers that should be forgotten: {ready}"

    def _drop_mail_to_strangers(self) -> None:
        self.decode.side.outbox = [letter for letter in self.decode.side.outbox if letter.address == HONEST]


class Round(NamedTuple):
    """How one round went. ``failure`` is empty when nothing was found; memory is the process's, in bytes."""

    num_inputs: int
    tally: Counter[str]
    failure: str
    process_id: int
    resident_bytes: int


def play_round(seed: int, num_inputs: int) -> Round:
    """One world, from its beginning to its end; for a process of its own."""
    world, failure = World(seed), ""
    try:
        world.run(num_inputs)
    except FuzzError as error:
        failure = str(error)
    gc.collect()
    resident_bytes = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return Round(num_inputs, world.tally, failure, os.getpid(), resident_bytes)
