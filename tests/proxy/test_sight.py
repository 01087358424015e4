"""What people see of requests: one line in the log, the status page, and spans."""

import asyncio
import json
import logging
import re
import subprocess
import sys
from contextlib import asynccontextmanager
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from proxy.admin import Admin
from proxy.errors import ProxyError
from proxy.journal import KEPT_RECORDS, KEPT_STORIES, Journal, Record
from proxy.metrics import Metrics
from proxy.registry import Registry
from proxy.story import Story
from proxy.tracing import NO_TRACING, tracing_to
from tests.proxy.fake_engines import Drop, Refuse, asynchronous, cluster, until

BODY = {"model": "m", "prompt": "hello", "max_tokens": 5}
STREAM = BODY | {"stream": True, "stream_options": {"include_usage": True}}


def lines(caplog):
    """The log lines about requests, read back."""
    return [json.loads(record.getMessage()) for record in caplog.records if record.name == "proxy.requests"]


@asynchronous
@pytest.mark.parametrize("body", [BODY, STREAM], ids=["plain", "stream"])
async def test_a_request_is_one_line_with_both_engines_and_both_ids(caplog, body):
    caplog.set_level(logging.INFO)
    async with cluster(num_ranks=2) as c:
        async with c.post(body=body, headers={"X-Request-Id": "mine"}) as response:
            answer = await response.read()
        assert await c.metric("pd_proxy_handoff_tokens_total") == 7
        assert await c.metric("pd_proxy_handoff_bytes_total") == 7168
        (line,) = lines(caplog)
        assert line["time"] > 1e9
        assert 0 < line["first_byte_seconds"] <= line["seconds"] if body is STREAM else line["seconds"] > 0
        (prompt,) = line["prompts"]
        for leg in prompt["legs"].values():
            assert 0 < leg.pop("seconds") < line["seconds"]
        expected = {"rank": 0, "request_id": "cmpl-1", "attempts": 1}
        assert prompt == {
            "mode": "remote",
            "prompt_tokens": 7,
            "handoff_tokens": 7,
            "handoff_bytes": 7168,
            "legs": {
                "prefill": {"engine": c.prefills[0].url, **expected},
                "decode": {"engine": c.decodes[0].url, **expected},
            },
        }
        assert 0 <= line["queue_seconds"] < line["first_byte_seconds"]
        measured = {"time", "seconds", "queue_seconds", "first_byte_seconds", "prompts"}
        assert {name: value for name, value in line.items() if name not in measured} == {
            "request_id": "mine",
            "endpoint": "completions",
            "outcome": "ok",
            "status": 200,
            "error": None,
            "request_bytes": len(json.dumps(body)),
            "answer_bytes": len(answer),
            "answer_tokens": 3,
            "num_prompts": 1,
        }


@asynchronous
@pytest.mark.parametrize("body", [BODY, STREAM], ids=["plain", "stream"])
async def test_a_list_of_prompts_is_one_line_with_all_of_them(caplog, body):
    caplog.set_level(logging.INFO)
    async with cluster() as c, c.post(body=body | {"prompt": ["a", "b"]}) as response:
        answer = await response.read()
    (line,) = lines(caplog)
    assert len(line["prompts"]) == 2
    assert line["answer_bytes"] == len(answer)
    assert line["answer_tokens"] == 6
    assert 0 < line["first_byte_seconds"] <= line["seconds"]


@asynchronous
async def test_the_bytes_of_errors_and_uploads_and_broken_streams_are_told(caplog):
    caplog.set_level(logging.INFO)
    async with cluster() as c:
        c.prefills[0].faults.append(Refuse(400))
        async with c.post() as response:
            refusal = await response.read()
        upload = {"data": b"x" * 1000, "headers": {"Content-Type": "audio/wav"}}
        async with c.client.post(c.url + "/v1/audio", **upload) as response:
            uploaded = await response.read()
        c.decodes[0].faults.append(Drop.IN_BODY)
        async with c.post(body=STREAM) as response:
            broken = await response.read()
        c.decodes[0].faults.append(Drop.IN_BODY)
        async with c.post(body=STREAM | {"prompt": ["a", "b"]}) as response:
            merged = await response.read()
    assert [line["answer_bytes"] for line in lines(caplog)] == [len(refusal), len(uploaded), len(broken), len(merged)]
    assert lines(caplog)[1]["request_bytes"] == 1000


