"""Prefill that reuses its blocks all the time, and decode that reads them meanwhile: real NIXL between two processes.

The prefill process hands out a prompt's blocks, takes them back without asking, and writes the next prompt over them,
in the product's order: lease words stored, batch confirmed, blocks free, blocks written. What decode read is then
compared with what the grant promised, whatever the lease word said.
"""

import multiprocessing
import random
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import NamedTuple

import numpy as np

from pd_transfer.core.lease_words import LeaseWords, word_value
from pd_transfer.core.leases import LeaseBook, LeasePolicy
from pd_transfer.core.messages import ServedRank
from pd_transfer.core.outcomes import Outcome
from pd_transfer.core.params import LeaseId
from pd_transfer.core.receives import ReceivePolicy
from pd_transfer.runtime.orders import WorkerReport
from pd_transfer.runtime.worker import PullLoop
from pd_transfer.transport.nixl import NixlPullTransport, NixlServeTransport
from tests.faults.pages import TOKENS_PER_BLOCK, Pages
from tests.runtime.builders import BOOT_WORD, DEADLINE_SECONDS, connect_order, grant, range_of, receive_order

NUM_LAYERS, PAGE_BYTES, PROMPT_BLOCKS = 4, 16 * 1024, 16
"""1 MiB a read."""
NUM_BLOCKS = 1 + PROMPT_BLOCKS + 4
"""So few that most of a prompt's blocks are its successor's, too."""
SLOT = 0
"""One lease at a time: always the same slot, with the next generation."""
PEER = "prefill#1"


@dataclass(frozen=True)
class Way:
    """How the bytes travel, and how long prefill holds a prompt at most: a few times what a read takes."""

    engine_config: str
    hold_seconds: float

    @property
    def backend_params(self) -> dict[str, str]:
        """What NIXL's UCX backend is told."""
        return {"engine_config": self.engine_config} if self.engine_config else {}


WAYS = {"cma": Way("", 0.004), "tcp": Way("TLS=tcp", 0.020)}


class Offer(NamedTuple):
    """A prompt that decode may read, while the word of ``SLOT`` has this generation."""

    prompt: int
    generation: int
    table: tuple[int, ...]


class Prefill:
    """The prefill process. ``offers`` carries Offers to decode; whatever comes back means the end."""

    def __init__(self, way: Way, offers: Connection) -> None:
        self._offers = offers
        self._hold_seconds = way.hold_seconds
        self._random = random.Random(5)
        self._pages = Pages(NUM_LAYERS, NUM_BLOCKS, NUM_BLOCKS, PAGE_BYTES)
        self._table = np.zeros(1, dtype=np.uint64)
        self._words = LeaseWords(self._table, BOOT_WORD, _full_barrier())
        self._transport = NixlServeTransport(
            "stale-serve", self._pages.region, range_of(self._table), backend_params=way.backend_params
        )
        self._leases = LeaseBook(LeasePolicy(10, 30, 120, max_pool_fraction=1.0), NUM_BLOCKS, num_slots=1, num_ranks=1)
        self._held: tuple[int, ...] = ()
        self._num_prompts = 0

    def run(self) -> None:
        """Hand out prompt after prompt."""
        self._offers.send((self._pages.layout, ServedRank(self._transport.remote_memory, BOOT_WORD)))
        while not self._offers.poll(self._random.uniform(0, self._hold_seconds)):
            self.next_prompt()
        self._transport.close()

    def next_prompt(self) -> None:
        """The blocks are free when the word's change is confirmed, and are written after that."""
        self.retire()
        self.hand_off(self.compute())

    def retire(self) -> None:
        """A step that carries the word's change, and its output, which frees the blocks."""
        self._leases.reset(0.0)
        batch = self._leases.take_word_changes()
        self._words.store([batch] if batch else [])
        freed = [b for batch_id in self._words.take_confirmed() for b in self._leases.confirm(batch_id, 1, 0.0)]
        assert tuple(freed) == self._held

    def compute(self) -> tuple[int, ...]:
        """Write the next prompt into blocks of the whole pool; its table."""
        self._num_prompts += 1
        table = tuple(self._random.sample(range(1, NUM_BLOCKS), PROMPT_BLOCKS))
        self._pages.write(self._num_prompts, table)
        return table

    def hand_off(self, table: tuple[int, ...]) -> None:
        """Open a lease and offer the prompt that was computed last."""
        lease = self._leases.open(LeaseId(str(self._num_prompts)), table, 0.0)
        assert lease is not None
        assert lease.slot == SLOT
        self._held = table
        self._offers.send(Offer(self._num_prompts, lease.generation, table))


class CarelessPrefill(Prefill):
    """Writes the next prompt a moment before the word changes: the bug that no reader can see."""

    def next_prompt(self) -> None:
        """See the class."""
        table = self.compute()
        time.sleep(self._hold_seconds / 2)
        self.retire()
        self.hand_off(table)


def _full_barrier():
    lock = threading.Lock()

    def fence() -> None:
        with lock:
            pass

    return fence


