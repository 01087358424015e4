"""Writes the data of the lm-eval tasks: ``python -m benchmarks.accuracy.tasks``.

Every run writes the same documents, compressed. The task files (``lm_eval_tasks/*.yaml``) are written by hand and name
the data by its path from the repository's root.
"""

import gzip
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.accuracy.puzzles import FULL, SLIDING, PuzzleMaker, Start, Vocabulary

FOLDER = Path(__file__).resolve().parent / "lm_eval_tasks"
LAYER_TYPES = (SLIDING,) * 5 + (FULL,)
NUM_HEADS = 2
WINDOW = 128

LENGTHS = (200, 2000)
CHOICE_LENGTHS = (200, 700)
"""Log probabilities of a whole prompt are slow on a CPU."""
SHORT_LENGTHS = (140, 400)
"""For the positive controls: here every block of a full-attention group holds entries that an answer needs."""
NUM_ANSWERS, NUM_LONG_ANSWERS, NUM_CHOICE_WORDS = 24, 48, 6
NUM_CHOICES = 4

Document = dict[str, Any]


def vocabulary() -> Vocabulary:
    """The words of the committed model."""
    return Vocabulary(LAYER_TYPES, NUM_HEADS)


def _length(maker: PuzzleMaker, bounds: tuple[int, int]) -> int:
    return int(maker.generator.integers(*bounds))


def chains(maker: PuzzleMaker, family: str, num_answers: int, lengths: tuple[int, int] = LENGTHS) -> Iterator[Document]:
    """Endless documents with one chain each."""
    while True:
        num_tokens = _length(maker, lengths)
        puzzle = maker.puzzle(num_tokens, [maker.start(family)], num_answers)
        start, *answer = puzzle.chains[0].words
        text = maker.vocabulary.text
        yield {"prompt": text([*puzzle.prompt, start]), "answer": text(answer), "num_tokens": num_tokens}


def shared_prompts(maker: PuzzleMaker) -> Iterator[Document]:
    """Endless documents of which three in a row differ only in their last word: what a prefix cache is for."""
    while True:
        num_tokens = _length(maker, LENGTHS)
        puzzle = maker.puzzle(num_tokens, [maker.start(family) for family in ("far", "near", "mix")], NUM_ANSWERS)
        text = maker.vocabulary.text
        for start, *answer in (chain.words for chain in puzzle.chains):
            yield {"prompt": text([*puzzle.prompt, start]), "answer": text(answer), "num_tokens": num_tokens}


def choices(maker: PuzzleMaker) -> Iterator[Document]:
    """Endless documents that offer some chains of which one is right; the others take a wrong turn somewhere."""
    words = maker.vocabulary
    while True:
        num_tokens = _length(maker, CHOICE_LENGTHS)
        start = maker.start("mix")
        puzzle = maker.puzzle(num_tokens, [start], NUM_CHOICE_WORDS)
        first, *right = puzzle.chains[0].words
        offered = [_derailed(maker, start, right) for _ in range(NUM_CHOICES)]
        gold = int(maker.generator.integers(NUM_CHOICES))
        offered[gold] = right
        prompt = words.text([*puzzle.prompt, first])
        yield {"prompt": prompt, "choices": [words.text(o) for o in offered], "gold": gold, "num_tokens": num_tokens}


def _derailed(maker: PuzzleMaker, start: Start, right: list[int]) -> list[int]:
    """The chain up to some step, and other symbols from there on."""
    turn = int(maker.generator.integers(len(right)))
    wrong = list(right)
    num_units = len(maker.vocabulary.units[start.family])
    for step in range(turn, len(right)):
        unit = (start.unit + step + 1) % num_units
        other = [maker.vocabulary.chain_word(start.family, unit, symbol) for symbol in range(26)]
        other.remove(right[step])
        wrong[step] = int(maker.generator.choice(other))
    return wrong


DATA: dict[str, tuple[int, int, Callable[[PuzzleMaker], Iterator[Document]]]] = {
    "far": (1, 60, lambda maker: chains(maker, "far", NUM_ANSWERS)),
    "near": (2, 60, lambda maker: chains(maker, "near", NUM_LONG_ANSWERS)),
    "mix": (3, 60, lambda maker: chains(maker, "mix", NUM_ANSWERS)),
    "shared": (4, 60, shared_prompts),
    "choice": (5, 24, choices),
    "short_far": (6, 40, lambda maker: chains(maker, "far", NUM_ANSWERS, SHORT_LENGTHS)),
    "short_near": (7, 40, lambda maker: chains(maker, "near", NUM_LONG_ANSWERS, SHORT_LENGTHS)),
}
"""File name -> seed, number of documents, and where they come from."""


def documents(name: str) -> list[Document]:
    """The documents of one data file."""
    seed, num_documents, source = DATA[name]
    endless = source(PuzzleMaker(vocabulary(), WINDOW, seed))
    return [next(endless) for _ in range(num_documents)]


def data_path(name: str) -> Path:
    """Where a data file is."""
    return FOLDER / f"{name}.jsonl.gz"


def file_text(name: str) -> str:
    """What a data file unpacks to: a JSON object a line."""
    return "".join(json.dumps(document) + "\n" for document in documents(name))


def main() -> int:
    """Write all data files."""
    for name in DATA:
        path = data_path(name)
        path.write_bytes(gzip.compress(file_text(name).encode(), mtime=0))
        print(f"{path.name}: {DATA[name][1]} documents")
    return 0


if __name__ == "__main__":
    sys.exit(main())
