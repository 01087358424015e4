"""The client's end of HTTP: answers of all framings, connections that are kept, stale or lost, and bounds."""

import asyncio
import itertools
import socket
import ssl

import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st
from multidict import CIMultiDict

from proxy.http1.errors import ConnectError, StaleConnectionError
from proxy.http1.heads import MOST_HEAD_BYTES, request_head
from proxy.http1.origin import origin_of
from proxy.http1.pool import Pool, Wanted
from tests.proxy.fake_engines import asynchronous, num_sockets, until
from tests.proxy.http1.ends import next_head, plain_server

GET = Wanted("GET", "/a", CIMultiDict())
POST = Wanted("POST", "/a", CIMultiDict({"X": "y"}), b"abc")


def url_of(port):
    return f"http://127.0.0.1:{port}"


async def asked(pool, port, wanted=GET, seconds=2.0):
    response = await pool.request(url_of(port), wanted, seconds)
    try:
        return response.status, await response.read()
    finally:
        response.close()


def answering(*pieces, pause_seconds=0.0, closes=False):
    """A talk: the same answer to each request, in these pieces."""

    async def talk(reader, writer):
        while True:
            await next_head(reader)
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(pause_seconds)
            if closes:
                return

    return talk


OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"

ANSWERS = {
    "a length": (OK + b"Content-Length: 3\r\n\r\nabc", 200, b"abc", True),
    "no bytes": (OK + b"Content-Length: 0\r\n\r\n", 200, b"", True),
    "chunks": (CHUNKED + b"1\r\na\r\n2;x\r\nbc\r\n0\r\nT: x\r\n\r\n", 200, b"abc", True),
    "no reason": (b"HTTP/1.1 200\r\nContent-Length: 1\r\n\r\na", 200, b"a", True),
    "no content": (b"HTTP/1.1 204 No Content\r\n\r\n", 204, b"", True),
    "not modified": (b"HTTP/1.1 304 Not Modified\r\nContent-Length: 3\r\n\r\n", 304, b"", True),
    "told to close": (OK + b"Connection: close\r\nContent-Length: 1\r\n\r\na", 200, b"a", False),
    "HTTP/1.0": (b"HTTP/1.0 200 OK\r\nContent-Length: 1\r\n\r\na", 200, b"a", False),
    "HTTP/1.0, kept": (b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nContent-Length: 1\r\n\r\na", 200, b"a", True),
    "after a continue": (b"HTTP/1.1 100 Continue\r\n\r\n" + OK + b"Content-Length: 1\r\n\r\na", 200, b"a", True),
    "after hints": (
        b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" * 2 + OK + b"Content-Length: 1\r\n\r\na",
        200,
        b"a",
        True,
    ),
    "an error": (b"HTTP/1.1 500 Oh\r\nContent-Length: 1\r\n\r\na", 500, b"a", True),
}


@asynchronous
@pytest.mark.parametrize(("answer", "status", "body", "is_kept"), ANSWERS.values(), ids=ANSWERS)
async def test_answers(answer, status, body, is_kept):
    connections = 0
    talk = answering(answer)

    async def counting(reader, writer):
        nonlocal connections
        connections += 1
        await talk(reader, writer)

    async with plain_server(counting) as port, Pool() as pool:
        for _ in range(3):
            assert await asked(pool, port) == (status, body)
    assert connections == (1 if is_kept else 3)


@asynchronous
async def test_an_answer_that_ends_with_its_connection():
    for head in (OK, b"HTTP/1.0 200 OK\r\n", OK + b"Transfer-Encoding: gzip\r\n"):
        async with plain_server(answering(head + b"\r\n", b"abc", b"def", closes=True)) as port, Pool() as pool:
            for _ in range(2):
                assert await asked(pool, port) == (200, b"abcdef")


@asynchronous
@pytest.mark.parametrize("framing", [b"Content-Length: 3", b"Transfer-Encoding: chunked"])
async def test_an_answer_to_head_has_no_body(framing):
    talk = answering(OK + framing + b"\r\n\r\n")
    async with plain_server(talk) as port, Pool() as pool:
        for _ in range(3):
            assert await asked(pool, port, GET._replace(method="HEAD")) == (200, b"")


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(ANSWERS)), st.lists(st.integers(0, 200), max_size=6))
def test_any_split_of_the_bytes_gives_the_same_answer(name, cuts):
    answer, status, body, _ = ANSWERS[name]
    edges = [0, *sorted(cut % (len(answer) + 1) for cut in cuts), len(answer)]
    pieces = [answer[begin:end] for begin, end in itertools.pairwise(edges) if begin < end]

    @asynchronous
    async def compare():
        async with plain_server(answering(*pieces, pause_seconds=0.001)) as port, Pool() as pool:
            assert await asked(pool, port) == (status, body)

    compare()


