"""What the side channel's tests stand on: one way to open endpoints per implementation, and patient receiving."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TypeVar

import pytest

from pd_transfer.core.params import Address
from pd_transfer.sidechannel.base import Received, ReplyReceived, RequestReceived, SideChannel
from pd_transfer.sidechannel.memory import MemoryNetwork, MemorySideChannel

DEADLINE_SECONDS = 30.0
"""How long a test waits for what must happen; far longer than it takes."""

SettledT = TypeVar("SettledT")


class MemoryBed:
    """Endpoints of one memory network; everything is closed at the end."""

    HOST = "prefill"

    def __init__(self) -> None:
        self.network = MemoryNetwork()
        self._open = ExitStack()

    def server(self, port: int = 0) -> SideChannel:
        return self._closing(MemorySideChannel(self.network, Address(self.HOST, port)))

    def asker(self) -> SideChannel:
        return self._closing(MemorySideChannel(self.network))

    def keyed_server(self) -> SideChannel:
        return self._closing(MemorySideChannel(self.network, Address(self.HOST, 0), key="ours"))

    def listed(self) -> SideChannel:
        """An asker whom keyed servers answer."""
        return self._closing(MemorySideChannel(self.network, key="ours"))

    def strangers(self) -> list[SideChannel]:
        """Askers whom they do not, one of each kind."""
        return [self.asker(), self._closing(MemorySideChannel(self.network, key="another"))]

    def close(self) -> None:
        self._open.close()

    def _closing(self, endpoint: SideChannel) -> SideChannel:
        self._open.callback(endpoint.close)
        return endpoint


class ZmqBed(MemoryBed):
    """Endpoints that talk over loopback TCP."""

    HOST = "127.0.0.1"

    def __init__(self) -> None:
        super().__init__()
        pytest.importorskip("zmq")
        from pd_transfer.sidechannel import curve
        from pd_transfer.sidechannel.zmq import ZmqSideChannel

        self._kind = ZmqSideChannel
        self._server_keys = curve.new_server_keys("listed")
        stranger = curve.new_client_keys(self._server_keys)
        self._strangers = [None, curve.new_server_keys("another deployment's"), stranger]

    def server(self, port: int = 0) -> SideChannel:
        return self._closing(self._kind(Address(self.HOST, port)))

    def asker(self) -> SideChannel:
        return self._closing(self._kind())

    def keyed_server(self) -> SideChannel:
        return self._closing(self._kind(Address(self.HOST, 0), self._server_keys))

    def listed(self) -> SideChannel:
        return self._closing(self._kind(keys=self._server_keys))

    def strangers(self) -> list[SideChannel]:
        return [self._closing(self._kind(keys=keys)) for keys in self._strangers]


def address_of(server: SideChannel, host: str) -> Address:
    """Where a server on ``host`` can be asked."""
    assert server.bound_port is not None
    return Address(host, server.bound_port)


def receive(endpoint: SideChannel, count: int = 1) -> list[Received]:
    """Exactly ``count`` messages."""
    received: list[Received] = []
    deadline = time.monotonic() + DEADLINE_SECONDS
    while len(received) < count:
        assert time.monotonic() < deadline, f"only {received} arrived"
        received += endpoint.poll(1.0)
    assert len(received) == count, received
    return received


def receive_requests(server: SideChannel, count: int = 1) -> list[RequestReceived]:
    """Exactly ``count`` requests and nothing else."""
    requests = [received for received in receive(server, count) if isinstance(received, RequestReceived)]
    assert len(requests) == count
    return requests


def exchange(asker: SideChannel, server: SideChannel, address: Address, payload: bytes = b"hello") -> None:
    """One request, one reply, nothing else on either side."""
    asker.send_request(address, payload)
    (request,) = receive_requests(server)
    assert request.payload == payload
    server.send_reply(request.origin, b"welcome " + payload)
    assert receive(asker) == [ReplyReceived(address, b"welcome " + payload)]


def until(step: Callable[[], SettledT | None]) -> SettledT:
    """Repeat ``step`` until it returns something true."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not (result := step()):
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.005)
    return result


_OTHER_PROCESS = """
import sys
from pd_transfer.core.params import Address
from pd_transfer.sidechannel.base import RequestReceived
from pd_transfer.sidechannel.zmq import ZmqSideChannel

endpoint = ZmqSideChannel(Address("127.0.0.1", 0))
print(endpoint.bound_port, flush=True)
if len(sys.argv) > 1:
    endpoint.send_request(Address("127.0.0.1", int(sys.argv[1])), b"hello")
while True:
    for received in endpoint.poll(None):
        if isinstance(received, RequestReceived):
            endpoint.send_reply(received.origin, received.payload)
"""


@contextmanager
def other_process(ask: Address | None = None) -> Iterator[tuple[subprocess.Popen[str], Address]]:
    """A server in a process of its own that echoes requests, after asking ``ask``; for signals that end it."""
    arguments = [] if ask is None else [str(ask.port)]
    with subprocess.Popen(
        [sys.executable, "-c", _OTHER_PROCESS, *arguments], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            yield process, Address("127.0.0.1", int(process.stdout.readline()))
        finally:
            process.kill()
