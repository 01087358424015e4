"""Both legs of a request through a running proxy: what the engines see and what the client gets."""

import asyncio
import gzip
import io
import json

import aiohttp
import pytest

from tests.proxy.fake_engines import asynchronous, cluster, completion, events, until

SIX_KEYS = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


@asynchronous
async def test_a_completion_is_prefilled_on_one_engine_and_decoded_on_another():
    body = {"model": "m", "prompt": "hello", "max_tokens": 5, "n": 2, "temperature": 0.10, "min_tokens": 2}
    async with cluster() as c:
        async with c.post(body=body) as response:
            assert response.status == 200
            assert response.content_type == "application/json"
            assert await response.read() == json.dumps(completion("/v1/completions", body)).encode()
        (prefill,), (decode,) = c.prefills[0].generations, c.decodes[0].generations
        assert prefill.body == {
            "model": "m",
            "prompt": "hello",
            "max_tokens": 1,
            "n": 1,
            "temperature": 0.1,
            "stream": False,
            "kv_transfer_params": SIX_KEYS,
        }
        params = decode.body.pop("kv_transfer_params")
        assert decode.body == body
        assert params["grant"] == "grant-0"
        assert params["unknown"] == {"kept": [1.5, "é"]}
        assert c.ledger.count("used") == 1


@asynchronous
async def test_chat_is_prefilled_and_decoded():
    async with cluster() as c:
        async with c.post("/v1/chat/completions", CHAT) as response:
            assert await response.json() == completion("/v1/chat/completions", CHAT)
        assert c.prefills[0].generations[0].body["max_tokens"] == 1
        assert c.decodes[0].generations[0].body["kv_transfer_params"]["grant"] == "grant-0"


@asynchronous
async def test_client_headers_and_one_request_id_reach_both_legs():
    sent = {
        "Authorization": "Bearer key",
        "X-Request-Id": "mine-1",
        "traceparent": "00-1-2-01",
        "X-Custom": "kept",
        "Connection": "keep-alive, X-Hop",
        "X-Hop": "dropped",
        "TE": "trailers",
        "Accept-Encoding": "gzip",
    }
    async with cluster() as c:
        async with c.post(headers=sent) as response:
            assert response.headers["X-Request-Id"] == "mine-1"
        for leg in (c.prefills[0].generations[0], c.decodes[0].generations[0]):
            for name in ("Authorization", "X-Request-Id", "traceparent", "X-Custom"):
                assert leg.headers[name] == sent[name]
            assert "X-Hop" not in leg.headers
            assert "TE" not in leg.headers
            assert leg.headers["Accept-Encoding"] == "identity"
            assert leg.headers["Content-Type"] == "application/json"


@asynchronous
@pytest.mark.parametrize(("body_id", "kept"), [("body-7", True), (None, False), ("two\nlines", False), (7, False)])
async def test_the_request_id_comes_from_the_body_or_is_minted(body_id, kept):
    async with cluster() as c:
        async with c.post(body={"prompt": "p", "request_id": body_id}) as response:
            answered = response.headers["X-Request-Id"]
        legs = [*c.prefills[0].generations, *c.decodes[0].generations]
        assert {leg.headers["X-Request-Id"] for leg in legs} == {answered}
        assert (answered == body_id) is kept
        assert len(answered) >= 6


@asynchronous
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_a_stream_is_relayed_verbatim_and_at_once(path):
    body = CHAT | {"stream": True} if "chat" in path else {"prompt": "p", "stream": True}
    async with cluster() as c:
        c.decodes[0].more.clear()
        async with c.post(path, body) as response:
            assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
            first = await response.content.readuntil(b"\n\n")
            # The engine is still holding the rest back: what came, came unbuffered.
            assert c.decodes[0].bytes_sent == len(first)
            c.decodes[0].more.set()
            assert first + await response.read() == b"".join(events(path, body)) + b"data: [DONE]\n\n"
        assert c.prefills[0].generations[0].body["stream"] is False


@asynchronous
async def test_a_slow_client_slows_the_engine_down():
    async with cluster() as c:
        c.decodes[0].flood = True
        async with c.post(body={"prompt": "p", "stream": True}) as response:
            await response.content.readuntil(b"\n\n")
            await asyncio.sleep(0.5)
            sent = c.decodes[0].bytes_sent
            assert sent < 32 << 20
            await asyncio.sleep(0.2)
            assert c.decodes[0].bytes_sent == sent
            size = 0
            async for chunk in response.content.iter_any():
                size += len(chunk)
            assert size > 60 << 20


