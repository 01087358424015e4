"""Every endpoint that the two legs share, through a running proxy: relayed, refused and broken in its own words."""

import json

import pytest

from proxy.endpoints import ENDPOINTS
from tests.proxy.fake_engines import WITHOUT_END_MARK, Drop, Refuse, asynchronous, cluster, completion, events, until

BODIES = {
    "/v1/completions": {"model": "m", "prompt": "hello", "max_tokens": 9},
    "/v1/chat/completions": {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 9},
    "/v1/responses": {"model": "m", "input": "hello", "max_output_tokens": 9},
    "/v1/messages": {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 9},
    "/inference/v1/generate": {"model": "m", "token_ids": [1, 2], "sampling_params": {"max_tokens": 9}},
}
PATHS = pytest.mark.parametrize("path", BODIES)


def test_every_endpoint_is_here():
    assert BODIES.keys() == ENDPOINTS.keys()


def max_tokens(body):
    return body.get("max_tokens") or body.get("max_output_tokens") or body["sampling_params"]["max_tokens"]


@PATHS
@asynchronous
async def test_a_request_is_prefilled_and_decoded(path):
    async with cluster() as c:
        async with c.post(path, BODIES[path]) as response:
            assert await response.json() == completion(path, BODIES[path])
        (prefill,), (decode,) = c.prefills[0].generations, c.decodes[0].generations
        assert (prefill.path, decode.path) == (path, path)
        assert max_tokens(prefill.body) == 1
        assert decode.body.pop("kv_transfer_params")["grant"] == "grant-0"
        assert decode.body == BODIES[path]
        name = ENDPOINTS[path].name
        assert await c.metric(f'pd_proxy_requests_total{{endpoint="{name}",outcome="ok"}}') == 1


@PATHS
@asynchronous
async def test_a_slash_at_the_end_changes_nothing(path):
    async with cluster() as c:
        async with c.post(path + "/", BODIES[path]) as response:
            assert await response.json() == completion(path, BODIES[path])
        assert c.ledger.count("used") == 1
        assert await c.metric(f'pd_proxy_requests_total{{endpoint="{ENDPOINTS[path].name}",outcome="ok"}}') == 1


@asynchronous
async def test_a_redirect_of_an_engine_to_itself_leads_to_the_proxy():
    async with cluster() as c, c.client.get(c.url + "/moved?to=/models", allow_redirects=False) as response:
        assert (response.status, response.headers["Location"]) == (307, "/models?a=1")


@PATHS
@asynchronous
async def test_a_stream_is_relayed_as_it_is(path):
    body = BODIES[path] | {"stream": True}
    end = b"" if path in WITHOUT_END_MARK else b"data: [DONE]\n\n"
    async with cluster() as c, c.post(path, body) as response:
        assert await response.read() == b"".join(events(path, body)) + end


def assert_error(path, error, status):
    if path == "/v1/messages":
        assert set(error) == {"type", "error"}
        assert error["type"] == "error"
        assert set(error["error"]) == {"type", "message"}
    else:
        assert set(error["error"]) == {"message", "type", "param", "code"}
        assert error["error"]["code"] == status


@PATHS
@asynchronous
async def test_an_error_has_the_shape_of_its_endpoint(path):
    async with cluster() as c:
        async with c.client.post(c.url + path, data=b"nonsense") as response:
            assert response.status == 400
            assert_error(path, await response.json(), 400)
        c.prefills[0].always = Refuse(500)
        async with c.post(path, BODIES[path]) as response:
            assert response.status == 502
            assert_error(path, await response.json(), 502)


@PATHS
@asynchronous
async def test_a_stream_that_breaks_off_ends_with_an_error_of_its_endpoint(path):
    async with cluster() as c:
        c.decodes[0].always = Drop.IN_BODY
        async with c.post(path, BODIES[path] | {"stream": True}) as response:
            *blocks, rest = (await response.read()).split(b"\n\n")
        assert rest == b""
        if path not in WITHOUT_END_MARK:
            assert blocks.pop() == b"data: [DONE]"
        head, _, data = blocks[-1].rpartition(b"data: ")
        assert head == (b"event: error\n" if path in WITHOUT_END_MARK else b"")
        error = json.loads(data)
        if path == "/v1/responses":
            assert (error["type"], error["code"]) == ("error", "502")
        else:
            assert_error(path, error, 502)


@PATHS
@asynchronous
async def test_what_decode_refuses_is_released_and_told_as_it_is(path):
    async with cluster() as c:
        c.decodes[0].always = Refuse(400, b'{"said": "by the engine"}')
        async with c.post(path, BODIES[path]) as response:
            assert (response.status, await response.read()) == (400, b'{"said": "by the engine"}')
        await until(lambda: c.ledger.count("released") == 1)


@pytest.mark.parametrize(
    ("path", "more"),
    [
        ("/v1/responses", {"previous_response_id": "resp_1"}),
        ("/v1/responses", {"background": True}),
        ("/inference/v1/generate", {"sampling_params": {"prompt_logprobs": 0}}),
    ],
)
@asynchronous
async def test_what_one_engine_must_answer_goes_to_decode_alone(path, more):
    body = BODIES[path] | more
    async with cluster() as c:
        async with c.post(path, body) as response:
            assert response.status == 200
        assert c.prefills[0].seen == []
        assert c.decodes[0].generations[0].body == body
