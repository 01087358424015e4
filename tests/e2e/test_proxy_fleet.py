"""Two prefill and two decode engines behind the proxy, one of each killed under load.

No client sees an error before its first byte, and a stream that had begun on the lost engine ends with an error event
and the end mark.
"""

import json
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from itertools import count
from typing import Any

import pytest
import requests

from tests.e2e.pair import TINY_HYBRID, TOKENS_VERIFIED, Pair, assert_nothing_held, gain
from tests.e2e.proxy_stack import running_proxy, standing, until
from tests.stack.engines import (
    DECODE_ROLE,
    PREFILL_ROLE,
    REPOSITORY,
    Engine,
    EngineSettings,
    ServerProcess,
    complete,
    completion_body,
    running,
)
from tests.stack.exactness import TOP_LOGPROBS, difference, generated, random_prompt

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

NUM_CLIENTS = 16
WARM_SECONDS = 6.0
LOAD_SECONDS = 12.0
"""Before and after an engine is killed."""
NUM_TOKENS = 24
OUT_OF_ROTATION_SECONDS = 2.0
"""The promise. A request or a check is refused or cut off, or the check, which begins within a second, is not answered
twice in 0.4 s: a process that was killed may take connections until it has ended."""


@dataclass(frozen=True)
class Fleet:
    """Engines by role, and a proxy in front of them."""

    prefills: list[Engine]
    decodes: list[Engine]
    proxy: ServerProcess


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    logs = REPOSITORY / "logs" / "e2e" / "proxy-fleet"
    arguments = ("--block-size", "32", "--max-num-seqs", "32")
    # What is read from an engine that was killed ends no earlier than this.
    reads = {"read_seconds": 5.0, "handshake_seconds": 2.0}
    settings = {
        "prefill": EngineSettings(TINY_HYBRID, PREFILL_ROLE, arguments=arguments),
        "decode": EngineSettings(TINY_HYBRID, DECODE_ROLE, "1", arguments=arguments, extra=reads),
    }
    engines = {
        f"{role}-{number}": Engine(f"{role}-{number}", chosen, logs)
        for number in (1, 2)
        for role, chosen in settings.items()
    }
    with running(*engines.values()):
        for engine in engines.values():
            engine.wait_ready()
        prefills, decodes = ([engines[f"{role}-{number}"] for number in (1, 2)] for role in settings)
        with running_proxy(prefills, decodes, logs, "--canary", "60") as proxy:
            yield Fleet(prefills, decodes, proxy)


@dataclass(frozen=True)
class Told:
    """What one client saw. ``error`` is one that came before the first byte, or in place of an end mark."""

    stream: bool
    finished: float
    first_byte: float | None = None
    ended_well: bool = False
    told_of_the_loss: bool = False
    """An error event, and then the end mark."""
    error: str | None = None


def ask(url: str, number: int) -> Told:
    """One request of a client: every other one is streamed, and no two have the same prompt."""
    stream = number % 2 == 0
    prompt = random_prompt(40 + number % 7 * 30, seed=1000 + number)
    body = completion_body(prompt, max_tokens=NUM_TOKENS * (3 if stream else 1), ignore_eos=True, stream=stream)
    try:
        with requests.post(url + "/v1/completions", json=body, stream=stream, timeout=120) as response:
            if response.status_code != 200:
                return Told(stream, time.monotonic(), error=f"{response.status_code}: {response.text}")
            if stream:
                return read_stream(response)
            usage = response.json()["usage"]
            assert usage["completion_tokens"] == NUM_TOKENS
            return Told(stream, time.monotonic(), ended_well=True)
    except requests.RequestException as error:
        return Told(stream, time.monotonic(), error=repr(error))


def read_stream(response: requests.Response) -> Told:
    first_byte = None
    events = []
    for line in response.iter_lines():
        first_byte = first_byte or time.monotonic()
        if line:
            events.append(line.removeprefix(b"data: "))
    errors = [event for event in events[:-1] if "error" in json.loads(event)]
    has_end_mark = bool(events) and events[-1] == b"[DONE]"
    lost = has_end_mark and len(errors) == 1 and events[-2] == errors[0]
    error = None if has_end_mark and (lost or not errors) else f"a stream that ended with {events[-2:]}"
    return Told(True, time.monotonic(), first_byte, has_end_mark and not errors, lost, error)


