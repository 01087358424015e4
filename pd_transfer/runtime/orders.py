"""What the scheduler half tells the worker half with every step, and what the workers answer. Both are picklable."""

from collections import Counter
from dataclasses import dataclass, field

from pd_transfer.core.admissions import AbortReceive, StartReceive
from pd_transfer.core.layout import EngineLayout, RemoteMemory
from pd_transfer.core.leases import WordBatch
from pd_transfer.core.outcomes import Level, Outcome, Quantity
from pd_transfer.core.params import PeerKey, RequestId
from pd_transfer.core.peers import ConnectPeer, RetirePeer


@dataclass(frozen=True, slots=True)
class WorkerDescription:
    """What one worker tells its scheduler at start-up. ``memory`` is None when it serves nothing (decode only)."""

    layout: EngineLayout
    weights_digest: str
    memory: RemoteMemory | None
    boot_word: int


@dataclass(slots=True)
class StepOrders:
    """Orders of one step, to be carried out in the order of the fields.

    Retired peers go first, because the same engine may be connected under a new key in the same step. In a step that
    ``is_idle`` nothing is computed.
    """

    words: list[WordBatch] = field(default_factory=list)
    retires: list[RetirePeer] = field(default_factory=list)
    connects: list[ConnectPeer] = field(default_factory=list)
    receives: list[StartReceive] = field(default_factory=list)
    aborts: list[AbortReceive] = field(default_factory=list)
    is_idle: bool = False


@dataclass(frozen=True, slots=True)
class ReceiveResult:
    """How a request's receive ended on one rank. ``quantities`` counts this rank alone."""

    request_id: RequestId
    outcome: Outcome
    reason: str
    num_blocks_by_group: tuple[int, ...] = ()
    quantities: Counter[Quantity] = field(default_factory=Counter)


@dataclass(slots=True)
class WorkerReport:
    """What the workers answer to one step; reports of several ranks add up.

    ``confirmed`` maps a word batch to the number of ranks that have stored it.
    """

    confirmed: Counter[int] = field(default_factory=Counter)
    results: list[ReceiveResult] = field(default_factory=list)
    troubled_peers: set[PeerKey] = field(default_factory=set)
    levels: Counter[Level] = field(default_factory=Counter)
    outcomes: Counter[Outcome] = field(default_factory=Counter)

    def add(self, other: "WorkerReport") -> None:
        """Add another rank's report of the same step."""
        self.confirmed.update(other.confirmed)
        self.results.extend(other.results)
        self.troubled_peers |= other.troubled_peers
        self.levels.update(other.levels)
        self.outcomes.update(other.outcomes)
