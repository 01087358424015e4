"""Which headers pass, and where the request id comes from."""

import pytest
from multidict import CIMultiDict

from proxy.headers import (
    for_rank,
    request_headers,
    request_id_for,
    response_headers,
    without_address,
    without_compression,
)


def test_end_to_end_headers_pass_in_order_and_repeated():
    sent = [("B", "1"), ("A", "2"), ("b", "3"), ("Authorization", "key"), ("traceparent", "00")]
    assert list(request_headers(CIMultiDict(sent), "id").items()) == [*sent, ("X-Request-Id", "id")]


@pytest.mark.parametrize(
    "name", ["Connection", "keep-alive", "TE", "Trailer", "Transfer-Encoding", "Upgrade", "Proxy-Authorization"]
)
def test_hop_by_hop_headers_stay_here(name):
    assert name not in request_headers(CIMultiDict({name: "x"}), "id")
    assert name not in response_headers(CIMultiDict({name: "x"}))


@pytest.mark.parametrize("name", ["Host", "Content-Length", "Content-Encoding", "Expect"])
def test_what_describes_the_original_message_is_not_forwarded(name):
    assert name not in request_headers(CIMultiDict({name: "x"}), "id")


def test_answers_keep_their_length_and_coding():
    headers = CIMultiDict({"Content-Length": "3", "Content-Encoding": "gzip"})
    assert response_headers(headers) == headers


def test_what_connection_names_is_dropped():
    headers = CIMultiDict({"Connection": "close, X-One", "X-One": "1", "X-Two": "2"})
    headers.add("connection", "x-two")
    assert list(response_headers(headers)) == []


def test_a_value_that_is_no_text_is_dropped():
    broken = b"\xe9".decode("utf-8", "surrogateescape")
    headers = request_headers(CIMultiDict({"X-Broken": broken, "X-Fine": "é"}), "id")
    assert "X-Broken" not in headers
    assert headers["X-Fine"] == "é"


def test_the_request_id_replaces_the_client_s():
    headers = CIMultiDict([("x-request-id", "a"), ("X-Request-ID", "b")])
    assert request_headers(headers, "c").getall("X-Request-Id") == ["c"]


def test_compression_is_switched_off_without_touching_the_original():
    headers = CIMultiDict({"Accept-Encoding": "gzip"})
    assert without_compression(headers).getall("accept-encoding") == ["identity"]
    assert headers["Accept-Encoding"] == "gzip"


@pytest.mark.parametrize(
    ("header", "body_id", "expected"),
    [("h", "b", "h"), (None, "b", "b"), ("", "b", "b"), ("bad\n", "b", "b"), ("é", "b", "b"), ("x" * 257, "b", "b")],
)
def test_the_request_id(header, body_id, expected):
    assert request_id_for(header, body_id) == expected


def test_new_ids_differ():
    assert request_id_for(None, "") != request_id_for(None, "two words\n")


def test_a_rank_replaces_the_client_s_choice_on_one_leg_only():
    headers = CIMultiDict({"x-data-parallel-rank": "7", "A": "1"})
    assert for_rank(headers, None) is headers
    assert list(for_rank(headers, 0).items()) == [("X-data-parallel-rank", "0"), ("A", "1")]
    assert headers["X-data-parallel-rank"] == "7"


@pytest.mark.parametrize(
    ("location", "told"),
    [
        ("http://e:80/v1/x?a=b", "/v1/x?a=b"),
        ("http://e:80?a", "?a"),
        ("http://e:8000/x", "http://e:8000/x"),
        ("https://elsewhere/x", "https://elsewhere/x"),
        ("/x", "/x"),
    ],
)
def test_a_redirect_does_not_name_its_engine(location, told):
    given = CIMultiDict({"location": location, "X-A": "b"})
    assert without_address(given, "http://e:80") == CIMultiDict({"Location": told, "X-A": "b"})
    assert without_address(CIMultiDict(), "http://e:80") == CIMultiDict()
