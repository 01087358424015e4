"""The demo: a prefill engine, a decode engine and the proxy; prompts of many lengths; one table.

Every answer that came through the proxy is compared, bit for bit, with the answer of a single engine (the prefill
engine itself, under another cache salt, so that nothing is shared). Run it with ``scripts/demo``.
"""

import argparse
import json
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.stack.engines import (
    DECODE_ROLE,
    PREFILL_ROLE,
    REPOSITORY,
    Engine,
    EngineSettings,
    Proxy,
    StackError,
    running,
)
from tests.stack.exactness import TOP_LOGPROBS, difference, generated, random_prompt, stream_generated

MODEL = REPOSITORY / "tests" / "models" / "tiny_hybrid"
BLOCK_SIZE = 32
LENGTHS = (2, 31, 32, 33, 34, 127, 128, 129, 159, 160, 161, 191, 300, 1000, 2000)
NUM_DECODED = 8
METRICS_SECONDS = 3.0


@dataclass(frozen=True)
class Row:
    """One prompt: what was moved for it, and how its answer compares with the single engine's."""

    num_tokens: int
    num_verified: int
    blocks_by_group: tuple[int, ...]
    num_blocks_flat: int
    num_bytes: int
    num_descriptors: int
    num_merged: int
    read_milliseconds: float
    hand_off_milliseconds: float
    first_difference: float
    later_difference: float

    @property
    def is_exact(self) -> bool:
        """Bit for bit the single engine's answer, from KV that was really moved."""
        return (
            self.first_difference == 0.0 and self.later_difference == 0.0 and self.num_verified == self.num_tokens - 1
        )


class Demo:
    """The three servers and what is asked of them."""

    def __init__(self, console: Console, logs: Path) -> None:
        self.console = console
        self.prefill = Engine("prefill", _settings(PREFILL_ROLE, "0"), logs)
        self.decode = Engine("decode", _settings(DECODE_ROLE, "1"), logs)
        self.proxy = Proxy([self.prefill], [self.decode], logs)
        self.num_layers = int(json.loads((MODEL / "config.json").read_text())["num_hidden_layers"])

    def wait_ready(self) -> None:
        """Report on the screen as each server comes up. Raises StackError."""
        begin = time.monotonic()
        for server in (self.prefill, self.decode, self.proxy):
            with self.console.status(f"starting {server.name} (log: {server.log_path})"):
                server.wait_ready()
            self.console.print(f"  {server.name:8} ready after {time.monotonic() - begin:5.1f} s at {server.url}")
        for engine in (self.prefill, self.decode):
            # vLLM compiles at the first request for log probabilities; that is no part of a hand-off.
            engine.complete(random_prompt(3), max_tokens=2, logprobs=TOP_LOGPROBS)

    def ask(self, num_tokens: int) -> Row:
        """Send one prompt through the proxy and to the single engine."""
        prompt = random_prompt(num_tokens)
        fields: dict[str, Any] = {"max_tokens": NUM_DECODED, "logprobs": TOP_LOGPROBS}
        before, proxy_before = self.decode.metrics(), self.proxy.metrics()
        got = stream_generated(self.proxy.url, prompt, cache_salt=f"moved-{num_tokens}", **fields)
        hand_off_seconds = self.proxy.metrics()[_DECODE_LEG] - proxy_before.get(_DECODE_LEG, 0.0)
        moved = self._moved(before, num_tokens - 1)
        oracle = self.prefill.complete(prompt, cache_salt=f"single-{num_tokens}", **fields)
        want = generated(oracle)
        return Row(
            num_tokens=num_tokens,
            num_verified=int(moved["pd_transfer:tokens_verified_total"]),
            blocks_by_group=_blocks_by_group(moved),
            num_blocks_flat=self.num_layers * -(-(num_tokens - 1) // BLOCK_SIZE),
            num_bytes=int(moved["pd_transfer:bytes_verified_total"]),
            num_descriptors=int(moved["pd_transfer:descriptors_total"]),
            num_merged=int(moved["pd_transfer:descriptors_merged_total"]),
            read_milliseconds=moved["pd_transfer:read_microseconds_total"] / 1e3,
            hand_off_milliseconds=hand_off_seconds * 1e3,
            first_difference=difference(got[:1], want[:1]),
            later_difference=difference(got[1:], want[1:]),
        )

    def _moved(self, before: dict[str, float], num_expected: int) -> dict[str, float]:
        """What decode's counters gained; they follow the answer by a moment."""
        deadline = time.monotonic() + METRICS_SECONDS
        while True:
            after = self.decode.metrics()
            names = set(after) | {"pd_transfer:" + name for name in _COUNTERS}
            gained = {name: after.get(name, 0.0) - before.get(name, 0.0) for name in names}
            if gained["pd_transfer:tokens_verified_total"] >= num_expected or time.monotonic() > deadline:
                return gained
            time.sleep(0.05)


_DECODE_LEG = "pd_proxy_leg_seconds_sum/decode"
"""Seconds from prefill's answer to decode's first token, added up by the proxy."""
_COUNTERS = (
    "tokens_verified_total",
    "bytes_verified_total",
    "descriptors_total",
    "descriptors_merged_total",
    "read_microseconds_total",
)


def _settings(role: str, cores: str) -> EngineSettings:
    return EngineSettings(MODEL, role, cores, arguments=("--block-size", str(BLOCK_SIZE)))


def _blocks_by_group(moved: dict[str, float]) -> tuple[int, ...]:
    prefix = "pd_transfer:blocks_verified_total/"
    by_group = {int(name.removeprefix(prefix)): int(count) for name, count in moved.items() if name.startswith(prefix)}
    return tuple(by_group[group] for group in sorted(by_group))


def _table(rows: Sequence[Row]) -> Table:
    table = Table(title="KV moved from prefill to decode, and the answers compared with a single engine")
    for heading in (
        "prompt\ntokens",
        "verified\ntokens",
        "blocks pulled\nper group",
        "descriptors\n(non-hybrid)",
        "merged\ninto",
        "KiB",
        "read\nms",
        "hand-off\nms",
        "first token\nmax |Δ logprob|",
        f"next {NUM_DECODED - 1}\nmax |Δ logprob|",
        "",
    ):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            str(row.num_tokens),
            str(row.num_verified),
            " ".join(map(str, row.blocks_by_group)),
            f"{row.num_descriptors} ({row.num_blocks_flat})",
            str(row.num_merged),
            f"{row.num_bytes / 1024:.0f}",
            f"{row.read_milliseconds:.1f}",
            f"{row.hand_off_milliseconds:.0f}",
            f"{row.first_difference}",
            f"{row.later_difference}",
            "exact" if row.is_exact else "[red]NOT EXACT[/red]",
        )
    return table


