"""Engines without weights: vLLM's scheduler, our connector in both roles, and a KV cache that vLLM lays out.

Everything of an engine is real but three things: the model (``fake_model``), the side channel and the transport (the
fakes that ship). A step does what vLLM's engine core, executor and model runner do, in their order; what travels
between processes is pickled.
"""

import json
import logging
import pickle
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from vllm.distributed import parallel_state
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.utils import allocate_kv_cache

from pd_transfer.core.messages import Welcome
from pd_transfer.core.outcomes import Level
from pd_transfer.core.params import parse_grant, seal_grant
from pd_transfer.sidechannel.memory import MemoryNetwork
from pd_transfer.transport.memory import MemoryFabric
from tests.adapter.fake_model import FakeRunner
from tests.adapter.geometry import Settings, engine_config, kv_cache_configs
from tests.adapter.outside import FakeWorldConnector, LockedFabric, Outside

WAIT_SECONDS = 10.0
"""Longest that anything here waits: a test that needs it fails."""
_POLL_SECONDS = 0.0005


@contextmanager
def tensor_parallel_rank(rank: int) -> Iterator[None]:
    """vLLM's own place for a worker's rank, which needs torch.distributed otherwise."""
    before = parallel_state._TP
    parallel_state._TP = SimpleNamespace(rank_in_group=rank)
    try:
        yield
    finally:
        parallel_state._TP = before


@dataclass
class Result:
    """What the client of a request has seen."""

    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    params: dict[str, Any] | None = None


class Worker:
    """One rank: a connector in the worker role, and the fake model over a KV cache of vLLM's making."""

    def __init__(self, rank: int, config: Any, kv_cache_config: Any, settings: Settings) -> None:
        with tensor_parallel_rank(rank):
            self.connector = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, kv_cache_config)
            layout = config.cache_config.get_resolved_kv_cache_layout()
            self.caches = allocate_kv_cache(kv_cache_config, torch.device("cpu"), layout)
            self.connector.register_kv_caches(self.caches)
        self.runner = FakeRunner(rank, self.caches, kv_cache_config, settings.layers)
        storage = next(iter(self.caches.values())).untyped_storage()
        self.memory = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()

    def step(self, output: SchedulerOutput) -> tuple[dict[str, list[int]], KVConnectorOutput]:
        """As vLLM's model runner does it."""
        connector = self.connector
        if output.preempted_req_ids:
            connector.handle_preemptions(output.kv_connector_metadata)
        connector.bind_connector_metadata(output.kv_connector_metadata)
        sampled = self.runner.run(output)
        for name, cache in self.caches.items() if sampled else ():
            connector.wait_for_layer_load(name)
            connector.save_kv_layer(name, cache, None)
        connector.start_load_kv(None)
        connector.wait_for_save()
        results = connector.get_transfer_results(output.finished_req_ids)
        answer = KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            invalid_block_ids=connector.get_block_ids_with_load_errors(),
            kv_connector_stats=connector.get_kv_connector_stats(),
            kv_cache_events=connector.get_kv_connector_kv_cache_events(),
            kv_connector_worker_meta=connector.build_connector_worker_meta(),
        )
        connector.clear_connector_metadata()
        return sampled, pickle.loads(pickle.dumps(answer))


