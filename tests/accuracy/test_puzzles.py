"""The task generator: the committed data is what it writes, and a puzzle can be solved from its prompt alone."""

import gzip
import json
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.accuracy.puzzles import NUM_SYMBOLS, PuzzleMaker, Vocabulary
from benchmarks.accuracy.tasks import DATA, LAYER_TYPES, NUM_HEADS, WINDOW, data_path, documents, file_text, vocabulary
from tests.e2e.pair import TINY_HYBRID

FAMILY_OF_LETTER = {"f": "far", "n": "near", "m": "mix"}


def solve(prompt: str, num_answers: int) -> str:
    """The chain, found by reading the prompt as the model has to: a local entry counts only inside the window."""
    words = prompt.split()
    units = vocabulary().units[FAMILY_OF_LETTER[words[-1][0]]]
    answer = []
    for step in range(num_answers):
        at = len(prompt.split()) - 1 + step
        word = words[-1]
        unit, symbol = units[int(word[1:-1])], word[-1]
        if unit.is_full:
            seen = [w for w in words if len(w) == 2 and w.islower() and w[0] == symbol]
        else:
            window = words[max(0, at - WINDOW + 1) : at]
            seen = [w.lower() for w in window if len(w) == 2 and w.isupper() and w[0] == symbol.upper()]
        assert len(set(seen)) == 1, f"{symbol} has {seen} at step {step}"
        following = (units.index(unit) + 1) % len(units)
        words.append(f"{word[0]}{following}{seen[0][1]}")
        answer.append(words[-1])
    return " ".join(answer)


def answered_documents() -> Iterator[Any]:
    for name in DATA:
        if name != "choice":
            yield from (pytest.param(document, id=f"{name}-{i}") for i, document in enumerate(documents(name)[::10]))


@pytest.mark.parametrize("document", list(answered_documents()))
def test_a_document_can_be_solved_from_its_prompt(document):
    assert solve(document["prompt"], len(document["answer"].split())) == document["answer"]
    assert len(document["prompt"].split()) == document["num_tokens"]


@pytest.mark.parametrize("document", documents("choice"), ids=lambda document: str(document["num_tokens"]))
def test_one_choice_is_right(document):
    right = solve(document["prompt"], 6)
    assert [choice == right for choice in document["choices"]] == [i == document["gold"] for i in range(4)]


def test_a_missing_entry_is_noticed():
    document = documents("far")[0]
    words = document["prompt"].split()
    needed = words[-1][-1]
    without = [w for w in words[:-1] if not (len(w) == 2 and w.islower() and w[0] == needed)] + words[-1:]
    with pytest.raises(AssertionError):
        solve(" ".join(without), 24)


@pytest.mark.parametrize("name", DATA)
def test_the_committed_data_is_what_the_generator_writes(name):
    assert gzip.decompress(data_path(name).read_bytes()).decode() == file_text(name)


def test_the_vocabulary_is_the_committed_model_s():
    ours = vocabulary()
    ids = json.loads((TINY_HYBRID / "tokenizer.json").read_text())["model"]["vocab"]
    assert {word: number for number, word in enumerate(ours.words)} == ids
    config = json.loads((TINY_HYBRID / "config.json").read_text())
    assert config["vocab_size"] == ours.size
    assert (tuple(config["layer_types"]), config["sliding_window"]) == (LAYER_TYPES, WINDOW)


def test_shared_prompts_share_all_but_the_last_word():
    prompts = [document["prompt"].rpartition(" ") for document in documents("shared")]
    for first, second, third in zip(prompts[::3], prompts[1::3], prompts[2::3], strict=True):
        assert first[0] == second[0] == third[0]
        assert len({first[2], second[2], third[2]}) == 3


def test_the_same_seed_draws_the_same_puzzle():
    words = Vocabulary(LAYER_TYPES, NUM_HEADS)
    one, two, other = (PuzzleMaker(words, WINDOW, seed) for seed in (1, 1, 2))
    draws = [maker.puzzle(300, [maker.start("mix")], 24).prompt.tolist() for maker in (one, two, other)]
    assert draws[0] == draws[1] != draws[2]


def test_local_entries_stand_where_their_last_look_up_sees_them():
    maker = PuzzleMaker(vocabulary(), WINDOW, 5)
    for _ in range(20):
        puzzle = maker.puzzle(500, [maker.start("near"), maker.start("mix")], 48)
        for chain in puzzle.chains:
            for step, (unit, symbol) in enumerate(zip(chain.units, chain.symbols, strict=True)):
                if not unit.is_full:
                    distance = len(puzzle.prompt) + step - puzzle.local_positions[symbol]
                    assert 0 < distance < WINDOW


def test_an_easy_puzzle_uses_few_symbols():
    maker = PuzzleMaker(vocabulary(), WINDOW, 6)
    puzzle = maker.puzzle(24, [maker.start("mix")] * 5, 3, num_symbols=4)
    assert len({symbol for chain in puzzle.chains for symbol in chain.symbols}) <= 4
    assert (puzzle.global_positions >= 0).sum() == 4
    assert NUM_SYMBOLS == 26
