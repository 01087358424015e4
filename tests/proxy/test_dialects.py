"""Errors in the words of each API."""

import json

import pytest

from proxy import dialects
from proxy.endpoints import ENDPOINTS, dialect_of, name_of


def events(stream):
    """(event name or None, data) of a stream."""
    found = []
    for block in stream.split(b"\n\n")[:-1]:
        lines = dict(line.split(b": ", 1) for line in block.split(b"\n"))
        found.append((lines.get(b"event"), lines[b"data"]))
    return found


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "BadRequestError"),
        (418, "BadRequestError"),
        (429, "RateLimitError"),
        (503, "ServiceUnavailableError"),
        (599, "InternalServerError"),
    ],
)
def test_openai(status, kind):
    error = {"message": "m", "type": kind, "param": "p", "code": status}
    assert json.loads(dialects.OPENAI.body(status, "m", "p")) == {"error": error}
    assert json.loads(dialects.RESPONSES.body(status, "m", "p")) == {"error": error}
    (event, data), end = events(dialects.OPENAI.end_of_stream(status, "m", b""))
    assert (event, json.loads(data)) == (None, {"error": error | {"param": None}})
    assert end == (None, b"[DONE]")


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (418, "invalid_request_error"),
        (429, "rate_limit_error"),
        (503, "overloaded_error"),
        (502, "api_error"),
    ],
)
def test_anthropic(status, kind):
    error = {"type": "error", "error": {"type": kind, "message": "m"}}
    assert json.loads(dialects.ANTHROPIC.body(status, "m", "p")) == error
    ((event, data),) = events(dialects.ANTHROPIC.end_of_stream(status, "m", b""))
    assert (event, json.loads(data)) == (b"error", error)


@pytest.mark.parametrize(
    ("last", "number"),
    [
        (b"", 0),
        (b'data: {"sequence_number":4}\n\ndata: {"sequence_number": 5}\n\n', 6),
        (b'data: {"sequence_number":' + b"9" * 16 + b"}", 0),
    ],
)
def test_the_end_of_a_responses_stream_goes_on_counting(last, number):
    ((event, data),) = events(dialects.RESPONSES.end_of_stream(502, "m", last))
    assert event == b"error"
    assert json.loads(data) == {
        "type": "error",
        "code": "502",
        "message": "m",
        "param": None,
        "sequence_number": number,
    }


@pytest.mark.parametrize(
    ("path", "name", "dialect"),
    [
        ("/v1/messages", "messages", dialects.ANTHROPIC),
        ("/v1/messages/count_tokens", "other", dialects.ANTHROPIC),
        ("/v1/responses", "responses", dialects.OPENAI),
        ("/v1/models", "other", dialects.OPENAI),
    ],
)
def test_what_a_path_stands_for(path, name, dialect):
    assert name_of(path) == name
    assert dialect_of(path) is dialect


def test_each_endpoint_ends_its_streams_in_its_own_way():
    ends = {endpoint.name: endpoint.dialect.end_of_stream(502, "m", b"") for endpoint in ENDPOINTS.values()}
    with_mark = {name for name, end in ends.items() if end.endswith(dialects.END_MARK_EVENT)}
    assert with_mark == {"completions", "chat", "generate"}


@pytest.mark.parametrize(
    ("events", "data"),
    [
        (b'data: {"error": {"code": 500}}\n\n', b'{"error": {"code": 500}}'),
        (b'data:{"error":"no"}\r\n\r\n', b'{"error":"no"}'),
        (b': ping\n\nevent: error\ndata: {"type":"error"}\n\n', b'{"type":"error"}'),
        (b'data: {"id":1}\n\ndata: {"error": {"co', b'{"error": {"co'),
        (b'data: {"error": null}\n\n', None),
        (b'data: {"text": "data: {\\"error\\": {}}"}\n\n', None),
        (b"event: errors\ndata: {}\n\n", None),
        (b"", None),
    ],
)
def test_error_events_are_recognised(events, data):
    assert dialects.error_event(events) == data


@pytest.mark.parametrize(
    ("error", "blames"),
    [(b'{"error": {"code": 400}}', True), (b'{"code":"422"}', True), (b'{"code": 500}', False), (b"{}", False)],
)
def test_some_errors_are_the_client_s(error, blames):
    assert dialects.blames_the_client(error) is blames
