"""What one decode rank knows of a peer, and what follows from it: what to read for an order, and how much that was."""

from collections import Counter
from dataclasses import dataclass

from pd_transfer.core.admissions import StartReceive
from pd_transfer.core.layout import DescriptorRow, EngineLayout, descriptor_rows
from pd_transfer.core.lease_words import word_value
from pd_transfer.core.messages import ServedRank, Welcome
from pd_transfer.core.outcomes import Quantity
from pd_transfer.core.plan import ReadPlan, ReadPlanner
from pd_transfer.core.receives import ReceiveRequest


@dataclass(frozen=True, slots=True)
class RemotePeer:
    """The peer's rank that this rank reads from."""

    served: ServedRank
    rows: list[DescriptorRow]
    planner: ReadPlanner

    @classmethod
    def from_welcome(cls, welcome: Welcome, rank: int, local: EngineLayout) -> "RemotePeer":
        """The peer's ``rank``-th worker, to be read into a worker whose layout is ``local``."""
        layout, served = welcome.engine.layout, welcome.ranks[rank]
        return cls(served, descriptor_rows(layout, served.memory.region.address), ReadPlanner(local, layout))

    def request(self, order: StartReceive) -> ReceiveRequest:
        """What to read for an order, and the word that proves it."""
        grant = order.grant
        plan = self.planner.plan(order.needed, grant.groups)
        expected = word_value(self.served.boot_word, grant.generation)
        return ReceiveRequest(order.request_id, order.peer, plan, grant.slot, expected, order.num_tokens)


def quantities(request: ReceiveRequest, plan: ReadPlan, seconds: float) -> Counter[Quantity]:
    """What a verified read has moved."""
    return Counter(
        {
            Quantity.TOKENS_VERIFIED: request.num_tokens,
            Quantity.BYTES_VERIFIED: plan.num_bytes,
            Quantity.DESCRIPTORS: len(plan.local),
            Quantity.DESCRIPTORS_MERGED: plan.num_merged,
            Quantity.READ_MICROSECONDS: int(seconds * 1e6),
        }
    )
