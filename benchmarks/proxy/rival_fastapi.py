"""A proxy of the usual kind: FastAPI, uvicorn and httpx, as in vLLM's own example for two kinds of engines.

``python -m benchmarks.proxy.rival_fastapi --port PORT --prefill URL --decode URL``.
"""

import argparse
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import fastapi
import httpx
import uvicorn
from fastapi.responses import StreamingResponse

HANDOFF_REQUEST = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def application(prefill_url: str, decode_url: str) -> fastapi.FastAPI:
    """The proxy."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    prefill, decode = (
        httpx.AsyncClient(timeout=None, base_url=url + "/v1", limits=limits) for url in (prefill_url, decode_url)
    )

    @asynccontextmanager
    async def lifespan(_app: fastapi.FastAPI) -> AsyncIterator[None]:
        yield
        await prefill.aclose()
        await decode.aclose()

    app = fastapi.FastAPI(lifespan=lifespan)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.post("/v1/chat/completions")
    async def chat(request: fastapi.Request) -> StreamingResponse:
        body = await request.json()
        headers = {"Authorization": request.headers.get("Authorization", ""), "X-Request-Id": str(uuid.uuid4())}
        first_leg = body | {"kv_transfer_params": HANDOFF_REQUEST, "stream": False, "max_tokens": 1}
        first_leg.pop("stream_options", None)
        prefilled = await prefill.post("/chat/completions", json=first_leg, headers=headers)
        prefilled.raise_for_status()
        second_leg = body | {"kv_transfer_params": prefilled.json()["kv_transfer_params"]}

        async def relayed() -> AsyncIterator[bytes]:
            async with decode.stream("POST", "/chat/completions", json=second_leg, headers=headers) as answer:
                answer.raise_for_status()
                async for piece in answer.aiter_bytes():
                    yield piece

        media_type = "text/event-stream" if body.get("stream") else "application/json"
        return StreamingResponse(relayed(), media_type=media_type)

    return app


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--prefill", required=True)
    parser.add_argument("--decode", required=True)
    options = parser.parse_args()
    uvicorn.run(application(options.prefill, options.decode), host="127.0.0.1", port=options.port)


if __name__ == "__main__":
    main()
