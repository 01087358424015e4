"""Everything that can go wrong between a client and the engines, and what the client gets."""

import asyncio
import json

import aiohttp
import pytest

from tests.proxy.fake_engines import (
    IDLE,
    IMPATIENT,
    PATIENT,
    Drop,
    Refuse,
    asynchronous,
    cluster,
    completion,
    error_of,
    events,
    until,
)

PATH = "/v1/completions"
BODY = {"model": "m", "prompt": "hello", "max_tokens": 5}
STREAM = BODY | {"stream": True}


# What engines refuse


@asynchronous
@pytest.mark.parametrize("status", [400, 401, 403, 404, 413, 422, 429, 501, 503])
async def test_a_refusal_by_prefill_is_the_answer(status):
    async with cluster() as c:
        c.prefills[0].always = Refuse(
            status, b'{"error": "as it is"}', {"Content-Type": "application/json", "X-E": "1"}
        )
        async with c.post() as response:
            assert response.status == status
            assert await response.read() == b'{"error": "as it is"}'
            assert response.headers["X-E"] == "1"
            assert ("Retry-After" in response.headers) is (status in {429, 503})
        assert len(c.prefills[0].generations) == 1
        assert c.decodes[0].seen == []


@asynchronous
@pytest.mark.parametrize("status", [400, 404, 413, 422, 429, 501, 503])
async def test_a_refusal_by_decode_is_the_answer_and_releases(status):
    async with cluster() as c:
        c.decodes[0].always = Refuse(status, b'{"error": "as it is"}')
        async with c.post(body=STREAM) as response:
            assert response.status == status
            assert await response.read() == b'{"error": "as it is"}'
        await until(lambda: c.ledger.count("released") == 1)


@asynchronous
async def test_an_engine_that_says_when_to_retry_is_quoted():
    async with cluster() as c:
        c.prefills[0].always = Refuse(429, b"{}", {"Content-Type": "application/json", "Retry-After": "17"})
        async with c.post() as response:
            assert response.headers["Retry-After"] == "17"


# Prefill fails

PREFILL_FAULTS = [Drop.BEFORE_HEAD, Drop.AFTER_HEAD, Drop.IN_BODY, Refuse(500), Refuse(503), Refuse(429), Refuse(302)]


@asynchronous
@pytest.mark.parametrize("fault", PREFILL_FAULTS, ids=str)
async def test_another_prefill_engine_takes_over(fault):
    async with cluster(prefills=2) as c:
        # The proxy chooses the first engine first.
        c.prefills[0].always = fault
        for _ in range(3):
            async with c.post() as response:
                assert response.status == 200
                assert await response.json() == completion(PATH, BODY)
        assert c.prefills[0].generations
        assert len(c.decodes[0].generations) == 3


@asynchronous
async def test_an_unreachable_prefill_engine_costs_no_request():
    async with cluster(prefills=2, unreachable=["p0"]) as c:
        for _ in range(6):
            async with c.post() as response:
                assert response.status == 200
        failures = await c.metric('pd_proxy_engine_failures_total{kind="unreachable",role="prefill"}')
        # Avoided after the first failure, instead of drawing every request with its empty queue.
        assert failures == 1
        assert await c.standing(c.prefills[0]) == "suspect"


@asynchronous
@pytest.mark.parametrize(
    ("fault", "status"),
    [
        (Drop.BEFORE_HEAD, 502),
        (Drop.IN_BODY, 502),
        (Refuse(500), 502),
        (Refuse(302), 502),
        (Drop.HANG_BEFORE_HEAD, 504),
    ],
    ids=str,
)
async def test_without_another_prefill_engine_the_client_is_told(fault, status):
    async with cluster(timeouts=IMPATIENT if fault is Drop.HANG_BEFORE_HEAD else PATIENT) as c:
        c.prefills[0].always = fault
        async with c.post() as response:
            assert response.status == status
            await error_of(response)
        assert c.decodes[0].seen == []
        assert await c.metric('pd_proxy_requests_total{endpoint="completions",outcome="ok"}') == 0


