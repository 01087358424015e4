"""The life of one request across its two legs: prefill, decode, another attempt, and release.

Room for the next feature: what decides whether a prompt is prefilled remotely is ``_needs_prefill``; what is told about
a leg is ``_leg``; when another attempt is allowed is ``routing.Attempts``.
"""

import asyncio
import logging
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from types import TracebackType

import msgspec
from multidict import CIMultiDict

from proxy import relay
from proxy.config import RoutingConfig
from proxy.engines import EngineClient, EngineRequest, Reply
from proxy.errors import EngineFailedError, FailureKind, ProxyError
from proxy.fields import Body
from proxy.headers import for_rank
from proxy.metrics import Metrics
from proxy.registry import Engine, Load, Registry
from proxy.releases import Releases
from proxy.routing import NO_HINTS, Attempts, Hints, Role
from proxy.sight import Sight
from proxy.story import Mode, Story
from proxy.upload import ForwardedBody, Upload, is_under_way

logger = logging.getLogger("proxy.exchange")


@dataclass(slots=True)
class _Handoff:
    """What one request has to hand to decode."""

    missing: bool
    """Prefill has to run before decode can."""
    params: msgspec.Raw | None = None
    """Prefill's params, while no decode engine has accepted or may have used them."""


class Exchange:
    """Runs requests on pairs of engines."""

    def __init__(
        self, client: EngineClient, registry: Registry, sight: Sight, releases: Releases, config: RoutingConfig
    ) -> None:
        self._client = client
        self._registry = registry
        self._metrics = sight.metrics
        self._tracing = sight.tracing
        self._releases = releases
        self._config = config

    async def open(self, request: EngineRequest) -> Reply:
        """Prefill and begin to decode; the reply, whose first bytes have arrived and which the caller closes.

        An engine that fails before those first bytes is replaced. Params are used on one decode engine only: after
        any failure in which it may have seen them, the prompt is prefilled again. However this ends, either a decode
        engine has accepted the params or their release is under way. Raises ``ProxyError``.
        """
        handoff = _Handoff(missing=self._needs_prefill(request))
        try:
            return await self._open(request, handoff)
        except BaseException:
            self._drop(request, handoff)
            raise

    def _needs_prefill(self, request: EngineRequest) -> bool:
        if request.endpoint.rules.needs_one_engine(request.body):
            request.story.mode = Mode.WHOLE
        elif self._is_short(request.body):
            request.story.mode = Mode.SHORT
        else:
            request.story.mode = Mode.REMOTE
        return request.story.mode is Mode.REMOTE

    def _is_short(self, body: Body) -> bool:
        least = self._config.min_remote_tokens
        return least > 0 and relay.estimated_prompt_tokens(body) < least

    async def _open(self, request: EngineRequest, handoff: _Handoff) -> Reply:
        attempts = Attempts()
        prompt_tokens = relay.estimated_prompt_tokens(request.body)
        tokens = prompt_tokens + relay.estimated_output_tokens(request.body)
        while True:
            # Decode is chosen and counted before prefill runs, so that a burst of requests does not pile up on one.
            engine = self._pick_decode(attempts, request.hints)
            load = Load(engine, tokens)
            try:
                if handoff.missing:
                    handoff.params = await self._prefill_or_leave(request, prompt_tokens)
                    handoff.missing = False
                with self._leg(Role.DECODE, request, load) as headers:
                    reply = await self._client.decode(headers, request, handoff.params, load)
            except EngineFailedError as failure:
                load.end()
                self._note_failure(engine, attempts, failure)
                if failure.kind is not FailureKind.UNREACHABLE:
                    self._drop(request, handoff)
            except BaseException:
                load.end()
                raise
            else:
                engine.health.answered()
                request.story.decoded(reply.request_id)
                reply.tell_failures_to(partial(self._report, engine))
                return reply

    async def forward(self, method: str, target: str, headers: CIMultiDict[str], body: ForwardedBody) -> Reply:
        """Have one decode engine serve a request as it is; the caller closes the reply. Raises ``ProxyError``.

        Another engine is tried only if the first cannot be reached: only then is it certain that it did nothing.
        """
        attempts = Attempts()
        tokens = len(body) // 4 if isinstance(body, bytes) else 0
        while True:
            engine = self._pick(Role.DECODE, attempts, NO_HINTS)
            load = Load(engine, tokens)
            try:
                with self._tracing.leg(Role.DECODE, engine.url, for_rank(headers, load.rank)) as traced:
                    reply = await self._client.forward(method, target, traced, body, load)
            except EngineFailedError as failure:
                load.end()
                if isinstance(body, Upload) and body.error is not None:
                    raise body.error from failure
                attempts.failed(engine.url, failure)
                self._report(engine, failure, body)
                if failure.kind is not FailureKind.UNREACHABLE:
                    raise failure.as_proxy_error() from failure
            except BaseException:
                load.end()
                raise
            else:
                if reply.status < 500:
                    engine.health.answered()
                reply.tell_failures_to(partial(self._report, engine, body=body))
                return reply

    def _drop(self, request: EngineRequest, handoff: _Handoff) -> None:
        """Give up the params, if there are any: they are released, and another attempt has to prefill again."""
        if handoff.params is not None:
            self._releases.start(request.headers, handoff.params)
            handoff.params = None
            handoff.missing = True

    async def _prefill_or_leave(self, request: EngineRequest, tokens: int) -> msgspec.Raw | None:
        """Prefill; if this is cancelled, the prefill ends in its own time, and nothing stays behind."""
        prefill = asyncio.create_task(self._prefill(request, tokens))
        try:
            return await asyncio.shield(prefill)
        except asyncio.CancelledError:
            self._releases.start_after(request.headers, prefill)
            raise
        finally:
            # The task holds its exception, whose traceback holds this frame: a cycle, with the request's body in it.
            del prefill

    async def _prefill(self, request: EngineRequest, tokens: int) -> msgspec.Raw | None:
        attempts = Attempts()
        while True:
            try:
                engine = self._pick(Role.PREFILL, attempts, request.hints)
            except ProxyError as error:
                if not self._config.decode_only_fallback or not attempts.none_usable:
                    raise
                self._fall_back(request.story, error)
                return None
            load = Load(engine, tokens)
            try:
                with self._leg(Role.PREFILL, request, load) as headers:
                    prefilled = await self._client.prefill(engine.url, headers, request)
            except EngineFailedError as failure:
                self._note_failure(engine, attempts, failure)
                continue
            finally:
                load.end()
            engine.health.answered()
            self._note_offer(engine, request.story, prefilled)
            return prefilled.params

    def _note_offer(self, engine: Engine, story: Story, prefilled: relay.Prefilled) -> None:
        story.prefilled(
            prefilled.request_id, prefilled.prompt_tokens, prefilled.handoff_tokens, prefilled.handoff_bytes
        )
        self._metrics.handoff_tokens.inc(prefilled.handoff_tokens)
        self._metrics.handoff_bytes.inc(prefilled.handoff_bytes)
        if prefilled.params is None:
            self._metrics.missing_handoffs.inc()
            story.mode = Mode.NOT_OFFERED
            if engine.offers_handoffs:
                logger.warning(
                    "prefill engine %s offers no hand-off, so decode computes its prompts again: does it run with the "
                    "connector?",
                    engine.url,
                )
        engine.offers_handoffs = prefilled.params is not None

    def _leg(self, role: Role, request: EngineRequest, load: Load) -> "_Leg":
        span = self._tracing.leg(role, load.url, for_rank(request.headers, load.rank))
        return _Leg(self._metrics, span, role, request.story, load)

    def _fall_back(self, story: Story, error: ProxyError) -> None:
        story.mode = Mode.FALLBACK
        self._metrics.fallbacks.inc()
        logger.warning("decode computes a prompt by itself, because of --fallback decode-only: %s", error)

    def _pick_decode(self, attempts: Attempts, hints: Hints) -> Engine:
        """Like ``_pick``. An unusable answer may be due to the params, so fresh ones may go to the same engine."""
        try:
            return self._pick(Role.DECODE, attempts, hints)
        except ProxyError:
            attempts.ask_again()
            return self._pick(Role.DECODE, attempts, hints)

    def _pick(self, role: Role, attempts: Attempts, hints: Hints) -> Engine:
        """The engine of the next attempt. Raises the ``ProxyError`` of the last failure when there is none."""
        engine = None if attempts.over else self._registry.pick(role, attempts.excluded, hints)
        if engine is not None:
            return engine
        if attempts.last is None:
            raise ProxyError(503, f"There is no {role} engine at the moment")
        raise attempts.last.as_proxy_error() from attempts.last

    def _note_failure(self, engine: Engine, attempts: Attempts, failure: EngineFailedError) -> None:
        attempts.failed(engine.url, failure)
        self._report(engine, failure)

    def _report(self, engine: Engine, failure: EngineFailedError, body: ForwardedBody = None) -> None:
        if not is_under_way(body):
            self._metrics.engine_failed(engine.role, failure.kind)
            self._registry.failed(engine, failure.kind)
        reason = failure.__cause__ or failure.kind.value
        logger.warning("%s engine %s: %s (%s)", engine.role, engine.url, failure, reason)


class _Leg:
    """One attempt on an engine, told to whoever wants to know; entering it gives the headers to send there.

    A class, since two generators for every request would cost more than sending one.
    """

    __slots__ = ("_begin", "_load", "_metrics", "_role", "_span", "_story")

    def __init__(
        self,
        metrics: Metrics,
        span: AbstractContextManager[CIMultiDict[str]],
        role: Role,
        story: Story,
        load: Load,
    ) -> None:
        self._metrics = metrics
        self._span = span
        self._role = role
        self._story = story
        self._load = load

    def __enter__(self) -> CIMultiDict[str]:
        self._story.attempt(self._role, self._load.url, self._load.rank)
        self._begin = perf_counter()
        return self._span.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._span.__exit__(kind, error, trace)
        if kind is None:
            seconds = perf_counter() - self._begin
            self._story.succeeded(self._role, seconds)
            self._metrics.leg_seconds(self._role, seconds)