BROKEN = {
    "nonsense": b"nonsense\r\n\r\n",
    "nothing": b"",
    "half a head": OK + b"Content-Le",
    "half a body": OK + b"Content-Length: 3\r\n\r\nab",
    "half a chunk": CHUNKED + b"5\r\nab",
    "no last chunk": CHUNKED + b"1\r\na\r\n",
    "a chunk of no size": CHUNKED + b"x\r\na\r\n",
    "two lengths": OK + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nab",
    "another protocol": b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n",
    "another protocol, not said": b"HTTP/1.1 101 Switching Protocols\r\n\r\n",
    "a long head": OK + b"X: " + b"a" * 5 * MOST_HEAD_BYTES,
    "trailers without an end": CHUNKED + b"0\r\n" + b"X: y\r\n" * 60_000,
    "only a continue": b"HTTP/1.1 100 Continue\r\n\r\n",
}


@asynchronous
@pytest.mark.parametrize("answer", BROKEN.values(), ids=BROKEN)
async def test_what_is_no_answer_is_a_lost_connection(answer, caplog):
    async with plain_server(answering(answer, closes=True)) as port, Pool() as pool:
        for _ in range(2):
            with pytest.raises(ConnectionError):
                await asked(pool, port)
    assert not caplog.records


UNASKED = b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\nX: "


@asynchronous
@pytest.mark.parametrize("pause_seconds", [0.0, 0.05])
async def test_what_nobody_asked_for_is_no_part_of_the_next_answer(pause_seconds):
    connections = 0

    async def forging(reader, writer):
        nonlocal connections
        connections += 1
        await next_head(reader)
        answer = OK + b"Content-Length: 4\r\n\r\ntrue"
        writer.write(answer if pause_seconds else answer + UNASKED)
        await asyncio.sleep(pause_seconds)
        if pause_seconds:
            writer.write(UNASKED)
        await next_head(reader)
        writer.write(b"y\r\n\r\nforged")
        await reader.read()

    async with plain_server(forging) as port, Pool() as pool:
        for _ in range(3):
            assert await asked(pool, port) == (200, b"true")
            await asyncio.sleep(2 * pause_seconds)
    assert connections == 3


@asynchronous
async def test_a_connection_with_an_unsent_body_is_not_used_again():
    connections = 0

    async def hasty(reader, writer):
        nonlocal connections
        connections += 1
        await next_head(reader)
        writer.write(OK + b"Content-Length: 1\r\n\r\na")
        await asyncio.Event().wait()

    async with plain_server(hasty) as port, Pool() as pool:
        for _ in range(2):
            assert await asked(pool, port, POST._replace(body=b"x" * (16 << 20))) == (200, b"a")
    assert connections == 2


@asynchronous
async def test_what_came_before_a_loss_is_read_first():
    async with plain_server(answering(CHUNKED + b"1\r\na\r\n", closes=True)) as port, Pool() as pool:
        response = await pool.request(url_of(port), GET, 2.0)
        await asyncio.sleep(0.05)
        assert await response.next_piece(1.0) == b"a"
        for _ in range(2):
            with pytest.raises(ConnectionError):
                await response.next_piece(1.0)
        response.close()


@asynchronous
async def test_what_is_sent():
    sent = []

    async def talk(reader, writer):
        sent.append(await reader.readuntil(b"abc"))
        writer.write(OK + b"Content-Length: 0\r\n\r\n")
        sent.append(await next_head(reader))
        writer.write(OK + b"Content-Length: 0\r\n\r\n")

    async with plain_server(talk) as port, Pool() as pool:
        await asked(pool, port, POST)
        await asked(pool, port, POST._replace(body=None))
    host = f"Host: 127.0.0.1:{port}".encode()
    assert sent[0].split(b"\r\n") == [b"POST /a HTTP/1.1", b"X: y", host, b"Content-Length: 3", b"", b"abc"]
    assert sent[1].split(b"\r\n")[-3:] == [b"Content-Length: 0", b"", b""]


def closing_after(number_of_answers, sent):
    """A server that answers so often on a connection, and closes it when the next request is here."""

    async def talk(reader, writer):
        for _ in range(number_of_answers):
            sent.append(await next_head(reader))
            writer.write(OK + b"Content-Length: 0\r\n\r\n")
        await reader.readexactly(1)
        sent.append(b"closed on")

    return talk