@contextmanager
def load(url: str, seen: list[Told]) -> Iterator[None]:
    """Clients that ask again and again for as long as the context lasts; all of them have their answers at its end."""
    numbers, over = count(), threading.Event()

    def client(_: int) -> None:
        while not over.is_set():
            seen.append(ask(url, next(numbers)))

    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        clients = pool.map(client, range(NUM_CLIENTS))
        try:
            yield
        finally:
            over.set()
        list(clients)


def kill_under_load(fleet: Fleet, engine: Engine) -> tuple[list[Told], float]:
    """Kill an engine among busy clients: what they saw, and after how many seconds it was out of rotation."""
    seen: list[Told] = []
    with load(fleet.proxy.url, seen):
        time.sleep(WARM_SECONDS)
        killed = datetime.now()
        engine.signal(9)
        time.sleep(LOAD_SECONDS)
    until(lambda: standing(fleet.proxy, engine) == "down", "down", seconds=30)
    out = (first_word_about(fleet.proxy, engine, killed) - killed).total_seconds()
    by_end = {name: sum(getattr(told, name) for told in seen) for name in ("ended_well", "told_of_the_loss")}
    print(f"{engine.name}: out of rotation after {out:.2f} s; {len(seen)} requests, {by_end}")
    return seen, out


def first_word_about(proxy: ServerProcess, engine: Engine, since: datetime) -> datetime:
    """When the proxy first said that an engine is not in rotation any more. Both clocks are this machine's."""
    said = re.compile(
        rf"^(\S+ \S+) WARNING proxy\.registry: \w+ engine {engine.url} (?:is avoided|was \w+ and is (?:suspect|down))",
        re.MULTILINE,
    )
    times = (datetime.strptime(found, "%Y-%m-%d %H:%M:%S,%f") for found in said.findall(proxy.log_path.read_text()))
    return min(when for when in times if when >= since)


def assert_exact(fleet: Fleet, alone: Engine, decode: Engine, salt: str) -> None:
    """Every answer is the single engine's, from KV that moved."""
    for num_tokens in (33, 100, 159, 300):
        prompt = random_prompt(num_tokens, seed=50)
        fields: dict[str, Any] = {"max_tokens": 4, "logprobs": TOP_LOGPROBS, "ignore_eos": True}

        def compare(prompt: list[int] = prompt, fields: dict[str, Any] = fields) -> None:
            got = complete(fleet.proxy.url, prompt, cache_salt=salt, **fields)
            want = alone.complete(prompt, cache_salt="single " + salt, **fields)
            assert difference(generated(got), generated(want)) == 0.0

        assert gain(decode, compare, {TOKENS_VERIFIED: num_tokens - 1})[TOKENS_VERIFIED] == num_tokens - 1


def test_a_prefill_engine_is_killed_under_load(fleet: Fleet) -> None:
    seen, out = kill_under_load(fleet, fleet.prefills[0])
    assert out < OUT_OF_ROTATION_SECONDS
    assert [told.error for told in seen if told.error] == []
    # Nobody notices: decode has the tokens, or computes the prompt itself.
    assert all(told.ended_well for told in seen)
    assert {told.stream for told in seen} == {True, False}


def test_a_decode_engine_is_killed_under_load(fleet: Fleet) -> None:
    seen, out = kill_under_load(fleet, fleet.decodes[0])
    assert out < OUT_OF_ROTATION_SECONDS
    assert [told.error for told in seen if told.error] == []
    # Streams that had begun there are told of it; that there were some is what the load is for.
    assert any(told.told_of_the_loss for told in seen)
    assert all(told.ended_well for told in seen if not told.told_of_the_loss)
    assert all(told.stream and told.first_byte is not None for told in seen if told.told_of_the_loss)


def test_the_rest_of_the_fleet_answers_exactly_and_holds_nothing(fleet: Fleet) -> None:
    assert_exact(fleet, fleet.prefills[1], fleet.decodes[1], "afterwards")
    # What the decode engine that was killed had borrowed ends with its leases.
    assert_nothing_held(Pair(fleet.prefills[1], fleet.decodes[1], fleet.proxy.log_path.parent))
