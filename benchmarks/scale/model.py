"""A deployment as numbers: what its engines hold and say to each other, and which limit is reached first."""

import math
from dataclasses import dataclass
from typing import NamedTuple

from pd_transfer.config import PdConfig
from pd_transfer.sidechannel.dealers import num_places

RENEWALS_PER_PERIOD = 3
"""As the decode scheduler renews: three times in the shorter of the two lease periods."""
TOLERATED_SHARE = 0.01
"""Of prompts that are computed twice, before we call it broken."""
FILE_LIMIT = 65_535
"""To which vLLM raises a process's limit of open files."""


@dataclass(frozen=True)
class Deployment:
    """What is assumed. Every decode engine meets every prefill engine: routing knows no affinity."""

    num_prefill: int = 1000
    num_decode: int = 1000
    prompts_per_second: float = 0.05
    """That one prefill engine finishes; 128k tokens in 20 s."""
    lease_seconds: float = 3.0
    """From prefill's answer to decode's release: routing, decode's queue, and the read itself."""
    restart_seconds: float = 10.0
    """Between two engines of a rolling restart."""


@dataclass(frozen=True)
class Costs:
    """What was measured here. Bytes, files and seconds of one more peer, connection, message, lease."""

    scheduler_peer_bytes: float
    worker_peer_bytes: float
    nixl_peer_bytes: float
    nixl_peer_files: float
    nixl_peer_seconds: float
    connection_bytes: float
    connection_files: float
    hello_seconds: float
    welcome_seconds: float
    renew_seconds: float
    lease_bytes: float
    num_lease_blocks: int


class Limit(NamedTuple):
    """One limit: what it is, where it lies, what the deployment asks of it, and what happens beyond it."""

    name: str
    limit: float
    load: float
    beyond: str

    @property
    def ratio(self) -> float:
        """Above 1 it is broken."""
        return self.load / self.limit


def peers_met(deployment: Deployment, seconds: float) -> float:
    """Prefill engines that a decode engine has met on average, each request choosing one at random."""
    rate = _decode_rate(deployment) / deployment.num_prefill
    return deployment.num_prefill * -math.expm1(-rate * seconds)


def seconds_until_met(deployment: Deployment, num_peers: int) -> float:
    """When a decode engine has met that many; infinite when there are not so many."""
    if num_peers >= deployment.num_prefill:
        return math.inf
    rate = _decode_rate(deployment) / deployment.num_prefill
    return -math.log1p(-num_peers / deployment.num_prefill) / rate


def _decode_rate(deployment: Deployment) -> float:
    """Prompts that one decode engine takes in a second."""
    return deployment.prompts_per_second * deployment.num_prefill / deployment.num_decode


def leases_at_a_time(deployment: Deployment) -> float:
    """Leases that one prefill engine would have on average, were there no limit."""
    return deployment.prompts_per_second * deployment.lease_seconds


def turned_away(load: float, num_servers: int) -> float:
    """The share of prompts that find no room for a lease (Erlang's loss formula)."""
    lost = 1.0
    for servers in range(1, num_servers + 1):
        lost = load * lost / (servers + load * lost)
    return lost


def renewal_seconds(config: PdConfig) -> float:
    """Between two renewals of one lease."""
    return min(config.lease_renewal_seconds, config.lease_unclaimed_seconds) / RENEWALS_PER_PERIOD


def messages_per_second(deployment: Deployment, config: PdConfig) -> dict[str, float]:
    """What one prefill engine is sent in a second, in a steady state; each is answered by one message."""
    rate = deployment.prompts_per_second
    return {
        "Hello, steady": 0.0,
        "Hello, while decode engines restart one by one": 1 / deployment.restart_seconds,
        "Renew": rate * math.floor(deployment.lease_seconds / renewal_seconds(config)),
        "Release": rate,
    }


def limits(deployment: Deployment, costs: Costs, num_blocks: int, num_rows: int, config: PdConfig) -> list[Limit]:
    """Every limit, the most strained first."""
    num_peers = deployment.num_prefill
    room = int(config.lease_max_pool_fraction * num_blocks // costs.num_lease_blocks)
    burst = deployment.num_decode * costs.hello_seconds
    found = [
        Limit(
            "share of prompts that find no room for a lease (lease_max_pool_fraction)",
            TOLERATED_SHARE,
            turned_away(leases_at_a_time(deployment), room),
            f"room for {room} at a time; the others' prompts are computed on decode",
        ),
        Limit(
            "prefill engines that decode's setting peers does not list",
            num_places(FILE_LIMIT),
            num_peers,
            "a Hello to the next one is dropped: its prompts wait handshake_seconds and are then computed on decode; "
            "a peer that answered is never let go, however long it idles",
        ),
        Limit(
            "open files of a decode scheduler",
            FILE_LIMIT,
            num_peers * costs.connection_files,
            "connections fail; a process that was left at 1,024 files fails far earlier",
        ),
        Limit(
            "open files of a decode worker",
            FILE_LIMIT,
            num_peers * costs.nixl_peer_files,
            "NIXL cannot connect",
        ),
        Limit(
            "a prefill engine that returns: all decode engines greet it (handshake_seconds)",
            config.handshake_seconds,
            burst,
            "the last of them time out and back off",
        ),
        Limit(
            "a decode engine that returns: it greets all prefill engines at start-up (handshake_seconds)",
            config.handshake_seconds,
            num_peers * costs.welcome_seconds,
            "the last of them time out and back off",
        ),
        Limit(
            "side channel thread of a prefill engine, share of a core",
            1.0,
            sum(messages_per_second(deployment, config).values()) * costs.renew_seconds,
            "answers come late, leases expire",
        ),
        Limit("descriptors of a rank", 2**31 - 1, float(num_blocks * num_rows), "indices are int32: start-up fails"),
    ]
    return sorted(found, key=lambda limit: -limit.ratio)
