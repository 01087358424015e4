"""What travels between the connector's halves inside vLLM's own messages."""

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from pd_transfer.runtime.orders import StepOrders, WorkerDescription, WorkerReport


@dataclass
class PdMetadata(KVConnectorMetadata):
    """Scheduler to workers, with every step."""

    orders: StepOrders = field(default_factory=StepOrders)


@dataclass
class PdWorkerMetadata(KVConnectorWorkerMetadata):
    """Workers to scheduler, with every step's output; vLLM adds up the ranks."""

    report: WorkerReport

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Add another rank's report."""
        if isinstance(other, PdWorkerMetadata):
            self.report.add(other.report)
        return self


@dataclass
class PdHandshakeMetadata(KVConnectorHandshakeMetadata):
    """Worker to scheduler, once, at start-up."""

    worker: WorkerDescription