@asynchronous
@pytest.mark.parametrize("reply", [b"not json", b"[1]", b""])
async def test_a_prefill_reply_that_is_no_object_is_a_bad_gateway(reply):
    async with cluster() as c:
        c.prefills[0].always = Refuse(200, reply)
        async with c.post() as response:
            assert response.status == 502
            await error_of(response)


@asynchronous
@pytest.mark.parametrize("role", ["p0", "d0"])
async def test_an_unreachable_engine_is_a_503_with_a_time_to_retry(role):
    async with cluster(unreachable=[role], leaves_open=1 if role == "d0" else 0) as c, c.post() as response:
        assert response.status == 503
        assert response.headers["Retry-After"] == "1"
        assert (await error_of(response))["type"] == "ServiceUnavailableError"


@asynchronous
async def test_a_connection_that_had_just_closed_is_replaced():
    async with cluster() as c:
        c.prefills[0].faults.append(Drop.BEFORE_HEAD)
        async with c.post() as response:
            assert response.status == 200
        assert len(c.prefills[0].generations) == 2


@asynchronous
async def test_what_a_broken_engine_says_is_quoted():
    async with cluster() as c:
        for said in (b'{"error": {"message": "out of memory"}}', b"out of memory", b'{"detail": "out of memory"}'):
            c.prefills[0].faults.append(Refuse(500, said))
            async with c.post() as response:
                assert response.status == 502
                assert "out of memory" in (await error_of(response))["message"]


# Decode fails before its first byte


@asynchronous
@pytest.mark.parametrize("body", [BODY, STREAM], ids=["plain", "stream"])
@pytest.mark.parametrize("fault", [Drop.BEFORE_HEAD, Drop.AFTER_HEAD, Refuse(500), Refuse(503)], ids=str)
async def test_another_decode_engine_takes_over_with_a_fresh_prefill(fault, body):
    async with cluster(decodes=2) as c:
        c.decodes[0].always = fault
        async with c.post(body=body) as response:
            assert response.status == 200
            answer = await response.read()
            if body is STREAM:
                assert answer == b"".join(events(PATH, body)) + b"data: [DONE]\n\n"
            else:
                assert json.loads(answer) == completion(PATH, body)
        assert len(c.prefills[0].generations) == 2
        assert len(c.decodes[1].generations) == 1


@asynchronous
async def test_a_plain_reply_that_breaks_off_is_replaced():
    async with cluster(decodes=2) as c:
        c.decodes[0].always = Drop.IN_BODY
        async with c.post() as response:
            assert await response.json() == completion(PATH, BODY)


@asynchronous
async def test_unused_params_go_to_the_other_decode_engine():
    async with cluster(decodes=2, unreachable=["d0"]) as c:
        for _ in range(4):
            async with c.post() as response:
                assert response.status == 200
        # No connection, so the params were never used: prefill ran once for each request.
        assert len(c.prefills[0].generations) == 4
        assert c.ledger.count("used") == 4


@asynchronous
@pytest.mark.parametrize(
    ("fault", "status"), [(Drop.BEFORE_HEAD, 502), (Refuse(500), 502), (Drop.HANG_BEFORE_HEAD, 504)], ids=str
)
async def test_without_another_decode_engine_the_client_is_told(fault, status):
    async with cluster(timeouts=IMPATIENT if fault is Drop.HANG_BEFORE_HEAD else PATIENT) as c:
        c.decodes[0].always = fault
        async with c.post() as response:
            assert response.status == status
            await error_of(response)


@asynchronous
async def test_a_broken_decode_connection_is_tried_once_more_with_fresh_params():
    async with cluster() as c:
        c.decodes[0].faults.append(Drop.BEFORE_HEAD)
        async with c.post() as response:
            assert response.status == 200
        assert len(c.prefills[0].generations) == 2
        assert len(c.decodes[0].generations) == 2


