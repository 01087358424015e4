"""Opens streams until there are very many: ``python -m benchmarks.proxy.stream_client CROWD``.

At each level it prints a line and waits for one, so that whoever started it can look at the proxy. At the end it prints
what became of the streams.
"""

import asyncio
import sys
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

import msgspec
import uvloop

from benchmarks.proxy.client import PATH, chat_body
from benchmarks.proxy.engine import streamed
from benchmarks.proxy.wire import Answer, Asking, connect, post
from proxy.open_files import allow_open_files

OPENED_AT_ONCE = 32
"""So many streams begin at a time; each of them is on the prefill engine for a moment."""


class Crowd(msgspec.Struct, frozen=True):
    """What to open. ``levels`` rise; ``events`` is the length of a stream."""

    url: str
    levels: list[int]
    events: int


class Ended(msgspec.Struct):
    """What became of the streams."""

    num_complete: int = 0
    """All bytes came, as the engine sent them."""
    num_refused: int = 0
    """A 503 instead of a stream."""
    num_broken: int = 0
    """Anything else."""
    num_at_once: int = 0
    """So many had begun when the first of them ended."""


class _Opening(Asking):
    """Knows when its answer begins."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = asyncio.get_running_loop().create_future()

    def on_body(self, piece: bytes) -> None:
        """Called by the parser."""
        super().on_body(piece)
        if not self.begun.done():
            self.begun.set_result(None)


class StreamClient:
    """All the streams."""

    def __init__(self, crowd: Crowd, reached: Callable[[int], Awaitable[object]]) -> None:
        """``reached`` is awaited at each level."""
        address = urlsplit(crowd.url)
        self._address = address.hostname or "", address.port or 0
        self._crowd = crowd
        self._reached = reached
        self._request = post(PATH, chat_body(900, crowd.events))
        self._want = streamed(crowd.events)
        self._ended = Ended()
        self._num_begun = 0
        self._streams: list[asyncio.Task[None]] = []
        self._turns = asyncio.Semaphore(OPENED_AT_ONCE)

    async def run(self) -> Ended:
        """Open all, and wait until they end."""
        for level in self._crowd.levels:
            opening = [asyncio.Event() for _ in range(level - len(self._streams))]
            self._streams += [asyncio.create_task(self._stream(opened)) for opened in opening]
            for opened in opening:
                await opened.wait()
            await self._reached(level)
        await asyncio.gather(*self._streams)
        return self._ended

    async def _stream(self, opened: asyncio.Event) -> None:
        try:
            async with self._turns:
                connection = await connect(*self._address, _Opening)
                answer = connection.ask(self._request)
                await asyncio.wait((connection.begun, answer), return_when=asyncio.FIRST_COMPLETED)
                self._num_begun += 1
                opened.set()
            self._note(await answer)
            connection.close()
        except OSError:
            self._ended.num_broken += 1
        finally:
            opened.set()

    def _note(self, answer: Answer) -> None:
        if answer.status == 503:
            self._ended.num_refused += 1
            self._num_begun -= 1
            return
        self._ended.num_at_once = self._ended.num_at_once or self._num_begun
        if answer.status == 200 and answer.body == self._want:
            self._ended.num_complete += 1
        else:
            self._ended.num_broken += 1


def main() -> None:
    """The command line."""
    crowd = msgspec.json.decode(sys.argv[1], type=Crowd)
    allow_open_files(1)
    print(msgspec.json.encode(uvloop.run(_run(crowd))).decode())


async def _run(crowd: Crowd) -> Ended:
    return await StreamClient(crowd, _tell).run()


async def _tell(level: int) -> None:
    print(level, flush=True)
    await asyncio.to_thread(sys.stdin.readline)


if __name__ == "__main__":
    main()
