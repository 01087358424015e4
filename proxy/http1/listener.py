"""A socket that clients connect to, and all of their connections."""

import asyncio

from proxy.http1.server import Connection, Service

_BACKLOG = 1024
_LOOK_SECONDS = 0.01


class Listener:
    """Serves clients from ``start`` to ``close``."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._connections: set[Connection] = set()
        self._server: asyncio.Server | None = None
        self.address = ("", 0)
        """Where it listens, once it does."""

    async def start(self, host: str, port: int) -> None:
        """Begin to listen. Raises ``OSError`` if that is not possible."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: Connection(self._service, self._connections), host, port, backlog=_BACKLOG
        )
        self.address = self._server.sockets[0].getsockname()[:2]

    def stop(self) -> None:
        """Let nobody in any more; who is inside goes on."""
        if self._server is not None:
            self._server.close()

    async def idle(self) -> None:
        """Wait until no connection has a request or an answer under way."""
        # Nobody is told when the last byte of a transport is gone.
        while not all(connection.is_idle for connection in self._connections):  # noqa: ASYNC110
            await asyncio.sleep(_LOOK_SECONDS)

    async def close(self, seconds: float) -> None:
        """Stop, give open requests so long, and hang up."""
        self.stop()
        tasks = {connection.task for connection in self._connections if connection.task is not None}
        if tasks:
            await asyncio.wait(tasks, timeout=seconds)
        open_ones = {connection.task for connection in self._connections if connection.task is not None}
        for connection in list(self._connections):
            connection.hang_up()
        if open_ones:
            await asyncio.wait(open_ones)
