"""Compares fingerprints of KV blocks: what decode has loaded with what a single engine holds. No I/O."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Loaded:
    """What decode loaded for one prompt: for each group the fingerprints of its blocks, the last position last."""

    text: str
    groups: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Held:
    """What a single engine holds for one prompt: for each group position -> fingerprint."""

    text: str
    num_tokens: int
    groups: Sequence[Mapping[int, str]]


@dataclass(frozen=True)
class Deviation:
    """One block of one prompt that is not the single engine's; ``instead`` says what it has."""

    prompt: int
    group: int
    position: int
    instead: str

    def describe(self, block_size: int) -> str:
        """A line for a person."""
        first = self.position * block_size
        return (
            f"prompt {self.prompt}: the block at position {self.position} of group {self.group} "
            f"(tokens {first} to {first + block_size - 1}) has {self.instead}"
        )


@dataclass(frozen=True)
class Comparison:
    """How many blocks could be compared, and which differ."""

    num_compared: int
    deviations: tuple[Deviation, ...]


def compare(loaded: Sequence[Loaded], held: Sequence[Held], block_size: int) -> Comparison:
    """Compare prompt by prompt. A block that the prompt does not fill has bytes without meaning, so it is left out."""
    owners = {
        fingerprint: f"the bytes of prompt {number}, group {group}, position {position}"
        for number, prompt in enumerate(held)
        for group, table in enumerate(prompt.groups)
        for position, fingerprint in table.items()
    }
    num_compared, found = 0, []
    for number, (ours, theirs) in enumerate(zip(loaded, held, strict=True)):
        for group, position, got, wanted in _pairs(ours, theirs, block_size):
            num_compared += 1
            if got != wanted:
                instead = owners.get(got, "bytes that no block of the single engine has")
                found.append(Deviation(number, group, position, instead))
    return Comparison(num_compared, tuple(found))


def _pairs(loaded: Loaded, held: Held, block_size: int) -> Iterator[tuple[int, int, str, str]]:
    """Group, position, and both fingerprints of every block that can be compared.

    Decode computes the last token itself, so the last block that it loads is the one of the token before.
    """
    last = (held.num_tokens - 2) // block_size
    num_full = held.num_tokens // block_size
    for group, (ours, theirs) in enumerate(zip(loaded.groups, held.groups, strict=True)):
        for position, fingerprint in enumerate(ours, last - len(ours) + 1):
            if position < num_full and position in theirs:
                yield group, position, fingerprint, theirs[position]
