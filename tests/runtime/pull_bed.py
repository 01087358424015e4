"""A decode worker's pull loop between two prefill workers, in the hands of a test."""

from pd_transfer.core.outcomes import Level
from pd_transfer.core.receives import ReceivePolicy
from pd_transfer.errors import TransportError
from pd_transfer.runtime.orders import WorkerReport
from pd_transfer.runtime.worker import PullLoop
from pd_transfer.transport.memory import MemoryFabric, MemoryPullTransport
from tests.runtime.builders import (
    Memory,
    PrefillWorker,
    connect_order,
    content_after_read,
    grant,
    hybrid_layout,
    receive_order,
)

READ_SECONDS, DRAIN_SECONDS = 10.0, 20.0
PEER, OTHER_PEER = "prefill:1#1", "prefill:2#2"
GRANTED = ((3, 4, 5, 9), (0, 0, 7, 8))
NEEDED = ((1, 2, 6, 7), (0, 0, 4, 5))
OTHER_NEEDED = ((8, 9, 10, 11), (0, 0, 3, 0))
NOTHING_NEEDED = ((0, 0, 0, 0), (0, 0, 0, 0))
NUM_DESCRIPTORS = 2 * 4 + 2 * 2
NUM_BYTES = 2 * 4 * 80 + 2 * 2 * 64


class BuggyTransport(MemoryPullTransport):
    """Raises where a test has planted an error, once for each. ``num_closed`` counts the calls of ``close``."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.planted = {}
        self.num_raised = 0
        self.num_closed = 0

    def plant(self, *methods, error=RuntimeError):
        self.planted.update({method: error(f"planted in {method}") for method in methods})

    def _trip(self, method):
        if method in self.planted:
            self.num_raised += 1
            raise self.planted.pop(method)

    def add_peer(self, *arguments):
        self._trip("add_peer")
        super().add_peer(*arguments)

    def remove_peer(self, *arguments):
        self._trip("remove_peer")
        super().remove_peer(*arguments)

    def submit_read(self, *arguments):
        self._trip("submit_read")
        return super().submit_read(*arguments)

    def submit_word_read(self, *arguments):
        self._trip("submit_word_read")
        return super().submit_word_read(*arguments)

    def submit_warm_up(self, *arguments):
        self._trip("submit_warm_up")
        return super().submit_warm_up(*arguments)

    def poll(self, *arguments):
        self._trip("poll")
        return super().poll(*arguments)

    def take_word(self, *arguments):
        self._trip("take_word")
        return super().take_word(*arguments)

    def rebuild(self):
        if isinstance(self.planted.get("rebuild"), TransportError):
            super().rebuild()  # there is no new agent, but all else is as its contract says
        self._trip("rebuild")
        super().rebuild()

    def close(self):
        self.num_closed += 1
        super().close()


class Bed:
    """One decode worker, two prefill workers, and the fabric between them. Time passes only when a test says so."""

    def __init__(self):
        self.fabric = MemoryFabric()
        self.remote_layout, self.layout = hybrid_layout(16), hybrid_layout(12)
        self.prefill = PrefillWorker.in_memory(self.fabric, self.remote_layout, seed=1)
        self.other_prefill = PrefillWorker.in_memory(self.fabric, self.remote_layout, seed=2)
        self.local = Memory(self.layout, seed=3)
        self.before = self.local.bytes.copy()
        self.transport = BuggyTransport(self.fabric, self.local.region, self.local.rows)
        self.after_read = lambda request: None
        self.loop = PullLoop(
            self.transport,
            ReceivePolicy(READ_SECONDS, DRAIN_SECONDS),
            0,
            self.layout,
            lambda request: self.after_read(request),
        )
        self.now = 100.0
        self.ordered = []
        self.reported = []

    def turn(self, *orders, after=0.0):
        """One turn, ``after`` seconds later; what it reports."""
        self.now += after
        self.ordered += [order.request_id for order in orders if hasattr(order, "grant")]
        self.loop.turn(orders, self.now)
        report, self.loop.report = self.loop.report, WorkerReport()
        self.reported += [result.request_id for result in report.results]
        return report

    def finish(self, *orders):
        """As many turns as an undisturbed receive takes; their reports, added up."""
        report = self.turn(*orders)
        report.add(self.turn())
        return report

    def connect_order(self, key=PEER, prefill=None):
        return connect_order(key, self.remote_layout, [(prefill or self.prefill).served])

    def connect(self, key=PEER, prefill=None):
        """Connect a peer, and see its warm-up through."""
        report = self.turn(self.connect_order(key, prefill))
        assert not report.troubled_peers
        assert self.loop.num_outstanding == 0

    def receive(self, request_id="a", key=PEER, needed=NEEDED, granted=GRANTED, **terms):
        return receive_order(request_id, key, grant(self.remote_layout, granted, **terms), needed)

    def expected(self, needed=NEEDED, granted=GRANTED):
        """The local bytes after a good read."""
        return content_after_read(self.local, needed, self.prefill.memory, granted)

    def make_stuck(self, request_id="a"):
        """A read that does not end, past its deadline."""
        self.fabric.hold_new = True
        self.turn(self.receive(request_id))
        (read,) = self.fabric.reads
        assert not self.turn(after=READ_SECONDS).results
        assert self.loop.levels()[Level.QUARANTINED_BLOCKS] == NUM_DESCRIPTORS
        return read

    def assert_at_rest(self):
        """Every receive was reported exactly once, and nothing is held."""
        assert sorted(self.reported) == sorted(set(self.ordered))
        assert not +self.loop.levels()
        assert self.loop.num_outstanding == 0
        assert self.loop.next_deadline() is None
        assert not self.fabric.reads
