"""What every side channel must do, asked of the fake and of ZeroMQ alike."""

import math
import threading
from collections.abc import Iterator

import pytest

from pd_transfer.errors import SideChannelError
from pd_transfer.sidechannel.base import (
    MAX_MESSAGE_BYTES,
    ConnectionLost,
    Received,
    ReplyReceived,
    RequestReceived,
    SideChannel,
)
from tests.contracts.sidechannel_beds import (
    DEADLINE_SECONDS,
    MemoryBed,
    ZmqBed,
    address_of,
    exchange,
    receive,
    receive_requests,
    until,
)


@pytest.fixture(params=[MemoryBed, ZmqBed], ids=["memory", "zmq"])
def bed(request: pytest.FixtureRequest) -> Iterator[MemoryBed]:
    opened = request.param()
    yield opened
    opened.close()


def polling(endpoint: SideChannel, timeout_seconds: float | None) -> tuple[threading.Thread, list[list[Received]]]:
    """A thread that polls once, and what it got."""
    results: list[list[Received]] = []
    thread = threading.Thread(target=lambda: results.append(endpoint.poll(timeout_seconds)), daemon=True)
    thread.start()
    return thread, results


class TestMessages:
    def test_request_and_reply(self, bed: MemoryBed) -> None:
        server, asker = bed.server(), bed.asker()
        address = address_of(server, bed.HOST)
        for payload in (b"hello", b"", bytes(range(256)) * 4096):
            exchange(asker, server, address, payload)
        assert asker.bound_port is None
        assert (server.num_dropped, asker.num_dropped) == (0, 0)
        assert (server.num_refused, asker.num_refused) == (0, 0)

    def test_longest_message(self, bed: MemoryBed) -> None:
        server, asker = bed.server(), bed.asker()
        asker.send_request(address_of(server, bed.HOST), bytes(MAX_MESSAGE_BYTES))
        (request,) = receive_requests(server)
        server.send_reply(request.origin, bytes(MAX_MESSAGE_BYTES))
        (reply,) = receive(asker)
        assert isinstance(reply, ReplyReceived)
        assert len(request.payload) == len(reply.payload) == MAX_MESSAGE_BYTES

    def test_replies_reach_the_peer_that_asked(self, bed: MemoryBed) -> None:
        server, askers = bed.server(), [bed.asker() for _ in range(3)]
        address = address_of(server, bed.HOST)
        for number, asker in enumerate(askers):
            asker.send_request(address, b"%d" % number)
        requests = receive_requests(server, 3)
        assert len({request.origin for request in requests}) == 3
        for request in reversed(requests):
            server.send_reply(request.origin, request.payload)
        for number, asker in enumerate(askers):
            assert receive(asker) == [ReplyReceived(address, b"%d" % number)]

    def test_one_asker_asks_several_servers(self, bed: MemoryBed) -> None:
        servers, asker = [bed.server() for _ in range(3)], bed.asker()
        addresses = [address_of(server, bed.HOST) for server in servers]
        for address in addresses:
            asker.send_request(address, b"who are you?")
        for server, address in zip(servers, addresses, strict=True):
            (request,) = receive_requests(server)
            server.send_reply(request.origin, str(address).encode())
        replies = receive(asker, 3)
        assert sorted(replies, key=str) == sorted(
            [ReplyReceived(address, str(address).encode()) for address in addresses], key=str
        )

    def test_two_servers_ask_each_other_and_themselves(self, bed: MemoryBed) -> None:
        one, other = bed.server(), bed.server()
        exchange(one, other, address_of(other, bed.HOST))
        exchange(other, one, address_of(one, bed.HOST))
        exchange(one, one, address_of(one, bed.HOST))

    def test_order_per_peer_in_both_directions(self, bed: MemoryBed) -> None:
        server, askers = bed.server(), [bed.asker(), bed.asker()]
        address = address_of(server, bed.HOST)
        sent = [b"%d" % number for number in range(200)]
        for payload in sent:
            for asker in askers:
                asker.send_request(address, payload)
        by_origin: dict[bytes, list[bytes]] = {}
        for request in receive_requests(server, 400):
            by_origin.setdefault(request.origin, []).append(request.payload)
            server.send_reply(request.origin, request.payload)
        assert list(by_origin.values()) == [sent, sent]
        for asker in askers:
            assert receive(asker, 200) == [ReplyReceived(address, payload) for payload in sent]

    @pytest.mark.parametrize("too_long", ["request", "reply"])
    def test_too_long_message_is_dropped_and_the_peers_go_on(self, bed: MemoryBed, too_long: str) -> None:
        server, asker = bed.server(), bed.asker()
        address = address_of(server, bed.HOST)
        exchange(asker, server, address)
        if too_long == "request":
            asker.send_request(address, bytes(MAX_MESSAGE_BYTES + 1))
        else:
            asker.send_request(address, b"all of it")
            (request,) = receive_requests(server)
            server.send_reply(request.origin, bytes(MAX_MESSAGE_BYTES + 1))
        exchange(asker, server, address)
        assert asker.num_dropped + server.num_dropped == 1


