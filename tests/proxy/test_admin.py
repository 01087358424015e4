"""Engines that an operator adds, drains and removes."""

import pytest

from proxy.admin import read_token
from proxy.config import ConfigError
from tests.proxy.fake_engines import FakeEngine, asynchronous, cluster, error_of

TOKEN = "0123456789abcdef"
KEY = {"Authorization": f"Bearer {TOKEN}"}
STREAM = {"prompt": "p", "stream": True}


@pytest.fixture
def token_file(tmp_path):
    path = tmp_path / "token"
    path.write_text(TOKEN + "\n")
    return path


async def ask(c, method, path="/admin/engines", body=None, headers=KEY):
    """Status and answer: the engines by address, or the error."""
    async with c.client.request(method, c.url + path, json=body, headers=headers) as response:
        if response.status != 200:
            return response.status, await error_of(response)
        return 200, {engine["url"]: engine for engine in (await response.json())["engines"]}


def named(role, engine):
    return {"role": role, "url": engine.url}


@asynchronous
async def test_engines_are_listed_with_what_they_do(token_file):
    async with cluster(1, 2, admin_token_file=token_file) as c:
        c.decodes[0].more.clear()
        stream = await c.post(body=STREAM)
        status, engines = await ask(c, "GET")
        assert status == 200
        assert set(engines) == {engine.url for engine in (*c.prefills, *c.decodes)}
        listed = engines[c.decodes[0].url]
        assert (listed["role"], listed["standing"], listed["requests"]) == ("decode", "unknown", 1)
        assert listed["tokens"] > 0
        c.decodes[0].more.set()
        await stream.read()


@asynchronous
async def test_an_engine_is_added_and_used(token_file):
    async with cluster(1, 1, admin_token_file=token_file) as c:
        new = FakeEngine(c.ledger)
        await new.start()
        status, engines = await ask(c, "POST", body={"role": "prefill", "url": new.url + "/"})
        assert (status, new.url in engines) == (200, True)
        for _ in range(2):
            async with c.post() as response:
                assert response.status == 200
        assert len(new.generations) == 1
        await new.stop()


@asynchronous
async def test_a_draining_engine_finishes_and_gets_nothing_new_until_it_is_added_again(token_file):
    async with cluster(1, 2, admin_token_file=token_file) as c:
        leaving = c.decodes[0]
        leaving.more.clear()
        stream = await c.post(body=STREAM)
        _, engines = await ask(c, "POST", "/admin/engines/drain", named("decode", leaving))
        assert (engines[leaving.url]["standing"], engines[leaving.url]["requests"]) == ("draining", 1)
        for _ in range(2):
            async with c.post() as response:
                assert response.status == 200
        assert len(leaving.generations) == 1
        leaving.more.set()
        assert (await stream.read()).endswith(b"data: [DONE]\n\n")
        _, engines = await ask(c, "GET")
        assert engines[leaving.url]["requests"] == 0
        await ask(c, "POST", body=named("decode", leaving))
        for _ in range(2):
            async with c.post() as response:
                assert response.status == 200
        assert len(leaving.generations) == 2


@asynchronous
async def test_a_removed_engine_is_forgotten_but_finishes(token_file):
    async with cluster(1, 2, admin_token_file=token_file) as c:
        leaving = c.decodes[0]
        leaving.more.clear()
        stream = await c.post(body=STREAM)
        status, engines = await ask(c, "DELETE", body=named("decode", leaving))
        assert (status, leaving.url in engines) == (200, False)
        leaving.more.set()
        assert (await stream.read()).endswith(b"data: [DONE]\n\n")
        assert leaving.url not in (await ask(c, "GET"))[1]


@asynchronous
@pytest.mark.parametrize(
    ("method", "path", "body", "told"),
    [
        ("POST", "/admin/engines", {"role": "chef", "url": "http://x:1"}, "chef"),
        ("POST", "/admin/engines", {"role": "decode"}, "url"),
        ("POST", "/admin/engines", {"role": "decode", "url": "x:1"}, "not an address"),
        ("POST", "/admin/engines", {"role": "decode", "url": "http://x:1", "weight": 2}, "weight"),
        ("DELETE", "/admin/engines", [1], "role"),
        ("DELETE", "/admin/engines", {"role": "decode", "url": "http://x:1"}, "no decode engine"),
        ("POST", "/admin/engines/drain", {"role": "decode", "url": "http://x:1"}, "no decode engine"),
        ("PUT", "/admin/engines", {}, "no such call"),
        ("GET", "/admin/other", None, "no such call"),
    ],
)
async def test_mistakes_are_explained_and_change_nothing(token_file, method, path, body, told):
    async with cluster(admin_token_file=token_file) as c:
        before = await ask(c, "GET")
        status, error = await ask(c, method, path, body)
        assert status in {400, 404}
        assert told in error["message"]
        assert await ask(c, "GET") == before


@asynchronous
@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": TOKEN},
        {"Authorization": "Bearer"},
        {"Authorization": "Bearer wrong"},
        {"Authorization": f"Bearer {TOKEN}x"},
        {"Authorization": f"Basic {TOKEN}"},
        {"Authorization": "Bearer \u00e9"},
    ],
)
async def test_without_the_token_nothing_is_told_or_changed(token_file, headers):
    async with cluster(admin_token_file=token_file) as c:
        engine = named("decode", c.decodes[0])
        for method, path in (
            ("GET", "/admin/engines"),
            ("POST", "/admin/engines"),
            ("DELETE", "/admin/engines"),
            ("POST", "/admin/engines/drain"),
        ):
            status, error = await ask(c, method, path, engine, headers)
            assert (status, error["type"]) == (401, "AuthenticationError")
        assert (await ask(c, "GET"))[1][c.decodes[0].url]["standing"] == "unknown"
        assert c.decodes[0].seen == []


@asynchronous
async def test_the_scheme_may_be_written_in_any_case(token_file):
    async with cluster(admin_token_file=token_file) as c:
        assert (await ask(c, "GET", headers={"Authorization": f"bearer {TOKEN}"}))[0] == 200


@asynchronous
async def test_without_a_token_file_the_api_is_off_and_reaches_no_engine():
    async with cluster() as c:
        for method in ("GET", "POST", "DELETE", "PUT"):
            for path in ("/admin/engines", "/admin/engines/drain", "/admin/other"):
                assert (await ask(c, method, path, {}))[0] == 404
        assert c.decodes[0].seen == []


@asynchronous
async def test_the_api_works_while_no_request_gets_through(token_file):
    async with cluster(admin_token_file=token_file, max_in_flight=1) as c:
        c.decodes[0].more.clear()
        stream = await c.post(body=STREAM)
        assert (await ask(c, "GET"))[0] == 200
        c.decodes[0].more.set()
        await stream.read()


@pytest.mark.parametrize("text", ["", "short", "\u00e9" * 20])
def test_a_file_that_holds_no_token_is_refused(tmp_path, text):
    path = tmp_path / "token"
    path.write_text(text)
    with pytest.raises(ConfigError, match="token"):
        read_token(path)
    with pytest.raises(ConfigError, match="No such file"):
        read_token(tmp_path / "missing")
