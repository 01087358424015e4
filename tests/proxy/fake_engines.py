"""Engines for the proxy's tests: they answer like vLLM, remember what they saw, and fail where a test wants it.

``cluster`` starts some of them and a proxy in front, and checks at its end that every hand-off was used or released,
none was used twice, and no task and no socket was left behind.
"""

import asyncio
import enum
import functools
import gzip
import itertools
import json
import os
import re
from collections import deque
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, fields, replace

import aiohttp
import uvloop
from aiohttp import web

from proxy.config import Limits, ProxyConfig, RoutingConfig, Timeouts
from proxy.http1.listener import Listener
from proxy.http1.server import Service
from proxy.service import running

TOKENS_PER_CHOICE = 3
TEST_TIMEOUT_SECONDS = 20
UNCHECKED = 3600.0
"""An interval of health checks in which no test sees one."""
PATIENT = Timeouts(connect_seconds=2, prefill_seconds=5, decode_seconds=5, idle_seconds=5, health_seconds=UNCHECKED)
IMPATIENT = replace(PATIENT, prefill_seconds=0.2, decode_seconds=0.2, idle_seconds=0.2)
IDLE = replace(PATIENT, idle_seconds=0.2)


GENERATING = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
    "/inference/v1/generate",
)
WITHOUT_END_MARK = ("/v1/responses", "/v1/messages")


class Drop(enum.Enum):
    """Faults that break the connection or stall, by where they happen."""

    BEFORE_BODY = enum.auto()
    BEFORE_HEAD = enum.auto()
    AFTER_HEAD = enum.auto()
    IN_BODY = enum.auto()
    AFTER_A_LONG_BODY = enum.auto()
    HANG_BEFORE_HEAD = enum.auto()
    HANG_IN_BODY = enum.auto()
    HANG_IN_AN_EVENT = enum.auto()


@dataclass
class Refuse:
    """A fault: answer with a status and a body."""

    status: int
    body: bytes = b'{"error":{"message":"no","type":"t","param":null,"code":0}}'
    headers: dict = field(default_factory=lambda: {"Content-Type": "application/json"})
    after_seconds: float = 0.0


@dataclass
class Seen:
    """One request as an engine saw it."""

    method: str
    path: str
    headers: object
    body: dict | None
    aborted: bool = False


class Ledger:
    """What became of every hand-off that a prefill engine offered."""

    def __init__(self):
        self.prompts = {}
        self.state = {}
        self.replays = []
        self.mismatches = []
        self._numbers = itertools.count()

    def offer(self, prompt):
        grant = f"grant-{next(self._numbers)}"
        self.prompts[grant] = prompt
        self.state[grant] = "open"
        return grant

    def use(self, grant, prompt):
        if self.state[grant] != "open":
            self.replays.append(grant)
        if self.prompts[grant] != prompt:
            self.mismatches.append((grant, prompt))
        self.state[grant] = "used"

    def release(self, grant):
        self.state[grant] = "released"

    def open_grants(self):
        return [grant for grant, state in self.state.items() if state == "open"]

    def count(self, state):
        return list(self.state.values()).count(state)


