"""What only ZeroMQ can get wrong: junk on the port, foreign senders, silent peers, addresses."""

import errno
import os
import random
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

import pytest

from pd_transfer.core.params import Address
from pd_transfer.errors import SideChannelError
from pd_transfer.sidechannel.base import MAX_MESSAGE_BYTES, ConnectionLost, Received, ReplyReceived
from tests.contracts.sidechannel_beds import address_of, exchange, other_process, receive, receive_requests, until

pytest.importorskip("zmq")

import zmq

from pd_transfer.sidechannel.dealers import num_places
from pd_transfer.sidechannel.zmq import ZmqSideChannel

LOCAL = Address("127.0.0.1", 0)


@pytest.fixture
def opened() -> Iterator[Callable[..., ZmqSideChannel]]:
    """Opens endpoints and closes them at the end."""
    with ExitStack() as stack:

        def open_endpoint(
            bind: Address | None = None,
            heartbeat_seconds: float = 5.0,
            max_peers: int | None = None,
            reserved: Sequence[Address] = (),
        ) -> ZmqSideChannel:
            endpoint = ZmqSideChannel(bind, None, heartbeat_seconds, max_peers, reserved)
            stack.callback(endpoint.close)
            return endpoint

        yield open_endpoint


@pytest.fixture
def foreign() -> Iterator[Callable[[int], zmq.Socket[bytes]]]:
    """Makes plain ZeroMQ sockets: peers that are not ours."""
    with zmq.Context() as context:
        made = []

        def make(kind: int) -> zmq.Socket[bytes]:
            made.append(context.socket(kind))
            made[-1].setsockopt(zmq.LINGER, 1000)
            return made[-1]

        yield make
        for each in made:
            each.close()


def local(server: ZmqSideChannel) -> Address:
    return address_of(server, LOCAL.host)


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@contextmanager
def silent() -> Iterator[tuple[socket.socket, Address]]:
    """Somebody who accepts connections and says nothing, as what a client names may."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(30.0)
        yield listener, Address("127.0.0.1", listener.getsockname()[1])


def is_open(connection: socket.socket) -> bool:
    """Whether a connection's other end has not closed it."""
    connection.setblocking(False)
    with suppress(BlockingIOError, ConnectionResetError):
        while connection.recv(4096):
            pass
        return False
    with suppress(BrokenPipeError, ConnectionResetError):
        return connection.send(b"\xff") == 1
    return False


def poll_until(endpoint: ZmqSideChannel, is_done: Callable[[], bool]) -> list[Received]:
    received: list[Received] = []

    def step() -> bool:
        received.extend(endpoint.poll(0.01))
        return is_done()

    until(step)
    return received


