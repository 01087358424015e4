"""One life of a pair, or of a single engine: started, asked by ``vllm bench serve`` at each concurrency, stopped."""

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from benchmarks.pairs import BLOCK_SIZE_TOKENS, CONTENDERS, MODEL, OURS, OtherWork, Pair
from benchmarks.serve import dataset
from tests.stack.engines import REPOSITORY, Engine, EngineSettings, Proxy, ServerProcess, StackError, complete, running
from tests.stack.exactness import random_prompt

SINGLE = "single"
TITLES = {SINGLE: "single engine, both cores", **{name: each.title for name, each in CONTENDERS.items()}}
ARGUMENTS = ("--no-enable-prefix-caching",)
"""As in the run that this benchmark repeats: no prompt is found in a cache."""
PULLS = {
    OURS.name: "pd_transfer:outcomes_total/receive_verified",
    **dict.fromkeys(set(CONTENDERS) - {OURS.name}, "vllm:nixl_xfer_time_seconds_count"),
}
"""The counter of pulls that ended well, in decode's metrics."""


@dataclass(frozen=True)
class Plan:
    """``num_prompts`` by concurrency. ``output_scale`` shortens answers."""

    num_prompts: dict[int, int]
    output_scale: float = 1.0
    run_seconds: float = 170.0
    """A run that takes longer, with its client's start, is stopped and has no figures."""


FULL = Plan({1: 12, 10: 100, 32: 128}, output_scale=0.5)
QUICK = Plan({1: 3, 10: 10}, output_scale=0.2)


NUM_WARMUPS = 2
FIGURES = (
    "duration",
    "completed",
    "failed",
    "total_input_tokens",
    "total_output_tokens",
    "request_throughput",
    "output_throughput",
    "total_token_throughput",
    *(f"{which}_{what}_ms" for what in ("ttft", "tpot", "itl") for which in ("mean", "median", "p99")),
)
"""Of vLLM's result, by its names."""


Figures = dict[str, float]


class Run(msgspec.Struct, frozen=True):
    """One run of the client. ``figures`` are as vLLM names them; None when it did not end in time.

    pulls: pulls that ended well on decode; 0 with a single engine.
    """

    concurrency: int
    figures: Figures | None
    pulls: int


class Life(msgspec.Struct, frozen=True):
    """other_work: niced processes beside it, in percent of a core."""

    contender: str
    round: int
    start_seconds: float
    runs: list[Run]
    other_work: float


def measure(name: str, number: int, plan: Plan, logs: Path, report: Callable[[str], None]) -> Life:
    """Start what is called ``name``, ask it at every concurrency, stop it."""
    other_work, begin = OtherWork(), time.monotonic()
    with _served(name, logs) as (front, decode):
        start_seconds = time.monotonic() - begin
        report(f"ready after {start_seconds:.0f} s")
        runs = []
        for concurrency, num_prompts in plan.num_prompts.items():
            report(f"{num_prompts} prompts, {concurrency} at a time")
            before = _pulls(name, decode)
            figures = _ask(front, _conversations(plan, number, concurrency, logs), concurrency, plan, logs)
            runs.append(Run(concurrency, figures, _pulls(name, decode) - before))
    return Life(name, number, start_seconds, runs, other_work.percent())


@contextlib.contextmanager
def _served(name: str, logs: Path) -> Iterator[tuple[ServerProcess, Engine]]:
    """What clients ask, and the engine that answers. A single engine has both cores and no proxy in front."""
    if name == SINGLE:
        settings = EngineSettings(MODEL, cores="0-1", arguments=("--block-size", str(BLOCK_SIZE_TOKENS), *ARGUMENTS))
        with running(engine := Engine(SINGLE, settings, logs)):
            _warm(engine.wait_ready())
            yield engine, engine
        return
    with Pair(CONTENDERS[name], logs, arguments=ARGUMENTS).running() as (prefill, decode):
        _warm(prefill)
        _warm(decode)
        with running(proxy := Proxy([prefill], [decode], logs)):
            proxy.wait_ready()
            # The first hand-off is also the handshake, and no part of what is measured.
            complete(proxy.url, random_prompt(500), max_tokens=4)
            yield proxy, decode


def _warm(engine: Engine) -> None:
    engine.complete(random_prompt(300), max_tokens=4)


def _conversations(plan: Plan, number: int, concurrency: int, logs: Path) -> Path:
    """A file of conversations that no other run of a contender sees, and every contender does."""
    path, seed = logs / f"conversations-{number}-{concurrency}.json", 1000 * number + concurrency
    requests = dataset.draw(plan.num_prompts[concurrency], seed, plan.output_scale)
    dataset.write(path, requests, dataset.words(MODEL), seed)
    return path


def _pulls(name: str, decode: Engine) -> int:
    return int(decode.metrics().get(PULLS[name], 0)) if name in PULLS else 0


def client_command(url: str, conversations: Path, num_prompts: int, concurrency: int, result: Path) -> list[str]:
    """vLLM's own client, as a user would call it."""
    return [
        *(str(Path(sys.executable).parent / "vllm"), "bench", "serve", "--base-url", url, "--model", "model"),
        *("--tokenizer", str(MODEL), "--dataset-name", "sharegpt", "--dataset-path", str(conversations)),
        *("--num-prompts", str(num_prompts), "--max-concurrency", str(concurrency), "--ignore-eos", "--disable-tqdm"),
        *("--num-warmups", str(NUM_WARMUPS), "--save-result", "--result-dir", str(result.parent)),
        *("--result-filename", result.name),
    ]


def _ask(
    front: ServerProcess, conversations: Path, concurrency: int, plan: Plan, logs: Path
) -> dict[str, float] | None:
    """What vLLM's client measures; None when it was stopped. Raises StackError when it fails."""
    result, log_path = logs / f"{front.name}-result.json", logs / f"{front.name}-client.log"
    result.unlink(missing_ok=True)
    command = client_command(front.url, conversations, plan.num_prompts[concurrency], concurrency, result)
    with log_path.open("w") as log:
        try:
            subprocess.run(
                command, cwd=REPOSITORY, stdout=log, stderr=subprocess.STDOUT, timeout=plan.run_seconds, check=True
            )
        except subprocess.TimeoutExpired:
            return None
        except subprocess.CalledProcessError as error:
            raise StackError(f"{' '.join(command)}\n{log_path.read_text()[-2000:]}") from error
    return {name: value for name, value in json.loads(result.read_text()).items() if name in FIGURES}