@asynchronous
async def test_the_time_in_the_queue_is_told_and_measured(caplog):
    caplog.set_level(logging.INFO)
    async with cluster(max_in_flight=1) as c:
        c.decodes[0].answer_seconds = 0.1
        await asyncio.gather(*(answered(c) for _ in range(2)))
        assert await c.metric("pd_proxy_queue_seconds_count") == 2
        assert await c.metric("pd_proxy_queue_seconds_sum") > 0.1
    first, second = lines(caplog)
    assert first["queue_seconds"] < 0.05 < 0.1 < second["queue_seconds"] < second["seconds"]


@asynchronous
async def test_who_never_had_a_turn_waited_all_the_time(caplog):
    caplog.set_level(logging.INFO)
    async with cluster(max_in_flight=1, queue_seconds=0.1) as c:
        c.decodes[0].answer_seconds = 0.3
        await asyncio.gather(*(answered(c) for _ in range(2)))
    late, _ = lines(caplog)
    assert (late["status"], late["first_byte_seconds"]) == (503, None)
    assert 0.09 < late["queue_seconds"] == late["seconds"]


async def answered(c):
    async with c.post() as response:
        await response.read()


@asynchronous
async def test_what_went_wrong_is_told(caplog):
    caplog.set_level(logging.INFO)
    async with cluster(2, 1) as c:
        c.prefills[0].always = Drop.BEFORE_HEAD
        async with c.post() as response:
            assert response.status == 200
        c.prefills[1].always = Refuse(500)
        async with c.post() as response:
            assert response.status == 502
        async with c.client.get(c.url + "/missing") as response:
            assert response.status == 404
        c.decodes[0].always = Drop.HANG_BEFORE_HEAD
        task = asyncio.create_task(c.post("/v1/embeddings", {}).__aenter__())
        await until(lambda: c.proxy.admission.in_flight)
        task.cancel()
        await until(lambda: len(lines(caplog)) == 4)
    fine, failed, forwarded, gone = lines(caplog)
    assert (fine["outcome"], fine["prompts"][0]["legs"]["prefill"]["attempts"]) == ("ok", 2)
    assert (failed["outcome"], failed["status"]) == ("failed", 502)
    assert "500" in failed["error"] or "broke" in failed["error"]
    assert failed["prompts"][0]["legs"]["decode"]["seconds"] is None
    assert (forwarded["endpoint"], forwarded["outcome"], forwarded["prompts"]) == ("other", "rejected", [])
    assert (gone["outcome"], gone["status"]) == ("client_gone", None)


@asynchronous
@pytest.mark.parametrize(
    ("settings", "more", "offers", "mode"),
    [
        ({"min_remote_tokens": 100}, {}, True, "short"),
        ({}, {"echo": True}, True, "whole"),
        ({}, {}, False, "not_offered"),
        ({"decode_only_fallback": True}, {}, None, "fallback"),
    ],
)
async def test_the_line_says_why_decode_computed_a_prompt(caplog, settings, more, offers, mode):
    caplog.set_level(logging.INFO)
    async with cluster(unreachable=["p0"] if offers is None else [], **settings) as c:
        c.prefills[0].offers_handoffs = bool(offers)
        async with c.post(body=BODY | more) as response:
            assert response.status == 200
    assert lines(caplog)[0]["prompts"][0]["mode"] == mode


@asynchronous
async def test_own_pages_are_not_told(caplog):
    caplog.set_level(logging.INFO)
    async with cluster() as c:
        for path in ("/health", "/ready", "/metrics", "/status", "/status.json"):
            async with c.client.get(c.url + path) as response:
                await response.read()
    assert lines(caplog) == []
    assert c.decodes[0].seen == []


def test_a_journal_keeps_the_last_records_and_the_last_failed_ones(caplog):
    journal = Journal(Metrics())
    for number in range(KEPT_RECORDS + 10):
        for status in (200, 502, None):
            record = Record(f"{number}", "chat")
            record.ended(status)
            journal.note(record)
    assert len(journal.recent) == len(journal.failed) == KEPT_RECORDS
    assert {record.outcome for record in journal.recent} == {"ok", "failed", "client_gone"}
    assert {record.outcome for record in journal.failed} == {"failed"}
    # Nothing was logged: the level is above.
    assert lines(caplog) == []


