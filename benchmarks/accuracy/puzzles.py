"""What the tiny hybrid model is trained to do, and what lm-eval asks of it: chains of look-ups in long prompts.

A prompt is a list of words; a word is one token.

    "ab"    an entry of the global table, key and value in one word; entries lie all over the prompt
    "AB"    an entry of the local table; it counts only inside the sliding window. Contradicting entries, called
            stale, stand beyond the window
    ". , ;" fillers
    "n3q"   a chain word, and the prompt's last word: family, unit, symbol

A *unit* is one KV head of one layer. A chain word says which unit has to look its symbol up next, and the answer is the
chain: the next word has the symbol that was found and the next unit of the family. ``far`` chains go through the units
of the full-attention layers, ``near`` chains through those of the sliding layers, ``mix`` chains through all. One wrong
look-up derails the rest, so an answer is right only if every unit saw every entry that it needed.
"""

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

SYMBOLS = string.ascii_lowercase
NUM_SYMBOLS = len(SYMBOLS)
SPECIAL_WORDS = ("<pad>", "<bos>", "<eos>", "<unk>")
FILLERS = tuple(".,;:-_|/")
VOCABULARY_MULTIPLE = 64
SLIDING, FULL = "sliding_attention", "full_attention"
FAMILIES = ("far", "near", "mix")
EDGE_SHARE = 0.15
"""How many of the local entries stand exactly on the far edge of the window of their last look-up."""

Ids = npt.NDArray[np.int64]


class Unit(NamedTuple):
    """One KV head of one layer."""

    layer: int
    head: int
    is_full: bool


class Start(NamedTuple):
    """Where a chain begins: its family, and the family's unit that looks up first."""

    family: str
    unit: int


@dataclass(frozen=True)
class Chain:
    """A start word and the words that follow; ``units[i]`` looks ``symbols[i]`` up to find word ``i + 1``."""

    words: list[int]
    units: list[Unit]
    symbols: list[int]


@dataclass(frozen=True)
class Puzzle:
    """A prompt without its last word, chains that may follow it, and where the entries of both tables stand."""

    prompt: Ids
    chains: list[Chain]
    local_positions: Ids
    global_positions: Ids