class FakeEngine:
    """Serves completions and chat like vLLM. A request for a hand-off gets one; faults are used up one by one."""

    def __init__(self, ledger):
        self.ledger = ledger
        self.seen = []
        self.faults = deque()
        self.always = None
        self.offers_handoffs = True
        self.more = asyncio.Event()
        self.more.set()
        self.bytes_sent = 0
        self.flood = False
        self.healthy = True
        self.silent = False
        self.release_seconds = 0.0
        self.answer_seconds = 0.0
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.begin = None
        self._runner = None
        self._port = 0

    async def start(self):
        app = web.Application(client_max_size=1 << 30)
        app.router.add_get("/health", self._health)
        for path in GENERATING:
            app.router.add_post(path, self._generate)
        app.router.add_route("*", "/{path:.*}", self._other)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.01)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self._port)
        await site.start()
        self._port = self._runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{self._port}"

    async def stop(self):
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def restart(self):
        """At the same address."""
        await self.stop()
        await self.start()

    @property
    def generations(self):
        """The requests that asked for tokens."""
        return [
            seen
            for seen in self.seen
            if seen.path in GENERATING and seen.method == "POST" and not is_release(seen.body)
        ]

    @property
    def releases(self):
        return [seen for seen in self.seen if seen.body is not None and is_release(seen.body)]

    async def _health(self, _request):
        if self.silent:
            await asyncio.Event().wait()
        return web.Response(status=200 if self.healthy else 503)

    async def _other(self, request):
        if self.always is Drop.BEFORE_BODY:
            request.transport.abort()
        data = await request.read()
        as_json = request.content_type == "application/json" and data
        if self.always is Drop.BEFORE_HEAD:
            request.transport.abort()
        if self.always is Drop.HANG_BEFORE_HEAD:
            await asyncio.Event().wait()
        self.seen.append(Seen(request.method, request.path_qs, request.headers, json.loads(data) if as_json else None))
        if request.path == "/missing":
            return web.json_response({"error": {"message": "no such path", "code": 404}}, status=404)
        if request.path == "/moved":
            return web.Response(status=307, headers={"Location": self.url + request.query["to"] + "?a=1"})
        if request.path == "/zipped":
            return web.Response(body=gzip.compress(b"text"), headers={"Content-Encoding": "gzip"})
        return web.Response(body=b"other:" + data, headers={"X-Engine": "yes"})

    async def _generate(self, request):
        body = await request.json()
        seen = Seen(request.method, request.path, request.headers, body)
        self.seen.append(seen)
        try:
            return await self._serve(request, body)
        except asyncio.CancelledError:
            seen.aborted = True
            raise
        except ConnectionError:
            seen.aborted = True
            return web.Response()

    async def _serve(self, request, body):
        params = body.get("kv_transfer_params") or {}
        if is_release(body):
            await asyncio.sleep(self.release_seconds)
            self.ledger.release(params["grant"])
            return web.json_response({"error": {"message": "no such model", "code": 404}}, status=404)
        fault = self.faults.popleft() if self.faults else self.always
        refused = isinstance(fault, Refuse) and fault.status != 200
        if params.get("do_remote_prefill") and not refused:
            self.ledger.use(params["grant"], prompt_of(body))
        if isinstance(fault, Refuse):
            await asyncio.sleep(fault.after_seconds)
            return web.Response(status=fault.status, body=fault.body, headers=fault.headers)
        if fault is Drop.BEFORE_HEAD:
            request.transport.abort()
        if fault is Drop.HANG_BEFORE_HEAD:
            await asyncio.Event().wait()
        if body.get("stream"):
            return await self._stream(request, body, fault)
        return await self._plain(request, body, params, fault)

    async def _plain(self, request, body, params, fault):
        reply = completion(request.path, body)
        if params.get("do_remote_decode") and self.offers_handoffs and fault is None:
            grant = self.ledger.offer(prompt_of(body))
            reply["kv_transfer_params"] = {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "remote_block_ids": [[1, 2], [3]],
                "remote_num_tokens": reply["usage"]["prompt_tokens"],
                "remote_num_bytes": 1024 * reply["usage"]["prompt_tokens"],
                "grant": grant,
                "unknown": {"kept": [1.50, "\u00e9"]},
            }
        data = json.dumps(reply).encode()
        await asyncio.sleep(self.answer_seconds)
        await self.may_answer.wait()
        if fault is None:
            return web.Response(body=data, content_type="application/json")
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        if fault is Drop.AFTER_A_LONG_BODY:
            # Of no announced length: only a dropped connection shows that something is missing.
            data = b" " * (8 << 20) + data
        else:
            response.content_length = len(data)
        await response.prepare(request)
        if fault is not Drop.AFTER_HEAD:
            await response.write(data[:-1])
            self.bytes_sent += len(data)
        return await self._break(request, response, fault)

    async def _stream(self, request, body, fault):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        if fault is Drop.AFTER_HEAD:
            return await self._break(request, response, fault)
        told = events(request.path, body) if self.begin is None else [self.begin, b""]
        for number, event in enumerate(told):
            if number == 1:
                await self.more.wait()
                if fault is not None:
                    return await self._break(request, response, fault)
            await response.write(event)
            self.bytes_sent += len(event)
        while self.flood and self.bytes_sent < 64 << 20:
            await response.write(b": " + b"x" * 65533 + b"\n")
            self.bytes_sent += 65536
        if request.path not in WITHOUT_END_MARK:
            await response.write(b"data: [DONE]\n\n")
        return response

    async def _break(self, request, response, fault):
        if fault is Drop.HANG_IN_AN_EVENT:
            await response.write(b'data: {"cho')
        if fault in (Drop.HANG_IN_BODY, Drop.HANG_IN_AN_EVENT):
            await asyncio.Event().wait()
        if isinstance(fault, bytes):
            await response.write(fault)
            return response
        await asyncio.sleep(0.01)
        request.transport.abort()
        return response


