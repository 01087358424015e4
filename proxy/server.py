"""The HTTP face of the proxy: which request goes which way, and how every failure becomes an answer."""

import asyncio
import logging
from collections.abc import Sequence
from functools import partial

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from proxy import headers, prompts, relay
from proxy.admission import Admission
from proxy.affinity import hints_of
from proxy.config import ProxyConfig
from proxy.endpoints import ENDPOINTS, Endpoint, dialect_of, name_of
from proxy.engines import EngineRequest, Reply
from proxy.errors import ProxyError
from proxy.exchange import Exchange
from proxy.journal import Record
from proxy.metrics import CLIENT_GONE
from proxy.operations import Operations, is_own
from proxy.respond import RECORD_KEY, REQUEST_ID_KEY, complete, relay_merged, relay_reply
from proxy.sight import Sight
from proxy.upload import ForwardedBody, Upload

logger = logging.getLogger("proxy.server")


# Bodies of these types are never read as JSON by an engine, so they pass through without being looked at.
_OPAQUE_TYPES = ("multipart/", "application/octet-stream", "application/x-www-form-urlencoded", "audio/", "image/")


class Server:
    """The request handlers."""

    def __init__(
        self, config: ProxyConfig, exchange: Exchange, admission: Admission, sight: Sight, operations: Operations
    ) -> None:
        self._config = config
        self._operations = operations
        self._exchange = exchange
        self._admission = admission
        self._sight = sight

    def application(self) -> web.Application:
        """The aiohttp application."""
        app = web.Application(client_max_size=self._config.limits.max_body_bytes, middlewares=[self._guard()])
        for path, endpoint in ENDPOINTS.items():
            app.router.add_post(path, partial(self._generate, endpoint))
            app.router.add_post(path + "/", partial(self._generate, endpoint))
        self._operations.add_routes(app.router)
        app.router.add_route("*", "/{path:.*}", self._forward)
        return app

    def _guard(self) -> Middleware:
        @web.middleware
        async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
            request_id = headers.request_id_for(request.headers.get(headers.REQUEST_ID), "")
            request[REQUEST_ID_KEY] = request_id
            record = request[RECORD_KEY] = Record(request_id, name_of(request.path))
            if is_own(request):
                return await self._answered(request, handler)
            status = None
            try:
                with self._sight.tracing.request(record.endpoint, request_id, request.headers):
                    response = await self._answered(request, self._in_turn(handler))
                status = response.status
            finally:
                record.ended(status)
                self._sight.journal.note(record)
            return response

        return guard

    def _in_turn(self, handler: Handler) -> Handler:
        async def admitted(request: web.Request) -> web.StreamResponse:
            async with self._admission.admitted():
                request[RECORD_KEY].admitted()
                return await handler(request)

        return admitted

    async def _answered(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """The handler's response, or the response to the failure in it."""
        try:
            return await handler(request)
        except ProxyError as error:
            return self._failed(request, error)
        except web.HTTPException as error:
            return self._failed(request, ProxyError(error.status, error.reason))
        except ConnectionError:
            # The client is gone: nobody reads this response.
            request[RECORD_KEY].outcome = CLIENT_GONE
            return web.Response()
        except Exception:
            logger.exception("request %s: a bug in the proxy", request[REQUEST_ID_KEY])
            return self._failed(request, ProxyError(500, "The proxy failed to handle this request"))

    def _failed(self, request: web.Request, error: ProxyError) -> web.Response:
        request[RECORD_KEY].error = str(error)
        response = complete(request, error.answer(dialect_of(request.path)))
        if self._admission.draining:
            response.force_close()
        return response

    async def _generate(self, endpoint: Endpoint, request: web.Request) -> web.StreamResponse:
        """Prefill on one engine, decode on another, once for every prompt."""
        body = relay.strip_transfer_params(relay.parse_body(await self._read_body(request)))
        request_id = headers.request_id_for(
            request.headers.get(headers.REQUEST_ID), relay.text_field(body, "request_id")
        )
        request[REQUEST_ID_KEY] = request[RECORD_KEY].request_id = request_id
        bodies = [body]
        # What one engine answers without a hand-off, it answers for all prompts at once.
        if endpoint.takes_prompt_lists and not endpoint.rules.needs_one_engine(body):
            bodies = prompts.split_prompts(body, self._config.limits.max_prompts)
        engine_headers = headers.without_compression(headers.request_headers(request.headers, request_id))
        requests = [EngineRequest(endpoint, engine_headers, body, hints_of(request.headers, body)) for body in bodies]
        request[RECORD_KEY].tell_of([leg.story for leg in requests])
        if len(requests) == 1:
            return await relay_reply(request, await self._exchange.open(requests[0]), endpoint.dialect)
        replies = await self._open_all(requests)
        return await relay_merged(request, replies, prompts.choices_per_prompt(body))

    async def _open_all(self, requests: Sequence[EngineRequest]) -> list[Reply]:
        """Open all requests at once; if one fails, none stays open. Raises the ``ProxyError`` of the first failure.

        A single engine refuses a list of prompts as a whole, before its first byte; so does this.
        """
        tasks = [asyncio.create_task(self._exchange.open(request)) for request in requests]
        try:
            await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            for outcome in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(outcome, Reply):
                    outcome.close()
            raise
        return [task.result() for task in tasks]

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        """Anything else: to one decode engine, as it is."""
        # The target as it was sent; one with a host in it is meant for proxies of another kind.
        target = request.raw_path if request.raw_path.startswith("/") else request.rel_url.raw_path_qs
        reply = await self._exchange.forward(
            request.method,
            target,
            headers.request_headers(request.headers, request[REQUEST_ID_KEY]),
            await self._forwarded_body(request),
        )
        return await relay_reply(request, reply, dialect_of(request.path))

    async def _forwarded_body(self, request: web.Request) -> ForwardedBody:
        """The body to forward: unread if no engine takes it for JSON, otherwise checked to carry no transfer params."""
        if not request.can_read_body:
            return None
        if request.content_type.startswith(_OPAQUE_TYPES) and "Content-Type" in request.headers:
            request[RECORD_KEY].request_bytes = request.content_length or 0
            return Upload(request.content, self._config.timeouts.idle_seconds)
        data = await self._read_body(request)
        body = relay.parse_body(data)
        stripped = relay.strip_transfer_params(body)
        return data if stripped is body else msgspec.json.encode(stripped)

    async def _read_body(self, request: web.Request) -> bytes:
        """The client's body. Raises ``ProxyError`` if it is too large, cannot be read, or does not come."""
        try:
            async with asyncio.timeout(self._config.timeouts.idle_seconds):
                data = await request.read()
        except web.HTTPRequestEntityTooLarge as error:
            limit = self._config.limits.max_body_bytes
            raise ProxyError(413, f"The request body is larger than {limit} bytes") from error
        except web.RequestPayloadError as error:
            raise ProxyError(400, f"The request body cannot be read: {error}") from error
        except TimeoutError as error:
            raise ProxyError(408, "The request body did not arrive in time") from error
        request[RECORD_KEY].request_bytes = len(data)
        return data
