"""A side channel that is silent, late, cut, doubled or full of junk, from the handshake to the release."""

from pd_transfer.core.messages import Hello, Release, Released, Renew, Renewed, Welcome
from tests.faults.bed import HANDSHAKE_SECONDS, LEASE_SECONDS
from tests.faults.forwarder import Deed, Fault, Forwarder
from tests.faults.run import INJECTION_SECONDS, Book, Run
from tests.faults.stages import Stage
from tests.stack.engines import free_port

BOOK = Book()


def through(run: Run, fault: Fault) -> Forwarder:
    """One hand-off through a forwarder that does something; it has to have done it."""
    question = run.bed.question(seed=20)
    forwarder = run.forwarder(fault)
    run.ask(question, forwarder.redirect(run.bed.hand_off(question)))
    run.settle()
    run.must(forwarder.wait_done(1, INJECTION_SECONDS), f"nothing for {fault} came by")
    return forwarder


@BOOK.case("peer_unreachable", decode={"handshake_timed_out": 1})
def nobody_listens(run: Run) -> None:
    """Nobody listens at the address in the params."""
    question = run.bed.question(seed=20)
    run.ask(question, run.bed.hand_off(question) | {"remote_host": "127.0.0.1", "remote_port": free_port()})


@BOOK.case("peer_unreachable", decode={"handshake_timed_out": 1})
def silence(run: Run) -> None:
    """Somebody listens at the address, and says nothing."""
    through(run, Fault(Deed.DROP))


@BOOK.case("peer_unreachable", decode={"handshake_timed_out": 1})
def junk_instead_of_a_greeting(run: Run) -> None:
    """Both sides get bytes that are not ZeroMQ's."""
    through(run, Fault(Deed.JUNK))


@BOOK.case("peer_unreachable", decode={"handshake_timed_out": 1})
def hello_lost(run: Run) -> None:
    """Decode's Hello does not arrive."""
    through(run, Fault(Deed.DROP, (Hello,)))


@BOOK.case("peer_unreachable", decode={"handshake_timed_out": 1})
def welcome_lost(run: Run) -> None:
    """Prefill's Welcome does not arrive."""
    through(run, Fault(Deed.DROP, (Welcome,)))


@BOOK.case("peer_unreachable", decode={"handshake_timed_out": 1})
def welcome_too_late(run: Run) -> None:
    """Prefill's Welcome arrives when the handshake has been given up."""
    through(run, Fault(Deed.DELAY, (Welcome,), seconds=HANDSHAKE_SECONDS + 1))


@BOOK.case("receive_verified")
def welcome_late(run: Run) -> None:
    """Prefill's Welcome takes half of the time that it may take."""
    through(run, Fault(Deed.DELAY, (Welcome,), seconds=HANDSHAKE_SECONDS / 2))


@BOOK.case("peer_refused", decode={"message_malformed": 1})
def welcome_garbled(run: Run) -> None:
    """Prefill's Welcome arrives as something else."""
    through(run, Fault(Deed.GARBLE, (Welcome,)))


@BOOK.case("peer_refused", prefill={"message_malformed": 1})
def hello_garbled(run: Run) -> None:
    """Decode's Hello arrives as something else."""
    through(run, Fault(Deed.GARBLE, (Hello,)))


@BOOK.case("receive_verified")
def cut_at_the_first_hello(run: Run) -> None:
    """The connection is reset when decode first says Hello."""
    through(run, Fault(Deed.CUT, (Hello,), times=1))


@BOOK.case("peer_unreachable", decode={"handshake_timed_out": 1})
def cut_at_every_hello(run: Run) -> None:
    """The connection is reset whenever decode says Hello."""
    through(run, Fault(Deed.CUT, (Hello,)))


@BOOK.case("receive_verified")
def handshake_doubled(run: Run) -> None:
    """Hello and Welcome arrive twice."""
    through(run, Fault(Deed.DUPLICATE, (Hello, Welcome)))


@BOOK.case("receive_verified", prefill={"lease_expired": 1})
def release_lost(run: Run) -> None:
    """Decode's Release does not arrive: the lease ends by itself."""
    through(run, Fault(Deed.DROP, (Release,)))


@BOOK.case("receive_verified", prefill={"lease_expired": 1})
def release_too_late(run: Run) -> None:
    """Decode's Release arrives when the lease is over."""
    through(run, Fault(Deed.DELAY, (Release,), seconds=LEASE_SECONDS + 1))


@BOOK.case("receive_verified", prefill={"lease_released": 1})
def release_doubled(run: Run) -> None:
    """Decode's Release arrives twice."""
    through(run, Fault(Deed.DUPLICATE, (Release,)))


@BOOK.case("receive_verified", prefill={"lease_released": 1})
def released_lost(run: Run) -> None:
    """Prefill's answer to the Release does not arrive."""
    through(run, Fault(Deed.DROP, (Released,)))


@BOOK.case("receive_verified", prefill={"lease_expired": 1})
def cut_at_the_release(run: Run) -> None:
    """The connection is reset when decode releases the lease."""
    through(run, Fault(Deed.CUT, (Release,)))


@BOOK.case("receive_verified", prefill={"lease_expired": 1, "message_malformed": 1})
def release_garbled(run: Run) -> None:
    """Decode's Release arrives as something else."""
    through(run, Fault(Deed.GARBLE, (Release,)))


@BOOK.case("receive_verified", prefill={"lease_expired": 1})
def junk_at_the_release(run: Run) -> None:
    """Bytes that are no frame arrive instead of decode's Release."""
    through(run, Fault(Deed.JUNK, (Release,)))


@BOOK.case("receive_verified", prefill={"lease_released": 1})
def renewals_doubled(run: Run) -> None:
    """Renewals and their answers arrive twice, while a read takes longer than the lease would without them."""
    question = run.bed.question(seed=21)
    forwarder = run.forwarder(Fault(Deed.DUPLICATE, (Renew, Renewed)))
    with run.held(Stage.DURING_READ, question, forwarder.redirect(run.bed.hand_off(question))):
        # Three renewals in each lease, and the answer to each.
        run.must(forwarder.wait_done(10, INJECTION_SECONDS), "there were no renewals")


@BOOK.at_stages({stage: ["receive_verified"] for stage in (Stage.BEFORE_READ, Stage.DURING_READ, Stage.BEFORE_WORD)})
def cut(run: Run, stage: Stage) -> None:
    """The side channel's connection is reset while a read is held: the read needs it not."""
    question = run.bed.question(seed=22)
    forwarder = run.forwarder()
    with run.held(stage, question, forwarder.redirect(run.bed.hand_off(question))):
        run.must(forwarder.num_connections > 0, "there was no connection to reset")
        forwarder.cut()
