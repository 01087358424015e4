"""The server's end of HTTP over plain sockets: odd and broken requests, slow and absent clients, and bounds."""

import asyncio
import gzip
import itertools
import logging
import re
import socket
import time
import zlib

import aiohttp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from multidict import CIMultiDict

from proxy.http1.errors import MessageError
from proxy.http1.heads import MOST_HEAD_BYTES
from proxy.http1.listener import Listener
from proxy.http1.request import Response, path_of
from proxy.http1.server import MOST_WAITING, Patience, Service, target_of
from tests.proxy.fake_engines import asynchronous, until
from tests.proxy.http1.ends import HASTY, connected, echo, exchanged, refuse, serving, without_date

GET = b"GET /a HTTP/1.1\r\nHost: x\r\n"
CLOSE = b"Connection: close\r\n\r\n"
POST = b"POST /a HTTP/1.1\r\nHost: x\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n"


def statuses(answer):
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", answer)]


REFUSED = {
    "nonsense": (b"nonsense\r\n\r\n", 400),
    "zeros": (b"\0" * 100, 400),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    "another version": (b"GET / HTTP/3.0\r\nHost: x\r\n\r\n", 400),
    "version 2.0": (b"GET / HTTP/2.0\r\nHost: x\r\n\r\n", 505),
    "no version": (b"GET /\r\n\r\n", 505),
    "a method of nobody": (b"BREW / HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "no Host": (b"GET / HTTP/1.1\r\n\r\n", 400),
    "two Hosts": (b"GET / HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n", 400),
    "a space in a target": (b"GET /a b HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "a target that is not ASCII": (b"GET /\xc3\xa9 HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "a space before a colon": (GET + b"X : y\r\n\r\n", 400),
    "a name with a space": (GET + b"X Y: y\r\n\r\n", 400),
    "a folded header": (GET + b"X: a\r\n b\r\n\r\n", 400),
    "a header without a colon": (GET + b"X\r\n\r\n", 400),
    "a zero in a header": (GET + b"X: \0\r\n\r\n", 400),
    "a bare line feed": (b"GET /a HTTP/1.1\nHost: x\n\n", 400),
    "a bare carriage return": (GET + b"X: a\rY: b\r\n\r\n", 400),
    "two lengths": (POST + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabc", 400),
    "a length twice": (POST + b"Content-Length: 3\r\nContent-Length: 3\r\n\r\nabc", 400),
    "a negative length": (POST + b"Content-Length: -1\r\n\r\n", 400),
    "a length that is no number": (POST + b"Content-Length: 0x3\r\n\r\nabc", 400),
    "a length without bounds": (POST + b"Content-Length: " + b"9" * 40 + b"\r\n\r\n", 400),
    "a list of lengths": (POST + b"Content-Length: 3, 3\r\n\r\nabc", 400),
    "length and chunks": (POST + CHUNKED + b"Content-Length: 3\r\n\r\n3\r\nabc\r\n0\r\n\r\n", 400),
    "chunks and length": (POST + b"Content-Length: 3\r\n" + CHUNKED + b"\r\n3\r\nabc\r\n0\r\n\r\n", 400),
    "a coding that is not chunked": (POST + b"Transfer-Encoding: gzip\r\n\r\nabc", 501),
    "chunked is not the last coding": (POST + b"Transfer-Encoding: chunked, gzip\r\n\r\nabc", 400),
    "two codings": (POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n1\r\na\r\n0\r\n\r\n", 501),
    "two codings in two lines": (POST + b"Transfer-Encoding: gzip\r\n" + CHUNKED + b"\r\n1\r\na\r\n0\r\n\r\n", 501),
    "chunks of HTTP/1.0": (b"POST / HTTP/1.0\r\nConnection: keep-alive\r\n" + CHUNKED + b"\r\n0\r\n\r\n", 400),
    "another protocol and no Host": (b"GET / HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n", 400),
    "another protocol and an expectation": (GET + b"Connection: Upgrade\r\nUpgrade: h2c\r\nExpect: more\r\n\r\n", 417),
    "a chunk size that is no number": (POST + CHUNKED + b"\r\nxyz\r\nabc\r\n", 400),
    "a chunk size without bounds": (POST + CHUNKED + b"\r\n" + b"f" * 17 + b"\r\nabc", 400),
    "a chunk without its end": (POST + CHUNKED + b"\r\n3\r\nabcd\r\n0\r\n\r\n", 400),
    "an unknown expectation": (POST + b"Expect: a miracle\r\nContent-Length: 1\r\n\r\n", 417),
    "a long target": (b"GET /" + b"a" * MOST_HEAD_BYTES + b" HTTP/1.1\r\nHost: x\r\n\r\n", 431),
    "a long header": (GET + b"X: " + b"a" * MOST_HEAD_BYTES + b"\r\n\r\n", 431),
    "a header without an end": (GET + b"X: " + b"a" * 5 * MOST_HEAD_BYTES, 431),
    "a name without an end": (GET + b"a" * 5 * MOST_HEAD_BYTES, 431),
    "many headers": (GET + b"X: a\r\n" * 20_000 + b"\r\n", 431),
    "a size of a chunk without an end": (POST + CHUNKED + b"\r\n1;" + b"a" * 5 * MOST_HEAD_BYTES, 431),
    "trailers without an end": (POST + CHUNKED + b"\r\n0\r\n" + b"X: a\r\n" * 60_000, 431),
}


@asynchronous
@pytest.mark.parametrize(("sent", "status"), REFUSED.values(), ids=REFUSED)
async def test_what_is_no_request_is_refused_and_the_connection_closed(sent, status, caplog):
    async with serving() as port:
        answer = await exchanged(port, sent)
        assert statuses(answer) == [status]
        assert b"Connection: close" in answer
        # The server is as it was.
        assert statuses(await exchanged(port, GET + CLOSE)) == [200]
    assert not caplog.records


TAKEN = {
    "plain": (GET + CLOSE, b"GET /a /a \n"),
    "a header that is no ASCII": (GET + b"X: \xc3\xa9\r\n" + CLOSE, "GET /a /a é\n".encode()),
    "an empty header": (GET + b"X:\r\n" + CLOSE, b"GET /a /a \n"),
    "white space around a value": (GET + b"X: \t y \t\r\n" + CLOSE, b"GET /a /a y\n"),
    "an encoded path": (b"GET /%61%2Fb?c=%64 HTTP/1.1\r\nHost: x\r\n" + CLOSE, b"GET /%61%2Fb?c=%64 /a/b \n"),
    "an absolute target": (b"GET http://y:1/a?b HTTP/1.1\r\nHost: x\r\n" + CLOSE, b"GET /a?b /a \n"),
    "an empty line before": (b"\r\n" + GET + CLOSE, b"GET /a /a \n"),
    "a body": (POST + b"Content-Length: 3\r\n" + CLOSE + b"abc", b"POST /a /a \nabc"),
    "a body of GET": (GET + b"Content-Length: 3\r\n" + CLOSE + b"abc", b"GET /a /a \nabc"),
    "no length": (POST + CLOSE, b"POST /a /a \n"),
    "no bytes": (POST + b"Content-Length: 0\r\n" + CLOSE, b"POST /a /a \n"),
    "chunks": (POST + CHUNKED + CLOSE + b"1\r\na\r\n2;x=y\r\nbc\r\n0\r\nX: z\r\n\r\n", b"POST /a /a \nabc"),
    "no chunk": (POST + CHUNKED + CLOSE + b"0\r\n\r\n", b"POST /a /a \n"),
    "another protocol": (
        POST + b"Connection: Upgrade, close\r\nUpgrade: h2c\r\nContent-Length: 3\r\n\r\nabc",
        b"POST /a /a \nabc",
    ),
    "another protocol, chunks": (
        POST + b"Connection: close, Upgrade\r\nUpgrade: h2c\r\n" + CHUNKED + b"\r\n3\r\nabc\r\n0\r\n\r\n",
        b"POST /a /a \nabc",
    ),
    "HTTP/1.0": (b"GET /a HTTP/1.0\r\n\r\n", b"GET /a /a \n"),
    "another protocol, HTTP/1.0": (
        b"GET /a HTTP/1.0\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n",
        b"GET /a /a \n",
    ),
    "every resource": (b"OPTIONS * HTTP/1.1\r\nHost: x\r\n" + CLOSE, b"OPTIONS * * \n"),
    "a tunnel": (b"CONNECT y:1 HTTP/1.1\r\nHost: x\r\n\r\n\x16\x03", b"CONNECT y:1 y:1 \n"),
    "gzip": (
        POST + b"Content-Encoding: gzip\r\nContent-Length: 23\r\n" + CLOSE + gzip.compress(b"abc", mtime=0),
        b"POST /a /a \nabc",
    ),
}


@asynchronous
@pytest.mark.parametrize(("sent", "told"), TAKEN.values(), ids=TAKEN)
async def test_odd_requests_are_requests(sent, told):
    async with serving() as port:
        answer = await exchanged(port, sent)
        head, _, body = answer.partition(b"\r\n\r\n")
        assert statuses(head) == [200]
        assert body == told
        assert f"Content-Length: {len(told)}".encode() in head.split(b"\r\n")
        assert b"Connection: close" in head
        assert b"\r\nDate: " in head


PIPELINE = b"".join(
    [
        POST + b"X: 1\r\nContent-Length: 3\r\n\r\nabc",
        POST + b"X: 2\r\n" + CHUNKED + b"\r\n2\r\nde\r\n1\r\nf\r\n0\r\nT: t\r\n\r\n",
        GET + b"X: 3\r\n\r\n",
        POST + b"Connection: Upgrade\r\nUpgrade: h2c\r\nX: 4\r\nContent-Length: 2\r\n\r\ngh",
        POST + b"X: 5\r\nContent-Length: 2\r\n" + CLOSE + b"ij",
    ]
)
ODDITIES = [PIPELINE, *(sent for sent, _ in TAKEN.values()), *(sent for sent, _ in REFUSED.values() if len(sent) < 999)]


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(ODDITIES), st.lists(st.integers(0, 400), max_size=8))
def test_any_split_of_the_bytes_gives_the_same_answers(sent, cuts):
    @asynchronous
    async def compare():
        edges = [0, *sorted(cut % (len(sent) + 1) for cut in cuts), len(sent)]
        pieces = [sent[begin:end] for begin, end in itertools.pairwise(edges) if begin < end]
        async with serving() as port:
            whole = without_date(await exchanged(port, sent))
            assert without_date(await exchanged(port, *pieces, pause_seconds=0.001)) == whole

    compare()


@asynchronous
async def test_requests_sent_at_once_are_answered_in_order():
    turns = []

    async def slow(request):
        # The later one came, the less it takes.
        await asyncio.sleep(0.05 / int(request.headers["X"]))
        turns.append(request.headers["X"])
        return await echo(request)

    async with serving(slow) as port:
        answer = await exchanged(port, PIPELINE)
    assert statuses(answer) == [200] * 5
    assert turns == ["1", "2", "3", "4", "5"]
    bodies = (b"1\nabc", b"2\ndef", b"3\n", b"4\ngh", b"5\nij")
    assert [answer.index(body) for body in bodies] == sorted(answer.index(body) for body in bodies)


@asynchronous
async def test_what_follows_good_requests_is_refused_after_their_answers():
    async with serving() as port:
        assert statuses(await exchanged(port, GET + b"\r\n" + GET + b"\r\n" + b"nonsense\r\n\r\n")) == [200, 200, 400]


@asynchronous
async def test_what_follows_a_last_request_is_ignored():
    async with serving() as port:
        assert statuses(await exchanged(port, GET + CLOSE + b"nonsense\r\n\r\n")) == [200]


@asynchronous
async def test_many_requests_at_once_are_not_read_before_their_turn():
    begun = asyncio.Event()
    more = asyncio.Event()

    async def waiting(request):
        begun.set()
        await more.wait()
        return await echo(request)

    count = 200_000
    async with serving(waiting) as port, connected(port) as (reader, writer):
        writer.write((GET + b"\r\n") * count)
        await begun.wait()
        await asyncio.sleep(0.2)
        # The kernel's buffers and one read are full, and the rest is still here.
        assert writer.transport.get_write_buffer_size() > 1 << 20
        more.set()
        async with asyncio.timeout(15):
            for _ in range(10 * MOST_WAITING):
                assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
                await reader.readuntil(b"\n")


@asynchronous
async def test_many_bodies_at_once_are_not_read_before_their_turn():
    begun = asyncio.Event()

    async def waiting(_request):
        begun.set()
        await asyncio.Event().wait()

    request = POST + b"Content-Length: 70000\r\n\r\n" + b"x" * 70_000
    async with serving(waiting) as port, connected(port) as (_, writer):
        for _ in range(400):
            writer.write(request)
            await asyncio.sleep(0)
        await begun.wait()
        await asyncio.sleep(0.2)
        assert writer.transport.get_write_buffer_size() > 10 << 20


@asynchronous
async def test_many_requests_that_ask_for_another_protocol_are_answered():
    count = 1000
    asking = GET + b"Connection: Upgrade\r\nUpgrade: h2c\r\n\r\n"
    async with serving() as port:
        assert statuses(await exchanged(port, asking * count + GET + CLOSE)) == [200] * (count + 1)


@asynchronous
async def test_a_body_that_nobody_reads_holds_its_sender_back():
    async def waiting(request):
        await asyncio.sleep(0.3)
        return Response(200, CIMultiDict(), b"enough")

    async with serving(waiting) as port, connected(port) as (reader, writer):
        writer.write(POST + b"Content-Length: 50000000\r\n\r\n" + b"x" * 20_000_000)
        await asyncio.sleep(0.2)
        assert writer.transport.get_write_buffer_size() > 10_000_000
        # Answered, the rest is read and thrown away, and the connection stays in order.
        assert (await reader.readuntil(b"enough")).startswith(b"HTTP/1.1 200 ")
        writer.write(b"x" * 30_000_000)
        await writer.drain()
        writer.write(GET + CLOSE)
        assert (await reader.read()).endswith(b"\r\n\r\nenough")


@asynchronous
async def test_a_client_that_reads_nothing_holds_the_answer_back_and_is_given_up():
    sent = 0
    ended = asyncio.Event()

    async def flood(request):
        nonlocal sent
        request.begin(200, CIMultiDict())
        try:
            while True:
                await request.write(b"x" * 65536)
                sent += 65536
        finally:
            ended.set()

    async with serving(flood, HASTY) as port, connected(port) as (reader, writer):
        reader._transport.pause_reading()
        writer.write(GET + b"\r\n")
        await asyncio.sleep(0.15)
        assert 0 < sent < 16 << 20
        so_far = sent
        await asyncio.sleep(0.05)
        assert sent == so_far
        await asyncio.wait_for(ended.wait(), 3)


def with_small_buffers(request):
    """What the server sends waits in it, not in the kernel."""
    request._outgoing.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)


@asynchronous
async def test_a_client_that_reads_slowly_but_steadily_is_not_given_up():
    size = 4 << 20

    async def large(request):
        with_small_buffers(request)
        return Response(200, CIMultiDict(), b"x" * size)

    async with serving(large, HASTY) as port, connected(port) as (reader, writer):
        writer.write(GET + CLOSE)
        await reader.readuntil(b"\r\n\r\n")
        begun, num_read = time.monotonic(), 0
        while piece := await reader.read(1 << 16):
            num_read += len(piece)
            await asyncio.sleep(0.02)
    assert num_read == size
    assert time.monotonic() - begun > 3 * HASTY.stall_seconds


@asynchronous
@pytest.mark.parametrize("stall_seconds", [0.2, 60.0])
async def test_a_last_answer_may_be_taken_as_slowly_as_any_other(stall_seconds):
    async def small(request):
        with_small_buffers(request)
        return Response(200, CIMultiDict(), b"x" * 60_000)

    patience = Patience(stall_seconds=stall_seconds, linger_seconds=0.2)
    async with serving(small, patience) as port, connected(port, 4096) as (reader, writer):
        reader._transport.pause_reading()
        writer.write(GET + CLOSE)
        await asyncio.sleep(0.6)
        reader._transport.resume_reading()
        num_read = len(await reader.read())
    assert (num_read > 60_000) is (stall_seconds > 0.6)


@asynchronous
async def test_a_server_that_ends_waits_until_its_answers_are_taken():
    async def small(request):
        with_small_buffers(request)
        return Response(200, CIMultiDict(), b"x" * 60_000)

    listener = Listener(Service(small, refuse))
    await listener.start("127.0.0.1", 0)
    async with connected(listener.address[1], 4096) as (reader, writer):
        reader._transport.pause_reading()
        writer.write(GET + b"\r\n")
        await asyncio.sleep(0.1)
        listener.stop()
        idle = asyncio.create_task(listener.idle())
        await asyncio.sleep(0.1)
        assert not idle.done()
        reader._transport.resume_reading()
        await asyncio.wait_for(idle, 5)
        await listener.close(0)
        assert len(await reader.read()) > 60_000


@asynchronous
@pytest.mark.parametrize("sent", [b"", b"GET /a HT", GET + b"X: "], ids=["nothing", "a line", "a header"])
async def test_a_client_that_does_not_go_on_is_given_up(sent):
    async with serving(patience=HASTY) as port:
        assert statuses(await exchanged(port, sent)) == ([408] if sent else [])


@asynchronous
async def test_a_client_that_drips_its_head_is_given_up():
    async with serving(patience=HASTY) as port:
        answer = await exchanged(port, *[b"G", b"E", b"T", b" ", b"/", b"a", b"b"] * 9, pause_seconds=0.03)
        assert statuses(answer) == [408]


@asynchronous
async def test_a_connection_without_a_next_request_is_closed():
    async with serving(patience=HASTY) as port:
        assert statuses(await exchanged(port, GET + b"\r\n")) == [200]


class Endless:
    """Serves a request until its client has left."""

    def __init__(self):
        self.begun, self.ended = asyncio.Event(), asyncio.Event()

    async def __call__(self, _request):
        self.begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.ended.set()


POINTS = {
    "before the body": POST + b"Content-Length: 3\r\n\r\n",
    "in the body": POST + b"Content-Length: 3\r\n\r\na",
    "after the body": POST + b"Content-Length: 3\r\n\r\nabc",
    "in a chunk": POST + CHUNKED + b"\r\n5\r\nab",
    "with the next request sent": GET + b"\r\n" + GET + b"\r\n",
    "with half a request sent": GET + b"\r\n" + b"GET /",
    "with nonsense sent": GET + b"\r\n" + b"nonsense\r\n\r\n",
}


@asynchronous
@pytest.mark.parametrize("leave", ["close", "abort", "half"])
@pytest.mark.parametrize("sent", POINTS.values(), ids=POINTS)
async def test_a_client_that_leaves_ends_what_it_asked_for_at_once(sent, leave, caplog):
    endless = Endless()
    async with serving(endless) as port, connected(port) as (_, writer):
        writer.write(sent)
        await endless.begun.wait()
        {"close": writer.close, "abort": writer.transport.abort, "half": writer.write_eof}[leave]()
        await asyncio.wait_for(endless.ended.wait(), 1)
    assert not caplog.records


@asynchronous
@pytest.mark.parametrize("leave", ["close", "abort"])
async def test_a_client_that_leaves_is_noticed_behind_a_body_that_nobody_reads(leave):
    endless = Endless()
    async with serving(endless) as port, connected(port) as (_, writer):
        writer.write(POST + b"Content-Length: 100000\r\n\r\n" + b"x" * 70_000)
        await endless.begun.wait()
        await asyncio.sleep(0.1)
        # By now reading is held back.
        writer.write(b"x" * 30_000)
        await asyncio.sleep(0.1)
        {"close": writer.close, "abort": writer.transport.abort}[leave]()
        await asyncio.wait_for(endless.ended.wait(), 3)


@asynchronous
async def test_a_client_that_leaves_in_the_middle_of_a_long_answer_is_noticed():
    ended = asyncio.Event()

    async def flood(request):
        request.begin(200, CIMultiDict())
        try:
            while True:
                await request.write(b"x" * 65536)
        finally:
            ended.set()

    async with serving(flood) as port, connected(port) as (reader, writer):
        writer.write(GET + b"\r\n")
        await reader.readexactly(1 << 20)
        writer.transport.abort()
        await asyncio.wait_for(ended.wait(), 1)


@asynchronous
async def test_a_client_is_told_to_send_its_body_when_somebody_wants_it():
    async with serving() as port, connected(port) as (reader, writer):
        writer.write(POST + b"Expect: 100-continue\r\nContent-Length: 3\r\n" + CLOSE)
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"abc")
        assert (await reader.read()).endswith(b"\nabc")


@asynchronous
async def test_a_client_is_not_told_to_send_what_nobody_wants():
    async with serving() as port:
        head = POST + b"Expect: 100-continue\r\nContent-Length: 99000000\r\n\r\n"
        answer = await exchanged(port, head)
        assert statuses(answer) == [413]
        assert b"Connection: close" in answer


@asynchronous
@pytest.mark.parametrize("framing", ["length", "chunks"])
async def test_a_body_that_is_too_large_is_refused(framing):
    data = b"x" * ((1 << 20) + 1)
    if framing == "length":
        sent = POST + f"Content-Length: {len(data)}\r\n".encode() + CLOSE + data
    else:
        sent = POST + CHUNKED + CLOSE + b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data)
    async with serving() as port:
        assert statuses(await exchanged(port, sent)) == [413]