@asynchronous
@pytest.mark.parametrize(
    "smuggled",
    [
        {"kv_transfer_params": {"do_remote_prefill": True, "remote_host": "evil", "grant": "x"}},
        {"kv_transfer_params": "junk"},
        {"ec_transfer_params": {"peer": "evil"}},
        {"vllm_xargs": {"kv_transfer_params": "junk", "other": 1}},
    ],
)
async def test_transfer_params_of_a_client_reach_no_engine(smuggled):
    async with cluster() as c:
        c.prefills[0].offers_handoffs = False
        async with c.post(body={"prompt": "p", **smuggled}) as response:
            assert response.status == 200
        assert c.prefills[0].generations[0].body["kv_transfer_params"] == SIX_KEYS
        decode = c.decodes[0].generations[0].body
        assert "kv_transfer_params" not in decode
        assert "ec_transfer_params" not in decode
        assert "kv_transfer_params" not in decode.get("vllm_xargs", {})
        assert await c.metric("pd_proxy_missing_handoffs_total") == 1


@asynchronous
@pytest.mark.parametrize("field", [{"echo": True}, {"prompt_logprobs": 0}, {"use_beam_search": True}])
async def test_what_one_engine_must_answer_goes_to_decode_alone(field):
    async with cluster() as c:
        async with c.post(body={"prompt": "p", "logprobs": 1, **field}) as response:
            assert response.status == 200
        assert c.prefills[0].seen == []
        assert c.decodes[0].generations[0].body == {"prompt": "p", "logprobs": 1, **field}


@asynchronous
async def test_a_list_that_one_engine_must_answer_is_not_split():
    body = {"prompt": ["a", "b"], "prompt_embeds": ["AAAA"]}
    async with cluster() as c:
        async with c.post(body=body) as response:
            assert await response.json() == completion("/v1/completions", body)
        assert [seen.body for seen in c.decodes[0].generations] == [body]


@asynchronous
@pytest.mark.parametrize("prompts", [["one", "two", "three"], [[1, 2], [3]], ["only"], [[7]]])
@pytest.mark.parametrize("n", [1, 2])
async def test_a_list_of_prompts_is_answered_as_one_engine_would(prompts, n):
    body = {"prompt": prompts, "n": n}
    async with cluster(2, 2) as c:
        async with c.post(body=body) as response:
            assert response.status == 200
            assert await response.json() == completion("/v1/completions", body)
        assert c.ledger.count("used") == len(prompts)
        decoded = [seen.body["prompt"] for engine in c.decodes for seen in engine.generations]
        assert sorted(decoded) == sorted(prompts)


@asynchronous
@pytest.mark.parametrize("with_usage", [True, False])
async def test_a_list_of_prompts_streams_as_one_engine_would(with_usage):
    body = {"prompt": ["one", "two", "three"], "n": 2, "stream": True, "max_tokens": 3}
    if with_usage:
        body["stream_options"] = {"include_usage": True}
    async with cluster(2, 2) as c:
        async with c.post(body=body) as response:
            assert response.content_type == "text/event-stream"
            streamed = await response.read()
        assert streamed.endswith(b"\n\ndata: [DONE]\n\n")
        assert streamed.count(b"[DONE]") == 1
        assert collected(streamed) == collected(b"".join(events("/v1/completions", body)))
        assert c.ledger.count("used") == 3