@pytest.mark.parametrize(
    ("last", "tokens"),
    [
        (b'{"usage":{"prompt_tokens":5,"completion_tokens":7}}', 7),
        (b'{"usage": {"input_tokens": 5, "output_tokens": 8}}', 8),
        (b'"completion_tokens":1,"completion_tokens":2', 2),
        (b'"completion_tokens":9' + b" " * 5000, None),
        (b'"completion_tokens":null', None),
        (b"", None),
    ],
)
def test_the_tokens_of_an_answer_are_read_from_its_end(last, tokens):
    record = Record("r", "chat")
    record.answered(last)
    assert record.answer_tokens == tokens


class Page(HTMLParser):
    """Every address that a page would load something from."""

    def __init__(self, text):
        super().__init__()
        self.addresses = []
        self.ids = []
        self.feed(text)

    def handle_starttag(self, _tag, attributes):
        self.addresses += [value for name, value in attributes if name in {"src", "href", "action"}]
        self.ids += [value for name, value in attributes if name == "id"]


@asynchronous
async def test_the_status_page_needs_nothing_but_the_proxy():
    async with cluster() as c, c.client.get(c.url + "/status") as response:
        assert response.content_type == "text/html"
        policy = response.headers["Content-Security-Policy"]
        text = await response.text()
    assert "default-src 'none'" in policy
    page = Page(text)
    # The icon is in the page: a browser asks a server for one that is not, and an engine would have to answer.
    assert page.addresses == ["data:,"]
    assert {"engines", "recent", "failed"} <= set(page.ids)
    assert re.findall(r"https?://|@import|url\(|innerHTML|insertAdjacent|document\.write", text) == []
    assert Page('<img src="x">').addresses == ["x"]


@asynchronous
async def test_the_status_shows_engines_load_and_recent_requests_newest_first():
    async with cluster() as c:
        c.prefills[0].faults.append(Refuse(400))
        for name in ("first", "second"):
            async with c.post(headers={"X-Request-Id": name}) as response:
                await response.read()
        c.decodes[0].more.clear()
        stream = await c.post(body=STREAM)
        async with c.client.get(c.url + "/status.json") as response:
            status = await response.json()
        async with c.client.get(c.url + "/status") as response:
            page = await response.text()
        c.decodes[0].more.set()
        await stream.read()
    assert (status["in_flight"], status["queued"], status["draining"]) == (1, 0, False)
    assert [(engine["role"], engine["requests"]) for engine in status["engines"]] == [("prefill", 0), ("decode", 1)]
    assert [record["request_id"] for record in status["recent"]] == ["second", "first"]
    assert [(record["request_id"], record["outcome"]) for record in status["failed"]] == [("first", "rejected")]
    # What the page reads is there.
    read = {name: set(re.findall(rf"\b{name}\.(\w+)", page)) for name in ("request", "engine", "prompt", "status")}
    assert read["request"] == set(status["recent"][0])
    assert read["engine"] == set(status["engines"][0])
    assert read["prompt"] == set(status["recent"][0]["prompts"][0])
    assert read["status"] == {*status, "json"}


@asynchronous
async def test_with_an_admin_token_the_status_needs_it(tmp_path):
    token_file = tmp_path / "token"
    token_file.write_text("0123456789abcdef")
    async with cluster(admin_token_file=token_file) as c:
        for headers, expected in (({}, 401), ({"Authorization": "Bearer 0123456789abcdef"}, 200)):
            async with c.client.get(c.url + "/status.json", headers=headers) as response:
                assert response.status == expected


@pytest.mark.parametrize(
    ("remote", "allowed"),
    [
        ("127.0.0.1", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("10.0.0.1", False),
        ("::2", False),
        (None, False),
    ],
)
def test_without_a_token_the_status_is_for_the_machine_itself(remote, allowed):
    request = SimpleNamespace(remote=remote)
    if allowed:
        Admin(Registry({}), None).allow_reading(request)
    else:
        with pytest.raises(ProxyError) as refusal:
            Admin(Registry({}), None).allow_reading(request)
        assert refusal.value.status == 403


def test_of_many_prompts_the_first_are_told_and_all_are_counted():
    record = Record("id", "completions")
    stories = [Story() for _ in range(KEPT_STORIES + 1)]
    record.tell_of(stories)
    assert all(told is story for told, story in zip(record.prompts, stories[:KEPT_STORIES], strict=True))
    assert record.num_prompts == KEPT_STORIES + 1


@asynccontextmanager
async def collector():
    """An OTLP/HTTP endpoint: its address, and the spans that it got."""
    spans = []

    async def collect(request):
        message = ExportTraceServiceRequest.FromString(await request.read())
        spans.extend(
            span for resource in message.resource_spans for scope in resource.scope_spans for span in scope.spans
        )
        return web.Response(body=b"", content_type="application/x-protobuf")

    app = web.Application()
    app.router.add_post("/v1/traces", collect)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.01)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1/traces", spans
    finally:
        await runner.cleanup()


