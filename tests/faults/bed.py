"""A prefill and a decode engine that faults are done to: short deadlines, small pools, fixed names and ports."""

import contextlib
import signal
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import requests

from tests.e2e.pair import TINY_HYBRID, held
from tests.faults.client import post
from tests.faults.link import Link, why_no_link
from tests.faults.stages import FOLDER_VARIABLE, Stages
from tests.faults.verdicts import Judgement, Oracle, Verdict, judge
from tests.stack.engines import (
    DECODE_ROLE,
    PREFILL_ROLE,
    REPOSITORY,
    Engine,
    EngineSettings,
    completion_body,
    free_port,
    transfer_config,
)
from tests.stack.exactness import TOP_LOGPROBS, generated, hand_off, random_prompt, tokens

HANDSHAKE_SECONDS = 2.0
BACKOFF_SECONDS = 0.5
REJECTION_SECONDS = 1.0
READ_SECONDS = 12.0
DRAIN_SECONDS = 2.0
LEASE_SECONDS = 1.0
LEASE_MAX_SECONDS = 20.0
SLACK_SECONDS = 15.0
"""What a busy machine of two cores may take for everything that has no deadline of its own."""

TRANSPORTS = {"cma": {}, "tcp": {"engine_config": "TLS=tcp"}}
POLICIES = ("recompute", "fail")
NUM_BLOCKS, MAX_TOKENS_LEN = 300, 1024
ENGINE_ARGUMENTS = (
    *("--block-size", "32", "--num-gpu-blocks-override", str(NUM_BLOCKS)),
    *("--max-model-len", str(MAX_TOKENS_LEN), "--max-num-batched-tokens", str(MAX_TOKENS_LEN)),
    *("--shutdown-timeout", "5"),
)
ANSWER_FIELDS: Mapping[str, Any] = {"logprobs": TOP_LOGPROBS, "ignore_eos": True}


@dataclass(frozen=True)
class Question:
    """A prompt under a salt of its own, and the answer that a single engine gave before."""

    prompt: tuple[int, ...]
    salt: str
    max_tokens: int
    oracle: Oracle = field(repr=False)

    def body(self, params: Mapping[str, Any] | None, **more: Any) -> dict[str, Any]:
        """The completion request; without params, decode computes the prompt."""
        fields = {**ANSWER_FIELDS, "max_tokens": self.max_tokens, "cache_salt": self.salt, **more}
        if params is not None:
            fields["kv_transfer_params"] = dict(params)
        return completion_body(self.prompt, **fields)


