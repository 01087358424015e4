"""The two legs on aiohttp's server and client and nothing else: what that library costs by itself.

``python -m benchmarks.proxy.bare_aiohttp --port PORT --prefill URL --decode URL``. The sessions are set up
to do as little as they can.
"""

import argparse
import asyncio

import aiohttp
import msgspec
import uvloop
from aiohttp import web
from yarl import URL

from proxy.relay import HANDOFF_REQUEST

_decode = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_PATH = "/v1/chat/completions"
_JSON = {"Content-Type": "application/json"}
_ONE, _FALSE = msgspec.Raw(b"1"), msgspec.Raw(b"false")


def application(prefill_url: str, decode_url: str) -> web.Application:
    """The proxy."""
    app = web.Application(client_max_size=1 << 26)
    prefill, decode = URL(prefill_url + _PATH), URL(decode_url + _PATH)
    session: aiohttp.ClientSession

    async def started(_app: web.Application) -> None:
        nonlocal session
        session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=("Accept", "Accept-Encoding", "User-Agent"),
        )

    async def ended(_app: web.Application) -> None:
        await session.close()

    async def health(_request: web.Request) -> web.Response:
        return web.Response(text="{}")

    async def chat(request: web.Request) -> web.StreamResponse:
        body = _decode(await request.read())
        first = {**body, "kv_transfer_params": HANDOFF_REQUEST, "stream": _FALSE, "max_tokens": _ONE}
        async with session.post(prefill, data=msgspec.json.encode(first), headers=_JSON) as prefilled:
            params = _decode(await prefilled.read())["kv_transfer_params"]
        second = msgspec.json.encode({**body, "kv_transfer_params": params})
        async with session.post(decode, data=second, headers=_JSON) as answer:
            response = web.StreamResponse(status=answer.status, headers={"Content-Type": answer.content_type})
            response.content_length = answer.content_length
            await response.prepare(request)
            while piece := await answer.content.readany():
                await response.write(piece)
            return response

    app.on_startup.append(started)
    app.on_cleanup.append(ended)
    app.router.add_get("/health", health)
    app.router.add_post(_PATH, chat)
    return app


async def _run(application: web.Application, port: int) -> None:
    runner = web.AppRunner(application, handler_cancellation=True, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    await asyncio.Event().wait()


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--prefill", required=True)
    parser.add_argument("--decode", required=True)
    options = parser.parse_args()
    uvloop.run(_run(application(options.prefill, options.decode), options.port))


if __name__ == "__main__":
    main()
