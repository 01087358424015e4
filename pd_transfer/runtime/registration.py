"""An engine tells proxies of itself: that it serves, again and again, and at its end that it stops.

It speaks to the admin API of ``pd-proxy`` (docs/proxy.md), with a thread of its own for each proxy. Nothing of vLLM
waits for these threads, but for a moment at the end.
"""

import enum
import http.client
import logging
import os
import re
import stat
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

import msgspec

from pd_transfer.errors import ConfigError
from pd_transfer.sidechannel.curve import unsafe_access

logger = logging.getLogger("pd_transfer.registration")

_Done = TypeVar("_Done")

_PATH = "/admin/registrations"
_HEALTH_PATH = "/health"
_MOST_BYTES = 1 << 16
"""More of an answer, or of a token file, is not read."""
_TOLD_CHARACTERS = 200
"""So much of a refusal is told."""
_TOKEN = re.compile("[!-~]{16,}")
"""What may stand in a header, and is as long as the proxy wants it."""


class Role(enum.StrEnum):
    """What an engine does, in the words of the proxy's admin API."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class Pace:
    """How patient an engine is with a proxy, in seconds."""

    start: float = 1.0
    """Between two looks whether this engine serves, and after a first failure at the proxy; doubled for each more."""
    repeat: float = 10.0
    """Between two registrations, and the longest pause after a failure: a proxy that has restarted knows no engine."""
    answer: float = 5.0
    """For each part of an answer."""
    goodbye: float = 2.0
    """For everything at the end."""


def read_token(path: Path) -> str:
    """The token in a file, without the white space around it.

    Raises ConfigError, which says what to do and shows nothing of the file.
    """
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if advice := unsafe_access(path, status.st_uid, stat.S_IMODE(status.st_mode), (0, os.geteuid())):
                raise ConfigError(f"register_token_file {path} {advice}")
            token = file.read(_MOST_BYTES).strip().decode("ascii", "replace")
    except OSError as error:
        raise ConfigError(
            f"register_token_file {path} cannot be read ({error.strerror}): copy the proxy's --admin-token-file there, "
            "or correct register_token_file"
        ) from error
    if not _TOKEN.fullmatch(token):
        raise ConfigError(
            f"register_token_file {path} holds no token, which is at least 16 characters of ASCII without a space: "
            "copy the proxy's --admin-token-file"
        )
    return token


class Registrar:
    """What this engine says to one proxy. It does one thing at a time and has neither a thread nor a clock.

    ``proxy`` and ``engine`` are base addresses; ``read_token`` may raise ConfigError.
    """

    def __init__(
        self, proxy: str, engine: str, roles: Sequence[Role], read_token: Callable[[], str], pace: Pace | None = None
    ) -> None:
        self.pace = pace or Pace()
        self._proxy = proxy.rstrip("/")
        self._engine = engine.rstrip("/")
        self._roles = roles
        self._read_token = read_token
        self._next_pause = self.pace.start
        self._may_be_listed = False
        self._last_told = ""

    def turn(self) -> float:
        """Register if this engine serves; after how many seconds to come again.

        An engine that does not answer itself is not offered to others, neither at its start nor later.
        """
        if reason := self._unwell():
            url = self._engine + _HEALTH_PATH
            self._tell(logging.INFO, f"will register at {self._proxy} when {url} answers well; now: {reason}")
            return self.pace.start
        self._may_be_listed = True
        if reason := self._say("POST", self.pace.answer):
            self._tell(logging.WARNING, f"cannot register at {self._proxy}, trying again and again: {reason}")
            pause, self._next_pause = self._next_pause, min(self.pace.repeat, 2 * self._next_pause)
            return pause
        self._next_pause = self.pace.start
        self._tell(logging.INFO, f"registered at {self._proxy} as {' and '.join(self._roles)} engine {self._engine}")
        return self.pace.repeat

    def leave(self) -> None:
        """Ask the proxy for no more requests, once, if it may know this engine."""
        if not self._may_be_listed:
            return
        self._may_be_listed = False
        if reason := self._say("DELETE", self.pace.goodbye):
            self._tell(logging.WARNING, f"{self._proxy} was not told that this engine stops: {reason}")
        else:
            self._tell(logging.INFO, f"no longer registered at {self._proxy}")

    def _unwell(self) -> str:
        """Why this engine does not serve; empty if it does."""
        try:
            status, _ = _ask("GET", self._engine + _HEALTH_PATH, self.pace.answer)
        except (OSError, http.client.HTTPException) as error:
            return _words(error)
        return "" if status == http.client.OK else f"HTTP {status}"

    def _say(self, method: str, timeout_seconds: float) -> str:
        """Say it of every role; why the proxy did not take it, empty if it did."""
        try:
            # Read each time, so that another token needs no restart.
            headers = {"Authorization": f"Bearer {self._read_token()}", "Content-Type": "application/json"}
            for role in self._roles:
                body = msgspec.json.encode({"role": role, "url": self._engine})
                status, answer = _ask(method, self._proxy + _PATH, timeout_seconds, headers, body)
                if status != http.client.OK:
                    return f"HTTP {status}{_message(answer)}"
        except ConfigError as error:
            return str(error)
        except (OSError, http.client.HTTPException) as error:
            return _words(error)
        return ""

    def _tell(self, level: int, line: str) -> None:
        """Log what has changed, and nothing twice in a row."""
        if line != self._last_told:
            self._last_told = line
            logger.log(level, "%s", line)


def _ask(
    method: str, url: str, timeout_seconds: float, headers: dict[str, str] | None = None, body: bytes | None = None
) -> tuple[int, bytes]:
    """Status and body of an answer. No redirect is followed and no proxy of the environment is used, so that a token
    goes nowhere else. Raises OSError and HTTPException.
    """
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    # Without a port, the last group of an IPv6 address would be taken for one.
    port = parts.port or kind.default_port
    with closing(kind(parts.hostname or "", port, timeout=timeout_seconds)) as connection:
        connection.request(method, parts.path, body, headers or {})
        answer = connection.getresponse()
        return answer.status, answer.read(_MOST_BYTES)


def _words(error: Exception) -> str:
    """An error for the log, where an exception of HTTP may quote what the other side has sent."""
    if isinstance(error, http.client.HTTPException):
        return f"{type(error).__name__} {str(error)[:_TOLD_CHARACTERS]!r}"
    return str(error) or type(error).__name__


class _Said(msgspec.Struct):
    message: str


class _Refusal(msgspec.Struct):
    error: _Said


def _message(answer: bytes) -> str:
    """What the proxy says of a refusal, fit for the log."""
    try:
        said = msgspec.json.decode(answer, type=_Refusal).error.message
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return ""
    return f" {said[:_TOLD_CHARACTERS]!r}"


class Registrations:
    """One thread for each proxy, from ``start`` to ``close``."""

    def __init__(self, registrars: Sequence[Registrar] = ()) -> None:
        self._stopping = threading.Event()
        self._goodbye_seconds = max((registrar.pace.goodbye for registrar in registrars), default=0.0)
        self._threads = [
            threading.Thread(target=self._run, args=(registrar,), name="pd-transfer-registration", daemon=True)
            for registrar in registrars
        ]

    def start(self) -> None:
        """Register at every proxy as soon as this engine serves."""
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Tell every proxy that this engine stops. Those that do not answer in time are left to find out."""
        self._stopping.set()
        deadline = time.monotonic() + self._goodbye_seconds
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, deadline - time.monotonic()))

    def _run(self, registrar: Registrar) -> None:
        seconds = 0.0
        while not self._stopping.wait(seconds):
            seconds = _contained(registrar.turn, registrar.pace.repeat)
        _contained(registrar.leave, None)


def _contained(act: Callable[[], _Done], otherwise: _Done) -> _Done:
    """What is done, or ``otherwise`` after a bug of ours, which must not end the thread."""
    try:
        return act()
    except Exception:
        logger.exception("internal error in a registration, please report it; the engine goes on")
        return otherwise
