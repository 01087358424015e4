"""A keyed ROUTER's door: who is admitted, what strangers see, and what they cost."""

import logging
import os
import re
import select
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from threading import Thread

import pytest

from pd_transfer.core.params import Address
from pd_transfer.errors import SideChannelError
from pd_transfer.sidechannel.base import ConnectionLost, Received
from pd_transfer.sidechannel.strangers import MAX_LINES, MAX_TRIES
from tests.contracts.sidechannel_beds import address_of, exchange, receive_requests, until

pytest.importorskip("zmq")

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from pd_transfer.sidechannel.curve import CurveKeys, new_client_keys, new_server_keys
from pd_transfer.sidechannel.gate import Gate, accepted_at
from pd_transfer.sidechannel.sockets import new_dealer, new_router
from pd_transfer.sidechannel.zmq import ZmqSideChannel

LOCAL = Address("127.0.0.1", 0)
NULL_GREETING = b"\xff\0\0\0\0\0\0\0\0\x7f\x03\0NULL".ljust(64, b"\0")
CURVE_GREETING = b"\xff\0\0\0\0\0\0\0\0\x7f\x03\0CURVE".ljust(64, b"\0")


@pytest.fixture
def opened() -> Iterator[Callable[..., ZmqSideChannel]]:
    """Opens endpoints and closes them at the end."""
    with ExitStack() as stack:

        def open_endpoint(*args: object, **kwargs: object) -> ZmqSideChannel:
            endpoint = ZmqSideChannel(*args, **kwargs)
            stack.callback(endpoint.close)
            return endpoint

        yield open_endpoint


@pytest.fixture(scope="module")
def keys() -> CurveKeys:
    return new_server_keys("prefill")


def local(server: ZmqSideChannel) -> Address:
    return address_of(server, LOCAL.host)


def knock(server: ZmqSideChannel, junk: bytes, source: str = "127.0.0.1") -> socket.socket:
    """A raw connection that has said ``junk``."""
    stranger = socket.create_connection(("127.0.0.1", server.bound_port), 10.0, source_address=(source, 0))
    with suppress(ConnectionError):  # the server may have hung up already
        stranger.sendall(junk)
    return stranger


def polite(server: ZmqSideChannel, source: str) -> socket.socket:
    """A raw connection whose address the server has seen."""
    stranger = knock(server, b"", source)
    assert stranger.recv(1) == b"\xff"
    server.poll(0.0)
    return stranger


def poll_until(server: ZmqSideChannel, is_done: Callable[[], bool]) -> None:
    """Let the server work; nobody may be heard meanwhile."""
    heard: list[Received] = []

    def step() -> bool:
        heard.extend(server.poll(0.01))
        return is_done()

    until(step)
    assert heard == []


class TestWhoMayAsk:
    def test_each_listed_key(self, opened: Callable[..., ZmqSideChannel], keys: CurveKeys) -> None:
        other = new_client_keys(keys)
        clients = keys.clients | {"decode": other.client_public}
        server = opened(LOCAL, msgspec.structs.replace(keys, clients=clients))
        exchange(opened(keys=keys), server, local(server))
        exchange(opened(keys=other), server, local(server))
        assert server.num_refused == 0

    def test_a_key_that_was_removed(self, opened: Callable[..., ZmqSideChannel], keys: CurveKeys) -> None:
        removed = new_client_keys(keys)
        before = opened(LOCAL, msgspec.structs.replace(keys, clients={"decode": removed.client_public}))
        exchange(opened(keys=removed), before, local(before))
        after = opened(LOCAL, keys)
        opened(keys=removed).send_request(asked := local(after), b"hello")
        poll_until(after, lambda: after.num_refused == 1)
        exchange(opened(keys=keys), after, asked)

    def test_an_empty_list_admits_nobody(self, opened: Callable[..., ZmqSideChannel], keys: CurveKeys) -> None:
        server = opened(LOCAL, msgspec.structs.replace(keys, clients={}))
        opened(keys=keys).send_request(local(server), b"hello")
        poll_until(server, lambda: server.num_refused == 1)

    def test_a_refused_asker_sees_no_connection(self, opened: Callable[..., ZmqSideChannel], keys: CurveKeys) -> None:
        server, stranger = opened(LOCAL, keys), opened(keys=new_client_keys(keys))
        stranger.send_request(local(server), b"hello")
        poll_until(server, lambda: server.num_refused == 1)
        assert ConnectionLost(local(server)) not in stranger.poll(0.2)

    def test_a_refused_asker_may_get_keys_and_come_back(
        self, opened: Callable[..., ZmqSideChannel], keys: CurveKeys
    ) -> None:
        server = opened(LOCAL, keys)
        opened().send_request(local(server), b"hello")
        poll_until(server, lambda: server.num_refused == 1)
        exchange(opened(keys=keys), server, local(server))


