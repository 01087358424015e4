"""Strangers on real sockets: what they send to a listening engine, and what they answer to one that asks them."""

import os
import socket
from collections import Counter
from contextlib import ExitStack, closing, suppress
from random import Random

import pytest
import zmq

from pd_transfer.core.messages import (
    Hello,
    Malformed,
    Refused,
    Release,
    Released,
    Renew,
    Renewed,
    Reply,
    decode,
    encode,
)
from pd_transfer.core.outcomes import Outcome
from pd_transfer.core.params import Address, LeaseId
from pd_transfer.sidechannel.curve import new_client_keys, new_server_keys
from pd_transfer.sidechannel.zmq import ZmqSideChannel
from tests.faults.fuzz_inputs import Payloads
from tests.runtime.builders import engine, eventually, hybrid_layout
from tests.runtime.engine_bed import NUM_TOKENS, Clock, Engine, make_decode_side, make_prefill_side

LOCAL = "127.0.0.1"
NUM_MESSAGES, NUM_ANSWERS, BATCH = 6000, 3000, 50
LAYOUT = hybrid_layout(16)
RAW = (
    b"",
    b"\0",
    b"GET /v1/models HTTP/1.1\r\nHost: prefill\r\n\r\n",
    b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03",
    b"\xff\0\0\0\0\0\0\0\0\x7f\x03",
    b"\xff\0\0\0\0\0\0\0\0\x7f\x03\0NULL".ljust(64, b"\0"),
    b"\xff\0\0\0\0\0\0\0\0\x7f\x03\0NULL".ljust(64, b"\0") + b"\x06" + b"\xff" * 8,
    b"\xff\0\0\0\0\0\0\0\0\x7f\x03\0CURVE".ljust(64, b"\0") + b"\x04\xc8\x05HELLO" + b"\1" * 194,
)
"""What is not ZMTP, or stops in the middle of it; some of these connections stay open without another word."""


@pytest.fixture
def opened():
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def prefill(opened):
    """A listening engine, and its address."""
    endpoint = ZmqSideChannel(Address(LOCAL, 0))
    address = Address(LOCAL, endpoint.bound_port)
    serving = Engine(make_prefill_side(engine(LAYOUT), address), None, endpoint, Clock())
    opened.callback(serving.runtime.close)
    return serving, address


@pytest.fixture
def decoder(opened):
    asking = Engine(None, make_decode_side(engine(LAYOUT, "decode", "boot-d")), ZmqSideChannel(), Clock())
    opened.callback(asking.runtime.close)
    return asking


@pytest.fixture
def stranger(opened):
    """Makes sockets of somebody else's."""
    context = zmq.Context()
    opened.callback(context.destroy, linger=0)

    def open_socket(kind):
        made = opened.enter_context(closing(context.socket(kind)))
        for option in (zmq.SNDHWM, zmq.RCVHWM, zmq.LINGER):
            made.setsockopt(option, 0)
        made.setsockopt(zmq.RCVTIMEO, 30_000)
        return made

    return open_socket


def samples(prefill_engine):
    with prefill_engine.runtime.prefill() as (half, now):
        welcome = half.answer(Hello(engine(LAYOUT, "decode", "boot-d")), now)
        half.outcomes.clear()
    return welcome


def expect_a_transfer(prefill, decoder):
    """A valid handshake succeeds, and a valid grant is worth its tokens."""
    serving, address = prefill
    params = serving.hand_off("valid")
    decoder.greet(address)
    decoder.arrive("valid", params)
    assert decoder.found("valid") == NUM_TOKENS
    decoder.end("valid")
    eventually("the release", lambda: serving.collect().levels["leases"] == 0 or serving.retire_leases())