KV_LOAD_FAILED = b'data: {"error": {"message": "KV load failed", "type": "InternalServerError", "code": 500}}\n\n'
ANTHROPIC_ERROR = b'event: error\ndata: {"type":"error","error":{"type":"api_error","message":"KV load failed"}}\n\n'
EVENTS = {"Content-Type": "text/event-stream; charset=utf-8"}


@asynchronous
@pytest.mark.parametrize("decodes", [1, 2])
@pytest.mark.parametrize(
    "fault", [Refuse(200, KV_LOAD_FAILED, EVENTS), Refuse(200, ANTHROPIC_ERROR, EVENTS), Refuse(500)], ids=str
)
async def test_an_error_instead_of_an_answer_is_tried_again_with_fresh_params(fault, decodes):
    async with cluster(decodes=decodes) as c:
        c.decodes[0].faults.append(fault)
        async with c.post(body=STREAM) as response:
            assert response.status == 200
            assert await response.read() == b"".join(events(PATH, STREAM)) + b"data: [DONE]\n\n"
        assert len(c.prefills[0].generations) == 2
        assert [len(engine.generations) for engine in c.decodes] == ([2] if decodes == 1 else [1, 1])


@asynchronous
async def test_an_engine_that_answers_with_errors_only_is_asked_twice():
    async with cluster() as c:
        decode = c.decodes[0]
        # The error comes in two pieces; only both of them show what it is.
        decode.begin = b'data: {"er'
        decode.always = KV_LOAD_FAILED.removeprefix(decode.begin)
        decode.more.clear()
        asking = asyncio.create_task(read_status(c))
        await until(lambda: decode.bytes_sent)
        decode.more.set()
        assert await asking == (502, "An engine's stream began with an error: KV load failed")
        assert len(decode.generations) == 2
        assert await c.metric('pd_proxy_engine_failures_total{kind="broken",role="decode"}') == 2


async def read_status(c):
    async with c.post(body=STREAM) as response:
        return response.status, (await error_of(response))["message"]


@asynchronous
async def test_an_error_event_that_blames_the_client_is_passed_on():
    refusal = b'data: {"error": {"message": "too long", "code": 400}}\n\n'
    async with cluster() as c:
        c.decodes[0].always = Refuse(200, refusal, EVENTS)
        async with c.post(body=STREAM) as response:
            assert await response.read() == refusal
        assert len(c.decodes[0].generations) == 1
        assert await c.metric('pd_proxy_requests_total{endpoint="completions",outcome="error_event"}') == 1


@asynchronous
async def test_a_later_error_event_is_passed_on_and_told():
    async with cluster() as c:
        c.decodes[0].always = KV_LOAD_FAILED
        async with c.post(body=STREAM) as response:
            assert await response.read() == next(events(PATH, STREAM)) + KV_LOAD_FAILED
        assert await c.metric('pd_proxy_requests_total{endpoint="completions",outcome="error_event"}') == 1


@asynchronous
async def test_other_paths_move_to_another_engine_only_if_the_first_is_unreachable():
    async with (
        cluster(decodes=2, unreachable=["d0"]) as c,
        c.client.post(c.url + "/v1/embeddings", json={"input": "a"}) as response,
    ):
        assert response.status == 200
    async with cluster(decodes=1, unreachable=["d0"]) as c, c.client.get(c.url + "/v1/models") as response:
        assert response.status == 503
        await error_of(response)


@asynchronous
async def test_other_paths_are_not_tried_again_once_an_engine_may_have_acted():
    async with cluster(decodes=2) as c:
        for engine in c.decodes:
            engine.always = Drop.BEFORE_HEAD
        async with c.client.post(c.url + "/v1/embeddings", json={"input": "a"}) as response:
            assert response.status == 502
            await error_of(response)
        assert sum(len(engine.seen) for engine in c.decodes) == 1


# Decode fails after its first byte


