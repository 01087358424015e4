"""Transition tables and stories."""

from dataclasses import dataclass
from enum import Enum, auto

import pytest

from pd_transfer.core.machine import Story, StoryEntry, TransitionTable
from pd_transfer.errors import InvalidTransitionError


class Lamp(Enum):
    OFF = auto()
    ON = auto()
    BROKEN = auto()


@dataclass(frozen=True)
class Pressed:
    finger: str = "thumb"


@dataclass(frozen=True)
class PressedHard(Pressed):
    pass


@dataclass(frozen=True)
class Dropped:
    pass


TABLE = TransitionTable(
    "lamp",
    {
        (Lamp.OFF, Pressed): Lamp.ON,
        (Lamp.ON, Pressed): Lamp.OFF,
        (Lamp.OFF, Dropped): Lamp.BROKEN,
        (Lamp.ON, Dropped): Lamp.BROKEN,
    },
)


def test_next_state_follows_the_table() -> None:
    story = Story("lamp 1")
    assert TABLE.next_state(Lamp.OFF, Pressed(), story) is Lamp.ON
    assert TABLE.next_state(Lamp.ON, Dropped(), story) is Lamp.BROKEN
    assert story.entries == ()


def test_illegal_event_raises_with_the_story_and_changes_nothing() -> None:
    story = Story("lamp 1")
    story.record(1.5, Dropped(), Lamp.OFF, Lamp.BROKEN)
    before = story.entries
    with pytest.raises(InvalidTransitionError) as raised:
        TABLE.next_state(Lamp.BROKEN, Pressed("toe"), story)
    assert str(raised.value) == (
        "lamp: Pressed is not allowed in BROKEN: Pressed(finger='toe')\n"
        "story of lamp 1:\n"
        "  1.500000 Dropped: OFF -> BROKEN"
    )
    assert story.entries == before


def test_event_types_match_exactly() -> None:
    with pytest.raises(InvalidTransitionError, match="PressedHard is not allowed in OFF"):
        TABLE.next_state(Lamp.OFF, PressedHard(), Story("lamp 1"))


def test_table_keeps_its_own_copy() -> None:
    entries: dict[tuple[Lamp, type[object]], Lamp] = {(Lamp.OFF, Pressed): Lamp.ON}
    table = TransitionTable("lamp", entries)
    entries.clear()
    assert table.next_state(Lamp.OFF, Pressed(), Story("lamp 1")) is Lamp.ON


def test_story_is_readable() -> None:
    story = Story("lamp 1")
    assert str(story) == "story of lamp 1:\n  (nothing yet)"
    story.record(0.25, Pressed(), Lamp.OFF, Lamp.ON)
    story.record(2, Pressed(), Lamp.ON, Lamp.OFF)
    assert story.entries == (StoryEntry(0.25, "Pressed", "OFF", "ON"), StoryEntry(2, "Pressed", "ON", "OFF"))
    assert str(story) == "story of lamp 1:\n  0.250000 Pressed: OFF -> ON\n  2.000000 Pressed: ON -> OFF"


def test_story_is_bounded_and_says_how_much_it_forgot() -> None:
    story = Story("lamp 1", length=2)
    for now in range(5):
        story.record(now, Pressed(), Lamp.OFF, Lamp.ON)
    assert [entry.now for entry in story.entries] == [3, 4]
    assert str(story).splitlines()[1] == "  (3 earlier)"


def test_mermaid_draws_the_table() -> None:
    assert TABLE.mermaid() == (
        "---\n"
        "title: lamp\n"
        "---\n"
        "stateDiagram-v2\n"
        "    [*] --> OFF\n"
        "    OFF --> ON: Pressed\n"
        "    ON --> OFF: Pressed\n"
        "    OFF --> BROKEN: Dropped\n"
        "    ON --> BROKEN: Dropped\n"
        "    BROKEN --> [*]\n"
    )


def test_mermaid_of_a_table_without_an_end() -> None:
    table = TransitionTable("blinker", {(Lamp.OFF, Pressed): Lamp.ON, (Lamp.ON, Pressed): Lamp.OFF})
    assert "--> [*]" not in table.mermaid()
