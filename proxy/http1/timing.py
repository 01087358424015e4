"""A deadline that moves with every message."""

import asyncio
from collections.abc import Callable
from math import inf


def _nothing() -> None:
    """After the end."""


class Deadline:
    """Calls ``passed`` once its moment is over.

    Moving it further away only notes the new moment, and a timer that comes too early is set again. A timer of the
    loop for every message would cost more than the message.
    """

    __slots__ = ("_at", "_loop", "_passed", "_timer", "_timer_at")

    def __init__(self, loop: asyncio.AbstractEventLoop, passed: Callable[[], None]) -> None:
        self._loop = loop
        self._passed = passed
        self._at = inf
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = inf

    def set(self, seconds: float) -> None:
        """So long from now, whatever it was before."""
        self._at = self._loop.time() + seconds
        if self._at < self._timer_at:
            self._start()

    def clear(self) -> None:
        """No deadline at the moment."""
        self._at = inf

    def cancel(self) -> None:
        """No deadline any more: nothing of this stays in the loop."""
        self._at = self._timer_at = inf
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        # It holds on to whoever holds on to this.
        self._passed = _nothing

    def _start(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = self._at
        self._timer = self._loop.call_at(self._at, self._look)

    def _look(self) -> None:
        self._timer = None
        self._timer_at = inf
        if self._loop.time() >= self._at:
            self._at = inf
            self._passed()
        elif self._at < inf:
            self._start()
