"""All cases, the positive control of their verdicts, and the order in which a bed runs them."""

from collections.abc import Iterator, Sequence

from tests.faults import cases_leases, cases_processes, cases_reads, cases_side_channel
from tests.faults.bed import POLICIES, TRANSPORTS, Bed
from tests.faults.client import post
from tests.faults.run import Case
from tests.faults.verdicts import Judgement, judge

BOOKS = (cases_side_channel.BOOK, cases_leases.BOOK, cases_reads.BOOK, cases_processes.BOOK)
CASES: dict[str, Case] = {name: case for book in BOOKS for name, case in book.cases.items()}
BEDS = tuple((transport, policy) for transport in TRANSPORTS for policy in POLICIES)


def cases_of(transport: str, names: Sequence[str] = ("",)) -> Iterator[Case]:
    """The cases that exist on a transport and whose name contains one of these; restarts come last."""
    chosen = [c for c in CASES.values() if transport in c.transports and any(name in c.name for name in names)]
    return iter(sorted(chosen, key=lambda case: case.restarts))


def judge_damage(bed: Bed) -> Judgement:
    """The control: an answer from blocks that were overwritten after the read. It has to be judged wrong."""
    question = bed.question(seed=98)
    params = bed.hand_off(question)
    with bed.stages.damaging():
        reply = post(bed.decode.url, question.body(params), bed.answer_seconds)
    return judge(reply, question.oracle)
