"""The status page in a real browser: what a person sees, and that it needs nothing but the proxy.

Run by hand, with a Chromium: ``.venv/bin/pytest -m slow tests/proxy/test_status_page.py``. With ``STATUS_PAGE_SHOTS``
set to a folder, pictures of the pages are left there.
"""

import os
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tests.proxy.browser import CHROMIUM, tab
from tests.proxy.fake_engines import PATIENT, Refuse, asynchronous, cluster

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs a Chromium: apt-get install chromium"),
]

TOKEN = "0123456789abcdef"
KEY = {"Authorization": f"Bearer {TOKEN}"}
STREAM = {"prompt": "hello", "max_tokens": 5, "stream": True, "stream_options": {"include_usage": True}}
CHECKED = replace(PATIENT, health_seconds=0.2)
SHOWN = "document.querySelectorAll('#engines tr').length > 1"
SUMMARY = "document.getElementById('summary').innerText"


@asynccontextmanager
async def shown(c, name, **size):
    """The page of a proxy. It must ask nobody else for anything, and never complain."""
    async with tab() as page:
        await page.open(c.url + "/status", **size)
        yield page
        if folder := os.environ.get("STATUS_PAGE_SHOTS"):
            await page.screenshot(Path(folder) / f"{name}.png")
    assert page.requested
    assert [url for url in page.requested if not url.startswith((c.url, "data:"))] == []
    assert page.complaints == []


def column(rows, name):
    """A column of a table under its head."""
    where = rows[0].index(name)
    return [row[where] for row in rows[1:]]


@asynchronous
async def test_the_page_shows_engines_load_recent_requests_and_errors():
    async with cluster(2, 1, timeouts=CHECKED) as c:
        await c.prefills[1].stop()
        c.prefills[0].faults.append(Refuse(400))
        for name in ("refused", "answered"):
            async with c.post(headers={"X-Request-Id": name}) as response:
                await response.read()
        c.decodes[0].more.clear()
        stream = await c.post(body=STREAM)
        async with shown(c, "engines") as page:
            await page.until(SHOWN)
            await page.until("document.querySelector('#engines .bad')?.innerText === 'down'")
            engines, failed, recent = [await page.rows(table) for table in ("engines", "failed", "recent")]
            assert column(engines, "engine") == [engine.url for engine in (*c.prefills, *c.decodes)]
            assert column(engines, "role") == ["prefill", "prefill", "decode"]
            assert column(engines, "member by") == ["command line"] * 3
            assert column(engines, "standing") == ["up", "down", "up"]
            assert column(engines, "requests") == ["0", "0", "1"]
            assert int(column(engines, "tokens")[2]) > 0
            assert column(recent, "id") == ["answered", "refused"]
            assert column(recent, "outcome") == ["ok", "rejected"]
            assert column(recent, "status") == ["200", "400"]
            assert column(recent, "decode")[0] == c.decodes[0].url
            assert column(failed, "id") == ["refused"]
            assert column(failed, "error") == ["an engine answered 400"]
            assert await page.run(SUMMARY) == "1 in flight, 0 queued"
            # It follows by itself.
            c.decodes[0].more.set()
            await stream.read()
            await page.until(f"{SUMMARY} === '0 in flight, 0 queued'")
            recent = await page.rows("recent")
            assert column(recent, "answer tokens")[0] == "3"
        # A browser that looks at the page leaves no request of its own in it.
        assert [seen.path for seen in c.decodes[0].seen] == ["/v1/completions"] * 2


@asynchronous
async def test_what_a_client_sends_is_only_ever_shown():
    async with cluster() as c:
        c.prefills[0].faults.append(Refuse(400))
        evil = "<img src=x onerror=document.title='evil'>"
        async with c.post(headers={"X-Request-Id": evil}) as response:
            await response.read()
        async with shown(c, "markup") as page:
            await page.until(SHOWN)
            assert column(await page.rows("recent"), "id") == [evil]
            assert await page.run("document.images.length") == 0
            assert await page.run("document.title") == "pd-proxy"


@asynchronous
async def test_a_proxy_with_a_token_asks_for_it_and_shows_who_made_an_engine_a_member(tmp_path):
    token_file = tmp_path / "token"
    token_file.write_text(TOKEN)
    async with cluster(admin_token_file=token_file) as c, tab() as page:
        for path in ("engines", "registrations"):
            call = {"role": "decode", "url": f"http://127.0.0.1:9/{path}"}
            async with c.client.post(f"{c.url}/admin/{path}", json=call, headers=KEY) as response:
                assert response.status == 200
        await page.open(c.url + "/status")
        await page.until("!document.getElementById('token').hidden")
        assert "401" in await page.run(SUMMARY)
        for token, seen in (("wrong", "401"), (TOKEN, "0 in flight")):
            await page.run(f"document.querySelector('#token input').value = '{token}'")
            await page.run("document.querySelector('#token button').click()")
            await page.until(f"{SUMMARY}.includes('{seen}')")
        await page.until(SHOWN)
        assert await page.run("document.getElementById('token').hidden")
        members = column(await page.rows("engines"), "member by")
        assert members == ["command line", "command line", "admin", "registered"]
        # Chromium itself tells of each answer 401, and the page of nothing.
        assert all("401" in complaint["entry"]["text"] for complaint in page.complaints)


@asynchronous
async def test_a_page_whose_proxy_is_gone_says_so_and_comes_back():
    async with cluster() as c, tab() as page:
        await page.open(c.url + "/status")
        await page.until(SHOWN)
        await page.run("window.answers = window.fetch; window.fetch = () => Promise.reject(new Error('gone')); 1")
        await page.until(f"{SUMMARY} === 'gone'")
        await page.run("window.fetch = window.answers; 1")
        await page.until(f"{SUMMARY} === '0 in flight, 0 queued'")


@asynchronous
async def test_on_a_narrow_screen_tables_scroll_and_the_page_does_not():
    async with cluster() as c:
        async with c.post() as response:
            await response.read()
        async with shown(c, "narrow", width=400, height=800) as page:
            await page.until(SHOWN)
            assert await page.run("document.documentElement.scrollWidth <= window.innerWidth")