class TestWhatStrangersSee:
    @pytest.mark.parametrize(
        ("junk", "answer_bytes"),
        [
            (b"GET / HTTP/1.1\r\n\r\n".ljust(100), 64),
            (NULL_GREETING + b"\x04\x1a\x05READY\x0bSocket-Type\0\0\0\x06DEALER" + b"\0\x05hello", 64),
            (CURVE_GREETING + b"\x04\xc8" + b"\x05HELLO".ljust(200, b"\x01"), 64),
        ],
        ids=["http", "no keys", "a HELLO that is not for us"],
    )
    def test_a_greeting_and_nothing_more(
        self, opened: Callable[..., ZmqSideChannel], keys: CurveKeys, junk: bytes, answer_bytes: int
    ) -> None:
        server = opened(LOCAL, keys)
        with knock(server, junk) as stranger:
            poll_until(server, lambda: server.num_refused == 1)
            answer = b""
            with suppress(ConnectionError):
                while part := stranger.recv(4096):
                    answer += part
        assert len(answer) <= answer_bytes

    def test_who_leaves_at_once_is_counted(self, opened: Callable[..., ZmqSideChannel], keys: CurveKeys) -> None:
        server = opened(LOCAL, keys)
        for _ in range(5):
            knock(server, b"").close()
        poll_until(server, lambda: server.num_refused == 5)

    def test_a_good_connection_that_ends_is_no_refusal(
        self, opened: Callable[..., ZmqSideChannel], keys: CurveKeys
    ) -> None:
        server = opened(LOCAL, keys)
        for _ in range(5):
            asker = opened(keys=keys)
            exchange(asker, server, local(server))
            asker.close()
        knock(server, NULL_GREETING).close()
        poll_until(server, lambda: server.num_refused > 0)
        assert server.num_refused == 1


class TestFloods:
    def test_an_engine_goes_on_during_500_bad_attempts(
        self, opened: Callable[..., ZmqSideChannel], keys: CurveKeys
    ) -> None:
        """From the engine's own address, which is never shut out."""
        server, engine = opened(LOCAL, keys), opened(keys=keys)
        exchange(engine, server, local(server))
        for number in range(500):
            knock(server, (NULL_GREETING, CURVE_GREETING, b"GET / HTTP/1.1\r\n\r\n", b"")[number % 4]).close()
            if number % 50 == 0:
                exchange(engine, server, local(server))
        # Libzmq says nothing of what spoke no ZeroMQ at all: the first of those is taken for the engine hanging up.
        poll_until(server, lambda: server.num_refused >= 499)
        exchange(engine, server, local(server))
        exchange(opened(keys=keys), server, local(server))
        assert server.num_dropped == 0

    def test_an_unlisted_key_many_times(self, opened: Callable[..., ZmqSideChannel], keys: CurveKeys) -> None:
        server, engine, stranger = opened(LOCAL, keys), opened(keys=keys), opened(keys=new_client_keys(keys))
        exchange(engine, server, local(server))
        for number in range(100):
            stranger.send_request(local(server), b"hello")
            poll_until(server, lambda refusals=number + 1: server.num_refused >= refusals)
            stranger.disconnect(local(server))
            if number % 10 == 0:
                exchange(engine, server, local(server))
        assert server.num_refused == 100
        exchange(engine, server, local(server))

    def test_an_address_without_an_engine_is_hung_up_on(
        self, opened: Callable[..., ZmqSideChannel], keys: CurveKeys
    ) -> None:
        server, engine = opened(LOCAL, keys), opened(keys=keys)
        with ExitStack() as stack:
            patient = [stack.enter_context(polite(server, "127.0.0.2")) for _ in range(MAX_TRIES)]
            for stranger in patient:
                assert len(stranger.recv(64)) < 64
            shut_out = [stack.enter_context(knock(server, b"", source="127.0.0.2")) for _ in range(3)]
            poll_until(server, lambda: server.num_refused == len(shut_out))
            assert [stranger.recv(64)[64:] for stranger in shut_out] == [b""] * 3
            assert not select.select([*patient], [], [], 0)[0]
            with knock(server, b"", source="127.0.0.3"):
                exchange(engine, server, local(server))
            poll_until(server, lambda: server.num_refused == len(shut_out) + 1)

    def test_a_flood_that_nobody_polls_does_not_block_the_end(
        self, opened: Callable[..., ZmqSideChannel], keys: CurveKeys
    ) -> None:
        server = opened(LOCAL, keys)
        for _ in range(1000):
            knock(server, b"").close()
        closing = Thread(target=server.close, daemon=True)
        closing.start()
        closing.join(20.0)
        assert not closing.is_alive()


