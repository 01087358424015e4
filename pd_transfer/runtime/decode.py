"""The decode half of a scheduler process: admits requests, keeps leases alive, and judges the workers' reports."""

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from pd_transfer.core.admissions import (
    AbortReceive,
    AdmissionAction,
    AdmissionBook,
    AskAgain,
    StartReceive,
    TokensFound,
)
from pd_transfer.core.layout import BlockRuns
from pd_transfer.core.messages import Malformed, Message, Refused, Renewed, one_line
from pd_transfer.core.outcomes import Level, Outcome, Outcomes, Quantity
from pd_transfer.core.params import Address, RemotePrefill, RequestId
from pd_transfer.core.peers import ConnectPeer, PeerBook, PeerState, RetirePeer, SendMessage
from pd_transfer.runtime.orders import ReceiveResult, StepOrders, WorkerReport

logger = logging.getLogger("pd_transfer.decode")

_ADVICE = {
    Outcome.RECEIVE_STALE: "the lease was over before the read ended; if this is frequent, raise lease_renewal_seconds",
    Outcome.RECEIVE_FAILED: "check that the prefill engine is alive and reachable",
    Outcome.RECEIVE_TIMED_OUT: "check the network and the prefill engine, or raise read_seconds",
    Outcome.RECEIVE_UNCOVERED: "please report it, with the logs of both engines",
    Outcome.PEER_UNREACHABLE: "check that prefill is alive, that its advertise_host is reachable, and that keys fit",
    Outcome.PEER_REFUSED: "both engines must serve the same model with the same KV cache settings",
    Outcome.PEER_NOT_ALLOWED: (
        "with key_file, name it in peers or allowed_peers; without, set 'insecure': true on both engines, if the "
        "network between them is private"
    ),
}


_QUIET = frozenset({Outcome.NOTHING_TO_READ, Outcome.WITHDRAWN, Outcome.RECEIVE_ABORTED})
"""Counted, but nobody's trouble: there was no need to read, or the client left."""


@dataclass(slots=True)
class Measured:
    """What verified reads have moved since the last collection."""

    quantities: Counter[Quantity] = field(default_factory=Counter)
    blocks_by_group: Counter[int] = field(default_factory=Counter)