def chunked(data):
    return b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data)


CODED = {
    "gzip": ("gzip", gzip.compress(b"abc"), 200, b"abc"),
    "x-gzip": ("x-gzip", gzip.compress(b"abc"), 200, b"abc"),
    "two members": ("gzip", gzip.compress(b"ab") + gzip.compress(b"c"), 200, b"abc"),
    "deflate": ("deflate", zlib.compress(b"abc"), 200, b"abc"),
    "bare deflate": ("deflate", zlib.compress(b"abc")[2:-4], 200, b"abc"),
    "none": ("identity", b"abc", 200, b"abc"),
    "much": ("gzip", gzip.compress(b"a" * (1 << 20)), 200, b"a" * (1 << 20)),
    "too much": ("gzip", gzip.compress(b"a" * (1 << 28)), 413, None),
    "unknown": ("br", b"abc", 415, None),
    "two codings": ("gzip, gzip", b"abc", 415, None),
    "not what it says": ("gzip", b"abc", 400, None),
    "cut off": ("gzip", gzip.compress(b"abc")[:-2], 400, None),
    "followed by something": ("gzip", gzip.compress(b"abc") + b"x", 400, None),
}


@asynchronous
@pytest.mark.parametrize(("coding", "data", "status", "body"), CODED.values(), ids=CODED)
async def test_codings_of_bodies(coding, data, status, body):
    head = POST + b"Content-Encoding: " + coding.encode() + b"\r\n" + CHUNKED + CLOSE
    async with serving() as port:
        for pieces in ([head + chunked(data)], [head, *(b"1\r\n%c\r\n" % byte for byte in data[:200])]):
            if len(pieces) > 1:
                if len(data) > 200:
                    continue
                pieces.append(b"0\r\n\r\n")
            answer = await exchanged(port, *pieces)
            assert statuses(answer) == [status]
            assert body is None or answer.partition(b"\r\n\r\n")[2] == b"POST /a /a \n" + body