class TestWhoIsNotThere:
    def test_reply_to_an_origin_that_is_gone_is_dropped(self, bed: MemoryBed) -> None:
        server, asker = bed.server(), bed.asker()
        address = address_of(server, bed.HOST)
        asker.send_request(address, b"hello")
        (request,) = receive_requests(server)
        asker.close()

        def is_dropped() -> bool:
            server.send_reply(request.origin, b"welcome")
            return server.num_dropped > 0

        until(is_dropped)
        exchange(bed.asker(), server, address)

    @pytest.mark.parametrize("origin", [b"", b"stranger", bytes(300)])
    def test_reply_to_an_origin_that_never_was_is_dropped(self, bed: MemoryBed, origin: bytes) -> None:
        server = bed.server()
        server.send_reply(origin, b"welcome")
        assert server.num_dropped == 1

    def test_reply_from_an_endpoint_that_only_asks_is_dropped(self, bed: MemoryBed) -> None:
        asker = bed.asker()
        asker.send_reply(b"stranger", b"welcome")
        assert asker.num_dropped == 1

    def test_where_nobody_listens_a_later_server_gets_later_messages(self, bed: MemoryBed) -> None:
        gone, asker = bed.server(), bed.asker()
        address = address_of(gone, bed.HOST)
        gone.close()
        for _ in range(10_000):
            asker.send_request(address, b"early")
        assert asker.poll(0.0) == []
        server = bed.server(address.port)

        def request_arrived() -> list[Received]:
            asker.send_request(address, b"late")
            return [got for got in server.poll(0.05) if isinstance(got, RequestReceived) and got.payload == b"late"]

        until(request_arrived)

    def test_a_dead_peer_does_not_delay_another(self, bed: MemoryBed) -> None:
        gone, server, asker = bed.server(), bed.server(), bed.asker()
        dead, address = address_of(gone, bed.HOST), address_of(server, bed.HOST)
        gone.close()
        for number in range(100):
            asker.send_request(dead, b"%d" % number)
            exchange(asker, server, address, b"%d" % number)

    def test_port_in_use(self, bed: MemoryBed) -> None:
        server = bed.server()
        port = server.bound_port
        assert port is not None
        with pytest.raises(SideChannelError, match=rf"{bed.HOST}:{port}.* in use.*choose another port"):
            bed.server(port)
        exchange(bed.asker(), server, address_of(server, bed.HOST))
        server.close()
        assert until(lambda: bed.server(port)).bound_port == port


class TestKeys:
    def test_listed_askers_are_answered(self, bed: MemoryBed) -> None:
        server = bed.keyed_server()
        for _ in range(2):
            exchange(bed.listed(), server, address_of(server, bed.HOST))
        assert server.num_refused == 0

    def test_strangers_are_counted_and_not_heard(self, bed: MemoryBed) -> None:
        server, listed = bed.keyed_server(), bed.listed()
        address = address_of(server, bed.HOST)
        for number, stranger in enumerate(bed.strangers()):
            stranger.send_request(address, b"hello")
            heard: list[Received] = []

            def is_refused(refusals: int = number + 1, heard: list[Received] = heard) -> bool:
                heard += server.poll(0.01)
                return server.num_refused >= refusals

            until(is_refused)
            assert heard == stranger.poll(0.0) == []
            exchange(listed, server, address)
        assert server.num_dropped == 0

    def test_a_keyed_asker_does_not_talk_to_a_server_without_keys(self, bed: MemoryBed) -> None:
        server, asker = bed.server(), bed.listed()
        address = address_of(server, bed.HOST)
        asker.send_request(address, b"hello")
        exchange(bed.asker(), server, address)
        assert asker.poll(0.1) == []