class DecodeSide:
    """Not locked: the owner calls it under the scheduler's lock. Messages to send collect in ``outbox``."""

    def __init__(self, peers: PeerBook, admissions: AdmissionBook, is_allowed: Callable[[Address], bool]) -> None:
        self._peers = peers
        self._admissions = admissions
        self._is_allowed = is_allowed
        self._orders = StepOrders()
        self._results: dict[RequestId, list[ReceiveResult]] = {}
        self._worker_levels: Counter[Level] = Counter()
        self.outbox: list[SendMessage] = []
        self.outcomes: Outcomes = Counter()
        self.measured = Measured()

    def greet(self, addresses: Iterable[Address], now: float) -> None:
        """Begin handshakes before a request needs them."""
        for address in addresses:
            self._do(self._peers.greet(address, now))

    def arrive(self, request_id: RequestId, params: RemotePrefill, digest: bytes, num_tokens: int, now: float) -> None:
        """A request wants its KV from a prefill engine."""
        if not self._is_allowed(params.address):
            self.outcomes[Outcome.PEER_NOT_ALLOWED] += 1
            self._log(request_id, Outcome.PEER_NOT_ALLOWED, f"{params.address} is not an allowed peer")
            return
        self._do(self._admissions.arrive(request_id, params, digest, num_tokens, now))

    def turn_away(self, params: RemotePrefill, now: float) -> None:
        """The serving layer rejected a request before it ran."""
        if self._is_allowed(params.address):
            self._do(self._admissions.turn_away(params, now))

    def ask(self, request_id: RequestId, num_local_tokens: int, now: float) -> AskAgain | TokensFound:
        """How many tokens will be loaded beyond the local ones."""
        answer, actions = self._admissions.ask(request_id, num_local_tokens, now)
        self._do(actions)
        return answer

    def num_local_tokens(self, request_id: RequestId) -> int:
        """What vLLM had of a request's prompt itself when it last asked."""
        return self._admissions.num_local_tokens(request_id)

    def allocated(
        self, request_id: RequestId, num_external_tokens: int, needed: tuple[BlockRuns, ...], now: float
    ) -> None:
        """vLLM has allocated the blocks that the tokens will be loaded into."""
        self._do(self._admissions.allocated(request_id, num_external_tokens, needed, now))

    def fail_load(self, request_id: RequestId, num_tokens: int, now: float) -> None:
        """A bug of ours: vLLM waits for a load that cannot be ordered. The workers report it as failed."""
        self._do(self._admissions.allocated(request_id, num_tokens, (), now))

    def request_ended(self, request_id: RequestId, now: float) -> None:
        """vLLM has finished or aborted a request."""
        self._do(self._admissions.request_ended(request_id, now))

    def take_orders(self) -> StepOrders:
        """What the workers must do in the step that is being built."""
        orders, self._orders = self._orders, StepOrders()
        return orders

    def apply(self, report: WorkerReport, ended: Iterable[RequestId], now: float) -> None:
        """The workers' answer to a step, and the requests whose receive has now ended on every rank."""
        self._worker_levels = Counter(report.levels)
        self.outcomes.update(report.outcomes)
        for result in report.results:
            self._results.setdefault(result.request_id, []).append(result)
        for key in report.troubled_peers:
            self._do(self._peers.lose_key(key, now))
        for request_id in ended:
            if not self._admissions.is_loading(request_id):
                continue  # another connector's receive, under MultiConnector
            self._judge(request_id, self._results.pop(request_id, []))
            self._do(self._admissions.load_ended(request_id, now))

    def _judge(self, request_id: RequestId, results: list[ReceiveResult]) -> None:
        """One rank's loss is the request's; it is counted once."""
        losses = [result for result in results if result.outcome is not Outcome.RECEIVE_VERIFIED]
        verdict = losses[0] if losses else ReceiveResult(request_id, Outcome.RECEIVE_VERIFIED, "")
        self.outcomes[verdict.outcome] += 1
        if losses:
            self._log(request_id, verdict.outcome, verdict.reason)
            return
        for result in results:
            self.measured.quantities.update(result.quantities)
            for group, num_blocks in enumerate(result.num_blocks_by_group):
                self.measured.blocks_by_group[group] += num_blocks
        if len(results) > 1:
            # Every rank moves its own bytes, but the tokens are the same ones.
            tokens = results[0].quantities[Quantity.TOKENS_VERIFIED]
            self.measured.quantities[Quantity.TOKENS_VERIFIED] -= tokens * (len(results) - 1)

    def receive(self, address: Address, message: Message | Malformed, now: float) -> None:
        """A peer's reply."""
        match message:
            case Renewed(gone):
                self._admissions.leases_gone(address, gone)
            case Malformed(reason):
                self.outcomes[Outcome.MESSAGE_MALFORMED] += 1
                self._do(self._peers.receive(address, Refused(reason), now))
            case _:
                self._do(self._peers.receive(address, message, now))

    def is_peer(self, address: Address) -> bool:
        """Whether an engine at an address is read from, or being greeted."""
        peer = self._peers.find(address)
        return peer is not None and peer.state in (PeerState.HANDSHAKING, PeerState.READY)

    def connection_lost(self, address: Address, now: float) -> None:
        """The side channel's connection to a peer broke."""
        self._do(self._peers.lose(address, now))

    def pass_time(self, now: float) -> None:
        """Give up what takes too long; renew what is due."""
        self._do(self._peers.pass_time(now))
        self._do(self._admissions.pass_time(now))

    def _do(self, actions: Iterable[AdmissionAction]) -> None:
        for action in actions:
            match action:
                case SendMessage():
                    self.outbox.append(action)
                case ConnectPeer():
                    self._orders.connects.append(action)
                case RetirePeer():
                    self._retire(action)
                case StartReceive():
                    self._orders.receives.append(action)
                case AbortReceive():
                    self._orders.aborts.append(action)
        for declined in self._admissions.declined:
            self._log(declined.request_id, declined.outcome, declined.reason)
        self._admissions.declined.clear()

    def _retire(self, action: RetirePeer) -> None:
        unsent = [connect for connect in self._orders.connects if connect.key == action.key]
        if unsent:
            # No worker has heard of it. Connecting to an engine that is gone would only cost time.
            self._orders.connects.remove(unsent[0])
        else:
            self._orders.retires.append(action)

    def _log(self, request_id: RequestId, outcome: Outcome, reason: str) -> None:
        if outcome in _QUIET:
            return
        advice = _ADVICE.get(outcome, "the prompt is computed here instead")
        logger.warning("%s: %s: %s; %s", request_id, outcome.value, one_line(reason), advice)

    def next_deadline(self) -> float | None:
        """When ``pass_time`` next has something to do."""
        deadlines = (self._peers.next_deadline(), self._admissions.next_deadline())
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def take_outcomes(self) -> Outcomes:
        """Outcomes since the last call."""
        total: Outcomes = self.outcomes + self._admissions.outcomes + self._peers.outcomes
        for counter in (self.outcomes, self._admissions.outcomes, self._peers.outcomes):
            counter.clear()
        return total

    def levels(self) -> Counter[Level]:
        """What is held at this moment, on every rank."""
        levels = Counter(self._worker_levels)
        levels[Level.ADMISSIONS] = self._admissions.num_admissions
        levels[Level.BORROWED_LEASES] = self._admissions.num_borrowed_leases
        return levels
