"""The memory network's controls: faults on command."""

import threading

import pytest

from pd_transfer.core.params import Address
from pd_transfer.sidechannel.base import ConnectionLost, Received, ReplyReceived, RequestReceived, SideChannel
from pd_transfer.sidechannel.memory import MemoryNetwork, MemorySideChannel

PREFILL, OTHER = Address("prefill", 5600), Address("other", 5600)


@pytest.fixture
def network() -> MemoryNetwork:
    return MemoryNetwork()


def payloads(received: list[Received]) -> list[bytes]:
    return [message.payload for message in received if not isinstance(message, ConnectionLost)]


def send(asker: SideChannel, *requests: bytes, to: Address = PREFILL) -> None:
    for request in requests:
        asker.send_request(to, request)


def test_held_messages_arrive_on_release_in_order(network: MemoryNetwork) -> None:
    server, asker = MemorySideChannel(network, PREFILL), MemorySideChannel(network)
    network.hold()
    send(asker, b"1", b"2", b"3")
    assert server.poll(0) == []
    assert [(message.address, message.is_reply, message.payload) for message in network.held] == [
        (PREFILL, False, b"1"),
        (PREFILL, False, b"2"),
        (PREFILL, False, b"3"),
    ]
    network.release()
    send(asker, b"4")
    assert payloads(server.poll(0)) == [b"1", b"2", b"3", b"4"]
    assert network.held == ()


def test_drop_duplicate_move_and_deliver(network: MemoryNetwork) -> None:
    server, asker = MemorySideChannel(network, PREFILL), MemorySideChannel(network)
    network.hold()
    send(asker, b"1", b"2", b"3", b"4")
    network.drop(1)
    network.duplicate()
    network.move(2, 0)
    assert [message.payload for message in network.held] == [b"4", b"1", b"3", b"1"]
    network.deliver(1)
    assert payloads(server.poll(0)) == [b"1"]
    network.release()
    assert payloads(server.poll(0)) == [b"4", b"3", b"1"]


def test_hold_one_address_in_both_directions(network: MemoryNetwork) -> None:
    server, other = MemorySideChannel(network, PREFILL), MemorySideChannel(network, OTHER)
    asker = MemorySideChannel(network)
    send(asker, b"before")
    (before,) = server.poll(0)
    assert isinstance(before, RequestReceived)
    network.hold(PREFILL)
    server.send_reply(before.origin, b"reply")
    send(asker, b"held")
    send(asker, b"free", to=OTHER)
    assert (payloads(server.poll(0)), payloads(other.poll(0)), asker.poll(0)) == ([], [b"free"], [])
    network.release()
    assert payloads(server.poll(0)) == [b"held"]
    assert asker.poll(0) == [ReplyReceived(PREFILL, b"reply")]


def test_cut_loses_what_is_held_and_tells_the_askers(network: MemoryNetwork) -> None:
    server, other = MemorySideChannel(network, PREFILL), MemorySideChannel(network, OTHER)
    askers = [MemorySideChannel(network), MemorySideChannel(network)]
    for asker in askers:
        send(asker, b"hello")
        send(asker, b"hello", to=OTHER)
    first, second = server.poll(0)
    assert isinstance(first, RequestReceived)
    assert isinstance(second, RequestReceived)
    network.hold()
    send(askers[0], b"lost")
    network.cut(PREFILL, askers[0])
    assert [asker.poll(0) for asker in askers] == [[ConnectionLost(PREFILL)], []]
    network.release()
    server.send_reply(first.origin, b"lost")
    server.send_reply(second.origin, b"welcome")
    assert [asker.poll(0) for asker in askers] == [[], [ReplyReceived(PREFILL, b"welcome")]]
    assert (server.poll(0), server.num_dropped) == ([], 1)
    network.cut(PREFILL)
    assert [asker.poll(0) for asker in askers] == [[], [ConnectionLost(PREFILL)]]
    send(askers[0], b"again")
    (again,) = server.poll(0)
    assert isinstance(again, RequestReceived)
    assert again.origin != first.origin
    assert payloads(other.poll(0)) == [b"hello", b"hello"]


def test_killed_server_is_lost_and_its_address_is_free(network: MemoryNetwork) -> None:
    server, asker = MemorySideChannel(network, PREFILL), MemorySideChannel(network)
    send(asker, b"hello")
    network.kill(server)
    assert asker.poll(0) == [ConnectionLost(PREFILL)]
    assert server.poll(None) == []
    send(asker, b"lost")
    assert asker.num_dropped == 1
    reborn = MemorySideChannel(network, PREFILL)
    send(asker, b"found")
    assert payloads(reborn.poll(0)) == [b"found"]


def test_kill_ends_a_poll_that_waits(network: MemoryNetwork) -> None:
    server = MemorySideChannel(network, PREFILL)
    results: list[list[Received]] = []
    thread = threading.Thread(target=lambda: results.append(server.poll(None)), daemon=True)
    thread.start()
    network.kill(server)
    thread.join(30)
    assert results == [[]]


def test_an_origin_belongs_to_the_server_that_was_asked(network: MemoryNetwork) -> None:
    server, other = MemorySideChannel(network, PREFILL), MemorySideChannel(network, OTHER)
    asker = MemorySideChannel(network)
    send(asker, b"hello")
    (request,) = server.poll(0)
    assert isinstance(request, RequestReceived)
    other.send_reply(request.origin, b"from a stranger")
    assert (asker.poll(0), other.num_dropped) == ([], 1)


def test_free_ports_and_origins_are_the_same_in_every_run(network: MemoryNetwork) -> None:
    servers = [MemorySideChannel(network, Address("prefill", 0)) for _ in range(2)]
    assert [server.bound_port for server in servers] == [49152, 49153]
    asker = MemorySideChannel(network)
    for port in (49152, 49153):
        send(asker, b"hello", to=Address("prefill", port))
    assert [server.poll(0) for server in servers] == [
        [RequestReceived(b"origin-1", b"hello")],
        [RequestReceived(b"origin-2", b"hello")],
    ]
