"""Engines that die, hang and come back under a running proxy, and what it does when too few are left."""

import asyncio
from dataclasses import replace

import pytest

from proxy.config import Timeouts
from tests.proxy.fake_engines import PATIENT, Drop, Refuse, asynchronous, cluster, completion, error_of, until

BODY = {"model": "m", "prompt": "hello", "max_tokens": 5}
CHECKED = replace(PATIENT, health_seconds=0.2)


async def until_standing(c, engine, wanted):
    while await c.standing(engine) != wanted:  # noqa: ASYNC110 - only the metrics know
        await asyncio.sleep(0.01)


async def readiness(c):
    async with c.client.get(c.url + "/ready") as response:
        return response.status, await response.json()


@asynchronous
async def test_a_proxy_is_ready_once_an_engine_of_each_role_is_known_to_be_up():
    async with cluster(2, 1, timeouts=CHECKED) as c:
        for engine in (*c.prefills, *c.decodes):
            await until_standing(c, engine, "up")
        assert await readiness(c) == (200, {"ready": True, "draining": False, "engines": READY})
        c.prefills[0].healthy = False
        await until_standing(c, c.prefills[0], "down")
        assert (await readiness(c))[0] == 200
        await c.decodes[0].stop()
        await until_standing(c, c.decodes[0], "down")
        status, told = await readiness(c)
        assert (status, told["ready"]) == (503, False)
        assert told["engines"] == {"prefill": {"down": 1, "up": 1}, "decode": {"down": 1}}
        async with c.client.get(c.url + "/health") as response:
            assert response.status == 200


READY = {"prefill": {"up": 2}, "decode": {"up": 1}}


@asynchronous
async def test_a_proxy_that_has_checked_nobody_is_not_ready_but_serves():
    async with cluster() as c:
        status, told = await readiness(c)
        assert (status, told["engines"]) == (503, {"prefill": {"unknown": 1}, "decode": {"unknown": 1}})
        async with c.post() as response:
            assert response.status == 200


@asynchronous
async def test_a_draining_proxy_is_not_ready():
    async with cluster(timeouts=CHECKED) as c:
        await until_standing(c, c.prefills[0], "up")
        await until_standing(c, c.decodes[0], "up")
        async with c.client.get(c.url + "/ready") as response:
            assert response.status == 200
        c.decodes[0].more.clear()
        stream = await c.post(body=BODY | {"stream": True})
        async with c.client.get(c.url + "/ready") as response:
            assert response.status == 200
        # The listening socket closes with the drain; a connection for the next question is open.
        drained = asyncio.create_task(c.proxy.drain(5))
        await asyncio.sleep(0)
        status, told = await readiness(c)
        assert (status, told["draining"]) == (503, True)
        c.decodes[0].more.set()
        await stream.read()
        assert await drained


@asynchronous
async def test_a_dead_engine_leaves_the_rotation_without_a_request_and_comes_back():
    async with cluster(2, 1, timeouts=CHECKED) as c:
        dead = c.prefills[0]
        await until_standing(c, dead, "up")
        await dead.stop()
        await until_standing(c, dead, "down")
        ejections = f'pd_proxy_engine_ejections_total{{engine="{dead.url}",role="prefill"}}'
        assert await c.metric(ejections) == 1
        for _ in range(4):
            async with c.post() as response:
                assert response.status == 200
        # Nobody tried the dead engine, so nothing failed.
        assert await c.metric('pd_proxy_engine_failures_total{kind="unreachable",role="prefill"}') == 0
        await dead.restart()
        await until_standing(c, dead, "up")
        for _ in range(4):
            async with c.post() as response:
                assert response.status == 200
        assert dead.generations


@asynchronous
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_by_default_a_dead_engine_is_out_of_rotation_within_two_seconds(role):
    async with cluster(2, 2, timeouts=Timeouts()) as c:
        dead = (c.prefills if role == "prefill" else c.decodes)[0]
        await until_standing(c, dead, "up")
        await dead.stop()
        async with asyncio.timeout(2):
            while await c.standing(dead) == "up":  # noqa: ASYNC110 - only the metrics know
                await asyncio.sleep(0.01)
        for _ in range(4):
            async with c.post() as response:
                assert response.status == 200
        assert await c.metric(f'pd_proxy_engine_failures_total{{kind="unreachable",role="{role}"}}') == 0