class TestStrangers:
    @pytest.mark.parametrize(
        "junk",
        [
            b"",
            b"\0",
            b"GET / HTTP/1.1\r\nHost: prefill\r\n\r\n",
            random.Random(0).randbytes(100_000),
            b"\xff\0\0\0\0\0\0\0\0\x7f\x03",
            # An empty routing id and a message in ZMTP 1, which has no greeting.
            b"\x01\0\x06\0hello",
            # A whole greeting, then a frame that claims 2**62 bytes.
            b"\xff\0\0\0\0\0\0\0\0\x7f\x03\0NULL".ljust(64, b"\0") + b"\x06" + (2**62).to_bytes(8, "big"),
            # A greeting and a READY of a socket type that cannot talk to a ROUTER.
            b"\xff\0\0\0\0\0\0\0\0\x7f\x03\0NULL".ljust(64, b"\0") + b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x03PUB",
        ],
        ids=["nothing", "one byte", "http", "random", "half a greeting", "zmtp 1", "endless frame", "wrong type"],
    )
    def test_raw_bytes(self, opened: Callable[..., ZmqSideChannel], junk: bytes) -> None:
        server, asker = opened(LOCAL), opened()
        with socket.create_connection(("127.0.0.1", server.bound_port)) as stranger:
            with suppress(ConnectionError):  # the server may already have hung up
                stranger.sendall(junk)
            exchange(asker, server, local(server))
        exchange(opened(), server, local(server))

    @pytest.mark.parametrize("num_frames", [2, 3, 1000])
    def test_wrong_number_of_frames(
        self,
        opened: Callable[..., ZmqSideChannel],
        foreign: Callable[[int], zmq.Socket[bytes]],
        num_frames: int,
    ) -> None:
        server = opened(LOCAL)
        dealer = foreign(zmq.DEALER)
        dealer.connect(f"tcp://127.0.0.1:{server.bound_port}")
        dealer.send_multipart([b"x"] * num_frames)
        assert poll_until(server, lambda: server.num_dropped == 1) == []
        dealer.send(b"now a good one")
        (request,) = receive_requests(server)
        server.send_reply(request.origin, b"welcome")
        assert dealer.recv() == b"welcome"

    def test_reply_of_several_frames_is_dropped(
        self, opened: Callable[..., ZmqSideChannel], foreign: Callable[[int], zmq.Socket[bytes]]
    ) -> None:
        router, asker = foreign(zmq.ROUTER), opened()
        port = router.bind_to_random_port("tcp://127.0.0.1")
        asker.send_request(Address("127.0.0.1", port), b"hello")
        origin, payload = router.recv_multipart()
        router.send_multipart([origin, b"too", b"many"])
        assert poll_until(asker, lambda: asker.num_dropped == 1) == []
        router.send_multipart([origin, payload])
        assert receive(asker) == [ReplyReceived(Address("127.0.0.1", port), b"hello")]

    def test_too_long_request_costs_its_sender_the_connection(
        self, opened: Callable[..., ZmqSideChannel], foreign: Callable[[int], zmq.Socket[bytes]]
    ) -> None:
        server, asker = opened(LOCAL), opened()
        dealer = foreign(zmq.DEALER)
        monitor = dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        dealer.connect(f"tcp://127.0.0.1:{server.bound_port}")
        dealer.send(bytes(MAX_MESSAGE_BYTES + 1))
        assert monitor.poll(30_000)
        monitor.close()
        exchange(asker, server, local(server))

    def test_too_long_reply_costs_its_sender_the_connection(
        self, opened: Callable[..., ZmqSideChannel], foreign: Callable[[int], zmq.Socket[bytes]]
    ) -> None:
        router, asker = foreign(zmq.ROUTER), opened()
        address = Address("127.0.0.1", router.bind_to_random_port("tcp://127.0.0.1"))
        asker.send_request(address, b"hello")
        origin, _ = router.recv_multipart()
        router.send_multipart([origin, bytes(MAX_MESSAGE_BYTES + 1)])
        assert receive(asker) == [ConnectionLost(address)]

    def test_a_stolen_routing_id_gets_no_replies(
        self, opened: Callable[..., ZmqSideChannel], foreign: Callable[[int], zmq.Socket[bytes]]
    ) -> None:
        server = opened(LOCAL)
        owner, thief = foreign(zmq.DEALER), foreign(zmq.DEALER)
        for dealer in (owner, thief):
            dealer.setsockopt(zmq.ROUTING_ID, b"same")
        owner.connect(f"tcp://127.0.0.1:{server.bound_port}")
        owner.send(b"hello")
        (request,) = receive_requests(server)
        thief.connect(f"tcp://127.0.0.1:{server.bound_port}")
        thief.send(b"me too")
        assert server.poll(0.3) == []
        server.send_reply(request.origin, b"welcome")
        assert owner.recv() == b"welcome"
        assert not thief.poll(100)

    def test_a_flood_arrives_in_several_polls(self, opened: Callable[..., ZmqSideChannel]) -> None:
        server, asker = opened(LOCAL), opened()
        for number in range(1000):
            asker.send_request(local(server), b"%d" % number)
        assert [request.payload for request in receive_requests(server, 1000)] == [b"%d" % n for n in range(1000)]