@asynchronous
@pytest.mark.parametrize(
    ("wanted", "is_repeated"),
    [
        (GET, True),
        (GET._replace(method="HEAD"), True),
        (Wanted("POST", "/a", CIMultiDict()), False),
        (Wanted("POST", "/a", CIMultiDict(), is_repeatable=True), True),
    ],
    ids=["GET", "HEAD", "POST", "a POST that may be repeated"],
)
async def test_a_stale_connection_is_replaced_once_if_twice_does_no_harm(wanted, is_repeated):
    sent = []
    async with plain_server(closing_after(1, sent)) as port, Pool() as pool:
        await asked(pool, port, wanted)
        if is_repeated:
            await asked(pool, port, wanted)
        else:
            with pytest.raises(StaleConnectionError):
                await asked(pool, port, wanted)
    assert len(sent) == (3 if is_repeated else 2)


@asynchronous
async def test_a_new_connection_that_is_closed_is_not_tried_again():
    sent = []
    async with plain_server(closing_after(0, sent)) as port, Pool() as pool:
        with pytest.raises(ConnectionResetError) as lost:
            await asked(pool, port, GET)
        assert not isinstance(lost.value, StaleConnectionError)
    assert len(sent) == 1


@asynchronous
async def test_a_connection_that_brought_a_byte_is_not_replaced():
    count = 0

    async def talk(reader, writer):
        nonlocal count
        for answer in (OK + b"Content-Length: 0\r\n\r\n", b"HTTP"):
            await next_head(reader)
            count += 1
            writer.write(answer)

    async with plain_server(talk) as port, Pool() as pool:
        await asked(pool, port)
        with pytest.raises(ConnectionResetError):
            await asked(pool, port)
    assert count == 2


@asynchronous
async def test_a_connection_that_was_closed_while_idle_is_not_used():
    connections = 0

    async def talk(reader, writer):
        nonlocal connections
        connections += 1
        await next_head(reader)
        writer.write(OK + b"Content-Length: 0\r\n\r\n")

    async with plain_server(talk) as port, Pool() as pool:
        for _ in range(3):
            await asked(pool, port, POST)
            await asyncio.sleep(0.03)
    assert connections == 3


@asynchronous
async def test_an_answer_that_nobody_asked_for_ends_its_connection():
    connections = 0

    async def talk(reader, writer):
        nonlocal connections
        connections += 1
        while True:
            await next_head(reader)
            writer.write((OK + b"Content-Length: 1\r\n\r\na") * 2)

    async with plain_server(talk) as port, Pool() as pool:
        for _ in range(3):
            assert await asked(pool, port) == (200, b"a")
            await asyncio.sleep(0.03)
    assert connections == 3


@asynchronous
async def test_an_idle_connection_is_closed_in_time():
    before = num_sockets()
    async with plain_server(answering(OK + b"Content-Length: 0\r\n\r\n")) as port, Pool(keep_seconds=0.1) as pool:
        await asked(pool, port)
        assert num_sockets() > before + 1
        await until(lambda: num_sockets() == before + 1)


@asynchronous
async def test_connections_are_shared_by_those_who_ask_one_after_the_other_only():
    connections = 0

    async def talk(reader, writer):
        nonlocal connections
        connections += 1
        await answering(OK + b"Content-Length: 0\r\n\r\n")(reader, writer)

    async with plain_server(talk) as port, Pool() as pool:
        for _ in range(3):
            await asyncio.gather(*(asked(pool, port) for _ in range(20)))
    assert connections == 20


@asynchronous
@pytest.mark.parametrize("answer", [b"", OK + b"Content-Length: 3\r\n\r\na"], ids=["head", "body"])
async def test_an_answer_that_does_not_come_in_time(answer):
    hung_up = asyncio.Event()

    async def talk(reader, writer):
        await next_head(reader)
        writer.write(answer)
        await reader.read()
        hung_up.set()

    async with plain_server(talk) as port, Pool() as pool:
        with pytest.raises(TimeoutError):
            await asked(pool, port, seconds=0.1)
        await asyncio.wait_for(hung_up.wait(), 1)


