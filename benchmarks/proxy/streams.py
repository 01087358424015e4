"""``scripts/bench proxy --streams N``: N clients that read a stream at the same time, in one proxy process.

Loopback, mock engines, two waves, an event every three seconds on each stream. A stream needs two files in the proxy,
so that the hard limit of open files (``ulimit -Hn``) decides how many it can have; no more than fit are opened, and the
report says so. Each stream is a connection of its own, and every byte of it is compared.
"""

import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import psutil

from benchmarks.proxy.client import cpu_seconds
from benchmarks.proxy.stacks import LOAD_CORE, pinned, running_bed
from benchmarks.proxy.stream_client import OPENED_AT_ONCE, Crowd, Ended
from benchmarks.report import REPOSITORY, Cell, Report, Table, new_report
from tests.stack.engines import ServerProcess

EVENT_SECONDS = 3.0
NUM_EVENTS = 40
"""Streams last two minutes: long enough to open all of them and to watch for a while."""
WATCH_SECONDS = 20.0
SETTLE_SECONDS = 2.0
KEEP_ALIVE_SECONDS = 10.0
"""After this long no proxy keeps an idle connection to an engine."""

_OTHER_FILES = 2 * OPENED_AT_ONCE
"""Besides the streams': connections to the prefill engine, and what a process has anyway."""


class Sample(NamedTuple):
    """A proxy at one moment."""

    when: str
    num_streams: int
    resident_bytes: int
    num_files: int
    cpu_share: float
    """Of a core, since the sample before."""


def num_fitting(wanted: int, most_files: int) -> int:
    """How many streams a proxy can have that may open so many files."""
    return max(0, min(wanted, (most_files - _OTHER_FILES) // 2))


def levels(num_streams: int) -> list[int]:
    """How many streams are open when the proxy is looked at."""
    return [*(level for level in (1000, 5000) if level < num_streams), num_streams]


def measure(wanted: int, names: Sequence[str], arguments: Sequence[str]) -> tuple[Report, bool]:
    """The report, and whether as many streams as wanted were open at once and complete."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    fitting = wanted if hard == resource.RLIM_INFINITY else num_fitting(wanted, hard)
    results = {}
    with running_bed(names, EVENT_SECONDS) as bed:
        for name, proxy in bed.proxies.items():
            results[name] = watch(proxy, fitting)
    rows = [row for name, (samples, _) in results.items() for row in rows_of(name, samples)]
    columns = ("proxy", "when", "open streams", "resident MiB", "KiB for a stream", "open files", "share of a core")
    notes = [sentence(name, ended) for name, (_, ended) in results.items()]
    if fitting < wanted:
        notes.append(f"{wanted:,} streams do not fit here: the hard limit is {hard:,} open files, and each needs two.")
    report = new_report("proxy", arguments, [Table("Streams at once", columns, tuple(rows))], notes)
    good = all(ended.num_complete == ended.num_at_once == wanted for _, ended in results.values())
    return msgspec.structs.replace(report, name="proxy_streams"), good


def watch(proxy: ServerProcess, num_streams: int) -> tuple[list[Sample], Ended]:
    """Open streams through a proxy, and look at it before, meanwhile and after."""
    _open(proxy, Crowd(proxy.url, [1], 1))
    samples = [sample(proxy, "before", 0, KEEP_ALIVE_SECONDS)]

    def look(level: int) -> None:
        samples.append(sample(proxy, "open", level, SETTLE_SECONDS))
        if level == num_streams:
            samples.append(sample(proxy, f"{WATCH_SECONDS:.0f} s later", level, WATCH_SECONDS))

    ended = _open(proxy, Crowd(proxy.url, levels(num_streams), NUM_EVENTS), look)
    samples.append(sample(proxy, "all ended", 0, KEEP_ALIVE_SECONDS))
    return samples, ended


def _open(proxy: ServerProcess, crowd: Crowd, look: Callable[[int], None] = lambda _: None) -> Ended:
    """Have a client open streams, ``look`` at each level, and wait for their ends."""
    asked = [sys.executable, "-m", "benchmarks.proxy.stream_client", msgspec.json.encode(crowd).decode()]
    with subprocess.Popen(
        pinned(LOAD_CORE, asked), cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as client:
        try:
            for level in crowd.levels:
                if client.stdout.readline() != f"{level}\n":
                    raise SystemExit(f"the client opened no {level} streams of {proxy.name}")
                look(level)
                client.stdin.write("\n")
                client.stdin.flush()
            return msgspec.json.decode(client.stdout.readline(), type=Ended)
        finally:
            client.terminate()


def sample(proxy: ServerProcess, when: str, num_streams: int, seconds: float) -> Sample:
    """Watch a proxy for a while, and look at it at the end."""
    begin, cpu = time.monotonic(), cpu_seconds(proxy.pid)
    time.sleep(seconds)
    share = (cpu_seconds(proxy.pid) - cpu) / (time.monotonic() - begin)
    root = psutil.Process(proxy.pid)
    processes = [root, *root.children(recursive=True)]
    resident = sum(process.memory_info().rss for process in processes)
    return Sample(when, num_streams, resident, sum(process.num_fds() for process in processes), share)


def rows_of(name: str, samples: Sequence[Sample]) -> list[tuple[Cell, ...]]:
    """One proxy's rows of the table. What a stream takes is told against the first sample."""
    before = samples[0].resident_bytes
    return [
        (
            name,
            each.when,
            each.num_streams,
            each.resident_bytes / 2**20,
            (each.resident_bytes - before) / each.num_streams / 1024 if each.num_streams else "",
            each.num_files,
            each.cpu_share,
        )
        for each in samples
    ]


def sentence(name: str, ended: Ended) -> str:
    """What became of the streams of one proxy."""
    return (
        f"{name}: {ended.num_at_once:,} streams at once; {ended.num_complete:,} complete, byte by byte; "
        f"{ended.num_refused:,} refused with 503, {ended.num_broken:,} broken."
    )
