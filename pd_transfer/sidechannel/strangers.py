"""How often addresses come without a good key: who may still try, and whether a line in the log is due.

Time goes by in windows that are the same for all addresses; a new one begins with an empty book. So a list of fixed
length is all the memory that strangers get, and an address that was shut out is let in again by the next window.

Shut out means that nine of ten connections are hung up on. Behind one address there may be a stranger and an engine,
which a prefill engine that has just started does not know yet: it gets in within some tries, and is known then.
"""

import time
from collections import Counter
from collections.abc import Callable

WINDOW_SECONDS = 60.0
MAX_TRIES = 60
"""Connections per address and window before the address is shut out."""
LET_THROUGH = 10
"""Of so many connections from an address that is shut out, one is let through."""
MAX_ADDRESSES = 1024
"""Addresses that are remembered. More in one window are not bounded: a known engine must never be the one too many."""
MAX_LINES = 20
"""Lines in the log per window, at most one for an address."""


class StrangerBook:
    """Not locked: for the thread that owns the side channel.

    An address from which a listed engine was admitted once is never shut out: on a shared host or behind a router, a
    stranger must not be able to keep an engine away.
    """

    def __init__(
        self, max_tries: int = MAX_TRIES, max_lines: int = MAX_LINES, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_tries = max_tries
        self._max_lines = max_lines
        self._clock = clock
        self._window_ends = clock() + WINDOW_SECONDS
        self._tries: Counter[str] = Counter()
        self._logged: set[str] = set()
        self._known: set[str] = set()

    def may_try(self, host: str) -> bool:
        """A connection came from ``host``: count it, and say whether it may go on to the handshake."""
        self._turn_page()
        if host in self._known or (host not in self._tries and len(self._tries) >= MAX_ADDRESSES):
            return True
        self._tries[host] += 1
        excess = self._tries[host] - self._max_tries
        return excess <= 0 or excess % LET_THROUGH == 0

    def admit(self, host: str) -> None:
        """A listed engine was admitted from ``host``."""
        if len(self._known) < MAX_ADDRESSES:
            self._known.add(host)

    def may_log(self, host: str) -> bool:
        """Whether a refusal of ``host`` is worth a line; saying yes uses the line up."""
        self._turn_page()
        if host in self._logged or len(self._logged) >= self._max_lines:
            return False
        self._logged.add(host)
        return True

    def _turn_page(self) -> None:
        now = self._clock()
        if now >= self._window_ends:
            self._window_ends = now + WINDOW_SECONDS
            self._tries.clear()
            self._logged.clear()
