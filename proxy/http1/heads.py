"""The heads of messages as bytes."""

import time
from collections.abc import Iterable
from email.utils import formatdate
from http import HTTPStatus

from multidict import CIMultiDict

Headers = CIMultiDict[str]

MOST_HEAD_BYTES = 1 << 16
"""A longer head, or as much of anything else that is no body, is refused."""

_REASONS = {status.value: status.phrase for status in HTTPStatus}
_WITHOUT_BODY = frozenset({204, 304})


def decoded(fields: Iterable[tuple[bytes, bytes]]) -> Headers:
    """Header fields as text. What is no UTF-8 keeps its bytes, as lone surrogates."""
    return CIMultiDict(
        [(name.decode(), value.strip(b" \t").decode("utf-8", "surrogateescape")) for name, value in fields]
    )


def request_head(method: str, target: str, headers: Headers, extra: Iterable[str] = ()) -> bytes:
    """Everything before the body; ``extra`` are lines."""
    return _head(f"{method} {target} HTTP/1.1", headers, extra)


def response_head(status: int, headers: Headers, extra: Iterable[str] = ()) -> bytes:
    """Everything before the body; ``extra`` are lines. A date is added if there is none."""
    if "Date" not in headers:
        extra = (*extra, _date_line())
    return _head(f"HTTP/1.1 {status} {_REASONS.get(status, '')}", headers, extra)


def chunk(piece: bytes) -> bytes:
    """A piece of a chunked body."""
    return b"%x\r\n%b\r\n" % (len(piece), piece)


LAST_CHUNK = b"0\r\n\r\n"


def has_body(method: str, status: int) -> bool:
    """Whether an answer has a body, whatever its head says of it."""
    return method != "HEAD" and status not in _WITHOUT_BODY and status >= 200


def _head(first: str, headers: Headers, extra: Iterable[str]) -> bytes:
    lines = [first]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    lines += extra
    text = "\r\n".join(lines)
    # One check for all of them: a line end inside a value would begin a header, or a message, of somebody else's.
    if not (text.count("\n") == text.count("\r") == len(lines) - 1):
        raise ValueError("a line end inside a head")
    return (text + "\r\n\r\n").encode("utf-8", "surrogateescape")


_date = (0, "")


def _date_line() -> str:
    global _date
    now = int(time.time())
    if _date[0] != now:
        _date = (now, f"Date: {formatdate(now, usegmt=True)}")
    return _date[1]
