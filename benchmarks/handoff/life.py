"""One life of a pair: two engines are started, everything is measured once, and they are stopped."""

import contextlib
import http.client
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from benchmarks.handoff import client
from benchmarks.handoff.connectors import STEP_HOOK, Calls, Note, read_notes
from benchmarks.pairs import OURS, Contender, OtherWork, Pair
from tests.stack.engines import Engine, running
from tests.stack.exactness import random_prompt

GREETING_SECONDS = 2.0
"""More than a decode engine takes to greet the peers of its settings."""
GAP_SECONDS = 0.25
"""How long after an event the times between tokens are held to belong to it."""
STREAM_TOKENS = 6000
LOST = (OSError, http.client.HTTPException, client.RequestError)


@dataclass(frozen=True)
class Plan:
    """How much is measured. Lengths are tokens: whole blocks and one more, so that decode computes one token."""

    repeats: dict[int, int]
    """Hand-offs to an idle decode engine, by length of the prompt."""
    num_loaded: int
    num_pulls: int
    contact_tokens: int = 1025
    loaded_tokens: int = 2049
    num_streams: int = 4
    pull_tokens: int = 8161
    phase_seconds: float = 55.0
    """A phase ends early after so long, with what it has."""


FULL = Plan(repeats={129: 40, 513: 40, 2049: 30, 8161: 10}, num_loaded=40, num_pulls=12)
QUICK = Plan(repeats={129: 3, 513: 3, 2049: 2}, num_loaded=3, num_pulls=2, pull_tokens=4097, phase_seconds=30.0)


class Sample(msgspec.Struct, frozen=True):
    """One hand-off, times in seconds.

    kind: "idle", "loaded", "pull" (while one stream runs), "contact" or "greeted" (the first between two engines).
    floor: first token of the same request from decode's own cache, asked for right after it; 0 where none was.
    pull: from allocation to ``finished_recving``, as decode's scheduler saw it.
    steps: of decode's scheduler, from the request to its pull's end.
    hooks: CPU time of the engine's and the worker's thread in each hook of the connector meanwhile.
    """

    kind: str
    num_tokens: int
    seconds: float
    floor: float
    pull: float
    steps: int
    hooks: dict[str, float]


class Life(msgspec.Struct, frozen=True):
    """What was measured in one life. ``gaps`` are seconds between a stream's tokens, by what happened meanwhile.

    other_work: niced processes beside it, in percent of a core.
    """

    contender: str
    round: int
    start_seconds: float
    samples: list[Sample]
    gaps: dict[str, list[float]]
    failures: list[str]
    other_work: float


class _Asked(msgspec.Struct):
    """A hand-off that was made; decode's notes say the rest."""

    kind: str
    name: str
    num_tokens: int
    seconds: float
    floor: float


class Recorder:
    """Makes hand-offs between two engines and keeps what came of them."""

    def __init__(self, seed: int) -> None:
        self.asked: list[_Asked] = []
        self.failures: list[str] = []
        self._seeds = itertools.count(1 + 10_000 * seed)

    def prompt(self, num_tokens: int) -> list[int]:
        """One that no engine has seen."""
        return random_prompt(num_tokens, seed=next(self._seeds))

    def hand_off(self, engines: tuple[Engine, Engine], kind: str, num_tokens: int, is_floored: bool = True) -> float:
        """Hand one prompt off, and ask for its floor if wanted; when decode was asked, on the client's clock.

        What fails is kept as a failure.
        """
        prefill, decode = engines
        prompt, name = self.prompt(num_tokens), f"{kind}-{len(self.asked)}"
        asked = _Asked(kind, name, num_tokens, 0.0, 0.0)
        begin = time.perf_counter()
        try:
            handed = client.hand_off(prefill.url, decode.url, prompt, name)
            begin, asked.seconds = begin + handed.prefill_seconds, handed.seconds
            if is_floored:
                # Decode was idle for as long before the hand-off.
                time.sleep(min(handed.prefill_seconds, 1.0))
                asked.floor = client.local(decode.url, prompt, f"floor-{name}")
        except LOST as error:
            self.failures.append(f"{name}: {type(error).__name__}: {error}"[:300])
        else:
            self.asked.append(asked)
        return begin

    def samples(self, notes: Sequence[Note]) -> list[Sample]:
        """Hand-offs with what decode's connector noted of them. One without a note was no pull: it is a failure."""
        found = []
        for asked in self.asked:
            mine = {note.half: note for note in notes if note.request.startswith(f"cmpl-{asked.name}-")}
            if "scheduler" not in mine:
                self.failures.append(f"{asked.name}: decode computed the prompt itself")
                continue
            hooks = {name: calls.seconds for note in mine.values() for name, calls in note.hooks.items()}
            steps = mine["scheduler"].hooks.get(STEP_HOOK, Calls()).count
            pull = mine["scheduler"].seconds
            found.append(Sample(asked.kind, asked.num_tokens, asked.seconds, asked.floor, pull, steps, hooks))
        return found


