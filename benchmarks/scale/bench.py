"""``scripts/bench scale``: 1,000 x 1,000 engines and 128k-token prompts, simulated from unit costs measured here.

No engine runs. Memory and connections are measured in this process, CPU times by pyperf in others; the rest is
arithmetic on assumptions, which are printed.
"""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from benchmarks.micro import measure
from benchmarks.report import RESULTS, Cell, Table, new_report, show, write
from benchmarks.scale import memory, timing
from benchmarks.scale.model import (
    FILE_LIMIT,
    TOLERATED_SHARE,
    Costs,
    Deployment,
    Limit,
    limits,
    messages_per_second,
    peers_met,
    renewal_seconds,
    seconds_until_met,
)
from benchmarks.scale.subject import Subject
from pd_transfer.cli.transfers import NUMBERINGS
from pd_transfer.config import PdConfig
from pd_transfer.core.messages import Hello, encode
from pd_transfer.sidechannel.dealers import num_places


def main(arguments: Sequence[str]) -> int:
    """The exit status is 0 whatever breaks: this is a forecast."""
    parser = argparse.ArgumentParser(prog="scripts/bench scale", description=__doc__)
    assumed = Deployment()
    parser.add_argument("--prefill", type=int, default=assumed.num_prefill, help="engines")
    parser.add_argument("--decode", type=int, default=assumed.num_decode, help="engines")
    parser.add_argument("--prompts-per-second", type=float, default=assumed.prompts_per_second, help="of one prefill")
    parser.add_argument("--lease-seconds", type=float, default=assumed.lease_seconds)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for scale.json and scale.md")
    options = parser.parse_args(arguments)
    deployment = Deployment(options.prefill, options.decode, options.prompts_per_second, options.lease_seconds)
    subject, config = Subject(), PdConfig()
    console = Console(width=None if Console().is_terminal else 160)
    with console.status("measuring unit costs"):
        costs = measure_costs(subject)
    found = limits(deployment, costs, subject.num_blocks, num_rows(subject), config)
    report = new_report(
        "scale",
        arguments,
        [
            costs_table(costs, subject),
            memory_table(deployment, costs, subject),
            traffic_table(deployment, costs, config),
            limits_table(found),
        ],
        notes(deployment, found),
        assumptions(deployment, subject, config),
    )
    show(report, console)
    console.print(f"written: {', '.join(map(str, write(report, options.out)))}")
    return 0


def num_rows(subject: Subject) -> int:
    """Layers, each a row of descriptors."""
    return len(list(subject.layout.layers()))


def measure_costs(subject: Subject) -> Costs:
    """All unit costs, on this machine."""
    times = measure("benchmarks.scale.timing")
    connection = memory.side_channel()
    nixl = memory.nixl_peer(num_rows(subject), subject.num_blocks // 16) or memory.Connection(
        math.nan, math.nan, math.nan
    )
    return Costs(
        scheduler_peer_bytes=memory.scheduler_peer(subject),
        worker_peer_bytes=memory.worker_peer(subject),
        nixl_peer_bytes=nixl.num_bytes,
        nixl_peer_files=nixl.num_files,
        nixl_peer_seconds=nixl.seconds,
        connection_bytes=connection.num_bytes,
        connection_files=connection.num_files,
        hello_seconds=times[timing.HELLO].least,
        welcome_seconds=times[timing.WELCOME].least,
        renew_seconds=times[timing.RENEW].least,
        lease_bytes=memory.lease(subject),
        num_lease_blocks=len(subject.block_ids()),
    )


def assumptions(deployment: Deployment, subject: Subject, config: PdConfig) -> dict[str, Cell]:
    """All that is not measured."""
    return {
        "prefill engines": deployment.num_prefill,
        "decode engines": deployment.num_decode,
        "model": "Gemma-3-27b geometry, one rank, blocks of 16 tokens",
        "prompt, tokens": subject.num_tokens,
        "KV memory of a rank, GiB": subject.kv_bytes / 2**30,
        "blocks of a rank": subject.num_blocks,
        "prompts that a prefill engine finishes in a second": deployment.prompts_per_second,
        "seconds from prefill's answer to decode's release": deployment.lease_seconds,
        "seconds between two engines of a rolling restart": deployment.restart_seconds,
        "routing": "any prefill with any decode engine, at random",
        "share of prompts that may find no room for a lease": TOLERATED_SHARE,
        "seconds between renewals (default settings)": renewal_seconds(config),
    }