@asynchronous
@pytest.mark.parametrize(("fault", "code"), [(Drop.IN_BODY, 502), (Drop.HANG_IN_BODY, 504)], ids=str)
async def test_a_stream_that_breaks_off_ends_with_an_error_and_the_end_mark(fault, code):
    # The idle time alone may end this: the others could end it too early.
    async with cluster(decodes=2, timeouts=IDLE) as c:
        c.decodes[0].always = fault
        async with c.post(body=STREAM) as response:
            assert response.status == 200
            first, error, end, rest = (await response.read()).split(b"\n\n")
        assert first + b"\n\n" == next(events(PATH, STREAM))
        assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == code
        assert (end, rest) == (b"data: [DONE]", b"")
        # Tokens are out: nothing is tried again.
        assert c.decodes[1].generations == []
        assert await c.metric('pd_proxy_requests_total{endpoint="completions",outcome="broken_stream"}') == 1


@asynchronous
@pytest.mark.parametrize(
    ("fault", "kind", "reason"),
    [
        (Drop.IN_BODY, "lost", "The connection to an engine broke"),
        (Drop.HANG_IN_BODY, "timed_out", "An engine did not answer in time"),
    ],
)
@pytest.mark.parametrize("prompt", ["a", ["a", "b"]], ids=["single", "list"])
async def test_an_engine_that_is_lost_in_mid_stream_is_avoided_and_told_of(fault, kind, reason, prompt):
    async with cluster(decodes=2, timeouts=IDLE) as c:
        c.decodes[0].always = fault
        async with c.post(body=STREAM | {"prompt": prompt}) as response:
            await response.read()
        assert await c.standing(c.decodes[0]) == "suspect"
        assert await c.standing(c.decodes[1]) == "unknown"
        assert await c.metric(f'pd_proxy_engine_failures_total{{kind="{kind}",role="decode"}}') == 1
        async with c.client.get(c.url + "/status.json") as response:
            (failed,) = (await response.json())["failed"]
        assert (failed["outcome"], failed["error"]) == ("broken_stream", reason)


@asynchronous
async def test_an_error_does_not_run_into_half_an_event():
    async with cluster(timeouts=IDLE) as c:
        c.decodes[0].always = Drop.HANG_IN_AN_EVENT
        async with c.post(body=STREAM) as response:
            events_seen = (await response.read()).split(b"\n\n")
        assert events_seen[-4] == b'data: {"cho'
        assert b'"code":504' in events_seen[-3]
        assert events_seen[-2:] == [b"data: [DONE]", b""]


@asynchronous
async def test_a_long_plain_reply_that_breaks_off_drops_the_connection():
    async with cluster() as c:
        c.decodes[0].always = Drop.AFTER_A_LONG_BODY
        async with c.post() as response:
            assert response.status == 200
            with pytest.raises(aiohttp.ClientPayloadError):
                await response.read()
        assert await c.metric('pd_proxy_requests_total{endpoint="completions",outcome="broken_stream"}') == 1


# Lists of prompts


@asynchronous
@pytest.mark.parametrize("body", [BODY, STREAM], ids=["plain", "stream"])
async def test_one_refused_prompt_refuses_the_list(body):
    async with cluster() as c:
        c.decodes[0].faults.extend([None, Refuse(400, b'{"error": "too long"}'), None])
        async with c.post(body=body | {"prompt": ["a", "b", "c"]}) as response:
            assert response.status == 400
            assert await response.read() == b'{"error": "too long"}'
        await until(lambda: not c.ledger.open_grants())


@asynchronous
async def test_a_refused_list_leaves_nothing_running():
    async with cluster() as c:
        decode = c.decodes[0]
        decode.more.clear()
        # One prompt is streaming and one is not answered yet when the third is refused.
        decode.faults.extend([None, Drop.HANG_BEFORE_HEAD, Refuse(400, after_seconds=0.1)])
        async with asyncio.timeout(2), c.post(body=STREAM | {"prompt": ["a", "b", "c"]}) as response:
            assert response.status == 400
        await until(lambda: [seen.aborted for seen in decode.generations] == [True, True, False])
        assert await c.metric(f'pd_proxy_engine_requests{{engine="{decode.url}",role="decode"}}') == 0


