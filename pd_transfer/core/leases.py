"""Leases: prefill's promise to keep a request's blocks until a decode engine has read them. Lives in the scheduler.

A lease holds references on blocks and a slot of the lease word table. Its word already has the value that the grant
names when the lease opens. To end a lease its word is changed first: the change travels to every rank with the next
step and is confirmed with that step's output; only then do the references go and is the slot free again. So whoever
reads the granted value *after* the KV knows that the blocks were not reused before.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from pd_transfer.core.machine import Story, TransitionTable
from pd_transfer.core.outcomes import Outcome, Outcomes
from pd_transfer.core.params import LeaseId


class LeaseState(Enum):
    """HELD: may be read. RETIRING: its word is being changed. RETIRED: the blocks are free to go."""

    HELD = auto()
    RETIRING = auto()
    RETIRED = auto()


@dataclass(frozen=True, slots=True)
class LeaseReleased:
    """Decode needs it no longer."""


@dataclass(frozen=True, slots=True)
class LeaseExpired:
    """Nobody renewed it in time."""


@dataclass(frozen=True, slots=True)
class LeaseReset:
    """The engine drops its cache."""


@dataclass(frozen=True, slots=True)
class WordConfirmed:
    """Every rank has changed the lease's word."""


LeaseEnd = LeaseReleased | LeaseExpired | LeaseReset

LEASE_TABLE = TransitionTable(
    "lease",
    {
        (LeaseState.HELD, LeaseReleased): LeaseState.RETIRING,
        (LeaseState.HELD, LeaseExpired): LeaseState.RETIRING,
        (LeaseState.HELD, LeaseReset): LeaseState.RETIRING,
        (LeaseState.RETIRING, WordConfirmed): LeaseState.RETIRED,
    },
)

_OUTCOMES = {
    LeaseReleased: Outcome.LEASE_RELEASED,
    LeaseExpired: Outcome.LEASE_EXPIRED,
    LeaseReset: Outcome.LEASE_RESET,
}


class WordChange(NamedTuple):
    """Set the word of ``slot`` to ``generation``."""

    slot: int
    generation: int


class WordBatch(NamedTuple):
    """Word changes that travel with one step; every rank confirms ``batch_id`` once it has stored them."""

    batch_id: int
    changes: tuple[WordChange, ...]


@dataclass(frozen=True, slots=True)
class LeasePolicy:
    """Deadlines in seconds and the share of the pool that may be under lease at once."""

    unclaimed_seconds: float
    renewal_seconds: float
    max_seconds: float
    max_pool_fraction: float


@dataclass(slots=True)
class Lease:
    """One lease. ``generation`` is the value of its word while it is HELD."""

    lease_id: LeaseId
    block_ids: tuple[int, ...]
    slot: int
    generation: int
    opened_at: float
    deadline: float
    state: LeaseState = LeaseState.HELD
    story: Story = field(default_factory=lambda: Story("lease"))

    def advance(self, event: LeaseEnd | WordConfirmed, now: float) -> None:
        """Follow the table. Raises InvalidTransitionError, and then nothing has changed."""
        new = LEASE_TABLE.next_state(self.state, event, self.story)
        self.story.record(now, event, self.state, new)
        self.state = new


