"""Runs one lm-eval task against one server, in this process and without the internet."""

import os

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}

import contextlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import datasets
import lm_eval
import transformers
from lm_eval.tasks import TaskManager

from benchmarks.accuracy.tasks import FOLDER
from benchmarks.accuracy.verdict import Answer, Sample, TaskRun

GENERATION = "generate_until"
CONTEXT_TOKENS = 8192

logging.getLogger("lm_eval").setLevel(logging.ERROR)
datasets.disable_progress_bars()


class Evaluator:
    """Knows the tasks, lm-eval's own and ours, and one model's tokenizer. What lm-eval prints goes to a log."""

    def __init__(self, model: Path, log: Path) -> None:
        self._model = model
        self._log = log
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(model)
        self._tasks = TaskManager(include_path=str(FOLDER))

    def run(self, url: str, task: str, concurrency: int, limit: int | None = None) -> TaskRun:
        """Ask a server for every document of a task. The server calls its model ``model``.

        Given texts are asked about one by one, whatever ``concurrency`` is: a text's log probability depends on what is
        computed beside it, which is a matter of time.
        """
        chosen = list(self._tasks.load([task])["tasks"].values())
        if any(each.OUTPUT_TYPE != GENERATION for each in chosen):
            concurrency = 1
        arguments = {
            "model": "model",
            "base_url": url + "/v1/completions",
            "tokenizer": str(self._model),
            "tokenizer_backend": "huggingface",
            "tokenized_requests": False,
            "num_concurrent": concurrency,
            "max_length": CONTEXT_TOKENS,
            "max_retries": 1,
        }
        with self._log.open("a") as log, contextlib.redirect_stderr(log), contextlib.redirect_stdout(log):
            found = lm_eval.simple_evaluate(
                "local-completions",
                arguments,
                tasks=chosen,
                limit=limit,
                task_manager=self._tasks,
                log_samples=True,
                bootstrap_iters=0,
            )
        assert found is not None  # only ranks other than the first get nothing
        return self._task_run(task, found)

    def _task_run(self, task: str, found: Mapping[str, Any]) -> TaskRun:
        is_generation = found["configs"][task]["output_type"] == GENERATION
        samples = {sample["doc_id"]: self._sample(sample, is_generation) for sample in found["samples"][task]}
        scores = {
            name.removesuffix(",none").replace(",", " "): float(value)
            for name, value in found["results"][task].items()
            if "," in name and "stderr" not in name and isinstance(value, int | float)
        }
        return TaskRun(task, is_generation, scores, samples)

    def _sample(self, sample: Mapping[str, Any], is_generation: bool) -> Sample:
        prompts = tuple(str(arguments[0]) for arguments in sample["arguments"])
        answers = tuple(_answer(answers[0]) for answers in sample["resps"])
        num_tokens = sum(len(self._tokenizer(prompt).input_ids) for prompt in prompts) if is_generation else 0
        return Sample(prompts, answers, num_tokens)


def _answer(raw: object) -> Answer:
    """A generated text, or the pair of a log probability and whether it was the likeliest text."""
    if isinstance(raw, str):
        return raw
    assert isinstance(raw, tuple | list)
    return float(raw[0]), bool(raw[1])
