"""Which HTTP headers pass through the proxy, and the one request id of both legs."""

import random
import re
from collections.abc import Iterable, Mapping

from multidict import CIMultiDict

REQUEST_ID = "X-Request-Id"
DATA_PARALLEL_RANK = "X-data-parallel-rank"
SESSION_ID = "X-Session-ID"

# RFC 9110, section 7.6.1: these belong to one connection. Whatever `Connection` names is added per message.
_HOP_BY_HOP = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
# The body is re-encoded, so its length and coding are ours to say; `Expect` was answered by our server.
_REPLACED_ON_REQUESTS = frozenset({"host", "content-length", "content-encoding", "expect"})

_DROPPED_FROM_REQUESTS = _HOP_BY_HOP | _REPLACED_ON_REQUESTS

_REQUEST_ID_MAX_CHARS = 256
_SURROGATE = re.compile("[\ud800-\udfff]")


def request_headers(client: Mapping[str, str], request_id: str) -> CIMultiDict[str]:
    """What an engine gets: every end-to-end header of the client (repeated ones too), and the request id."""
    headers = _end_to_end(client, _DROPPED_FROM_REQUESTS)
    headers[REQUEST_ID] = request_id
    return headers


def for_rank(headers: CIMultiDict[str], rank: int | None) -> CIMultiDict[str]:
    """The headers for one data-parallel rank of an engine; the same ones, a client's own choice included, for None."""
    if rank is None:
        return headers
    ranked = headers.copy()
    ranked[DATA_PARALLEL_RANK] = str(rank)
    return ranked


def without_compression(headers: CIMultiDict[str]) -> CIMultiDict[str]:
    """The same headers for a leg whose answer the proxy itself reads: it must come uncompressed."""
    plain = headers.copy()
    plain["Accept-Encoding"] = "identity"
    return plain


def response_headers(engine: Mapping[str, str]) -> CIMultiDict[str]:
    """What the client gets from an engine's answer: every end-to-end header."""
    return _end_to_end(engine, _HOP_BY_HOP)


def without_address(headers: CIMultiDict[str], url: str) -> CIMultiDict[str]:
    """An answer's headers with a ``Location`` below an engine's base address made relative to the proxy's own."""
    location = headers.get("Location", "")
    if location.startswith((url + "/", url + "?")):
        headers = headers.copy()
        headers["Location"] = location.removeprefix(url)
    return headers


def request_id_for(header: str | None, body_id: str) -> str:
    """The id of a request on both legs: the client's header, else the id in its body, else a new one.

    vLLM prefers the header, and we always send one, so an id in the body has to move into the header. One that is
    no plain word would break the header and is replaced.
    """
    for candidate in (header, body_id):
        if candidate and candidate.isascii() and candidate.isprintable() and len(candidate) <= _REQUEST_ID_MAX_CHARS:
            return candidate
    return f"{random.getrandbits(128):032x}"


def _end_to_end(headers: Mapping[str, str], unwanted: frozenset[str]) -> CIMultiDict[str]:
    if "Connection" in headers:
        unwanted |= _connection_names(value for name, value in headers.items() if name.lower() == "connection")
    # A value that did not come as UTF-8 has lone surrogates, which cannot be written out again.
    return CIMultiDict(
        [
            (name, value)
            for name, value in headers.items()
            if name.lower() not in unwanted and (value.isascii() or not _SURROGATE.search(value))
        ]
    )


def _connection_names(values: Iterable[str]) -> frozenset[str]:
    return frozenset(name.strip().lower() for value in values for name in value.split(","))
