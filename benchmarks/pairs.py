"""A prefill and a decode engine side by side with others: ours, vLLM's built-in connector, and that one unpinned.

vLLM's connector calls ``os.sched_setaffinity`` when it starts on a CPU. Where two engines share a machine, both are put
on one core by it. So it is measured twice: as shipped, and with that call made a no-op, without a change to vLLM's
files (``benchmarks.handoff.connectors``).
"""

import argparse
import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec
import psutil

from benchmarks.handoff.connectors import NOTES_VARIABLE
from benchmarks.report import RESULTS
from tests.stack.engines import DECODE_ROLE, PREFILL_ROLE, REPOSITORY, Engine, EngineSettings, free_port, running

CONNECTORS = "benchmarks.handoff.connectors"
MODEL = REPOSITORY / "tests" / "models" / "tiny_hybrid"
BLOCK_SIZE_TOKENS = 32


@dataclass(frozen=True)
class Contender:
    """A connector as both engines of a pair use it. ``connector`` is a class of ``benchmarks.handoff.connectors``."""

    name: str
    title: str
    connector: str

    def transfer_config(self, role: str, extra: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """What ``--kv-transfer-config`` takes."""
        return {
            "kv_connector": self.connector,
            "kv_connector_module_path": CONNECTORS,
            "kv_role": role,
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": dict(extra or {}),
        }


OURS = Contender("ours", "ours", "PdConnector")
BUILT_IN = Contender("builtin", "built-in, as shipped", "NixlConnector")
UNPINNED = Contender("builtin-unpinned", "built-in, unpinned", "UnpinnedNixlConnector")
CONTENDERS = {each.name: each for each in (OURS, UNPINNED, BUILT_IN)}


@dataclass
class Pair:
    """Two engines with one contender's connector, a core each.

    ``notes`` is the file in which decode's connector says how long each pull took, and None when it is not asked to.
    ``arguments`` go to both engines.
    """

    contender: Contender
    logs: Path
    notes: Path | None = None
    arguments: Sequence[str] = ()
    side_channel_port: int = field(default_factory=free_port)
    """Where prefill listens for decode engines."""

    def start_prefill(self) -> Engine:
        """Start a prefill engine on the first core. It is not ready yet."""
        return self._start("prefill", "0", self.contender.transfer_config(PREFILL_ROLE), self.side_channel_port)

    def start_decode(self, extra: Mapping[str, Any] | None = None) -> Engine:
        """Start a decode engine on the second core, with settings of the connector. It is not ready yet."""
        return self._start("decode", "1", self.contender.transfer_config(DECODE_ROLE, extra), free_port())

    @contextlib.contextmanager
    def running(self) -> Iterator[tuple[Engine, Engine]]:
        """Prefill and decode, ready; stopped at the end whatever happens."""
        prefill, decode = self.start_prefill(), self.start_decode()
        with running(prefill, decode):
            yield prefill.wait_ready(), decode.wait_ready()

    def _start(self, role: str, cores: str, config: Mapping[str, Any], port: int) -> Engine:
        environment = {"PYTHONPATH": str(REPOSITORY), "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port)}
        if self.notes is not None and role == "decode":
            environment[NOTES_VARIABLE] = str(self.notes)
        settings = EngineSettings(
            MODEL,
            cores=cores,
            kv_transfer_config=config,
            arguments=("--block-size", str(BLOCK_SIZE_TOKENS), *self.arguments),
            environment=environment,
        )
        return Engine(f"{self.contender.name}-{role}", settings, self.logs)


class OtherWork:
    """What else ran on this machine while something was measured: work of low priority, which yields to ours."""

    def __init__(self) -> None:
        self._begin = time.monotonic()
        self._before = psutil.cpu_times()

    def percent(self) -> float:
        """Niced processes since this was made, in percent of one core."""
        spent = psutil.cpu_times().nice - self._before.nice
        return float(100 * spent / max(time.monotonic() - self._begin, 1e-9))


Lived = TypeVar("Lived", bound=msgspec.Struct)


class Turn(NamedTuple):
    """One life to be lived: rounds count from 0, and in each every contender has one."""

    round: int
    name: str


class Lives(Generic[Lived]):
    """Lives of pairs in a folder, a file each, so that many short runs make one report."""

    def __init__(self, folder: Path, kind: type[Lived]) -> None:
        self._folder = folder
        self._kind = kind
        folder.mkdir(parents=True, exist_ok=True)

    def missing(self, names: Sequence[str], num_rounds: int) -> list[Turn]:
        """Those that are not stored, in turns: A B C, A B C."""
        wanted = [Turn(number, name) for number in range(num_rounds) for name in names]
        return [turn for turn in wanted if not self._path(turn).exists()]

    def store(self, turn: Turn, life: Lived) -> None:
        """Keep a life."""
        self._path(turn).write_bytes(msgspec.json.encode(life))

    def stored(self) -> list[Lived]:
        """All that are kept, in the order in which they were stored."""
        paths = sorted(self._folder.glob("life-*.json"), key=lambda path: path.stat().st_mtime_ns)
        return [msgspec.json.decode(path.read_bytes(), type=self._kind) for path in paths]

    def forget(self) -> None:
        """Keep nothing."""
        for path in self._folder.glob("life-*.json"):
            path.unlink()

    def _path(self, turn: Turn) -> Path:
        return self._folder / f"life-{turn.round}-{turn.name}.json"


def add_life_options(parser: argparse.ArgumentParser, names: Iterable[str]) -> None:
    """The options of a benchmark that is run life by life."""
    parser.add_argument("--only", action="append", choices=list(names), help="one of them; may be repeated")
    parser.add_argument("--rounds", type=int, default=2, help="lives of each")
    parser.add_argument("--lives", type=int, default=None, help="run at most so many now; 0 makes the report alone")
    parser.add_argument("--fresh", action="store_true", help="forget the lives that are stored")
    parser.add_argument("--quick", action="store_true", help="a look: few requests, in a store of their own")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the report")
