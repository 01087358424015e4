"""The moments of a request that no fake engine can hold still: a cancellation between the two legs."""

import asyncio

import msgspec
import pytest
from multidict import CIMultiDict

from proxy.config import RoutingConfig
from proxy.endpoints import COMPLETIONS
from proxy.engines import EngineRequest
from proxy.exchange import Exchange
from proxy.registry import Registry
from proxy.relay import Prefilled, parse_body
from proxy.releases import MOST_AT_ONCE, MOST_ENGINES, RELEASES_SECONDS, Releases
from proxy.routing import Role, least_tokens
from proxy.sight import sight
from tests.proxy.fake_engines import asynchronous

PARAMS = msgspec.Raw(b'{"grant":"g"}')
REQUEST = EngineRequest(COMPLETIONS, CIMultiDict({"Authorization": "key"}), parse_body(b'{"prompt":"p"}'))


class StubClient:
    """An engine client that stops where it is told to, and notes which params it was asked to release."""

    def __init__(self, *, prefill_seconds=0.0, release_works=True, release_hangs=False):
        self.prefill_seconds = prefill_seconds
        self.release_works = release_works
        self.release_hangs = release_hangs
        self.released = []
        self.decoding = asyncio.Event()
        self.prefill_cancelled = False

    async def prefill(self, _url, _headers, _request):
        try:
            await asyncio.sleep(self.prefill_seconds)
        except asyncio.CancelledError:
            self.prefill_cancelled = True
            raise
        return Prefilled(PARAMS, "cmpl-1", 1, 1, 1)

    async def decode(self, _headers, _request, _params, _load):
        # The connection to the engine never comes up: not a byte of the request is sent.
        self.decoding.set()
        await asyncio.Event().wait()

    async def release(self, url, headers, params, _timeout_seconds):
        self.released.append((url, headers["Authorization"], bytes(params)))
        if self.release_hangs:
            await asyncio.Event().wait()
        return self.release_works


class Fixture:
    def __init__(self, decodes=("d0", "d1"), limit_seconds=RELEASES_SECONDS, **stub):
        self.client = StubClient(**stub)
        self.registry = Registry(dict.fromkeys(Role, least_tokens))
        self.registry.add(Role.PREFILL, ["p"])
        self.registry.add(Role.DECODE, decodes)
        seen = sight()
        self.metrics = seen.metrics
        self.releases = Releases(self.client, self.registry, self.metrics, limit_seconds)
        self.exchange = Exchange(self.client, self.registry, seen, self.releases, RoutingConfig())

    async def cancelled(self, task):
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert all(load.requests == 0 for load in self.registry.loads(Role.DECODE))
        await self.releases.finish()
        assert all(load.requests == 0 for role in Role for load in self.registry.loads(role))


@asynchronous
async def test_leaving_while_decode_is_being_connected_releases():
    fixture = Fixture()
    task = asyncio.create_task(fixture.exchange.open(REQUEST))
    await fixture.client.decoding.wait()
    await fixture.cancelled(task)
    assert [(authorization, params) for _, authorization, params in fixture.client.released] == [("key", bytes(PARAMS))]


@asynchronous
async def test_a_prefill_that_is_just_ending_is_waited_for_and_released():
    fixture = Fixture(prefill_seconds=0.03)
    task = asyncio.create_task(fixture.exchange.open(REQUEST))
    await asyncio.sleep(0.01)
    await fixture.cancelled(task)
    assert len(fixture.client.released) == 1
    assert not fixture.client.prefill_cancelled


@asynchronous
async def test_a_long_prefill_is_aborted():
    fixture = Fixture(prefill_seconds=60)
    task = asyncio.create_task(fixture.exchange.open(REQUEST))
    await asyncio.sleep(0.01)
    await fixture.cancelled(task)
    assert fixture.client.prefill_cancelled
    assert fixture.client.released == []


@asynchronous
async def test_a_release_tries_two_decode_engines_once_each():
    fixture = Fixture(decodes=("d0", "d1", "d2", "d3"), release_works=False)
    fixture.releases.start(REQUEST.headers, PARAMS)
    await fixture.releases.finish()
    assert len({url for url, _, _ in fixture.client.released}) == len(fixture.client.released) == MOST_ENGINES
    assert 'pd_proxy_releases_total{result="left_to_expire"} 1.0' in fixture.metrics.render().decode()


@asynchronous
async def test_releases_that_hang_are_given_up_and_do_not_crowd():
    fixture = Fixture(limit_seconds=0.05, release_hangs=True)
    for _ in range(2 * MOST_AT_ONCE):
        fixture.releases.start(REQUEST.headers, PARAMS)
    for _ in range(10):
        await asyncio.sleep(0)
    assert len(fixture.client.released) == MOST_AT_ONCE
    await fixture.releases.finish()
    assert asyncio.all_tasks() == {asyncio.current_task()}
