"""Which way a request takes: affinity, ranks, short prompts, and the queue; first as functions, then as requests."""

import asyncio
import json

import pytest

from proxy.affinity import PREFIX_BYTES, hints_of
from proxy.relay import parse_body
from proxy.routing import NO_HINTS
from tests.proxy.fake_engines import asynchronous, cluster, completion, error_of, until

LONG = "x" * PREFIX_BYTES


def hints(body, headers=None):
    return hints_of(headers or {}, parse_body(json.dumps(body).encode()))


@pytest.mark.parametrize("field", ["prompt", "messages", "input", "token_ids", "system", "instructions"])
def test_prompts_that_begin_alike_have_the_same_prefix(field):
    assert hints({field: LONG + "a"}).prefix == hints({field: LONG + "b"}).prefix != b""
    assert hints({field: "a" + LONG}).prefix != hints({field: "b" + LONG}).prefix


def test_what_is_no_part_of_the_prompt_does_not_matter_but_its_salt_does():
    plain = hints({"prompt": "p"}).prefix
    assert hints({"prompt": "p", "temperature": 0.5, "user": "u", "tools": [1]}).prefix == plain
    assert hints({"prompt": "p", "cache_salt": "s"}).prefix != plain


def test_a_session_is_named_by_the_header_or_the_body():
    one = hints({}, {"X-Session-ID": "s"}).session
    assert one != b""
    assert hints({"user": "other"}, {"X-Session-ID": "s"}).session == one
    for field in ("session_id", "prompt_cache_key", "user"):
        assert hints({field: "s"}).session == one
        assert hints({field: 7}).session == b""
        assert hints({field: "t"}).session not in {b"", one}
    assert hints({"user": "a", "session_id": "s"}).session == one


def test_a_request_may_say_nothing():
    assert hints({"model": "m"}) == NO_HINTS


@asynchronous
async def test_prompts_that_begin_alike_meet_at_one_prefill_engine():
    async with cluster(3, 2, prefill_policy="prefix-affinity") as c:
        for family in range(6):
            for member in range(4):
                async with c.post(body={"prompt": f"{family}{LONG}{member}"}) as response:
                    assert response.status == 200
        families = [{seen.body["prompt"][0] for seen in engine.generations} for engine in c.prefills]
        assert sum(map(len, families)) == 6
        assert [len(engine.generations) for engine in c.decodes] == [12, 12]


@asynchronous
async def test_a_session_stays_on_its_engines():
    async with cluster(3, 3, prefill_policy="session-affinity", decode_policy="session-affinity") as c:
        for turn in range(6):
            async with c.post(body={"prompt": f"turn {turn}"}, headers={"X-Session-ID": "mine"}) as response:
                assert response.status == 200
        assert sorted(len(engine.generations) for engine in c.prefills) == [0, 0, 6]
        assert sorted(len(engine.generations) for engine in c.decodes) == [0, 0, 6]


@asynchronous
async def test_short_prompts_skip_remote_prefill():
    async with cluster(min_remote_tokens=100) as c:
        for prompt in ("short", [1] * 99, "long " * 100, [1] * 100):
            async with c.post(body={"prompt": prompt}) as response:
                assert await response.json() == completion("/v1/completions", {"prompt": prompt})
        assert [seen.body["prompt"] for seen in c.prefills[0].generations] == ["long " * 100, [1] * 100]
        handed = ["kv_transfer_params" in seen.body for seen in c.decodes[0].generations]
        assert handed == [False, False, True, True]


RANK = "X-data-parallel-rank"


@asynchronous
async def test_each_leg_names_the_rank_with_the_least_to_do():
    async with cluster(num_ranks=2) as c:
        c.decodes[0].more.clear()
        stream = {"prompt": "p", "stream": True}
        responses = [await c.post(body=stream, headers={RANK: "7"}) for _ in range(4)]
        assert [seen.headers[RANK] for seen in c.decodes[0].generations] == ["0", "1", "0", "1"]
        assert [seen.headers[RANK] for seen in c.prefills[0].generations] == ["0"] * 4
        async with c.client.get(c.url + "/v1/models") as response:
            assert response.status == 200
        assert c.decodes[0].seen[-1].headers[RANK] == "0"
        c.decodes[0].more.set()
        for response in responses:
            await response.read()


@asynchronous
async def test_without_ranks_the_client_s_choice_passes():
    async with cluster() as c:
        async with c.post(headers={RANK: "7"}) as response:
            assert response.status == 200
        assert c.decodes[0].generations[0].headers[RANK] == "7"


@asynchronous
async def test_requests_beyond_the_limits_wait_or_are_refused():
    async with cluster(max_in_flight=1, max_queued=1) as c:
        c.decodes[0].more.clear()
        first = await c.post(body={"prompt": "p", "stream": True})
        second = asyncio.create_task(c.post().__aenter__())
        await until(c.queued)
        assert await c.metric("pd_proxy_queued_requests") == 1
        async with c.post() as response:
            assert response.status == 429
            assert response.headers["Retry-After"] == "1"
            assert (await error_of(response))["type"] == "RateLimitError"
        assert len(c.prefills[0].generations) == 1
        c.decodes[0].more.set()
        await first.read()
        async with await second as response:
            assert response.status == 200
