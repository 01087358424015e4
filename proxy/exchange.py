"""The life of one request across its two legs: prefill, decode, another attempt, and release."""

import asyncio
import logging
from collections.abc import Coroutine
from dataclasses import dataclass

import msgspec
from multidict import CIMultiDict
from yarl import URL

from proxy import relay
from proxy.engines import EngineClient, EngineRequest, ForwardedBody, Reply
from proxy.errors import EngineFailedError, FailureKind, ProxyError
from proxy.metrics import Metrics
from proxy.registry import Registry
from proxy.routing import Attempts, Role

logger = logging.getLogger("proxy.exchange")

RELEASE_TIMEOUT_SECONDS = 5.0
"""For one attempt to release. Prefill's own lease ends about as soon, so trying longer gains nothing."""

LINGER_SECONDS = 0.1
"""How long a prefill goes on for a client that has left: long enough for a reply that is already on its way. Hanging up
on it would not end prefill's lease, since to prefill the request is done; its params are needed for that."""


class Releases:
    """Frees the KV that prefill keeps for decodes that will never come.

    Only a decode engine can tell prefill that it is done with a hand-off (routers cannot: the side channel is between
    engines), so a decode engine is asked to refuse a request that carries the params; see ``relay.release_body``.
    A release never fails a request: if it cannot be made, prefill's lease runs out by itself. Releasing twice, or
    releasing what a decode is just aborting, is harmless: the lease ends once.
    """

    def __init__(self, client: EngineClient, registry: Registry, metrics: Metrics) -> None:
        self._client = client
        self._registry = registry
        self._metrics = metrics
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, headers: CIMultiDict[str], params: msgspec.Raw) -> None:
        """Begin to release ``params`` in the background, on behalf of the client with these headers."""
        self._start(self._release(headers, params))

    def start_after(self, headers: CIMultiDict[str], prefill: asyncio.Task[msgspec.Raw | None]) -> None:
        """End a prefill that nobody waits for any more, and release what it may have been about to hand off."""
        self._start(self._end_prefill(headers, prefill))

    async def finish(self) -> None:
        """Wait for all releases under way; bounded by their time-outs."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _end_prefill(self, headers: CIMultiDict[str], prefill: asyncio.Task[msgspec.Raw | None]) -> None:
        await asyncio.wait((prefill,), timeout=LINGER_SECONDS)
        prefill.cancel()
        (outcome,) = await asyncio.gather(prefill, return_exceptions=True)
        if isinstance(outcome, msgspec.Raw):
            await self._release(headers, outcome)

    async def _release(self, headers: CIMultiDict[str], params: msgspec.Raw) -> None:
        tried: set[str] = set()
        while (url := self._registry.pick(Role.DECODE, tried)) is not None:
            tried.add(url)
            if await self._client.release(url, headers, params, RELEASE_TIMEOUT_SECONDS):
                self._metrics.releases.labels("released").inc()
                return
        self._metrics.releases.labels("left_to_expire").inc()
        logger.warning("no decode engine could release a hand-off; prefill holds its KV until the lease ends")


@dataclass(slots=True)
class _Handoff:
    """What one request has to hand to decode."""

    missing: bool
    """Prefill has to run before decode can."""
    params: msgspec.Raw | None = None
    """Prefill's params, while no decode engine has accepted or may have used them."""


