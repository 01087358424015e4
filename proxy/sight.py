"""All that lets people see what the proxy does, in one hand."""

from typing import NamedTuple

from proxy.journal import Journal
from proxy.metrics import Metrics
from proxy.tracing import NO_TRACING, Tracing


class Sight(NamedTuple):
    """Counts, records and spans."""

    metrics: Metrics
    journal: Journal
    tracing: Tracing


def sight(tracing: Tracing = NO_TRACING) -> Sight:
    """A fresh one."""
    metrics = Metrics()
    return Sight(metrics, Journal(metrics), tracing)
