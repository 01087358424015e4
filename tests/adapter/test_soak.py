"""Everything at once, at random: two engines that serve each other over a bad network, for clients that come and go."""

import contextlib
import random

import pytest

from pd_transfer.core.params import Address
from tests.adapter.fake_model import continuation, prompt_of
from tests.adapter.geometry import HYBRID, MIXED_BLOCKS, SINGLE

pytestmark = pytest.mark.vllm

SHORT = {
    "lease_unclaimed_seconds": 0.4,
    "lease_renewal_seconds": 0.4,
    "handshake_seconds": 0.15,
    "backoff_seconds": 0.05,
    "read_seconds": 0.3,
    "drain_seconds": 0.3,
}


class Soak:
    """Random clients, random trouble."""

    def __init__(self, lab, seed):
        self.lab, self.rng = lab, random.Random(seed)
        rng = self.rng
        self.policy = rng.choice(["fail", "recompute"])
        common = {
            "layers": rng.choice([HYBRID, SINGLE, MIXED_BLOCKS]),
            "num_ranks": rng.choice([1, 1, 2]),
            "policy": self.policy,
            "extra": SHORT,
        }
        self.engines = [
            lab.engine(
                name,
                **common,
                num_blocks=rng.choice([360, 700]),
                pipelined=rng.random() < 0.5,
                max_step_tokens=rng.choice([64, 200, 512]),
                max_requests=rng.choice([3, 16]),
                prefix_caching=rng.random() < 0.8,
                retention=rng.choice([0, None]),
            )
            for name in ("a", "b")
        ]
        self.prompts = {}
        self.aborted = set()
        self.handed = []

    def prompt(self):
        """Some continue earlier ones."""
        rng, earlier = self.rng, list(self.prompts.values())
        kept = rng.choice(earlier)[: rng.randint(0, 120)] if earlier and rng.random() < 0.5 else []
        return kept + prompt_of(rng.randint(1, 120), seed=rng.randint(0, 10**6))

    def prefill(self):
        engine = self.rng.choice(self.engines)
        name = f"p{len(self.prompts)}"
        self.prompts[name] = self.prompt()
        engine.add(name, self.prompts[name], {"do_remote_decode": True}, max_tokens=1)
        self.handed.append((engine, name))

    def decode(self):
        done = [(engine, name) for engine, name in self.handed if engine.results[name].finish_reason]
        if not done:
            return
        there, name = self.rng.choice(done[-4:])
        (here,) = [engine for engine in self.engines if engine is not there]
        params, prompt = there.results[name].params, self.prompts[name]
        if self.rng.random() < 0.1:
            # A list prompt's second item arrives with the first one's params.
            prompt = self.prompt()
        request_id = f"d{len(self.prompts)}"
        self.prompts[request_id] = prompt
        here.add(request_id, prompt, params, max_tokens=self.rng.randint(1, 12))

    def abort(self):
        engine = self.rng.choice(self.engines)
        living = [name for name, request in engine.scheduler.requests.items() if not request.is_finished()]
        if living:
            name = self.rng.choice(living)
            self.aborted.add(name)
            engine.abort(name)

    def preempt(self):
        # vLLM complains when others than running requests hold blocks; by then the running ones are preempted.
        with contextlib.suppress(RuntimeError):
            self.rng.choice(self.engines).scheduler.reset_prefix_cache(reset_running_requests=True)

    def trouble(self):
        """One thing goes wrong, or well again."""
        self.rng.choice(
            [
                self.hold_reads,
                self.lab.fabric.let_go,
                self.lab.fabric.let_go,
                self.slow_reads,
                self.fail_reads,
                self.cut,
                self.lab.network.hold,
                self.lose_messages,
                self.rng.choice(self.engines).end_leases,
            ]
        )()

    def hold_reads(self):
        self.lab.fabric.hold_new = True

    def slow_reads(self):
        self.lab.fabric.latency_polls = self.rng.choice([0, 0, 5])

    def fail_reads(self):
        for read in self.lab.fabric.reads:
            if self.rng.random() < 0.5:
                read.fail("somebody pulled a cable")

    def cut(self):
        self.lab.network.cut(Address(*self.rng.choice(self.engines).address))

    def lose_messages(self):
        while self.lab.network.held and self.rng.random() < 0.3:
            self.lab.network.drop()
        self.lab.network.release()

    def step(self):
        for engine in self.engines:
            if engine.scheduler.has_requests():
                engine.step()

    def run(self, num_turns):
        chances = [(self.prefill, 0.25), (self.decode, 0.3), (self.abort, 0.06), (self.preempt, 0.03)]
        for _ in range(num_turns):
            for act, chance in chances:
                if self.rng.random() < chance:
                    act()
            if self.rng.random() < 0.08:
                self.trouble()
            self.step()
        self.lab.network.release()
        self.lab.fabric.let_go()
        living = [(engine, name) for engine in self.engines for name in engine.results if name not in self.aborted]
        self.lab.run(lambda: all(engine.results[name].finish_reason for engine, name in living))
        return living


@pytest.mark.parametrize("seed", range(10))
def test_every_answer_is_right_and_nothing_is_held(lab, seed):
    soak = Soak(lab, seed)
    for engine, name in soak.run(250):
        result, prompt = engine.results[name], soak.prompts[name]
        if result.finish_reason == "error":
            assert soak.policy == "fail"
            assert result.tokens == []
            continue
        split = name.startswith("p") and len(prompt) > 1
        known = prompt[:-1] if split else prompt
        assert result.tokens == continuation(known, len(result.tokens))
        assert result.tokens
    outcomes = sum((engine.outcomes for engine in soak.engines), start=type(soak.engines[0].outcomes)())
    assert outcomes["receive_verified"]