class Vocabulary:
    """Words and their ids, for a model with these layers."""

    def __init__(self, layer_types: Sequence[str], num_heads: int) -> None:
        units = [Unit(layer, head, kind == FULL) for layer, kind in enumerate(layer_types) for head in range(num_heads)]
        far, near = [unit for unit in units if unit.is_full], [unit for unit in units if not unit.is_full]
        self.units: Mapping[str, list[Unit]] = {"far": far, "near": near, "mix": near + far}
        words = [*SPECIAL_WORDS, *FILLERS]
        pairs = [key + value for key in SYMBOLS for value in SYMBOLS]
        self.first_filler = len(SPECIAL_WORDS)
        self.first_global = len(words)
        self.first_local = self.first_global + len(pairs)
        words += pairs + [pair.upper() for pair in pairs]
        self.first_chain: dict[str, int] = {}
        # The order of the families decides the ids, and the committed model knows these.
        for family in FAMILIES:
            self.first_chain[family] = len(words)
            words += [f"{family[0]}{unit}{symbol}" for unit in range(len(self.units[family])) for symbol in SYMBOLS]
        self.words = words
        self.size = -(-len(words) // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE

    def chain_word(self, family: str, unit: int, symbol: int) -> int:
        """The id of a chain word."""
        return self.first_chain[family] + unit * NUM_SYMBOLS + symbol

    def text(self, ids: Sequence[int] | Ids) -> str:
        """Words, with spaces between them: what the tokenizer takes apart again."""
        return " ".join(self.words[token] for token in ids)


def follow(vocabulary: Vocabulary, start: Start, symbol: int, num_answers: int, tables: Mapping[bool, Ids]) -> Chain:
    """The chain from a start; ``tables`` is found by ``Unit.is_full`` and gives each symbol's value."""
    family, index = start
    units = vocabulary.units[family]
    chain = Chain([vocabulary.chain_word(family, index, symbol)], [], [])
    for _ in range(num_answers):
        unit = units[index]
        chain.units.append(unit)
        chain.symbols.append(symbol)
        symbol = int(tables[unit.is_full][symbol])
        index = (index + 1) % len(units)
        chain.words.append(vocabulary.chain_word(family, index, symbol))
    return chain


class PuzzleMaker:
    """Draws puzzles; the same for the same seed."""

    def __init__(self, vocabulary: Vocabulary, window: int, seed: int) -> None:
        self.vocabulary = vocabulary
        self.window = window
        self.generator = np.random.default_rng(seed)

    def start(self, family: str) -> Start:
        """A random unit of a family."""
        return Start(family, int(self.generator.integers(len(self.vocabulary.units[family]))))

    def puzzle(
        self, num_tokens: int, starts: Sequence[Start], num_answers: int, num_symbols: int = NUM_SYMBOLS
    ) -> Puzzle:
        """A prompt of ``num_tokens``, of which the last (a chain's start word) is left out, and a chain for each start.

        All chains may follow the same prompt: the local entries that any of them needs are in the window when it does.
        Fewer symbols make an easier puzzle, for the beginning of a training.
        """
        symbols = self.generator.permutation(NUM_SYMBOLS)[:num_symbols]
        tables = {False: self._cycle(symbols), True: self._cycle(symbols)}
        chains = [
            follow(self.vocabulary, start, int(self.generator.choice(symbols)), num_answers, tables) for start in starts
        ]
        prompt = np.full(num_tokens - 1, -1)
        local = self._place_local(prompt, tables[False], symbols, chains)
        everywhere = self._place_global(prompt, tables[True], symbols)
        self._fill(prompt)
        return Puzzle(prompt, chains, local, everywhere)

    def _cycle(self, symbols: Ids) -> Ids:
        """A random table in which the symbols form one cycle, so that a chain meets all of them before any again."""
        table = np.full(NUM_SYMBOLS, -1)
        order = self.generator.permutation(symbols)
        table[order] = np.roll(order, -1)
        return table

    def _place_local(self, prompt: Ids, table: Ids, symbols: Ids, chains: Sequence[Chain]) -> Ids:
        """Put each local entry where it is still visible at its last look-up; return the positions."""
        last_step = np.zeros(NUM_SYMBOLS, dtype=np.int64)
        for chain in chains:
            for step, (unit, symbol) in enumerate(zip(chain.units, chain.symbols, strict=True)):
                if not unit.is_full:
                    last_step[symbol] = max(last_step[symbol], step)
        # The query of step i is at position len(prompt) + i and sees the window - 1 positions before it.
        edge = np.maximum(len(prompt) + last_step - self.window + 1, 0)
        positions = np.full(NUM_SYMBOLS, -1)
        for symbol in sorted(symbols, key=lambda symbol: -edge[symbol]):
            first = int(edge[symbol])
            free = first + np.flatnonzero(prompt[first:] < 0)
            on_edge = first > 0 and free[0] == first and self.generator.random() < EDGE_SHARE
            place = first if on_edge else int(self.generator.choice(free))
            prompt[place] = self.vocabulary.first_local + symbol * NUM_SYMBOLS + table[symbol]
            positions[symbol] = place
        return positions

    def _place_global(self, prompt: Ids, table: Ids, symbols: Ids) -> Ids:
        """Spread the global entries evenly, one in each of equal parts of the prompt; return the positions."""
        positions = np.full(NUM_SYMBOLS, -1)
        bounds = np.linspace(0, len(prompt), len(symbols) + 1).astype(int)
        for part, symbol in enumerate(self.generator.permutation(symbols)):
            first, end = bounds[part], max(bounds[part + 1], bounds[part] + 1)
            free = first + np.flatnonzero(prompt[first:end] < 0)
            place = int(self.generator.choice(free if len(free) else np.flatnonzero(prompt < 0)))
            prompt[place] = self.vocabulary.first_global + symbol * NUM_SYMBOLS + table[symbol]
            positions[symbol] = place
        return positions

    def _fill(self, prompt: Ids) -> None:
        """Fillers where nothing stands, and stale local entries among them beyond the window."""
        free = np.flatnonzero(prompt < 0)
        prompt[free] = self.vocabulary.first_filler + self.generator.integers(len(FILLERS), size=len(free))
        beyond = free[free <= len(prompt) - self.window]
        share = self.generator.uniform(0.1, 0.9)
        stale = beyond[self.generator.random(len(beyond)) < share]
        prompt[stale] = self.vocabulary.first_local + self.generator.integers(NUM_SYMBOLS**2, size=len(stale))
