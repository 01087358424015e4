"""Requests that are no requests, and the proxy's own mistakes: an answer with the right status and shape, always."""

import asyncio
import json

import aiohttp
import pytest

from proxy.admin import Admin
from proxy.admission import Admission
from proxy.config import ProxyConfig
from proxy.operations import Operations
from proxy.registry import Registry
from proxy.routing import POLICIES
from proxy.server import Server
from proxy.sight import sight
from tests.proxy.fake_engines import IDLE, IMPATIENT, Drop, asynchronous, cluster, error_of, events, listening, until

PATH = "/v1/completions"
STREAM = {"prompt": "hello", "stream": True}


@asynchronous
@pytest.mark.parametrize(
    "body", [b"", b"nonsense", b"[1]", b'"text"', b'{"a":NaN}', b'{"prompt":"p"', b"\xff", b'{"a":' * 5000]
)
async def test_bodies_that_are_no_json_object_are_refused(body):
    async with cluster() as c:
        async with c.client.post(c.url + PATH, data=body, headers={"Content-Type": "application/json"}) as response:
            assert response.status == 400
            assert (await error_of(response))["type"] == "BadRequestError"
        assert c.prefills[0].seen == []


@asynchronous
@pytest.mark.parametrize("policy", POLICIES)
async def test_numbers_without_end_do_not_upset_the_routing(policy):
    async with cluster(decodes=2, decode_policy=policy, prefill_policy=policy) as c:
        c.decodes[0].more.clear()
        c.decodes[1].more.clear()
        open_streams = []
        for _ in range(2):
            body = STREAM | {"max_tokens": 10**400, "user": "u"}
            open_streams.append(asyncio.create_task(status_of(c, json.dumps(body))))
            await until(lambda: len(c.decodes[0].generations) + len(c.decodes[1].generations) == len(open_streams))
        async with c.client.get(c.url + "/metrics") as response:
            assert response.status == 200
        for engine in c.decodes:
            engine.more.set()
        assert await asyncio.gather(*open_streams) == [200, 200]


async def status_of(c, data):
    async with c.client.post(c.url + PATH, data=data, headers={"Content-Type": "application/json"}) as response:
        await response.read()
        return response.status


async def raw_exchange(url, request, *, until_closed=True):
    """Send bytes over a plain connection; what comes back until it closes, or until a blank line."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(request)
    try:
        return await asyncio.wait_for(reader.read() if until_closed else reader.readuntil(b"\r\n\r\n"), 2)
    finally:
        writer.close()


@asynchronous
async def test_a_body_that_never_ends_is_given_up():
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
    async with cluster(timeouts=IMPATIENT) as c:
        answer = await raw_exchange(c.url, head + b'5\r\n{"a":\r\n', until_closed=False)
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert c.prefills[0].seen == []


UPLOAD = b"POST /v1/audio HTTP/1.1\r\nHost: x\r\nContent-Type: audio/wav\r\nTransfer-Encoding: chunked\r\n\r\n"


@asynchronous
async def test_an_upload_that_stalls_is_given_up_and_nobody_blames_the_engine():
    async with cluster(timeouts=IDLE) as c:
        answer = await raw_exchange(c.url, UPLOAD + b"5\r\nabcde\r\n", until_closed=False)
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert await c.standing(c.decodes[0]) == "unknown"
        assert await c.metric("pd_proxy_in_flight_requests") == 0
        assert await c.metric('pd_proxy_engine_failures_total{kind="timed_out",role="decode"}') == 0


@asynchronous
async def test_an_upload_in_a_broken_coding_is_a_bad_request():
    async with cluster() as c:
        headers = {"Content-Encoding": "gzip", "Content-Type": "audio/wav"}
        async with c.client.post(c.url + "/v1/audio", data=b"no gzip", headers=headers) as response:
            assert response.status == 400
            await error_of(response)
        assert await c.standing(c.decodes[0]) == "unknown"


@asynchronous
@pytest.mark.parametrize(("sent", "standing"), [(b"5\r\nabcde\r\n", "unknown"), (b"0\r\n\r\n", "suspect")])
async def test_an_engine_that_is_lost_is_blamed_only_after_the_upload(sent, standing):
    async with cluster() as c:
        c.decodes[0].always = Drop.BEFORE_BODY
        answer = await raw_exchange(c.url, UPLOAD + sent, until_closed=False)
        assert answer.startswith(b"HTTP/1.1 502 ")
        assert await c.standing(c.decodes[0]) == standing


@asynchronous
async def test_an_upload_arrives_as_it_was_sent():
    async with cluster() as c:
        for pieces in ([], [b"a", b"bc" * 100_000, b"d"]):
            headers = {"Content-Type": "audio/wav"}
            async with c.client.post(c.url + "/v1/audio", data=slowly(pieces), headers=headers) as response:
                assert await response.read() == b"other:" + b"".join(pieces)


async def slowly(pieces):
    for piece in pieces:
        yield piece
        await asyncio.sleep(0)


@asynchronous
async def test_a_body_in_a_broken_coding_is_a_bad_request():
    async with cluster() as c:
        headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
        async with c.client.post(c.url + PATH, data=b"no gzip", headers=headers) as response:
            assert response.status == 400
            await error_of(response)


@asynchronous
@pytest.mark.parametrize("line", [b"OPTIONS *", b"CONNECT evil:99"])
async def test_a_target_that_is_no_path_is_not_found(line):
    async with cluster() as c:
        answer = await raw_exchange(c.url, line + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 404 ")
        assert b'"type":"NotFoundError"' in answer
        assert c.decodes[0].seen == []


@asynchronous
@pytest.mark.parametrize("target", [b"/v1/x?a=%2F", b"http://evil:99/v1/x?a=%2F"])
async def test_a_host_in_the_target_changes_nothing(target):
    async with cluster() as c:
        answer = await raw_exchange(c.url, b"GET " + target + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert c.decodes[0].seen[0].path == "/v1/x?a=%2F"


@asynchronous
async def test_an_http_1_0_client_gets_the_stream_and_the_end_of_the_connection():
    body = json.dumps(STREAM).encode()
    head = f"POST {PATH} HTTP/1.0\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    async with cluster() as c:
        answer = await raw_exchange(c.url, head + body)
        assert answer.partition(b"\r\n\r\n")[2] == b"".join(events(PATH, STREAM)) + b"data: [DONE]\n\n"


class BuggyExchange:
    async def open(self, _request):
        raise ZeroDivisionError


@asynchronous
async def test_a_bug_of_ours_still_has_the_shape_of_an_error(caplog):
    config = ProxyConfig(("http://p:1",), ("http://d:1",))
    admission, seen = Admission(config.limits), sight()
    operations = Operations(Registry({}), admission, seen, Admin(Registry({}), None))
    server = Server(config, BuggyExchange(), admission, seen, operations)
    async with listening(server) as url, aiohttp.ClientSession() as client:
        response = await client.post(url + PATH, json=STREAM)
        assert response.status == 500
        assert (await error_of(response))["type"] == "InternalServerError"
    assert "a bug in the proxy" in caplog.text
