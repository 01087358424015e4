"""What one decode rank knows of a peer, and what follows from it: what to read for an order, and how much that was."""

from collections import Counter
from dataclasses import dataclass

from pd_transfer.core.admissions import StartReceive
from pd_transfer.core.layout import DescriptorRow, EngineLayout, descriptor_rows
from pd_transfer.core.lease_words import word_value
from pd_transfer.core.messages import ServedRank, Welcome
from pd_transfer.core.outcomes import Quantity
from pd_transfer.core.plan import ReadPlan, num_merged, plan_read
from pd_transfer.core.receives import ReceiveRequest


@dataclass(frozen=True, slots=True)
class RemotePeer:
    """The peer's rank that this rank reads from."""

    layout: EngineLayout
    served: ServedRank
    rows: list[DescriptorRow]

    @classmethod
    def from_welcome(cls, welcome: Welcome, rank: int) -> "RemotePeer":
        """The peer's ``rank``-th worker."""
        layout, served = welcome.engine.layout, welcome.ranks[rank]
        return cls(layout, served, descriptor_rows(layout, served.memory.region.address))

    def request(self, order: StartReceive, local: EngineLayout) -> ReceiveRequest:
        """What to read for an order into a worker whose layout is ``local``, and the word that proves it."""
        grant = order.grant
        plan = plan_read(local, self.layout, order.needed, grant.groups)
        expected = word_value(self.served.boot_word, grant.generation)
        return ReceiveRequest(order.request_id, order.peer, plan, grant.slot, expected, order.num_tokens)

    def quantities(
        self, request: ReceiveRequest, plan: ReadPlan, seconds: float, local_rows: list[DescriptorRow]
    ) -> Counter[Quantity]:
        """What a verified read has moved."""
        return Counter(
            {
                Quantity.TOKENS_VERIFIED: request.num_tokens,
                Quantity.BYTES_VERIFIED: plan.num_bytes,
                Quantity.DESCRIPTORS: len(plan.local),
                Quantity.DESCRIPTORS_MERGED: num_merged(plan, local_rows, self.rows),
                Quantity.READ_MICROSECONDS: int(seconds * 1e6),
            }
        )
