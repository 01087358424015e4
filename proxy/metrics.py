"""What the proxy counts and times, in Prometheus' terms, in a registry of its own."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from proxy.errors import FailureKind
from proxy.registry import Registry
from proxy.routing import EngineLoad, Role

_LEG_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)

BROKEN_STREAM = "broken_stream"
"""Outcome: the answer had begun when its engine was lost."""
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
        self.requests = Counter(
            "pd_proxy_requests", "Client requests by how they ended", ("endpoint", "outcome"), registry=self._registry
        )
        self.in_flight = Gauge("pd_proxy_in_flight_requests", "Client requests being served", registry=self._registry)
        self.missing_handoffs = Counter(
            "pd_proxy_missing_handoffs",
            "Prefill replies without a hand-off: decode computed these prompts again",
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
        self._leg_seconds = Histogram(
            "pd_proxy_leg_seconds",
            "Time of one attempt on an engine: prefill's whole answer, decode's first byte",
            ("role",),
            buckets=_LEG_BUCKETS,
            registry=self._registry,
        )

    @contextmanager
    def leg(self, role: Role) -> Iterator[None]:
        """Time one attempt that succeeds; failed ones are counted, by ``engine_failed``."""
        begin = perf_counter()
        yield
        self._leg_seconds.labels(role).observe(perf_counter() - begin)

    def engine_failed(self, role: Role, kind: FailureKind) -> None:
        """Count a failed attempt."""
        self._failures.labels(role, kind.value).inc()

    def watch(self, registry: Registry) -> None:
        """Show the load of every engine, read when somebody looks."""
        loads = {
            "requests": Gauge(
                "pd_proxy_engine_requests", "Requests on an engine", ("role", "engine"), registry=self._registry
            ),
            "tokens": Gauge(
                "pd_proxy_engine_tokens", "Estimated tokens on an engine", ("role", "engine"), registry=self._registry
            ),
            "suspect": Gauge(
                "pd_proxy_engine_suspect",
                "Whether an engine failed just now and is avoided",
                ("role", "engine"),
                registry=self._registry,
            ),
        }
        for role in Role:
            for number, engine in enumerate(registry.engines(role)):
                for field, gauge in loads.items():
                    gauge.labels(role, engine.url).set_function(_reader(registry, role, number, field))

    def render(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self._registry)


def _reader(registry: Registry, role: Role, number: int, field: str) -> Callable[[], float]:
    def read() -> float:
        engine: EngineLoad = registry.engines(role)[number]
        return float(getattr(engine, field))

    return read