def collected(stream):
    """The text of every choice, and the usage, of a stream of events."""
    texts, usage = {}, None
    for line in stream.split(b"\n\n"):
        if not line or line == b"data: [DONE]":
            continue
        chunk = json.loads(line.removeprefix(b"data: "))
        usage = chunk.get("usage", usage)
        for choice in chunk["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    return texts, usage


@asynchronous
async def test_a_list_of_token_ids_is_one_prompt():
    async with cluster() as c:
        async with c.post(body={"prompt": [1, 2, 3]}) as response:
            assert response.status == 200
        assert [seen.body["prompt"] for seen in c.prefills[0].generations] == [[1, 2, 3]]


@asynchronous
async def test_too_many_prompts_are_refused_before_any_engine_sees_them():
    async with cluster(max_prompts=2) as c:
        async with c.post(body={"prompt": ["a", "b", "c"]}) as response:
            assert response.status == 400
            assert (await response.json())["error"]["param"] == "prompt"
        assert c.prefills[0].seen == []


@asynchronous
async def test_large_bodies_pass_and_too_large_ones_are_refused():
    async with cluster(max_body_bytes=3 << 20) as c:
        prompt = "x" * (2 << 20)
        url = c.url + "/v1/completions"
        async with c.client.post(url, data=io.BytesIO(json.dumps({"prompt": prompt}).encode())) as response:
            assert response.status == 200
        assert c.decodes[0].generations[0].body["prompt"] == prompt
        async with c.client.post(url, data=io.BytesIO(b"x" * (4 << 20))) as response:
            assert response.status == 413
            assert (await response.json())["error"]["code"] == 413


@asynchronous
async def test_every_other_path_goes_to_one_decode_engine_as_it_is():
    async with cluster() as c:
        async with c.client.get(c.url + "/v1/models?a=b%2Fc", headers={"X-Custom": "kept"}) as response:
            assert await response.read() == b"other:"
            assert response.headers["X-Engine"] == "yes"
        async with c.client.get(c.url + "/missing") as response:
            assert response.status == 404
            assert (await response.json())["error"]["message"] == "no such path"
        async with c.client.post(
            c.url + "/v1/audio", data=b"\x00\xff", headers={"Content-Type": "audio/wav"}
        ) as response:
            assert await response.read() == b"other:\x00\xff"
        async with c.client.get(c.url + "/v1/completions") as response:
            assert response.status == 200
        seen = c.decodes[0].seen
        assert [(request.method, request.path) for request in seen] == [
            ("GET", "/v1/models?a=b/c"),
            ("GET", "/missing"),
            ("POST", "/v1/audio"),
            ("GET", "/v1/completions"),
        ]
        assert seen[0].headers["X-Custom"] == "kept"
        assert c.prefills[0].seen == []


@asynchronous
async def test_a_compressed_answer_of_another_path_stays_compressed():
    async with cluster() as c, aiohttp.ClientSession(auto_decompress=False) as client:
        async with client.get(c.url + "/zipped", headers={"Accept-Encoding": "gzip"}) as response:
            assert response.headers["Content-Encoding"] == "gzip"
            assert gzip.decompress(await response.read()) == b"text"
        assert c.decodes[0].seen[0].headers["Accept-Encoding"] == "gzip"


@asynchronous
async def test_transfer_params_are_stripped_on_other_paths_too():
    body = {
        "input": 1.50,
        "kv_transfer_params": {"remote_host": "evil"},
        "sampling_params": {"extra_args": {"kv_transfer_params": {"remote_host": "evil"}, "a": 1}, "n": 1},
    }
    async with cluster() as c:
        async with c.post("/v1/embeddings", body) as response:
            assert response.status == 200
        assert c.decodes[0].seen[0].body == {"input": 1.5, "sampling_params": {"extra_args": {"a": 1}, "n": 1}}
        as_json = {"Content-Type": "application/json"}
        not_quite = b'{"a":NaN,"kv_transfer_params":{}}'
        async with c.client.post(c.url + "/v1/embeddings", data=not_quite, headers=as_json) as response:
            assert response.status == 400
        assert len(c.decodes[0].seen) == 1


@asynchronous
async def test_an_untouched_body_of_another_path_is_forwarded_byte_by_byte():
    async with cluster() as c:
        data = b'{ "a" : 1.50,\n"b":[ ] }'
        async with c.client.post(c.url + "/x", data=data, headers={"Content-Type": "application/json"}) as response:
            assert await response.read() == b"other:" + data


@asynchronous
async def test_loads_are_balanced_and_counted():
    async with cluster(2, 2) as c:
        for engine in c.decodes:
            engine.more.clear()
        responses = [await c.post(body={"prompt": "p", "stream": True}) for _ in range(4)]
        assert [len(engine.generations) for engine in c.decodes] == [2, 2]
        assert await c.metric("pd_proxy_in_flight_requests") == 4
        url = c.decodes[0].url
        assert await c.metric(f'pd_proxy_engine_requests{{engine="{url}",role="decode"}}') == 2
        for engine in c.decodes:
            engine.more.set()
        for response in responses:
            await response.read()
        await until(lambda: True)
        assert [len(engine.generations) for engine in c.prefills] == [2, 2]
        assert await c.metric('pd_proxy_requests_total{endpoint="completions",outcome="ok"}') == 4
        assert await c.metric("pd_proxy_in_flight_requests") == 0
        assert await c.metric(f'pd_proxy_engine_tokens{{engine="{url}",role="decode"}}') == 0


@asynchronous
async def test_a_long_prompt_counts_for_more_than_a_short_one():
    async with cluster(1, 2) as c:
        for engine in c.decodes:
            engine.more.clear()
        responses = [await c.post(body={"prompt": "x" * size, "stream": True}) for size in (9000, 1, 1, 1)]
        assert [len(engine.generations) for engine in c.decodes] == [1, 3]
        for engine in c.decodes:
            engine.more.set()
        for response in responses:
            await response.read()
