"""A client's body that goes to an engine piece by piece, without being read as a whole."""

import asyncio

from proxy.errors import ProxyError
from proxy.http1.content import Content
from proxy.http1.errors import MessageError


class Upload:
    """Iterates over the pieces as they come.

    ``error`` is what the client gets if they stop coming; iterating then raises as well, which ends the request to the
    engine.
    """

    def __init__(self, content: Content, idle_seconds: float) -> None:
        self.under_way = False
        """Whether some of it may have been sent, but not all."""
        self.error: ProxyError | None = None
        self._content = content
        self._idle_seconds = idle_seconds

    def __aiter__(self) -> "Upload":
        return self

    async def __anext__(self) -> bytes:
        self.under_way = True
        try:
            async with asyncio.timeout(self._idle_seconds):
                piece = await self._content.next_piece()
        except TimeoutError:
            self.error = ProxyError(408, "The request body did not arrive in time")
            raise
        except MessageError as error:
            self.error = ProxyError(error.status, f"The request body cannot be read: {error}")
            raise
        if not piece:
            self.under_way = False
            raise StopAsyncIteration
        return piece


ForwardedBody = bytes | Upload | None


def is_under_way(body: ForwardedBody) -> bool:
    """Whether a body is being sent. What fails meanwhile may be the client's doing, and says nothing of the engine."""
    return isinstance(body, Upload) and body.under_way