def test_what_strangers_send(opened, prefill, decoder, stranger):
    serving, address = prefill
    random = Random(1)
    welcome = samples(serving)
    leases = (LeaseId("nobody's"), LeaseId("x"))
    payloads = Payloads(random, (Hello(welcome.engine), Renew(leases), Release(leases), welcome, Refused("no")))
    dealer = stranger(zmq.DEALER)
    dealer.connect(f"tcp://{address}")
    num_descriptors_before = len(os.listdir("/proc/self/fd"))
    answered, wrong_frames = [], 0
    with ExitStack() as half_open:
        for batch in range(NUM_MESSAGES // BATCH):
            connection = half_open.enter_context(socket.create_connection(address))
            with suppress(ConnectionError):
                connection.sendall(RAW[batch % len(RAW)] or random.randbytes(300))
            for _ in range(BATCH):
                frames = [payloads.take()] * (1 if random.random() < 0.9 else random.randrange(2, 6))
                wrong_frames += len(frames) > 1
                dealer.send_multipart(frames)
            answered += answers_until(dealer, LeaseId(f"the end of batch {batch}"))
    serving.collect()
    outcomes = serving.outcomes
    assert outcomes[Outcome.INTERNAL_ERROR] == 0
    assert outcomes[Outcome.MESSAGE_DROPPED] == wrong_frames > 0
    assert outcomes[Outcome.HELLO_WELCOMED] == answered.count("Welcome") > 0
    assert outcomes[Outcome.HELLO_REFUSED] + outcomes[Outcome.MESSAGE_MALFORMED] >= answered.count("Refused") > 0
    assert outcomes.total() <= NUM_MESSAGES
    expect_a_transfer(prefill, decoder)
    eventually("the strangers' connections are closed", lambda: few_descriptors(num_descriptors_before))


def few_descriptors(before):
    """The valid peer's connection is there now: a socket at each end, and what watches them."""
    return len(os.listdir("/proc/self/fd")) <= before + 8


def answers_until(dealer, last_lease):
    """The types of the answers that came, up to the answer to a last, valid message."""
    dealer.send(encode(Renew((last_lease,))))
    kinds = []
    while True:
        reply = decode(dealer.recv())
        assert isinstance(reply, Reply)
        if isinstance(reply, Renewed) and reply.gone == (last_lease,):
            return kinds
        kinds.append(type(reply).__name__)


def test_what_strangers_answer(prefill, decoder, stranger):
    serving, _ = prefill
    random = Random(2)
    welcome = samples(serving)
    lies = (Renewed((LeaseId("x"),)), Released((LeaseId("x"),)), Renew((LeaseId("x"),)), Hello(welcome.engine))
    payloads = Payloads(random, (welcome, welcome, Refused("no\nway"), *lies))
    expected = Counter()
    for _ in range(NUM_ANSWERS // BATCH):
        router = stranger(zmq.ROUTER)
        address = Address(LOCAL, router.bind_to_random_port(f"tcp://{LOCAL}"))
        decoder.greet(address)
        origin, greeting = router.recv_multipart()
        assert isinstance(decode(greeting), Hello)
        for payload in [*(payloads.take() for _ in range(BATCH)), b"the last one"]:
            expected[Outcome.MESSAGE_MALFORMED] += isinstance(decode(payload), Malformed)
            router.send_multipart([origin, payload])
            if random.random() < 0.1:
                expected[Outcome.MESSAGE_DROPPED] += 1
                router.send_multipart([origin, payload, payload])
        eventually("every answer is counted", lambda: counts(decoder) == expected)
        router.close()
    assert decoder.outcomes[Outcome.INTERNAL_ERROR] == 0
    expect_a_transfer(prefill, decoder)


def counts(decoder):
    decoder.collect()
    return Counter({kind: decoder.outcomes[kind] for kind in (Outcome.MESSAGE_MALFORMED, Outcome.MESSAGE_DROPPED)})


NOT_KNOWN = ("no keys", "keys of another deployment", "a key that is not listed")


@pytest.mark.parametrize("kind", NOT_KNOWN)
def test_nothing_that_strangers_send_reaches_an_engine_with_keys(opened, stranger, kind):
    keys, other = new_server_keys("decode"), new_server_keys("other")
    endpoint = ZmqSideChannel(Address(LOCAL, 0), keys)
    address = Address(LOCAL, endpoint.bound_port)
    serving = Engine(make_prefill_side(engine(LAYOUT), address), None, endpoint, Clock())
    opened.callback(serving.runtime.close)
    hello = Hello(engine(LAYOUT, "decode", "boot-d"))
    payloads = Payloads(Random(3), (hello, Renew((LeaseId("x"),)), Release((LeaseId("x"),))))
    dealer = stranger(zmq.DEALER)
    if kind != "no keys":
        shown = new_client_keys(other if kind == "keys of another deployment" else keys)
        dealer.setsockopt_string(zmq.CURVE_SERVERKEY, shown.server_public)
        dealer.setsockopt_string(zmq.CURVE_PUBLICKEY, shown.client_public)
        dealer.setsockopt_string(zmq.CURVE_SECRETKEY, shown.client_secret)
    # From another address than the honest engine's: that one may be shut out for a while.
    dealer.connect(f"tcp://127.0.0.2:0;{address}")
    for payload in (encode(hello), *(payloads.take() for _ in range(1000))):
        with suppress(zmq.Again):  # once it is refused, libzmq has nowhere to send to
            dealer.send(payload, zmq.NOBLOCK)
    eventually("the stranger is refused", lambda: serving.collect() and serving.outcomes[Outcome.HANDSHAKE_REFUSED])
    known = Engine(None, make_decode_side(engine(LAYOUT, "decode", "boot-d")), ZmqSideChannel(keys=keys), Clock())
    opened.callback(known.runtime.close)
    expect_a_transfer((serving, address), known)
    serving.collect()
    heard = Counter({outcome: count for outcome, count in serving.outcomes.items() if count})
    del heard[Outcome.HANDSHAKE_REFUSED]
    # The known engine's, and nothing else.
    assert heard == {Outcome.HELLO_WELCOMED: 1, Outcome.LEASE_OPENED: 1, Outcome.LEASE_RELEASED: 1}
    assert not dealer.poll(0)
