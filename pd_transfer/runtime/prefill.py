"""The prefill half of a scheduler process: opens leases, seals grants, and answers what peers ask."""

import logging
import secrets
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pd_transfer.core.layout import block_runs
from pd_transfer.core.leases import LeaseBook
from pd_transfer.core.messages import (
    EngineDescription,
    Hello,
    Malformed,
    Message,
    Refused,
    Release,
    Released,
    Renew,
    Renewed,
    Reply,
    ServedRank,
    Welcome,
    incompatibility,
    printable,
)
from pd_transfer.core.outcomes import Level, Outcome, Outcomes
from pd_transfer.core.params import Address, Grant, LeaseId, OfferedKv, RequestId, hand_off_params, seal_grant

logger = logging.getLogger("pd_transfer.prefill")


@dataclass(frozen=True, slots=True)
class FinishedPrompt:
    """A prompt whose KV is in the pool: ``tables[i]`` is the i-th group's block table, 0 where nothing is kept."""

    request_id: RequestId
    num_tokens: int
    digest: bytes
    tables: Sequence[Sequence[int]]

    def block_ids(self) -> tuple[int, ...]:
        """The blocks that a lease keeps, each once."""
        return tuple(dict.fromkeys(block_id for table in self.tables for block_id in table if block_id))


class PrefillSide:
    """Not locked: the owner calls it under the scheduler's lock."""

    def __init__(
        self, engine: EngineDescription, ranks: tuple[ServedRank, ...], leases: LeaseBook, address: Address
    ) -> None:
        self._engine = engine
        self._leases = leases
        self._address = address
        self._grant_key = secrets.token_bytes(32)
        self._welcome = Welcome(engine, ranks, self._grant_key)
        self._layout_digest = engine.layout.digest()
        self.outcomes: Outcomes = Counter()

    def hand_off(self, prompt: FinishedPrompt, now: float) -> dict[str, Any] | None:
        """Params for the router; None beyond the limits.

        The caller holds a reference on each of the prompt's blocks. With params it becomes the lease's.
        """
        groups = tuple(block_runs(table) for table in prompt.tables)
        lease = self._leases.open(LeaseId(secrets.token_hex(16)), prompt.block_ids(), now)
        if lease is None:
            return None
        grant = Grant(
            engine_boot=self._engine.engine_boot,
            lease_id=lease.lease_id,
            slot=lease.slot,
            generation=lease.generation,
            num_tokens=prompt.num_tokens,
            prompt_digest=prompt.digest,
            layout_digest=self._layout_digest,
            groups=groups,
        )
        return hand_off_params(
            self._engine.engine_id,
            prompt.request_id,
            self._address,
            self._engine.num_ranks,
            OfferedKv(prompt.num_tokens, self._num_bytes(prompt)),
            seal_grant(grant, self._grant_key),
        )

    def _num_bytes(self, prompt: FinishedPrompt) -> int:
        pairs = zip(self._engine.layout.groups, prompt.tables, strict=True)
        one_rank = sum(group.block_bytes * sum(map(bool, table)) for group, table in pairs)
        return one_rank * self._engine.num_ranks

    def answer(self, message: Message | Malformed, now: float) -> Reply | None:
        """The reply to whatever a peer sent; None for what deserves none."""
        match message:
            case Hello(engine):
                return self._greet(engine)
            case Renew(lease_ids):
                return Renewed(self._leases.renew(lease_ids, now))
            case Release(lease_ids):
                self._leases.release(lease_ids, now)
                return Released(lease_ids)
            case Malformed(reason):
                self.outcomes[Outcome.MESSAGE_MALFORMED] += 1
                return Refused(reason)
            case _:
                self.outcomes[Outcome.MESSAGE_MALFORMED] += 1
                return None

    def _greet(self, engine: EngineDescription) -> Reply:
        reason = incompatibility(self._engine, engine)
        if reason is None:
            self.outcomes[Outcome.HELLO_WELCOMED] += 1
            return self._welcome
        logger.warning("decode engine %s is refused: %s", printable(engine.engine_id), printable(reason))
        self.outcomes[Outcome.HELLO_REFUSED] += 1
        return Refused(reason)

    @property
    def leases(self) -> LeaseBook:
        """The leases of this engine."""
        return self._leases

    def levels(self) -> Counter[Level]:
        """What is held at this moment."""
        return Counter({Level.LEASES: self._leases.num_leases, Level.LEASED_BLOCKS: self._leases.num_leased_blocks})