@asynchronous
async def test_a_list_survives_an_engine_that_dies():
    body = BODY | {"prompt": ["a", "b", "c", "d"]}
    async with cluster(2, 2) as c:
        c.decodes[0].always = Drop.BEFORE_HEAD
        async with c.post(body=body) as response:
            assert await response.json() == completion(PATH, body)


@asynchronous
@pytest.mark.parametrize("fault", [Drop.IN_BODY, Drop.HANG_IN_BODY], ids=str)
async def test_one_broken_stream_of_a_list_ends_the_list(fault):
    async with cluster(timeouts=IDLE) as c:
        c.decodes[0].faults.extend([None, fault])
        async with c.post(body=STREAM | {"prompt": ["a", "b"]}) as response:
            answer = await response.read()
        assert b'"error"' in answer
        assert answer.endswith(b"data: [DONE]\n\n")
        assert answer.count(b"[DONE]") == 1


@asynchronous
async def test_an_error_in_one_stream_of_a_list_is_the_error_of_the_list():
    reported = b'data: {"error": {"message": "KV load failed", "code": 500}}\n\n'
    async with cluster() as c:
        c.decodes[0].faults.extend([None, reported + b"data: [DONE]\n\n"])
        async with c.post(body=STREAM | {"prompt": ["a", "b"]}) as response:
            answer = await response.read()
        assert answer.endswith(reported + b"data: [DONE]\n\n")
        assert answer.count(b"[DONE]") == 1


@asynchronous
async def test_a_stream_of_a_list_without_an_end_mark_is_broken():
    async with cluster() as c:
        c.decodes[0].faults.extend([None, b": bye\n\n"])
        async with c.post(body=STREAM | {"prompt": ["a", "b"]}) as response:
            answer = await response.read()
        assert b'"code":502' in answer


@asynchronous
async def test_a_list_answered_with_something_else_is_a_bad_gateway():
    async with cluster() as c:
        c.decodes[0].faults.extend([None, Refuse(200, b'{"choices": 1}')])
        async with c.post(body=BODY | {"prompt": ["a", "b"]}) as response:
            assert response.status == 502
            await error_of(response)


@asynchronous
@pytest.mark.parametrize("prompt", ["one", ["a", "b"]], ids=["one", "list"])
async def test_after_a_broken_stream_the_next_request_on_its_connection_is_answered(prompt):
    async with cluster() as c, aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=1)) as client:
        for _ in range(20):
            c.decodes[0].faults.append(Drop.IN_BODY)
            # No client of HTTP repeats a POST by itself.
            for _ in ("broken", "whole"):
                body = {"model": "m", "prompt": prompt, "stream": True}
                async with client.post(c.url + "/v1/completions", json=body) as response:
                    assert (await response.read()).endswith(b"data: [DONE]\n\n")


@asynchronous
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_an_engine_that_closes_a_kept_connection_on_a_request_costs_the_client_nothing(role):
    async with cluster() as c:
        engine = {"prefill": c.prefills[0], "decode": c.decodes[0]}[role]
        for fault in (None, Drop.BEFORE_HEAD, None):
            engine.faults.append(fault)
            async with c.post(body=STREAM) as response:
                assert response.status == 200
                assert (await response.read()).endswith(b"data: [DONE]\n\n")
        # Prefill is asked again as if nothing had been, and decode with fresh params: it may have seen the first ones.
        lost = f'pd_proxy_engine_failures_total{{kind="lost",role="{role}"}}'
        assert await c.metric(lost) == (role == "decode")
        assert len(c.prefills[0].generations) == 4


@asynchronous
async def test_engines_that_were_started_again_are_asked_on_new_connections():
    async with cluster() as c:
        for _ in range(2):
            async with c.post(body=STREAM) as response:
                assert (await response.read()).endswith(b"data: [DONE]\n\n")
            for engine in (c.prefills[0], c.decodes[0]):
                await engine.restart()
        assert await c.standing(c.decodes[0]) == "unknown"
