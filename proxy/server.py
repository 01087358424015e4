"""The HTTP face of the proxy: which request goes which way, and how every failure becomes an answer."""

import asyncio
import logging
from collections.abc import Awaitable, Sequence

import msgspec

from proxy import headers, prompts, relay
from proxy.admission import Admission
from proxy.affinity import hints_of
from proxy.config import ProxyConfig
from proxy.dialects import OPENAI
from proxy.endpoints import ENDPOINTS, Endpoint, dialect_of, name_of
from proxy.engines import EngineRequest, Reply
from proxy.errors import ProxyError
from proxy.exchange import Exchange
from proxy.fields import Body
from proxy.http1.errors import MessageError
from proxy.http1.request import Request, Response
from proxy.journal import Record
from proxy.metrics import CLIENT_GONE
from proxy.operations import Operations
from proxy.respond import complete, relay_merged, relay_reply
from proxy.routing import NO_HINTS, Hints
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

    async def serve(self, request: Request) -> Response:
        """Answer a client's request. Its cancellation means that the client has left."""
        record = Record(headers.request_id_for(request.headers.get(headers.REQUEST_ID), ""), name_of(request.path))
        own = self._operations.handler(request)
        if own is not None:
            return await self._answered(request, record, own(request))
        status = None
        try:
            with self._sight.tracing.request(record.endpoint, record.request_id, request.headers):
                response = await self._answered(request, record, self._in_turn(request, record))
            status = response.status
        except ConnectionError:
            # The client is gone: nobody reads an answer.
            record.outcome = CLIENT_GONE
            raise
        finally:
            record.ended(status)
            self._sight.journal.note(record)
        return response

    def refuse(self, status: int, message: str) -> Response:
        """The answer to what is no request."""
        record = Record(headers.request_id_for(None, ""), "other")
        return complete(record, ProxyError(status, message).answer(OPENAI), closes=True)

    async def _in_turn(self, request: Request, record: Record) -> Response:
        async with self._admission.admitted():
            record.admitted()
            endpoint = ENDPOINTS.get(request.path.removesuffix("/")) if request.method == "POST" else None
            if endpoint is not None:
                return await self._generate(endpoint, request, record)
            return await self._forward(request, record)

    async def _answered(self, request: Request, record: Record, answering: Awaitable[Response]) -> Response:
        """The response, or the response to the failure in it. Raises ``ConnectionError`` if the client is gone."""
        try:
            return await answering
        except ProxyError as error:
            return self._failed(request, record, error)
        except MessageError as error:
            return self._failed(request, record, self._unreadable(error))
        except ConnectionError:
            raise
        except Exception:
            logger.exception("request %s: a bug in the proxy", record.request_id)
            return self._failed(request, record, ProxyError(500, "The proxy failed to handle this request"))

    def _failed(self, request: Request, record: Record, error: ProxyError) -> Response:
        record.error = str(error)
        return complete(record, error.answer(dialect_of(request.path)), closes=self._admission.draining)

    def _unreadable(self, error: MessageError) -> ProxyError:
        if error.status == 413:
            return ProxyError(413, f"The request body is larger than {self._config.limits.max_body_bytes} bytes")
        return ProxyError(error.status, f"The request body cannot be read: {error}")

    async def _generate(self, endpoint: Endpoint, request: Request, record: Record) -> Response:
        """Prefill on one engine, decode on another, once for every prompt."""
        body = relay.strip_transfer_params(relay.parse_body(await self._read_body(request, record)))
        request_id = headers.request_id_for(
            request.headers.get(headers.REQUEST_ID), relay.text_field(body, "request_id")
        )
        record.request_id = request_id
        bodies = [body]
        # What one engine answers without a hand-off, it answers for all prompts at once.
        if endpoint.takes_prompt_lists and not endpoint.rules.needs_one_engine(body):
            bodies = prompts.split_prompts(body, self._config.limits.max_prompts)
        engine_headers = headers.request_headers(request.headers, request_id)
        # The proxy reads the answers.
        engine_headers["Accept-Encoding"] = "identity"
        requests = [EngineRequest(endpoint, engine_headers, body, self._hints(request, body)) for body in bodies]
        record.tell_of([leg.story for leg in requests])
        if len(requests) == 1:
            return await relay_reply(request, record, await self._exchange.open(requests[0]), endpoint.dialect)
        replies = await self._open_all(requests)
        return await relay_merged(request, record, replies, prompts.choices_per_prompt(body))

    def _hints(self, request: Request, body: Body) -> Hints:
        return hints_of(request.headers, body) if self._config.routing.looks_at_hints else NO_HINTS

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

    async def _forward(self, request: Request, record: Record) -> Response:
        """Anything else: to one decode engine, as it is."""
        if not request.target.startswith("/"):
            raise ProxyError(404, "Not Found")
        reply = await self._exchange.forward(
            request.method,
            request.target,
            headers.request_headers(request.headers, record.request_id),
            await self._forwarded_body(request, record),
        )
        return await relay_reply(request, record, reply, dialect_of(request.path))

    async def _forwarded_body(self, request: Request, record: Record) -> ForwardedBody:
        """The body to forward: unread if no engine takes it for JSON, otherwise checked to carry no transfer params."""
        if request.content is None:
            return None
        if request.content_type.startswith(_OPAQUE_TYPES):
            record.request_bytes = request.content.length or 0
            return Upload(request.content, self._config.timeouts.idle_seconds)
        data = await self._read_body(request, record)
        body = relay.parse_body(data)
        stripped = relay.strip_transfer_params(body)
        return data if stripped is body else msgspec.json.encode(stripped)

    async def _read_body(self, request: Request, record: Record) -> bytes:
        """The client's body. Raises ``MessageError`` if it is too large or cannot be read, and ``ProxyError`` if it
        does not come.
        """
        most = self._config.limits.max_body_bytes
        try:
            if request.is_here:
                data = await request.read(most)
            else:
                async with asyncio.timeout(self._config.timeouts.idle_seconds):
                    data = await request.read(most)
        except TimeoutError as error:
            raise ProxyError(408, "The request body did not arrive in time") from error
        record.request_bytes = len(data)
        return data
