"""NIXL with another process at the other end: its death, its silence, its idleness, and the proof of the lease word."""

import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress

import numpy as np
import pytest

from pd_transfer.core.layout import DescriptorRow
from pd_transfer.core.params import PeerKey
from pd_transfer.errors import TransportError
from pd_transfer.transport.nixl import NixlPullTransport
from tests.contracts import transport_serving_process as serving
from tests.contracts.transport_rig import finish, memory_range, read_word

pytestmark = pytest.mark.nixl

PEER = PeerKey("peer")
BLOCK_BYTES, NUM_LAYERS, NUM_BLOCKS = 16 * 1024, 4, 64
REGION_BYTES = BLOCK_BYTES * NUM_LAYERS * NUM_BLOCKS
TCP = "TLS=tcp"


def rows(address: int) -> list[DescriptorRow]:
    layer_bytes = BLOCK_BYTES * NUM_BLOCKS
    return [DescriptorRow(address + i * layer_bytes, BLOCK_BYTES, BLOCK_BYTES, NUM_BLOCKS) for i in range(NUM_LAYERS)]


def indices(blocks) -> np.ndarray:
    return np.array([layer * NUM_BLOCKS + b for layer in range(NUM_LAYERS) for b in blocks], dtype=np.int32)


ALL = indices(range(NUM_BLOCKS))


class Pulling:
    """A pulling transport over a region of its own."""

    def __init__(self, engine_config: str = "", **options):
        self.region = np.zeros(REGION_BYTES, dtype=np.uint8)
        params = {"engine_config": engine_config} if engine_config else {}
        memory = memory_range(self.region)
        self.transport = NixlPullTransport("pull", memory, rows(memory.address), backend_params=params, **options)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.transport.close()

    def add(self, process: serving.ServingProcess) -> None:
        memory = process.remote_memory
        self.transport.add_peer(PEER, memory, rows(memory.region.address))
        read_word(self.transport, PEER, 0)

    def read(self) -> None:
        transfer = self.transport.submit_read(PEER, ALL, ALL)
        finish(self.transport, transfer)
        self.transport.release(transfer)


@pytest.fixture(scope="module", params=["", TCP], ids=["default", "tcp"])
def each_process(request):
    """A live process for each way to carry the bytes, shared by the tests that leave it alive."""
    with serving.ServingProcess(REGION_BYTES, request.param) as process:
        yield process


@pytest.fixture(scope="module")
def process():
    with serving.ServingProcess(REGION_BYTES) as process:
        yield process


def fill(process, value: int) -> None:
    process.command(f"fill {value}")
    process.answer()


def test_another_process_is_read(each_process):
    with Pulling(each_process.engine_config) as pulling:
        pulling.add(each_process)
        for value in (8, 9):
            fill(each_process, value)
            pulling.read()
            assert (pulling.region == value).all()


def test_nothing_is_written_after_a_rebuild(each_process):
    with Pulling(each_process.engine_config) as pulling:
        pulling.add(each_process)
        fill(each_process, 9)
        transfers = [pulling.transport.submit_read(PEER, ALL, ALL) for _ in range(8)]
        pulling.transport.rebuild()
        pulling.region[:] = 7
        for transfer in transfers:
            with pytest.raises(TransportError):
                pulling.transport.poll(transfer)
            pulling.transport.release(transfer)
        time.sleep(0.2)
        assert (pulling.region == 7).all()
        assert pulling.transport.num_outstanding() == 0
        pulling.add(each_process)
        pulling.read()
        assert (pulling.region == 9).all()


def test_an_error_in_hand_does_not_keep_the_agent_alive(each_process):
    """An exception holds its frames; one that held the native agent would keep its threads, and its reads."""
    threads = num_threads()
    with Pulling(each_process.engine_config) as pulling:
        pulling.add(each_process)
        assert num_threads() > threads
        try:
            pulling.transport.submit_read(PEER, ALL[:1], ALL[:2])
        except TransportError:
            pulling.transport.close()
            assert num_threads() == threads


def num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


@pytest.mark.parametrize("engine_config", ["", TCP], ids=["default", "tcp"])
def test_a_dead_process_raises_and_its_successor_is_read(engine_config):
    with Pulling(engine_config) as pulling:
        with serving.ServingProcess(REGION_BYTES, engine_config) as process:
            pulling.add(process)
            old = process.remote_memory
            # A stopped process answers no read over TCP. On the same host it need not: the read may end well.
            process.stop()
            transfer = pulling.transport.submit_read(PEER, ALL, ALL)
            if engine_config:
                assert not pulling.transport.poll(transfer)
            process.kill()
            if engine_config:
                with pytest.raises(TransportError):
                    finish(pulling.transport, transfer, seconds=10)
            with pytest.raises(TransportError):
                finish(pulling.transport, pulling.transport.submit_read(PEER, ALL, ALL), seconds=10)
        with serving.ServingProcess(REGION_BYTES, engine_config) as process:
            new = process.remote_memory
            pulling.transport.add_peer(PeerKey("new"), new, rows(new.region.address))
            with suppress(TransportError):
                finish(pulling.transport, transfer)
            pulling.transport.remove_peer(PEER)
            with pytest.raises(TransportError):
                pulling.transport.add_peer(PEER, old, rows(old.region.address))
            assert read_word(pulling.transport, "new", 0) == 0