class LeaseBook:
    """All leases of one prefill engine. Methods answer with what to do; nothing here touches blocks or words."""

    def __init__(self, policy: LeasePolicy, num_blocks: int, num_slots: int, num_ranks: int) -> None:
        self._policy = policy
        self._max_leased_blocks = int(num_blocks * policy.max_pool_fraction)
        self._num_ranks = num_ranks
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self._generations = [0] * num_slots
        self._held: dict[LeaseId, Lease] = {}
        self._holds: Counter[int] = Counter()
        self._unsent: list[Lease] = []
        self._unconfirmed: dict[int, tuple[list[Lease], int]] = {}
        self._num_batches = 0
        self.outcomes: Outcomes = Counter()

    def open(self, lease_id: LeaseId, block_ids: Sequence[int], now: float) -> Lease | None:
        """Put blocks under lease; the caller takes a reference on each. None when the limits do not allow it."""
        distinct = tuple(dict.fromkeys(block_ids))
        num_new = sum(block_id not in self._holds for block_id in distinct)
        if not self._free_slots or len(self._holds) + num_new > self._max_leased_blocks:
            self.outcomes[Outcome.HAND_OFF_OVER_LIMIT] += 1
            return None
        slot = self._free_slots.pop()
        lease = Lease(lease_id, distinct, slot, self._generations[slot], now, now + self._policy.unclaimed_seconds)
        self._held[lease_id] = lease
        self._holds.update(distinct)
        self.outcomes[Outcome.LEASE_OPENED] += 1
        return lease

    def renew(self, lease_ids: Iterable[LeaseId], now: float) -> tuple[LeaseId, ...]:
        """Extend the deadlines of leases; the answer names those that are held no more."""
        gone = []
        for lease_id in lease_ids:
            lease = self._held.get(lease_id)
            if lease is None or lease.deadline <= now:
                gone.append(lease_id)
                continue
            cap = lease.opened_at + self._policy.max_seconds
            lease.deadline = max(lease.deadline, min(now + self._policy.renewal_seconds, cap))
        return tuple(gone)

    def release(self, lease_ids: Iterable[LeaseId], now: float) -> None:
        """End leases that decode needs no longer; unknown ids were over before."""
        for lease_id in lease_ids:
            if lease_id in self._held:
                self._end(lease_id, LeaseReleased(), now)

    def expire(self, now: float) -> None:
        """End every lease whose deadline has passed."""
        for lease_id in [lease.lease_id for lease in self._held.values() if lease.deadline <= now]:
            self._end(lease_id, LeaseExpired(), now)

    def reset(self, now: float) -> None:
        """End every lease, because the engine drops its cache or shuts down."""
        for lease_id in list(self._held):
            self._end(lease_id, LeaseReset(), now)

    def _end(self, lease_id: LeaseId, event: LeaseEnd, now: float) -> None:
        lease = self._held[lease_id]
        lease.advance(event, now)
        del self._held[lease_id]
        for block_id in lease.block_ids:
            self._holds[block_id] -= 1
            if not self._holds[block_id]:
                del self._holds[block_id]
        self._unsent.append(lease)
        self.outcomes[_OUTCOMES[type(event)]] += 1

    def take_word_changes(self) -> WordBatch | None:
        """The word changes that the step about to run must carry; each is handed out once."""
        if not self._unsent:
            return None
        leases, self._unsent = self._unsent, []
        self._num_batches += 1
        self._unconfirmed[self._num_batches] = (leases, self._num_ranks)
        return WordBatch(self._num_batches, tuple(WordChange(lease.slot, lease.generation + 1) for lease in leases))

    def confirm(self, batch_id: int, num_ranks: int, now: float) -> list[int]:
        """``num_ranks`` more ranks have stored a batch. The blocks to drop a reference of, once all of them have."""
        leases, num_missing = self._unconfirmed[batch_id]
        if num_missing > num_ranks:
            self._unconfirmed[batch_id] = (leases, num_missing - num_ranks)
            return []
        del self._unconfirmed[batch_id]
        dropped: list[int] = []
        for lease in leases:
            lease.advance(WordConfirmed(), now)
            self._generations[lease.slot] = lease.generation + 1
            self._free_slots.append(lease.slot)
            dropped.extend(lease.block_ids)
        return dropped

    @property
    def is_retiring(self) -> bool:
        """Whether blocks will come free with the steps that are under way."""
        return bool(self._unsent or self._unconfirmed)

    @property
    def num_leases(self) -> int:
        """Leases that still hold blocks."""
        return len(self._held) + len(self._unsent) + sum(len(leases) for leases, _ in self._unconfirmed.values())

    @property
    def num_leased_blocks(self) -> int:
        """Distinct blocks that may be read; those of leases that are ending are not counted."""
        return len(self._holds)

    def next_deadline(self) -> float | None:
        """When ``expire`` next has something to do; None when nothing is held."""
        return min((lease.deadline for lease in self._held.values()), default=None)
