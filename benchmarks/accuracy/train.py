"""Trains the tiny hybrid model from scratch: ``python -m benchmarks.accuracy.train OUT --minutes 10``.

Writes a model that vLLM and transformers load (bf16, with its tokenizer), and ``training.json`` with the figures of
the run. What it takes to learn the look-ups at all: small batches, a curriculum that begins with four symbols, and a
start in which queries already lean towards the entries of their symbol. What it takes to make every head do its own:
in three of four samples all heads but the one that a chain word names see another sample's prompt.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, PreTrainedTokenizerFast

from benchmarks.accuracy.model import Shape, TinyHybrid
from benchmarks.accuracy.puzzles import FAMILIES, NUM_SYMBOLS, SPECIAL_WORDS, PuzzleMaker, Vocabulary
from benchmarks.accuracy.tasks import LAYER_TYPES, NUM_HEADS, WINDOW

LEARNING_RATE = 3e-3
ALIGNMENT = 0.5
FAMILY_SHARES = {"far": 0.2, "near": 0.45, "mix": 0.35}
HONEST_SHARE = 0.25
"""Samples in which every head sees its own prompt."""
GOAL = 0.9
REPORT_STEPS = 100


class Stage(NamedTuple):
    """A part of the curriculum, until a share of the time is over. A batch holds ``num_samples`` prompts."""

    until: float
    num_symbols: int
    lengths: tuple[int, int]
    num_samples: int
    num_chains: int
    num_words: int


# Chains are shorter than the symbols are many: one that meets a symbol again could be continued by copying itself.
CURRICULUM = (
    Stage(0.22, 4, (16, 28), 4, 20, 3),
    Stage(0.25, 8, (24, 48), 4, 16, 7),
    Stage(0.28, 16, (48, 80), 4, 8, 15),
    Stage(0.30, NUM_SYMBOLS, (70, 127), 4, 8, 24),
    Stage(0.38, NUM_SYMBOLS, (128, 255), 4, 8, 24),
    Stage(0.46, NUM_SYMBOLS, (256, 511), 3, 8, 24),
    Stage(0.60, NUM_SYMBOLS, (512, 1023), 2, 8, 24),
    Stage(math.inf, NUM_SYMBOLS, (1024, 2600), 2, 8, 24),
)
FIRST_FULL_STAGE = 3
LAST_GATED_STAGE = 3
"""Up to here a stage also ends when every family has reached the goal."""
REVIEW_SHARE = 0.25
"""Later batches that come from an earlier stage with all symbols."""


@dataclass(frozen=True)
class Batch:
    """See ``TinyHybrid.forward``; ``chains`` has the answers too, ``families`` a number for each chain."""

    prompts: Tensor
    chains: Tensor
    own: Tensor
    families: Tensor


def make_batch(maker: PuzzleMaker, stage: Stage) -> Batch:
    """Draw the samples of one step."""
    generator = maker.generator
    num_tokens = int(generator.integers(*stage.lengths))
    prompts, chains, families = [], [], []
    own = torch.zeros(
        len(LAYER_TYPES), stage.num_samples, NUM_HEADS, stage.num_chains, stage.num_words, dtype=torch.bool
    )
    for sample in range(stage.num_samples):
        numbers = generator.choice(len(FAMILIES), stage.num_chains, p=list(FAMILY_SHARES.values()))
        starts = [maker.start(FAMILIES[number]) for number in numbers]
        puzzle = maker.puzzle(num_tokens, starts, stage.num_words, stage.num_symbols)
        prompts.append(puzzle.prompt)
        chains.append([chain.words for chain in puzzle.chains])
        families.append(numbers)
        if generator.random() < HONEST_SHARE:
            own[:, sample] = True
        for index, chain in enumerate(puzzle.chains):
            for step, unit in enumerate(chain.units):
                own[unit.layer, sample, unit.head, index, step] = True
    return Batch(
        torch.from_numpy(np.array(prompts)),
        torch.tensor(chains),
        own.flatten(3),
        torch.from_numpy(np.array(families)),
    )


@torch.no_grad()
def initialize(model: TinyHybrid, vocabulary: Vocabulary, shape: Shape) -> None:
    """A start from which look-ups can be learned: words share codes for what they have in common."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2 and "embed" not in name:
            parameter.normal_(0, parameter.shape[1] ** -0.5)
        elif name.endswith(("q_norm.weight", "k_norm.weight")):
            parameter.fill_(0.3)
        elif "post_" in name:
            parameter.fill_(-0.5)
    codes = _embed(model, vocabulary, shape)
    for layer in model.layers:
        _align(layer.self_attn, *codes[layer.self_attn.is_full], codes["symbols"], shape)


