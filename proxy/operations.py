"""What the proxy answers itself, for those who operate it: alive, ready, metrics, a status page, the admin API."""

from importlib.resources import files

from aiohttp import web

from proxy import admin
from proxy.admission import Admission
from proxy.registry import Registry
from proxy.respond import json_response
from proxy.routing import Role
from proxy.sight import Sight

_READ_PATHS = frozenset({"/health", "/ready", "/metrics", "/status", "/status.json"})
_READING_METHODS = frozenset({"GET", "HEAD"})


def is_own(request: web.Request) -> bool:
    """Whether a request is for the proxy itself: it is neither queued nor counted, and works while draining."""
    return request.path.startswith(admin.PREFIX) or (request.path in _READ_PATHS and request.method in _READING_METHODS)


class Operations:
    """The handlers for operators."""

    def __init__(self, registry: Registry, admission: Admission, sight: Sight, administration: admin.Admin) -> None:
        self._registry = registry
        self._admission = admission
        self._metrics = sight.metrics
        self._journal = sight.journal
        self._admin = administration
        self._page = files("proxy").joinpath("status.html").read_text(encoding="utf-8")

    def add_routes(self, router: web.UrlDispatcher) -> None:
        """Add our paths, for reading only: with any other method they are an engine's."""
        router.add_get("/health", self._health)
        router.add_get("/ready", self._ready)
        router.add_get("/metrics", self._show_metrics)
        router.add_get("/status", self._show_page)
        router.add_get("/status.json", self._status)
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

    async def _show_page(self, _request: web.Request) -> web.Response:
        """The page itself, which holds nothing; it reads ``/status.json``."""
        policy = {"Content-Security-Policy": _PAGE_POLICY}
        return web.Response(text=self._page, content_type="text/html", charset="utf-8", headers=policy)

    async def _status(self, request: web.Request) -> web.Response:
        """Engines, load, recent requests and errors, newest first; needs the admin token if there is one."""
        self._admin.allow_reading(request)
        status = {
            "draining": self._admission.draining,
            "in_flight": self._admission.in_flight,
            "queued": self._admission.queued,
            "engines": admin.engine_list(self._registry),
            "recent": list(reversed(self._journal.recent)),
            "failed": list(reversed(self._journal.failed)),
        }
        return json_response(200, status)


_PAGE_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:"
)
"""The page loads nothing from anywhere and talks to this proxy only. Its icon is in it, and empty: a browser asks for
one otherwise, and the proxy would pass that on to an engine."""