def is_release(body):
    return bool(body) and body.get("model") == "pd-proxy/released"


def prompt_of(body):
    return json.dumps(raw_prompt(body))


def raw_prompt(body):
    return next((body[name] for name in ("prompt", "messages", "input", "token_ids") if name in body), None)


def prompts_in(body):
    prompt = raw_prompt(body)
    several = "prompt" in body and isinstance(prompt, list) and prompt and not isinstance(prompt[0], int)
    return prompt if several else [prompt]


def texts(body):
    """What the engine says to each choice: the prompt itself, so that mixed up prompts show."""
    return [
        [f"{json.dumps(prompt)}/{sample}/{token} " for token in range(TOKENS_PER_CHOICE)]
        for prompt in prompts_in(body)
        for sample in range(body.get("n") or 1)
    ]


def usage(body):
    prompt_tokens = sum(len(json.dumps(prompt)) for prompt in prompts_in(body))
    completion_tokens = TOKENS_PER_CHOICE * len(texts(body))
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": len(prompts_in(body))},
    }


def completion(path, body):
    """The plain answer of one engine; lists of prompts included."""
    chat = "chat" in path
    choices = [
        {"index": index, "finish_reason": "stop"}
        | ({"message": {"role": "assistant", "content": "".join(text)}} if chat else {"text": "".join(text)})
        for index, text in enumerate(texts(body))
    ]
    return {"id": "cmpl-1", "object": "text_completion", "model": "m", "choices": choices, "usage": usage(body)}


def events(path, body):
    """The stream of one engine without its end mark."""
    chat = "chat" in path
    for token in range(TOKENS_PER_CHOICE):
        for index, text in enumerate(texts(body)):
            said = {"delta": {"content": text[token]}} if chat else {"text": text[token]}
            yield event({"id": "cmpl-1", "choices": [{"index": index, **said}]})
    if (body.get("stream_options") or {}).get("include_usage"):
        yield event({"id": "cmpl-1", "choices": [], "usage": usage(body)})


def event(value):
    return b"data: " + json.dumps(value).encode() + b"\n\n"


@dataclass
class Cluster:
    """A proxy, its engines, and a client."""

    url: str
    prefills: list
    decodes: list
    ledger: Ledger
    client: aiohttp.ClientSession
    proxy: object

    def post(self, path="/v1/completions", body=None, **kwargs):
        body = {"model": "m", "prompt": "hello", "max_tokens": 5} if body is None else body
        return self.client.post(self.url + path, json=body, **kwargs)

    def queued(self):
        """How many requests wait for their turn."""
        return self.proxy.admission.queued

    def role_of(self, engine):
        return "prefill" if engine in self.prefills else "decode"

    async def metric(self, line):
        """The value of one line of the metrics."""
        async with self.client.get(self.url + "/metrics") as response:
            for text in (await response.text()).splitlines():
                if text.startswith(line + " "):
                    return float(text.rsplit(" ", 1)[1])
        return 0.0

    async def standing(self, engine):
        """What the proxy thinks of an engine, as its metrics show it."""
        async with self.client.get(self.url + "/metrics") as response:
            text = await response.text()
        line = re.compile(rf'pd_proxy_engine_standing{{engine="{engine.url}",role="\w+",standing="(\w+)"}} 1.0')
        (standing,) = line.findall(text)
        return standing


