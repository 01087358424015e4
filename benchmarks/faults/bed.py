"""A prefill and a decode engine with one connector or the other, which differ in nothing else."""

import contextlib
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from typing import Any

import requests

from benchmarks.accuracy.puzzles import PuzzleMaker
from benchmarks.accuracy.tasks import WINDOW, vocabulary
from tests.e2e.pair import TINY_HYBRID
from tests.faults.bed import ENGINE_ARGUMENTS, NUM_BLOCKS, Bed, Question
from tests.faults.client import LeavingClient, post
from tests.faults.verdicts import PER_REQUEST, Reply, Verdict, judge
from tests.stack.engines import (
    DECODE_ROLE,
    PREFILL_ROLE,
    Engine,
    EngineSettings,
    completion_body,
    free_port,
    transfer_config,
)
from tests.stack.exactness import HAND_OFF_REQUEST


class Connector(StrEnum):
    """Whose connector both engines of a bed have."""

    BUILTIN = "builtin"
    OURS = "ours"


POLICY = "recompute"
LEASE_SECONDS = 6
"""Both: the built-in connector renews six times in a lease and counts whole seconds."""
HANDSHAKE_SECONDS, READ_SECONDS, DRAIN_SECONDS = 5.0, 8.0, 2.0
"""Ours only. The built-in connector waits five seconds for a handshake, and has no deadline for a read."""
ANSWER_SECONDS = 30.0
"""After this an answer is a hang."""
HELD_SECONDS = LEASE_SECONDS + 6.0
"""After this, blocks that are in use are held by nobody's wish."""
RECOVERY_SECONDS = 20.0
"""After this, a pair that moves no KV will not do so without a restart."""
STEP_SECONDS = 10.0
ANSWER_TOKENS = 12
"""A chain of so many look-ups goes through every KV head of every layer once."""

TRANSPORTS: dict[str, dict[str, str]] = {"tcp": {"UCX_TLS": "tcp"}, "cma": {}}
HOST = "127.0.0.1"
_USAGE = "vllm:kv_cache_usage_perc"
_OUTCOME = "pd_transfer:outcomes_total/"
_READS = {Connector.BUILTIN: "vllm:nixl_xfer_time_seconds_count", Connector.OURS: _OUTCOME + "receive_verified"}
_BUILTIN_COUNTERS = {
    "vllm:nixl_num_failed_transfers_total": "failed transfers",
    "vllm:nixl_num_kv_expired_reqs_total": "leases expired",
    "vllm:nixl_num_notifications_after_expiry_total": "notifications after expiry",
}


def connector_config(connector: Connector, role: str) -> dict[str, Any]:
    """What ``--kv-transfer-config`` takes."""
    if connector is Connector.BUILTIN:
        extra: dict[str, Any] = {"kv_lease_duration": LEASE_SECONDS}
        names = {"kv_connector": "NixlConnector", "kv_connector_module_path": "benchmarks.faults.unpinned"}
        return transfer_config(role, extra, POLICY) | names
    extra = {
        "lease_unclaimed_seconds": LEASE_SECONDS,
        "lease_renewal_seconds": LEASE_SECONDS,
        "handshake_seconds": HANDSHAKE_SECONDS,
        "read_seconds": READ_SECONDS,
        "drain_seconds": DRAIN_SECONDS,
    }
    return transfer_config(role, extra, POLICY)


def engine_settings(connector: Connector, transport: str, role: str, cores: str, side_channel: int) -> EngineSettings:
    """One engine. Both connectors take the side channel's address from the same variables."""
    return EngineSettings(
        TINY_HYBRID,
        cores=cores,
        arguments=ENGINE_ARGUMENTS,
        kv_transfer_config=connector_config(connector, role),
        environment={
            "VLLM_NIXL_SIDE_CHANNEL_HOST": HOST,
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_channel),
            **TRANSPORTS[transport],
        },
        port=free_port(),
    )


def named(settings: EngineSettings, engine_id: str) -> EngineSettings:
    """The same engine with a configured id."""
    return replace(settings, kv_transfer_config={**(settings.kv_transfer_config or {}), "engine_id": engine_id})


