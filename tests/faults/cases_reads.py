"""Reads that are stuck, clients that leave, several requests for one prompt, preemption, and a link that is cut."""

import contextlib
from collections.abc import Iterator

from tests.faults.bed import Question
from tests.faults.forwarder import Deed, Fault
from tests.faults.run import INJECTION_SECONDS, Book, Run
from tests.faults.stages import Stage

BOOK = Book()
QUARANTINED = "pd_transfer:held/quarantined_blocks"
PREEMPTIONS = "vllm:num_preemptions_total"


@BOOK.at_stages({stage: ["receive_timed_out"] for stage in Stage}, decode={"agent_rebuilt": 1})
def stuck(run: Run, stage: Stage) -> None:
    """A read never ends: the agent is destroyed."""
    question = run.bed.question(seed=50)
    with run.held(stage, question, run.bed.hand_off(question)):
        run.settle()


@BOOK.at_stages(
    {stage: ["receive_timed_out"] for stage in (Stage.DURING_READ, Stage.BEFORE_WORD)},
    never=frozenset({"agent_rebuilt"}),
)
def slow(run: Run, stage: Stage) -> None:
    """A read ends after its deadline, while it drains."""
    question = run.bed.question(seed=51)
    with run.held(stage, question, run.bed.hand_off(question)):
        run.wait_metric(run.bed.decode, QUARANTINED, 1)


@BOOK.at_stages({stage: ["receive_aborted"] for stage in Stage}, never=frozenset({"agent_rebuilt"}))
def client_leaves(run: Run, stage: Stage) -> None:
    """The client hangs up while its read is held, which then ends."""
    question = run.bed.question(seed=52)
    params = run.bed.hand_off(question)
    with run.bed.stages.holding(stage):
        client = run.ask_and_leave(question, params)
        run.wait(stage)
        client.leave()
        run.wait_metric(run.bed.decode, QUARANTINED, 1)


@BOOK.case("receive_aborted", decode={"agent_rebuilt": 1})
def client_leaves_a_stuck_read(run: Run) -> None:
    """The client hangs up during a read that never ends: the agent is destroyed."""
    question = run.bed.question(seed=53)
    params = run.bed.hand_off(question)
    since = run.bed.decode.metrics()
    with run.bed.stages.holding(Stage.DURING_READ):
        client = run.ask_and_leave(question, params)
        run.wait(Stage.DURING_READ)
        client.leave()
        run.wait_counted(run.bed.decode, "agent_rebuilt", since)


@BOOK.case("withdrawn")
def client_leaves_during_the_handshake(run: Run) -> None:
    """The client hangs up while decode waits for prefill's Welcome."""
    question = run.bed.question(seed=54)
    forwarder = run.forwarder(Fault(Deed.DROP))
    client = run.ask_and_leave(question, forwarder.redirect(run.bed.hand_off(question)))
    run.must(forwarder.wait_done(1, INJECTION_SECONDS), "decode did not greet")
    client.leave()


@BOOK.case("receive_verified", "grant_used", "nothing_to_read")
def three_samples(run: Run) -> None:
    """One request asks for three samples, which share its params."""
    question = run.bed.question(seed=55)
    run.ask(question, run.bed.hand_off(question), num_choices=3)
    run.settle(alone=False)


@BOOK.case("receive_stale", prefill={"lease_reset": 1})
def three_samples_are_stale(run: Run) -> None:
    """The lease that three samples share is ended during their reads, and its blocks go to other prompts."""
    question = run.bed.question(seed=56)
    params = run.bed.hand_off(question)
    with run.bed.stages.holding(Stage.DURING_READ):
        run.ask(question, params, num_choices=3)
        run.wait(Stage.DURING_READ, count=3)
        run.bed.reset_prefill_cache()
        run.bed.churn()
    run.settle(alone=False)


@BOOK.case("receive_verified", "receive_aborted")
def one_of_two_sharers_leaves(run: Run) -> None:
    """Two requests for one prompt read side by side; the client of one hangs up."""
    question = run.bed.question(seed=57)
    params = [run.bed.hand_off(question) for _ in range(2)]
    with run.bed.stages.holding(Stage.DURING_READ):
        run.ask(question, params[0])
        client = run.ask_and_leave(question, params[1])
        run.wait(Stage.DURING_READ, count=2)
        client.leave()
        run.wait_metric(run.bed.decode, QUARANTINED, 1)
    run.settle(alone=False)


NUM_PREEMPTED, LONG_ANSWER = 10, 160


@BOOK.case("receive_verified", "grant_expired", "receive_stale")
def preempted(run: Run) -> None:
    """More requests than decode has blocks for: some are preempted, and computed again.

    A lease of one second may end while so many wait.
    """
    questions = [run.bed.question(180, seed=60 + i, max_tokens=LONG_ANSWER) for i in range(NUM_PREEMPTED)]
    before = run.bed.decode.metrics().get(PREEMPTIONS, 0.0)
    for question in questions:
        try:
            params = run.bed.hand_off(question)
        except ValueError:
            params = None  # too much of prefill's pool is under lease: decode computes this one
        run.ask(question, params)
    run.settle(alone=False)
    run.must(run.bed.metrics(run.bed.decode)[PREEMPTIONS] > before, "nobody was preempted")


@contextlib.contextmanager
def cut_link(run: Run) -> Iterator[None]:
    """No packet passes between the engines while inside."""
    assert run.bed.link is not None  # the case needs one
    run.bed.link.cut()
    try:
        yield
    finally:
        run.bed.link.heal()


LINK = {"transports": ("tcp",), "needs_link": True}


def _cut_while_held(run: Run, stage: Stage, question: Question) -> None:
    with contextlib.ExitStack() as until_answered:
        with run.held(stage, question, run.bed.hand_off(question)):
            until_answered.enter_context(cut_link(run))
        run.settle()


@BOOK.at_stages(
    {Stage.BEFORE_READ: ["receive_timed_out"], Stage.BEFORE_WORD: ["receive_timed_out"]},
    decode={"agent_rebuilt": 1},
    may_abort_prefill=True,
    **LINK,
)
def link_cut(run: Run, stage: Stage) -> None:
    """The network between the engines is gone while a read is under way."""
    _cut_while_held(run, stage, run.bed.question(seed=80))


@BOOK.case("receive_verified", never=frozenset({"agent_rebuilt"}), **LINK)
def link_cut_for_a_moment(run: Run) -> None:
    """The network is gone when a read is submitted, and is back before its deadline."""
    question = run.bed.question(seed=81)
    with run.bed.stages.holding(Stage.DURING_READ), contextlib.ExitStack() as until_submitted:
        with run.held(Stage.BEFORE_READ, question, run.bed.hand_off(question)):
            until_submitted.enter_context(cut_link(run))
        run.wait(Stage.DURING_READ)
        until_submitted.close()


@BOOK.case("peer_unreachable", decode={"handshake_timed_out": 1}, **LINK)
def link_cut_during_the_handshake(run: Run) -> None:
    """The network is gone when decode greets prefill."""
    question = run.bed.question(seed=82)
    params = run.forwarder().redirect(run.bed.hand_off(question))
    with cut_link(run):
        run.ask(question, params)
        run.settle()
