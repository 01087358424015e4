"""A TCP forwarder between a decode engine and a prefill engine's side channel, which does what it is told to messages.

It knows ZMTP's frames, so that a fault can be aimed at one kind of message. A test sends decode through it by writing
its address into ``kv_transfer_params``, as a router would.
"""

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from enum import Enum, auto
from types import TracebackType
from typing import Any, Self

from pd_transfer.core.messages import Malformed, Message, decode

_GREETING_PARTS = (10, 1, 53)
"""libzmq sends the next part of its greeting only when it has seen the other side's last one."""
_LONG, _COMMAND = 0b010, 0b100
_JUNK = b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n" + bytes(range(256))
_GARBLED = b"\xffnot a message of any version"


class Deed(Enum):
    """What becomes of a frame.

    JUNK: bytes that are no frame take its place. GARBLE: the frame stays well-formed, what is in it does not. CUT: the
    connection is reset instead. DELAY: it is passed on later, and so is what follows it.
    """

    DROP = auto()
    DELAY = auto()
    CUT = auto()
    JUNK = auto()
    GARBLE = auto()
    DUPLICATE = auto()


@dataclass(frozen=True)
class Fault:
    """One deed, done to every message of some kinds, at most ``times`` times.

    No kinds: to all that passes in both directions, the greeting of a connection too.
    """

    deed: Deed
    kinds: tuple[type, ...] = ()
    seconds: float = 0.0
    times: int | None = None


@dataclass(frozen=True)
class Frame:
    """Some bytes of one direction of a connection: a part of its greeting, a command of ZMTP, or a message of ours."""

    raw: bytes
    message: Message | Malformed | None = None

    def is_meant(self, fault: Fault) -> bool:
        """Whether a fault is to be done to this frame."""
        return not fault.kinds or isinstance(self.message, fault.kinds)


async def frames(reader: asyncio.StreamReader) -> AsyncIterator[Frame]:
    """Cut one direction of a ZMTP 3 connection into frames, until it ends."""
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        for num_bytes in _GREETING_PARTS:
            yield Frame(await reader.readexactly(num_bytes))
        while True:
            flags = await reader.readexactly(1)
            size = await reader.readexactly(8 if flags[0] & _LONG else 1)
            body = await reader.readexactly(int.from_bytes(size, "big"))
            yield Frame(flags + size + body, None if flags[0] & _COMMAND else decode(body))


def _framed(payload: bytes) -> bytes:
    return bytes([0, len(payload)]) + payload


class _CutError(Exception):
    """The connection is to be reset."""


class Forwarder:
    """Listens on a port of its own from construction on, and forwards each connection to ``target`` (host, port).

    ``fault`` may be changed at any time, from any thread; None passes everything on. ``num_done`` counts what the
    faults were done to: a test that relies on a fault asserts on it, or waits with ``wait_done``.
    """

    def __init__(self, target: tuple[str, int], fault: Fault | None = None) -> None:
        self._target = target
        self._fault = fault
        self._done = threading.Condition()
        self.num_done = 0
        self._connections: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="forwarder", daemon=True)
        self._thread.start()
        self._server = self._call(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.port: int = self._server.sockets[0].getsockname()[1]

    def _call(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    def set_fault(self, fault: Fault | None) -> None:
        """From now on do this to what passes."""
        with self._done:
            self._fault = fault

    def wait_done(self, count: int, seconds: float) -> bool:
        """Wait until faults were done to ``count`` frames; False when that took too long."""
        with self._done:
            return self._done.wait_for(lambda: self.num_done >= count, seconds)

    def redirect(self, params: dict[str, Any]) -> dict[str, Any]:
        """The same params, with this forwarder's address instead of prefill's."""
        return params | {"remote_host": "127.0.0.1", "remote_port": self.port}

    @property
    def num_connections(self) -> int:
        """How many connections are being forwarded."""
        return len(self._connections) // 2

    def cut(self) -> None:
        """Reset every connection, now."""

        async def abort() -> None:
            for writer in list(self._connections):
                _reset(writer)

        self._call(abort())

    def close(self) -> None:
        """Stop listening and reset what is open. Idempotent."""
        if self._loop.is_closed():
            return

        async def stop() -> None:
            self._server.close()
            for writer in list(self._connections):
                _reset(writer)
            rest = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            await asyncio.gather(*rest, return_exceptions=True)

        self._call(stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(*self._target)
        except OSError:
            _reset(writer)
            return
        ends = (writer, far_writer)
        self._connections.update(ends)
        pumps = [
            asyncio.ensure_future(pump) for pump in (self._pump(reader, far_writer), self._pump(far_reader, writer))
        ]
        try:
            # Whichever direction ends first, ends the connection.
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            for end in ends:
                _reset(end)
            self._connections.difference_update(ends)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(_CutError, ConnectionError):
            async for frame in frames(reader):
                for raw in await self._treated(frame):
                    writer.write(raw)
                await writer.drain()

    async def _treated(self, frame: Frame) -> list[bytes]:
        """What is passed on instead of a frame. Raises _CutError."""
        fault = self._take_fault(frame)
        if fault is None:
            return [frame.raw]
        match fault.deed:
            case Deed.DROP:
                return []
            case Deed.CUT:
                raise _CutError
            case Deed.JUNK:
                return [_JUNK]
            case Deed.GARBLE:
                return [_framed(_GARBLED)]
            case Deed.DUPLICATE:
                return [frame.raw, frame.raw]
            case Deed.DELAY:
                await asyncio.sleep(fault.seconds)
                return [frame.raw]

    def _take_fault(self, frame: Frame) -> Fault | None:
        with self._done:
            fault = self._fault
            if fault is None or not frame.is_meant(fault) or fault.times == 0:
                return None
            if fault.times is not None:
                self._fault = replace(fault, times=fault.times - 1)
            self.num_done += 1
            self._done.notify_all()
            return fault


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close at once: the other side sees a reset, not an end."""
    end = writer.get_extra_info("socket")
    if end is not None and end.fileno() >= 0:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
