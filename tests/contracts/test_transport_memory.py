"""The controls that the memory transport gives to tests; what it promises as a transport is in test_transport."""

import numpy as np
import pytest

from pd_transfer.core.params import PeerKey
from pd_transfer.errors import TransportError
from pd_transfer.transport.memory import MemoryFabric, MemoryPullTransport
from tests.contracts.transport_rig import Blocks, finish, indices, memory_rig, read_word

PEER = PeerKey("peer")


class TestMemoryFabric:
    @pytest.fixture
    def fabric(self):
        return MemoryFabric()

    @pytest.fixture
    def rig(self, fabric):
        return memory_rig(fabric)

    def test_a_held_read_waits_until_it_is_let_go(self, fabric, rig):
        served = rig.add()
        before = rig.local.bytes.copy()
        fabric.hold_new = True
        transfer = rig.pull.submit_read(PEER, indices(0), indices(0))
        assert not any(rig.pull.poll(transfer) for _ in range(10))
        assert np.array_equal(rig.local.bytes, before)
        fabric.let_go()
        assert rig.pull.poll(transfer)
        assert np.array_equal(rig.local.bytes[rig.local.span(0)], served.blocks.bytes[served.blocks.span(0)])
        assert fabric.reads == []

    def test_reads_are_held_one_by_one(self, fabric, rig):
        rig.add()
        one, two = (rig.pull.submit_read(PEER, indices(i), indices(i)) for i in (0, 1))
        fabric.reads[0].hold()
        assert not rig.pull.poll(one)
        assert rig.pull.poll(two)
        assert [read.transfer for read in fabric.reads] == [one]
        fabric.reads[0].let_go()
        assert rig.pull.poll(one)

    def test_half_a_copy_is_seen_before_the_read_is_over(self, fabric, rig):
        served = rig.add()
        rig.local.bytes[:] = 0
        served.blocks.bytes[:] = 1
        fabric.hold_new = True
        transfer = rig.pull.submit_read(PEER, rig.local.indices([0]), served.blocks.indices([0]))
        fabric.reads[0].copy_half()
        assert rig.local.bytes.sum() == (2 * 512 + 200) // 2
        fabric.reads[0].fail("cable pulled")
        fabric.reads[0].copy_half()
        with pytest.raises(TransportError, match="cable pulled"):
            rig.pull.poll(transfer)
        assert rig.local.bytes.sum() == (2 * 512 + 200) // 2

    def test_latency_is_counted_in_polls(self, fabric, rig):
        rig.add()
        fabric.latency_polls = 3
        transfer = rig.pull.submit_word_read(PEER, 0)
        assert [rig.pull.poll(transfer) for _ in range(5)] == [False, False, False, True, True]

    def test_new_reads_can_be_made_to_fail(self, fabric, rig):
        rig.add()
        fabric.fail_new = "flaky"
        transfer = rig.pull.submit_read(PEER, indices(0), indices(0))
        with pytest.raises(TransportError, match="flaky"):
            rig.pull.poll(transfer)
        rig.pull.release(transfer)
        fabric.fail_new = None
        finish(rig.pull, rig.pull.submit_read(PEER, indices(0), indices(0)))

    def test_a_killed_peer_fails_its_reads_and_no_others(self, fabric, rig):
        dead, alive = rig.add("dead"), rig.add("alive")
        doomed = rig.pull.submit_read(PeerKey("dead"), indices(0), indices(0))
        fine = rig.pull.submit_read(PeerKey("alive"), indices(1), indices(1))
        fabric.kill(dead.remote_memory.agent_name)
        with pytest.raises(TransportError):
            rig.pull.poll(doomed)
        assert rig.pull.poll(fine)
        with pytest.raises(TransportError):
            rig.pull.submit_word_read(PeerKey("dead"), 0)
        rig.pull.remove_peer(PeerKey("dead"))
        with pytest.raises(TransportError):
            rig.pull.add_peer(PeerKey("dead"), dead.remote_memory, dead.blocks.rows)
        assert read_word(rig.pull, "alive", 0) == alive.words[0]

    def test_a_read_that_is_done_cannot_fail(self, fabric, rig):
        served = rig.add()
        transfer = rig.pull.submit_word_read(PEER, 0)
        (read,) = fabric.reads
        assert rig.pull.poll(transfer)
        read.fail("too late")
        read.copy_half()
        fabric.kill(served.remote_memory.agent_name)
        assert rig.pull.take_word(transfer) == served.words[0]

    def test_two_pulling_transports_share_a_fabric(self, fabric, rig):
        served = rig.add()
        other = Blocks(24, seed=99)
        second = MemoryPullTransport(fabric, other.region, other.rows)
        second.add_peer(PEER, served.remote_memory, served.blocks.rows)
        fabric.hold_new = True
        mine, theirs = rig.pull.submit_word_read(PEER, 0), second.submit_word_read(PEER, 1)
        second.close()
        fabric.let_go()
        assert rig.pull.poll(mine)
        with pytest.raises(TransportError):
            second.poll(theirs)
