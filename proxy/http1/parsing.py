"""Bytes of a client cut into requests."""

from typing import NamedTuple, Protocol

import httptools

from proxy.http1.errors import MessageError
from proxy.http1.heads import MOST_HEAD_BYTES

Fields = list[tuple[bytes, bytes]]

_VERSIONS = frozenset({"1.0", "1.1"})
_FIELD_OVERHEAD = 4
"""A colon, a space and a line end."""


class Head(NamedTuple):
    """A request's head."""

    method: str
    target: bytes
    fields: Fields
    version: str
    keeps_alive: bool


class Sink(Protocol):
    """Gets what was cut."""

    def head_begins(self) -> None:
        """The first byte of a request is here."""

    def head_ends(self, head: Head) -> None:
        """All of a head is here. Raises ``MessageError``."""

    def body_piece(self, piece: bytes) -> None:
        """Some of the body of the last head."""

    def request_ends(self) -> None:
        """There is no more of it."""


class RequestParser:
    """Cuts what it is fed, and raises nothing but ``MessageError``; after that nothing more may be fed."""

    def __init__(self, sink: Sink) -> None:
        self.in_head = False
        self._sink = sink
        self._parser = httptools.HttpRequestParser(self)
        self._target = b""
        self._fields: Fields = []
        self._head_bytes = 0
        self._bare_bytes = 0
        """How much came since the last byte of a body, trailers and the sizes of chunks included."""
        self._asks_for_another_protocol = False

    def feed(self, data: bytes) -> None:
        """What came. Raises ``MessageError``."""
        left: list[bytes | memoryview] = [data]
        while left:
            piece = left.pop()
            end_of_head = self._feed(piece)
            if end_of_head and self._asks_for_another_protocol:
                left += [rest] if (rest := memoryview(piece)[end_of_head:]) else []
                left.append(self._as_http())

    def _feed(self, piece: bytes | memoryview) -> int:
        """Feed all of it, or up to the end of a head that asks for another protocol: then, so much of it."""
        self._bare_bytes += len(piece)
        try:
            self._parser.feed_data(piece)
        except httptools.HttpParserUpgrade as end_of_head:
            return int(end_of_head.args[0])
        except httptools.HttpParserCallbackError as error:
            # Ours, raised in one of the methods below.
            if isinstance(error.__context__, MessageError):
                raise error.__context__ from None
            raise
        except httptools.HttpParserError as error:
            raise MessageError(400, f"this is no HTTP request: {error}") from error
        if self._bare_bytes > MOST_HEAD_BYTES:
            raise _too_large()
        return 0

    def _as_http(self) -> bytes:
        """The head once more, for a new parser, as that of a request that does not ask for another protocol: none is
        spoken here.
        """
        self._asks_for_another_protocol = False
        fields = [(name, value) for name, value in self._fields if name.lower() != b"upgrade"]
        version = self._parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (self._parser.get_method(), self._target, version)]
        lines += [b"%b: %b" % field for field in fields]
        self._parser = httptools.HttpRequestParser(self)
        self._bare_bytes = 0
        return b"\r\n".join(lines) + b"\r\n\r\n"

    # Called by httptools

    def on_message_begin(self) -> None:
        """The first byte of a request."""
        self.in_head = True
        self._target = b""
        self._fields = []
        self._head_bytes = 0
        self._sink.head_begins()

    def on_url(self, piece: bytes) -> None:
        """Some of the target."""
        self._target += piece

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header field, or one that follows a chunked body and is left out."""
        self._head_bytes += len(name) + len(value) + _FIELD_OVERHEAD
        if self._head_bytes + len(self._target) > MOST_HEAD_BYTES:
            raise _too_large()
        if self.in_head:
            self._fields.append((name, value))

    def on_headers_complete(self) -> None:
        """The end of the head, whose framing httptools has checked, but for the coding of the body."""
        self.in_head = False
        self._bare_bytes = 0
        if len(self._target) > MOST_HEAD_BYTES:
            raise _too_large()
        parser = self._parser
        method = parser.get_method()
        if parser.should_upgrade() and method != b"CONNECT":
            self._asks_for_another_protocol = True
            return
        version = parser.get_http_version()
        if version not in _VERSIONS:
            raise MessageError(505, "this is not HTTP/1.0 or HTTP/1.1")
        self._sink.head_ends(
            Head(
                method.decode(),
                self._target,
                self._fields,
                version,
                parser.should_keep_alive() and method != b"CONNECT",
            )
        )

    def on_body(self, piece: bytes) -> None:
        """Some of the body."""
        self._bare_bytes = 0
        self._sink.body_piece(piece)

    def on_message_complete(self) -> None:
        """The end of a request, or of the head of one that asks for another protocol."""
        self._bare_bytes = 0
        if not self._asks_for_another_protocol:
            self._sink.request_ends()


def _too_large() -> MessageError:
    return MessageError(431, f"a head is larger than {MOST_HEAD_BYTES} bytes")