class TestConnections:
    def test_disconnect_and_reconnect(self, bed: MemoryBed) -> None:
        server, asker = bed.server(), bed.asker()
        address = address_of(server, bed.HOST)
        asker.disconnect(address)
        for _ in range(3):
            exchange(asker, server, address)
            asker.disconnect(address)
        assert asker.poll(0.05) == []

    @pytest.mark.parametrize("ending", ["disconnect", "close"])
    def test_last_words_arrive(self, bed: MemoryBed, ending: str) -> None:
        server = bed.server()
        address = address_of(server, bed.HOST)

        def last_words_arrive() -> bool:
            asker = bed.asker()
            asker.send_request(address, b"release")
            if ending == "disconnect":
                asker.disconnect(address)
            else:
                asker.close()
            return bool(server.poll(0.2))

        # Some may not: a busy machine may take longer to connect than a closing endpoint waits.
        until(lambda: sum(last_words_arrive() for _ in range(10)) >= 8)

    def test_replies_to_a_disconnected_asker_do_not_arrive(self, bed: MemoryBed) -> None:
        server, asker = bed.server(), bed.asker()
        address = address_of(server, bed.HOST)
        asker.send_request(address, b"old")
        (old,) = receive_requests(server)
        asker.disconnect(address)
        asker.send_request(address, b"new")
        (new,) = receive_requests(server)
        server.send_reply(old.origin, b"old")
        server.send_reply(new.origin, b"new")
        assert receive(asker) == [ReplyReceived(address, b"new")]

    def test_killed_server_is_reported_once_after_its_last_reply(self, bed: MemoryBed) -> None:
        server, asker = bed.server(), bed.asker()
        address = address_of(server, bed.HOST)
        exchange(asker, server, address)
        asker.send_request(address, b"and?")
        (request,) = receive_requests(server)
        # Long enough to be still on their way when the server closes.
        goodbyes = [b"%d" % number * (1 << 18) for number in range(10)]
        for goodbye in goodbyes:
            server.send_reply(request.origin, goodbye)
        server.close()
        assert receive(asker, 11) == [
            *(ReplyReceived(address, goodbye) for goodbye in goodbyes),
            ConnectionLost(address),
        ]
        assert asker.poll(0.3) == []

    def test_restarted_server_serves_and_never_sees_old_requests(self, bed: MemoryBed) -> None:
        server, asker = bed.server(), bed.asker()
        address = address_of(server, bed.HOST)
        exchange(asker, server, address)
        server.close()
        asker.send_request(address, b"old")
        assert ConnectionLost(address) in receive(asker)
        server = bed.server(address.port)
        exchange(asker, server, address, b"new")


class TestPollWakeClose:
    def test_poll_returns_nothing_after_its_timeout(self, bed: MemoryBed) -> None:
        endpoint = bed.server()
        for timeout_seconds in (0.0, 0.0001, 0.01, -1.0):
            assert endpoint.poll(timeout_seconds) == []

    @pytest.mark.parametrize("timeout_seconds", [None, math.inf, 1e12])
    def test_a_message_ends_poll(self, bed: MemoryBed, timeout_seconds: float | None) -> None:
        server, asker = bed.server(), bed.asker()
        thread, results = polling(server, timeout_seconds)
        asker.send_request(address_of(server, bed.HOST), b"hello")
        thread.join(DEADLINE_SECONDS)
        assert [[type(received) for received in result] for result in results] == [[RequestReceived]]

    @pytest.mark.parametrize("timeout_seconds", [None, math.inf, 1e12])
    def test_wake_from_another_thread_ends_poll(self, bed: MemoryBed, timeout_seconds: float | None) -> None:
        endpoint = bed.asker()
        thread, results = polling(endpoint, timeout_seconds)
        endpoint.wake()
        thread.join(DEADLINE_SECONDS)
        assert results == [[]]

    def test_wake_counts_for_the_next_poll_and_only_for_it(self, bed: MemoryBed) -> None:
        endpoint = bed.asker()
        endpoint.wake()
        endpoint.wake()
        assert endpoint.poll(None) == []
        thread, results = polling(endpoint, None)
        thread.join(0.1)
        assert results == []
        endpoint.wake()
        thread.join(DEADLINE_SECONDS)
        assert results == [[]]

    def test_wake_never_blocks(self, bed: MemoryBed) -> None:
        endpoint = bed.asker()
        for _ in range(20_000):
            endpoint.wake()
        assert endpoint.poll(None) == []

    def test_many_threads_wake_while_it_closes(self, bed: MemoryBed) -> None:
        endpoint = bed.server()
        closed = threading.Event()
        failures: list[BaseException] = []

        def wake_on() -> None:
            try:
                while not closed.is_set():
                    endpoint.wake()
            except BaseException as error:  # noqa: BLE001  - whatever it is, the test reports it
                failures.append(error)

        threads = [threading.Thread(target=wake_on, daemon=True) for _ in range(4)]
        for thread in threads:
            thread.start()
        for _ in range(20):
            endpoint.poll(0.001)
        endpoint.close()
        closed.set()
        for thread in threads:
            thread.join(DEADLINE_SECONDS)
        assert failures == []

    def test_after_close_nothing_happens(self, bed: MemoryBed) -> None:
        server, endpoint = bed.server(), bed.server()
        address = address_of(server, bed.HOST)
        exchange(endpoint, server, address)
        endpoint.close()
        endpoint.close()
        endpoint.wake()
        assert endpoint.poll(None) == []
        endpoint.send_request(address, b"hello")
        endpoint.send_reply(b"stranger", b"welcome")
        endpoint.disconnect(address)
        assert endpoint.poll(0.0) == []
        assert server.poll(0.05) == []

    def test_close_with_undelivered_messages(self, bed: MemoryBed) -> None:
        gone, asker = bed.server(), bed.asker()
        address = address_of(gone, bed.HOST)
        gone.close()
        asker.send_request(address, b"hello")
        asker.close()
        assert asker.poll(None) == []
