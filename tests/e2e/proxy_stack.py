"""Proxies in front of real engines, and answers of any endpoint in a form in which two of them can be compared."""

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import requests

from tests.e2e.pair import SETTLE_SECONDS
from tests.stack.engines import ServerProcess, free_port

VOLATILE = frozenset(
    {"id", "created", "created_at", "completed_at", "request_id", "item_id", "call_id", "sequence_number"}
)
"""What differs between two answers to one request: names, times, and numbers of events, which may be merged."""

OWN_CACHE = frozenset({"cache_write_tokens"})
"""What the engine that answers has computed and cached itself: for decode, next to nothing."""


def proxy_of(
    prefills: Sequence[ServerProcess], decodes: Sequence[ServerProcess], logs: Path, *more: str, name: str = "proxy"
) -> ServerProcess:
    """Start a proxy with further options. It may not have to come up, so nobody waits for it here."""
    port = free_port()
    command = [sys.executable, "-m", "proxy", "--port", str(port), *more]
    command += [part for engine in prefills for part in ("--prefill", engine.url)]
    command += [part for engine in decodes for part in ("--decode", engine.url)]
    return ServerProcess(name, command, port, logs)


@contextmanager
def running_proxy(
    prefills: Sequence[ServerProcess], decodes: Sequence[ServerProcess], logs: Path, *more: str, name: str = "proxy"
) -> Iterator[ServerProcess]:
    """A proxy that has engines of both roles."""
    with proxy_of(prefills, decodes, logs, *more, name=name) as server:
        yield server.wait_ready("/ready", seconds=60)


def standing(proxy: ServerProcess, engine: ServerProcess) -> str:
    """What a proxy thinks of an engine."""
    text = requests.get(proxy.url + "/metrics", timeout=10).text
    line = re.compile(rf'pd_proxy_engine_standing{{engine="{engine.url}",role="\w+",standing="(\w+)"}} 1.0')
    (found,) = line.findall(text)
    return str(found)


def records(proxy: ServerProcess) -> list[dict[str, Any]]:
    """The line of JSON of every request, from the log."""
    lines = proxy.log_path.read_text().splitlines()
    marker = " proxy.requests: "
    return [json.loads(line.split(marker, 1)[1]) for line in lines if marker in line]


def until(condition: Callable[[], Any], what: str, seconds: float = SETTLE_SECONDS) -> float:
    """Wait for something that another process is about to do; how long that took, in seconds."""
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() < begin + seconds, f"{what}: not within {seconds:.0f} s"
        time.sleep(0.02)
    return time.monotonic() - begin


def curl(url: str, body: Mapping[str, Any] | None = None, *more: str) -> tuple[int, bytes]:
    """A request by curl, a POST if there is a body: status and answer."""
    command = ["curl", "-sSN", "--max-time", "60", "-o", "-", "-w", "\n%{http_code}", *more, url]
    if body is not None:
        command += ["-H", "Content-Type: application/json", "--data-binary", "@-"]
    done = subprocess.run(command, input=json.dumps(body).encode(), capture_output=True, check=True, timeout=90)
    answer, _, status = done.stdout.rpartition(b"\n")
    return int(status), answer


def events_of(stream: bytes) -> list[dict[str, Any]]:
    """The data of the events of a stream, without the end mark of those that have one."""
    lines = [line.removeprefix(b"data: ") for line in stream.splitlines() if line.startswith(b"data: ")]
    return [json.loads(line) for line in lines if line != b"[DONE]"]


def scrubbed(value: Any) -> Any:
    """An answer without what differs each time."""
    if isinstance(value, Mapping):
        return {name: scrubbed(inner) for name, inner in value.items() if name not in VOLATILE | OWN_CACHE}
    return [scrubbed(inner) for inner in value] if isinstance(value, list) else value


_PIECES = frozenset({"text", "content", "delta", "arguments", "partial_json", "reasoning", "thinking"})
"""Strings of which each event has the next piece."""


def folded(events: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """What a stream says in all, by type of event: an engine that is slow puts two tokens into one event."""
    told: dict[str, Any] = {}
    for event in events:
        told[str(event.get("type"))] = _folded(told.get(str(event.get("type"))), scrubbed(event), "")
    return told


def _folded(known: Any, new: Any, name: str) -> Any:
    if known is None or new is None:
        return known if new is None else new
    if isinstance(new, Mapping):
        return {key: _folded(known.get(key), new.get(key), key) for key in (*known, *(new.keys() - known.keys()))}
    if isinstance(new, list):
        return _folded_list(known, new)
    return known + new if name in _PIECES and isinstance(new, str) else new


def _folded_list(known: list[Any], new: list[Any]) -> list[Any]:
    """Choices and tool calls have an index and are folded by it; tokens and their log probabilities are appended."""
    items = {item["index"]: item for item in known if isinstance(item, Mapping) and "index" in item}
    if not items or not all(isinstance(item, Mapping) and "index" in item for item in new):
        return known + new
    for item in new:
        items[item["index"]] = _folded(items.get(item["index"]), item, "")
    return [items[index] for index in sorted(items)]


def differing(got: Any, want: Any, path: str = "") -> list[str]:
    """Where two answers differ, and how."""
    if isinstance(got, Mapping) and isinstance(want, Mapping):
        names = [*got, *(want.keys() - got.keys())]
        return [found for name in names for found in differing(got.get(name), want.get(name), f"{path}.{name}")]
    if isinstance(got, list) and isinstance(want, list) and len(got) == len(want):
        pairs = enumerate(zip(got, want, strict=True))
        return [found for number, (ours, theirs) in pairs for found in differing(ours, theirs, f"{path}[{number}]")]
    return [] if got == want else [f"{path}: {got!r}, not {want!r}"]


def num_prompt_tokens(answer: Any) -> int:
    """What an answer's usage says of its prompts, whatever the endpoint; 0 if it says nothing."""
    if isinstance(answer, list):
        return max(map(num_prompt_tokens, answer), default=0)
    if not isinstance(answer, Mapping):
        return 0
    counts = [answer[name] for name in ("prompt_tokens", "input_tokens") if isinstance(answer.get(name), int)]
    return max([*counts, *map(num_prompt_tokens, answer.values())], default=0)
