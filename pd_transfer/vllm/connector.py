"""The class that vLLM loads. It only forwards: to the scheduler half or to the worker half.

An exception from any connector method ends the engine, so none may leave one: ``contained`` turns what should not
exist into a log entry and the harmless answer. Errors at start-up are the exception: there the operator must see them.
"""

import functools
import logging
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
    PromMetric,
    PromMetricT,
)
from vllm.forward_context import ForwardContext
from vllm.v1.attention.backend import AttentionMetadata
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from pd_transfer.config import PdConfig, load_config
from pd_transfer.errors import ConfigError
from pd_transfer.vllm import plugin
from pd_transfer.vllm.kv_caches import check_cache, check_engine
from pd_transfer.vllm.metadata import PdHandshakeMetadata, PdMetadata
from pd_transfer.vllm.metrics import PdPromMetrics, PdStats
from pd_transfer.vllm.parts import Parts, real_parts
from pd_transfer.vllm.scheduler import SchedulerHalf, data_parallel_rank, environment
from pd_transfer.vllm.worker import WorkerHalf

logger = logging.getLogger("pd_transfer.connector")

Method = TypeVar("Method", bound=Callable[..., Any])


def contained(fallback: Callable[[], object]) -> Callable[[Method], Method]:
    """Answer ``fallback()`` when the method raises, and log the bug: an exception here would end the engine."""

    def decorate(method: Method) -> Method:
        @functools.wraps(method)
        def contained_method(self: "PdConnector", *args: object, **kwargs: object) -> object:
            try:
                return method(self, *args, **kwargs)
            except Exception:
                logger.exception("internal error in %s, please report it; the engine goes on", method.__name__)
                self.count_internal_error()
                return fallback()

        return cast("Method", contained_method)

    return decorate


def _log_like_vllm() -> None:
    """Our log lines go where vLLM's go; vLLM configures only its own logger."""
    ours, theirs = logging.getLogger("pd_transfer"), logging.getLogger("vllm")
    if not ours.handlers:
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.level)
        ours.propagate = not theirs.handlers


def _nothing() -> None:
    return None


class PdConnector(KVConnectorBase_V1, SupportsHMA):
    """Hybrid-aware prefill/decode KV transfer; see docs/architecture.md."""

    _cache_hit_source = CacheHitSource.P2P

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        _log_like_vllm()
        check_engine(vllm_config)
        check_cache(kv_cache_config)
        extra = self._kv_transfer_config.kv_connector_extra_config
        config = load_config(extra, environment(), data_parallel_rank(vllm_config))
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        parts = self.make_parts(config)
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerHalf(config, parts, vllm_config, kv_cache_config)
        else:
            self._worker = WorkerHalf(config, parts, vllm_config, kv_cache_config)

    @classmethod
    def make_parts(cls, config: PdConfig) -> Parts:
        """The outside world; a test's subclass answers with fakes."""
        return real_parts(config)

    @property
    def _as_scheduler(self) -> SchedulerHalf:
        assert self._scheduler is not None  # vLLM calls each role's methods on that role's instance
        return self._scheduler

    @property
    def _as_worker(self) -> WorkerHalf:
        assert self._worker is not None
        return self._worker

    def count_internal_error(self) -> None:
        """An exception was contained: it appears in the metrics with the next step."""
        half = self._scheduler or self._worker
        if half is not None:
            half.num_internal_errors += 1

    # Class-level questions.

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """Layer-major, so that neighbouring blocks of a layer merge into one descriptor."""
        return "LBHNC"

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        """See vLLM."""
        return PdStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics | None:
        """See vLLM."""
        return PdPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # Start-up: errors are for the operator.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Worker: the KV cache is allocated."""
        self._as_worker.register(kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Worker: what the scheduler half needs to know of this rank."""
        description = self._as_worker.description
        return None if description is None else PdHandshakeMetadata(description)

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        """Scheduler: every rank has registered."""
        workers = {rank: item.worker for rank, item in metadata.items() if isinstance(item, PdHandshakeMetadata)}
        if len(workers) != len(metadata):
            raise ConfigError("another connector's workers answered the handshake; check kv_connector_module_path")
        self._as_scheduler.start(workers)

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """Scheduler: the pool that leases hold references in."""
        self._as_scheduler.bind_block_pool(gpu_block_pool)

    # Scheduler.

    @contained(_nothing)
    def on_new_request(self, request: Request) -> None:
        """See vLLM."""
        self._as_scheduler.new_request(request)

    @contained(lambda: (0, False))
    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """See vLLM."""
        return self._as_scheduler.num_new_matched_tokens(request, num_computed_tokens)

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        """Every group: the request's own blocks are read."""
        return tuple(self._kv_cache_config.transfer_group_ids)

    @contained(_nothing)
    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """See vLLM."""
        self._as_scheduler.allocated(request, blocks, num_external_tokens)

    @contained(PdMetadata)
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """See vLLM."""
        return self._as_scheduler.build_metadata(scheduler_output)

    @contained(_nothing)
    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """See vLLM."""
        self._as_scheduler.apply_output(connector_output)

    @contained(lambda: (False, None))
    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Never delays freeing: leases hold references instead, so that vLLM forgets the request."""
        return False, self._as_scheduler.request_finished(request, block_ids)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """The same for a model with one group."""
        return self.request_finished_all_groups(request, (block_ids,))

    @contained(lambda: False)
    def has_pending_block_frees(self) -> bool:
        """See vLLM."""
        return self._as_scheduler.has_pending_block_frees()

    @contained(lambda: False)
    def has_pending_push_work(self) -> bool:
        """Keeps an engine that is awake stepping until its leases have ended; never wakes an idle one."""
        return self._as_scheduler.has_pending_block_frees()

    @contained(_nothing)
    def reset_cache(self) -> bool | None:
        """See vLLM."""
        self._as_scheduler.reset_cache()
        return True

    # Worker.

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Orders are carried out here, before the forward pass: a read that waits for its end loses a step."""
        super().bind_connector_metadata(connector_metadata)
        self._carry_out(connector_metadata)

    @contained(_nothing)
    def _carry_out(self, connector_metadata: KVConnectorMetadata) -> None:
        if isinstance(connector_metadata, PdMetadata):
            self._as_worker.bind(connector_metadata.orders)

    @contained(KVConnectorTransferResults)
    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """See vLLM."""
        return self._as_worker.transfer_results()

    @contained(_nothing)
    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """See vLLM."""
        return self._as_worker.worker_metadata()

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Nothing: reads were posted at bind."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: loads are asynchronous, whole requests at a time."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **kwargs: Any
    ) -> None:
        """Nothing: decode reads prefill's blocks where they are."""

    def wait_for_save(self) -> None:
        """Nothing is saved."""

    # Both.

    @contained(_nothing)
    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """The scheduler half counts for the whole engine."""
        return self._scheduler.stats() if self._scheduler is not None else None

    @contained(_nothing)
    def shutdown(self) -> None:
        """See vLLM."""
        if self._scheduler is not None:
            self._scheduler.shutdown()
        if self._worker is not None:
            self._worker.shutdown()


NixlConnector = PdConnector
"""The name that routers and vLLM itself test for."""

# For its log line MultiConnector looks a child's class up by the name of that class, however the child was loaded; a
# name that it does not find, or that is vLLM's own connector, ends the API server. Hence one class, known by its name.
plugin.register()
