"""The start-up canary: KV moves through every pair of engines, or the proxy ends and says where it does not."""

import asyncio
import re
import signal
import sys
from collections import Counter
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from proxy.canary import Canary, CanaryError, Counts, Pace, loaded, losses, read_counts
from proxy.engines import EngineClient
from proxy.http1.pool import Pool
from tests.proxy.fake_engines import PATIENT, Drop, FakeEngine, Ledger, Refuse, asynchronous

HASTY = Pace(look_seconds=0.01, check_seconds=0.5, count_seconds=0.1, try_seconds=2.0, pauses=(0.01, 0.01))
LABELS = 'engine="0",model_name="m"'


class CountingEngine(FakeEngine):
    """Also lists its model and counts what it loads. ``unread`` makes it recompute, for a reason or for none."""

    def __init__(self, ledger):
        super().__init__(ledger)
        self.model = b'{"data": [{"id": "m"}]}'
        self.unread = None
        self.counts_ours = True
        self.counts_at_all = True
        self.key = None
        self.loads = Counter()

    async def _generate(self, request):
        if self.key is not None and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        body = await request.json()
        if (body.get("kv_transfer_params") or {}).get("do_remote_prefill"):
            self.loads["receive_verified" if self.unread is None else self.unread] += 1
        return await super()._generate(request)

    async def _other(self, request):
        if request.path == "/v1/models":
            return web.Response(body=self.model)
        if request.path == "/metrics":
            return web.Response(text=self._metrics() if self.counts_at_all else "# nothing\n")
        return await super()._other(request)

    def _metrics(self):
        tokens = 63 * self.loads["receive_verified"]
        lines = ["# TYPE pd_transfer:tokens_verified_total counter"] if self.counts_ours else []
        if self.counts_ours and tokens:
            lines.append(f"pd_transfer:tokens_verified_total{{{LABELS}}} {tokens}")
        if self.counts_ours:
            lines += [
                f'pd_transfer:outcomes_total{{{LABELS},outcome="{name}"}} {count}'
                for name, count in self.loads.items()
                if name
            ]
        # vLLM counts what it was promised, so also what was not read in the end.
        promised = 63 * sum(self.loads.values())
        for source, count in (("local_compute", 7), ("external_kv_transfer", promised)):
            lines.append(f'vllm:prompt_tokens_by_source_total{{{LABELS},source="{source}"}} {count}')
        return "\n".join(lines) + "\n"


@asynccontextmanager
async def engines(prefills=1, decodes=1):
    ledger = Ledger()
    started = [CountingEngine(ledger) for _ in range(prefills + decodes)]
    for engine in started:
        await engine.start()
    try:
        yield started[:prefills], started[prefills:]
    finally:
        for engine in started:
            await engine.stop()


async def sing(prefills, decodes, wait_seconds=0.1, key=None):
    async with Pool() as pool:
        canary = Canary(EngineClient(pool, PATIENT), key, HASTY)
        await canary.move_kv([engine.url for engine in prefills], [engine.url for engine in decodes], wait_seconds)


async def complaint(prefills, decodes, **kwargs):
    with pytest.raises(CanaryError) as raised:
        await sing(prefills, decodes, **kwargs)
    return str(raised.value)


@asynchronous
async def test_kv_moves_once_through_every_pair():
    async with engines(2, 3) as (prefills, decodes):
        await sing(prefills, decodes)
        assert [engine.loads for engine in decodes] == [{"receive_verified": 2}] * 3
        assert [len(engine.generations) for engine in prefills] == [3, 3]
        assert prefills[0].ledger.mismatches == []
        assert prefills[0].ledger.open_grants() == []


@asynchronous
async def test_no_cache_can_answer_for_the_transfer():
    async with engines() as (prefills, decodes):
        await sing(prefills, decodes)
        await sing(prefills, decodes)
        salts = [seen.body["cache_salt"] for seen in decodes[0].generations]
        assert len(set(salts)) == 2
        assert [seen.body["cache_salt"] for seen in prefills[0].generations] == salts


@asynchronous
async def test_a_pair_that_moves_nothing_is_named_with_decodes_reason():
    async with engines(2, 2) as (prefills, decodes):
        decodes[1].unread = "peer_refused"
        told = (await complaint(prefills, decodes)).splitlines()
        assert told == [
            f"no KV moved from {prefill.url} to {decodes[1].url}: decode counts no loaded tokens (peer_refused)"
            for prefill in prefills
        ]


@asynchronous
async def test_decode_that_tells_no_reason():
    async with engines() as (prefills, decodes):
        decodes[0].counts_at_all = False
        assert "(and tells no reason)" in await complaint(prefills, decodes)


@asynchronous
async def test_another_connector_is_judged_by_what_vllm_counts():
    async with engines() as (prefills, decodes):
        decodes[0].counts_ours = False
        await sing(prefills, decodes)


@asynchronous
async def test_a_prefill_engine_without_the_connector():
    async with engines() as (prefills, decodes):
        prefills[0].offers_handoffs = False
        assert "prefill offers no hand-off" in await complaint(prefills, decodes)


@asynchronous
async def test_a_pair_gets_another_try():
    async with engines() as (prefills, decodes):
        prefills[0].faults.append(Refuse(500))
        decodes[0].faults.append(Drop.BEFORE_HEAD)
        await sing(prefills, decodes)
        assert decodes[0].loads["receive_verified"] == 2


