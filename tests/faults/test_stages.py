"""Reads stay where the files say, are submitted and reported when the files are gone, and fail with their agent."""

import numpy as np
import pytest

from pd_transfer.core.params import PeerKey
from pd_transfer.errors import TransportError
from pd_transfer.transport.memory import MemoryFabric, MemoryPullTransport, MemoryServeTransport
from tests.contracts.transport_rig import Rig, finish, read_word
from tests.faults.stages import Stage, StagedPull, Stages

PEER = PeerKey("peer")


@pytest.fixture
def stages(tmp_path):
    return Stages(tmp_path)


@pytest.fixture
def fabric():
    return MemoryFabric()


@pytest.fixture
def rig(fabric, stages):
    return Rig(
        lambda region, words: MemoryServeTransport(fabric, "serve", region, words),
        lambda region, rows: StagedPull(MemoryPullTransport(fabric, region, rows), rows, stages.folder),
    )


class Receive:
    """A read of some blocks and then of word 3, as the connector makes them."""

    def __init__(self, rig):
        self.rig = rig
        self.indices = rig.local.indices(range(4)), rig.served[0].blocks.indices(range(4))
        self.transfer = rig.pull.submit_read(PEER, *self.indices)
        self.is_word = False

    def poll(self) -> int | None:
        """One turn; the word, once it has come."""
        if not self.rig.pull.poll(self.transfer):
            return None
        if self.is_word:
            return self.rig.pull.take_word(self.transfer)
        self.rig.pull.release(self.transfer)
        self.transfer, self.is_word = self.rig.pull.submit_word_read(PEER, 3), True
        return self.poll()


def has_landed(rig) -> bool:
    remote = rig.served[0].blocks
    return np.array_equal(rig.local.bytes[rig.local.span(0)], remote.bytes[remote.span(0)])


def test_a_read_that_nobody_holds_passes(rig, stages):
    served = rig.add()
    assert Receive(rig).poll() == served.words[3]
    assert has_landed(rig)
    assert not any(stages.num_reached(stage) for stage in Stage)
    assert rig.pull.num_outstanding() == 0


@pytest.mark.parametrize(
    ("stage", "num_submitted", "landed"),
    [
        (Stage.BEFORE_READ, 0, False),
        (Stage.DURING_READ, 1, False),
        (Stage.BEFORE_WORD, 0, True),
        (Stage.AFTER_WORD, 0, True),
    ],
)
def test_a_read_stays_at_a_stage(rig, fabric, stages, stage, num_submitted, landed):
    served = rig.add()
    with stages.holding(stage):
        receive = Receive(rig)
        assert [receive.poll() for _ in range(3)] == [None] * 3
        stages.wait(stage, seconds=0)
        assert stages.num_reached(stage) == 1
        assert len(fabric.reads) == num_submitted
        assert has_landed(rig) is landed
        assert rig.pull.num_outstanding() == 1
    assert receive.poll() == served.words[3]
    assert has_landed(rig)


def test_the_word_is_read_where_the_stage_says(rig, stages):
    served = rig.add()
    old = int(served.words[3])
    for stage, expected in ((Stage.BEFORE_WORD, 7), (Stage.AFTER_WORD, old)):
        served.words[3] = old
        with stages.holding(stage):
            receive = Receive(rig)
            assert receive.poll() is None
            served.words[3] = 7
        assert receive.poll() == expected


def test_the_read_that_sets_up_a_connection_is_not_held(rig, stages):
    served = rig.add()
    with stages.holding(Stage.BEFORE_WORD), stages.holding(Stage.AFTER_WORD):
        assert read_word(rig.pull, "peer", 3) == served.words[3]


def test_nor_is_it_after_a_read_whose_proof_nobody_wants(rig, stages):
    served = rig.add()
    aborted = Receive(rig).transfer
    finish(rig.pull, aborted)
    rig.pull.release(aborted)
    with stages.holding(Stage.BEFORE_WORD), stages.holding(Stage.AFTER_WORD):
        rig.pull.release(rig.pull.submit_warm_up(PEER))
        assert read_word(rig.pull, "peer", 3) == served.words[3]


def test_a_submission_that_fails_after_the_hold_fails_the_poll(rig, fabric, stages):
    rig.add()
    with stages.holding(Stage.BEFORE_READ):
        receive = Receive(rig)
        assert receive.poll() is None
        rig.served[0].transport.close()
    for _ in range(2):
        with pytest.raises(TransportError, match="broken"):
            receive.poll()
    rig.pull.release(receive.transfer)
    assert rig.pull.num_outstanding() == 0


@pytest.mark.parametrize("stage", Stage)
def test_held_reads_fail_with_their_agent(rig, stages, stage):
    rig.add()
    with stages.holding(stage):
        receive = Receive(rig)
        assert receive.poll() is None
        rig.pull.release(receive.transfer)
        assert rig.pull.num_outstanding() == 1
        rig.pull.rebuild()
        with pytest.raises(TransportError, match="destroyed"):
            receive.poll()
        rig.pull.release(receive.transfer)
    assert rig.pull.num_outstanding() == 0


def test_damage_is_done_to_what_was_read_alone(rig, stages):
    served = rig.add()
    before = rig.local.bytes.copy()
    with stages.damaging():
        assert Receive(rig).poll() == served.words[3]
    read = np.zeros(len(before), dtype=bool)
    for index in rig.local.indices(range(4)):
        read[rig.local.span(index)] = True
    assert not rig.local.bytes[read].any()
    assert np.array_equal(rig.local.bytes[~read], before[~read])


def test_waiting_for_what_does_not_come(stages):
    with pytest.raises(TimeoutError, match="0 reads came to during-read"):
        stages.wait(Stage.DURING_READ, seconds=0)


def test_clear_forgets(rig, stages):
    rig.add()
    with stages.holding(Stage.DURING_READ):
        Receive(rig).poll()
    stages.clear()
    assert stages.num_reached(Stage.DURING_READ) == 0
