"""Starting and stopping: the process, its one line, signals, and draining."""

import asyncio
import signal
import socket
import subprocess
import sys
from contextlib import asynccontextmanager

import aiohttp

from tests.proxy.fake_engines import FakeEngine, Ledger, Refuse, asynchronous, cluster, events

STREAM = {"prompt": "p", "stream": True}


@asynccontextmanager
async def engines():
    ledger = Ledger()
    prefill, decode = FakeEngine(ledger), FakeEngine(ledger)
    await prefill.start()
    await decode.start()
    try:
        yield prefill, decode
    finally:
        await prefill.stop()
        await decode.stop()


@asynccontextmanager
async def process(prefill_url, decode_url, *more):
    arguments = ("--prefill", prefill_url, "--decode", decode_url, "--port", "0", *more)
    started = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "proxy", *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        yield started
    finally:
        if started.returncode is None:
            started.kill()
            await started.wait()


async def address_of(started):
    line = (await started.stdout.readline()).decode()
    assert line.startswith("pd-proxy listens on http://127.0.0.1:")
    assert line.endswith(" (1 prefill, 1 decode)\n")
    return line.split()[3]


@asynchronous
async def test_sigterm_drains_an_open_stream_and_takes_nothing_new():
    async with engines() as (prefill, decode), process(prefill.url, decode.url) as started:
        url = await address_of(started)
        decode.more.clear()
        async with aiohttp.ClientSession() as client, client.post(url + "/v1/completions", json=STREAM) as response:
            first = await response.content.readuntil(b"\n\n")
            started.send_signal(signal.SIGTERM)
            await asyncio.sleep(0.2)
            assert started.returncode is None
            assert await refuses(url)
            decode.more.set()
            assert first + await response.read() == b"".join(events("", STREAM)) + b"data: [DONE]\n\n"
        output, errors = await started.communicate()
        assert started.returncode == 0
        assert output == b""
        assert b"Traceback" not in errors


async def refuses(url):
    host, port = url.removeprefix("http://").split(":")
    try:
        _, writer = await asyncio.open_connection(host, int(port))
    except ConnectionRefusedError:
        return True
    writer.close()
    return False


@asynchronous
async def test_the_configuration_is_told_at_the_start():
    async with process("http://127.0.0.1:9", "http://127.0.0.1:9", "--max-queued", "17") as started:
        await address_of(started)
        started.send_signal(signal.SIGTERM)
        _, errors = await started.communicate()
    lines = errors.decode().splitlines()
    assert 'prefill = ["http://127.0.0.1:9"]' in lines
    assert "max-queued = 17" in lines
    assert 'fallback = "none"' in lines


def test_nothing_slow_is_imported():
    slow = ("fastapi", "starlette", "pydantic", "aiohttp", "httpx", "requests", "opentelemetry", "torch")
    slow += ("vllm", "numpy")
    script = f"import sys, proxy.__main__; print([name for name in {slow} if name in sys.modules])"
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert told.stdout == "[]\n"


@asynchronous
async def test_a_second_signal_ends_the_wait():
    async with engines() as (prefill, decode), process(prefill.url, decode.url) as started:
        url = await address_of(started)
        decode.more.clear()
        async with aiohttp.ClientSession() as client, client.post(url + "/v1/completions", json=STREAM) as response:
            await response.content.readuntil(b"\n\n")
            started.send_signal(signal.SIGINT)
            await asyncio.sleep(0.2)
            assert started.returncode is None
            started.send_signal(signal.SIGINT)
            _, errors = await started.communicate()
        assert started.returncode == 0
        assert b"Traceback" not in errors
        assert b"stopping although requests are open" in errors
        async with asyncio.timeout(3):
            while not decode.generations[0].aborted:  # noqa: ASYNC110 - the engine notices in its own time
                await asyncio.sleep(0.01)


@asynchronous
async def test_ctrl_c_on_an_idle_proxy_is_quick_and_quiet():
    async with engines() as (prefill, decode), process(prefill.url, decode.url) as started:
        await address_of(started)
        started.send_signal(signal.SIGINT)
        async with asyncio.timeout(3):
            output, errors = await started.communicate()
        assert (started.returncode, output) == (0, b"")
        assert b"Traceback" not in errors


@asynchronous
async def test_a_port_in_use_is_one_clear_sentence():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        async with process("http://p:1", "http://d:1", "--port", port) as started:
            output, errors = await started.communicate()
    assert (started.returncode, output) == (1, b"")
    assert b"cannot listen on 127.0.0.1:" + port.encode() in errors
    assert b"Traceback" not in errors


@asynchronous
async def test_new_requests_on_open_connections_are_refused_while_draining():
    async with cluster() as c:
        c.decodes[0].more.clear()
        stream = await c.post(body=STREAM)
        await stream.content.readuntil(b"\n\n")
        async with c.client.get(c.url + "/health") as response:
            assert response.status == 200
        drained = asyncio.create_task(c.proxy.drain(5))
        await asyncio.sleep(0.05)
        async with c.post() as response:
            assert response.status == 503
            assert response.headers["Retry-After"] == "1"
            assert response.headers["Connection"] == "close"
        c.decodes[0].more.set()
        await stream.read()
        assert await drained


@asynchronous
async def test_stopping_waits_for_releases():
    async with cluster() as c:
        c.decodes[0].always = Refuse(400)
        c.decodes[0].release_seconds = 0.2
        async with c.post() as response:
            assert response.status == 400
        assert c.ledger.count("released") == 0
    assert c.ledger.count("released") == 1


@asynchronous
async def test_draining_gives_up_in_time():
    async with cluster() as c:
        c.decodes[0].more.clear()
        async with c.post(body=STREAM) as response:
            await response.content.readuntil(b"\n\n")
            assert not await c.proxy.drain(0.05)
            c.decodes[0].more.set()
            await response.read()
