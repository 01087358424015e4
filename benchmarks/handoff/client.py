"""What a client of two engines does and sees, in seconds on its own clock."""

import contextlib
import http.client
import itertools
import json
import socket
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import NamedTuple, Self
from urllib.parse import urlsplit

import msgspec

from proxy.relay import decode_body, read_prefill_reply
from tests.stack.engines import completion_body
from tests.stack.exactness import HAND_OFF_REQUEST

PATH = "/v1/completions"
TIMEOUT_SECONDS = 150.0
_EVENT = b"data: {"


class RequestError(Exception):
    """An engine's answer is not the one that was asked for."""


def connect(url: str) -> http.client.HTTPConnection:
    """A connection of its own for one request, made beforehand: a proxy keeps its connections open."""
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=TIMEOUT_SECONDS)
    connection.connect()
    return connection


def encode(prompt: Sequence[int], **fields: object) -> bytes:
    """A greedy completion request."""
    return json.dumps(completion_body(prompt, **fields)).encode()


class HandOff(NamedTuple):
    """One prompt on its way through both engines."""

    seconds: float
    """From the end of prefill's answer to decode's first token."""
    prefill_seconds: float


def hand_off(prefill_url: str, decode_url: str, prompt: Sequence[int], name: str) -> HandOff:
    """Prefill on one engine, decode on the other. ``name`` becomes part of both engines' ids of the request.

    Raises RequestError or OSError.
    """
    asked = encode(prompt, max_tokens=1, kv_transfer_params=HAND_OFF_REQUEST)
    # What decode is asked but for the params is ready, as it is in a proxy.
    wanted = msgspec.json.decode(_decode_request(prompt), type=dict[str, msgspec.Raw])
    prefill, decode = connect(prefill_url), connect(decode_url)
    try:
        begin = time.perf_counter()
        reply = _post(prefill, asked, name).read()
        answered = time.perf_counter()
        params = read_prefill_reply(reply).params
        if params is None:
            raise RequestError(f"{name}: prefill answered without a hand-off: {reply[:500]!r}")
        first = _first_token(decode, decode_body(wanted, params), name)
        return HandOff(first - answered, answered - begin)
    finally:
        prefill.close()
        decode.close()


def local(decode_url: str, prompt: Sequence[int], name: str) -> float:
    """Seconds to the first token of the same request without params: decode has all but the last token in its cache.

    Raises RequestError or OSError.
    """
    connection, body = connect(decode_url), _decode_request(prompt)
    try:
        begin = time.perf_counter()
        return _first_token(connection, body, name) - begin
    finally:
        connection.close()


def _decode_request(prompt: Sequence[int]) -> bytes:
    return encode(prompt, max_tokens=2, stream=True, ignore_eos=True)


def _post(connection: http.client.HTTPConnection, body: bytes, name: str) -> http.client.HTTPResponse:
    connection.request("POST", PATH, body, {"Content-Type": "application/json", "X-Request-Id": name})
    response = connection.getresponse()
    if response.status != 200:
        raise RequestError(f"{name}: HTTP {response.status}: {response.read()[:500]!r}")
    return response


def _first_token(connection: http.client.HTTPConnection, body: bytes, name: str) -> float:
    """When the first token came. The rest of the stream is read, too."""
    response, first = _post(connection, body, name), None
    for line in response:
        if first is None and line.startswith(_EVENT) and b'"text"' in line:
            first = time.perf_counter()
        elif line.startswith(_EVENT) and b'"error"' in line:
            raise RequestError(f"{name}: {line[:500]!r}")
    if first is None:
        raise RequestError(f"{name}: a stream without a token")
    return first


class LongStream:
    """An answer that goes on while something else is measured; ``arrivals`` are the times of its tokens."""

    def __init__(self, url: str, prompt: Sequence[int], name: str, num_tokens: int) -> None:
        self.arrivals: list[float] = []
        self._connection = connect(url)
        self._socket = self._connection.sock
        body = encode(prompt, max_tokens=num_tokens, stream=True, ignore_eos=True)
        self._response = _post(self._connection, body, name)
        self._thread = threading.Thread(target=self._read, name=name, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            for line in self._response:
                if line.startswith(_EVENT):
                    self.arrivals.append(time.perf_counter())
        except (OSError, ValueError, http.client.HTTPException):
            # The stream was closed while it was read.
            return

    @property
    def has_ended(self) -> bool:
        """Whether its last token is here."""
        return not self._thread.is_alive()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(10)
        self._connection.close()


def gaps(arrivals: Sequence[float], begin: float, end: float) -> list[float]:
    """Times between tokens, of those that end within a while."""
    return [late - early for early, late in itertools.pairwise(arrivals) if begin < late <= end]
