"""One record for every client request: a line of JSON in the log, and the last ones for the status page.

Room for the next feature: a fact about a request is a field of ``Record``, or of ``story.Story`` if it is about one of
its prompts, and appears in both places by itself.
"""

import logging
import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter
from time import time as wall_clock

import msgspec

from proxy.metrics import CLIENT_GONE, Metrics, outcome_of
from proxy.story import Story

logger = logging.getLogger("proxy.requests")

KEPT_RECORDS = 200
"""How many records the status page can show, of all requests and of failed ones each."""

KEPT_STORIES = 8
"""How many prompts of one request are told of."""

_encode = msgspec.json.Encoder().encode

_FINE = frozenset({"ok", CLIENT_GONE})
_ANSWER_TOKENS = re.compile(rb'"(?:completion|output)_tokens": ?(\d{1,12})\b')
_TAIL_BYTES = 4096
_ERROR_CHARS = 500


@dataclass
class Course:
    """How one client request went, and when. Times are seconds; None means that it did not come to that."""

    request_id: str
    endpoint: str
    time: float = field(default_factory=wall_clock)
    """When it came, on the wall clock."""
    outcome: str = ""
    """One of the outcomes of ``metrics``; empty until it is known."""
    status: int | None = None
    error: str | None = None
    seconds: float = 0.0
    """From the request's head to the end of its answer."""
    queue_seconds: float | None = None
    """Until its turn came; all of its time if it never did."""
    first_byte_seconds: float | None = None

    def __post_init__(self) -> None:
        # No field, since it means nothing to anybody else.
        self._begun = perf_counter()

    def admitted(self) -> None:
        """Its turn has come."""
        self.queue_seconds = self._elapsed()

    def answering(self) -> None:
        """The first byte goes to the client."""
        self.first_byte_seconds = self._elapsed()

    def ended(self, status: int | None) -> None:
        """Nothing more goes to the client. None is for an answer that nobody waited for."""
        self.status = status
        self.seconds = self._elapsed()
        if self.queue_seconds is None:
            self.queue_seconds = self.seconds
        self.outcome = self.outcome or (CLIENT_GONE if status is None else outcome_of(status))

    def broke(self, outcome: str, error: str) -> None:
        """The answer is not what its status promises; the first reason counts."""
        self.outcome = self.outcome or outcome
        self.error = self.error or error[:_ERROR_CHARS]

    def _elapsed(self) -> float:
        return perf_counter() - self._begun


@dataclass
class Record(Course):
    """What is told of one client request: its course, and what went through the proxy."""

    request_bytes: int = 0
    """The client's body; of one that was not read as a whole, the length that it announced."""
    answer_bytes: int = 0
    """What was written of the answer's body."""
    answer_tokens: int | None = None
    """As the engine counts them in the usage, if it told it."""
    num_prompts: int = 0
    """How many prompts there are in all."""
    prompts: list[Story] = field(default_factory=list)
    """One for each of the first ``KEPT_STORIES`` prompts that went through the two legs; none for what is only
    forwarded."""

    def tell_of(self, stories: Sequence[Story]) -> None:
        """These are the prompts of the request."""
        self.prompts = list(stories[:KEPT_STORIES])
        self.num_prompts = len(stories)

    def answered(self, last: bytes) -> None:
        """The answer ended with these bytes."""
        if found := _ANSWER_TOKENS.findall(last[-_TAIL_BYTES:]):
            self.answer_tokens = int(found[-1])


class Journal:
    """Takes the records of all requests."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self.recent: deque[Record] = deque(maxlen=KEPT_RECORDS)
        self.failed: deque[Record] = deque(maxlen=KEPT_RECORDS)

    def note(self, record: Record) -> None:
        """A request has ended."""
        self._metrics.request_ended(record.endpoint, record.outcome, record.first_byte_seconds, record.queue_seconds)
        self.recent.append(record)
        if record.outcome not in _FINE:
            self.failed.append(record)
        if logger.isEnabledFor(logging.INFO):
            logger.info(_encode(record).decode())
