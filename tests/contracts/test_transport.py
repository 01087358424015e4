"""What every transport promises. The memory transport runs by default, NIXL with ``-m nixl``."""

import random

import msgspec
import numpy as np
import pytest

from pd_transfer.core.layout import DescriptorRow, MemoryKind, MemoryRange, RemoteMemory
from pd_transfer.core.params import PeerKey, Transfer
from pd_transfer.errors import TransportError
from pd_transfer.transport.base import invalid_remote
from pd_transfer.transport.memory import MemoryFabric
from pd_transfer.transport.nixl import NixlPullTransport, NixlServeTransport
from tests.contracts.transport_rig import Rig, finish, indices, memory_rig, read_word

PEER = PeerKey("peer")


def nixl_rig() -> Rig:
    return Rig(
        lambda region, words: NixlServeTransport("serve", region, words),
        lambda region, rows: NixlPullTransport("pull", region, rows),
    )


@pytest.fixture(params=["memory", pytest.param("nixl", marks=pytest.mark.nixl)])
def rig(request):
    rig = memory_rig(MemoryFabric()) if request.param == "memory" else nixl_rig()
    yield rig
    rig.close()


class TestTransport:
    @pytest.mark.parametrize(
        ("local", "remote"),
        [
            pytest.param(range(3, 19), range(9, 25), id="contiguous"),
            pytest.param([0], [31], id="one"),
            pytest.param([5, 4, 17, 20, 0, 23], [30, 1, 2, 3, 17, 0], id="scattered"),
        ],
    )
    def test_a_read_lands_the_right_bytes_and_touches_no_other(self, rig, local, remote):
        served = rig.add()
        expected = rig.local.bytes.copy()
        before = served.blocks.bytes.copy()
        into, out_of = rig.local.indices(local), served.blocks.indices(remote)
        for i, j in zip(into.tolist(), out_of.tolist(), strict=True):
            expected[rig.local.span(i)] = served.blocks.bytes[served.blocks.span(j)]

        transfer = rig.pull.submit_read(PEER, into, out_of)
        finish(rig.pull, transfer)

        assert np.array_equal(rig.local.bytes, expected)
        assert np.array_equal(served.blocks.bytes, before)
        assert rig.pull.poll(transfer)
        rig.pull.release(transfer)
        assert rig.pull.num_outstanding() == 0

    def test_every_read_sees_the_bytes_of_its_time(self, rig):
        served = rig.add()
        for value in (1, 2, 3):
            served.blocks.bytes[:] = value
            served.words[:] = value
            transfer = rig.pull.submit_read(PEER, rig.local.indices(range(24)), served.blocks.indices(range(24)))
            finish(rig.pull, transfer)
            rig.pull.release(transfer)
            assert (rig.local.bytes[rig.local.span(0)] == value).all()
            assert read_word(rig.pull, PEER, 3) == value

    def test_words_arrive_whole_and_apart_from_each_other(self, rig):
        served = rig.add()
        before = rig.local.bytes.copy()
        transfers = [rig.pull.submit_word_read(PEER, slot) for slot in range(16)]
        for transfer in transfers:
            finish(rig.pull, transfer)
        assert rig.pull.num_outstanding() == 16
        assert [rig.pull.take_word(transfer) for transfer in reversed(transfers)] == served.words.tolist()[::-1]
        assert rig.pull.num_outstanding() == 0
        assert np.array_equal(rig.local.bytes, before)

    def test_a_warm_up_brings_nothing(self, rig):
        rig.add()
        before = rig.local.bytes.copy()
        transfer = rig.pull.submit_warm_up(PEER)
        finish(rig.pull, transfer)
        rig.pull.release(transfer)
        assert rig.pull.num_outstanding() == 0
        assert np.array_equal(rig.local.bytes, before)

    def test_peers_are_told_apart(self, rig):
        one, two = rig.add("one"), rig.add("two")
        first = rig.pull.submit_read(PeerKey("one"), indices(0), indices(0))
        second = rig.pull.submit_read(PeerKey("two"), indices(1), indices(0))
        finish(rig.pull, second)
        finish(rig.pull, first)
        assert np.array_equal(rig.local.bytes[rig.local.span(0)], one.blocks.bytes[one.blocks.span(0)])
        assert np.array_equal(rig.local.bytes[rig.local.span(1)], two.blocks.bytes[two.blocks.span(0)])
        assert read_word(rig.pull, "two", 0) == two.words[0]

    def test_unknown_peers_cannot_be_read(self, rig):
        for submit in (
            lambda: rig.pull.submit_read(PeerKey("nobody"), indices(0), indices(0)),
            lambda: rig.pull.submit_word_read(PeerKey("nobody"), 0),
            lambda: rig.pull.submit_warm_up(PeerKey("nobody")),
        ):
            with pytest.raises(TransportError):
                submit()
        rig.pull.remove_peer(PeerKey("nobody"))
        assert rig.pull.num_outstanding() == 0

    @pytest.mark.parametrize(
        ("local", "remote"),
        [
            pytest.param([72], [0], id="beyond the local descriptors"),
            pytest.param([0], [96], id="beyond the remote descriptors"),
            pytest.param([-1], [0], id="negative"),
            pytest.param([0], [-1], id="negative remote"),
            pytest.param([0], [2**31 - 1], id="huge"),
            pytest.param([0, 1], [0], id="unequal numbers"),
            pytest.param([], [], id="empty"),
            pytest.param([0, 1], [0, 64], id="unequal lengths"),
        ],
    )
    def test_bad_indices_are_refused(self, rig, local, remote):
        rig.add()
        before = rig.local.bytes.copy()
        with pytest.raises(TransportError):
            rig.pull.submit_read(PEER, indices(*local), indices(*remote))
        assert np.array_equal(rig.local.bytes, before)
        assert rig.pull.num_outstanding() == 0

    @pytest.mark.parametrize("slot", [-1, 16, 2**40])
    def test_bad_slots_are_refused(self, rig, slot):
        rig.add()
        with pytest.raises(TransportError):
            rig.pull.submit_word_read(PEER, slot)

    def test_junk_metadata_leaves_nothing_behind(self, rig):
        served = rig.serve()
        good = served.remote_memory
        randomness = random.Random(0)
        junk = [b"", b"\0" * 64, randomness.randbytes(400), good.agent_metadata[:-1], good.agent_metadata[:5]]
        for metadata in [*junk, good.agent_metadata[: len(good.agent_metadata) // 2]]:
            with pytest.raises(TransportError):
                rig.pull.add_peer(PEER, msgspec.structs.replace(good, agent_metadata=metadata), served.blocks.rows)
        with pytest.raises(TransportError):
            rig.pull.add_peer(PEER, msgspec.structs.replace(good, agent_name="another"), served.blocks.rows)
        rig.pull.add_peer(PEER, good, served.blocks.rows)
        assert read_word(rig.pull, PEER, 0) == served.words[0]

    def test_memory_that_is_not_served_cannot_be_added(self, rig):
        served = rig.serve()
        region = served.remote_memory.region
        beyond = msgspec.structs.replace(region, length_bytes=region.length_bytes + 2**20)
        rows = [DescriptorRow(region.address + region.length_bytes, 512, 512, 8)]
        for claim in ({"region": beyond}, {"words": beyond}):
            with pytest.raises(TransportError):
                rig.pull.add_peer(PEER, msgspec.structs.replace(served.remote_memory, **claim), rows)
        rig.pull.add_peer(PEER, served.remote_memory, served.blocks.rows)
        assert read_word(rig.pull, PEER, 1) == served.words[1]

    def test_one_peer_cannot_disturb_another(self, rig):
        served = rig.add("honest")
        memory, rows = served.remote_memory, served.blocks.rows
        with pytest.raises(TransportError):
            rig.pull.add_peer(PeerKey("copycat"), memory, rows)
        with pytest.raises(TransportError):
            rig.pull.add_peer(PeerKey("liar"), msgspec.structs.replace(memory, agent_name="liar"), rows)
        cut = msgspec.structs.replace(memory, agent_name="junk", agent_metadata=memory.agent_metadata[:-9])
        with pytest.raises(TransportError):
            rig.pull.add_peer(PeerKey("junk"), cut, rows)
        assert read_word(rig.pull, "honest", 2) == served.words[2]

    def test_a_key_names_one_peer_at_a_time(self, rig):
        rig.add()
        other = rig.serve()
        with pytest.raises(ValueError, match="peer"):
            rig.pull.add_peer(PEER, other.remote_memory, other.blocks.rows)

    def test_a_removed_peer_can_come_back_under_another_key(self, rig):
        served = rig.add()
        assert read_word(rig.pull, PEER, 0) == served.words[0]
        rig.pull.remove_peer(PEER)
        rig.pull.remove_peer(PEER)
        with pytest.raises(TransportError):
            rig.pull.submit_read(PEER, indices(0), indices(0))
        rig.pull.add_peer(PeerKey("again"), served.remote_memory, served.blocks.rows)
        assert read_word(rig.pull, "again", 5) == served.words[5]

    def test_a_peer_with_an_outstanding_read_stays(self, rig):
        rig.add()
        transfer = rig.pull.submit_word_read(PEER, 0)
        with pytest.raises(ValueError, match="outstanding"):
            rig.pull.remove_peer(PEER)
        finish(rig.pull, transfer)
        rig.pull.remove_peer(PEER)
        rig.pull.take_word(transfer)

    def test_a_transfer_lives_from_submission_to_release(self, rig):
        rig.add()
        blocks, word = rig.pull.submit_read(PEER, indices(0), indices(0)), rig.pull.submit_word_read(PEER, 0)
        assert blocks != word
        rig.pull.release(blocks)
        assert rig.pull.num_outstanding() == 2, "nobody knows yet that it is over"
        with pytest.raises(ValueError, match="not a finished word read"):
            rig.pull.take_word(word)
        finish(rig.pull, blocks)
        finish(rig.pull, word)
        with pytest.raises(ValueError, match="not a finished word read"):
            rig.pull.take_word(blocks)
        for _ in range(2):
            rig.pull.release(blocks)
            rig.pull.release(word)
        rig.pull.release(Transfer(10**6))
        assert rig.pull.num_outstanding() == 0
        for use in (rig.pull.poll, rig.pull.take_word):
            with pytest.raises(ValueError, match="unknown or released"):
                use(word)

    def test_rebuild_ends_every_read_and_forgets_every_peer(self, rig):
        served = rig.add()
        reads = [
            rig.pull.submit_read(PEER, rig.local.indices(range(24)), served.blocks.indices(range(24))),
            rig.pull.submit_word_read(PEER, 0),
        ]
        rig.pull.rebuild()
        rig.local.bytes[:] = 7
        for transfer in reads:
            for _ in range(2):
                with pytest.raises(TransportError):
                    rig.pull.poll(transfer)
            rig.pull.release(transfer)
        assert rig.pull.num_outstanding() == 0
        with pytest.raises(TransportError):
            rig.pull.submit_word_read(PEER, 0)
        rig.pull.add_peer(PEER, served.remote_memory, served.blocks.rows)
        assert read_word(rig.pull, PEER, 9) == served.words[9]
        assert (rig.local.bytes == 7).all()

    def test_close_is_for_good(self, rig):
        served = rig.add()
        transfer = rig.pull.submit_word_read(PEER, 0)
        rig.pull.close()
        rig.pull.close()
        for use in (
            lambda: rig.pull.poll(transfer),
            lambda: rig.pull.submit_word_read(PEER, 0),
            lambda: rig.pull.add_peer(PEER, served.remote_memory, served.blocks.rows),
            rig.pull.rebuild,
        ):
            with pytest.raises(TransportError):
                use()
        rig.pull.remove_peer(PEER)
        rig.pull.release(transfer)
        assert rig.pull.num_outstanding() == 0
        served.transport.close()
        served.transport.close()

    def test_agents_of_one_name_differ(self, rig):
        one, two = rig.serve().remote_memory, rig.serve().remote_memory
        assert one.agent_name != two.agent_name
        assert one.agent_name.startswith("serve")

    def test_local_rows_lie_in_the_local_region(self, rig):
        region = rig.local.region
        with pytest.raises(ValueError, match="outside"):
            rig.make_pull(region, [DescriptorRow(region.address + 1, region.length_bytes, region.length_bytes, 1)])


class TestInvalidRemote:
    GOOD = RemoteMemory("agent", b"", MemoryRange(4096, 4096), MemoryRange(64, 128))
    ROWS = (DescriptorRow(4096, 1024, 1024, 4),)

    def test_a_sound_description_passes(self):
        assert invalid_remote(self.GOOD, self.ROWS) is None

    @pytest.mark.parametrize(
        "claim",
        [
            {"agent_name": ""},
            {"region": MemoryRange(0, 4096)},
            {"region": MemoryRange(4096, 0)},
            {"region": MemoryRange(-1, 4096)},
            {"region": MemoryRange(4096, 2**64)},
            {"region": MemoryRange(4096, 4096, MemoryKind.VRAM, -1)},
            {"words": MemoryRange(68, 128)},
            {"words": MemoryRange(64, 4)},
            {"words": MemoryRange(64, 128, MemoryKind.VRAM, 0)},
        ],
        ids=str,
    )
    def test_impossible_memory_does_not(self, claim):
        assert invalid_remote(msgspec.structs.replace(self.GOOD, **claim), self.ROWS)

    @pytest.mark.parametrize(
        "rows",
        [
            [],
            [DescriptorRow(4096, 1024, 1024, 5)],
            [DescriptorRow(4095, 1024, 1024, 4)],
            [DescriptorRow(4096, 1024, 1023, 2)],
            [DescriptorRow(4096, 1024, 1024, 0)],
            [DescriptorRow(4096, 0, 1024, 1)],
            [DescriptorRow(4096, 1024, 2**63, 3)],
            [DescriptorRow(4096, 1, 1, 4096)] * 2**19,
        ],
        ids=lambda rows: f"{len(rows)} {rows[:1]}",
    )
    def test_impossible_rows_do_not(self, rows):
        assert invalid_remote(self.GOOD, rows)