def _serve(prefill_class: type[Prefill], way: Way, offers: Connection) -> None:
    prefill_class(way, offers).run()


class Reader:
    """The decode side: a pull loop over real NIXL, in this thread."""

    transport_class: type[NixlPullTransport] = NixlPullTransport

    def __init__(self, way: Way, offers: Connection) -> None:
        self._offers = offers
        layout, served = offers.recv()
        self._remote_layout = layout
        self._pages = Pages(NUM_LAYERS, PROMPT_BLOCKS + 1, NUM_BLOCKS, PAGE_BYTES)
        self._needed = tuple(range(1, PROMPT_BLOCKS + 1))
        self.transport = self.transport_class(
            "stale-pull", self._pages.region, self._pages.rows, backend_params=way.backend_params
        )
        self._loop = PullLoop(self.transport, ReceivePolicy(30, 30), 0, self._pages.layout)
        report = self._turns(connect_order(PEER, layout, [served]))
        assert not report.troubled_peers

    def latest(self) -> Offer:
        """What prefill offered last."""
        assert self._offers.poll(DEADLINE_SECONDS)
        offer = self._offers.recv()
        while self._offers.poll():
            offer = self._offers.recv()
        return Offer(*offer)

    def read(self, offer: Offer) -> Outcome:
        """Read an offer; what the pull loop says of it."""
        self._pages.words[:] = 0
        terms = grant(
            self._remote_layout,
            [offer.table],
            SLOT,
            offer.generation,
            num_tokens=PROMPT_BLOCKS * TOKENS_PER_BLOCK,
        )
        (result,) = self._turns(receive_order(f"r{offer.prompt}", PEER, terms, [self._needed])).results
        return result.outcome

    def share_of(self, offer: Offer) -> float:
        """How much of what was read is what was offered."""
        return self._pages.share_of(offer.prompt, offer.table, self._needed)

    def _turns(self, order: object) -> WorkerReport:
        deadline = time.monotonic() + DEADLINE_SECONDS
        self._loop.turn([order], time.monotonic())
        while self._loop.num_outstanding:
            assert time.monotonic() < deadline
            self._loop.turn([], time.monotonic())
        report, self._loop.report = self._loop.report, WorkerReport()
        return report


class _Unchecked(NixlPullTransport):
    granted_word = 0

    def take_word(self, transfer):
        super().take_word(transfer)
        return self.granted_word


class UncheckedReader(Reader):
    """Takes every lease word for the granted one."""

    transport_class = _Unchecked

    def read(self, offer: Offer) -> Outcome:
        """See ``Reader``."""
        self.transport.granted_word = word_value(BOOT_WORD, offer.generation)
        return super().read(offer)


class _WordFirst(NixlPullTransport):
    early_word = 0

    def submit_read(self, key, local, remote):
        word = self.submit_word_read(key, SLOT)
        while not self.poll(word):
            pass
        self.early_word = super().take_word(word)
        return super().submit_read(key, local, remote)

    def take_word(self, transfer):
        super().take_word(transfer)
        return self.early_word


class HastyReader(Reader):
    """Judges by the word as it was before the KV was read, not after."""

    transport_class = _WordFirst


@dataclass
class Tally:
    """What became of the reads. ``wrong``: not every byte is the offer's. ``torn``: of those, some are."""

    num_good: int = 0
    num_good_wrong: int = 0
    num_good_torn: int = 0
    num_stale: int = 0
    num_stale_wrong: int = 0
    num_stale_torn: int = 0

    @property
    def num_reads(self) -> int:
        """All of them."""
        return self.num_good + self.num_stale

    def count(self, outcome: Outcome, share: float) -> None:
        """One read, of which ``share`` is right."""
        assert outcome in (Outcome.RECEIVE_VERIFIED, Outcome.RECEIVE_STALE)
        is_wrong, is_torn = share < 1.0, 0.0 < share < 1.0
        if outcome is Outcome.RECEIVE_VERIFIED:
            self.num_good += 1
            self.num_good_wrong += is_wrong
            self.num_good_torn += is_torn
        else:
            self.num_stale += 1
            self.num_stale_wrong += is_wrong
            self.num_stale_torn += is_torn


@contextmanager
def _process(prefill_class: type[Prefill], way: Way):
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(prefill_class, way, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        process.kill()
        process.join()
        ours.close()


def read_while_reused(
    way: Way,
    is_enough: Callable[[Tally], bool],
    reader_class: type[Reader] = Reader,
    prefill_class: type[Prefill] = Prefill,
) -> Tally:
    """Read what is on offer again and again, at random moments of its short life, until it is enough."""
    tally, pace = Tally(), random.Random(7)
    with _process(prefill_class, way) as offers:
        reader = reader_class(way, offers)
        try:
            while not is_enough(tally):
                offer = reader.latest()
                time.sleep(pace.uniform(0, way.hold_seconds / 4))
                outcome = reader.read(offer)
                tally.count(outcome, reader.share_of(offer))
        finally:
            reader.transport.close()
    return tally
