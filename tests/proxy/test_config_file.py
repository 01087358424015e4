"""A configuration file that changes under a running proxy."""

import asyncio
import logging

import aiohttp
import pytest

from proxy.command_line import configuration
from proxy.config_file import ConfigFile
from proxy.registry import Registry
from proxy.routing import Role, least_tokens
from proxy.service import running
from tests.proxy.fake_engines import FakeEngine, Ledger, asynchronous, until


class Followed:
    """A file, the registry that follows it, and an engine that the admin API added."""

    def __init__(self, path, *more):
        self.path = path
        self.write(["http://p:1", "http://p:2"])
        arguments = ("--config", str(path), *more)
        config = configuration(arguments)
        self.registry = Registry(dict.fromkeys(Role, least_tokens))
        self.registry.add(Role.PREFILL, config.prefill_urls)
        self.registry.add(Role.DECODE, config.decode_urls)
        self.registry.add(Role.PREFILL, ["http://admin:1"])
        self.file = ConfigFile(path, config, lambda: configuration(arguments), self.registry)

    def write(self, prefill, more=""):
        # Lists and texts look alike in both formats.
        form = "{}: {}\n" if self.path.suffix == ".yaml" else "{} = {}\n"
        self.path.write_text(form.format("prefill", prefill) + form.format("decode", ["http://d:1"]) + more)

    @property
    def prefill_urls(self):
        return [engine.url for engine in self.registry.members(Role.PREFILL)]


@pytest.fixture(params=["proxy.toml", "proxy.yaml"])
def followed(tmp_path, request):
    return Followed(tmp_path / request.param)


def test_only_the_difference_is_applied(followed, caplog):
    kept = followed.registry.find(Role.PREFILL, "http://p:2")
    followed.write(["http://p:2", "http://p:3"])
    followed.file.reload()
    assert followed.prefill_urls == ["http://p:2", "http://admin:1", "http://p:3"]
    assert followed.registry.find(Role.PREFILL, "http://p:2") is kept
    assert "restart" not in caplog.text


@pytest.mark.parametrize(
    "broken", ["prefill = [", "prefill = ['http://p:1', 'http://p:1']", "", "magic = 1", "magic: 1"]
)
def test_a_mistake_changes_nothing_and_is_told(followed, caplog, broken):
    before = followed.prefill_urls
    followed.path.write_text(broken)
    followed.file.reload()
    assert followed.prefill_urls == before
    assert "the configuration stays as it is" in caplog.text
    followed.write(["http://p:4"])
    followed.file.reload()
    assert followed.prefill_urls == ["http://admin:1", "http://p:4"]


@pytest.mark.parametrize("left", ["", "prefill = ['http://p:1', 'http://p:2']\n", "decode = ['http://d:1']\n"])
def test_a_file_that_empties_a_role_changes_nothing(tmp_path, caplog, left):
    # With a token of the admin API a file without engines is no mistake in itself.
    followed = Followed(tmp_path / "proxy.toml", "--admin-token-file", "token")
    followed.path.write_text(left)
    followed.file.reload()
    assert [engine.url for engine in followed.registry.members()] == [
        "http://p:1",
        "http://p:2",
        "http://admin:1",
        "http://d:1",
    ]
    assert "the configuration stays as it is" in caplog.text


class Changing:
    """Stands for the file's contents: counts how often they are read, and may change while they are."""

    def __init__(self, followed):
        self.reads = 0
        self.changes = []
        self._followed = followed

    def __call__(self):
        self.reads += 1
        found = configuration(("--config", str(self._followed.path)))
        if self.changes:
            self._followed.write(self.changes.pop())
        return found


@asynchronous
async def test_a_change_while_the_file_is_read_is_not_missed(tmp_path):
    followed = Followed(tmp_path / "proxy.toml")
    read = Changing(followed)
    read.changes = [["http://p:7"], ["http://p:6", "http://p:1"]]
    file = ConfigFile(followed.path, read(), read, followed.registry)
    following = asyncio.create_task(file.follow(0.005))
    await until(lambda: followed.prefill_urls == ["http://admin:1", "http://p:7"])
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)


