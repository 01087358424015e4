"""Requests leave no cycles of objects behind: the proxy has the garbage collector look for some only rarely."""

import gc

import pytest

from tests.proxy.fake_engines import Refuse, asynchronous, cluster

BODY = {"model": "m", "prompt": "hello", "max_tokens": 5}
NUM_REQUESTS = 40


@asynchronous
@pytest.mark.parametrize("body", [BODY, BODY | {"stream": True}], ids=["plain", "stream"])
@pytest.mark.parametrize("fault", [None, Refuse(400)], ids=["answered", "refused"])
async def test_requests_leave_no_cycles(body, fault):
    async with cluster() as c:
        c.prefills[0].always = fault
        assert await objects_in_cycles(c, body) < NUM_REQUESTS


@asynchronous
async def test_control_cycles_are_seen():
    async with cluster() as c:
        assert await objects_in_cycles(c, BODY, leave_cycle) >= NUM_REQUESTS


def leave_cycle():
    cycle = []
    cycle.append(cycle)


async def objects_in_cycles(c, body, after_each=lambda: None):
    """How many a number of requests leave, after the first ones."""
    gc.disable()
    # What is here already is neither searched nor counted.
    gc.freeze()
    try:
        for count in (3, NUM_REQUESTS):
            for _ in range(count):
                async with c.post(body=body) as response:
                    await response.read()
                after_each()
            found = gc.collect()
    finally:
        gc.unfreeze()
        gc.enable()
    return found
