"""Both ends of a connection for tests of the HTTP layer: a server that echoes, and sockets without any HTTP."""

import asyncio
import socket
from contextlib import asynccontextmanager

from multidict import CIMultiDict

from proxy.http1.errors import MessageError
from proxy.http1.listener import Listener
from proxy.http1.request import Response
from proxy.http1.server import Patience, Service

MOST_BODY_BYTES = 1 << 20
PATIENT = Patience()
HASTY = Patience(idle_seconds=0.15, head_seconds=0.15, stall_seconds=0.3)


def refuse(status, message):
    return Response(status, CIMultiDict(), message.encode(), closes=True)


async def echo(request):
    """Tells what came."""
    try:
        body = await request.read(MOST_BODY_BYTES)
    except MessageError as error:
        return Response(error.status, CIMultiDict(), str(error).encode())
    told = f"{request.method} {request.target} {request.path} {request.headers.get('X', '')}\n".encode()
    return Response(200, CIMultiDict({"Content-Type": "text/plain"}), told + body)


@asynccontextmanager
async def serving(serve=echo, patience=PATIENT):
    """A server; its port."""
    listener = Listener(Service(serve, refuse, patience))
    await listener.start("127.0.0.1", 0)
    try:
        yield listener.address[1]
    finally:
        await listener.close(0)


@asynccontextmanager
async def connected(port, most_unread=None):
    """A plain connection: reader and writer. The kernel takes no more, or little more, than ``most_unread`` bytes that
    are not read.
    """
    end = socket.socket()
    if most_unread is not None:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, most_unread)
    end.connect(("127.0.0.1", port))
    end.setblocking(False)
    reader, writer = await asyncio.open_connection(sock=end)
    try:
        yield reader, writer
    finally:
        writer.close()


async def exchanged(port, *pieces, pause_seconds=0.0):
    """What comes back for these bytes, up to the end of the connection."""
    async with connected(port) as (reader, writer):
        for number, piece in enumerate(pieces):
            if number:
                await asyncio.sleep(pause_seconds)
            writer.write(piece)
        async with asyncio.timeout(5):
            try:
                return await reader.read()
            except ConnectionResetError:
                return b"reset"


def without_date(answer):
    """Answers without what differs from second to second."""
    return b"\r\n".join(line for line in answer.split(b"\r\n") if not line.startswith(b"Date: "))


@asynccontextmanager
async def plain_server(talk):
    """A server without any HTTP; its port. ``talk`` gets reader and writer of each connection."""
    tasks = set()

    async def guarded(reader, writer):
        tasks.add(asyncio.current_task())
        try:
            await talk(reader, writer)
        except ConnectionError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(guarded, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def next_head(reader):
    """A request's head, without what follows."""
    return await reader.readuntil(b"\r\n\r\n")