def _run(console: Console, logs: Path, keep: bool) -> int:
    demo = Demo(console, logs)
    with running(demo.prefill, demo.decode, demo.proxy):
        demo.wait_ready()
        rows = []
        for num_tokens in LENGTHS:
            with console.status(f"a prompt of {num_tokens} tokens ({len(rows) + 1} of {len(LENGTHS)})"):
                rows.append(demo.ask(num_tokens))
        console.print(_table(rows))
        num_exact = sum(row.is_exact for row in rows)
        console.print("hand-off: from prefill's answer to decode's first token, as the proxy sees it.")
        console.print(f"{num_exact} of {len(rows)} answers are bit for bit the single engine's, from verified KV.")
        if keep:
            _keep(console, demo)
    return 0 if num_exact == len(rows) else 1


def _keep(console: Console, demo: Demo) -> None:
    body = json.dumps({"model": "model", "prompt": "a b c d", "max_tokens": 8})
    console.print("The servers stay up until Ctrl-C. Try:")
    console.print(
        f"  curl {demo.proxy.url}/v1/completions -H 'Content-Type: application/json' -d '{body}'", soft_wrap=True
    )
    signal.pause()


def main() -> int:
    """Run the demo; the exit status is 0 only when every row is exact."""
    parser = argparse.ArgumentParser(prog="scripts/demo", description=__doc__)
    parser.add_argument("--keep", action="store_true", help="leave the servers up and print a curl line")
    parser.add_argument("--logs", type=Path, default=REPOSITORY / "logs" / "demo", help="folder for the servers' logs")
    options = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 150)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return _run(console, options.logs, options.keep)
    except StackError as error:
        console.print(f"[red]{error}[/red]", highlight=False)
        console.print(f"The logs are in {options.logs}.")
        return 1
    except KeyboardInterrupt:
        console.print(f"Stopped. The logs are in {options.logs}.")
        return 130


if __name__ == "__main__":
    sys.exit(main())
