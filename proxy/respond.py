"""Answering the client: relaying one reply, or merging the replies to a list of prompts."""

import asyncio
from collections.abc import Sequence

import msgspec
from multidict import CIMultiDict

from proxy.dialects import END_MARK_EVENT, OPENAI, Dialect, error_event
from proxy.engines import Reply
from proxy.errors import Answer, EngineFailedError, FailureKind
from proxy.headers import REQUEST_ID
from proxy.http1.request import Request, Response
from proxy.journal import Record
from proxy.metrics import BROKEN_STREAM, ERROR_EVENT
from proxy.prompts import EngineErrorEvent, EventSplitter, StreamMerger, merge_replies

_BLANK_LINES = (b"\n\n", b"\r\n\r\n")
_LENGTH_AND_CODING = ("Content-Length", "Content-Encoding")


def complete(record: Record, answer: Answer, *, closes: bool = False) -> Response:
    """A response whose body is all here."""
    headers = answer.headers.copy()
    for name in _LENGTH_AND_CODING:
        headers.popall(name, None)
    headers[REQUEST_ID] = record.request_id
    record.answer_bytes = len(answer.body)
    return Response(answer.status, headers, answer.body, closes)


def json_response(status: int, value: object) -> Response:
    """A value as JSON."""
    return Response(status, CIMultiDict({"Content-Type": "application/json"}), msgspec.json.encode(value))


async def relay_reply(request: Request, record: Record, reply: Reply, dialect: Dialect) -> Response:
    """Pass one reply on, byte by byte as it comes; closes it.

    A stream of events that breaks off ends with an error event and the end mark. The connection stays: it is in order,
    and a client may have sent its next request on it already. Any other body that breaks off, or one whose length was
    announced, ends with a dropped connection, so that nobody takes the part for the whole.
    """
    try:
        headers = _begin(request, record, reply)
        is_event_stream = reply.is_event_stream
        last = b"\n\n"
        try:
            while chunk := await reply.next_chunk():
                if is_event_stream and (error := error_event(chunk)) is not None:
                    record.broke(ERROR_EVENT, error.decode(errors="replace"))
                await request.write(chunk)
                record.answer_bytes += len(chunk)
                last = chunk
            record.answered(last)
        except EngineFailedError as failure:
            record.broke(BROKEN_STREAM, str(failure))
            if is_event_stream and "Content-Length" not in headers:
                told = failure.as_proxy_error()
                blank_line = b"" if last.endswith(_BLANK_LINES) else b"\n\n"
                end = blank_line + dialect.end_of_stream(told.status, str(told), last)
                await request.write(end)
                record.answer_bytes += len(end)
            else:
                request.abort()
        return Response(reply.status, headers)
    finally:
        reply.close()


async def relay_merged(request: Request, record: Record, replies: Sequence[Reply], per_prompt: int) -> Response:
    """Merge the replies to the prompts of one request; closes them. Raises ``ProxyError`` before the first byte."""
    try:
        if all(reply.is_event_stream for reply in replies):
            return await _merge_streams(request, record, replies, per_prompt)
        try:
            body = merge_replies([await reply.read() for reply in replies], per_prompt)
        except EngineFailedError as failure:
            raise failure.as_proxy_error() from failure
        record.answering()
        record.answered(body)
        return complete(record, Answer(replies[0].status, replies[0].headers, body))
    finally:
        for reply in replies:
            reply.close()


async def _merge_streams(request: Request, record: Record, replies: Sequence[Reply], per_prompt: int) -> Response:
    headers = _begin(request, record, replies[0])
    merger = StreamMerger(len(replies), per_prompt)
    # Only whole events are written, and one at a time, so that a failure can always be followed by an error event.
    writing = asyncio.Lock()

    async def pump(number: int, reply: Reply) -> None:
        splitter = EventSplitter()
        while chunk := await reply.next_chunk():
            if merged := merger.merge(number, splitter.feed(chunk)):
                async with writing:
                    await request.write(merged)
                    record.answer_bytes += len(merged)
        if not merger.ended(number):
            raise EngineFailedError(FailureKind.LOST, "An engine ended its stream without an end mark")

    try:
        async with asyncio.TaskGroup() as group:
            for number, reply in enumerate(replies):
                group.create_task(pump(number, reply))
        end = merger.finish()
        record.answered(end)
    except ExceptionGroup as failures:
        record.broke(BROKEN_STREAM, str(failures.exceptions[0]))
        end = _end_of_stream(failures.exceptions[0])
    await request.write(end)
    record.answer_bytes += len(end)
    return Response(replies[0].status, headers)


def _end_of_stream(failure: Exception) -> bytes:
    """The events that end a stream after a failure. Raises the failure if it is not an engine's."""
    if isinstance(failure, EngineErrorEvent):
        return failure.event + END_MARK_EVENT
    if isinstance(failure, EngineFailedError):
        error = failure.as_proxy_error()
        return OPENAI.end_of_stream(error.status, str(error), b"")
    raise failure


def _begin(request: Request, record: Record, reply: Reply) -> CIMultiDict[str]:
    headers = reply.headers
    headers[REQUEST_ID] = record.request_id
    request.begin(reply.status, headers)
    record.answering()
    return headers
