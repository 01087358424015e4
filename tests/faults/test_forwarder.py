"""The forwarder does to the side channel's messages what it is told, and to nothing else."""

import threading
from collections.abc import Iterator

import pytest

from pd_transfer.core.messages import Malformed, Release, Released, Renew, Renewed, decode, encode
from pd_transfer.core.params import Address, LeaseId
from pd_transfer.sidechannel.base import ConnectionLost, ReplyReceived, RequestReceived
from pd_transfer.sidechannel.zmq import ZmqSideChannel
from tests.faults.forwarder import Deed, Fault, Forwarder

SECONDS = 5.0
RENEW, RELEASE = Renew((LeaseId("a"),)), Release((LeaseId("a"),))


class Prefill:
    """A side channel that answers, and remembers what it was asked."""

    def __init__(self) -> None:
        self.channel = ZmqSideChannel(Address("127.0.0.1", 0))
        self.heard: list[object] = []
        self.closing = False
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self) -> None:
        while not self.closing:
            for received in self.channel.poll(None):
                assert isinstance(received, RequestReceived)
                message = decode(received.payload)
                self.heard.append(message)
                reply = Renewed(()) if isinstance(message, Renew) else Released(())
                self.channel.send_reply(received.origin, encode(reply))

    def close(self) -> None:
        self.closing = True
        self.channel.wake()
        self.thread.join()
        self.channel.close()


@pytest.fixture
def prefill() -> Iterator[Prefill]:
    side = Prefill()
    yield side
    side.close()


@pytest.fixture
def forwarder(prefill: Prefill) -> Iterator[Forwarder]:
    with Forwarder(("127.0.0.1", prefill.channel.bound_port)) as forwarder:
        yield forwarder


class Decode:
    """Asks through the forwarder."""

    def __init__(self, forwarder: Forwarder) -> None:
        self.channel = ZmqSideChannel()
        self.address = Address("127.0.0.1", forwarder.port)

    def ask(self, *messages: Renew | Release) -> None:
        for message in messages:
            self.channel.send_request(self.address, encode(message))

    def hear(self, count: int = 1, seconds: float = SECONDS) -> list[object]:
        heard: list[object] = []
        while len(heard) < count and (received := self.channel.poll(seconds)):
            heard += [decode(r.payload) if isinstance(r, ReplyReceived) else type(r) for r in received]
        return heard


@pytest.fixture
def decode_side(forwarder: Forwarder) -> Iterator[Decode]:
    side = Decode(forwarder)
    yield side
    side.channel.close()


def test_everything_passes_when_nothing_is_to_be_done(prefill, forwarder, decode_side):
    decode_side.ask(RENEW, RELEASE)
    assert decode_side.hear(2) == [Renewed(()), Released(())]
    assert prefill.heard == [RENEW, RELEASE]
    assert forwarder.num_done == 0


def test_only_the_kind_that_is_meant_is_dropped(prefill, forwarder, decode_side):
    forwarder.set_fault(Fault(Deed.DROP, (Release,)))
    decode_side.ask(RELEASE, RENEW)
    assert decode_side.hear() == [Renewed(())]
    assert prefill.heard == [RENEW]
    assert forwarder.num_done == 1


def test_replies_can_be_meant(forwarder, decode_side):
    forwarder.set_fault(Fault(Deed.DROP, (Renewed,)))
    decode_side.ask(RENEW, RELEASE)
    assert decode_side.hear() == [Released(())]


def test_a_fault_ends_after_its_times(prefill, forwarder, decode_side):
    forwarder.set_fault(Fault(Deed.DROP, (Release,), times=1))
    decode_side.ask(RELEASE, RELEASE)
    assert decode_side.hear() == [Released(())]
    assert prefill.heard == [RELEASE]


def test_duplicates(prefill, forwarder, decode_side):
    forwarder.set_fault(Fault(Deed.DUPLICATE, (Release, Released)))
    decode_side.ask(RELEASE)
    assert decode_side.hear(4) == [Released(())] * 4
    assert prefill.heard == [RELEASE, RELEASE]


def test_garbled_messages_arrive_as_malformed_ones_and_the_connection_lives(prefill, forwarder, decode_side):
    forwarder.set_fault(Fault(Deed.GARBLE, (Release,), times=1))
    decode_side.ask(RELEASE, RENEW)
    assert decode_side.hear(2) == [Released(()), Renewed(())]
    assert isinstance(prefill.heard[0], Malformed)


@pytest.mark.parametrize("deed", [Deed.CUT, Deed.JUNK])
def test_the_connection_breaks_and_the_next_one_is_good(prefill, forwarder, decode_side, deed):
    forwarder.set_fault(Fault(deed, (Release,), times=1))
    decode_side.ask(RENEW)
    assert decode_side.hear() == [Renewed(())]
    decode_side.ask(RELEASE)
    assert decode_side.hear() == [ConnectionLost]
    decode_side.ask(RENEW)
    assert decode_side.hear() == [Renewed(())]
    # Some of the junk may look like a message.
    assert [message for message in prefill.heard if not isinstance(message, Malformed)] == [RENEW, RENEW]


def test_a_cut_resets_what_is_open(forwarder, decode_side):
    decode_side.ask(RENEW)
    assert decode_side.hear() == [Renewed(())]
    forwarder.cut()
    assert decode_side.hear() == [ConnectionLost]


def test_silence(prefill, forwarder, decode_side):
    forwarder.set_fault(Fault(Deed.DROP))
    decode_side.ask(RENEW)
    assert forwarder.wait_done(1, SECONDS)
    assert decode_side.hear(seconds=0.1) == []
    assert prefill.heard == []


def test_junk_instead_of_a_greeting(prefill, forwarder, decode_side):
    forwarder.set_fault(Fault(Deed.JUNK))
    decode_side.ask(RENEW)
    assert forwarder.wait_done(2, SECONDS)
    assert decode_side.hear(seconds=0.1) == []
    assert prefill.heard == []


def test_a_delay_keeps_the_order(prefill, forwarder, decode_side):
    forwarder.set_fault(Fault(Deed.DELAY, (Release,), seconds=0.05))
    decode_side.ask(RELEASE, RENEW)
    assert decode_side.hear(2) == [Released(()), Renewed(())]
    assert prefill.heard == [RELEASE, RENEW]


def test_nobody_behind_it(prefill):
    port = prefill.channel.bound_port
    prefill.close()
    with Forwarder(("127.0.0.1", port)) as forwarder:
        side = Decode(forwarder)
        side.ask(RENEW)
        assert side.hear(seconds=0.1) == []
        side.channel.close()


def test_params_are_redirected():
    with Forwarder(("127.0.0.1", 1)) as forwarder:
        params = {"remote_host": "10.0.0.1", "remote_port": 7, "grant": "x"}
        assert forwarder.redirect(params) == {"remote_host": "127.0.0.1", "remote_port": forwarder.port, "grant": "x"}