@asynchronous
async def test_the_time_for_a_piece_counts_only_while_it_is_waited_for():
    async def talk(reader, writer):
        await next_head(reader)
        writer.write(CHUNKED + b"1\r\na\r\n")
        await asyncio.sleep(0.25)
        writer.write(b"1\r\nb\r\n")
        await reader.read()

    async with plain_server(talk) as port, Pool() as pool:
        response = await pool.request(url_of(port), GET, 0.1)
        response.lift_limit()
        assert await response.next_piece(0.1) == b"a"
        await asyncio.sleep(0.4)
        assert await response.next_piece(0.1) == b"b"
        with pytest.raises(TimeoutError):
            await response.next_piece(0.1)
        response.close()


@asynchronous
@pytest.mark.parametrize("moment", ["head", "body", "closed"])
async def test_who_does_not_wait_any_more_hangs_up_at_once(moment):
    asked_for, hung_up = asyncio.Event(), asyncio.Event()

    async def talk(reader, writer):
        await next_head(reader)
        if moment != "head":
            writer.write(CHUNKED + b"1\r\na\r\n")
        asked_for.set()
        try:
            await reader.read()
        finally:
            hung_up.set()

    async with plain_server(talk) as port, Pool() as pool:
        if moment == "closed":
            (await pool.request(url_of(port), GET, 2.0)).close()
        else:
            task = asyncio.create_task(asked(pool, port))
            await asked_for.wait()
            await asyncio.sleep(0.02)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await asyncio.wait_for(hung_up.wait(), 1)


@asynchronous
async def test_cancelling_at_any_moment_never_disturbs_another_request():
    async with plain_server(answering(OK + b"Content-Length: 3\r\n\r\nabc")) as port, Pool() as pool:

        async def one(number):
            task = asyncio.create_task(asked(pool, port))
            for _ in range(number % 12):
                await asyncio.sleep(0)
            if number % 3:
                task.cancel()
            (outcome,) = await asyncio.gather(task, return_exceptions=True)
            assert isinstance(outcome, asyncio.CancelledError) or outcome == (200, b"abc")

        for _ in range(30):
            await asyncio.gather(*map(one, range(24)))


@asynchronous
async def test_a_reader_that_does_not_read_holds_the_engine_back():
    sent = 0

    async def talk(reader, writer):
        nonlocal sent
        await next_head(reader)
        writer.write(CHUNKED)
        while sent < 100 << 20:
            writer.write(b"10000\r\n" + b"x" * 65536 + b"\r\n")
            await writer.drain()
            sent += 65536

    async with plain_server(talk) as port, Pool() as pool:
        response = await pool.request(url_of(port), GET, 9.0)
        await asyncio.sleep(0.3)
        so_far = sent
        assert so_far < 16 << 20
        assert response.body._size < 1 << 20
        await asyncio.sleep(0.1)
        assert sent == so_far
        size = 0
        while size < 30 << 20:
            size += len(await response.next_piece(1.0))
        response.close()


async def in_pieces(count, size=1000):
    for _ in range(count):
        yield b""
        yield b"x" * size
        await asyncio.sleep(0)


@asynchronous
async def test_a_body_in_pieces():
    async with aiohttp_server() as port, Pool() as pool:
        for count in (0, 1, 300):
            wanted = POST._replace(body=in_pieces(count))
            assert await asked(pool, port, wanted) == (200, b"POST /a y\n" + b"x" * 1000 * count)


@asynchronous
async def test_a_body_in_pieces_waits_for_the_engine_to_take_it():
    given_out = 0

    async def pieces():
        nonlocal given_out
        while True:
            yield b"x" * 65536
            given_out += 1

    async def talk(reader, _writer):
        await next_head(reader)
        await asyncio.Event().wait()

    async with plain_server(talk) as port, Pool() as pool:
        task = asyncio.create_task(asked(pool, port, POST._replace(body=pieces())))
        await asyncio.sleep(0.2)
        so_far = given_out
        assert so_far < 256
        await asyncio.sleep(0.1)
        assert given_out == so_far
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@asynchronous
async def test_a_body_that_breaks_off_is_never_taken_for_whole():
    seen = bytearray()
    ended = asyncio.Event()

    async def pieces():
        yield b"abc"
        raise ZeroDivisionError

    async def talk(reader, _writer):
        try:
            while data := await reader.read(1000):
                seen.extend(data)
        finally:
            ended.set()

    async with plain_server(talk) as port, Pool() as pool:
        with pytest.raises(ConnectionResetError, match="ZeroDivisionError"):
            await asked(pool, port, POST._replace(body=pieces()))
        await ended.wait()
    assert not seen.endswith(b"0\r\n\r\n")


