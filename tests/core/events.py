"""What can happen to the two engines of ``tests.core.system``, how often, and histories of it that a seed names.

The same events are played by hypothesis, which makes a failing story short, and by ``play``, which plays many.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from pd_transfer.core.receives import AbortRequested, ReceiveBook, TransferFailed, WordArrived
from tests.core.system import NUM_RANKS, System

AT = range(8)
"""Picks one of what there is."""
RANKS = tuple(range(NUM_RANKS))


@dataclass(frozen=True)
class Event:
    """One thing that can happen, with the choices for its arguments; ``weight`` times as often as others."""

    happen: Callable[..., Any]
    choices: dict[str, Sequence[Any]] = field(default_factory=dict)
    weight: int = 1

    def play(self, system: System, random: Random) -> None:
        """With arguments picked at random."""
        self.happen(system, **{name: random.choice(values) for name, values in self.choices.items()})


# Everything gets on, in any order.


def letters_travel(system: System, count: int, at: int, fate: str) -> None:
    """In any order, and not always once."""
    for _ in range(count):
        for letters, deliver in (
            (system.to_prefill, system.deliver_to_prefill),
            (system.to_decode, system.deliver_to_decode),
        ):
            if letters and fate == "is lost":
                del letters[at % len(letters)]
            elif letters:
                deliver(at % len(letters), keep=fate == "arrives twice")


def worker_gets_on(system: System, rank: int, num_orders: int, num_copies: int, count: int) -> None:
    worker = system.workers[rank]
    for _ in range(min(num_orders, len(worker.orders))):
        worker.carry_out()
    for request_id in list(worker.transfers) * count:
        if request_id in worker.transfers:
            worker.progress(request_id, num_copies)


def decode_steps(system: System, num_local_blocks: int, has_room: bool) -> None:
    system.decode_step()
    for request_id in system.waiting():
        system.ask(request_id, num_local_blocks, has_room)


def prefill_steps(system: System, ranks: tuple[int, ...]) -> None:
    system.prefill.step(system.now)
    for rank in ranks:
        if system.prefill.unstored[rank]:
            system.meet_all("a word changes")
        system.prefill.store(rank, system.now)


def stuck_transfer_gets_on(system: System, at: int) -> None:
    """As a stopped process does that continues; mostly not yet."""
    stuck = [transfer for worker in system.workers for transfer in worker.transfers.values() if transfer.is_stuck]
    if at < len(stuck):
        system.met["gets on", stuck[at].moment] += 1
        stuck[at].is_stuck = False


# Trouble.


def wrong_grant_comes(system: System, at: int, prompt: int | None, forger: bytes | None) -> None:
    """A used or an old one, another prompt's, or a forged one."""
    if system.grants:
        system.arrive(-1 - at % len(system.grants), prompt, forger)


def request_is_aborted(system: System, at: int) -> None:
    if under_way := [request_id for request_id, request in system.requests.items() if request.is_under_way]:
        system.abort(under_way[at % len(under_way)])


def request_is_preempted(system: System, at: int) -> None:
    """One that runs, whether or not its KV was loaded."""
    if running := [request_id for request_id, request in system.requests.items() if not request.is_under_way]:
        system.preempt(running[-1 - at % len(running)])


def transfer_is_in_trouble(system: System, at: int, is_stuck: bool) -> None:
    """It fails on one rank, or does not get on until further notice."""
    transfers = [(worker, request_id) for worker in system.workers for request_id in worker.transfers]
    if not transfers:
        return
    worker, request_id = transfers[at % len(transfers)]
    transfer = worker.transfers[request_id]
    system.met["is stuck" if is_stuck else "fails", transfer.moment] += 1
    if is_stuck:
        transfer.is_stuck = True
    else:
        worker.fail(request_id)


def junk_arrives(system: System, payload: bytes) -> None:
    system.to_prefill.append(payload)
    system.to_decode.append(payload)


def cache_is_reset(system: System) -> None:
    system.prefill.leases.reset(system.now)


