"""When a run of the sweep is valid: every sample equal, and as many tokens loaded as the prompts say."""

import pytest

from benchmarks.accuracy.verdict import (
    Moved,
    Sample,
    TaskRun,
    different_samples,
    judge,
    judge_control,
    largest_logprob_difference,
)


def texts(*answers: str, score: float = 1.0, num_tokens: int = 100, task: str = "far") -> TaskRun:
    samples = {number: Sample((f"prompt {number}",), (text,), num_tokens) for number, text in enumerate(answers)}
    return TaskRun(task, True, {"exact_match": score}, samples)


def choice(*answers: tuple[float, bool]) -> TaskRun:
    return TaskRun("choice", False, {"acc": 1.0}, {0: Sample(("p",) * len(answers), answers, 0)})


def test_equal_samples_and_a_right_counter_are_valid():
    verdict = judge(texts("a b", "c d"), texts("a b", "c d"), Moved(198, 4096, 0))
    assert verdict.faults == ()
    assert (verdict.num_equal, verdict.num_expected) == (2, 198)


def test_what_decode_has_in_its_cache_need_not_be_loaded():
    verdict = judge(texts("a", "b"), texts("a", "b"), Moved(134, 4096, 64))
    assert verdict.faults == ()
    assert verdict.num_expected == 134


@pytest.mark.parametrize("num_tokens", [0, 99, 197, 199])
def test_a_counter_that_says_something_else_is_a_fault(num_tokens):
    (fault, *_) = judge(texts("a", "b"), texts("a", "b"), Moved(num_tokens, 0, 0)).faults
    assert f"{num_tokens} tokens loaded, the prompts say 198" in fault


def test_a_run_that_moves_nothing_shows_nothing():
    faults = judge(texts("a", "b"), texts("a", "b"), Moved(0, 0, 198)).faults
    assert faults == ("nothing was moved",)


def test_no_samples_are_a_fault():
    assert "no samples" in judge(texts(), texts(), Moved(0, 0, 0)).faults


def test_a_different_sample_is_named_with_its_first_different_word():
    verdict = judge(texts("a b c", "d e f"), texts("a b c", "d x f"), Moved(198, 1, 0))
    assert verdict.different == (1,)
    assert verdict.faults == ("sample 1: from word 1 on 'x f', the single engine says 'e f'",)


def test_the_same_accuracy_does_not_excuse_a_different_sample():
    assert judge(texts("a", "b", score=0.5), texts("b", "b", score=0.5), Moved(198, 1, 0)).different == (0,)


def test_many_differences_are_counted():
    faults = judge(texts(*"abcdef"), texts(*"zzzzzz"), Moved(594, 1, 0)).faults
    assert faults[-1] == "and 3 more samples differ"


@pytest.mark.parametrize("side", ["single", "moved"])
def test_a_sample_that_only_one_side_answered_differs(side):
    whole, part = texts("a", "b"), texts("a")
    pair = (whole, part) if side == "moved" else (part, whole)
    assert different_samples(*pair) == (1,)
    assert "not answered by" in judge(*pair, Moved(198, 1, 0)).faults[0]


def test_another_prompt_differs():
    other = TaskRun("far", True, {"exact_match": 1.0}, {0: Sample(("another",), ("a",), 100)})
    assert different_samples(texts("a"), other) == (0,)


def test_choices_load_nothing():
    run = choice((-1.0, True), (-9.0, False))
    assert judge(run, run, Moved(0, 0, 0)).faults == ()
    assert judge(run, run, Moved(99, 1, 0)).faults


@pytest.mark.parametrize(
    ("moved", "is_equal"),
    [
        (((-1.01, True), (-9.0, False)), True),
        (((-1.2, True), (-9.0, False)), False),
        (((-1.0, False), (-9.0, False)), False),
        (((-1.0, True),), False),
    ],
)
def test_log_probabilities_may_round_but_not_decide_otherwise(moved, is_equal):
    assert (different_samples(choice((-1.0, True), (-9.0, False)), choice(*moved)) == ()) == is_equal


def test_a_different_choice_differs_even_within_rounding():
    assert different_samples(choice((-1.00, False), (-1.01, False)), choice((-1.01, False), (-1.00, False))) == (0,)


def test_the_largest_rounding_is_shown():
    assert largest_logprob_difference(choice((-1.0, True)), choice((-1.25, True))) == 0.25
    assert largest_logprob_difference(texts("a"), texts("b")) == 0.0


@pytest.mark.parametrize(
    ("score", "text", "needs_group", "is_good"),
    [
        (0.59, "x", True, True),
        (0.60, "x", True, False),
        (1.0, "a", True, False),
        (1.0, "a", False, True),
        (1.0, "x", False, False),
    ],
)
def test_damage_has_to_show_where_it_must_and_only_there(score, text, needs_group, is_good):
    assert (judge_control(texts("a"), texts(text, score=score), needs_group) == ()) == is_good