def _embed(model: TinyHybrid, vocabulary: Vocabulary, shape: Shape) -> dict:
    width = shape.hidden_size

    def code(*sizes: int) -> Tensor:
        return torch.randn(*sizes, width) * width**-0.5

    embedding = model.embed_tokens.weight
    embedding.copy_(code(shape.vocabulary_size))
    codes: dict = {"symbols": code(NUM_SYMBOLS)}
    for is_full, first in ((True, vocabulary.first_global), (False, vocabulary.first_local)):
        kind, keys, values = code(1), code(NUM_SYMBOLS), code(NUM_SYMBOLS)
        codes[is_full] = keys, values
        pairs = (keys[:, None] + values[None] + kind) / math.sqrt(3) + 0.2 * code(NUM_SYMBOLS, NUM_SYMBOLS)
        embedding[first : first + NUM_SYMBOLS**2] = pairs.flatten(0, 1)
    for family, units in vocabulary.units.items():
        for unit in range(len(units)):
            first = vocabulary.chain_word(family, unit, 0)
            words = (codes["symbols"] + code(1)) / math.sqrt(2) + 0.2 * code(NUM_SYMBOLS)
            embedding[first : first + NUM_SYMBOLS] = words
    return codes


def _align(attention: torch.nn.Module, keys: Tensor, values: Tensor, symbols: Tensor, shape: Shape) -> None:
    """Let a chain word's query lean towards entries of its symbol, and what is written towards the entry's value."""
    size = shape.head_size
    for head in range(shape.num_query_heads):
        mine = slice(head * size, (head + 1) * size)
        shared = slice(head // shape.group_size * size, (head // shape.group_size + 1) * size)
        towards_key = attention.k_proj.weight[shared] @ keys.T @ symbols
        towards_value = symbols.T @ values @ attention.v_proj.weight[shared].T
        attention.q_proj.weight[mine] = ALIGNMENT * towards_key + (1 - ALIGNMENT) * attention.q_proj.weight[mine]
        attention.o_proj.weight[:, mine] = (
            ALIGNMENT * towards_value + (1 - ALIGNMENT) * attention.o_proj.weight[:, mine]
        )


class Training:
    """One run: the stage it is in, and how well each family is known by now."""

    def __init__(self, model: TinyHybrid, maker: PuzzleMaker) -> None:
        self.model = model
        self.maker = maker
        matrices = [p for name, p in model.named_parameters() if p.dim() == 2 and "embed" not in name]
        others = [p for name, p in model.named_parameters() if p.dim() != 2 or "embed" in name]
        groups = [{"params": matrices, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.98))
        self.stage = 0
        self.num_steps = 0
        self.num_tokens = 0
        self.known = torch.zeros(len(FAMILIES))

    def step(self, elapsed: float) -> float:
        """One step at a share of the whole time; answers the loss."""
        self._choose_stage(elapsed)
        rate = LEARNING_RATE * min(1, (self.num_steps + 1) / 100) * (0.02 + 0.49 * (1 + math.cos(math.pi * elapsed)))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        batch = make_batch(self.maker, self._draw_stage())
        inputs, wanted = batch.chains[..., :-1], batch.chains[..., 1:]
        logits = self.model(batch.prompts, inputs, batch.own)
        loss = functional.cross_entropy(logits.flatten(0, 2), wanted.flatten())
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.num_steps += 1
        self.num_tokens += batch.prompts.numel() + wanted.numel()
        self._remember((logits.argmax(-1) == wanted).float().mean(-1), batch.families)
        return loss.item()

    def _choose_stage(self, elapsed: float) -> None:
        while elapsed > CURRICULUM[self.stage].until or (self.stage <= LAST_GATED_STAGE and self.known.min() > GOAL):
            self.stage += 1
            self.known.zero_()

    def _draw_stage(self) -> Stage:
        is_late = self.stage > FIRST_FULL_STAGE + 1
        if is_late and self.maker.generator.random() < REVIEW_SHARE:
            return CURRICULUM[int(self.maker.generator.integers(FIRST_FULL_STAGE, self.stage))]
        return CURRICULUM[self.stage]

    def _remember(self, right: Tensor, families: Tensor) -> None:
        for number in range(len(FAMILIES)):
            if (mine := families == number).any():
                self.known[number] += 0.04 * (right[mine].mean() - self.known[number])


def steps(training: Training, minutes: float, num_threads: int) -> Iterator[tuple[float, float]]:
    """Train for some minutes of CPU time of each thread; yields the share of the time that is over, and the loss."""
    begin = time.process_time()
    while (elapsed := (time.process_time() - begin) / num_threads / 60 / minutes) < 1:
        yield elapsed, training.step(elapsed)


def transformers_config(shape: Shape) -> Gemma3TextConfig:
    """The same model for transformers and vLLM."""
    return Gemma3TextConfig(
        vocab_size=shape.vocabulary_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.mlp_size,
        num_hidden_layers=len(shape.layer_types),
        num_attention_heads=shape.num_query_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_size,
        sliding_window=shape.window,
        max_position_embeddings=shape.max_tokens,
        query_pre_attn_scalar=shape.query_scalar,
        layer_types=list(shape.layer_types),
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )


def to_transformers(model: TinyHybrid) -> Gemma3ForCausalLM:
    """The trained weights in transformers' own class."""
    theirs = Gemma3ForCausalLM(transformers_config(model.shape)).eval()
    state = {f"model.{name}": value for name, value in model.state_dict().items()}
    theirs.load_state_dict({**state, "lm_head.weight": model.embed_tokens.weight}, strict=True)
    theirs.generation_config.eos_token_id = 2
    return theirs


def save_tokenizer(vocabulary: Vocabulary, out: Path) -> None:
    """A tokenizer that splits at spaces, a token for each word."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    pad, bos, eos, unknown = SPECIAL_WORDS
    ids = {word: number for number, word in enumerate(vocabulary.words)}
    tokenizer = Tokenizer(models.WordLevel(vocab=ids, unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=bos,
        eos_token=eos,
        pad_token=pad,
        unk_token=unknown,
        clean_up_tokenization_spaces=False,
        model_max_length=8192,
    ).save_pretrained(out)


@torch.no_grad()
def accuracy(model: TinyHybrid, vocabulary: Vocabulary, num_tokens: int, num_samples: int = 10) -> dict[str, float]:
    """Share of chains of 24 words that are right as a whole, by family, when every right word is fed back."""
    found = {}
    for family in FAMILIES:
        maker = PuzzleMaker(vocabulary, WINDOW, seed=1)
        puzzles = [maker.puzzle(num_tokens, [maker.start(family)], 24) for _ in range(num_samples)]
        chains = torch.tensor([[puzzle.chains[0].words] for puzzle in puzzles])
        logits = model(torch.from_numpy(np.array([puzzle.prompt for puzzle in puzzles])), chains[..., :-1])
        found[family] = (logits.argmax(-1) == chains[..., 1:]).all(-1).float().mean().item()
    return found


def main() -> int:
    """Train and write the model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, default=10, help="CPU minutes of each thread")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    vocabulary = Vocabulary(LAYER_TYPES, NUM_HEADS)
    shape = Shape(LAYER_TYPES, vocabulary.size, WINDOW, NUM_HEADS)
    model = TinyHybrid(shape)
    initialize(model, vocabulary, shape)
    training = Training(model, PuzzleMaker(vocabulary, WINDOW, options.seed))
    begin = time.monotonic()
    for elapsed, loss in steps(training, options.minutes, options.threads):
        if training.num_steps % REPORT_STEPS == 0:
            known = " ".join(f"{family} {share:.2f}" for family, share in zip(FAMILIES, training.known, strict=True))
            print(
                f"{elapsed:4.0%} step {training.num_steps} stage {training.stage} loss {loss:.4f} {known}", flush=True
            )
    figures = {
        "seed": options.seed,
        "cpu_minutes": options.minutes,
        "threads": options.threads,
        "wall_seconds": round(time.monotonic() - begin),
        "steps": training.num_steps,
        "million_tokens": round(training.num_tokens / 1e6, 2),
        "chains_right": {length: accuracy(model, vocabulary, length) for length in (128, 512, 1024, 2000)},
    }
    options.out.mkdir(parents=True, exist_ok=True)
    to_transformers(model).to(torch.bfloat16).save_pretrained(options.out)
    save_tokenizer(vocabulary, options.out)
    (options.out / "training.json").write_text(json.dumps(figures, indent=1) + "\n")
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
