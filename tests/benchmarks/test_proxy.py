"""The proxies' benchmark: the mock engines answer as engines do, wrong answers are noticed, and sums are right."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

import msgspec
import pytest
import uvicorn
from aiohttp import web

from benchmarks.proxy import bare_aiohttp, bare_protocols, engine, figures, rival_fastapi, streams
from benchmarks.proxy.client import PATH, Client, Load, Measured, chat_body
from benchmarks.proxy.figures import EVENTS, LARGE, LOADS, MANY, NUM_EVENTS, ONE, STREAM
from benchmarks.proxy.stacks import COMMANDS, FASTAPI, OURS, ROUTER
from benchmarks.proxy.stream_client import Crowd, Ended, StreamClient
from benchmarks.proxy.wire import Asking, Served, connect, post, whole
from proxy.config import ProxyConfig, Timeouts
from proxy.relay import HANDOFF_REQUEST
from proxy.service import running
from tests.proxy.fake_engines import UNCHECKED, asynchronous

# ------------------------------------------------------------------------------------------------- engines and clients


@asynccontextmanager
async def serving(answering):
    """The address of a server on bare protocols."""
    server = await asyncio.get_running_loop().create_server(partial(Served, answering), "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


@asynccontextmanager
async def mock_engine():
    async with serving(engine.MockEngine(asyncio.get_running_loop(), 0.001).answer) as url:
        yield url


@asynccontextmanager
async def our_proxy(prefill, decode):
    config = ProxyConfig((prefill,), (decode,), port=0, timeouts=replace(Timeouts(), health_seconds=UNCHECKED))
    async with running(config) as proxy:
        yield proxy.address


@asynccontextmanager
async def aiohttp_proxy(prefill, decode):
    runner = web.AppRunner(bare_aiohttp.application(prefill, decode), access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def protocols_proxy(prefill, decode):
    proxy = bare_protocols.Proxy(prefill, decode)
    async with serving(proxy.answer) as url:
        yield url
    proxy.close()


@asynccontextmanager
async def fastapi_proxy(prefill, decode):
    server = uvicorn.Server(uvicorn.Config(rival_fastapi.application(prefill, decode), port=0, log_level="critical"))
    task = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
        await asyncio.sleep(0.005)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    await task


@asynchronous
@pytest.mark.parametrize("proxy", [our_proxy, aiohttp_proxy, protocols_proxy, fastapi_proxy])
@pytest.mark.parametrize("events", [0, 1, 5], ids=["plain", "short", "long"])
async def test_every_proxy_relays_every_byte(proxy, events):
    async with mock_engine() as prefill, mock_engine() as decode, proxy(prefill, decode) as url:
        measured = await Client(Load(url, connections=3, events=events)).run()
    assert (measured.num_requests, measured.num_failed) == (3, 0), measured.failure


@asynchronous
async def test_the_client_asks_both_engines_itself():
    async with mock_engine() as prefill, mock_engine() as decode:
        measured = await Client(Load(prefill, decode_url=decode, seconds=0.01, body_bytes=100_000)).run()
    assert measured.num_requests == len(measured.first_byte_seconds) > 0
    assert measured.num_failed == 0
    assert all(seconds > 0 for seconds in measured.first_byte_seconds)


@asynchronous
@pytest.mark.parametrize("answer", [whole(b"{}"), whole(engine.DECODED, b"500 Broken")])
async def test_a_wrong_answer_is_noticed(answer):
    async with serving(lambda transport, _path, _body: transport.write(answer)) as url:
        measured = await Client(Load(url)).run()
    assert measured.num_failed == measured.num_requests == 1
    assert measured.failure


@asynchronous
@pytest.mark.parametrize(
    ("params", "status"), [(None, 400), ({}, 400), (HANDOFF_REQUEST, 200), (msgspec.Raw(engine.HANDOFF), 200)]
)
async def test_decode_refuses_what_was_not_prefilled(params, status):
    async with mock_engine() as url:
        connection = await connect("127.0.0.1", int(url.rpartition(":")[2]), Asking)
        answer = await connection.ask(post(PATH, chat_body(500, 0, kv_transfer_params=params)))
        connection.close()
    assert answer.status == status


@pytest.mark.parametrize("num_bytes", [900, 1 << 20])
def test_bodies_have_about_the_length_that_is_asked_for(num_bytes):
    assert 0.2 * num_bytes < len(chat_body(num_bytes, 0)) <= num_bytes


def test_every_proxy_has_its_command():
    for name, command in COMMANDS.items():
        words = command(1, "http://p", "http://d")
        assert {"1", "http://p", "http://d"} <= set(words), name


# ------------------------------------------------------------------------------------------------------------- streams


@asynchronous
async def test_streams_are_open_at_once_and_complete():
    reached = []

    async def look(level):
        reached.append(level)

    async with mock_engine() as prefill, mock_engine() as decode, our_proxy(prefill, decode) as url:
        ended = await StreamClient(Crowd(url, [3, 40], 200), look).run()
    assert reached == [3, 40]
    assert ended == Ended(num_complete=40, num_at_once=40)


@asynchronous
@pytest.mark.parametrize(
    ("answer", "expected"),
    [(whole(b"{}", b"503 No"), Ended(num_refused=2)), (whole(b"{}"), Ended(num_broken=2, num_at_once=1))],
)
async def test_streams_that_fail_are_told_apart(answer, expected):
    async def look(_level):
        pass

    async with serving(lambda transport, _path, _body: transport.write(answer)) as url:
        ended = await StreamClient(Crowd(url, [1, 2], 200), look).run()
    assert ended == expected


@pytest.mark.parametrize(("wanted", "most_files", "expected"), [(10, 1000, 10), (500, 1000, 468), (10, 20, 0)])
def test_streams_that_fit(wanted, most_files, expected):
    assert streams.num_fitting(wanted, most_files) == expected


@pytest.mark.parametrize(
    ("num_streams", "expected"), [(10_000, [1000, 5000, 10_000]), (5000, [1000, 5000]), (7, [7]), (1000, [1000])]
)
def test_levels(num_streams, expected):
    assert streams.levels(num_streams) == expected


def test_rows_of_streams():
    samples = [streams.Sample("before", 0, 2**20, 10, 0.0), streams.Sample("open", 1024, 3 * 2**20, 2058, 0.5)]
    assert streams.rows_of("x", samples) == [
        ("x", "before", 0, 1.0, "", 10, 0.0),
        ("x", "open", 1024, 3.0, 2.0, 2058, 0.5),
    ]


# ------------------------------------------------------------------------------------------------------------- figures


def run(cpu_seconds=1.0, num_requests=1000, first_byte=0.002, **fields):
    return Measured(2.0, cpu_seconds, num_requests, 0, num_requests, [first_byte] * 3, **fields)


def rounds(cpu_seconds=1.0, **changes):
    """All loads, each measured once."""
    return {load: [run(cpu_seconds)] for load in LOADS} | {EVENTS: [run(8 * 0.051 * cpu_seconds, 8)]} | changes


DIRECT = {load: [run(first_byte=0.0005)] for load in (ONE, STREAM, LARGE)}


def test_figures_are_medians_per_request():
    found = figures.figures(rounds(**{MANY: [run(1.0), run(3.0), run(2.0)]}), DIRECT)
    assert found.cpu == pytest.approx(2.0)
    assert found.cpu_alone == found.large_cpu == pytest.approx(1.0)
    assert found.per_second == found.per_second_alone == pytest.approx(500)
    assert found.first_byte == found.stream_first_byte == found.large_first_byte == pytest.approx(1.5)
    assert found.event_microseconds == pytest.approx(1e6 * (0.051 - 0.002) / NUM_EVENTS)


def of(cpu_seconds):
    return figures.figures(rounds(cpu_seconds), DIRECT)


@pytest.mark.parametrize(
    ("ours", "router", "fastapi", "met"),
    [(1.5, 1.0, 15.0, True), (1.6, 1.0, 20.0, False), (1.0, 1.0, 9.9, False), (2.0, 1.0, 10.0, False)],
)
def test_targets(ours, router, fastapi, met):
    found = {OURS: of(ours), ROUTER: of(router), FASTAPI: of(fastapi)}
    sentences, are_met = figures.targets(found)
    assert are_met is met
    assert met is not any("missed" in sentence for sentence in sentences)
    assert len(sentences) == 2


def test_a_target_without_its_rival_is_none():
    assert figures.targets({OURS: of(1.0)}) == ([], True)


def test_tables_have_whole_rows():
    found = {OURS: of(1.0), ROUTER: of(0.5)}
    for table in (figures.cpu_table(found), figures.speed_table(found)):
        assert {len(row) for row in table.rows} == {len(table.columns)}
    assert [row[-1] for row in figures.cpu_table(found).rows] == [2.0, 1.0]
    assert figures.cpu_table({OURS: of(1.0)}).rows[0][-1] == ""


def test_failures_are_told():
    wrong = rounds(**{ONE: [Measured(1.0, 1.0, 10, 4, 10, [0.1], "500 no")]})
    assert figures.failures({OURS: rounds(), "": DIRECT}) == []
    (sentence,) = figures.failures({OURS: rounds(), ROUTER: wrong})
    assert sentence.startswith("vllm-router: 4 answers were wrong")
    assert "500 no" in sentence


def test_joined_events_are_told():
    joined = rounds(**{EVENTS: [Measured(1.0, 1.0, 2, 0, NUM_EVENTS + 1, [0.1])]})
    assert "pd-proxy 0.50" in figures.joined({OURS: joined, "": DIRECT})
