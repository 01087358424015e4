"""What the proxy answers itself, for those who operate it: is it alive, is it ready, what does it count."""

from aiohttp import web

from proxy import admin
from proxy.admission import Admission
from proxy.metrics import Metrics
from proxy.registry import Registry
from proxy.respond import json_response
from proxy.routing import Role

_READ_PATHS = frozenset({"/health", "/ready", "/metrics"})
_READING_METHODS = frozenset({"GET", "HEAD"})


def is_own(request: web.Request) -> bool:
    """Whether a request is for the proxy itself: it is neither queued nor counted, and works while draining."""
    return request.path.startswith(admin.PREFIX) or (request.path in _READ_PATHS and request.method in _READING_METHODS)


class Operations:
    """The handlers for operators."""

    def __init__(self, registry: Registry, admission: Admission, metrics: Metrics, administration: admin.Admin) -> None:
        self._registry = registry
        self._admin = administration
        self._admission = admission
        self._metrics = metrics

    def add_routes(self, router: web.UrlDispatcher) -> None:
        """Add our paths, for reading only: with any other method they are an engine's."""
        router.add_get("/health", self._health)
        router.add_get("/ready", self._ready)
        router.add_get("/metrics", self._show_metrics)
        self._admin.add_routes(router)

    async def _health(self, _request: web.Request) -> web.Response:
        """Whether this process is alive; says nothing about engines."""
        return json_response(200, {"status": "ok"})

    async def _ready(self, _request: web.Request) -> web.Response:
        """Whether requests can be served: not draining, and an engine known to be up in each role."""
        engines: dict[str, dict[str, int]] = {role: {} for role in Role}
        for engine, standing in self._registry.standings():
            counts = engines[engine.role]
            counts[standing] = counts.get(standing, 0) + 1
        draining = self._admission.draining
        ready = not draining and all(self._registry.is_up(role) for role in Role)
        return json_response(200 if ready else 503, {"ready": ready, "draining": draining, "engines": engines})

    async def _show_metrics(self, _request: web.Request) -> web.Response:
        return web.Response(body=self._metrics.render(), headers={"Content-Type": "text/plain; version=0.0.4"})