class Bed:
    """The two engines of one transport and policy; ``restart`` gives one of them another life.

    ``answer_seconds``: after this an answer is a hang: a handshake, a read that times out, its drain, the rebuild, and
    the computation. ``settle_seconds``: after this counters and ledger have to be right.
    """

    def __init__(
        self, transport: str, policy: str, link: Link | None = None, read_seconds: float = READ_SECONDS
    ) -> None:
        self.transport, self.policy = transport, policy
        self.read_seconds = read_seconds
        self.answer_seconds = HANDSHAKE_SECONDS + read_seconds + 2 * DRAIN_SECONDS + SLACK_SECONDS
        self.settle_seconds = LEASE_SECONDS + read_seconds + DRAIN_SECONDS + SLACK_SECONDS
        self.link = link
        self.logs = REPOSITORY / "logs" / "faults" / f"{transport}-{policy}"
        self.stages = Stages(self.logs / "stages")
        self.side_channel = (link.far_host if link else "127.0.0.1", free_port())
        self._settings = {"prefill": self._prefill_settings(), "decode": self._decode_settings()}
        self._engines: dict[str, Engine] = {}
        self._oracles: dict[tuple[int, int, int], Oracle] = {}
        self._num_questions = 0
        self._num_lives = 0

    def _extra(self, **more: Any) -> dict[str, Any]:
        extra = {
            "lease_unclaimed_seconds": LEASE_SECONDS,
            "lease_renewal_seconds": LEASE_SECONDS,
            "lease_max_seconds": LEASE_MAX_SECONDS,
            "handshake_seconds": HANDSHAKE_SECONDS,
            "backoff_seconds": BACKOFF_SECONDS,
            "rejection_seconds": REJECTION_SECONDS,
            "read_seconds": self.read_seconds,
            "drain_seconds": DRAIN_SECONDS,
            "nixl_backend_params": TRANSPORTS[self.transport],
            "insecure": self.link is not None,
        }
        return extra | more

    def _prefill_settings(self) -> EngineSettings:
        host, port = self.side_channel
        config = transfer_config(PREFILL_ROLE, self._extra(side_channel_host=host, side_channel_port=port), self.policy)
        settings = EngineSettings(
            TINY_HYBRID,
            arguments=ENGINE_ARGUMENTS,
            kv_transfer_config=config | {"engine_id": "prefill"},
            port=free_port(),
        )
        if self.link is None:
            return settings
        network = {"UCX_NET_DEVICES": self.link.far_device, "VLLM_HOST_IP": host}
        return replace(settings, environment=network, host=host, prefix=self.link.prefix)

    def _decode_settings(self) -> EngineSettings:
        config = transfer_config(DECODE_ROLE, self._extra(), self.policy)
        staged = {"kv_connector": "StagedConnector", "kv_connector_module_path": "tests.faults.staged"}
        environment = {FOLDER_VARIABLE: str(self.stages.folder)}
        if self.link is not None:
            environment["UCX_NET_DEVICES"] = self.link.near_device
        return EngineSettings(
            TINY_HYBRID,
            cores="1",
            arguments=ENGINE_ARGUMENTS,
            kv_transfer_config=config | staged | {"engine_id": "decode"},
            environment=environment,
            port=free_port(),
        )

    @property
    def prefill(self) -> Engine:
        """The engine that prefills, in its present life."""
        return self._engines["prefill"]

    @property
    def decode(self) -> Engine:
        """The engine that decodes, in its present life."""
        return self._engines["decode"]

    def start(self) -> None:
        """Start both engines at once. Raises StackError."""
        for name in self._settings:
            self._start(name)
        for engine in (self.prefill, self.decode):
            engine.wait_ready()
            self._warm_up(engine)

    def _start(self, name: str) -> Engine:
        self._num_lives += 1
        self._engines[name] = Engine(f"{name}-{self._num_lives}", self._settings[name], self.logs)
        return self._engines[name]

    def _warm_up(self, engine: Engine) -> None:
        # vLLM compiles at the first request for log probabilities; that is no part of a deadline.
        engine.complete(random_prompt(3), max_tokens=2, logprobs=TOP_LOGPROBS)

    def stop(self) -> None:
        """Stop both engines, whatever state they are in."""
        for engine in self._engines.values():
            engine.signal(signal.SIGCONT)
            engine.stop()

    def restart(self, name: str) -> Engine:
        """End an engine and start it anew, with the same name, settings and ports. Raises StackError."""
        self._engines[name].stop()
        engine = self._start(name).wait_ready()
        self._warm_up(engine)
        return engine

    def dead(self, patience_seconds: float = 0.0) -> list[str]:
        """The engines that do not serve; looked for until there is one, or patience ends."""
        deadline = time.monotonic() + patience_seconds
        while True:
            dead = [name for name, engine in self._engines.items() if engine.has_ended or not _is_healthy(engine)]
            if dead or time.monotonic() >= deadline:
                return dead
            time.sleep(0.1)

    def last_words(self, name: str) -> str:
        """The end of an engine's log."""
        return self._engines[name].log_tail(200)

    def question(self, num_tokens: int = 200, seed: int = 0, max_tokens: int = 4) -> Question:
        """A prompt and its answer. The same arguments give the same prompt, under another salt."""
        key = (num_tokens, seed, max_tokens)
        prompt = random_prompt(num_tokens, seed)
        if key not in self._oracles:
            self._oracles[key] = self._ask_single_engine(prompt, max_tokens)
        self._num_questions += 1
        return Question(tuple(prompt), f"question {self._num_questions}", max_tokens, self._oracles[key])

    def _ask_single_engine(self, prompt: list[int], max_tokens: int) -> Oracle:
        fields = {**ANSWER_FIELDS, "max_tokens": max_tokens}
        reply = self.prefill.complete(prompt, cache_salt=f"single {max_tokens}", **fields)
        forced = {**ANSWER_FIELDS, "max_tokens": 2, "allowed_token_ids": [prompt[-1]]}
        history = self.prefill.complete(prompt[:-1], cache_salt=f"same history {max_tokens}", **forced)
        top = generated(history)[1]
        if len(top) > TOP_LOGPROBS:
            # The token that was forced on the engine is listed beside the likeliest ones.
            del top[f"token_id:{prompt[-1]}"]
        return Oracle(tokens(reply), generated(reply), [top])

    def hand_off(self, question: Question) -> dict[str, Any]:
        """Run the prefill leg; what the router would carry to decode."""
        return hand_off(self.prefill.url, question.prompt, cache_salt=question.salt)

    def churn(self, num_prompts: int = 3) -> None:
        """Have other prompts take every block of prefill's pool that is not held: each takes more than a third."""
        for i in range(num_prompts):
            self._num_questions += 1
            salt = f"churn {self._num_questions}"
            self.prefill.complete(random_prompt(700, seed=1000 + i), max_tokens=1, cache_salt=salt)

    def reset_prefill_cache(self) -> None:
        """Have prefill forget its prefix cache and end all leases."""
        reply = requests.post(self.prefill.url + "/reset_prefix_cache?reset_external=true", timeout=SLACK_SECONDS)
        reply.raise_for_status()

    def metrics(self, engine: Engine) -> dict[str, float]:
        """An engine's metrics, after a step that publishes what was counted."""
        engine.step()
        return engine.metrics()

    def counters(self) -> dict[str, tuple[int, dict[str, float]]]:
        """Each engine's life and metrics."""
        return {name: (engine.pid, self.metrics(engine)) for name, engine in self._engines.items()}

    def leaks(self) -> dict[str, dict[str, float]]:
        """What the engines still hold when all leases and drains must be over."""
        deadline = time.monotonic() + self.settle_seconds
        while True:
            left = {name: held(metrics) for name, (_, metrics) in self.counters().items()}
            left = {name: levels for name, levels in left.items() if levels}
            if not left or time.monotonic() > deadline:
                return left
            time.sleep(0.05)

    def recovers(self) -> Judgement:
        """Whether the pair moves KV again: the last answer, which has to be exact and verified."""
        deadline = time.monotonic() + self.settle_seconds
        while True:
            question = self.question(num_tokens=70, seed=99)
            verified = self.decode.metrics().get(VERIFIED, 0.0)
            reply = post(self.decode.url, question.body(self.hand_off(question)), self.answer_seconds)
            judgement = judge(reply, question.oracle)
            if judgement.verdict is Verdict.EXACT:
                self.decode.step()
                if self.decode.metrics().get(VERIFIED, 0.0) > verified:
                    return judgement
                judgement = Judgement(Verdict.HANG, "no read is verified any more")
            if time.monotonic() > deadline:
                return judgement


VERIFIED = "pd_transfer:outcomes_total/receive_verified"


def _is_healthy(engine: Engine) -> bool:
    with contextlib.suppress(requests.RequestException):
        return requests.get(engine.url + "/health", timeout=SLACK_SECONDS).status_code == 200
    return False


@contextlib.contextmanager
def running_bed(transport: str, policy: str, read_seconds: float = READ_SECONDS) -> Iterator[Bed]:
    """Start a pair, and stop it whatever happens. Over TCP, prefill is behind a link where there can be one."""
    with contextlib.ExitStack() as stack:
        link = stack.enter_context(Link()) if transport == "tcp" and not why_no_link() else None
        bed = Bed(transport, policy, link, read_seconds)
        stack.callback(bed.stop)
        bed.start()
        yield bed
