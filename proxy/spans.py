"""Spans with OpenTelemetry: one for a client's request, and one inside it for each attempt on an engine.

An engine gets the span of its leg as parent, so vLLM's own spans hang below it.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from multidict import CIMultiDict
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from proxy.routing import Role
from proxy.tracing import Tracing

_propagator = TraceContextTextMapPropagator()


def exporting_to(endpoint: str) -> TracerProvider:
    """A provider whose spans are sent in the background, by a thread of its own."""
    provider = TracerProvider(resource=Resource.create({SERVICE_NAME: "pd-proxy"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return provider


class Spans(Tracing):
    """Spans from one provider."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("proxy")

    @contextmanager
    def request(self, endpoint: str, request_id: str, headers: Mapping[str, str]) -> Iterator[None]:
        """The span of a client's request, a child of the client's own if it named one."""
        parent = _propagator.extract(headers)
        attributes = {"pd_proxy.endpoint": endpoint, "pd_proxy.request_id": request_id}
        with self._tracer.start_as_current_span(
            f"pd-proxy {endpoint}", context=parent, kind=SpanKind.SERVER, attributes=attributes
        ):
            yield

    @contextmanager
    def leg(self, role: Role, engine: str, headers: CIMultiDict[str]) -> Iterator[CIMultiDict[str]]:
        """The span of an attempt; one that fails is marked so by the exception that passes through."""
        with self._tracer.start_as_current_span(
            role.value, kind=SpanKind.CLIENT, attributes={"pd_proxy.engine": engine}
        ):
            traced = headers.copy()
            _propagator.inject(traced)
            yield traced

    def close(self) -> None:
        """Export what is left."""
        self._provider.shutdown()
