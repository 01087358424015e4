"""A mock engine: ``python -m benchmarks.proxy.engine --port PORT``. It answers at once and costs almost nothing.

It speaks the part of vLLM's API that routers use. A request for a hand-off gets one token and params; any other has to
carry such params, or is refused, so that a proxy that leaves out the prefill leg is found out. ``max_tokens`` is the
number of events of a stream; the first comes at once, the others at a fixed pace.
"""

import argparse
import asyncio
from functools import partial

import msgspec
import uvloop

from benchmarks.proxy.wire import END_OF_STREAM, EVENT_STREAM, Served, chunk, whole
from proxy.open_files import allow_open_files

HANDOFF = msgspec.json.encode(
    {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "4f0c9a52-6d52-4f4e-9a53-0d3c1f3a7f11",
        "remote_request_id": "chatcmpl-5b0e2f2b-0-1c9a7b44",
        "remote_block_ids": [list(range(100, 164)), list(range(7, 11))],
        "remote_host": "127.0.0.1",
        "remote_port": 5600,
        "tp_size": 1,
        "grant": "A" * 256,
    }
)
"""What the prefill leg answers: about as much as a grant for a thousand tokens."""

EVENT = (
    b'data: {"id":"chatcmpl-5b0e2f2b","object":"chat.completion.chunk","created":1790000000,"model":"model",'
    b'"choices":[{"index":0,"delta":{"content":" token"},"logprobs":null,"finish_reason":null}]}\n\n'
)
END_MARK = b"data: [DONE]\n\n"
"""The end of a stream, as every client waits for it."""

_ANSWER = (
    b'{"id":"chatcmpl-5b0e2f2b","object":"chat.completion","created":1790000000,"model":"model","choices":[{"index":0,'
    b'"message":{"role":"assistant","content":" token"},"logprobs":null,"finish_reason":"length"}],"usage":'
    b'{"prompt_tokens":200,"total_tokens":201,"completion_tokens":1},"kv_transfer_params":%s}'
)
DECODED = _ANSWER % b"null"
_PREFILLED = whole(_ANSWER % HANDOFF)
_DECODED = whole(DECODED)
_HEALTHY = whole(b"{}")
_REFUSED = whole(b'{"error":{"message":"decode was asked without the params of a prefill","code":400}}', b"400 Bad")
_FIRST = EVENT_STREAM + chunk(EVENT)
_NEXT = chunk(EVENT)
_LAST = chunk(END_MARK) + END_OF_STREAM


class _Params(msgspec.Struct):
    do_remote_decode: bool = False
    remote_engine_id: str | None = None


class _Request(msgspec.Struct):
    stream: bool = False
    max_tokens: int = 16
    kv_transfer_params: _Params | None = None


_decode = msgspec.json.Decoder(_Request).decode


def streamed(num_events: int) -> bytes:
    """The body of a stream."""
    return EVENT * num_events + END_MARK


class MockEngine:
    """Both kinds of engine. ``event_seconds`` lie between two events of a stream."""

    def __init__(self, loop: asyncio.AbstractEventLoop, event_seconds: float) -> None:
        self._loop = loop
        self._event_seconds = event_seconds

    def answer(self, transport: asyncio.Transport, path: bytes, body: bytes) -> None:
        """Answer one request."""
        if not path.startswith(b"/v1/"):
            transport.write(_HEALTHY)
            return
        request = _decode(body)
        params = request.kv_transfer_params
        if params is not None and params.do_remote_decode:
            transport.write(_PREFILLED)
        elif params is None or params.remote_engine_id is None:
            transport.write(_REFUSED)
        elif request.stream:
            transport.write(_FIRST)
            self._go_on(transport, request.max_tokens - 1)
        else:
            transport.write(_DECODED)

    def _go_on(self, transport: asyncio.Transport, num_left: int) -> None:
        if num_left:
            self._loop.call_later(self._event_seconds, self._next, transport, num_left)
        else:
            transport.write(_LAST)

    def _next(self, transport: asyncio.Transport, num_left: int) -> None:
        if not transport.is_closing():
            transport.write(_NEXT)
            self._go_on(transport, num_left - 1)


async def serve(port: int, event_seconds: float) -> None:
    """Serve until killed."""
    loop = asyncio.get_running_loop()
    engine = MockEngine(loop, event_seconds)
    server = await loop.create_server(partial(Served, engine.answer), "127.0.0.1", port, backlog=1024)
    await server.serve_forever()


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--event-seconds", type=float, default=0.004)
    options = parser.parse_args()
    allow_open_files(1)
    uvloop.run(serve(options.port, options.event_seconds))


if __name__ == "__main__":
    main()