class Exchange:
    """Runs requests on pairs of engines."""

    def __init__(self, client: EngineClient, registry: Registry, metrics: Metrics, releases: Releases) -> None:
        self._client = client
        self._registry = registry
        self._metrics = metrics
        self._releases = releases

    async def open(self, request: EngineRequest) -> Reply:
        """Prefill and begin to decode; the reply, whose first bytes have arrived and which the caller closes.

        An engine that fails before those first bytes is replaced. Params are used on one decode engine only: after
        any failure in which it may have seen them, the prompt is prefilled again. However this ends, either a decode
        engine has accepted the params or their release is under way. Raises ``ProxyError``.
        """
        handoff = _Handoff(missing=not relay.needs_one_engine(request.body))
        try:
            return await self._open(request, handoff)
        except BaseException:
            self._drop(request, handoff)
            raise

    async def _open(self, request: EngineRequest, handoff: _Handoff) -> Reply:
        attempts = Attempts()
        tokens = relay.estimated_prompt_tokens(request.body) + relay.estimated_output_tokens(request.body)
        while True:
            # Decode is chosen and counted before prefill runs, so that a burst of requests does not pile up on one.
            url = self._pick(Role.DECODE, attempts)
            load = self._registry.begin(Role.DECODE, url, tokens)
            try:
                if handoff.missing:
                    handoff.params = await self._prefill_or_leave(request)
                    handoff.missing = False
                with self._metrics.leg(Role.DECODE):
                    reply = await self._client.decode(url, request, handoff.params, load)
            except EngineFailedError as failure:
                load.end()
                self._note_failure(Role.DECODE, url, attempts, failure)
                if failure.kind is not FailureKind.UNREACHABLE:
                    self._drop(request, handoff)
            except BaseException:
                load.end()
                raise
            else:
                self._registry.answered(Role.DECODE, url)
                return reply

    async def forward(self, method: str, target: str, headers: CIMultiDict[str], body: ForwardedBody) -> Reply:
        """Have one decode engine serve a request as it is; the caller closes the reply. Raises ``ProxyError``.

        Another engine is tried only if the first cannot be reached: only then is it certain that it did nothing.
        """
        attempts = Attempts()
        tokens = len(body) // 4 if isinstance(body, bytes) else 0
        while True:
            url = self._pick(Role.DECODE, attempts)
            load = self._registry.begin(Role.DECODE, url, tokens)
            try:
                return await self._client.forward(method, URL(url + target, encoded=True), headers, body, load)
            except EngineFailedError as failure:
                load.end()
                self._note_failure(Role.DECODE, url, attempts, failure)
                if failure.kind is not FailureKind.UNREACHABLE:
                    raise failure.as_proxy_error() from failure
            except BaseException:
                load.end()
                raise

    def _drop(self, request: EngineRequest, handoff: _Handoff) -> None:
        """Give up the params, if there are any: they are released, and another attempt has to prefill again."""
        if handoff.params is not None:
            self._releases.start(request.headers, handoff.params)
            handoff.params = None
            handoff.missing = True

    async def _prefill_or_leave(self, request: EngineRequest) -> msgspec.Raw | None:
        """Prefill; if this is cancelled, the prefill ends in its own time, and nothing stays behind."""
        prefill = asyncio.create_task(self._prefill(request))
        try:
            return await asyncio.shield(prefill)
        except asyncio.CancelledError:
            self._releases.start_after(request.headers, prefill)
            raise

    async def _prefill(self, request: EngineRequest) -> msgspec.Raw | None:
        attempts = Attempts()
        while True:
            url = self._pick(Role.PREFILL, attempts)
            try:
                with (
                    self._registry.load(Role.PREFILL, url, relay.estimated_prompt_tokens(request.body)),
                    self._metrics.leg(Role.PREFILL),
                ):
                    params = await self._client.prefill(url, request)
            except EngineFailedError as failure:
                self._note_failure(Role.PREFILL, url, attempts, failure)
                continue
            self._registry.answered(Role.PREFILL, url)
            if params is None:
                self._metrics.missing_handoffs.inc()
                logger.debug("prefill engine %s offered no hand-off", url)
            return params

    def _pick(self, role: Role, attempts: Attempts) -> str:
        """The engine of the next attempt. Raises the ``ProxyError`` of the last failure when there is none."""
        url = None if attempts.over else self._registry.pick(role, attempts.excluded)
        if url is not None:
            return url
        if attempts.last is None:
            raise ProxyError(503, f"There is no {role} engine")
        raise attempts.last.as_proxy_error() from attempts.last

    def _note_failure(self, role: Role, url: str, attempts: Attempts, failure: EngineFailedError) -> None:
        attempts.failed(url, failure)
        self._metrics.engine_failed(role, failure.kind)
        if failure.kind is not FailureKind.BROKEN:
            # A broken answer may be the request's own doing; it says little about the engine.
            self._registry.failed(role, url)
        logger.warning("%s engine %s: %s (%s)", role, url, failure, failure.__cause__ or failure.kind.value)
