"""A decode worker's pull side: one I/O thread owns the transport and the receives; vLLM's thread posts and drains."""

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from pd_transfer.core.admissions import AbortReceive, StartReceive
from pd_transfer.core.layout import EngineLayout
from pd_transfer.core.messages import one_line
from pd_transfer.core.outcomes import Level, Outcome
from pd_transfer.core.params import PeerKey, RequestId, Transfer
from pd_transfer.core.peers import ConnectPeer, RetirePeer
from pd_transfer.core.plan import ReadPlan, Uncovered
from pd_transfer.core.receives import (
    AbortRequested,
    ReadCompleted,
    RebuildAgent,
    ReceiveAction,
    ReceiveBook,
    ReceiveEvent,
    ReceivePolicy,
    ReceiveRequest,
    ReconnectPeer,
    ReportReceive,
    SubmitRead,
    SubmitWordRead,
    TransferFailed,
    WordArrived,
)
from pd_transfer.errors import TransportError
from pd_transfer.runtime.connections import Connections
from pd_transfer.runtime.orders import ReceiveResult, StepOrders, WorkerReport
from pd_transfer.runtime.remote import quantities
from pd_transfer.transport.base import PullTransport

logger = logging.getLogger("pd_transfer.worker")

POLL_SECONDS = 0.0001
"""Between polls while a read is young: below the cost of one engine step, above what would burn a core."""
SLOW_POLL_SECONDS = 0.001
FAST_POLL_COUNT = 50
IDLE_PATIENCE_SECONDS = 0.002
"""How long a step that computes nothing waits for a read to end. vLLM sleeps half as long after such a step, whatever
has ended meanwhile, and needs one more step to hear of it (docs/adr/0012)."""
_INTERNAL_ERROR = "an internal error, see the log above"


class Fence(Protocol):
    """A point on the accelerator's compute stream. Reads that were ordered behind it wait until it has passed."""

    def has_passed(self) -> bool:
        """Whether everything before the point is done. On a CPU, whose forward pass is synchronous, always."""


class NoFence:
    """The fence of a device whose work is done when the call returns."""

    def has_passed(self) -> bool:
        """Always."""
        return True


@dataclass(frozen=True, slots=True)
class Outstanding:
    """The one transfer that a receive is waiting for."""

    transfer: Transfer
    peer: PeerKey
    is_word: bool


Order = ConnectPeer | StartReceive | AbortReceive | RetirePeer


