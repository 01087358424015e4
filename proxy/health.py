"""Whether an engine can be trusted with a request: what requests met there, and what checks of its health found.

Pure, with the time as an argument. Two kinds of evidence are kept apart:

    requests that failed  -> SUSPECT for a while, longer each time in a row; taken only when nothing better is left
    checks of its health  -> SUSPECT when it refuses a connection or says that it is unwell; DOWN, not taken at all,
                             when it does so again
                          -> SUSPECT while it says nothing, since a busy engine is silent, too

Room for the next feature: another kind of evidence is a method of ``Health`` and a line in ``standing``.
"""

import enum

from proxy.errors import FailureKind

FIRST_EJECTION_SECONDS = 1.0
"""How long an engine is avoided after its first failure; doubled for each further one in a row. Short, because every
request can fall back to another engine anyway."""
LONGEST_EJECTION_SECONDS = 30.0
BUSY_SECONDS = 1.0
"""How long an engine is left alone that says it has too much to do. That is no fault, so it does not grow."""
BROKEN_ANSWERS = 3
"""So many unusable answers in a row eject an engine. A single one may be the doing of its request."""
UNWELL_CHECKS = 2
"""So many bad checks in a row take an engine out altogether. A burst of connections may spoil a single one."""
SILENT_CHECKS = 2
"""So many checks in a row without an answer make an engine suspect."""

_MOST_DOUBLINGS = 16


class Standing(enum.StrEnum):
    """How far an engine is in rotation."""

    UNKNOWN = "unknown"
    """Not checked yet; gets requests all the same."""
    UP = "up"
    SUSPECT = "suspect"
    """Gets requests only when no engine is unknown or up."""
    DOWN = "down"
    DRAINING = "draining"
    """Told to take no new requests."""


class Check(enum.Enum):
    """What a check of an engine's health found."""

    WELL = enum.auto()
    UNWELL = enum.auto()
    """It refuses connections, or answers that something is wrong."""
    SILENT = enum.auto()
    """No answer in time."""
    NOT_MADE = enum.auto()
    """The proxy could not ask, for reasons of its own."""


class Health:
    """What is known of one engine. Times are seconds on one clock of the caller's."""

    def __init__(self) -> None:
        self._suspect_until = 0.0
        self._ejections = 0
        self._broken_answers = 0
        self._checked = False
        self._unwell_checks = 0
        self._silent_checks = 0

    def standing(self, now: float) -> Standing:
        """The verdict. Never DRAINING, which is not about health."""
        if self._unwell_checks >= UNWELL_CHECKS:
            return Standing.DOWN
        if now < self._suspect_until or self._unwell_checks or self._silent_checks >= SILENT_CHECKS:
            return Standing.SUSPECT
        return Standing.UP if self._checked else Standing.UNKNOWN

    @property
    def on_trial(self) -> bool:
        """Whether the engine was ejected and has answered no request since."""
        return self._ejections > 0

    def answered(self) -> None:
        """A request was served: what earlier ones met is forgotten."""
        self._suspect_until = 0.0
        self._ejections = 0
        self._broken_answers = 0

    def failed(self, kind: FailureKind, now: float) -> bool:
        """A request failed; whether that ejects an engine that was trusted until now."""
        trusted = now >= self._suspect_until
        if kind is FailureKind.OWN:
            return False
        if kind is FailureKind.BUSY:
            self._suspect_until = max(self._suspect_until, now + BUSY_SECONDS)
            return False
        if kind is FailureKind.BROKEN:
            self._broken_answers += 1
            if self._broken_answers < BROKEN_ANSWERS:
                return False
        if trusted:
            # Requests that fail together are one failure: only the first of them makes the next ejection longer.
            seconds = min(LONGEST_EJECTION_SECONDS, FIRST_EJECTION_SECONDS * 2**self._ejections)
            self._suspect_until = now + seconds
            self._ejections = min(self._ejections + 1, _MOST_DOUBLINGS)
        return trusted

    def checked(self, found: Check) -> None:
        """A check of its health has ended. A good one does not undo what requests met; time does."""
        if found is Check.NOT_MADE:
            return
        self._checked = True
        self._unwell_checks = self._unwell_checks + 1 if found is Check.UNWELL else 0
        self._silent_checks = self._silent_checks + 1 if found is Check.SILENT else 0
