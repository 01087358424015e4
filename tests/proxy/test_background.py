"""Endless work: it ends with its context, and tells when it ends before."""

import asyncio

from proxy.background import in_background
from tests.proxy.fake_engines import asynchronous


@asynchronous
async def test_work_is_done_until_the_context_ends(caplog):
    rounds = []

    async def work():
        while True:
            rounds.append(1)
            await asyncio.sleep(0)

    async with in_background(work(), work()):
        await asyncio.sleep(0.01)
    done = len(rounds)
    assert done > 2
    await asyncio.sleep(0.01)
    assert len(rounds) == done
    assert caplog.text == ""


@asynchronous
async def test_work_that_fails_is_told_and_hurts_nobody(caplog):
    async def fail():
        raise ZeroDivisionError

    async with in_background(fail()):
        await asyncio.sleep(0.01)
    assert "a bug in the proxy ended" in caplog.text
    assert "ZeroDivisionError" in caplog.text