class PullLoop:
    """What the I/O thread does, one ``turn`` at a time; without a thread of its own, so that tests can drive it."""

    def __init__(
        self,
        transport: PullTransport,
        policy: ReceivePolicy,
        rank: int,
        layout: EngineLayout,
        after_read: Callable[[ReceiveRequest], None] = lambda _: None,
    ) -> None:
        """``after_read`` is called between the last byte and the lease word; tests damage blocks there."""
        self._transport = transport
        self._after_read = after_read
        self._book = ReceiveBook(policy)
        self._connections = Connections(transport, policy, rank, layout)
        self._outstanding: dict[RequestId, Outstanding] = {}
        self.report = WorkerReport()

    def turn(self, orders: Iterable[Order], now: float) -> None:
        """Carry out orders, then poll. Never raises: a request that is never reported hangs for ever."""
        for order in orders:
            try:
                self.carry_out(order, now)
            except Exception:
                logger.exception(
                    "internal error in %s: every receive fails and the agent is rebuilt", type(order).__name__
                )
                self.fail_everything(now)
                if isinstance(order, StartReceive):
                    self.refuse(order, _INTERNAL_ERROR)
        try:
            self.poll(now)
        except Exception:
            logger.exception("internal error in a poll: every receive fails and the agent is rebuilt")
            self.fail_everything(now)
        self.report.troubled_peers |= self._connections.take_blamed()

    def carry_out(self, order: Order, now: float) -> None:
        """Begin what an order asks for. Trouble with a peer ends in the report, never in an exception."""
        match order:
            case ConnectPeer():
                self._connections.connect(order, now)
            case StartReceive():
                waits = self._connections.is_broken(order.peer)
                self._act(self._book.start(self._plan(order), now, waits=waits), now)
            case AbortReceive():
                self._act(self._book.handle(AbortRequested(order.request_id), now), now)
            case RetirePeer():
                self._connections.retire(order.key)
                self._connections.forget_leaving(self._book.uses)

    def _plan(self, order: StartReceive) -> ReceiveRequest:
        peer = self._connections.find(order.peer)
        if peer is not None:
            return peer.request(order)
        plan = Uncovered(f"{order.peer} is not connected")
        return ReceiveRequest(order.request_id, order.peer, plan, order.grant.slot, 0, order.num_tokens)

    def poll(self, now: float) -> None:
        """Look at every outstanding transfer and at the deadlines once."""
        for request_id in list(self._outstanding):
            # Again at once after an end: a lease word on the same host is there as soon as it is asked for.
            while (outstanding := self._outstanding.get(request_id)) and self._has_ended(request_id, outstanding, now):
                pass
        if reason := self._connections.poll(now):
            self._rebuild((), reason, now)
        self._act(self._book.pass_time(now), now)
        self._mend(now)
        self._connections.forget_leaving(self._book.uses)

    def _mend(self, now: float) -> None:
        # A peer that comes back under another key waits for the former one to go.
        self._connections.forget_leaving(self._book.uses)
        read = {outstanding.peer for outstanding in self._outstanding.values()}
        for key, trouble in self._connections.mend(read.__contains__, now):
            actions = self._book.not_reconnected(key, trouble, now) if trouble else self._book.reconnected(key, now)
            self._act(actions, now)

    def _has_ended(self, request_id: RequestId, outstanding: Outstanding, now: float) -> bool:
        """Look at a receive's transfer, and go on with the receive if that has ended."""
        event: ReceiveEvent
        try:
            if not self._transport.poll(outstanding.transfer):
                return False
        except TransportError as error:
            self._transport.release(outstanding.transfer)
            event = TransferFailed(request_id, str(error))
        else:
            if outstanding.is_word:
                event = WordArrived(request_id, self._transport.take_word(outstanding.transfer))
            else:
                self._transport.release(outstanding.transfer)
                event = ReadCompleted(request_id)
        del self._outstanding[request_id]
        self._act(self._book.handle(event, now), now)
        return True

    def _act(self, actions: Sequence[ReceiveAction], now: float) -> None:
        # Reports first: the book has forgotten their receives, so that nobody would make up for one that is skipped.
        for action in sorted(actions, key=lambda action: not isinstance(action, ReportReceive)):
            match action:
                case SubmitRead():
                    self._submit_read(action, now)
                case SubmitWordRead(request):
                    self._submit_word_read(request, now)
                case ReconnectPeer(peer):
                    self._connections.mark_broken(peer)
                case ReportReceive():
                    self._report(action)
                case RebuildAgent(peers, reason):
                    self._rebuild(peers, reason, now)

    def _submit_read(self, action: SubmitRead, now: float) -> None:
        request, plan = action.request, action.plan
        if action.why_again:
            why = one_line(action.why_again)
            logger.warning("%s: reading from %s is tried once more: %s", request.request_id, request.peer, why)
            self.report.outcomes[Outcome.RECEIVE_RETRIED] += 1
        if len(plan.local) == 0:
            # Everything came from the prefix cache; the word still says whether the lease held.
            self._act(self._book.handle(ReadCompleted(request.request_id), now), now)
            return
        self._submit(request, lambda: self._transport.submit_read(request.peer, plan.local, plan.remote), False, now)

    def _submit_word_read(self, request: ReceiveRequest, now: float) -> None:
        self._after_read(request)
        self._submit(request, lambda: self._transport.submit_word_read(request.peer, request.slot), True, now)

    def _submit(self, request: ReceiveRequest, submit: Callable[[], Transfer], is_word: bool, now: float) -> None:
        try:
            self._outstanding[request.request_id] = Outstanding(submit(), request.peer, is_word)
        except TransportError as error:
            self._act(self._book.handle(TransferFailed(request.request_id, str(error)), now), now)

    def _report(self, action: ReportReceive) -> None:
        request, plan = action.request, action.request.plan
        result = ReceiveResult(request.request_id, action.outcome, action.reason)
        if action.outcome is Outcome.RECEIVE_VERIFIED and isinstance(plan, ReadPlan):
            moved = quantities(request, plan, action.seconds)
            result = ReceiveResult(request.request_id, action.outcome, "", plan.num_blocks_by_group, moved)
        elif action.outcome in (Outcome.RECEIVE_FAILED, Outcome.RECEIVE_TIMED_OUT):
            self._connections.blame(request.peer, action.reason)
        self.report.results.append(result)

    def _rebuild(self, peers: Iterable[PeerKey], reason: str, now: float) -> None:
        logger.error("the pull agent is destroyed and rebuilt, and its peers are connected anew: %s", reason)
        for peer in peers:
            self._connections.blame(peer, "a transfer from it did not end")
        self._renew_agent()
        self._act(self._book.agent_destroyed(reason, now), now)

    def _renew_agent(self) -> None:
        try:
            self._transport.rebuild()
        except TransportError as error:
            logger.error("there is no new pull agent yet, every connection tries to make one: %s", error)  # noqa: TRY400
        except Exception:
            # Without an agent every later read fails at once. What matters now is that no earlier one can write.
            logger.exception("there can be no new pull agent: from now on every prompt is computed here")
            self._transport.close()
        for outstanding in self._outstanding.values():
            self._transport.release(outstanding.transfer)
        self._outstanding.clear()
        self._connections.all_broken()
        self.report.outcomes[Outcome.AGENT_REBUILT] += 1

    def fail_everything(self, now: float) -> None:
        """An exception that should not exist was contained: end every transfer and fail every receive."""
        self.report.outcomes[Outcome.INTERNAL_ERROR] += 1
        self._renew_agent()
        self._act(self._book.fail_all(_INTERNAL_ERROR, now), now)

    def refuse(self, order: StartReceive, reason: str) -> None:
        """Report a receive that cannot begin, unless it has been reported."""
        if all(result.request_id != order.request_id for result in self.report.results):
            self.report.results.append(ReceiveResult(order.request_id, Outcome.RECEIVE_FAILED, reason))

    @property
    def num_outstanding(self) -> int:
        """Transfers and connections that have to be looked at again soon."""
        return len(self._outstanding) + self._connections.num_pending

    def next_deadline(self) -> float | None:
        """When ``poll`` next has a deadline to look at."""
        return self._book.next_deadline()

    def levels(self) -> Counter[Level]:
        """What is held at this moment."""
        return Counter(
            {
                Level.RECEIVES: len(self._book.request_ids),
                Level.TRANSFERS: self._transport.num_outstanding(),
                Level.QUARANTINED_BLOCKS: self._book.num_quarantined_blocks,
            }
        )


