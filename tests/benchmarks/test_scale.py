"""The forecast's arithmetic, against sums made another way; and that what is measured can be measured."""

import math
import random
from dataclasses import replace

import pytest

from benchmarks.scale import timing
from benchmarks.scale.bench import (
    assumptions,
    costs_table,
    limits_table,
    memory_table,
    notes,
    num_rows,
    traffic_table,
)
from benchmarks.scale.memory import allocated, lease, scheduler_peer, side_channel, worker_peer
from benchmarks.scale.model import (
    FILE_LIMIT,
    Costs,
    Deployment,
    limits,
    messages_per_second,
    peers_met,
    renewal_seconds,
    seconds_until_met,
    turned_away,
)
from benchmarks.scale.subject import Subject
from pd_transfer.config import PdConfig
from pd_transfer.core.layout import invalid_layout, unpack_runs
from pd_transfer.core.messages import Welcome, decode, encode, invalid_welcome
from pd_transfer.core.params import parse_grant
from pd_transfer.sidechannel.dealers import num_places

SMALL = Subject(num_tokens=4096, kv_bytes=2 * 2**30)
COSTS = Costs(3e4, 4e4, 1e4, 4, 1.5e-3, 7e4, 5, 1e-4, 1e-4, 5e-6, 7e5, 8576)
CONFIG = PdConfig()


def test_peers_met_as_if_thrown():
    """Balls into bins, thrown."""
    deployment = Deployment(num_prefill=200, num_decode=200, prompts_per_second=1.0)
    rng = random.Random(1)
    thrown = [len({rng.randrange(200) for _ in range(300)}) for _ in range(200)]
    assert peers_met(deployment, 300) == pytest.approx(sum(thrown) / len(thrown), rel=0.02)
    assert peers_met(deployment, seconds_until_met(deployment, 77)) == pytest.approx(77)
    assert math.isinf(seconds_until_met(deployment, 200))


@pytest.mark.parametrize(
    ("load", "servers", "expected"), [(0.15, 1, 0.15 / 1.15), (2.0, 2, 0.4), (0.0, 3, 0.0), (5, 0, 1)]
)
def test_turned_away(load, servers, expected):
    assert turned_away(load, servers) == pytest.approx(expected)


def test_messages():
    deployment = Deployment(prompts_per_second=2.0, lease_seconds=3 * renewal_seconds(CONFIG) + 0.1)
    rates = messages_per_second(deployment, CONFIG)
    assert (rates["Renew"], rates["Release"]) == (6.0, 2.0)


@pytest.mark.parametrize(
    ("num_prefill", "is_broken"), [(num_places(FILE_LIMIT), False), (num_places(FILE_LIMIT) + 1, True)]
)
def test_the_limit_of_peers(num_prefill, is_broken):
    deployment = Deployment(num_prefill=num_prefill, num_decode=10, lease_seconds=0.01)
    found = limits(deployment, COSTS, 32768, 62, CONFIG)
    broken = [limit.name for limit in found if limit.ratio > 1]
    assert broken == (["prefill engines that decode's setting peers does not list"] if is_broken else [])
    (verdict, *_) = notes(deployment, found)
    assert verdict.startswith("Broken: prefill engines" if is_broken else "Nothing breaks")


def test_every_limit_can_break():
    """And the most strained is first."""
    deployment = Deployment(num_prefill=10**6, num_decode=10**6, prompts_per_second=1e6)
    found = limits(deployment, COSTS, 2**26, 62, CONFIG)
    assert all(limit.ratio > 1 for limit in found)
    assert [limit.ratio for limit in found] == sorted((limit.ratio for limit in found), reverse=True)


def test_tables_have_whole_rows():
    deployment, found = Deployment(), limits(Deployment(), COSTS, 32768, 62, CONFIG)
    tables = [
        costs_table(COSTS, SMALL),
        memory_table(deployment, COSTS, SMALL),
        traffic_table(deployment, COSTS, CONFIG),
        limits_table(found),
    ]
    for table in tables:
        assert {len(row) for row in table.rows} == {len(table.columns)}
    assert assumptions(deployment, SMALL, CONFIG)["prompt, tokens"] == 4096


def test_subjects_are_engines_that_fit():
    welcome = decode(encode(SMALL.welcome(3)))
    assert isinstance(welcome, Welcome)
    assert invalid_layout(welcome.engine.layout) is None
    assert invalid_welcome(SMALL.engine(0), welcome) is None
    assert invalid_welcome(replace_heads(SMALL), welcome) is not None
    assert num_rows(SMALL) == 62
    grant = parse_grant(SMALL.grant("runs of 8"))
    assert unpack_runs(b"".join(grant.claimed.groups))[:, 2].sum() == len(SMALL.block_ids())


def replace_heads(subject: Subject):
    return replace(subject, block_size_tokens=32).engine(0)


def test_what_is_timed_runs():
    results = {name: function() for name, function in timing.functions(SMALL).items()}
    assert isinstance(decode(results[timing.HELLO]), Welcome)
    assert [type(action).__name__ for action in results[timing.WELCOME]] == ["ConnectPeer"]
    assert sorted(results[timing.LEASE]) == sorted(SMALL.block_ids())


def test_allocated_counts_bytes():
    assert 1000 < allocated(lambda number: bytes(1000)) < 1200


def test_memory_of_peers_and_leases():
    assert scheduler_peer(SMALL) > 62 * 100
    assert worker_peer(SMALL) > 62 * 100
    assert lease(SMALL) > 8 * len(SMALL.block_ids())


def test_connections_are_made():
    assert side_channel(count=3).num_files >= 3
