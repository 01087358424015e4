"""Engines that die, stop and come back, at every stage of a read."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator

from tests.faults.run import Book, Run
from tests.faults.stages import Stage
from tests.stack.engines import Engine

BOOK = Book()


def kill(run: Run, engine: Engine) -> None:
    """kill -9 to the engine's whole process group."""
    engine.signal(signal.SIGKILL)
    _wait_ended(run, engine)


def terminate(run: Run, engine: Engine) -> None:
    """SIGTERM to the process that was started, as an orchestrator does."""
    os.kill(engine.pid, signal.SIGTERM)
    _wait_ended(run, engine)


def _wait_ended(run: Run, engine: Engine) -> None:
    deadline = time.monotonic() + 20
    while not engine.has_ended:
        run.must(time.monotonic() < deadline, f"{engine.name} did not end")
        time.sleep(0.01)


@contextlib.contextmanager
def stopped(engine: Engine) -> Iterator[None]:
    """SIGSTOP to the engine's whole process group; SIGCONT at the end."""
    engine.signal(signal.SIGSTOP)
    try:
        yield
    finally:
        engine.signal(signal.SIGCONT)


@BOOK.case("peer_unreachable", "receive_failed", "grant_other_boot", restarts=True)
def prefill_killed_before_the_read(run: Run) -> None:
    """Prefill is killed before decode's request, and restarts; then comes a grant of its former life."""
    first, second = run.bed.question(seed=1), run.bed.question(seed=2)
    params = [run.bed.hand_off(question) for question in (first, second)]
    kill(run, run.bed.prefill)
    run.ask(first, params[0])
    run.settle()
    run.bed.restart("prefill")
    run.ask(second, params[1])


@BOOK.case("receive_failed", "receive_verified", restarts=True)
def prefill_killed_with_a_read_at_every_stage(run: Run) -> None:
    """Prefill is killed while four reads are held, one at each stage, and restarts; only the proven one is good."""
    with run.held_at(*Stage, seed=110):
        kill(run, run.bed.prefill)
    run.settle(alone=False)
    run.bed.restart("prefill")


@BOOK.case("receive_failed", "receive_stale", "receive_timed_out", restarts=True)
def prefill_terminated(run: Run) -> None:
    """Prefill gets SIGTERM while two reads are held, ends in its own way, and restarts; no read is good.

    On a busy machine its end may take longer than a read.
    """
    with run.held_at(Stage.DURING_READ, Stage.BEFORE_WORD, seed=120):
        terminate(run, run.bed.prefill)
    run.settle(alone=False)
    run.bed.restart("prefill")


@BOOK.case("peer_unreachable", decode={"handshake_timed_out": 1})
def prefill_stopped_during_the_handshake(run: Run) -> None:
    """Prefill is stopped when decode greets it."""
    question = run.bed.question(seed=5)
    params = run.forwarder().redirect(run.bed.hand_off(question))
    with stopped(run.bed.prefill):
        run.ask(question, params)
        run.settle()


@BOOK.at_stages({Stage.BEFORE_READ: ["receive_verified"], Stage.BEFORE_WORD: ["receive_verified"]}, transports=("cma",))
def prefill_stopped(run: Run, stage: Stage) -> None:
    """Prefill is stopped while a read is held; on one host the read needs it no more."""
    _stopped_while_held(run, stage)


@BOOK.at_stages(
    {Stage.BEFORE_READ: ["receive_timed_out"], Stage.BEFORE_WORD: ["receive_timed_out"]},
    transports=("tcp",),
    decode={"agent_rebuilt": 1},
    may_abort_prefill=True,
)
def prefill_stopped_for_long(run: Run, stage: Stage) -> None:
    """Prefill is stopped while a read is held; over TCP the read cannot end, and the agent is destroyed."""
    _stopped_while_held(run, stage)


def _stopped_while_held(run: Run, stage: Stage) -> None:
    question = run.bed.question(seed=6)
    params = run.bed.hand_off(question)
    with contextlib.ExitStack() as until_answered:
        with run.held(stage, question, params):
            until_answered.enter_context(stopped(run.bed.prefill))
        run.settle()


@BOOK.case("receive_verified", never=frozenset({"agent_rebuilt"}))
def prefill_stopped_for_a_moment(run: Run) -> None:
    """Prefill is stopped while a read is submitted, and goes on before its deadline."""
    question = run.bed.question(seed=7)
    with run.bed.stages.holding(Stage.DURING_READ):
        with run.held(Stage.BEFORE_READ, question, run.bed.hand_off(question)):
            run.bed.prefill.signal(signal.SIGSTOP)
        try:
            run.wait(Stage.DURING_READ)
        finally:
            run.bed.prefill.signal(signal.SIGCONT)


@BOOK.case("receive_verified")
def prefill_stopped_at_the_release(run: Run) -> None:
    """Prefill is stopped before decode can release the lease."""
    question = run.bed.question(seed=8)
    params = run.bed.hand_off(question)
    with contextlib.ExitStack() as until_answered:
        with run.held(Stage.AFTER_WORD, question, params):
            until_answered.enter_context(stopped(run.bed.prefill))
        run.settle()


@BOOK.case(restarts=True, kills_decode=True, prefill={"lease_expired": 4})
def decode_killed_with_a_read_at_every_stage(run: Run) -> None:
    """Decode is killed while four reads are held, one at each stage, and restarts; prefill's leases just end."""
    since = run.bed.prefill.metrics()
    with run.held_at(*Stage, seed=130):
        kill(run, run.bed.decode)
    run.settle()
    run.wait_counted(run.bed.prefill, "lease_expired", since, count=4)
    run.bed.restart("decode")


@BOOK.case(restarts=True, kills_decode=True)
def decode_terminated(run: Run) -> None:
    """Decode gets SIGTERM while its read is held, which then goes on; it restarts."""
    question = run.bed.question(seed=10)
    with run.held(Stage.DURING_READ, question, run.bed.hand_off(question)):
        os.kill(run.bed.decode.pid, signal.SIGTERM)
    run.settle()
    _wait_ended(run, run.bed.decode)
    run.bed.restart("decode")


@BOOK.case("receive_stale", "receive_timed_out", prefill={"lease_expired": 1})
def decode_stopped_until_its_blocks_are_anothers(run: Run) -> None:
    """Decode is stopped during its read; the lease expires, and prefill gives the blocks to other prompts."""
    question = run.bed.question(seed=11)
    since = run.bed.prefill.metrics()
    with run.held(Stage.DURING_READ, question, run.bed.hand_off(question)), stopped(run.bed.decode):
        run.wait_counted(run.bed.prefill, "lease_expired", since)
        run.bed.churn()