CLIENT_TRACE = "0af7651916cd43dd8448eb211c80319c"
CLIENT_SPAN = "b7ad6b7169203331"
TRACED = {"traceparent": f"00-{CLIENT_TRACE}-{CLIENT_SPAN}-01", "X-Request-Id": "mine"}


@asynchronous
@pytest.mark.parametrize("body", [BODY, STREAM, STREAM | {"prompt": ["a", "b"]}], ids=["plain", "stream", "list"])
async def test_both_legs_are_spans_inside_the_request_s_and_parents_of_the_engines(body):
    num_prompts = len(body["prompt"]) if isinstance(body["prompt"], list) else 1
    async with collector() as (endpoint, spans):
        async with cluster(otlp_endpoint=endpoint) as c:
            async with c.post(body=body, headers=TRACED) as response:
                assert response.status == 200
                await response.read()
            sent = [seen.headers["traceparent"] for seen in (*c.prefills[0].generations, *c.decodes[0].generations)]
        await until(lambda: len(spans) == 1 + 2 * num_prompts)
    request, legs = family(spans, "pd-proxy completions")
    assert request.parent_span_id.hex() == CLIENT_SPAN
    assert sorted(span.name for span in legs) == ["decode"] * num_prompts + ["prefill"] * num_prompts
    assert sorted(sent) == sorted(f"00-{CLIENT_TRACE}-{span.span_id.hex()}-01" for span in legs)
    engines = {"prefill": c.prefills[0].url, "decode": c.decodes[0].url}
    assert all(attributes(span) == {"pd_proxy.engine": engines[span.name]} for span in legs)
    assert attributes(request) == {"pd_proxy.endpoint": "completions", "pd_proxy.request_id": "mine"}


@asynchronous
async def test_each_failed_attempt_is_a_span_of_its_own_that_says_so():
    async with collector() as (endpoint, spans):
        async with cluster(2, 1, otlp_endpoint=endpoint) as c:
            c.prefills[0].always = Drop.BEFORE_HEAD
            async with c.post(headers=TRACED) as response:
                assert response.status == 200
        await until(lambda: len(spans) == 4)
    _, legs = family(spans, "pd-proxy completions")
    assert [(span.name, span.status.code) for span in legs] == [("prefill", 2), ("prefill", 0), ("decode", 0)]


@asynchronous
async def test_what_is_only_forwarded_is_traced_too():
    async with collector() as (endpoint, spans):
        async with cluster(otlp_endpoint=endpoint) as c:
            async with c.client.get(c.url + "/v1/models", headers=TRACED) as response:
                assert response.status == 200
            sent = c.decodes[0].seen[0].headers["traceparent"]
        await until(lambda: len(spans) == 2)
    _, (leg,) = family(spans, "pd-proxy other")
    assert sent == f"00-{CLIENT_TRACE}-{leg.span_id.hex()}-01"


def family(spans, name):
    """The span of a request, and those of its legs by their beginning; all of them belong to the client's trace."""
    (request,) = [span for span in spans if span.name == name]
    legs = sorted((span for span in spans if span is not request), key=lambda span: span.start_time_unix_nano)
    assert {span.trace_id.hex() for span in spans} == {CLIENT_TRACE}
    assert all(span.parent_span_id == request.span_id for span in legs)
    return request, legs


def attributes(span):
    return {attribute.key: attribute.value.string_value for attribute in span.attributes}


def test_spans_without_opentelemetry_are_a_mistake_that_says_what_to_install():
    script = """
import sys
sys.modules["opentelemetry.sdk.trace"] = None  # as if it were not installed
from proxy.__main__ import main
sys.exit(main(["--prefill", "http://p:1", "--decode", "http://d:1", "--port", "0", "--otlp-endpoint", "http://o:1"]))
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert "pd-proxy: --otlp-endpoint needs OpenTelemetry: pip install 'pd_transfer[tracing]'" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_without_an_endpoint_there_are_no_spans():
    assert tracing_to(None) is NO_TRACING
    NO_TRACING.close()
