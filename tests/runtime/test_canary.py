"""Exactly the right bytes arrive: real NIXL between a prefill process and decode ranks here, over random geometries."""

from contextlib import ExitStack

import msgspec
import pytest

from pd_transfer.core.layout import block_runs
from pd_transfer.core.messages import Hello, Welcome
from pd_transfer.core.outcomes import Level, Outcome, Quantity
from pd_transfer.core.params import Address, PeerKey, RequestId, parse_grant
from pd_transfer.core.peers import ConnectPeer
from pd_transfer.core.plan import ReadPlanner
from pd_transfer.runtime.damage import damage_block
from pd_transfer.runtime.prefill import FinishedPrompt
from tests.contracts.transport_rig import finish
from tests.runtime.builders import engine, receive_order
from tests.runtime.canary import DecodeRank, PrefillProcess, random_geometry
from tests.runtime.engine_bed import make_prefill_side

pytestmark = pytest.mark.nixl

PEER = "prefill#1"
NOW = 0.0
WAYS = {"default": "", "tcp": "TLS=tcp"}
SEEDS = range(1, 17)
PADDED_SEED = next(
    seed
    for seed in SEEDS
    if all(layer.block_stride_bytes > layer.page_bytes for layer in random_geometry(seed).local.layers())
    and any(any(table) for table in random_geometry(seed).needed)
)


@pytest.fixture(scope="module", params=WAYS.values(), ids=WAYS)
def processes(request):
    """Two prefill ranks for each way to carry the bytes."""
    with ExitStack() as stack:
        ranks = [PrefillProcess(rank, request.param) for rank in (0, 1)]
        for rank in ranks:
            stack.callback(rank.close)
        yield request.param, ranks


class Pair:
    """A prefill and a decode engine of ``num_ranks`` ranks that hold a geometry; one prompt is under a lease."""

    def __init__(self, processes, geometry, num_ranks=1):
        engine_config, ranks = processes
        self.geometry = geometry
        self.prefill_ranks = ranks[:num_ranks]
        served = tuple(rank.open(geometry) for rank in self.prefill_ranks)
        description = engine(geometry.remote, num_ranks=num_ranks)
        self.prefill = make_prefill_side(description, Address("prefill", 1), served)
        prompt = FinishedPrompt(RequestId("p"), geometry.num_tokens, b"d" * 32, geometry.granted)
        params, self.leased = self.prefill.hand_off(prompt, NOW), prompt.block_ids()
        self.grant = parse_grant(params["grant"]).claimed
        self.decode_ranks = [DecodeRank(geometry, rank, engine_config) for rank in range(num_ranks)]

    def __enter__(self):
        welcome = self.prefill.answer(
            Hello(engine(self.geometry.local, "decode", num_ranks=len(self.decode_ranks))), NOW
        )
        assert isinstance(welcome, Welcome)
        for rank in self.decode_ranks:
            assert not rank.run(ConnectPeer(PeerKey(PEER), welcome)).troubled_peers
        return self

    def __exit__(self, *_):
        for rank in self.decode_ranks:
            rank.transport.close()

    def pull(self, request_id="a"):
        """Every rank's only report of one receive."""
        order = receive_order(request_id, PEER, self.grant, self.geometry.needed)
        results = []
        for rank in self.decode_ranks:
            (result,) = rank.run(order).results
            assert not +rank.loop.levels()
            results.append(result)
        return results

    def outcomes(self, request_id):
        return [result.outcome for result in self.pull(request_id)]


def test_the_geometries_are_what_they_claim_to_be():
    """Over the seeds, every feature occurs."""
    geometries = [random_geometry(seed) for seed in SEEDS]
    assert any(len(geometry.local.groups) > 1 for geometry in geometries)
    assert any(len({group.block_size_tokens for group in geometry.local.groups}) > 1 for geometry in geometries)
    assert any(len(geometry.remote.groups) > len(geometry.local.groups) for geometry in geometries)
    assert any(
        len({layer.offset_bytes for layer in geometry.local.layers()}) < len(list(geometry.local.layers()))
        for geometry in geometries
    ), "no two groups share their bytes"
    for is_padded in (False, True):
        assert any(
            (layer.block_stride_bytes > layer.page_bytes) is is_padded
            for geometry in geometries
            for layer in geometry.local.layers()
        )
    assert any(0 in table and any(table) for geometry in geometries for table in geometry.needed)
    assert any(geometry.remote.num_blocks != geometry.local.num_blocks for geometry in geometries)


@pytest.mark.parametrize("seed", SEEDS)
def test_exactly_the_right_bytes_arrive(processes, seed):
    geometry = random_geometry(seed)
    with Pair(processes, geometry) as pair:
        (result,) = pair.pull()
        (decode_rank,) = pair.decode_ranks
        assert result.outcome is Outcome.RECEIVE_VERIFIED
        assert decode_rank.differences() == []
        pages = list(geometry.pairs())
        assert result.quantities[Quantity.DESCRIPTORS] == len(pages)
        assert result.quantities[Quantity.BYTES_VERIFIED] == sum(layer.page_bytes for layer, _, _ in pages)
        assert all(block_id != 0 for _, block_id, _ in pages)


