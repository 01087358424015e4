"""How an error is written in each API that engines speak, before an answer and in the middle of a stream.

``end_of_stream`` gets the last bytes that were sent, since some streams number their events.
"""

import re
from collections.abc import Callable
from typing import NamedTuple

import msgspec

_OPENAI_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    408: "RequestTimeoutError",
    413: "RequestTooLargeError",
    429: "RateLimitError",
    500: "InternalServerError",
    502: "BadGatewayError",
    503: "ServiceUnavailableError",
    504: "GatewayTimeoutError",
}

_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}

END_MARK_EVENT = b"data: [DONE]\n\n"
"""Ends every OpenAI stream but Responses. Alone it reads as success: after a failure an error event goes before it."""


class Dialect(NamedTuple):
    """The two ways of writing an error: status, message, and the field that is to blame or the last bytes sent."""

    body: Callable[[int, str, str | None], bytes]
    end_of_stream: Callable[[int, str, bytes], bytes]


def _openai_body(status: int, message: str, param: str | None = None) -> bytes:
    kind = _OPENAI_TYPES.get(status, "InternalServerError" if status >= 500 else "BadRequestError")
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": param, "code": status}})


def _openai_end(status: int, message: str, _last: bytes) -> bytes:
    return b"data: " + _openai_body(status, message) + b"\n\n" + END_MARK_EVENT


def _anthropic_body(status: int, message: str, _param: str | None = None) -> bytes:
    kind = _ANTHROPIC_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": message}})


def _anthropic_end(status: int, message: str, _last: bytes) -> bytes:
    return b"event: error\ndata: " + _anthropic_body(status, message) + b"\n\n"


_SEQUENCE_NUMBER = re.compile(rb'"sequence_number": ?(\d{1,15})\b')


def _responses_end(status: int, message: str, last: bytes) -> bytes:
    numbers = _SEQUENCE_NUMBER.findall(last)
    event = {
        "type": "error",
        "code": str(status),
        "message": message,
        "param": None,
        "sequence_number": int(numbers[-1]) + 1 if numbers else 0,
    }
    return b"event: error\ndata: " + msgspec.json.encode(event) + b"\n\n"


_ERROR_EVENT = re.compile(rb'(?:\A|\n)(?:event: ?error\r?\ndata: ?|data: ?(?=\{"error": ?[{"]))([^\r\n]*)')
_BLAMES_THE_CLIENT = re.compile(rb'"code": ?"?4\d\d\b')


def error_event(events: bytes) -> bytes | None:
    """The data of the first error event of any API among these bytes of a stream; None if there is none.

    The data may be cut off where the bytes end.
    """
    # Asked of every piece of every stream: this costs an eighth, and is nearly always enough.
    if b"error" not in events:
        return None
    found = _ERROR_EVENT.search(events)
    return None if found is None else found[1]


def blames_the_client(error: bytes) -> bool:
    """Whether the data of an error event has a 4xx code: another attempt would end in the same way."""
    return _BLAMES_THE_CLIENT.search(error) is not None


OPENAI = Dialect(_openai_body, _openai_end)
RESPONSES = Dialect(_openai_body, _responses_end)
ANTHROPIC = Dialect(_anthropic_body, _anthropic_end)