class TestPeersThatFail:
    @pytest.mark.parametrize("hangs_up", [True, False])
    def test_who_is_no_side_channel_is_no_loss(self, opened: Callable[..., ZmqSideChannel], hangs_up: bool) -> None:
        asker, server = opened(), opened(LOCAL)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            address = Address("127.0.0.1", listener.getsockname()[1])
            asker.send_request(address, b"hello")
            stranger, _ = listener.accept()
            with stranger:
                if not hangs_up:
                    stranger.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n".ljust(200))
            exchange(asker, server, local(server))
            assert asker.poll(0.3) == []
        later = opened(address)

        def request_arrived() -> list[Received]:
            asker.send_request(address, b"hello")
            asker.poll(0)
            return later.poll(0.05)

        until(request_arrived)

    @pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGSTOP])
    def test_dead_or_frozen_process_is_lost(
        self, opened: Callable[..., ZmqSideChannel], signal_number: signal.Signals
    ) -> None:
        asker, server = opened(heartbeat_seconds=0.2), opened(LOCAL)
        with other_process() as (process, address):
            asker.send_request(address, b"hello")
            assert receive(asker) == [ReplyReceived(address, b"hello")]
            process.send_signal(signal_number)
            asker.send_request(address, b"are you there?")
            # Meanwhile another peer is served; the loss may be noticed before or after.
            asker.send_request(local(server), b"hello")
            (request,) = receive_requests(server)
            server.send_reply(request.origin, b"welcome")
            assert set(receive(asker, 2)) == {
                ReplyReceived(local(server), b"welcome"),
                ConnectionLost(address),
            }

    def test_frozen_asker_is_forgotten(self, opened: Callable[..., ZmqSideChannel]) -> None:
        server = opened(LOCAL, heartbeat_seconds=0.2)
        with other_process(local(server)) as (process, _):
            (request,) = receive_requests(server)
            process.send_signal(signal.SIGSTOP)

            def is_dropped() -> bool:
                server.send_reply(request.origin, b"welcome")
                server.poll(0.05)
                return server.num_dropped > 0

            until(is_dropped)

    def test_heartbeats_keep_a_silent_connection(self, opened: Callable[..., ZmqSideChannel]) -> None:
        asker, server = opened(heartbeat_seconds=0.1), opened(LOCAL, heartbeat_seconds=0.1)
        exchange(asker, server, local(server))
        assert asker.poll(1.0) == []
        exchange(asker, server, local(server))

    def test_a_full_queue_drops(self, opened: Callable[..., ZmqSideChannel]) -> None:
        server, asker = opened(LOCAL), opened()
        exchange(asker, server, local(server))
        asker.send_request(local(server), b"hello")
        (request,) = receive_requests(server)

        def is_full() -> bool:
            # The asker does not read: its queue, the kernel's buffers and then our own queue fill up.
            server.send_reply(request.origin, bytes(1 << 16))
            return server.num_dropped > 0

        until(lambda: any(is_full() for _ in range(1000)))
        exchange(opened(), server, local(server))


