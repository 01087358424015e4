"""Clients that leave: both legs end, and nothing stays behind on prefill."""

import asyncio
import enum
import random
import socket
from contextlib import asynccontextmanager

import aiohttp
import pytest

from proxy.admin import Admin
from proxy.admission import Admission
from proxy.config import ProxyConfig, Timeouts
from proxy.engines import EngineClient
from proxy.exchange import Exchange
from proxy.http1.pool import Pool
from proxy.operations import Operations
from proxy.registry import Registry
from proxy.releases import Releases
from proxy.routing import Role, least_tokens
from proxy.server import Server
from proxy.sight import sight
from tests.proxy.fake_engines import Drop, FakeEngine, Ledger, asynchronous, cluster, listening, num_sockets, until

BODY = {"model": "m", "prompt": "hello", "max_tokens": 5}
STREAM = BODY | {"stream": True}


async def read(c, body):
    async with c.post(body=body) as response:
        await response.read()


@asynchronous
@pytest.mark.parametrize("body", [BODY, STREAM, BODY | {"prompt": ["a", "b"]}], ids=["plain", "stream", "list"])
async def test_a_client_that_leaves_during_prefill_aborts_prefill(body):
    async with cluster() as c:
        prefill = c.prefills[0]
        prefill.always = Drop.HANG_BEFORE_HEAD
        await left_when(c, body, lambda: prefill.generations)
        await until(lambda: all(seen.aborted for seen in prefill.generations))
        assert c.decodes[0].seen == []
        assert await c.metric('pd_proxy_requests_total{endpoint="completions",outcome="client_gone"}') == 1


@asynchronous
@pytest.mark.parametrize("body", [BODY, STREAM, BODY | {"prompt": ["a", "b"]}], ids=["plain", "stream", "list"])
async def test_a_client_that_leaves_before_decode_answers_aborts_decode_and_releases(body):
    async with cluster() as c:
        decode = c.decodes[0]
        decode.always = Drop.HANG_BEFORE_HEAD
        count = len(body["prompt"]) if isinstance(body["prompt"], list) else 1
        await left_when(c, body, lambda: len(decode.generations) == count)
        await until(lambda: all(seen.aborted for seen in decode.generations))
        await until(lambda: c.ledger.count("released") == count)
        assert await c.metric('pd_proxy_releases_total{result="released"}') == count


@asynchronous
@pytest.mark.parametrize("prompt", ["one", ["a", "b"]], ids=["one", "list"])
async def test_a_client_that_leaves_during_a_stream_aborts_decode(prompt):
    async with cluster() as c:
        decode = c.decodes[0]
        decode.more.clear()
        async with c.post(body=STREAM | {"prompt": prompt}) as response:
            await response.content.readuntil(b"\n\n")
            response.close()
        await until(lambda: all(seen.aborted for seen in decode.generations))
        decode.more.set()
        url = decode.url
        await until(lambda: decode.generations)
        assert await c.metric(f'pd_proxy_engine_requests{{engine="{url}",role="decode"}}') == 0


class Point(enum.Enum):
    """Where a client can be when it leaves."""

    QUEUED = enum.auto()
    PREFILL_RUNS = enum.auto()
    PREFILL_IS_ANSWERING = enum.auto()
    DECODE_HAS_THE_REQUEST = enum.auto()
    DECODE_IS_ANSWERING = enum.auto()


SETTINGS = {Point.QUEUED: {"max_in_flight": 1}}


@asynchronous
@pytest.mark.parametrize("body", [BODY, STREAM], ids=["plain", "stream"])
@pytest.mark.parametrize("point", Point)
async def test_a_client_that_leaves_at_any_point_strands_nothing(point, body):
    async with cluster(**SETTINGS.get(point, {})) as c:
        await leave_at(c, point, body)
        await settled(c)
        assert await c.metric('pd_proxy_requests_total{endpoint="completions",outcome="client_gone"}') == 1


@pytest.mark.faults
@asynchronous
@pytest.mark.parametrize("body", [BODY, STREAM], ids=["plain", "stream"])
@pytest.mark.parametrize("point", Point)
@pytest.mark.parametrize("quarter", range(4))
async def test_two_hundred_clients_that_leave_at_one_point_strand_nothing(point, body, quarter):
    random_source = random.Random(f"{point} {body} {quarter}")
    async with cluster(**SETTINGS.get(point, {})) as c:
        for number in range(50):
            await leave_at(c, point, body, random_source.random() * 0.003)
            await settled(c)
            await until(lambda: not c.ledger.open_grants())
            gone = 'pd_proxy_requests_total{endpoint="completions",outcome="client_gone"}'
            assert await c.metric(gone) == number + 1


def test_control_a_socket_that_stays_is_counted():
    before = num_sockets()
    with socket.socket():
        assert num_sockets() == before + 1
    assert num_sockets() == before


