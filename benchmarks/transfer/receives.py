"""What one receive costs the threads of a decode worker: the connector's own pull thread over real NIXL."""

import pickle
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from benchmarks.transfer.bed import PEER, WORD_SLOT, Bed
from benchmarks.transfer.sampling import Watch, wait
from benchmarks.transfer.subject import Reading, Subject
from pd_transfer.core.admissions import StartReceive
from pd_transfer.core.layout import descriptor_rows
from pd_transfer.core.messages import ServedRank
from pd_transfer.core.outcomes import Outcome
from pd_transfer.core.params import RequestId
from pd_transfer.core.receives import ReceivePolicy
from pd_transfer.runtime.orders import ReceiveResult, StepOrders
from pd_transfer.runtime.worker import NoFence, PullLoop, PullThread
from tests.runtime.builders import connect_order, grant

_STEP_SECONDS = 0.001
_POLICY = ReceivePolicy(read_seconds=60.0, drain_seconds=60.0)


class Receive(NamedTuple):
    """CPU seconds of one receive.

    ``engine_seconds``: vLLM's worker thread unpickles the order, posts it, and takes the report.
    ``io_seconds``: our I/O thread plans, submits, polls, reads the lease word, and measures.
    ``plan_seconds``: the plan alone, made once more.
    """

    engine_seconds: float
    io_seconds: float
    plan_seconds: float


class Receiver:
    """A decode rank's pull side."""

    def __init__(self, bed: Bed, subject: Subject) -> None:
        self._layout = subject.layout
        rows = descriptor_rows(subject.layout, bed.region.address)
        transport = bed.pull_transport(rows)
        before = set(threading.enumerate())
        loop = PullLoop(transport, _POLICY, 0, subject.layout)
        self._thread = PullThread(loop, transport)
        (io_thread,) = set(threading.enumerate()) - before
        assert io_thread.ident is not None
        self._clock = time.pthread_getcpuclockid(io_thread.ident)
        self._num_requests = 0
        # The serving process's words are zero.
        served = ServedRank(bed.memory, boot_word=0)
        self._thread.post(StepOrders(connects=[connect_order(PEER, subject.layout, [served])]), NoFence())

    def variant(self, reading: Reading) -> Callable[[], Receive]:
        """One receive of a reading."""
        offer = grant(self._layout, reading.pull.tables, WORD_SLOT, 0, reading.pull.num_tokens)
        needed = tuple(reading.pull.needed())

        def receive() -> Receive:
            self._num_requests += 1
            request_id = RequestId(f"r{self._num_requests}")
            order = StartReceive(request_id, PEER, offer, needed, offer.num_tokens)
            payload = pickle.dumps(StepOrders(receives=[order]))
            io_before, watch = time.clock_gettime(self._clock), Watch()
            self._thread.post(pickle.loads(payload), NoFence())
            _, post_cpu = watch.read()
            report_cpu = self._wait(request_id)
            io_cpu = time.clock_gettime(self._clock) - io_before
            watch = Watch()
            reading.pull.plan()
            return Receive(post_cpu + report_cpu, io_cpu, watch.read()[1])

        return receive

    def _wait(self, request_id: RequestId) -> float:
        """CPU seconds of taking the report that says it is there. RuntimeError when it says anything else."""
        results: list[ReceiveResult] = []
        cpu_seconds = 0.0

        def has_result() -> bool:
            nonlocal cpu_seconds
            watch = Watch()
            results.extend(self._thread.take_report().results)
            cpu_seconds = watch.read()[1]
            return bool(results)

        wait(has_result, lambda _: _STEP_SECONDS)
        (result,) = results
        if result.request_id != request_id or result.outcome is not Outcome.RECEIVE_VERIFIED:
            raise RuntimeError(f"{request_id}: {result}")
        return cpu_seconds

    def close(self) -> None:
        """End the thread and the agent."""
        self._thread.close()
