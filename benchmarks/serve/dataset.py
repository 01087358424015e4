"""Conversations with lengths like ShareGPT's, in its file format, of words that are one token each.

The lengths are drawn from log-normal distributions, within the limits of vLLM's own reader. What is left has the means
of the run that this benchmark repeats: 215 tokens in, 194 out. Real conversations differ in shape:
whoever has the data set gives it instead.
"""

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

MEAN_INPUT_TOKENS = 215
MEAN_OUTPUT_TOKENS = 194
MIN_TOKENS = 4
MAX_INPUT_TOKENS = 1024
MAX_TOKENS = 2048
"""Of prompt and answer together."""
MEDIAN_INPUT_TOKENS = 152
MEDIAN_OUTPUT_TOKENS = 142
"""Of the distributions before the limits."""
INPUT_SIGMA = 1.1
OUTPUT_SIGMA = 0.8


class Lengths(NamedTuple):
    """Of one request, in tokens."""

    input: int
    output: int


def draw(count: int, seed: int, scale: float = 1.0) -> list[Lengths]:
    """Lengths of requests; the same for the same arguments. ``scale`` shortens answers, for machines that are slow."""
    generator = random.Random(seed)
    found: list[Lengths] = []
    while len(found) < count:
        lengths = Lengths(
            round(generator.lognormvariate(math.log(MEDIAN_INPUT_TOKENS), INPUT_SIGMA)),
            round(generator.lognormvariate(math.log(MEDIAN_OUTPUT_TOKENS * scale), OUTPUT_SIGMA)),
        )
        if min(lengths) >= MIN_TOKENS and lengths.input <= MAX_INPUT_TOKENS and sum(lengths) <= MAX_TOKENS:
            found.append(lengths)
    return found


def words(model: Path, count: int = 1000) -> list[str]:
    """Words that the model's tokenizer takes for one token each."""
    vocabulary: dict[str, int] = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"]
    return [word for word in sorted(vocabulary, key=vocabulary.__getitem__) if word.isalpha()][:count]


def write(path: Path, requests: Sequence[Lengths], vocabulary: Sequence[str], seed: int) -> None:
    """A file as ``vllm bench serve --dataset-name sharegpt`` reads it."""
    generator = random.Random(seed)

    def text(num_tokens: int) -> str:
        return " ".join(generator.choices(vocabulary, k=num_tokens))

    conversations = [
        {
            "id": f"{seed}-{number}",
            "conversations": [
                {"from": "human", "value": text(lengths.input)},
                {"from": "gpt", "value": text(lengths.output)},
            ],
        }
        for number, lengths in enumerate(requests)
    ]
    path.write_text(json.dumps(conversations))
