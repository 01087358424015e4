"""The load client: ``python -m benchmarks.proxy.client LOAD`` prints what it measured; both are JSON.

Every answer is compared with what the mock engine sent, byte by byte.
"""

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

import msgspec
import psutil
import uvloop

from benchmarks.proxy.engine import DECODED, HANDOFF, streamed
from benchmarks.proxy.wire import Answer, Asking, connect, post
from proxy.relay import HANDOFF_REQUEST

PATH = "/v1/chat/completions"
_WARM_UP_REQUESTS = 20
_TEXT = "The quick brown fox jumps over the lazy dog, and 17 more of them follow.\n"


class Load(msgspec.Struct, frozen=True):
    """What to send, and to whom."""

    url: str
    """A proxy, or the prefill engine if ``decode_url`` is set."""
    decode_url: str = ""
    """The client itself asks both engines, one after the other, as a proxy would."""
    pid: int = 0
    """The proxy's process, whose CPU time is wanted."""
    connections: int = 1
    seconds: float = 0.0
    """How long to go on. 0 is one request on each connection."""
    body_bytes: int = 900
    """About so long is the client's body."""
    events: int = 0
    """Events of a stream; 0 asks for a plain answer."""


class Measured(msgspec.Struct):
    """What came of a load, warm-up left out. Lists have an entry for each request."""

    seconds: float
    cpu_seconds: float
    """Of the proxy's process and its children."""
    num_requests: int
    num_failed: int
    """Answers that are not what the mock engine sent."""
    num_pieces: int
    """Pieces in which the bodies came. For streams, as many as events if none were joined."""
    first_byte_seconds: list[float]
    """From sending a request to the first byte of its answer's body."""
    failure: str = ""
    """One of the failed answers."""


def chat_body(num_bytes: int, num_events: int, **fields: object) -> bytes:
    """A chat of many turns."""
    turn = {"role": "user", "content": _TEXT * 10}
    body: dict[str, object] = {
        "model": "model",
        "messages": [{"role": "user", "content": _TEXT}],
        "temperature": 0.7,
        "max_tokens": max(1, num_events),
        "stream": num_events > 0,
    }
    missing = num_bytes - len(msgspec.json.encode(body))
    each = len(msgspec.json.encode(turn)) + 1
    body["messages"] = [{"role": "user", "content": _TEXT}, *[turn] * (missing // each)]
    return msgspec.json.encode(body | fields)


def cpu_seconds(pid: int) -> float:
    """User and system time of a process and its children so far; 0 for no process."""
    if not pid:
        return 0.0
    root = psutil.Process(pid)
    times = [process.cpu_times() for process in (root, *root.children(recursive=True))]
    return sum(each.user + each.system for each in times)


class Client:
    """Sends a load and keeps what comes back."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._want = streamed(load.events) if load.events else DECODED
        self._request = post(PATH, chat_body(load.body_bytes, load.events))
        self._first_leg = post(PATH, chat_body(load.body_bytes, 0, kv_transfer_params=HANDOFF_REQUEST))
        params = msgspec.Raw(HANDOFF)
        self._second_leg = post(PATH, chat_body(load.body_bytes, load.events, kv_transfer_params=params))
        self._measured = Measured(0.0, 0.0, 0, 0, 0, [])
        self._connections: list[Asking] = []

    async def run(self) -> Measured:
        """Warm up, then measure."""
        askers = [await self._asker() for _ in range(self._load.connections)]
        if self._load.seconds:
            for _ in range(_WARM_UP_REQUESTS):
                await asyncio.gather(*(asker() for asker in askers))
        measured, begin = self._measured, time.perf_counter()
        cpu = cpu_seconds(self._load.pid)
        await asyncio.gather(*(self._ask(asker, begin + self._load.seconds) for asker in askers))
        measured.seconds = time.perf_counter() - begin
        measured.cpu_seconds = cpu_seconds(self._load.pid) - cpu
        for connection in self._connections:
            connection.close()
        return measured

    async def _asker(self) -> Callable[[], Awaitable[Answer]]:
        """A function that sends one request over connections of its own."""
        first = await self._connect(self._load.url)
        if not self._load.decode_url:
            return lambda: first.ask(self._request)
        second = await self._connect(self._load.decode_url)

        async def both() -> Answer:
            await first.ask(self._first_leg)
            return await second.ask(self._second_leg)

        return both

    async def _ask(self, asker: Callable[[], Awaitable[Answer]], deadline: float) -> None:
        measured = self._measured
        while True:
            begin = time.perf_counter()
            answer = await asker()
            measured.num_requests += 1
            measured.num_pieces += len(answer.pieces)
            measured.first_byte_seconds.append(answer.first_byte - begin)
            if answer.status != 200 or answer.body != self._want:
                measured.num_failed += 1
                measured.failure = f"{answer.status} {answer.body[:500].decode(errors='replace')}"
            if time.perf_counter() >= deadline:
                return

    async def _connect(self, url: str) -> Asking:
        address = urlsplit(url)
        self._connections.append(await connect(address.hostname or "", address.port or 0, Asking))
        return self._connections[-1]


def main() -> None:
    """The command line."""
    load = msgspec.json.decode(sys.argv[1], type=Load)
    sys.stdout.buffer.write(msgspec.json.encode(uvloop.run(Client(load).run())))


if __name__ == "__main__":
    main()
