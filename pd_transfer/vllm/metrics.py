"""Our counters in vLLM's metrics: ``/metrics`` and the periodic log line."""

from collections import Counter as Count
from dataclasses import dataclass, field
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
    PromMetric,
    PromMetricT,
)

from pd_transfer.core.outcomes import Level, Quantity
from pd_transfer.runtime.scheduler import Collected

_QUANTITY_HELP = {
    Quantity.TOKENS_VERIFIED: "Tokens whose KV was read from a prefill engine and proven to be intact.",
    Quantity.BYTES_VERIFIED: "Bytes of KV read, over all ranks.",
    Quantity.DESCRIPTORS: "Descriptors of verified reads before merging, over all ranks.",
    Quantity.DESCRIPTORS_MERGED: "Descriptors of verified reads after merging, over all ranks.",
    Quantity.READ_MICROSECONDS: "Microseconds from a read's start to its proof, summed over reads and ranks.",
}


@dataclass
class PdStats(KVConnectorStats):
    """``data`` maps a metric's name to {label value: number}; plain, because it travels between processes."""

    data: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_collected(cls, collected: Collected) -> "PdStats":
        """What one collection found."""
        return cls(
            {
                "outcomes": {outcome.value: count for outcome, count in collected.outcomes.items() if count},
                "quantities": {quantity.value: count for quantity, count in collected.measured.quantities.items()},
                "blocks": {str(group): count for group, count in collected.measured.blocks_by_group.items()},
                "levels": {level.value: collected.levels[level] for level in Level},
            }
        )

    def reset(self) -> None:
        """Forget everything."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add another interval: counts add up, levels are the later ones."""
        for name, values in other.data.items():
            if name == "levels":
                self.data[name] = dict(values)
            else:
                self.data[name] = dict(Count(self.data.get(name, {})) + Count(values))
        return self

    def reduce(self) -> dict[str, int | float]:
        """For the log line: every count and level that is not zero."""
        flat = {f"{name} {label}": n for name, values in self.data.items() for label, n in values.items() if n}
        return flat or {"idle": 0}

    def is_empty(self) -> bool:
        """Whether there is nothing to tell. Levels always are: a gauge that is not sent keeps its old value."""
        return not self.data


class PdPromMetrics(KVConnectorPromMetrics):
    """Registers and feeds the Prometheus metrics of one API server."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._outcomes = self._counter_cls(
            name="pd_transfer:outcomes",
            documentation="How hand-offs, grants and reads ended; see docs/operations.md.",
            labelnames=[*labelnames, "outcome"],
        )
        self._blocks = self._counter_cls(
            name="pd_transfer:blocks_verified",
            documentation="KV blocks of verified reads, by KV cache group (all its layers), over all ranks.",
            labelnames=[*labelnames, "group"],
        )
        self._quantities = {
            quantity.value: self._counter_cls(f"pd_transfer:{quantity.value}", _QUANTITY_HELP[quantity], labelnames)
            for quantity in Quantity
        }
        self._levels = self._gauge_cls(
            name="pd_transfer:held",
            documentation="What is held now: leases, admissions, receives, transfers, quarantined blocks.",
            labelnames=[*labelnames, "what"],
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Feed one collection."""
        labels = self.per_engine_labelvalues[engine_idx]
        for outcome, count in transfer_stats_data.get("outcomes", {}).items():
            self._outcomes.labels(*labels, outcome).inc(count)
        for group, count in transfer_stats_data.get("blocks", {}).items():
            self._blocks.labels(*labels, group).inc(count)
        for quantity, count in transfer_stats_data.get("quantities", {}).items():
            self._quantities[quantity].labels(*labels).inc(count)
        for level, value in transfer_stats_data.get("levels", {}).items():
            self._levels.labels(*labels, level).set(value)