async def leave_at(c, point, body, pause_seconds=0.0):
    """Send a request and hang up at this point, or a moment later; what had begun on an engine must end there."""
    prefill, decode = c.prefills[0], c.decodes[0]
    num_prefills, num_decodes, num_sent = len(prefill.generations), len(decode.generations), decode.bytes_sent
    num_released = c.ledger.count("released")
    match point:
        case Point.QUEUED:
            decode.more.clear()
            before_it = await c.post(body=STREAM)
            await left_when(c, body, lambda: c.queued(), pause_seconds)
            decode.more.set()
            await before_it.read()
            assert len(prefill.generations) == num_prefills + 1
        case Point.PREFILL_RUNS:
            prefill.faults.append(Drop.HANG_BEFORE_HEAD)
            await left_when(c, body, lambda: len(prefill.generations) > num_prefills, pause_seconds)
            await until(lambda: prefill.generations[-1].aborted)
            assert decode.seen == []
        case Point.PREFILL_IS_ANSWERING:
            prefill.may_answer.clear()
            await left_when(c, body, lambda: c.ledger.open_grants(), pause_seconds)
            prefill.may_answer.set()
            await until(lambda: c.ledger.count("released") == num_released + 1)
            assert decode.generations == []
        case Point.DECODE_HAS_THE_REQUEST:
            decode.faults.append(Drop.HANG_BEFORE_HEAD)
            await left_when(c, body, lambda: len(decode.generations) > num_decodes, pause_seconds)
            await until(lambda: decode.generations[-1].aborted)
        case Point.DECODE_IS_ANSWERING:
            decode.faults.append(Drop.HANG_IN_BODY)
            await left_when(c, body, lambda: decode.bytes_sent > num_sent, pause_seconds)
            await until(lambda: decode.generations[-1].aborted)


async def left_when(c, body, condition, pause_seconds=0.0):
    """Send a request and hang up as soon as the condition holds, or a moment later."""
    task = asyncio.create_task(read(c, body))
    await until(condition)
    await asyncio.sleep(pause_seconds)
    assert not task.done()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled()


async def leave_at_random_times(count, seed):
    random_source = random.Random(seed)
    async with cluster(2, 2, max_in_flight=8) as c:

        async def one(number):
            body = random_source.choice([BODY, STREAM, STREAM | {"prompt": ["a", "b"]}])
            task = asyncio.create_task(read(c, body))
            await asyncio.sleep(random_source.random() * 0.02)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        for _ in range(count // 10):
            await asyncio.gather(*(one(number) for number in range(10)))
        await settled(c)
        await until(lambda: not c.ledger.open_grants())
        for engine in (*c.prefills, *c.decodes):
            load = f'pd_proxy_engine_requests{{engine="{engine.url}",role="{c.role_of(engine)}"}}'
            assert await c.metric(load) == 0
        return c.ledger.count("released")


@asynchronous
async def test_clients_that_leave_at_random_times_strand_nothing():
    await leave_at_random_times(40, seed=7)


@pytest.mark.faults
@pytest.mark.parametrize("seed", range(5))
@asynchronous
async def test_two_hundred_clients_that_leave_at_random_times_strand_nothing(seed):
    # The control: some of them left while a hand-off was open.
    assert await leave_at_random_times(200, seed) > 0


@asynchronous
async def test_a_client_that_leaves_another_path_is_forgotten():
    async with cluster() as c:
        c.decodes[0].always = Drop.HANG_BEFORE_HEAD
        with pytest.raises(TimeoutError):
            await c.client.post(c.url + "/v1/embeddings", json={}, timeout=aiohttp.ClientTimeout(total=0.1))
        await settled(c)
        assert await c.metric('pd_proxy_requests_total{endpoint="other",outcome="client_gone"}') == 1
        assert await c.metric(f'pd_proxy_engine_requests{{engine="{c.decodes[0].url}",role="decode"}}') == 0


async def settled(c):
    """Until the proxy serves nothing any more."""
    async with asyncio.timeout(3):
        while await c.metric("pd_proxy_in_flight_requests"):  # noqa: ASYNC110 - only the metrics know
            await asyncio.sleep(0.01)


@asynccontextmanager
async def server_that_does_not_cancel():
    """A proxy that learns only from a failing write that its client has left."""
    ledger = Ledger()
    prefill, decode = FakeEngine(ledger), FakeEngine(ledger)
    await prefill.start()
    await decode.start()
    registry, seen = Registry(dict.fromkeys(Role, least_tokens)), sight()
    registry.add(Role.PREFILL, [prefill.url])
    registry.add(Role.DECODE, [decode.url])
    config = ProxyConfig((prefill.url,), (decode.url,))
    admission = Admission(config.limits)
    async with Pool() as pool:
        client = EngineClient(pool, Timeouts())
        exchange = Exchange(client, registry, seen, Releases(client, registry, seen.metrics), config.routing)
        operations = Operations(registry, admission, seen, Admin(registry, None))
        server = Server(config, exchange, admission, seen, operations)
        try:
            async with listening(server, lambda request: asyncio.shield(server.serve(request))) as url:
                yield url, decode, admission, seen.metrics
        finally:
            await asyncio.gather(prefill.stop(), decode.stop())


@asynchronous
@pytest.mark.parametrize("prompt", ["one", ["a", "b"]], ids=["one", "list"])
async def test_a_write_that_fails_means_that_the_client_has_left(prompt, caplog):
    async with server_that_does_not_cancel() as (url, decode, admission, metrics), aiohttp.ClientSession() as client:
        decode.more.clear()
        async with client.post(url + "/v1/completions", json=STREAM | {"prompt": prompt}) as response:
            await response.content.readuntil(b"\n\n")
            response.close()
        await asyncio.sleep(0.05)
        decode.flood = True
        decode.more.set()
        await until(lambda: not admission.in_flight)
        outcome = 'pd_proxy_requests_total{endpoint="completions",outcome="client_gone"} 1.0'
        assert outcome in metrics.render().decode()
        assert "a bug in the proxy" not in caplog.text
