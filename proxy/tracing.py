"""Spans of requests and their legs. Without an endpoint for them, nothing happens and OpenTelemetry is not imported."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from multidict import CIMultiDict

from proxy.config import ConfigError
from proxy.routing import Role


class Tracing:
    """No spans: the client's own trace headers reach the engines as they are."""

    @contextmanager
    def request(self, _endpoint: str, _request_id: str, _headers: Mapping[str, str]) -> Iterator[None]:
        """Around one client request."""
        yield

    @contextmanager
    def leg(self, _role: Role, _engine: str, headers: CIMultiDict[str]) -> Iterator[CIMultiDict[str]]:
        """Around one attempt on an engine; the headers to send there."""
        yield headers

    def close(self) -> None:
        """Hand over what was not exported yet; may take seconds."""


NO_TRACING = Tracing()


def tracing_to(endpoint: str | None) -> Tracing:
    """Spans go to an OTLP/HTTP endpoint, if there is one.

    Raises ``ConfigError`` if OpenTelemetry is not installed.
    """
    if endpoint is None:
        return NO_TRACING
    try:
        from proxy.spans import Spans, exporting_to
    except ImportError as error:
        raise ConfigError("--otlp-endpoint needs OpenTelemetry: pip install 'pd_transfer[tracing]'") from error
    return Spans(exporting_to(endpoint))
