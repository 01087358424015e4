"""A headless Chromium for tests of pages, driven over its DevTools protocol; it reaches the loopback only."""

import asyncio
import base64
import itertools
import os
import shutil
import tempfile
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import aiohttp

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
"""Debian and Ubuntu: apt-get install chromium."""

_SWITCHES = (
    "--headless=new",
    "--no-sandbox",  # Chromium refuses to be root without it; the pages are ours
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    "--remote-debugging-port=0",
)
_START_SECONDS = 15.0
_DOMAINS = ("Page", "Runtime", "Log", "Network")
_COMPLAINTS = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")


class Tab:
    """One page: what it asks the network for, and what it complains of."""

    def __init__(self, socket):
        self.requested = []
        self.complaints = []
        self._socket = socket
        self._numbers = itertools.count(1)
        self._answers = {}
        self._session = {}

    async def attach(self):
        target = await self._command("Target.createTarget", url="about:blank")
        attached = await self._command("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = {"sessionId": attached["sessionId"]}
        for domain in _DOMAINS:
            await self._command(f"{domain}.enable")

    async def listen(self):
        async for message in self._socket:
            told = message.json()
            if "id" in told:
                self._answers.pop(told["id"]).set_result(told)
            elif told["method"] == "Network.requestWillBeSent":
                self.requested.append(told["params"]["request"]["url"])
            elif told["method"] in _COMPLAINTS:
                self.complaints.append(told["params"])

    async def open(self, url, width=1280, height=900):
        await self._command(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        await self._command("Page.navigate", url=url)
        await self.until("document.readyState === 'complete'")

    async def run(self, script):
        """The value of an expression of the page."""
        found = await self._command("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    async def until(self, script, timeout_seconds=8.0):
        """Wait until an expression of the page holds, and give its value."""
        async with asyncio.timeout(timeout_seconds):
            while not (value := await self.run(script)):  # noqa: ASYNC110 - only the page knows
                await asyncio.sleep(0.05)
        return value

    async def rows(self, table):
        """The texts of a table's cells, row by row, its head first."""
        return await self.run(
            f"[...document.querySelectorAll('#{table} tr')].map((row) => [...row.cells].map((cell) => cell.innerText))"
        )

    async def screenshot(self, path):
        shot = await self._command("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    async def _command(self, method, **parameters):
        number = next(self._numbers)
        answered = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": parameters} | self._session)
        told = await answered
        assert "error" not in told, told
        return told["result"]


@asynccontextmanager
async def tab():
    """A page in a browser of its own."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        browser = await asyncio.create_subprocess_exec(
            CHROMIUM,
            *_SWITCHES,
            f"--user-data-dir={profile}",
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            address = await _devtools(Path(profile) / "DevToolsActivePort")
            async with aiohttp.ClientSession() as session, session.ws_connect(address, max_msg_size=0) as socket:
                opened = Tab(socket)
                listening = asyncio.create_task(opened.listen())
                await opened.attach()
                yield opened
                listening.cancel()
                await asyncio.gather(listening, return_exceptions=True)
        finally:
            # The browser is several processes in a group of its own.
            with suppress(ProcessLookupError):
                os.killpg(browser.pid, 9)
            await browser.wait()


async def _devtools(told):
    """The browser says where it listens in this file."""
    async with asyncio.timeout(_START_SECONDS):
        while not told.exists() or len(lines := told.read_text().splitlines()) < 2:  # noqa: ASYNC110 - no event for it
            await asyncio.sleep(0.05)
    return f"ws://127.0.0.1:{lines[0]}{lines[1]}"