class PullThread:
    """Runs a PullLoop in a thread of its own. ``post`` and ``take_report`` belong to vLLM's thread."""

    def __init__(
        self,
        loop: PullLoop,
        transport: PullTransport,
        clock: Callable[[], float] = time.monotonic,
        idle_patience_seconds: float = IDLE_PATIENCE_SECONDS,
    ) -> None:
        self._loop = loop
        self._transport = transport
        self._clock = clock
        self._idle_patience_seconds = idle_patience_seconds
        lock = threading.Lock()
        self._changed = threading.Condition(lock)
        self._reported = threading.Condition(lock)
        self._inbox: deque[tuple[Fence, list[Order]]] = deque()
        self._report = WorkerReport()
        self._levels: Counter[Level] = Counter()
        self._is_idle = False
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="pd-transfer-pull", daemon=True)
        self._thread.start()

    def post(self, orders: StepOrders, fence: Fence) -> None:
        """Hand over one step's orders, to be begun once the fence has passed."""
        self._is_idle = orders.is_idle
        batch: list[Order] = [*orders.retires, *orders.connects, *orders.receives, *orders.aborts]
        if batch:
            with self._changed:
                self._inbox.append((fence, batch))
                self._changed.notify()

    def take_report(self) -> WorkerReport:
        """What has happened since the last call. In an idle step, wait a little for a receive to end."""
        with self._reported:
            if self._is_idle:
                self._reported.wait_for(
                    lambda: self._report.results or not self._num_receives(), self._idle_patience_seconds
                )
            report, self._report = self._report, WorkerReport()
            report.levels = Counter(self._levels)
            report.levels[Level.RECEIVES] = self._num_receives()
        return report

    def _num_receives(self) -> int:
        ordered = sum(isinstance(order, StartReceive) for _, batch in self._inbox for order in batch)
        return self._levels[Level.RECEIVES] + ordered

    def close(self) -> None:
        """Stop the thread and destroy the agent. No read can write afterwards."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()
        self._transport.close()

    def _run(self) -> None:
        num_polls = 0
        while True:
            with self._changed:
                if not self._closing and not self._is_ready():
                    num_polls = num_polls + 1 if self._is_polling() else 0
                    self._changed.wait(self._pause(num_polls))
                if self._closing:
                    return
                batch = self._inbox.popleft()[1] if self._is_ready() else []
                self._levels[Level.RECEIVES] += sum(isinstance(order, StartReceive) for order in batch)
            if batch:
                num_polls = 0
            self._turn(batch)

    def _is_ready(self) -> bool:
        if not self._inbox:
            return False
        fence, batch = self._inbox[0]
        try:
            return fence.has_passed()
        except Exception:
            logger.exception("a fence raised: the reads that were ordered behind it fail")
        for order in batch:
            if isinstance(order, StartReceive):
                self._loop.refuse(order, _INTERNAL_ERROR)
        self._inbox[0] = (NoFence(), [order for order in batch if not isinstance(order, StartReceive)])
        return True

    def _is_polling(self) -> bool:
        return bool(self._inbox) or self._loop.num_outstanding > 0

    def _pause(self, num_polls: int) -> float | None:
        """How long to sleep: not at all long while a read is young, until the next deadline when nothing is read."""
        if num_polls:
            return POLL_SECONDS if num_polls <= FAST_POLL_COUNT else SLOW_POLL_SECONDS
        deadline = self._loop.next_deadline()
        return None if deadline is None else max(0.0, deadline - self._clock())

    def _turn(self, batch: list[Order]) -> None:
        self._loop.turn(batch, self._clock())
        with self._changed:
            self._report.add(self._loop.report)
            self._loop.report = WorkerReport()
            self._levels = self._loop.levels()
            self._reported.notify()
