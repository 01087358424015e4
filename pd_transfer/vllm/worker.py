"""The worker half: registers the KV cache, serves and pulls, and speaks to vLLM's model runner."""

import logging
import secrets
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.v1.kv_cache_interface import KVCacheConfig

from pd_transfer.config import PdConfig
from pd_transfer.core.layout import EngineLayout, MemoryRange, descriptor_rows
from pd_transfer.core.lease_words import WORD_BYTES, LeaseWords
from pd_transfer.core.outcomes import Outcome
from pd_transfer.core.receives import ReceivePolicy, ReceiveRequest
from pd_transfer.runtime.damage import damage_block
from pd_transfer.runtime.orders import StepOrders, WorkerDescription, WorkerReport
from pd_transfer.runtime.worker import Fence, NoFence, PullLoop, PullThread
from pd_transfer.transport.base import ServeTransport
from pd_transfer.vllm.identity import weights_digest
from pd_transfer.vllm.kv_caches import backing_region, engine_layout, packing_of
from pd_transfer.vllm.metadata import PdWorkerMetadata
from pd_transfer.vllm.parts import Parts

logger = logging.getLogger("pd_transfer.worker")


class StreamFence:
    """A CUDA event recorded on the compute stream: blocks may be written once the kernels before it are done."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event()
        self._event.record()

    def has_passed(self) -> bool:
        """See ``Fence``."""
        return bool(self._event.query())


@dataclass(frozen=True, slots=True)
class Serving:
    """What a prefill worker offers: its memory, and the words that say how long."""

    transport: ServeTransport
    words: LeaseWords


class WorkerHalf:
    """One rank. Built before the KV cache exists; ``register`` completes it."""

    def __init__(self, config: PdConfig, parts: Parts, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        transfer = vllm_config.kv_transfer_config
        assert transfer is not None  # vLLM builds connectors only with a transfer config
        self._config = config
        self._parts = parts
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._transfer = transfer
        self._name = f"{transfer.engine_id}-rank{get_tensor_model_parallel_rank()}"
        self._description: WorkerDescription | None = None
        self._serving: Serving | None = None
        self._pull: PullThread | None = None
        self._report = WorkerReport()
        self._make_fence: Callable[[], Fence] = NoFence
        self.num_internal_errors = 0

    def register(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Register the KV cache with NIXL, in the roles that this engine has."""
        first = next(iter(kv_caches.values()))
        region_bytes = first.untyped_storage().nbytes()
        packing = packing_of(self._vllm_config, self._kv_cache_config, kv_caches)
        layout = engine_layout(self._kv_cache_config, region_bytes, packing)
        region = backing_region(kv_caches, layout)
        if first.device.type == "cuda":
            self._make_fence = StreamFence
        boot_word = secrets.randbits(32)
        if self._transfer.is_kv_producer:
            self._serving = self._start_serving(region, layout.num_blocks, boot_word)
        if self._transfer.is_kv_consumer:
            self._pull = self._start_pulling(region, layout)
        memory = self._serving.transport.remote_memory if self._serving else None
        self._description = WorkerDescription(layout, weights_digest(self._vllm_config), memory, boot_word)
        logger.info(
            "registered %.1f MiB of KV: %d groups, %d layers, %d blocks (%s)",
            region_bytes / 2**20,
            len(layout.groups),
            sum(1 for _ in layout.layers()),
            layout.num_blocks,
            packing,
        )

    def _start_serving(self, region: MemoryRange, num_words: int, boot_word: int) -> Serving:
        table = np.zeros(num_words, dtype=np.uint64)
        lock = threading.Lock()

        def fence() -> None:
            # Taking a lock is a full barrier for the stores before it.
            with lock:
                pass

        words = MemoryRange(table.ctypes.data, num_words * WORD_BYTES)
        return Serving(self._parts.serve(self._name, region, words), LeaseWords(table, boot_word, fence))

    def _start_pulling(self, region: MemoryRange, layout: EngineLayout) -> PullThread:
        rows = descriptor_rows(layout, region.address)
        transport = self._parts.pull(self._name, region, rows)
        policy = ReceivePolicy(self._config.read_seconds, self._config.drain_seconds)
        damage = self._config.debug_damage

        def after_read(request: ReceiveRequest) -> None:
            if damage is not None:
                damage_block(request, layout, rows, *damage)

        loop = PullLoop(transport, policy, get_tensor_model_parallel_rank(), layout, after_read)
        return PullThread(loop, transport)

    @property
    def description(self) -> WorkerDescription | None:
        """What the scheduler half needs to know; None before ``register``."""
        return self._description

    def bind(self, orders: StepOrders) -> None:
        """A step is about to run: change lease words at once, hand reads to the I/O thread."""
        if self._serving is not None:
            self._serving.words.store(orders.words)
        if self._pull is not None:
            self._pull.post(orders, self._make_fence())

    def transfer_results(self) -> KVConnectorTransferResults:
        """Requests whose receive has ended since the last call. Failed ones count as finished too."""
        if self._pull is not None:
            self._report = self._pull.take_report()
        ended = {str(result.request_id) for result in self._report.results}
        kept = (Outcome.RECEIVE_VERIFIED, Outcome.RECEIVE_ABORTED)
        failed = {str(result.request_id) for result in self._report.results if result.outcome not in kept}
        return KVConnectorTransferResults(finished_recving=ended, failed_recving=failed)

    def worker_metadata(self) -> PdWorkerMetadata:
        """The report that belongs to the last ``transfer_results``, and the word changes stored since."""
        report, self._report = self._report, WorkerReport()
        report.outcomes[Outcome.INTERNAL_ERROR] += self.num_internal_errors
        self.num_internal_errors = 0
        if self._serving is not None:
            report.confirmed.update(self._serving.words.take_confirmed())
        return PdWorkerMetadata(report)

    def shutdown(self) -> None:
        """End reads, make every grant worthless, and stop serving: the memory may go afterwards."""
        if self._pull is not None:
            self._pull.close()
        if self._serving is not None:
            self._serving.words.revoke_all()
            self._serving.transport.close()
        self._pull = self._serving = None
