"""How many requests are let in, in which order, and what the others are told."""

import asyncio

import pytest

from proxy.admission import Admission
from proxy.config import Limits
from proxy.errors import ProxyError
from tests.proxy.fake_engines import asynchronous


class Visitor:
    """A request: inside from ``admitted`` until it is told to leave."""

    def __init__(self, admission):
        self._leave = asyncio.Event()
        self.inside = False
        self.task = asyncio.create_task(self._visit(admission))

    async def _visit(self, admission):
        async with admission.admitted():
            self.inside = True
            await self._leave.wait()
        self.inside = False

    async def leave(self):
        self._leave.set()
        await self.task


async def visitors(admission, count):
    found = [Visitor(admission) for _ in range(count)]
    await settle()
    return found


async def settle():
    for _ in range(5):
        await asyncio.sleep(0)


async def refusal(visitor):
    with pytest.raises(ProxyError) as refused:
        await visitor.task
    return refused.value.status


@asynchronous
async def test_as_many_as_allowed_are_inside_and_the_others_follow_in_order():
    admission = Admission(Limits(max_in_flight=2, max_queued=9))
    found = await visitors(admission, 5)
    assert [visitor.inside for visitor in found] == [True, True, False, False, False]
    assert (admission.in_flight, admission.queued) == (2, 3)
    await found[1].leave()
    await settle()
    assert [visitor.inside for visitor in found] == [True, False, True, False, False]
    for number in (0, 2, 3, 4):
        await found[number].leave()
    assert (admission.in_flight, admission.queued) == (0, 0)
    await admission.wait_idle()


@asynchronous
async def test_one_more_than_may_wait_is_too_many():
    admission = Admission(Limits(max_in_flight=1, max_queued=1))
    inside, waiting, refused = await visitors(admission, 3)
    assert await refusal(refused) == 429
    await inside.leave()
    await waiting.leave()


@asynchronous
async def test_who_waits_too_long_is_told_to_come_again():
    admission = Admission(Limits(max_in_flight=1, queue_seconds=0.01))
    inside, waiting = await visitors(admission, 2)
    assert await refusal(waiting) == 503
    assert admission.queued == 0
    await inside.leave()
    await admission.wait_idle()


@asynchronous
async def test_who_leaves_the_queue_leaves_no_gap():
    admission = Admission(Limits(max_in_flight=1))
    inside, first, second = await visitors(admission, 3)
    first.task.cancel()
    await settle()
    assert admission.queued == 1
    await inside.leave()
    await settle()
    assert second.inside
    await second.leave()
    await admission.wait_idle()


@asynchronous
async def test_who_leaves_at_the_moment_of_being_called_passes_the_place_on():
    admission = Admission(Limits(max_in_flight=1))
    async with admission.admitted():
        first, second = await visitors(admission, 2)
    # The first one has been called, and has not heard it yet.
    first.task.cancel()
    await settle()
    assert first.task.cancelled()
    assert second.inside
    await second.leave()
    await admission.wait_idle()


@asynchronous
async def test_who_leaves_at_the_moment_of_the_next_call_is_skipped():
    admission = Admission(Limits(max_in_flight=1))
    async with admission.admitted():
        first, second = await visitors(admission, 2)
        first.task.cancel()
    await settle()
    assert second.inside
    await second.leave()
    await admission.wait_idle()


@asynchronous
async def test_a_draining_proxy_lets_nobody_in_but_serves_who_waits():
    admission = Admission(Limits(max_in_flight=1))
    inside, waiting = await visitors(admission, 2)
    admission.draining = True
    (late,) = await visitors(admission, 1)
    assert await refusal(late) == 503
    await inside.leave()
    await settle()
    assert waiting.inside
    await waiting.leave()
    await admission.wait_idle()