@asynchronous
async def test_a_file_that_is_being_written_is_not_read(tmp_path):
    followed = Followed(tmp_path / "proxy.toml")
    looks = []

    def growing(_path):
        looks.append(None)
        return (min(len(looks), 20), 0, 0)

    read = Changing(followed)
    file = ConfigFile(followed.path, read(), read, followed.registry, growing)
    following = asyncio.create_task(file.follow(0.001))
    await until(lambda: read.reads == 2)
    assert len(looks) >= 21
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)


def test_other_settings_need_a_restart_and_that_is_told(followed, caplog):
    followed.write(["http://p:1"], "port: 99" if followed.path.suffix == ".yaml" else "port = 99")
    followed.file.reload()
    assert "take effect after a restart" in caplog.text
    assert followed.prefill_urls == ["http://p:1", "http://admin:1"]


@asynchronous
async def test_a_change_is_noticed_also_when_the_file_is_gone_for_a_moment(tmp_path, caplog):
    followed = Followed(tmp_path / "proxy.toml")
    caplog.set_level(logging.INFO)
    following = asyncio.create_task(followed.file.follow(0.005))
    followed.path.unlink()
    await until(lambda: "the configuration stays as it is" in caplog.text)
    followed.write(["http://p:5"])
    await until(lambda: followed.prefill_urls == ["http://admin:1", "http://p:5"])
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)


@pytest.mark.parametrize(("name", "form"), [("a.toml", "{} = {}\n"), ("a.yaml", "{}: {}\n")])
@asynchronous
async def test_a_running_proxy_follows_its_file(tmp_path, name, form):
    ledger = Ledger()
    engines = [FakeEngine(ledger) for _ in range(3)]
    for engine in engines:
        await engine.start()
    old, new, decode = engines
    path = tmp_path / name

    def write(prefill):
        settings = {"prefill": [prefill.url], "decode": [decode.url], "port": 0}
        path.write_text("".join(form.format(*setting) for setting in settings.items()))

    write(old)
    async with running(configuration(["--config", str(path)])) as proxy, aiohttp.ClientSession() as client:
        write(new)
        while not new.generations:
            async with client.post(proxy.address + "/v1/completions", json={"prompt": "p"}) as response:
                assert response.status == 200
            await asyncio.sleep(0.02)
    await asyncio.gather(*(engine.stop() for engine in engines))


@asynchronous
async def test_the_status_tells_who_made_an_engine_a_member(tmp_path):
    (tmp_path / "token").write_text("0123456789abcdef")
    path = tmp_path / "proxy.yaml"
    path.write_text("prefill: [http://127.0.0.1:1]\n")
    options = ("--config", str(path), "--port", "0", "--decode", "http://127.0.0.1:2")
    key = {"Authorization": "Bearer 0123456789abcdef"}
    config = configuration([*options, "--admin-token-file", str(tmp_path / "token")])
    async with running(config) as proxy, aiohttp.ClientSession(proxy.address, headers=key) as client:
        for call, port in (("engines", 3), ("registrations", 4), ("registrations", 1)):
            body = {"role": "prefill", "url": f"http://127.0.0.1:{port}"}
            async with client.post(f"/admin/{call}", json=body) as response:
                assert response.status == 200
        path.write_text("prefill: [http://127.0.0.1:1, http://127.0.0.1:5]\n")
        engines = []
        while len(engines) < 5:
            async with client.get("/status.json") as response:
                engines = (await response.json())["engines"]
            await asyncio.sleep(0.02)
    assert {engine["url"][-1]: engine["origin"] for engine in engines} == {
        "1": "file",
        "2": "command_line",
        "3": "admin",
        "4": "registered",
        "5": "file",
    }
