"""What a run of a task through prefill and decode is worth, compared with the single engine's. No I/O."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

Answer = str | tuple[float, bool]
"""A generated text; or the log probability of a given text, and whether every token of it was the likeliest."""

LOGPROB_TOLERANCE = 0.05
"""Of a whole text: where its prompt is cut otherwise (``--one-single-engine``), a CPU rounds bf16 differently."""
CONTROL_LIMIT = 0.6
"""The accuracy that a damaged group must not reach on the tasks that need it."""
MAX_FAULTS = 3


@dataclass(frozen=True)
class Sample:
    """One document: what was asked, what came back, and for generated texts how many tokens the prompts have."""

    prompts: tuple[str, ...]
    answers: tuple[Answer, ...]
    num_prompt_tokens: int

    @property
    def num_transferable(self) -> int:
        """Tokens whose KV can come from prefill: all but the last of each prompt, which decode itself computes."""
        return self.num_prompt_tokens - len(self.prompts) if self.num_prompt_tokens else 0


@dataclass(frozen=True)
class TaskRun:
    """One task on one server. ``scores`` has lm-eval's figures by name."""

    task: str
    is_generation: bool
    scores: Mapping[str, float]
    samples: Mapping[int, Sample]

    @property
    def score(self) -> float:
        """The first of lm-eval's figures: the accuracy."""
        return next(iter(self.scores.values()))

    @property
    def num_transferable(self) -> int:
        """Tokens that decode has to load, as the prompts say; none when one engine answers alone."""
        return sum(sample.num_transferable for sample in self.samples.values())


@dataclass(frozen=True)
class Moved:
    """What the decode engines' counters gained: loaded from prefill and verified, and found in decode's own cache."""

    num_tokens: int
    num_bytes: int
    num_cached: int


@dataclass(frozen=True)
class Verdict:
    """One row of the table. Without faults it is valid."""

    task: str
    single: TaskRun
    moved_run: TaskRun
    moved: Moved
    different: tuple[int, ...]
    faults: tuple[str, ...] = field(default=())

    @property
    def num_equal(self) -> int:
        """Samples whose answers are the single engine's."""
        return len(self.single.samples) - len(self.different)

    @property
    def num_expected(self) -> int:
        """Tokens that had to be loaded: those of the prompts, less those that decode had already."""
        return self.moved_run.num_transferable - self.moved.num_cached


def judge(single: TaskRun, moved_run: TaskRun, moved: Moved) -> Verdict:
    """Compare sample by sample, and the counter with what the prompts say."""
    different = different_samples(single, moved_run)
    verdict = Verdict(single.task, single, moved_run, moved, different)
    faults = [f"sample {number}: {_contrast(single, moved_run, number)}" for number in different[:MAX_FAULTS]]
    if len(different) > MAX_FAULTS:
        faults.append(f"and {len(different) - MAX_FAULTS} more samples differ")
    if not single.samples:
        faults.append("no samples")
    if moved.num_tokens != verdict.num_expected:
        faults.append(
            f"the counter says {moved.num_tokens} tokens loaded, the prompts say {verdict.num_expected}: "
            "decode computed prompts by itself, or loaded some twice"
        )
    if single.is_generation and not moved.num_tokens:
        faults.append("nothing was moved")
    return Verdict(single.task, single, moved_run, moved, different, tuple(faults))


def different_samples(single: TaskRun, moved_run: TaskRun) -> tuple[int, ...]:
    """The documents that were not asked on both sides, asked otherwise, or answered otherwise."""
    numbers = sorted(single.samples.keys() | moved_run.samples.keys())
    return tuple(number for number in numbers if not _equal(single.samples.get(number), moved_run.samples.get(number)))


def _equal(single: Sample | None, moved: Sample | None) -> bool:
    if single is None or moved is None or single.prompts != moved.prompts:
        return False
    pairs = itertools.zip_longest(single.answers, moved.answers)
    return _choice(single.answers) == _choice(moved.answers) and all(_equal_answers(*pair) for pair in pairs)


def _equal_answers(single: Answer | None, moved: Answer | None) -> bool:
    if isinstance(single, tuple) and isinstance(moved, tuple):
        return single[1] == moved[1] and abs(single[0] - moved[0]) <= LOGPROB_TOLERANCE
    return single == moved


def _choice(answers: Sequence[Answer]) -> int | None:
    """The likeliest of several given texts; None for generated texts."""
    logprobs = [answer[0] for answer in answers if isinstance(answer, tuple)]
    return logprobs.index(max(logprobs)) if logprobs else None


def largest_logprob_difference(single: TaskRun, moved_run: TaskRun) -> float:
    """Over all given texts; 0 when texts were generated."""
    return max(
        (
            abs(ours[0] - theirs[0])
            for number, sample in single.samples.items()
            if number in moved_run.samples
            for ours, theirs in zip(sample.answers, moved_run.samples[number].answers, strict=False)
            if isinstance(ours, tuple) and isinstance(theirs, tuple)
        ),
        default=0.0,
    )


def _contrast(single: TaskRun, moved_run: TaskRun, number: int) -> str:
    """Both answers from their first difference on."""
    ours, theirs = (run.samples.get(number) for run in (moved_run, single))
    if ours is None or theirs is None:
        return "not answered by " + ("prefill/decode" if ours is None else "the single engine")
    if ours.prompts != theirs.prompts:
        return "the two sides were asked different things"
    for mine, right in itertools.zip_longest(ours.answers, theirs.answers):
        if not _equal_answers(right, mine):
            if isinstance(mine, str) and isinstance(right, str):
                first, mine_rest, right_rest = _after_common_words(mine, right)
                return f"from word {first} on {mine_rest!r}, the single engine says {right_rest!r}"
            return f"{mine}, the single engine says {right}"
    return "another choice"


def _after_common_words(ours: str, theirs: str, num_shown: int = 4) -> tuple[int, str, str]:
    mine, right = ours.split(), theirs.split()
    common = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(mine, right, strict=False)))
    return common, *(" ".join(words[common : common + num_shown]) for words in (mine, right))


def judge_control(single: TaskRun, damaged: TaskRun, needs_group: bool) -> tuple[str, ...]:
    """What is wrong with a positive control: damage that does not show where it must, or shows where it cannot."""
    if needs_group and damaged.score >= CONTROL_LIMIT:
        return (f"{single.task} still reaches {damaged.score:.2f}: this check would not notice such damage",)
    if not needs_group and different_samples(single, damaged):
        return (f"{single.task} changed although it does not need the damaged group",)
    return ()