def positive_controls(pair):
    """(what, byte) for every kind of place in the region."""
    (rank,) = pair.decode_ranks
    read = {(layer.name, block_id) for layer, block_id, _ in pair.geometry.pairs()}
    layer, block_id, _ = next(iter(pair.geometry.pairs()))
    yield "a block that was read", layer.offset_bytes + block_id * layer.block_stride_bytes
    yield "its last byte", layer.offset_bytes + block_id * layer.block_stride_bytes + layer.page_bytes - 1
    yield "block 0", layer.offset_bytes
    other = next(b for b in range(1, pair.geometry.local.num_blocks) if (layer.name, b) not in read)
    yield "a block that was not read", layer.offset_bytes + other * layer.block_stride_bytes
    yield "padding", next(offset for offset in range(rank.memory.bytes.size) if rank.place(offset) == "padding")


def test_one_wrong_byte_anywhere_makes_the_check_red(processes):
    with Pair(processes, random_geometry(PADDED_SEED)) as pair:
        pair.pull()
        (rank,) = pair.decode_ranks
        for what, offset in positive_controls(pair):
            assert rank.differences() == []
            rank.memory.bytes[offset] ^= 1
            assert rank.differences() == [rank.place(offset)], what
            rank.memory.bytes[offset] ^= 1


def test_the_connectors_own_damage_makes_the_check_red(processes):
    """What the end-to-end tests use as their positive control does what it says."""
    geometry = next(geometry for geometry in map(random_geometry, SEEDS) if sum(map(bool, geometry.needed[-1])) > 1)
    with Pair(processes, geometry) as pair:
        (rank,) = pair.decode_ranks
        group = len(geometry.local.groups) - 1
        rank.after_read = lambda request: damage_block(request, geometry.local, rank.memory.rows, group, -1)
        assert pair.outcomes("a") == [Outcome.RECEIVE_VERIFIED]
        last_block = geometry.needed[group][-1]
        places = rank.differences()
        assert places
        assert all(f"block {last_block} of kind{group}." in place for place in places)
        expected = rank.expected()
        for layer in geometry.local.groups[group].layers:
            page = rank.memory.page(layer, last_block)
            assert not page.any()
            page[:] = rank.memory.page(layer, last_block, expected)
        assert rank.differences() == [], "other bytes were damaged, too"


def test_a_read_from_other_blocks_makes_the_check_red(processes):
    geometry = next(
        geometry
        for geometry in map(random_geometry, SEEDS)
        if len(geometry.granted[0]) > 1 and all(geometry.granted[0]) and all(map(all, geometry.needed))
    )
    swapped = block_runs(geometry.granted[0][::-1])
    with Pair(processes, geometry) as pair:
        pair.grant = msgspec.structs.replace(pair.grant, groups=(swapped, *pair.grant.groups[1:]))
        assert pair.outcomes("a") == [Outcome.RECEIVE_VERIFIED]
        assert pair.decode_ranks[0].differences() != []


@pytest.mark.parametrize("seed", SEEDS[:4])
def test_nixl_merges_as_many_descriptors_as_we_count(processes, seed):
    geometry = random_geometry(seed)
    with Pair(processes, geometry) as pair:
        (rank,) = pair.decode_ranks
        plan = ReadPlanner(geometry.local, geometry.remote).plan(
            [block_runs(table) for table in geometry.needed], pair.grant.groups
        )
        transfer = rank.transport.submit_read(PeerKey(PEER), plan.local, plan.remote)
        finish(rank.transport, transfer)
        merged = rank.transport.num_descriptors(transfer)
        rank.transport.release(transfer)
        (result,) = pair.pull()
        assert result.quantities[Quantity.DESCRIPTORS_MERGED] == merged


# Two ranks: one lease, two words


@pytest.mark.parametrize("seed", SEEDS[:4])
def test_two_ranks_read_what_is_theirs(processes, seed):
    with Pair(processes, random_geometry(seed), num_ranks=2) as pair:
        assert pair.outcomes("a") == [Outcome.RECEIVE_VERIFIED] * 2
        for rank in pair.decode_ranks:
            assert rank.differences() == []


def test_one_ranks_word_changed_fails_that_rank(processes):
    with Pair(processes, random_geometry(PADDED_SEED), num_ranks=2) as pair:
        leases = pair.prefill.leases
        leases.release([pair.grant.lease_id], NOW)
        batch = leases.take_word_changes()
        assert pair.prefill_ranks[1].store(batch) == (batch.batch_id,)
        assert leases.confirm(batch.batch_id, 1, NOW) == [], "the blocks are free before every word has changed"
        assert pair.outcomes("a") == [Outcome.RECEIVE_VERIFIED, Outcome.RECEIVE_STALE]
        assert pair.prefill_ranks[0].store(batch) == (batch.batch_id,)
        assert tuple(leases.confirm(batch.batch_id, 1, NOW)) == pair.leased
        assert pair.outcomes("b") == [Outcome.RECEIVE_STALE] * 2
        assert pair.prefill.levels()[Level.LEASES] == 0


def test_blocks_that_were_used_again_are_not_taken_for_good(processes):
    with Pair(processes, random_geometry(PADDED_SEED)) as pair:
        pair.prefill.leases.reset(NOW)
        pair.prefill_ranks[0].store(pair.prefill.leases.take_word_changes())
        pair.prefill_ranks[0].reuse_blocks()
        assert pair.outcomes("a") == [Outcome.RECEIVE_STALE]
        assert pair.decode_ranks[0].differences() != [], "the read was refused, but not made"