JUNK = (b"", b"\0", b"\1", b"\1\x90", b"\1\x81\xa4type\xa5Hello", b"\2" * 20, bytes(range(20)))
PROGRESS = (
    Event(letters_travel, {"count": range(1, 9), "at": AT, "fate": ["arrives"]}),
    Event(decode_steps, {"num_local_blocks": [0, 0, 1, 2, 3], "has_room": [True, True, False]}),
    Event(worker_gets_on, {"rank": RANKS, "num_orders": range(1, 10), "num_copies": range(1, 6), "count": range(5)}),
    Event(prefill_steps, {"ranks": [RANKS, RANKS, (0,), (1,), ()]}),
    Event(System.pass_time, {"seconds": [0.1, 0.5, 1, 3, 11]}),
    Event(stuck_transfer_gets_on, {"at": AT}),
)
TROUBLE = (
    Event(letters_travel, {"count": range(1, 9), "at": AT, "fate": ["arrives twice", "is lost"]}, weight=2),
    Event(wrong_grant_comes, {"at": range(3), "prompt": [None, 1, 2, 3], "forger": [None, b"forger"]}, weight=2),
    Event(request_is_aborted, {"at": AT}, weight=2),
    Event(request_is_preempted, {"at": AT}),
    Event(transfer_is_in_trouble, {"at": AT, "is_stuck": [True, False]}, weight=4),
    Event(junk_arrives, {"payload": JUNK}),
    Event(cache_is_reset),
    Event(System.lose_connection, {"keeps_letters": [True, False]}, weight=2),
    Event(System.shut_down_prefill),
    Event(System.restart_prefill, weight=2),
    Event(System.restart_decode, weight=2),
)


# Histories.


@dataclass
class Totals:
    """What some histories came to. ``judged`` counts receives by outcome, one for each rank; ``num_lost`` are the
    requests that were under way when decode died.
    """

    num_histories: int = 0
    num_steps: int = 0
    num_requests: int = 0
    num_lost: int = 0
    judged: Counter[str] = field(default_factory=Counter)
    declined: Counter[str] = field(default_factory=Counter)
    met: Counter[tuple[str, str]] = field(default_factory=Counter)

    def add(self, other: "Totals") -> None:
        """Add what other histories came to."""
        self.num_histories += other.num_histories
        self.num_steps += other.num_steps
        self.num_requests += other.num_requests
        self.num_lost += other.num_lost
        self.judged.update(other.judged)
        self.declined.update(other.declined)
        self.met.update(other.met)


class HistoryError(AssertionError):
    """Something that must never happen did. The message names the seed."""


def play(seed: int, make_book: Callable[..., ReceiveBook] = ReceiveBook, num_chapters: int = 25) -> Totals:
    """One history, to its end; every invariant is checked on the way. Raises HistoryError."""
    system, random, totals = System(make_book), Random(seed), Totals(num_histories=1)
    try:
        for _ in range(num_chapters):
            request_comes(system, random.randint(1, 3), random.choice([0, 1, 1, 2]), random.random() < 0.2)
            for _ in range(random.randint(5, 20)):
                random.choice(PROGRESS).play(system, random)
                system.check()
                totals.num_steps += 1
            if random.random() < 0.5:
                random.choices(TROUBLE, [event.weight for event in TROUBLE])[0].play(system, random)
                system.check()
                totals.num_steps += 1
        system.finish()
    except Exception as error:
        raise HistoryError(f"seed {seed}, step {totals.num_steps}: {type(error).__name__}: {error}") from error
    totals.num_requests = len(system.requests)
    totals.num_lost = sum(request.is_lost for request in system.requests.values())
    totals.judged.update({outcome.value: count for outcome, count in system.outcomes.items()})
    for outcomes in (system.declined, system.admissions.outcomes):
        totals.declined.update({outcome.value: count for outcome, count in outcomes.items()})
    totals.met.update(system.met)
    return totals


def request_comes(system: System, prompt: int, num_samples: int, is_mixed_up: bool) -> None:
    """Prefill computes a prompt, and decode hears of it, or never does, or with the params of another request."""
    system.hand_off(prompt)
    for _ in range(num_samples if system.grants else 0):
        system.arrive(-1, prompt=prompt % 3 + 1 if is_mixed_up else None)


# Controls: books that leave out what makes reads safe.


class TrustingBook(ReceiveBook):
    """Takes every word for the granted one."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.expected: dict[str, int] = {}

    def start(self, request, now, **options):
        self.expected[request.request_id] = request.expected_word
        return super().start(request, now, **options)

    def handle(self, event, now):
        if isinstance(event, WordArrived):
            event = WordArrived(event.request_id, self.expected[event.request_id])
        return super().handle(event, now)


class HastyBook(ReceiveBook):
    """Reports an aborted receive at once, without waiting for the end of its transfer."""

    def handle(self, event, now):
        if event.request_id not in self.request_ids:
            return []
        actions = super().handle(event, now)
        if isinstance(event, AbortRequested) and event.request_id in self.request_ids:
            actions += super().handle(TransferFailed(event.request_id, "nobody waited"), now)
        return actions