class TestAddresses:
    def test_ipv6(self, opened: Callable[..., ZmqSideChannel]) -> None:
        try:
            server = opened(Address("::1", 0))
        except SideChannelError:
            pytest.skip("no IPv6 here")
        exchange(opened(), server, address_of(server, "::1"))

    def test_all_interfaces(self, opened: Callable[..., ZmqSideChannel]) -> None:
        server = opened(Address("0.0.0.0", 0))
        exchange(opened(), server, local(server))

    def test_names(self, opened: Callable[..., ZmqSideChannel]) -> None:
        server = opened(LOCAL)
        exchange(opened(), server, address_of(server, "localhost"))

    @pytest.mark.parametrize(
        "address",
        [
            Address("", 5600),
            Address("a b", 5600),
            Address("*", 5600),
            Address("127.0.0.1;127.0.0.1", 5600),
            Address("prefill/..", 5600),
            Address("pr\u00e9fill", 5600),
            Address("prefill\0", 5600),
            Address("[::1]", 5600),
            Address("::1%", 5600),
            Address("::::", 5600),
            Address("-", 5600),
            Address("127.0.0.1", 0),
            Address("127.0.0.1", -1),
            Address("127.0.0.1", 65536),
        ],
        ids=str,
    )
    def test_nonsense_is_never_asked(self, opened: Callable[..., ZmqSideChannel], address: Address) -> None:
        asker, server = opened(), opened(LOCAL)
        asker.send_request(address, b"hello")
        assert asker.num_dropped == 1
        asker.disconnect(address)
        exchange(asker, server, local(server))

    def test_number_of_peers_is_bounded(self, opened: Callable[..., ZmqSideChannel]) -> None:
        servers, asker = [opened(LOCAL) for _ in range(3)], opened(max_peers=2)
        addresses = [local(server) for server in servers]
        for server, address in zip(servers[:2], addresses, strict=False):
            exchange(asker, server, address)
        asker.send_request(addresses[2], b"hello")
        assert asker.num_dropped == 1
        asker.disconnect(addresses[0])
        exchange(asker, servers[2], addresses[2])

    def test_who_never_answered_makes_room(
        self, opened: Callable[..., ZmqSideChannel], caplog: pytest.LogCaptureFixture
    ) -> None:
        known, server, asker = opened(LOCAL), opened(LOCAL), opened(max_peers=2)
        exchange(asker, known, local(known))
        with silent() as (listener, address):
            asker.send_request(address, b"hello")
            stranger, _ = listener.accept()
            with stranger:
                assert not caplog.messages
                exchange(asker, server, local(server))
                until(lambda: not is_open(stranger))
        exchange(asker, known, local(known))
        assert asker.num_dropped == 0
        asker.send_request(LOCAL._replace(port=1), b"one more")
        assert asker.num_dropped == 1, "who answered stays"
        (line,) = caplog.messages
        assert "more than 2 addresses" in line

    def test_reserved_addresses_have_places_of_their_own(self, opened: Callable[..., ZmqSideChannel]) -> None:
        with silent() as (slow, slow_address), silent() as (listener, address):
            known, late = opened(LOCAL), opened(LOCAL)
            asker = opened(max_peers=1, reserved=[slow_address, local(late)])
            asker.send_request(slow_address, b"hello")
            asker.send_request(address, b"hello")
            (starting, _), (stranger, _) = slow.accept(), listener.accept()
            with starting, stranger:
                exchange(asker, known, local(known))
                until(lambda: not is_open(stranger))
                assert is_open(starting), "it has not answered yet, and keeps its place"
            exchange(asker, late, local(late))
            exchange(asker, known, local(known))

    def test_all_places_together_leave_half_of_the_usual_descriptors(
        self, opened: Callable[..., ZmqSideChannel]
    ) -> None:
        max_peers = num_places(1024)
        with socket.create_server(("", 0), backlog=2 * max_peers) as listener:
            asker, port = opened(max_peers=max_peers), listener.getsockname()[1]
            before = num_descriptors()
            for number in range(2 * max_peers):
                asker.send_request(Address(f"127.0.{number // 100 + 1}.{number % 100 + 1}", port), b"hello")
            until(lambda: 4 * (max_peers - 1) <= num_descriptors() - before <= 1024 // 2)

    @pytest.mark.parametrize(
        ("file_limit", "expected"), [(64, 16), (1024, 128), (20_000, 2500), (65_535, 4096), (-1, 4096)]
    )
    def test_places_grow_with_the_limit_of_open_files(self, file_limit: int, expected: int) -> None:
        assert num_places(file_limit) == expected

    @pytest.mark.parametrize(
        ("address", "advice"),
        [
            (Address("203.0.113.7", 5600), "no such address.*0.0.0.0"),
            (Address("no-such-interface", 5600), "not an address of this machine.*0.0.0.0"),
            (Address("*", 5600), "not an IP address and a port"),
            (Address("127.0.0.1", 65536), "port from 0 to 65535"),
        ],
        ids=str,
    )
    def test_what_cannot_be_bound(self, address: Address, advice: str) -> None:
        with pytest.raises(SideChannelError, match=f"Cannot listen on .*{advice}") as raised:
            ZmqSideChannel(address)
        assert str(address) in str(raised.value)

    def test_port_that_something_else_uses(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            address = Address("127.0.0.1", listener.getsockname()[1])
            with pytest.raises(SideChannelError, match=f"{address}.* in use.*choose another port") as raised:
                ZmqSideChannel(address)
        assert isinstance(raised.value.__cause__, zmq.ZMQError)
        assert raised.value.__cause__.errno == errno.EADDRINUSE