@asynchronous
async def test_no_client_sees_an_engine_die_under_load():
    async with cluster(2, 2, timeouts=CHECKED) as c:

        async def client(number):
            for turn in range(10):
                body = BODY | {"prompt": f"{number} {turn}", "stream": bool(turn % 2)}
                async with c.post(body=body) as response:
                    assert response.status == 200, await response.text()
                    if not body["stream"]:
                        assert await response.json() == completion("/v1/completions", body)
                    else:
                        assert (await response.read()).endswith(b"data: [DONE]\n\n")

        clients = [asyncio.create_task(client(number)) for number in range(8)]
        await until(lambda: len(c.prefills[0].generations) > 5)
        c.prefills[0].always = Drop.BEFORE_HEAD
        c.decodes[1].always = Drop.BEFORE_HEAD
        await c.prefills[0].stop()
        await asyncio.gather(*clients)
        await until_standing(c, c.prefills[0], "down")


@asynchronous
async def test_a_silent_engine_is_a_last_resort_only():
    async with cluster(2, 1, timeouts=CHECKED) as c:
        c.prefills[0].silent = True
        await until_standing(c, c.prefills[0], "suspect")
        for _ in range(4):
            async with c.post() as response:
                assert response.status == 200
        assert c.prefills[0].generations == []
        c.prefills[1].healthy = False
        await until_standing(c, c.prefills[1], "down")
        async with c.post() as response:
            assert response.status == 200
        assert len(c.prefills[0].generations) == 1


@asynchronous
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_without_any_engine_of_a_role_requests_are_refused_before_any_other_runs(role):
    async with cluster(timeouts=CHECKED) as c:
        engine = (c.prefills if role == "prefill" else c.decodes)[0]
        engine.healthy = False
        await until_standing(c, engine, "down")
        async with c.post() as response:
            assert response.status == 503
            assert response.headers["Retry-After"] == "1"
            assert role in (await error_of(response))["message"]
        assert c.prefills[0].seen + c.decodes[0].seen == []
        assert await c.metric("pd_proxy_decode_only_fallbacks_total") == 0


@asynchronous
@pytest.mark.parametrize("fault", [None, Refuse(500), Drop.BEFORE_HEAD], ids=str)
async def test_decode_only_is_an_explicit_and_loud_choice(fault, caplog):
    async with cluster(timeouts=CHECKED, decode_only_fallback=True) as c:
        c.prefills[0].always = fault
        if fault is None:
            c.prefills[0].healthy = False
            await until_standing(c, c.prefills[0], "down")
        async with c.post(body=BODY) as response:
            assert await response.json() == completion("/v1/completions", BODY)
        assert c.decodes[0].generations[0].body == BODY
        assert await c.metric("pd_proxy_decode_only_fallbacks_total") == 1
        assert "--fallback decode-only" in caplog.text


@asynchronous
@pytest.mark.parametrize(
    ("fault", "status"), [(Refuse(503), 503), (Refuse(429), 429), (Drop.HANG_BEFORE_HEAD, 504)], ids=str
)
async def test_the_fallback_is_not_for_engines_that_are_busy_or_slow(fault, status):
    async with cluster(timeouts=replace(PATIENT, prefill_seconds=0.2), decode_only_fallback=True) as c:
        c.prefills[0].always = fault
        async with c.post() as response:
            assert response.status == status
        assert c.decodes[0].seen == []
        assert await c.metric("pd_proxy_decode_only_fallbacks_total") == 0


@asynchronous
async def test_a_prefill_engine_without_the_connector_is_told_of_once(caplog):
    async with cluster() as c:
        for offers in (True, False, False, True, False):
            c.prefills[0].offers_handoffs = offers
            async with c.post() as response:
                assert response.status == 200
    told = [record.levelname for record in caplog.records if "offers no hand-off" in record.getMessage()]
    assert told == ["WARNING", "WARNING"]


@asynchronous
async def test_the_fallback_is_not_for_what_prefill_refuses():
    async with cluster(decode_only_fallback=True) as c:
        c.prefills[0].always = Refuse(400)
        async with c.post() as response:
            assert response.status == 400
        assert c.decodes[0].seen == []
        assert await c.metric("pd_proxy_decode_only_fallbacks_total") == 0
