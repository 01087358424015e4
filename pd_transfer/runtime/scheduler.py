"""A scheduler process: one lock around both halves, and one thread that owns the side channel.

vLLM's thread and the side channel's thread both call the halves under the lock; neither does I/O while it holds it.
What has to be sent collects in the decode half's outbox, and the thread sends it.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pd_transfer.core.messages import decode, encode
from pd_transfer.core.outcomes import Level, Outcome, Outcomes
from pd_transfer.core.peers import SendMessage
from pd_transfer.runtime.decode import DecodeSide, Measured
from pd_transfer.runtime.prefill import PrefillSide
from pd_transfer.sidechannel.base import ConnectionLost, Received, ReplyReceived, RequestReceived, SideChannel

if TYPE_CHECKING:
    from pd_transfer.core.params import Address

logger = logging.getLogger("pd_transfer.scheduler")

_IDLE_SECONDS = 10.0
"""A connection that is nobody's is kept this long after its last letter."""
_PAUSE_AFTER_ERROR_SECONDS = 0.1
"""An error that repeats must not burn a core."""


@dataclass(slots=True)
class Collected:
    """What has been counted since the last collection, and what is held now."""

    outcomes: Outcomes = field(default_factory=Counter)
    measured: Measured = field(default_factory=Measured)
    levels: Counter[Level] = field(default_factory=Counter)


class SchedulerRuntime:
    """Either half may be None: a pure decode engine serves nothing, a pure prefill engine pulls nothing."""

    def __init__(
        self,
        prefill: PrefillSide | None,
        decode_side: DecodeSide | None,
        side_channel: SideChannel,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._prefill = prefill
        self._decode = decode_side
        self._side_channel = side_channel
        self._clock = clock
        self._lock = threading.Lock()
        self._closing = False
        self._num_internal_errors = 0
        self._side_channel_totals: Outcomes = Counter()
        self._last_letter: dict[Address, float] = {}
        self._thread = threading.Thread(target=self._run, name="pd-transfer-side-channel", daemon=True)

    def start(self) -> None:
        """Begin to serve peers."""
        self._thread.start()

    @contextmanager
    def prefill(self) -> Iterator[tuple[PrefillSide | None, float]]:
        """The prefill half and the time, under the lock."""
        with self._lock:
            yield self._prefill, self._clock()

    @contextmanager
    def decode(self) -> Iterator[tuple[DecodeSide | None, float]]:
        """The decode half and the time, under the lock; what it wants to send is sent soon after."""
        with self._lock:
            yield self._decode, self._clock()
            has_mail = self._decode is not None and bool(self._decode.outbox)
        if has_mail:
            self._side_channel.wake()

    def collect(self) -> Collected:
        """Take what was counted since the last call."""
        collected = Collected()
        with self._lock:
            collected.outcomes[Outcome.INTERNAL_ERROR] += self._num_internal_errors
            self._num_internal_errors = 0
            totals = Counter(
                {
                    Outcome.MESSAGE_DROPPED: self._side_channel.num_dropped,
                    Outcome.HANDSHAKE_REFUSED: self._side_channel.num_refused,
                }
            )
            collected.outcomes.update(totals - self._side_channel_totals)
            self._side_channel_totals = totals
            if self._prefill is not None:
                for counter in (self._prefill.outcomes, self._prefill.leases.outcomes):
                    collected.outcomes.update(counter)
                    counter.clear()
                collected.levels.update(self._prefill.levels())
            if self._decode is not None:
                collected.outcomes.update(self._decode.take_outcomes())
                collected.measured, self._decode.measured = self._decode.measured, Measured()
                collected.levels.update(self._decode.levels())
        return collected

    def close(self) -> None:
        """End every lease, stop the thread, close the side channel. Words are revoked by the workers' own shutdown."""
        with self._lock:
            if self._prefill is not None:
                self._prefill.leases.reset(self._clock())
            self._closing = True
        self._side_channel.wake()
        if self._thread.is_alive():
            self._thread.join()
        self._side_channel.close()

    def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._closing  # what was posted before is still sent
            if not self._contain(self._turn):
                time.sleep(_PAUSE_AFTER_ERROR_SECONDS)

    def _contain(self, work: Callable[..., None], *arguments: object) -> bool:
        """Nothing may end the thread: no peer could shake hands any more. False after a bug of ours."""
        try:
            work(*arguments)
        except Exception:
            logger.exception("internal error in the side channel thread; it goes on")
            self._num_internal_errors += 1
            return False
        return True

    def _turn(self) -> None:
        for received in self._side_channel.poll(self._timeout()):
            self._contain(self._take, received)
        with self._lock:
            now = self._clock()
            if self._prefill is not None:
                self._prefill.leases.expire(now)
            mail = []
            if self._decode is not None:
                self._decode.pass_time(now)
                mail, self._decode.outbox = self._decode.outbox, []
        for letter in mail:
            self._contain(self._send, letter)
        self._hang_up(now)

    def _send(self, letter: SendMessage) -> None:
        self._side_channel.send_request(letter.address, encode(letter.message))
        self._last_letter[letter.address] = self._clock()

    def _hang_up(self, now: float) -> None:
        """Close connections to addresses that are no peers and were not written to for a while.

        Else every engine that ever died would keep one, and get old letters when something else listens there.
        """
        for address in [address for address, sent in self._last_letter.items() if sent + _IDLE_SECONDS <= now]:
            with self._lock:
                is_peer = self._decode is not None and self._decode.is_peer(address)
            if is_peer:
                self._last_letter[address] = now
            else:
                del self._last_letter[address]
                self._side_channel.disconnect(address)

    def _timeout(self) -> float | None:
        with self._lock:
            if self._closing or (self._decode is not None and self._decode.outbox):
                return 0.0
            halves = (self._prefill.leases if self._prefill else None, self._decode)
            deadlines = [half.next_deadline() for half in halves if half is not None]
            deadlines += [sent + _IDLE_SECONDS for sent in self._last_letter.values()]
            earliest = min((deadline for deadline in deadlines if deadline is not None), default=None)
            return None if earliest is None else max(0.0, earliest - self._clock())

    def _take(self, received: Received) -> None:
        match received:
            case RequestReceived(origin, payload):
                message = decode(payload)
                with self._lock:
                    reply = self._prefill.answer(message, self._clock()) if self._prefill is not None else None
                if reply is not None:
                    self._side_channel.send_reply(origin, encode(reply))
            case ReplyReceived(address, payload) if self._decode is not None:
                message = decode(payload)
                with self._lock:
                    self._decode.receive(address, message, self._clock())
            case ConnectionLost(address) if self._decode is not None:
                with self._lock:
                    self._decode.connection_lost(address, self._clock())