def counted(connector: Connector, metrics: Mapping[str, float]) -> dict[str, int]:
    """What an engine has counted that tells of faults, by short names."""
    if connector is Connector.BUILTIN:
        return {short: int(metrics.get(name, 0.0)) for name, short in _BUILTIN_COUNTERS.items()}
    found = {name.removeprefix(_OUTCOME): int(value) for name, value in metrics.items() if name.startswith(_OUTCOME)}
    return {name: count for name, count in found.items() if name in PER_REQUEST or name == "lease_expired"}


def puzzle_prompt(num_tokens: int, seed: int) -> list[int]:
    """A prompt that asks for look-ups all over itself, so that an answer from other KV is another text."""
    maker = PuzzleMaker(vocabulary(), WINDOW, seed * 1_000_003 + num_tokens)
    puzzle = maker.puzzle(num_tokens, [maker.start("mix")], ANSWER_TOKENS)
    return [*puzzle.prompt.tolist(), puzzle.chains[0].words[0]]


class SidedBed(Bed):
    """The bed of the fault matrix with either connector, driven as a router and an operator would drive it."""

    def __init__(self, connector: Connector, transport: str) -> None:
        self.connector, self._tls = connector, transport
        super().__init__(f"side-by-side-{connector}-{transport}", POLICY)
        self.answer_seconds, self.settle_seconds = ANSWER_SECONDS, HELD_SECONDS
        self.has_greeted = False
        self.is_broken = False
        self._keeps_ids = False
        self._level: dict[str, float] = {}

    def _prefill_settings(self) -> EngineSettings:
        return engine_settings(self.connector, self._tls, PREFILL_ROLE, "0", self.side_channel[1])

    def _decode_settings(self) -> EngineSettings:
        return engine_settings(self.connector, self._tls, DECODE_ROLE, "1", free_port())

    def _start(self, name: str) -> Engine:
        if not self._keeps_ids:
            self._settings[name] = named(self._settings[name], f"{name}-life-{self._num_lives + 1}")
        self.has_greeted = False
        self._level[name] = 0.0
        return super()._start(name)

    def question(self, num_tokens: int = 200, seed: int = 0, max_tokens: int = ANSWER_TOKENS) -> Question:
        """A puzzle and a single engine's answer. The same arguments give the same puzzle, under another salt."""
        key, prompt = (num_tokens, seed, max_tokens), puzzle_prompt(num_tokens, seed)
        if key not in self._oracles:
            self._oracles[key] = self._ask_single_engine(prompt, max_tokens)
        self._num_questions += 1
        return Question(tuple(prompt), f"question {self._num_questions}", max_tokens, self._oracles[key])

    def restart_with_same_id(self, name: str) -> None:
        """End an engine and start it anew, under the id and address that it had. Raises StackError."""
        self._keeps_ids = True
        try:
            self.restart(name)
        finally:
            self._keeps_ids = False

    def heal(self, except_for: Sequence[str] = ()) -> None:
        """Start anew what is dead, and both engines when they have stopped moving KV. Raises StackError."""
        if self.is_broken:
            self.stop()
            self.start()
        else:
            for name in self.dead():
                if name not in except_for:
                    self.restart(name)
        self.is_broken = False

    def kill(self, name: str) -> None:
        """kill -9 to an engine's whole process group."""
        engine = self._engines[name]
        engine.signal(signal.SIGKILL)
        engine.stop()

    @contextlib.contextmanager
    def paused(self, name: str) -> Iterator[None]:
        """SIGSTOP to an engine's whole process group; SIGCONT at the end."""
        engine = self._engines[name]
        engine.signal(signal.SIGSTOP)
        try:
            yield
        finally:
            engine.signal(signal.SIGCONT)

    def ask(self, body: Mapping[str, Any]) -> Reply:
        """Decode's answer, within the deadline."""
        self.has_greeted = True
        return post(self.decode.url, body, self.answer_seconds)

    def ask_prefill(self, prompts: Sequence[Sequence[int]], salt: str) -> Mapping[str, Any]:
        """The params that prefill answers a list of prompts with: one set for all. Raises ValueError without any."""
        body = {**completion_body([], max_tokens=1, cache_salt=salt), "prompt": [list(prompt) for prompt in prompts]}
        reply = post(self.prefill.url, body | {"kv_transfer_params": HAND_OFF_REQUEST}, self.answer_seconds)
        params = reply.body.get("kv_transfer_params") if isinstance(reply.body, dict) else None
        if not params:
            raise ValueError(f"prefill answered without a hand-off: {reply}")
        return dict(params)

    def ask_and_leave(self, body: Mapping[str, Any]) -> None:
        """A client that hangs up before it has been heard: decode is paused meanwhile."""
        with self.paused("decode"):
            client = LeavingClient(self.decode.url, body)
            client.leave()

    def forget(self, name: str) -> None:
        """Empty an engine's prefix cache, as other prompts would in time. Raises ValueError when it cannot be."""
        deadline = time.monotonic() + STEP_SECONDS
        while True:
            reply = requests.post(self._engines[name].url + "/reset_prefix_cache", timeout=STEP_SECONDS)
            reply.raise_for_status()
            if reply.json()["success"]:
                return
            if time.monotonic() > deadline:
                raise ValueError(f"{name} holds blocks, and cannot forget its prefix cache")
            time.sleep(0.1)

    def figures(self, name: str) -> dict[str, float] | None:
        """An engine's metrics after a step, which an idle engine needs to publish them; None when it does not serve."""
        engine = self._engines[name]
        post(
            engine.url, completion_body([7, 8, 9], max_tokens=1, cache_salt=f"step {time.monotonic_ns()}"), STEP_SECONDS
        )
        try:
            return engine.metrics()
        except requests.RequestException:
            return None

    def num_reads(self) -> int:
        """How many times decode has received KV in its present life."""
        return int((self.figures("decode") or {}).get(_READS[self.connector], 0.0))

    def counts(self) -> dict[str, tuple[int, dict[str, int], int]]:
        """Each engine that serves: its life, what it has counted, and its number of reads."""
        found = {}
        for name, engine in self._engines.items():
            metrics = self.figures(name)
            if metrics is not None:
                reads = int(metrics.get(_READS[self.connector], 0.0))
                found[name] = (engine.pid, counted(self.connector, metrics), reads)
        return found

    def wait_free(self, name: str, seconds: float = HELD_SECONDS) -> tuple[float, int]:
        """Wait until an engine's blocks in use are those of before; the seconds waited, and the blocks still held."""
        began = time.monotonic()
        while True:
            metrics = self.figures(name)
            waited = time.monotonic() - began
            if metrics is None:
                return waited, 0
            usage = metrics.get(_USAGE, 0.0)
            self._level[name] = min(self._level[name], usage)
            num_held = round((usage - self._level[name]) * (NUM_BLOCKS - 1))
            if num_held == 0 or waited > seconds:
                return waited, num_held
            time.sleep(0.1)

    def still_held(self) -> dict[str, int]:
        """The blocks that each engine holds when every lease must be over; what is found once is not found again."""
        held = {}
        for name in self._engines:
            _, num_blocks = self.wait_free(name)
            if num_blocks:
                held[name] = num_blocks
                self._level[name] += num_blocks / (NUM_BLOCKS - 1)
        return held

    def why_no_recovery(self) -> str:
        """Hand new prompts over until the KV of one is moved and its answer exact; else what is wrong in the end."""
        deadline = time.monotonic() + RECOVERY_SECONDS
        while True:
            question = self.question(num_tokens=70, seed=99)
            before = self.num_reads()
            try:
                reply = self.ask(question.body(self.hand_off(question)))
            except (requests.RequestException, ValueError) as error:
                return f"prefill does not answer: {error!r}"
            judgement = judge(reply, question.oracle)
            why = "no KV is moved any more" if judgement.verdict is Verdict.EXACT else f"answers: {judgement.verdict}"
            if judgement.verdict is Verdict.EXACT and self._has_read_more_than(before):
                return ""
            if time.monotonic() > deadline:
                return why

    def _has_read_more_than(self, before: int, seconds: float = 2.0) -> bool:
        deadline = time.monotonic() + seconds
        while self.num_reads() <= before:
            if time.monotonic() > deadline:
                return False
        return True


@contextlib.contextmanager
def running_sided_bed(connector: Connector, transport: str) -> Iterator[SidedBed]:
    """Start a pair, and stop it whatever happens. Raises StackError."""
    bed = SidedBed(connector, transport)
    try:
        bed.start()
        yield bed
    finally:
        bed.stop()
