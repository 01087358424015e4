"""Engines that add and remove themselves: the connector's own client against the proxy's admin API."""

import asyncio
import logging
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from pd_transfer.runtime.registration import Pace, Registrar, Role, read_token
from proxy.registry import FORGET_SECONDS
from tests.proxy.fake_engines import PATIENT, FakeEngine, asynchronous, cluster, error_of

TOKEN = "0123456789abcdef"
KEY = {"Authorization": f"Bearer {TOKEN}"}
PACE = Pace()
CHECKED = replace(PATIENT, health_seconds=0.2)


@pytest.fixture
def token_file(tmp_path):
    path = tmp_path / "token"
    path.write_text(TOKEN + "\n")
    path.chmod(0o600)
    return path


class Bed:
    """A proxy that knows no engine, and engines that it has not heard of."""

    def __init__(self, c, token_file):
        self.c = c
        self.token_file = token_file
        self.engines = []

    async def engine(self):
        engine = FakeEngine(self.c.ledger)
        await engine.start()
        self.engines.append(engine)
        return engine

    def registrar(self, engine, *roles):
        """What an engine runs. It blocks, so that its methods belong into a thread: the proxy runs in this one."""
        return Registrar(self.c.url + "/", engine.url + "/", roles, lambda: read_token(self.token_file), PACE)

    async def pair(self):
        engines = [await self.engine(), await self.engine()]
        return engines, [
            self.registrar(engine, role) for engine, role in zip(engines, (Role.PREFILL, Role.DECODE), strict=True)
        ]

    async def ask(self, method, path, body=None):
        async with self.c.client.request(method, self.c.url + path, json=body, headers=KEY) as response:
            return await response.json()

    async def listed(self):
        """Role and address of every engine that the proxy knows."""
        engines = (await self.ask("GET", "/admin/engines"))["engines"]
        return [(engine["role"], engine["url"]) for engine in engines]

    async def is_ready(self):
        return (await self.ask("GET", "/ready"))["ready"]


@asynccontextmanager
async def bed(token_file):
    async with cluster(0, 0, admin_token_file=token_file, timeouts=CHECKED) as c:
        made = Bed(c, token_file)
        yield made
        await asyncio.gather(*(engine.stop() for engine in made.engines))


@asynchronous
async def test_a_proxy_without_engines_serves_once_one_of_each_role_has_registered(token_file):
    async with bed(token_file) as b:
        assert await b.listed() == []
        async with b.c.post() as response:
            assert response.status == 503
        (prefill, decode), registrars = await b.pair()
        for registrar in registrars:
            assert not await b.is_ready()
            assert await asyncio.to_thread(registrar.turn) == PACE.repeat
        assert await b.listed() == [("prefill", prefill.url), ("decode", decode.url)]
        async with b.c.post() as response:
            assert response.status == 200
        assert (len(prefill.generations), len(decode.generations)) == (1, 1)
        while not await b.is_ready():  # noqa: ASYNC110 - only the proxy knows
            await asyncio.sleep(0.01)


@asynchronous
async def test_an_engine_that_stops_is_gone_at_once_and_one_that_was_never_known_too(token_file):
    async with bed(token_file) as b:
        (prefill, _), registrars = await b.pair()
        for registrar in registrars:
            await asyncio.to_thread(registrar.turn)
        await asyncio.to_thread(registrars[1].leave)
        assert await b.listed() == [("prefill", prefill.url)]
        await b.ask("DELETE", "/admin/registrations", {"role": "prefill", "url": prefill.url})
        # The proxy has forgotten it, as after a restart.
        await asyncio.to_thread(registrars[0].leave)
        assert await b.listed() == []


@asynchronous
async def test_an_engine_of_both_roles_is_a_member_of_both(token_file):
    async with bed(token_file) as b:
        engine = await b.engine()
        registrar = b.registrar(engine, *Role)
        await asyncio.to_thread(registrar.turn)
        assert await b.listed() == [("prefill", engine.url), ("decode", engine.url)]
        await asyncio.to_thread(registrar.leave)
        assert await b.listed() == []