def costs_table(costs: Costs, subject: Subject) -> Table:
    """What was measured."""
    rows: list[tuple[Cell, ...]] = [
        ("Hello on the wire", len(encode(Hello(subject.engine(0)))) / 1024, "KiB"),
        ("Welcome on the wire", len(encode(subject.welcome(0))) / 1024, "KiB"),
        ("peer in decode's scheduler, Python", costs.scheduler_peer_bytes / 1024, "KiB"),
        ("peer in decode's worker, Python", costs.worker_peer_bytes / 1024, "KiB"),
        ("peer in decode's NIXL agent, with its descriptor table", costs.nixl_peer_bytes / 1024, "KiB"),
        ("the same, open files, both ends", costs.nixl_peer_files, "files"),
        ("the same, time to connect", costs.nixl_peer_seconds * 1e3, "ms"),
        ("ZeroMQ connection, both ends", costs.connection_bytes / 1024, "KiB"),
        ("the same, open files, both ends", costs.connection_files, "files"),
        (timing.HELLO, costs.hello_seconds * 1e6, "µs CPU"),
        (timing.WELCOME, costs.welcome_seconds * 1e6, "µs CPU"),
        (f"{timing.RENEW} and a Release", costs.renew_seconds * 1e6, "µs CPU"),
        ("lease of one prompt, Python", costs.lease_bytes / 1024, "KiB"),
        ("blocks under one lease", costs.num_lease_blocks, "blocks"),
        *(
            (f"grant in kv_transfer_params, blocks {name}", len(subject.grant(name)) / 1024, "KiB")
            for name in NUMBERINGS
        ),
    ]
    return Table("Unit costs, measured here", ("what", "how much", "unit"), tuple(rows))


def memory_table(deployment: Deployment, costs: Costs, subject: Subject) -> Table:
    """What engines hold once every decode engine knows every prefill engine, were places for them no limit."""
    peers, askers = deployment.num_prefill, deployment.num_decode
    rows: list[tuple[Cell, ...]] = [
        ("decode scheduler: peers", peers * costs.scheduler_peer_bytes / 2**20, "MiB"),
        ("decode worker: peers, Python", peers * costs.worker_peer_bytes / 2**20, "MiB"),
        ("decode worker: NIXL peers and descriptor tables", peers * costs.nixl_peer_bytes / 2**20, "MiB"),
        ("decode scheduler: connections", peers * costs.connection_bytes / 2**20, "MiB"),
        ("prefill scheduler: connections", askers * costs.connection_bytes / 2**20, "MiB"),
        ("prefill worker: lease words, one for each block", 8 * subject.num_blocks / 2**20, "MiB"),
        ("prefill scheduler: one lease", costs.lease_bytes / 2**20, "MiB"),
        ("decode worker: connecting all peers, one by one", peers * costs.nixl_peer_seconds, "s"),
    ]
    return Table(f"One engine that knows {peers:,} others", ("what", "how much", "unit"), tuple(rows))


def traffic_table(deployment: Deployment, costs: Costs, config: PdConfig) -> Table:
    """Messages, for one prefill engine and for all."""
    rows: list[tuple[Cell, ...]] = [
        (name, rate, rate * deployment.num_prefill) for name, rate in messages_per_second(deployment, config).items()
    ]
    hours = deployment.num_prefill * deployment.restart_seconds / 3600
    handshakes = deployment.num_prefill * deployment.num_decode
    rows += [
        (f"handshakes of a rolling restart of prefill ({hours:.1f} h), in all", deployment.num_decode, handshakes),
        ("the same, CPU seconds of prefill's side channel thread", deployment.num_decode * costs.hello_seconds, ""),
    ]
    return Table("Messages per second", ("message", "one prefill engine", "all"), tuple(rows))


def limits_table(found: Sequence[Limit]) -> Table:
    """The most strained first."""
    rows = tuple((each.name, each.limit, each.load, each.ratio, each.beyond) for each in found)
    return Table("What breaks first", ("limit", "where it lies", "what is asked", "ratio", "beyond it"), rows)


def notes(deployment: Deployment, found: Sequence[Limit]) -> list[str]:
    """What breaks, and when."""
    broken = [each.name for each in found if each.ratio > 1]
    result = [f"Broken: {', '.join(broken)}." if broken else "Nothing breaks."]
    places = num_places(FILE_LIMIT)
    when = seconds_until_met(deployment, places)
    if math.isfinite(when):
        share = 1 - places / deployment.num_prefill
        result.append(
            f"A decode engine that lists no peers has met {places:,} prefill engines after {when / 3600:.1f} h. Then "
            f"on {share:.0%} of its prompts name one that it cannot ask, and it computes them itself. Listed in the "
            "setting peers they have places of their own; affine routing helps too."
        )
    result.append(f"After one hour it has met {peers_met(deployment, 3600):,.0f}.")
    return result