@asynccontextmanager
async def cluster(prefills=1, decodes=1, *, leaves_open=0, unreachable=(), **settings):
    """A running proxy with fake engines. ``unreachable`` names engines, as 'p0' or 'd1', that do not listen.

    ``settings`` are fields of ``Limits``, ``RoutingConfig`` and ``ProxyConfig``.
    """

    def of(kind):
        return {field.name: settings[field.name] for field in fields(kind) if field.name in settings}

    sockets = num_sockets()
    ledger = Ledger()
    engines = {f"p{i}": FakeEngine(ledger) for i in range(prefills)}
    engines |= {f"d{i}": FakeEngine(ledger) for i in range(decodes)}
    for engine in engines.values():
        await engine.start()
    for name in unreachable:
        await engines[name].stop()
    prefill_engines = [engine for name, engine in engines.items() if name[0] == "p"]
    decode_engines = [engine for name, engine in engines.items() if name[0] == "d"]
    config = ProxyConfig(
        prefill_urls=tuple(engine.url for engine in prefill_engines),
        decode_urls=tuple(engine.url for engine in decode_engines),
        port=0,
        limits=Limits(**of(Limits)),
        routing=RoutingConfig(**of(RoutingConfig)),
        **{"timeouts": PATIENT, **of(ProxyConfig)},
    )
    try:
        async with running(config) as proxy, aiohttp.ClientSession() as client:
            yield Cluster(proxy.address, prefill_engines, decode_engines, ledger, client, proxy)
    finally:
        await asyncio.gather(*(engine.stop() for engine in engines.values()))
    assert ledger.replays == [], "a hand-off was used twice"
    assert ledger.mismatches == [], "a hand-off was used for another prompt"
    assert len(ledger.open_grants()) == leaves_open, ledger.state
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}, "a task was left behind"
    await until(lambda: num_sockets() <= sockets)


@asynccontextmanager
async def listening(server, serve=None):
    """A proxy's face alone; its address. ``serve`` may stand between it and its clients."""
    listener = Listener(Service(serve or server.serve, server.refuse))
    await listener.start("127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{listener.address[1]}"
    finally:
        await listener.close(0.01)


def num_sockets():
    """How many sockets this process has."""
    folder = "/proc/self/fd"
    targets = []
    for name in os.listdir(folder):
        # The listing itself has a descriptor that is gone by now.
        with suppress(FileNotFoundError):
            targets.append(os.readlink(f"{folder}/{name}"))
    return sum(target.startswith("socket:") for target in targets)


def asynchronous(test):
    """Run a coroutine function as a test, on a loop like the one that the proxy runs on, with a time limit."""

    @functools.wraps(test)
    def synchronous(*args, **kwargs):
        async def limited():
            async with asyncio.timeout(TEST_TIMEOUT_SECONDS):
                await test(*args, **kwargs)

        uvloop.run(limited())

    return synchronous


async def until(condition, timeout_seconds=3.0):
    """Wait for something that another task is about to do."""
    async with asyncio.timeout(timeout_seconds):
        while not condition():  # noqa: ASYNC110 - any condition, also one of a fake's own state
            await asyncio.sleep(0.005)


async def error_of(response):
    """The OpenAI error in a response, checked for its shape."""
    assert response.content_type == "application/json"
    error = (await response.json())["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == response.status
    assert "127.0.0.1" not in error["message"]
    assert "X-Request-Id" in response.headers
    return error
