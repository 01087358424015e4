"""What the proxy counts and times, in Prometheus' terms, in a registry of its own.

Room for the next feature: a count is a ``Counter`` in ``Metrics``; what the engines' objects know is a family in
``_Engines``.
"""

from collections.abc import Iterator
from typing import TypeVar, cast

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from proxy.admission import Admission
from proxy.errors import FailureKind
from proxy.health import Standing
from proxy.registry import Registry
from proxy.routing import Role

_Metric = TypeVar("_Metric", Counter, Histogram)

_LEG_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)

BROKEN_STREAM = "broken_stream"
"""Outcome: the answer had begun when its engine was lost."""
ERROR_EVENT = "error_event"
"""Outcome: the engine reported an error in the middle of its stream."""
CLIENT_GONE = "client_gone"
"""Outcome: the client left before its answer was complete."""


def outcome_of(status: int) -> str:
    """The outcome that a final status stands for."""
    match status:
        case 503:
            return "unavailable"
        case 504:
            return "timeout"
        case _ if status >= 500:
            return "failed"
        case _ if status >= 400:
            return "rejected"
        case _:
            return "ok"


class Metrics:
    """All metrics of one proxy."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._children: dict[tuple[object, ...], Counter | Histogram] = {}
        self._requests = Counter(
            "pd_proxy_requests", "Client requests by how they ended", ("endpoint", "outcome"), registry=self._registry
        )
        self.fallbacks = Counter(
            "pd_proxy_decode_only_fallbacks",
            "Prompts that decode computed because no prefill engine was left",
            registry=self._registry,
        )
        self.missing_handoffs = Counter(
            "pd_proxy_missing_handoffs",
            "Prefill replies without a hand-off: decode computed these prompts again",
            registry=self._registry,
        )
        self.handoff_tokens = Counter(
            "pd_proxy_handoff_tokens",
            "Tokens whose KV prefill offered to decode",
            registry=self._registry,
        )
        self.handoff_bytes = Counter(
            "pd_proxy_handoff_bytes",
            "KV that prefill offered to decode",
            registry=self._registry,
        )
        self.releases = Counter(
            "pd_proxy_releases",
            "Hand-offs that no decode used, by whether prefill's KV was released",
            ("result",),
            registry=self._registry,
        )
        self._failures = Counter(
            "pd_proxy_engine_failures", "Failed attempts on an engine", ("role", "kind"), registry=self._registry
        )
        self._first_byte_seconds = Histogram(
            "pd_proxy_first_byte_seconds",
            "From a client's request to the first byte of its answer",
            ("endpoint",),
            buckets=_LEG_BUCKETS,
            registry=self._registry,
        )
        self._queue_seconds = Histogram(
            "pd_proxy_queue_seconds",
            "How long a client's request waited for its turn",
            buckets=_LEG_BUCKETS,
            registry=self._registry,
        )
        self._leg_seconds = Histogram(
            "pd_proxy_leg_seconds",
            "Time of one attempt on an engine: prefill's whole answer, decode's first byte",
            ("role",),
            buckets=_LEG_BUCKETS,
            registry=self._registry,
        )

    def request_ended(
        self, endpoint: str, outcome: str, first_byte_seconds: float | None, queue_seconds: float | None
    ) -> None:
        """Count a client's request by how it ended."""
        self._child(self._requests, endpoint, outcome).inc()
        if queue_seconds is not None:
            self._queue_seconds.observe(queue_seconds)
        if first_byte_seconds is not None:
            self._child(self._first_byte_seconds, endpoint).observe(first_byte_seconds)

    def leg_seconds(self, role: Role, seconds: float) -> None:
        """Note the time of one attempt that succeeded; failed ones are counted, by ``engine_failed``."""
        self._child(self._leg_seconds, role).observe(seconds)

    def _child(self, metric: _Metric, *labels: str) -> _Metric:
        """A metric for some labels. The library's own look-up takes a lock and copies the labels, every time."""
        key = (metric, *labels)
        child = self._children.get(key)
        if child is None:
            child = self._children[key] = metric.labels(*labels)
        return cast("_Metric", child)

    def engine_failed(self, role: Role, kind: FailureKind) -> None:
        """Count a failed attempt."""
        self._failures.labels(role, kind.value).inc()

    def watch(self, registry: Registry, admission: Admission) -> None:
        """Show what is going on, read when somebody looks."""
        gauge = Gauge("pd_proxy_in_flight_requests", "Client requests being served", registry=self._registry)
        gauge.set_function(lambda: admission.in_flight)
        gauge = Gauge("pd_proxy_queued_requests", "Client requests that wait for their turn", registry=self._registry)
        gauge.set_function(lambda: admission.queued)
        self._registry.register(_Engines(registry))

    def render(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self._registry)


class _Engines(Collector):
    """The engines, which come and go, as metrics."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        """Called by prometheus_client for every scrape."""
        labels = ("role", "engine")
        requests = GaugeMetricFamily("pd_proxy_engine_requests", "Requests on an engine", labels=labels)
        tokens = GaugeMetricFamily("pd_proxy_engine_tokens", "Estimated tokens on an engine", labels=labels)
        standing = GaugeMetricFamily(
            "pd_proxy_engine_standing", "1 for what an engine is at the moment", labels=(*labels, "standing")
        )
        ejections = CounterMetricFamily(
            "pd_proxy_engine_ejections", "How often an engine was taken out of rotation", labels=labels
        )
        for engine, now in self._registry.standings():
            names = (engine.role, engine.url)
            requests.add_metric(names, engine.requests)
            tokens.add_metric(names, engine.tokens)
            ejections.add_metric(names, engine.ejections)
            for possible in Standing:
                standing.add_metric((*names, possible), float(possible is now))
        yield from (requests, tokens, standing, ejections)