@asynchronous
async def test_registering_again_says_nothing_and_leaves_a_draining_engine_alone(token_file, caplog):
    caplog.set_level(logging.INFO)
    async with bed(token_file) as b:
        engine = await b.engine()
        registrar = b.registrar(engine, Role.DECODE)
        await asyncio.to_thread(registrar.turn)
        await b.ask("POST", "/admin/engines/drain", {"role": "decode", "url": engine.url})
        for _ in range(3):
            await asyncio.to_thread(registrar.turn)
        (listed,) = (await b.ask("GET", "/admin/engines"))["engines"]
        assert listed["standing"] == "draining"
    told = [record.getMessage() for record in caplog.records if record.name == "proxy.admin"]
    assert told == [
        f"decode engine {engine.url} has registered itself",
        f"by the admin API: decode engine {engine.url} draining",
    ]


@asynchronous
async def test_an_engine_that_does_not_serve_yet_is_not_offered(token_file):
    async with bed(token_file) as b:
        engine = await b.engine()
        engine.healthy = False
        registrar = b.registrar(engine, Role.DECODE)
        assert await asyncio.to_thread(registrar.turn) == PACE.start
        assert await b.listed() == []
        engine.healthy = True
        assert await asyncio.to_thread(registrar.turn) == PACE.repeat
        assert await b.listed() == [("decode", engine.url)]


@asynchronous
async def test_a_refusal_is_told_in_the_proxys_words(token_file, caplog):
    async with bed(token_file) as b:
        engine = await b.engine()
        registrar = b.registrar(engine, Role.DECODE)
        token_file.write_text("another one of 16 characters".replace(" ", "-"))
        assert await asyncio.to_thread(registrar.turn) == PACE.start
        assert await b.listed() == []
        assert "HTTP 401 'The admin API needs its token: Authorization: Bearer TOKEN'" in caplog.text
        # The file is read each time.
        token_file.write_text(TOKEN)
        assert await asyncio.to_thread(registrar.turn) == PACE.repeat
        assert await b.listed() == [("decode", engine.url)]


@asynchronous
@pytest.mark.parametrize("method", ["POST", "DELETE"])
@pytest.mark.parametrize(
    ("headers", "body", "status", "told"),
    [
        ({}, {"role": "decode", "url": "http://x:1"}, 401, "needs its token"),
        (KEY, {"role": "both", "url": "http://x:1"}, 400, "both"),
        (KEY, {"role": "decode", "url": "http://x:1", "weight": 2}, 400, "weight"),
    ],
)
async def test_mistakes_change_nothing(token_file, method, headers, body, status, told):
    async with bed(token_file) as b:
        url = b.c.url + "/admin/registrations"
        async with b.c.client.request(method, url, json=body, headers=headers) as response:
            assert response.status == status
            assert told in (await error_of(response))["message"]
        assert await b.listed() == []


@asynchronous
async def test_an_address_that_is_none_is_refused(token_file):
    async with bed(token_file) as b:
        answer = await b.ask("POST", "/admin/registrations", {"role": "decode", "url": "x:1"})
        assert "not an address of an engine" in answer["error"]["message"]
        assert await b.listed() == []


@asynchronous
async def test_without_a_token_file_nobody_registers():
    async with cluster() as c:
        body = {"role": "decode", "url": "http://x:1"}
        async with c.client.post(c.url + "/admin/registrations", json=body, headers=KEY) as response:
            assert response.status == 404
            assert "--admin-token-file" in (await error_of(response))["message"]


def test_an_engine_has_many_tries_before_it_would_be_forgotten():
    assert 4 * (PACE.repeat + 2 * PACE.answer) < FORGET_SECONDS