def test_an_agent_that_cannot_be_made_at_once_is_made_for_the_next_peer(monkeypatch):
    """As when a network device is down for a while."""
    with serving.ServingProcess(REGION_BYTES) as process, Pulling() as pulling:
        pulling.add(process)
        read = pulling.transport.submit_word_read(PEER, 0)
        monkeypatch.setenv("UCX_TLS", "carrier_pigeon")
        with pytest.raises(TransportError):
            pulling.transport.rebuild()
        for use in (lambda: pulling.transport.poll(read), lambda: pulling.add(process)):
            with pytest.raises(TransportError):
                use()
        pulling.transport.release(read)
        pulling.transport.remove_peer(PEER)
        monkeypatch.delenv("UCX_TLS")
        pulling.add(process)
        pulling.read()
        assert pulling.transport.num_outstanding() == 0


def test_rebuild_does_not_wait_for_a_process_that_hangs():
    with serving.ServingProcess(REGION_BYTES, TCP) as process, Pulling(TCP) as pulling:
        pulling.add(process)
        process.stop()
        transfer = pulling.transport.submit_read(PEER, ALL, ALL)
        deadline = time.monotonic() + 0.2
        while time.monotonic() < deadline:
            assert not pulling.transport.poll(transfer)
        start = time.monotonic()
        pulling.transport.rebuild()
        assert time.monotonic() - start < 10
        with pytest.raises(TransportError):
            pulling.transport.poll(transfer)
        pulling.region[:] = 7
        # It may die of the broken connection, which is a bug of UCX.
        process.go_on()
        time.sleep(0.3)
        assert (pulling.region == 7).all()


UCX_KEEPALIVE_SECONDS = 20.0


def words_are_read_while_stopped(engine_config: str, idle_seconds: float) -> bool:
    """On the same host, over connections that were idle for so long when their peer was stopped."""
    with serving.ServingProcess(REGION_BYTES) as process, Pulling(engine_config) as pulling:
        pulling.add(process)
        pulling.read()
        time.sleep(idle_seconds)
        process.stop()
        try:
            for _ in range(100):
                pulling.read()
                finish(pulling.transport, pulling.transport.submit_word_read(PEER, 0), seconds=2)
        except AssertionError:
            return False
        finally:
            process.go_on()
        return True


def test_reads_on_the_same_host_do_not_need_their_peer():
    """Not even the first ones after an idle time that is longer than UCX waits to ask whether a peer lives."""
    assert words_are_read_while_stopped("", UCX_KEEPALIVE_SECONDS + 1)


def test_a_peer_that_is_asked_whether_it_lives_has_to_answer_before_a_read_ends():
    """The control, and that an operator's setting is obeyed."""
    assert not words_are_read_while_stopped("KEEPALIVE_INTERVAL=100ms", 0.2)


def test_neighbouring_blocks_are_merged_layer_by_layer(process):
    with Pulling(capture_telemetry=True) as pulling:
        pulling.add(process)
        every_other = indices(range(0, NUM_BLOCKS, 2))
        for selection, expected in ((ALL, NUM_LAYERS), (every_other, len(every_other))):
            transfer = pulling.transport.submit_read(PEER, selection, selection)
            assert pulling.transport.num_descriptors(transfer) is None
            finish(pulling.transport, transfer)
            assert pulling.transport.num_descriptors(transfer) == expected
            pulling.transport.release(transfer)


def test_idle_agents_leave_the_processor_alone(each_process):
    with Pulling(each_process.engine_config) as pulling:
        pulling.add(each_process)
        pulling.read()
        theirs, mine, start = each_process.cpu_seconds(), time.process_time(), time.monotonic()
        time.sleep(2)
        seconds = time.monotonic() - start
        assert (each_process.cpu_seconds() - theirs) / seconds < 0.05
        assert (time.process_time() - mine) / seconds < 0.05


def test_settings_that_ucx_does_not_know_are_refused():
    with pytest.raises(TransportError):
        Pulling("TLS=carrier_pigeon")


class TestLeaseWord:
    """A producer overwrites its blocks every few milliseconds, and changes the word each time before it does."""

    @pytest.fixture
    def pulling(self, process):
        with Pulling() as pulling:
            pulling.add(process)
            pulling.read()
            process.command("rewrite")
            process.answer()
            yield pulling
            process.command("rest")
            process.answer()

    def test_a_word_read_after_the_last_byte_tells_torn_blocks(self, pulling):
        count = Counter()
        for verdict in verdicts(pulling, read_then_word):
            count[verdict] += 1
            assert count["torn"] == 0
            if min(count["whole"], count["rejected"]) >= 100:
                return
        pytest.fail(f"not enough reads to prove anything: {count}")

    def test_a_word_read_with_the_blocks_does_not(self, pulling):
        """The control: were nothing ever torn here, the test above would prove nothing."""
        count = Counter()
        for verdict in verdicts(pulling, word_with_read):
            count[verdict] += 1
            if count["torn"] >= 5:
                return
        pytest.fail(f"no torn blocks were accepted: {count}")


def read_then_word(pulling) -> int:
    pulling.read()
    return read_word(pulling.transport, PEER, serving.GENERATION)


def word_with_read(pulling) -> int:
    word = pulling.transport.submit_word_read(PEER, serving.GENERATION)
    pulling.read()
    finish(pulling.transport, word)
    return pulling.transport.take_word(word)


def verdicts(pulling, read) -> Iterator[str]:
    """What a consumer that trusts the word makes of read after read, for four seconds."""
    end = time.monotonic() + 4
    while time.monotonic() < end:
        expected = read_word(pulling.transport, PEER, serving.STABLE)
        if read(pulling) != expected:
            yield "rejected"
        else:
            yield "whole" if (pulling.region == expected & 0xFF).all() else "torn"
