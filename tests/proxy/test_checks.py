"""Checks of the engines' health, and what must not end them."""

import asyncio
import logging

import pytest

from proxy.checks import Checks
from proxy.config import Timeouts
from proxy.engines import EngineClient
from proxy.health import SILENT_CHECKS, Check, Standing
from proxy.http1.pool import Pool
from proxy.registry import Registry
from proxy.routing import Role, least_tokens
from tests.proxy.fake_engines import asynchronous, until


class Client:
    """An engine client whose check of one engine is a bug."""

    async def check(self, url, _timeout_seconds):
        if url == "bug":
            raise RuntimeError("a bug")
        return Check.WELL


@asynchronous
async def test_a_bug_in_one_check_ends_no_other_and_counts_against_its_engine(caplog):
    registry = Registry(dict.fromkeys(Role, least_tokens))
    registry.add(Role.DECODE, ["bug", "well"])
    running = asyncio.create_task(Checks(Client(), registry, 0.01).run())
    await until(lambda: [load.standing for load in registry.loads(Role.DECODE)] == [Standing.DOWN, Standing.UP])
    assert not running.done()
    assert {record.levelno for record in caplog.records if record.name == "proxy.checks"} == {logging.ERROR}
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


class Silent:
    """An engine client that waits in vain, as long as it may, for the checks of one round."""

    def __init__(self):
        self.seconds = []

    async def check(self, _url, timeout_seconds):
        if len(self.seconds) == SILENT_CHECKS:
            await asyncio.Event().wait()
        self.seconds.append(timeout_seconds)
        return Check.SILENT


@asynchronous
async def test_a_silent_engine_is_out_of_rotation_within_two_intervals():
    registry = Registry(dict.fromkeys(Role, least_tokens))
    registry.add(Role.DECODE, ["silent"])
    client = Silent()
    running = asyncio.create_task(Checks(client, registry, 0.05).run())
    await until(lambda: registry.loads(Role.DECODE)[0].standing is Standing.SUSPECT)
    # The round begins after an interval at the latest.
    assert 0.05 + sum(client.seconds) < 2 * 0.05
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


@asynchronous
@pytest.mark.parametrize("host", ["d..svc", "d" * 64 + ".svc"])
async def test_a_name_that_dns_cannot_hold_is_an_unreachable_engine(host):
    async with Pool() as pool:
        assert await EngineClient(pool, Timeouts()).check(f"http://{host}:8200", 1.0) is Check.UNWELL