@asynchronous
@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (Refuse(400, b'{"error": "too long"}'), 'an engine answered 400: {"error": "too long"}'),
        (Refuse(500), "An engine answered 500: no"),
        (Drop.BEFORE_HEAD, "The connection to an engine broke"),
        (Drop.HANG_BEFORE_HEAD, "no answer within 0.1 s"),
    ],
    ids=str,
)
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_an_engine_that_fails_is_a_reason(role, fault, told):
    async with engines() as (prefills, decodes), Pool() as pool:
        (prefills if role == "prefill" else decodes)[0].always = fault
        pace = Pace(look_seconds=0.01, count_seconds=0.1, try_seconds=0.1, pauses=())
        canary = Canary(EngineClient(pool, PATIENT), None, pace)
        with pytest.raises(CanaryError, match=re.escape(told)):
            await canary.move_kv([prefills[0].url], [decodes[0].url], 1.0)


@asynchronous
@pytest.mark.parametrize("model", [b"[]", b'{"data": []}', b"no json"])
async def test_a_decode_engine_without_a_model(model):
    async with engines() as (prefills, decodes):
        decodes[0].model = model
        assert "no KV moved" in await complaint(prefills, decodes)


@asynchronous
async def test_the_engines_api_key():
    async with engines() as (prefills, decodes):
        prefills[0].key = decodes[0].key = "secret"
        await sing(prefills, decodes, key="secret")
        told = await complaint(prefills, decodes)
        assert "401" in told
        assert "secret" not in told


@asynchronous
async def test_an_engine_that_comes_late_is_waited_for():
    async with engines() as (prefills, decodes):
        await decodes[0].stop()
        singing = asyncio.create_task(sing(prefills, decodes, wait_seconds=10.0))
        await asyncio.sleep(0.05)
        assert not singing.done()
        await decodes[0].start()
        await singing
        assert decodes[0].loads["receive_verified"] == 1


@asynchronous
async def test_an_engine_that_never_comes_is_left_out(caplog):
    async with engines(1, 2) as (prefills, decodes):
        await decodes[0].stop()
        await sing(prefills, decodes)
        assert decodes[1].loads["receive_verified"] == 1
        assert f"not up after 0.1 s, so not tried: {decodes[0].url}" in caplog.text


@asynchronous
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_role_without_an_engine(role):
    async with engines() as (prefills, decodes):
        await (prefills if role == "prefill" else decodes)[0].stop()
        assert await complaint(prefills, decodes) == f"no {role} engine is up"


def test_counts_are_summed_over_the_ranks_of_an_engine():
    text = "".join(
        f'pd_transfer:tokens_verified_total{{engine="{rank}"}} {rank + 1}\n'
        f'pd_transfer:outcomes_total{{engine="{rank}",outcome="receive_stale"}} 2\n'
        f'vllm:prompt_tokens_by_source_total{{engine="{rank}",source="external_kv_transfer"}} 5\n'
        f'vllm:prompt_tokens_by_source_total{{engine="{rank}",source="local_compute"}} 100\n'
        for rank in range(2)
    )
    assert read_counts(text) == Counts(3.0, {"receive_stale": 4.0}, 10.0, is_ours=True)
    assert read_counts("") == Counts(0.0, {}, 0.0, is_ours=False)


def test_our_own_count_is_believed_before_vllms():
    nothing = Counts(0.0, {}, 0.0, is_ours=True)
    promised = Counts(0.0, {"peer_refused": 1.0, "receive_verified": 1.0}, 63.0, is_ours=True)
    assert not loaded(nothing, promised)
    assert losses(nothing, promised) == "peer_refused"
    assert losses(promised, promised) == ""
    assert loaded(nothing, promised._replace(is_ours=False))
    assert loaded(nothing, promised._replace(verified=1.0))


@asynccontextmanager
async def process(prefill_url, decode_url, seconds):
    arguments = ("--prefill", prefill_url, "--decode", decode_url, "--port", "0", "--canary", seconds)
    started = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "proxy", *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        yield started
    finally:
        if started.returncode is None:
            started.kill()
            await started.wait()


@asynchronous
async def test_the_program_listens_after_its_canary():
    async with engines() as (prefills, decodes), process(prefills[0].url, decodes[0].url, "10") as started:
        assert (await started.stdout.readline()).startswith(b"pd-proxy listens on http://")
        assert decodes[0].loads["receive_verified"] == 1
        started.send_signal(signal.SIGTERM)
        _, errors = await started.communicate()
        assert started.returncode == 0
        assert b"KV moves through 1 pairs of engines" in errors


@asynchronous
async def test_the_program_ends_when_no_kv_moves():
    async with engines() as (prefills, decodes), process(prefills[0].url, decodes[0].url, "10") as started:
        prefills[0].offers_handoffs = False
        output, errors = await started.communicate()
        assert (started.returncode, output) == (1, b"")
        assert f"pd-proxy: no KV moved from {prefills[0].url} to {decodes[0].url}: ".encode() in errors
        assert b"Traceback" not in errors


@asynchronous
async def test_a_signal_ends_the_wait_for_engines():
    async with engines() as (prefills, decodes):
        await decodes[0].stop()
        async with process(prefills[0].url, decodes[0].url, "1000") as started:
            async with asyncio.timeout(10):
                while b"http" not in await started.stderr.readline():
                    pass
            await asyncio.sleep(0.3)
            started.send_signal(signal.SIGTERM)
            output, errors = await started.communicate()
            assert (started.returncode, output) == (0, b"")
            assert b"Traceback" not in errors