class Engine:
    """A scheduler, its workers, and what they have told their clients."""

    def __init__(self, name: str, settings: Settings, network: MemoryNetwork, fabric: MemoryFabric) -> None:
        self.name = name
        self._awake = False
        self.settings = settings
        self.outside = FakeWorldConnector.outside = Outside(network, fabric)
        self.config = engine_config(name, settings)
        worker_configs, self.kv_cache_config, block_size, hash_block_size = kv_cache_configs(self.config, settings)
        self.workers = [
            Worker(rank, self.config, worker_config, settings) for rank, worker_config in enumerate(worker_configs)
        ]
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(hash_block_size, sha256)
        self.scheduler = self.config.scheduler_config.get_scheduler_cls()(
            self.config,
            self.kv_cache_config,
            StructuredOutputManager(self.config),
            block_size=block_size,
            hash_block_size=hash_block_size,
            log_stats=True,
        )
        self.connector = self.scheduler.connector
        descriptions = {
            (0, rank): worker.connector.get_handshake_metadata() for rank, worker in enumerate(self.workers)
        }
        self.connector.set_xfer_handshake_metadata_pp_aware(pickle.loads(pickle.dumps(descriptions)))
        self._aggregator = KVOutputAggregator.from_connector(self.connector, settings.num_ranks)
        self._in_flight: list[tuple[SchedulerOutput, ModelRunnerOutput]] = []
        self.results: dict[str, Result] = {}
        self.tables: dict[str, tuple[list[int], ...]] = {}
        self.outcomes: Counter[str] = Counter()
        self.quantities: Counter[str] = Counter()
        self.levels: dict[str, int] = {}
        self.raw_stats: list[Mapping[str, Any]] = []
        self.reports: list[tuple[KVConnectorOutput, ...]] = []
        self.num_free_at_start = self.num_free_blocks

    @property
    def num_free_blocks(self) -> int:
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    @property
    def address(self) -> tuple[str, int]:
        return "127.0.0.1", self.outside.side_channels[0].bound_port or 0

    def add(
        self, request_id: str, prompt: Sequence[int], params: object = None, max_tokens: int = 4, **fields: Any
    ) -> Request:
        """A client's request reaches the engine. ``fields`` are vLLM's, of the request or of its sampling."""
        names = ("cache_salt", "lora_request", "prompt_embeds", "prompt_is_token_ids", "abort_immediately")
        of_request = {key: fields.pop(key) for key in names if key in fields}
        extra = None if params is None else {"kv_transfer_params": params}
        request = Request(
            request_id=request_id,
            prompt_token_ids=None if of_request.get("prompt_embeds") is not None else list(prompt),
            sampling_params=SamplingParams(max_tokens=max_tokens, extra_args=extra, **fields),
            pooling_params=None,
            block_hasher=self._hasher,
            **of_request,
        )
        self.results[request_id] = Result()
        self.scheduler.add_request(request)
        return request

    def abort(self, request_id: str) -> None:
        """The client has gone."""
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def wake(self) -> None:
        """A call from outside, as for a reset: the loop looks once whether there is something to do."""
        self._awake = True

    def is_awake(self) -> bool:
        """Whether vLLM's loop would step now. Without a request it sleeps as soon as nothing is left to do, and only a
        request wakes it: what a lease's release leaves to do does not.
        """
        has_requests = self.scheduler.has_unfinished_requests() or self.scheduler.has_finished_requests()
        self._awake = has_requests or (self._awake and self.scheduler.has_requests())
        return self._awake

    def step(self) -> SchedulerOutput:
        """One step of the engine, whether or not it has anything to do."""
        output = self.scheduler.schedule()
        for request_id in self.scheduler.requests:
            self.tables[request_id] = self.scheduler.kv_cache_manager.get_block_ids(request_id)
        self._in_flight.append((output, self._execute(output)))
        if len(self._in_flight) >= self.config.max_concurrent_batches or not output.num_scheduled_tokens:
            while self._in_flight:
                self._take(*self._in_flight.pop(0))
        return output

    def _execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        answers = []
        for worker in self.workers:
            sampled, connector_output = worker.step(pickle.loads(pickle.dumps(output)))
            ids = list(sampled)
            answers.append(
                ModelRunnerOutput(
                    req_ids=ids,
                    req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
                    sampled_token_ids=list(sampled.values()),
                    kv_connector_output=connector_output,
                )
            )
        self.reports.append(tuple(pickle.loads(pickle.dumps([answer.kv_connector_output for answer in answers]))))
        return self._aggregator.aggregate(answers) if self.settings.aggregated else answers[0]

    def _take(self, output: SchedulerOutput, answer: ModelRunnerOutput) -> None:
        for told in self.scheduler.update_from_output(output, answer).values():
            for item in told.outputs:
                result = self.results[item.request_id]
                result.tokens += item.new_token_ids
                result.finish_reason = str(item.finish_reason) if item.finish_reason is not None else None
                result.params = item.kv_transfer_params or result.params
            if told.scheduler_stats is not None and told.scheduler_stats.kv_connector_stats:
                self._count(told.scheduler_stats.kv_connector_stats)

    def _count(self, stats: Mapping[str, Any]) -> None:
        self.raw_stats.append(stats)
        stats = stats.get(FakeWorldConnector.__name__, stats)
        outcomes = Counter(stats.get("outcomes", {}))
        # Messages to engines that are dead: how many depends on when somebody notices.
        outcomes.pop("message_dropped", None)
        self.outcomes.update(outcomes)
        self.quantities.update(stats.get("quantities", {}))
        self.levels = stats.get("levels", self.levels)

    def is_settled(self) -> bool:
        """Whether nothing is held: no request, no lease, no read, no block."""
        return not self.held()

    def held(self) -> dict[str, object]:
        """All that is still held."""
        held: dict[str, object] = {level: count for level, count in self.levels.items() if count}
        if num_transfers := sum(pulling.num_outstanding() for pulling in self.outside.pulling):
            held["transfers"] = num_transfers
        if self.scheduler.requests:
            held["requests"] = sorted(self.scheduler.requests)
        if self.num_free_blocks != self.num_free_at_start:
            held["blocks"] = self.num_free_at_start - self.num_free_blocks
        return held

    def end_leases(self) -> None:
        """What an operator's reset does to leases that nobody will claim."""
        self.connector.reset_cache()

    def kill(self) -> None:
        """The process dies: peers and readers find nobody."""
        for side_channel in self.outside.side_channels:
            self.outside.network.kill(side_channel)
        for serving in self.outside.serving:
            serving.close()

    def close(self) -> None:
        self.scheduler.shutdown()
        for worker in self.workers:
            worker.connector.shutdown()


