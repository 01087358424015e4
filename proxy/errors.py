"""What can go wrong between a client and the engines, and how the client is told.

ProxyError             ends a request; knows the answer that the client gets
 +-- EngineAnswerError   an engine's own refusal, handed to the client as it is
EngineFailedError      one attempt on one engine failed; turned into a ProxyError when no engine is left to try

An address of an engine never appears in an answer: clients have no business with it. Logs carry it.
"""

import enum
from typing import NamedTuple

from multidict import CIMultiDict

from proxy.dialects import Dialect

RETRY_AFTER_SECONDS = 1
"""What clients are told to wait when the answer is 'not now': engines come back, or the router learns, within this."""

_RETRY_LATER_STATUSES = frozenset({429, 503})


class Answer(NamedTuple):
    """A complete HTTP answer: what an engine said, or what the client gets."""

    status: int
    headers: CIMultiDict[str]
    body: bytes


class ProxyError(Exception):
    """A request cannot be served. ``answer`` is what the client gets."""

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param

    def answer(self, dialect: Dialect) -> Answer:
        """The HTTP answer for the client; a transient one says when to come back."""
        headers = CIMultiDict({"Content-Type": "application/json"})
        if self.status in _RETRY_LATER_STATUSES:
            headers["Retry-After"] = str(RETRY_AFTER_SECONDS)
        return Answer(self.status, headers, dialect.body(self.status, str(self), self.param))


class EngineAnswerError(ProxyError):
    """An engine refused the request. The client gets the engine's own status and body."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer.status, f"an engine answered {answer.status}")
        self._answer = answer

    def answer(self, _dialect: Dialect) -> Answer:
        """The engine's answer, with a ``Retry-After`` when the engine forgot one."""
        if self.status in _RETRY_LATER_STATUSES:
            self._answer.headers.setdefault("Retry-After", str(RETRY_AFTER_SECONDS))
        return self._answer


class FailureKind(enum.Enum):
    """How an attempt on an engine failed. It decides whether another attempt is allowed (see ``routing.Attempts``)."""

    UNREACHABLE = "unreachable"
    """No connection: the engine has not seen one byte of the request."""
    LOST = "lost"
    """The connection broke before the answer was complete: the engine may have seen the request."""
    TIMED_OUT = "timed_out"
    BUSY = "busy"
    """The engine answered that it cannot take the request now."""
    BROKEN = "broken"
    """The engine answered, but not with anything that can be used."""
    OWN = "own"
    """The proxy has no file or buffer left for a connection. That says nothing about the engine."""


_STATUS_BY_KIND = {
    FailureKind.UNREACHABLE: 503,
    FailureKind.LOST: 502,
    FailureKind.TIMED_OUT: 504,
    FailureKind.BUSY: 503,
    FailureKind.BROKEN: 502,
    FailureKind.OWN: 503,
}


class EngineFailedError(Exception):
    """One attempt on one engine failed before the client got a byte, or in the middle of an answer."""

    def __init__(self, kind: FailureKind, detail: str, answer: Answer | None = None) -> None:
        super().__init__(detail)
        self.kind = kind
        self.answer = answer

    def as_proxy_error(self) -> ProxyError:
        """What the client is told when this attempt was the last."""
        if self.kind is FailureKind.BUSY and self.answer is not None:
            return EngineAnswerError(self.answer)
        return ProxyError(_STATUS_BY_KIND[self.kind], str(self))