def measure(contender: Contender, number: int, plan: Plan, logs: Path, report: Callable[[str], None]) -> Life:
    """Start a pair, measure, stop it. Decode is started twice: the second time it may greet prefill at its start."""
    notes = logs / f"{contender.name}-notes.jsonl"
    notes.unlink(missing_ok=True)
    pair, recorder, other_work = Pair(contender, logs, notes), Recorder(number), OtherWork()
    begin = time.monotonic()
    with contextlib.ExitStack() as stack:
        prefill, first = pair.start_prefill(), pair.start_decode()
        stack.enter_context(running(prefill, first))
        _warm(prefill.wait_ready())
        _warm(first.wait_ready())
        start_seconds = time.monotonic() - begin
        report(f"ready after {start_seconds:.0f} s")
        recorder.hand_off((prefill, first), "contact", plan.contact_tokens)
        first.stop()
        peers = {"peers": [f"127.0.0.1:{pair.side_channel_port}"]} if contender is OURS else {}
        decode = pair.start_decode(peers)
        stack.enter_context(running(decode))
        _warm(decode.wait_ready())
        time.sleep(GREETING_SECONDS)
        engines = prefill, decode
        recorder.hand_off(engines, "greeted" if peers else "contact", plan.contact_tokens)
        report("idle hand-offs")
        _idle(recorder, engines, plan)
        report(f"hand-offs while {plan.num_streams} streams run")
        _loaded(recorder, engines, plan)
        report("one stream while pulls land")
        found = _gaps(recorder, engines, plan)
    samples = recorder.samples(read_notes(notes))
    return Life(contender.name, number, start_seconds, samples, found, recorder.failures, other_work.percent())


def _warm(engine: Engine) -> None:
    """What an engine does for the first time is no part of a hand-off."""
    for num_tokens in (65, 2049):
        client.local(engine.url, random_prompt(num_tokens, seed=0), "warm")


def _until(seconds: float, steps: Sequence[int]) -> Iterator[int]:
    deadline = time.monotonic() + seconds
    for step in steps:
        if time.monotonic() > deadline:
            return
        yield step


def _idle(recorder: Recorder, engines: tuple[Engine, Engine], plan: Plan) -> None:
    """Lengths take turns, and each prompt is followed by its floor."""
    for num_tokens in plan.repeats:
        recorder.hand_off(engines, "warm", num_tokens)
    rounds = range(max(plan.repeats.values()))
    order = [tokens for turn in rounds for tokens, count in plan.repeats.items() if turn < count]
    for num_tokens in _until(plan.phase_seconds, order):
        recorder.hand_off(engines, "idle", num_tokens)


def _loaded(recorder: Recorder, engines: tuple[Engine, Engine], plan: Plan) -> None:
    """While decode runs a batch of streams."""
    with contextlib.ExitStack() as stack:
        for number in range(plan.num_streams):
            stack.enter_context(_stream(recorder, engines[1], f"batch-{number}"))
        for num_tokens in _until(plan.phase_seconds, [plan.loaded_tokens] * plan.num_loaded):
            recorder.hand_off(engines, "loaded", num_tokens)


def _stream(recorder: Recorder, decode: Engine, name: str) -> client.LongStream:
    return client.LongStream(decode.url, recorder.prompt(65), name, STREAM_TOKENS)


def _gaps(recorder: Recorder, engines: tuple[Engine, Engine], plan: Plan) -> dict[str, list[float]]:
    """Times between a stream's tokens: alone, when a request is answered from the cache, and when a pull lands."""
    found: dict[str, list[float]] = {"alone": [], "local": [], "pull": []}
    _, decode = engines
    with _stream(recorder, decode, "stream") as stream:
        cached = recorder.prompt(plan.pull_tokens)
        client.local(decode.url, cached, "cached")
        for _ in _until(plan.phase_seconds, range(plan.num_pulls)):
            moments = {"alone": time.perf_counter()}
            time.sleep(GAP_SECONDS)
            moments["local"] = time.perf_counter()
            client.local(decode.url, cached, "cached")
            time.sleep(GAP_SECONDS)
            moments["pull"] = recorder.hand_off(engines, "pull", plan.pull_tokens, is_floored=False)
            time.sleep(GAP_SECONDS)
            if stream.has_ended:
                break
            for event, moment in moments.items():
                found[event] += client.gaps(stream.arrivals, moment, moment + GAP_SECONDS)
    return found