@asynchronous
async def test_an_answer_before_the_end_of_a_body_is_an_answer():
    async def pieces():
        yield b"abc"
        await asyncio.Event().wait()

    talk = answering(b"HTTP/1.1 413 No\r\nContent-Length: 2\r\n\r\nno")
    async with plain_server(talk) as port, Pool() as pool:
        for _ in range(2):
            assert await asked(pool, port, POST._replace(body=pieces())) == (413, b"no")
        await asyncio.sleep(0)
        await until(lambda: not any("_send_pieces" in str(task) for task in asyncio.all_tasks()))


@asynchronous
async def test_who_cannot_be_reached():
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    async with Pool() as pool:
        for url in (url_of(port), "http://no.such.host.invalid", "http://d..svc:1"):
            with pytest.raises(ConnectError):
                await pool.request(url, GET, 9.0)


@asynchronous
@pytest.mark.parametrize(("connect_seconds", "seconds", "kind"), [(0.1, 9.0, ConnectError), (9.0, 0.1, TimeoutError)])
async def test_a_connection_that_is_not_made_in_time(connect_seconds, seconds, kind):
    async def never(*_args, **_kwargs):
        await asyncio.Event().wait()

    async with Pool(connect_seconds, connect=never) as pool:
        with pytest.raises(kind):
            await pool.request("http://x", GET, seconds)


@asynchronous
async def test_an_engine_that_does_not_speak_tls_cannot_be_reached():
    async def talk(reader, writer):
        await reader.readexactly(1)
        writer.write(b"no TLS at all")

    async with plain_server(talk) as port, Pool() as pool:
        with pytest.raises(ConnectError) as refused:
            await pool.request(f"https://127.0.0.1:{port}", GET, 2.0)
        assert isinstance(refused.value.__cause__, ssl.SSLError)


async def tell(request):
    body = await request.read()
    return web.Response(body=f"{request.method} {request.path_qs} {request.headers.get('X')}\n".encode() + body)


async def stream(request):
    response = web.StreamResponse()
    await response.prepare(request)
    for number in range(50):
        await response.write(b"%d," % number)
        await asyncio.sleep(0)
    return response


class aiohttp_server:  # noqa: N801 - used like a function
    """aiohttp's own server; its port."""

    async def __aenter__(self):
        app = web.Application(client_max_size=1 << 30)
        app.router.add_get("/stream", stream)
        app.router.add_route("*", "/{path:.*}", tell)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.01)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return self._runner.addresses[0][1]

    async def __aexit__(self, *_):
        await self._runner.cleanup()


@asynchronous
async def test_aiohttp_s_server_understands_it():
    async with aiohttp_server() as port, Pool() as pool:
        assert await asked(pool, port, GET._replace(target="/a?b=%2F")) == (200, b"GET /a?b=%2F None\n")
        for size in (0, 3, 1_000, 100_000, 5_000_000):
            wanted = POST._replace(body=b"x" * size)
            assert await asked(pool, port, wanted) == (200, b"POST /a y\n" + b"x" * size)
        numbers = b"".join(b"%d," % number for number in range(50))
        for _ in range(3):
            assert await asked(pool, port, GET._replace(target="/stream")) == (200, numbers)
        assert await asked(pool, port, GET._replace(method="HEAD")) == (200, b"")
        assert await asked(pool, port, GET._replace(method="DELETE")) == (200, b"DELETE /a None\n")


@asynchronous
async def test_nothing_stays_behind_a_pool():
    before = num_sockets()
    async with aiohttp_server() as port:
        async with Pool() as pool:
            await asyncio.gather(*(asked(pool, port) for _ in range(5)))
            response = await pool.request(url_of(port), GET._replace(target="/stream"), 2.0)
        response.close()
    await until(lambda: num_sockets() == before)
    assert len(asyncio.all_tasks()) == 1


@pytest.mark.parametrize(
    ("url", "host", "port", "authority", "base_path"),
    [
        ("http://x", "x", 80, "x", ""),
        ("https://x", "x", 443, "x", ""),
        ("http://x:80/base", "x", 80, "x:80", "/base"),
        ("http://[::1]:3", "::1", 3, "[::1]:3", ""),
    ],
)
def test_addresses(url, host, port, authority, base_path):
    assert origin_of(url) == (host, port, url.startswith("https"), base_path, authority)


@pytest.mark.parametrize("value", ["a\r\nb: c", "a\nb", "a\rb"])
def test_a_line_end_inside_a_header_is_refused(value):
    with pytest.raises(ValueError, match="line end"):
        request_head("GET", "/", CIMultiDict({"X": value}))
