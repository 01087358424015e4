"""State machines as literal tables: what may follow what, what happened so far, and the diagram of both.

A machine keeps its own state. It asks its table first and changes itself afterwards::

    new = TABLE.next_state(self.state, event, self.story)  # raises, and nothing has changed
    self.story.record(now, event, self.state, new)
    self.state = new

One event type leads from one state to one state. Where the outcome depends on more than the event's type, the machine
says so with two event types, so that the table stays the whole truth.
"""

from collections import deque
from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType
from typing import Generic, NamedTuple, TypeVar

from pd_transfer.errors import InvalidTransitionError

StateT = TypeVar("StateT", bound=Enum)

DEFAULT_STORY_LENGTH = 50
"""Longest story kept by default: enough for a bug report, and bounded for a peer that lives for months."""


class StoryEntry(NamedTuple):
    """One transition: when, the event's type name, and the names of the states before and after."""

    now: float
    event: str
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.now:.6f} {self.event}: {self.old} -> {self.new}"


class Story:
    """The last transitions of one subject, oldest first; a bug report when something goes wrong."""

    __slots__ = ("_entries", "_num_recorded", "subject")

    def __init__(self, subject: str, length: int = DEFAULT_STORY_LENGTH) -> None:
        self.subject = subject
        self._entries: deque[StoryEntry] = deque(maxlen=length)
        self._num_recorded = 0

    @property
    def entries(self) -> tuple[StoryEntry, ...]:
        """The entries that are kept, oldest first."""
        return tuple(self._entries)

    def record(self, now: float, event: object, old: Enum, new: Enum) -> None:
        """Add one transition; the oldest one is forgotten when the story is full."""
        self._entries.append(StoryEntry(now, type(event).__name__, old.name, new.name))
        self._num_recorded += 1

    def __str__(self) -> str:
        lines = [f"story of {self.subject}:"]
        num_forgotten = self._num_recorded - len(self._entries)
        if num_forgotten:
            lines.append(f"  ({num_forgotten} earlier)")
        lines.extend(f"  {entry}" for entry in self._entries)
        if not self._num_recorded:
            lines.append("  (nothing yet)")
        return "\n".join(lines)


class TransitionTable(Generic[StateT]):
    """An immutable table ``(state, event type) -> next state``. The first entry's state is the initial one.

    Event types match exactly: a subclass of an event is another event.
    """

    __slots__ = ("entries", "name")

    def __init__(self, name: str, entries: Mapping[tuple[StateT, type[object]], StateT]) -> None:
        self.name = name
        self.entries: Mapping[tuple[StateT, type[object]], StateT] = MappingProxyType(dict(entries))

    def next_state(self, state: StateT, event: object, story: Story) -> StateT:
        """The state after ``event``. Changes nothing, not even the story.

        Raises InvalidTransitionError, with the story in its text, when the table has no such entry.
        """
        new = self.entries.get((state, type(event)))
        if new is None:
            raise InvalidTransitionError(
                f"{self.name}: {type(event).__name__} is not allowed in {state.name}: {event!r}\n{story}"
            )
        return new

    def mermaid(self) -> str:
        """The table as a mermaid ``stateDiagram-v2``, in table order; states that nothing leaves are final."""
        initial = next(iter(self.entries))[0]
        lines = ["---", f"title: {self.name}", "---", "stateDiagram-v2", f"    [*] --> {initial.name}"]
        lines.extend(f"    {old.name} --> {new.name}: {event.__name__}" for (old, event), new in self.entries.items())
        left = {old for old, _ in self.entries}
        final = dict.fromkeys(new for new in self.entries.values() if new not in left)
        lines.extend(f"    {state.name} --> [*]" for state in final)
        return "\n".join(lines) + "\n"