class InternalErrors(logging.Handler):
    """What the connector contained and logged as a bug of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info or "internal error" in record.getMessage():
            self.messages.append(self.format(record))


class Lab:
    """The engines of one test and the network between them."""

    def __init__(self, default_settings: Settings) -> None:
        self.errors = InternalErrors()
        logging.getLogger("pd_transfer").addHandler(self.errors)
        self.network = MemoryNetwork()
        self.fabric = LockedFabric()
        self._default = default_settings
        self.engines: dict[str, Engine] = {}

    def engine(self, name: str, **changes: Any) -> Engine:
        settings = Settings(**{**vars(self._default), **changes})
        self.engines[name] = Engine(name, settings, self.network, self.fabric)
        return self.engines[name]

    def run(self, until: Callable[[], object], seconds: float = WAIT_SECONDS) -> None:
        """Let every engine that has something to do step until something is the case."""
        self._run(until, Engine.is_awake, seconds)

    def wait(self, until: Callable[[], object]) -> None:
        """Wait for an I/O thread, while no engine steps."""
        self._run(until, lambda _: False, WAIT_SECONDS)

    def _run(self, until: Callable[[], object], steps: Callable[[Engine], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not until():
            if time.monotonic() > deadline:
                states = {name: [engine.held(), dict(engine.outcomes)] for name, engine in self.engines.items()}
                raise AssertionError(f"did not happen within {seconds} s: {states}")
            for engine in self.engines.values():
                if steps(engine):
                    engine.step()
            time.sleep(_POLL_SECONDS)

    def hand_off(self, prefill: Engine, prompt: Sequence[int], request_id: str = "prefill", **fields: Any) -> Any:
        """The router's first leg: the params that the prefill engine answers with, or None."""
        prefill.add(request_id, prompt, {"do_remote_decode": True}, **{"max_tokens": 1, **fields})
        self.run(lambda: prefill.results[request_id].finish_reason)
        self.run(lambda: not prefill.is_awake())
        return json.loads(json.dumps(prefill.results[request_id].params))

    def decode(
        self, decode: Engine, prompt: Sequence[int], params: Any, request_id: str = "r", **fields: Any
    ) -> Result:
        """The router's second leg: the decode engine's answer."""
        decode.add(request_id, prompt, params, **fields)
        self.finish(decode, request_id)
        return decode.results[request_id]

    def introduce(self, prefill: Engine, decode: Engine) -> None:
        """One request that makes the two known to each other; it is not counted."""
        prompt = [499, len(self.engines), 498]
        self.decode(decode, prompt, self.hand_off(prefill, prompt, "hello"), "hello", max_tokens=1)
        self.settle()
        for engine in (prefill, decode):
            engine.outcomes.clear()
            engine.quantities.clear()
        decode.outside.side_channels[0].asked.clear()

    def finish(self, engine: Engine, *request_ids: str) -> None:
        """Run until these requests are over."""
        self.run(lambda: all(engine.results[request_id].finish_reason for request_id in request_ids))

    def settle(self) -> None:
        """Run until nothing is held anywhere; idle engines step too, as the next request would make them."""
        self._run(lambda: all(engine.is_settled() for engine in self.engines.values()), lambda _: True, WAIT_SECONDS)

    def close(self) -> None:
        """The ledger: nothing is held once everything has been let go. Then every engine stops."""
        try:
            self.network.release()
            self.fabric.fail_new = None
            self.fabric.latency_polls = 0
            self.fabric.let_go()
            for engine in self.engines.values():
                assert engine.outcomes["internal_error"] == 0
            self.settle()
            for engine in self.engines.values():
                assert not engine.levels or set(engine.levels) == {level.value for level in Level}
        finally:
            for engine in self.engines.values():
                engine.close()
            logging.getLogger("pd_transfer").removeHandler(self.errors)
        assert not self.errors.messages
        alive = [thread.name for thread in threading.enumerate() if thread.name.startswith("pd-transfer")]
        assert not alive


def resealed(decode: Engine, params: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """Params whose grant was changed by somebody who has the key of a peer that ``decode`` knows."""
    answers = decode.outside.side_channels[0].answers
    key = next(answer.grant_key for answer in answers if isinstance(answer, Welcome))
    grant = parse_grant(params["grant"]).claimed
    values = {name: getattr(grant, name) for name in grant.__struct_fields__}
    return {**params, "grant": seal_grant(type(grant)(**{**values, **changes}), key)}
