"""The two legs on bare asyncio protocols and httptools and nothing else: the floor for a proxy in Python.

``python -m benchmarks.proxy.bare_protocols --port PORT --prefill URL --decode URL``. No errors, no cancellation and no
back-pressure: a proxy that people can use needs them and costs more.
"""

import argparse
import asyncio
from functools import partial
from urllib.parse import urlsplit

import msgspec
import uvloop

from benchmarks.proxy.wire import END_OF_STREAM, EVENT_STREAM, Asking, Served, chunk, connect, post, whole
from proxy.relay import HANDOFF_REQUEST

_decode = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_PATH = "/v1/chat/completions"
_ONE, _FALSE = msgspec.Raw(b"1"), msgspec.Raw(b"false")


class Streaming(Asking):
    """A connection to an engine; ``client`` gets a stream piece by piece, if it is set."""

    client: asyncio.Transport | None = None

    def on_body(self, piece: bytes) -> None:
        """Called by the parser."""
        if self.client is None:
            super().on_body(piece)
        else:
            self.client.write(chunk(piece))


class Engine:
    """Idle connections to one engine."""

    def __init__(self, url: str) -> None:
        address = urlsplit(url)
        self._address = address.hostname or "", address.port or 0
        self._idle: list[Streaming] = []

    async def take(self) -> Streaming:
        """A connection for one request."""
        if self._idle:
            return self._idle.pop()
        return await connect(*self._address, Streaming)

    def close(self) -> None:
        """Hang up."""
        for connection in self._idle:
            connection.close()

    def give_back(self, connection: Streaming) -> None:
        """The request is answered."""
        connection.client = None
        self._idle.append(connection)


class Proxy:
    """The proxy."""

    def __init__(self, prefill_url: str, decode_url: str) -> None:
        self._prefill = Engine(prefill_url)
        self._decode = Engine(decode_url)
        self._tasks: set[asyncio.Task[None]] = set()

    def answer(self, transport: asyncio.Transport, path: bytes, body: bytes) -> None:
        """Answer one request."""
        if path != _PATH.encode():
            transport.write(whole(b"{}"))
            return
        task = asyncio.get_running_loop().create_task(self._relay(transport, _decode(body)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        """Hang up on both engines."""
        self._prefill.close()
        self._decode.close()

    async def _relay(self, transport: asyncio.Transport, body: dict[str, msgspec.Raw]) -> None:
        first = {**body, "kv_transfer_params": HANDOFF_REQUEST, "stream": _FALSE, "max_tokens": _ONE}
        engine = await self._prefill.take()
        prefilled = await engine.ask(post(_PATH, msgspec.json.encode(first)))
        self._prefill.give_back(engine)
        second = msgspec.json.encode({**body, "kv_transfer_params": _decode(prefilled.body)["kv_transfer_params"]})
        engine = await self._decode.take()
        if bytes(body.get("stream", _FALSE)) == b"true":
            transport.write(EVENT_STREAM)
            engine.client = transport
            await engine.ask(post(_PATH, second))
            transport.write(END_OF_STREAM)
        else:
            transport.write(whole((await engine.ask(post(_PATH, second))).body))
        self._decode.give_back(engine)


async def _run(proxy: Proxy, port: int) -> None:
    server = await asyncio.get_running_loop().create_server(partial(Served, proxy.answer), "127.0.0.1", port)
    await server.serve_forever()


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--prefill", required=True)
    parser.add_argument("--decode", required=True)
    options = parser.parse_args()
    uvloop.run(_run(Proxy(options.prefill, options.decode), options.port))


if __name__ == "__main__":
    main()
