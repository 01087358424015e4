"""One prefill and one decode engine, driven by hand: what the end-to-end tests ask of them."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pd_transfer.core.outcomes import Level
from tests.stack.engines import DECODE_ROLE, PREFILL_ROLE, REPOSITORY, Engine, EngineSettings, running
from tests.stack.exactness import TOP_LOGPROBS, difference, generated, hand_off

SETTLE_SECONDS = 45.0
"""Longer than a lease lives after its last renewal: one whose grant was forged or swapped is nobody's to release."""
TINY_HYBRID = REPOSITORY / "tests" / "models" / "tiny_hybrid"


@dataclass(frozen=True)
class Pair:
    """Two engines that are up, and the folder of their logs."""

    prefill: Engine
    decode: Engine
    logs: Path

    def moved(self, prompt: Sequence[int], salt: str, **fields: Any) -> dict[str, Any]:
        """Prefill on one engine, decode on the other."""
        params = hand_off(self.prefill.url, prompt, cache_salt=salt)
        return self.decode.complete(prompt, cache_salt=salt, kv_transfer_params=params, **fields)

    def moved_first(self, prompt: Sequence[int], salt: str) -> list[dict[str, float]]:
        """Log probabilities of the first token, from moved KV."""
        return generated(self.moved(prompt, salt, max_tokens=1, logprobs=TOP_LOGPROBS))

    def single(self, prompt: Sequence[int], salt: str, **fields: Any) -> dict[str, Any]:
        """The same prompt on the prefill engine alone; a salt of its own keeps the KV apart."""
        return self.prefill.complete(prompt, cache_salt="single " + salt, **fields)

    def single_same_history(self, prompt: Sequence[int], salt: str) -> list[dict[str, float]]:
        """Log probabilities of the first token, from a single engine that computed the prompt in the same pieces.

        All tokens but the last one, then the last one by itself: what a hand-off does. On a CPU, results depend on how
        a prompt is cut, so this is the right oracle where chunking or caching cuts it.
        """
        reply = self.prefill.complete(
            prompt[:-1],
            cache_salt="same history " + salt,
            max_tokens=2,
            allowed_token_ids=[prompt[-1]],
            logprobs=TOP_LOGPROBS,
        )
        (top,) = generated(reply)[1:]
        if len(top) > TOP_LOGPROBS:
            # The token that was forced on the engine is listed beside the likeliest ones.
            del top[f"token_id:{prompt[-1]}"]
        return [top]

    def difference_at(self, prompt: Sequence[int], salt: str, num_tokens: int) -> float:
        """Largest difference over ``num_tokens`` generated tokens between moved KV and the single engine."""
        fields = {"max_tokens": num_tokens, "logprobs": TOP_LOGPROBS, "ignore_eos": True}
        got = generated(self.moved(prompt, salt, **fields))
        assert len(got) == num_tokens
        return difference(got, generated(self.single(prompt, salt, **fields)))


def gain(engine: Engine, act: Callable[[], object], expected: Mapping[str, float]) -> dict[str, float]:
    """What ``act`` added to an engine's counters, waiting until those named in ``expected`` have gained that much.

    Counters follow an answer by a moment. The caller asserts on the result.
    """
    before = engine.metrics()
    act()
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        after = engine.metrics()
        gained = {name: value - before.get(name, 0.0) for name, value in after.items()}
        if all(gained.get(name, 0.0) >= value for name, value in expected.items()) or time.monotonic() > deadline:
            return gained
        time.sleep(0.1)


TOKENS_VERIFIED = "pd_transfer:tokens_verified_total"
BYTES_VERIFIED = "pd_transfer:bytes_verified_total"


def outcome(name: str) -> str:
    """The metric that counts an outcome."""
    return f"pd_transfer:outcomes_total/{name}"


def held(metrics: Mapping[str, float]) -> dict[str, float]:
    """What an engine holds, and the share of its pool that is in use; only what is not zero."""
    levels = {name: value for name, value in metrics.items() if name.startswith("pd_transfer:held/")}
    assert len(levels) == len(Level), "an engine that has stepped says what it holds"
    levels["vllm:kv_cache_usage_perc"] = metrics["vllm:kv_cache_usage_perc"]
    return {name: value for name, value in levels.items() if value}


def assert_nothing_held(pair: Pair) -> None:
    """The ledger: no lease, admission, receive, transfer or quarantined block, and every block free on both engines.

    An idle engine does not step, so each is given a step to free what was released.
    """
    deadline = time.monotonic() + SETTLE_SECONDS
    for engine in (pair.prefill, pair.decode):
        engine.step()
        while left := held(engine.metrics()):
            assert time.monotonic() < deadline, f"{engine.name} still holds {left}"
            time.sleep(0.2)
            engine.step()


def same_settings(
    model: Path, *arguments: str, extra: Mapping[str, object] | None = None
) -> tuple[EngineSettings, EngineSettings]:
    """A prefill and a decode engine with the same arguments, a core each; ``extra`` configures decode alone."""
    return (
        EngineSettings(model, PREFILL_ROLE, "0", arguments=arguments),
        EngineSettings(model, DECODE_ROLE, "1", arguments=arguments, extra=extra or {}),
    )


@contextmanager
def running_pair(name: str, prefill: EngineSettings, decode: EngineSettings) -> Iterator[Pair]:
    """Start two engines, check the ledger after their use, and stop them whatever happens."""
    logs = REPOSITORY / "logs" / "e2e" / name
    pair = Pair(Engine("prefill", prefill, logs), Engine("decode", decode, logs), logs)
    with running(pair.prefill, pair.decode):
        pair.prefill.wait_ready()
        pair.decode.wait_ready()
        yield pair
        assert_nothing_held(pair)
