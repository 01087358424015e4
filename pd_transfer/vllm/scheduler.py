"""The scheduler half: splits prompts, opens leases, admits requests. The only place that touches vLLM's block pool."""

import logging
import os
import secrets
from collections.abc import Mapping, Sequence
from functools import lru_cache
from operator import attrgetter
from pathlib import Path
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from pd_transfer.config import PdConfig, advertised_host, bind_host, check_asker, may_ask, parse_host_port
from pd_transfer.core.admissions import AdmissionBook, AskAgain
from pd_transfer.core.layout import BlockRuns, num_leading_nulls
from pd_transfer.core.leases import LeaseBook, LeasePolicy
from pd_transfer.core.messages import EngineDescription, ModelIdentity, ServedRank
from pd_transfer.core.outcomes import Level, Outcome
from pd_transfer.core.params import (
    Address,
    EngineId,
    InvalidParams,
    RemoteDecode,
    RemotePrefill,
    RequestId,
    parse_params,
)
from pd_transfer.core.peers import PeerBook, PeerPolicy
from pd_transfer.core.plan import needed_runs
from pd_transfer.errors import UnsupportedError
from pd_transfer.runtime.decode import DecodeSide
from pd_transfer.runtime.orders import StepOrders, WorkerDescription, WorkerReport
from pd_transfer.runtime.prefill import FinishedPrompt, PrefillSide
from pd_transfer.runtime.registration import Registrar, Registrations, Role, read_token
from pd_transfer.runtime.scheduler import SchedulerRuntime
from pd_transfer.vllm.identity import config_digest
from pd_transfer.vllm.metadata import PdMetadata, PdWorkerMetadata
from pd_transfer.vllm.metrics import PdStats
from pd_transfer.vllm.parts import Parts
from pd_transfer.vllm.prompts import digest_of, is_plain_tokens, split_prompt, why_not_split

logger = logging.getLogger("pd_transfer.scheduler")

_FINISHED_WELL = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)
_RENEWALS_PER_PERIOD = 3
"""A lease survives two lost renewals."""