async def streamed(request):
    request.begin(200, CIMultiDict())
    for piece in (b"a", b"", b"bc"):
        await request.write(piece)
    return Response(200, CIMultiDict())


STREAMS = {
    "1.1": (GET + CLOSE, b"Transfer-Encoding: chunked", b"1\r\na\r\n2\r\nbc\r\n0\r\n\r\n"),
    "1.0": (b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n", b"Connection: close", b"abc"),
    "HEAD": (b"HEAD / HTTP/1.1\r\nHost: x\r\n" + CLOSE, b"Connection: close", b""),
}


@asynchronous
@pytest.mark.parametrize(("sent", "line", "body"), STREAMS.values(), ids=STREAMS)
async def test_an_answer_of_no_known_length(sent, line, body):
    async with serving(streamed) as port:
        head, _, rest = (await exchanged(port, sent)).partition(b"\r\n\r\n")
        assert line in head.split(b"\r\n")
        assert rest == body


@asynchronous
async def test_an_old_client_that_asks_for_it_keeps_its_connection():
    async with serving(patience=HASTY) as port:
        answer = await exchanged(port, b"GET /a HTTP/1.0\r\nConnection: keep-alive\r\n\r\n" * 2)
        assert statuses(answer) == [200, 200]
        assert answer.count(b"Connection: keep-alive") == 2


@asynchronous
async def test_the_answer_to_head_has_the_length_and_no_body():
    async with serving() as port:
        answer = await exchanged(port, b"HEAD /a HTTP/1.1\r\nHost: x\r\n\r\n" + GET + CLOSE)
        first, second, last = answer.split(b"\r\n\r\n")
        assert b"Content-Length: 12" in first
        assert second.startswith(b"HTTP/1.1 200 ")
        assert last == b"GET /a /a \n"


@asynchronous
@pytest.mark.parametrize("status", [204, 304])
async def test_an_answer_that_has_no_body_gets_no_length(status):
    async def nothing(_request):
        return Response(status, CIMultiDict(), b"")

    async with serving(nothing) as port:
        answer = await exchanged(port, GET + CLOSE)
        assert statuses(answer) == [status]
        assert b"Content-Length" not in answer
        assert b"Transfer-Encoding" not in answer


@asynchronous
@pytest.mark.parametrize("body", [b"ab", b"abcd"], ids=["short", "long"])
async def test_an_answer_of_another_length_than_announced_is_cut_off(body):
    async def wrong(request):
        request.begin(200, CIMultiDict({"Content-Length": "3"}))
        await request.write(body)
        return Response(200, CIMultiDict())

    async with serving(wrong) as port:
        answer = await exchanged(port, GET + b"\r\n")
        assert answer == b"reset" or len(answer.partition(b"\r\n\r\n")[2]) < 3


@asynchronous
@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
@pytest.mark.parametrize("end", ["abort", "another answer"])
async def test_nobody_can_take_a_part_of_an_answer_for_the_whole(version, end):
    async def half(request):
        request.begin(200, CIMultiDict())
        await request.write(b"half")
        await asyncio.sleep(0.05)
        if end == "abort":
            request.abort()
        return Response(500, CIMultiDict(), None if end == "abort" else b"an error")

    async with serving(half) as port:
        assert await exchanged(port, b"GET / HTTP/" + version + b"\r\nHost: x\r\n\r\n") == b"reset"


@asynchronous
async def test_a_bug_of_the_server_s_cuts_off_and_is_told(caplog):
    async def bug(_request):
        raise ZeroDivisionError

    async with serving(bug) as port:
        assert await exchanged(port, GET + b"\r\n") == b"reset"
    assert [record.levelno for record in caplog.records] == [logging.ERROR]


@asynchronous
async def test_a_header_with_a_line_end_is_never_sent(caplog):
    async def split(_request):
        return Response(200, CIMultiDict({"X": "a\r\nY: b"}), b"")

    async with serving(split) as port:
        assert await exchanged(port, GET + b"\r\n") == b"reset"
    assert "a bug in the proxy" in caplog.text


@asynchronous
async def test_a_body_that_breaks_is_told_to_its_reader():
    errors = []

    async def read(request):
        try:
            return await echo(request)
        except MessageError as error:
            errors.append(error.status)
            raise

    async with serving(read) as port:
        answer = await exchanged(port, POST + CHUNKED + b"\r\n1\r\na\r\n", b"nonsense\r\n", pause_seconds=0.05)
        assert statuses(answer) == [400]


@asynchronous
async def test_a_server_that_closes_lets_a_complete_answer_out_and_cuts_off_the_rest():
    begun = asyncio.Event()

    async def endless(request):
        request.begin(200, CIMultiDict())
        await request.write(b"begun")
        begun.set()
        await asyncio.Event().wait()

    async with serving(endless) as port:
        task = asyncio.create_task(exchanged(port, GET + b"\r\n"))
        await begun.wait()
    answer = await task
    assert b"0\r\n\r\n" not in answer


@asynchronous
async def test_aiohttp_s_client_understands_it():
    async with serving() as port, aiohttp.ClientSession(f"http://127.0.0.1:{port}") as client:

        async def pieces():
            for _ in range(20):
                yield b"x" * 1000
                await asyncio.sleep(0)

        for data, want in ((None, b""), (b"abc", b"abc"), (b"x" * 1_000_000, b"x" * 1_000_000)):
            async with client.post("/a?b=c", data=data) as response:
                assert response.status == 200
                assert (await response.read()).partition(b"\n")[2] == want
        async with client.post("/a", data=pieces(), expect100=True) as response:
            assert (await response.read()).partition(b"\n")[2] == b"x" * 20_000
        async with client.post("/a", data=b"abc" * 999, compress="gzip") as response:
            assert (await response.read()).partition(b"\n")[2] == b"abc" * 999
        async with client.head("/a") as response:
            assert response.headers["Content-Length"] == "12"
        async with client.options("/a") as response:
            assert response.status == 200
    async with serving(streamed) as port, aiohttp.ClientSession() as client:
        for _ in range(3):
            async with client.get(f"http://127.0.0.1:{port}/") as response:
                assert await response.read() == b"abc"


@asynchronous
async def test_nothing_stays_behind_a_connection():
    async with serving() as port:
        for _ in range(3):
            await exchanged(port, GET + CLOSE)
        await until(lambda: len(asyncio.all_tasks()) == 1)


@pytest.mark.parametrize(
    ("sent", "target"),
    [
        ("/a?b", "/a?b"),
        ("//a", "//a"),
        ("http://x/a?b", "/a?b"),
        ("http://x", "/"),
        ("http://x?b", "/?b"),
        ("/a#b", "/a"),
        ("*", "*"),
        ("/a?u=http://x/", "/a?u=http://x/"),
    ],
)
def test_targets(sent, target):
    assert target_of(sent) == target


@pytest.mark.parametrize(("target", "path"), [("/a?b", "/a"), ("/%61%2F?%62", "/a/"), ("/%zz", "/%zz")])
def test_paths(target, path):
    assert path_of(target) == path