class TestADoorThatNobodyKeeps:
    """Libzmq admits every client key when nobody answers for a ROUTER, unless it is told not to."""

    def test_nobody_gets_in(self, keys: CurveKeys) -> None:
        with zmq.Context() as context:
            router, dealer = new_router(context, 5.0, keys), new_dealer(context, 5.0, keys)
            monitor = dealer.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
            with monitor, dealer, router:
                dealer.connect(f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}")
                dealer.send(b"hello")
                assert recv_monitor_message(monitor)["event"] == zmq.EVENT_DISCONNECTED
                assert not router.poll(0)
                dealer.disable_monitor()

    def test_who_is_listed_gets_in_when_somebody_keeps_it(self, keys: CurveKeys) -> None:
        """The control."""
        with zmq.Context() as context:
            router, dealer = new_router(context, 5.0, keys), new_dealer(context, 5.0, keys)
            gate = Gate(context, router, keys.clients.values())
            with dealer:
                dealer.connect(f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}")
                dealer.send(b"hello")

                def is_heard() -> bool:
                    gate.work()
                    return bool(router.poll(10))

                until(is_heard)
                gate.close()
            assert router.closed, "it does not outlive its door"


class TestWhatADescriptorIsByNow:
    """Libzmq names connections by their descriptors, which may be closed and opened anew as anything."""

    def test_a_connection_to_the_port(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            with socket.create_connection(("127.0.0.1", port)) as asker, listener.accept()[0] as accepted:
                found = accepted_at(accepted.fileno(), port)
                assert found is not None
                with found:
                    assert found.getpeername() == asker.getsockname()
                assert accepted_at(accepted.fileno(), port + 1) is None
                assert accepted_at(asker.fileno(), port) is None

    @pytest.mark.parametrize("kind", ["pipe", "unix", "closed"])
    def test_something_else(self, kind: str) -> None:
        first, second = os.pipe() if kind != "unix" else (each.detach() for each in socket.socketpair())
        descriptors = {first, second}
        try:
            if kind == "closed":
                os.close(first)
                descriptors.remove(first)
            before = os.listdir("/proc/self/fd")
            assert accepted_at(first, 5600) is None
            assert os.listdir("/proc/self/fd") == before, "nothing is left open"
        finally:
            for descriptor in descriptors:
                os.close(descriptor)


class TestLogs:
    @pytest.mark.parametrize(
        ("stranger_keys", "reason"),
        [
            (lambda keys: None, "(it has no keys|.* as engines without keys)"),  # either end may hang up first
            (lambda keys: new_server_keys("x"), "its keys are another deployment's"),
            (lambda keys: new_client_keys(keys), "its key .{40} is not listed"),
        ],
        ids=["no keys", "another server key", "not listed"],
    )
    def test_the_reason_is_told(
        self,
        opened: Callable[..., ZmqSideChannel],
        keys: CurveKeys,
        caplog: pytest.LogCaptureFixture,
        stranger_keys: Callable[[CurveKeys], CurveKeys | None],
        reason: str,
    ) -> None:
        server, theirs = opened(LOCAL, keys), stranger_keys(keys)
        with caplog.at_level(logging.INFO, "pd_transfer"):
            for number in range(5):
                opened(keys=theirs).send_request(local(server), b"hello")
                poll_until(server, lambda refusals=number + 1: server.num_refused >= refusals)
        # Some may be gone before their address is looked up, and then share a line of their own.
        assert 1 <= len(caplog.messages) <= 2
        for line in caplog.messages:
            assert re.search(rf"from (127\.0\.0\.1|an address that was gone at once): {reason}", line)

    def test_an_unlisted_key_is_named(
        self, opened: Callable[..., ZmqSideChannel], keys: CurveKeys, caplog: pytest.LogCaptureFixture
    ) -> None:
        server, theirs = opened(LOCAL, keys), new_client_keys(keys)
        opened(keys=theirs).send_request(local(server), b"hello")
        poll_until(server, lambda: server.num_refused == 1)
        (line,) = caplog.messages
        assert f"from 127.0.0.1: its key {theirs.client_public} is not listed; add it with 'pdt keys add'" in line

    def test_one_line_for_an_address(
        self, opened: Callable[..., ZmqSideChannel], keys: CurveKeys, caplog: pytest.LogCaptureFixture
    ) -> None:
        server = opened(LOCAL, keys)
        for number in range(10):
            with polite(server, "127.0.0.2") as stranger:
                stranger.sendall(NULL_GREETING)
                poll_until(server, lambda refusals=number + 1: server.num_refused >= refusals)
        (line,) = caplog.messages
        assert "from 127.0.0.2: it has no keys" in line

    def test_many_addresses_get_few_lines(
        self, opened: Callable[..., ZmqSideChannel], keys: CurveKeys, caplog: pytest.LogCaptureFixture
    ) -> None:
        server = opened(LOCAL, keys)
        with caplog.at_level(logging.INFO, "pd_transfer"):
            for number in range(2 * MAX_LINES):
                with polite(server, f"127.0.1.{number + 1}") as stranger:
                    stranger.sendall(NULL_GREETING)
                    poll_until(server, lambda refusals=number + 1: server.num_refused >= refusals)
        assert len(caplog.messages) == MAX_LINES

    def test_no_secret_is_logged(
        self, opened: Callable[..., ZmqSideChannel], keys: CurveKeys, caplog: pytest.LogCaptureFixture
    ) -> None:
        unlisted = new_client_keys(keys)
        with caplog.at_level(logging.DEBUG):
            server, stranger = opened(LOCAL, keys), opened(keys=unlisted)
            exchange(opened(keys=keys), server, local(server))
            stranger.send_request(local(server), b"hello")
            poll_until(server, lambda: server.num_refused == 1)
        assert unlisted.client_public in caplog.text, "the control: what is logged is seen"
        shown = caplog.text + repr(vars(server)) + repr(server)
        for secret in (keys.client_secret, keys.server_secret, unlisted.client_secret):
            assert secret is not None
            assert secret not in shown


class TestKeysThatCannotWork:
    @pytest.mark.parametrize("malformed", ["", "short", "~" * 40])
    def test_malformed_keys(self, keys: CurveKeys, malformed: str) -> None:
        client = msgspec.structs.replace(keys, server_secret=None)
        with pytest.raises(SideChannelError, match="40 characters of Z85"):
            ZmqSideChannel(keys=msgspec.structs.replace(client, server_public=malformed))
        with pytest.raises(SideChannelError, match="40 characters of Z85"):
            ZmqSideChannel(LOCAL, msgspec.structs.replace(keys, server_secret=malformed))

    def test_serving_needs_the_server_secret(self, keys: CurveKeys) -> None:
        with pytest.raises(SideChannelError, match=r"no server_secret: set key_file to the deployment's prefill\.key"):
            ZmqSideChannel(LOCAL, new_client_keys(keys))

    def test_a_port_in_use_is_told_with_keys_too(self, opened: Callable[..., ZmqSideChannel], keys: CurveKeys) -> None:
        server = opened(LOCAL, keys)
        with pytest.raises(SideChannelError, match="the port is in use"):
            ZmqSideChannel(local(server), keys)
        opened(keys=keys).send_request(local(server), b"hello")
        receive_requests(server)


def test_heartbeats_keep_a_silent_connection(opened: Callable[..., ZmqSideChannel], keys: CurveKeys) -> None:
    asker, server = opened(keys=keys, heartbeat_seconds=0.1), opened(LOCAL, keys, heartbeat_seconds=0.1)
    exchange(asker, server, local(server))
    assert asker.poll(1.0) == []
    exchange(asker, server, local(server))
    assert server.num_refused == 0