class SchedulerHalf:
    """Built with the scheduler; ``start`` completes it once the workers have described themselves.

    Raises ConfigError when an engine that only asks has nobody to ask, or when there is no token to register with.
    """

    def __init__(self, config: PdConfig, parts: Parts, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        transfer = vllm_config.kv_transfer_config
        assert transfer is not None  # vLLM builds connectors only with a transfer config
        self._config = config
        self._parts = parts
        self._vllm_config = vllm_config
        roles = ((Role.PREFILL, transfer.is_kv_producer), (Role.DECODE, transfer.is_kv_consumer))
        self._roles = tuple(role for role, is_ours in roles if is_ours)
        if not self._serves:
            check_asker(config)
        self._registrations = self._registrations_at_proxies()
        self._block_sizes = [group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups]
        self._hash_block_size = kv_cache_config.hash_block_size or min(self._block_sizes)
        self._pool: BlockPool | None = None
        self._runtime: SchedulerRuntime | None = None
        self._split: set[str] = set()
        self._last_levels: dict[Level, int] = {}
        self.num_internal_errors = 0

    @property
    def _serves(self) -> bool:
        return Role.PREFILL in self._roles

    @property
    def _pulls(self) -> bool:
        return Role.DECODE in self._roles

    def _registrations_at_proxies(self) -> Registrations:
        config = self._config
        if not config.register_at or not speaks_for_server(self._vllm_config):
            return Registrations()
        path = Path(config.register_token_file)
        read_token(path)  # the operator learns of a mistake now
        return Registrations(
            [
                Registrar(proxy, config.register_as, self._roles, lambda: read_token(path))
                for proxy in config.register_at
            ]
        )

    def bind_block_pool(self, pool: BlockPool) -> None:
        """The pool whose blocks leases hold references on."""
        self._pool = pool

    def start(self, workers: Mapping[int, WorkerDescription]) -> None:
        """All ranks have registered: serve peers and greet the configured ones. Raises ConfigError."""
        ranks = [workers[rank] for rank in sorted(workers)]
        engine = self._describe(ranks)
        where = Address(bind_host(self._config), self._config.side_channel_port) if self._serves else None
        host = "" if where is None else advertised_host(self._config)
        side_channel = self._parts.open_side_channel(where)
        address = Address(host, side_channel.bound_port or 0)
        prefill = self._prefill_side(engine, ranks, address) if self._serves else None
        decode = self._decode_side(engine) if self._pulls else None
        self._runtime = SchedulerRuntime(prefill, decode, side_channel)
        self._runtime.start()
        if self._serves:
            logger.info("serving KV to decode engines; side channel at %s", address)
        with self._runtime.decode() as (half, now):
            if half is not None:
                half.greet((Address(*parse_host_port(peer)) for peer in self._config.peers), now)
        self._registrations.start()

    def _describe(self, ranks: Sequence[WorkerDescription]) -> EngineDescription:
        layouts = {worker.layout.digest() for worker in ranks}
        if len(layouts) != 1:
            raise UnsupportedError(
                f"the ranks of this engine have {len(layouts)} different KV layouts; see docs/limits.md"
            )
        model = ModelIdentity(
            name=str(self._vllm_config.model_config.model),
            config_digest=config_digest(self._vllm_config),
            weights_digests=tuple(worker.weights_digest for worker in ranks),
        )
        transfer = self._vllm_config.kv_transfer_config
        assert transfer is not None
        engine_id = EngineId(str(transfer.engine_id))
        return EngineDescription(engine_id, secrets.token_hex(8), model, ranks[0].layout, len(ranks))

    def _prefill_side(
        self, engine: EngineDescription, ranks: Sequence[WorkerDescription], address: Address
    ) -> PrefillSide:
        config = self._config
        policy = LeasePolicy(
            config.lease_unclaimed_seconds,
            config.lease_renewal_seconds,
            config.lease_max_seconds,
            config.lease_max_pool_fraction,
        )
        served = tuple(ServedRank(worker.memory, worker.boot_word) for worker in ranks if worker.memory is not None)
        num_blocks = engine.layout.num_blocks
        return PrefillSide(engine, served, LeaseBook(policy, num_blocks, num_blocks, len(ranks)), address)

    def _decode_side(self, engine: EngineDescription) -> DecodeSide:
        config = self._config
        peers = PeerBook(PeerPolicy(config.handshake_seconds, config.backoff_seconds, config.rejection_seconds), engine)
        renewal_seconds = min(config.lease_renewal_seconds, config.lease_unclaimed_seconds) / _RENEWALS_PER_PERIOD

        @lru_cache(maxsize=1024)
        def is_allowed(address: Address) -> bool:
            return may_ask(config, address.host, address.port)

        return DecodeSide(peers, AdmissionBook(peers, renewal_seconds, config.lease_max_seconds), is_allowed)

    @property
    def _running(self) -> SchedulerRuntime:
        assert self._runtime is not None  # vLLM schedules nothing before every worker has registered
        return self._runtime

    def new_request(self, request: Request) -> None:
        """A request was queued: split it, or begin to prepare its read."""
        params = parse_params(request.kv_transfer_params)
        if not isinstance(request.kv_transfer_params, dict):
            # vLLM looks into them next, and what it raises ends the engine; ``vllm_xargs`` lets clients send anything.
            request.kv_transfer_params = None
        match params:
            case RemoteDecode() if self._serves:
                self._prepare_hand_off(request)
            case RemotePrefill() if self._pulls:
                self._arrive(request, params)
            case InvalidParams(reason) if self._pulls:
                with self._running.decode() as (half, _):
                    if half is not None:
                        half.outcomes[Outcome.PARAMS_INVALID] += 1
                logger.warning("%s: unusable kv_transfer_params, computed here instead: %s", request.request_id, reason)

    def _prepare_hand_off(self, request: Request) -> None:
        if request.abort_immediately:
            return
        if reason := why_not_split(request):
            logger.info("%s: no hand-off, decode computes the prompt: %s", request.request_id, reason)
            with self._running.prefill() as (half, _):
                if half is not None:
                    half.outcomes[Outcome.HAND_OFF_IMPOSSIBLE] += 1
            return
        split_prompt(request, self._hash_block_size)
        self._split.add(request.request_id)

    def _arrive(self, request: Request, params: RemotePrefill) -> None:
        num_tokens = request.num_prompt_tokens - 1
        with self._running.decode() as (half, now):
            if half is None:
                return
            if request.abort_immediately:
                half.turn_away(params, now)
            elif not is_plain_tokens(request):
                # Embeddings are not in the digest: another prompt's KV would fit.
                half.outcomes[Outcome.PARAMS_INVALID] += 1
                logger.warning("%s: computed here: the prompt is not plain token ids", request.request_id)
                half.turn_away(params, now)
            else:
                half.arrive(RequestId(request.request_id), params, digest_of(request, num_tokens), num_tokens, now)

    def num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """vLLM's question: how many tokens beyond its own can be loaded, and whether in the background."""
        with self._running.decode() as (half, now):
            if half is None:
                return 0, False
            answer = half.ask(RequestId(request.request_id), num_computed_tokens, now)
        if isinstance(answer, AskAgain):
            return None, False
        return answer.num_tokens, answer.num_tokens > 0

    def allocated(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """vLLM has allocated a request's blocks. Called again after the load, then with no external tokens."""
        request_id = RequestId(request.request_id)
        with self._running.decode() as (half, now):
            if half is None:
                return
            try:
                needed = self._needed(blocks, half.num_local_tokens(request_id), num_external_tokens)
            except Exception:
                # vLLM waits for this load from now on, whatever became of it here.
                half.fail_load(request_id, num_external_tokens, now)
                raise
            half.allocated(request_id, num_external_tokens, needed, now)

    def _needed(self, blocks: KVCacheBlocks, num_local_tokens: int, num_external_tokens: int) -> tuple[BlockRuns, ...]:
        return tuple(
            needed_runs(
                _ids_to_fill(table),
                block_size,
                num_local_tokens,
                num_local_tokens + num_external_tokens,
            )
            for table, block_size in zip(blocks.blocks, self._block_sizes, strict=True)
        )

    def build_metadata(self, output: SchedulerOutput) -> PdMetadata:
        """The orders of the step that is about to run."""
        batch = None
        with self._running.prefill() as (prefill, now):
            if prefill is not None:
                prefill.leases.expire(now)
                batch = prefill.leases.take_word_changes()
        with self._running.decode() as (decode, _):
            orders = decode.take_orders() if decode is not None else StepOrders()
        orders.words = [batch] if batch is not None else []
        orders.is_idle = output.total_num_scheduled_tokens == 0
        return PdMetadata(orders)

    def apply_output(self, output: KVConnectorOutput) -> None:
        """What the workers answered to a step."""
        metadata = output.kv_connector_worker_meta
        report = metadata.report if isinstance(metadata, PdWorkerMetadata) else WorkerReport()
        ended = [RequestId(request_id) for request_id in output.finished_recving or ()]
        with self._running.decode() as (half, now):
            if half is not None:
                half.apply(report, ended, now)
        freed: list[int] = []
        with self._running.prefill() as (half, now):
            if half is not None:
                for batch_id, num_ranks in report.confirmed.items():
                    freed.extend(half.leases.confirm(batch_id, num_ranks, now))
        if freed and self._pool is not None:
            # Later blocks first, so that a shared prefix is evicted last.
            self._pool.free_blocks(self._pool.blocks[block_id] for block_id in reversed(freed))

    def request_finished(self, request: Request, block_ids: tuple[list[int], ...]) -> dict[str, Any] | None:
        """A request is over. Its params when it was split here; its blocks then stay under a lease."""
        request_id = RequestId(request.request_id)
        with self._running.decode() as (half, now):
            if half is not None:
                half.request_ended(request_id, now)
        if request.request_id not in self._split:
            return None
        self._split.discard(request.request_id)
        if request.status not in _FINISHED_WELL or request.num_computed_tokens < request.num_prompt_tokens:
            return None
        num_tokens = request.num_prompt_tokens
        prompt = FinishedPrompt(request_id, num_tokens, digest_of(request, num_tokens), block_ids)
        assert self._pool is not None  # bound when the scheduler was built
        blocks = [self._pool.blocks[block_id] for block_id in prompt.block_ids()]
        # The references come before the lease: a lease without them would prove blocks that vLLM has reused.
        self._pool.touch(blocks)
        with self._running.prefill() as (half, now):
            params = half.hand_off(prompt, now) if half is not None else None
        if params is None:
            self._pool.free_blocks(reversed(blocks))
            logger.warning("%s: no hand-off, too much of the pool is under lease", request.request_id)
        return params

    def has_pending_block_frees(self) -> bool:
        """Whether leases are ending, so that blocks come free without preempting anybody."""
        with self._running.prefill() as (half, _):
            return half is not None and half.leases.is_retiring

    def reset_cache(self) -> None:
        """Every lease ends; once the next step has run, no decode engine accepts what it read under one."""
        with self._running.prefill() as (half, now):
            if half is not None:
                half.leases.reset(now)

    def stats(self) -> PdStats | None:
        """What was counted since the last call; None when nothing was and the levels are the same."""
        collected = self._running.collect()
        collected.outcomes[Outcome.INTERNAL_ERROR] += self.num_internal_errors
        self.num_internal_errors = 0
        levels = {level: collected.levels[level] for level in Level}
        if not collected.outcomes.total() and not collected.measured.quantities and levels == self._last_levels:
            return None
        self._last_levels = levels
        return PdStats.from_collected(collected)

    def shutdown(self) -> None:
        """Ask the proxies for no more requests, and stop serving peers."""
        self._registrations.close()
        if self._runtime is not None:
            self._runtime.close()


def _ids_to_fill(table: Sequence[KVCacheBlock]) -> list[int]:
    """0 where nothing may be written: the null block, and hashed ones, which others may be reading."""
    num_nulls = num_leading_nulls(table, attrgetter("is_null"))
    return [0] * num_nulls + [0 if block.block_hash is not None else block.block_id for block in table[num_nulls:]]


def data_parallel_rank(vllm_config: VllmConfig) -> int:
    """This engine's rank among data-parallel ones: each needs a side channel port of its own."""
    return int(vllm_config.parallel_config.data_parallel_index)


def speaks_for_server(vllm_config: VllmConfig) -> bool:
    """Whether this engine registers the API server that it is behind: one of its data-parallel ranks does."""
    parallel = vllm_config.parallel_config
    # With vLLM's external and hybrid balancing, each node has an API server for its own ranks.
    rank = parallel.data_parallel_rank_local if parallel.local_engines_only else parallel.data_parallel_index
    return not rank


def environment() -> Mapping[str, str]:
    """The process's environment variables."""
    return os.environ
