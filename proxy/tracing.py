"""Spans of requests and their legs. Without an endpoint for them, nothing happens and OpenTelemetry is not imported."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

from multidict import CIMultiDict

from proxy.config import ConfigError
from proxy.routing import Role

_NOTHING = nullcontext()


class Tracing:
    """No spans: the client's own trace headers reach the engines as they are."""

    def request(self, _endpoint: str, _request_id: str, _headers: Mapping[str, str]) -> AbstractContextManager[None]:
        """Around one client request."""
        return _NOTHING

    def leg(self, _role: Role, _engine: str, headers: CIMultiDict[str]) -> AbstractContextManager[CIMultiDict[str]]:
        """Around one attempt on an engine; the headers to send there."""
        return nullcontext(headers)

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
