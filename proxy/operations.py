"""What the proxy answers itself, for those who operate it: alive, ready, metrics, a status page, the admin API."""

from importlib.resources import files

from multidict import CIMultiDict

from proxy import admin
from proxy.admin import Handler
from proxy.admission import Admission
from proxy.http1.request import Request, Response
from proxy.registry import Registry
from proxy.respond import json_response
from proxy.routing import Role
from proxy.sight import Sight

_READING_METHODS = frozenset({"GET", "HEAD"})


class Operations:
    """The handlers for operators."""

    def __init__(self, registry: Registry, admission: Admission, sight: Sight, administration: admin.Admin) -> None:
        self._registry = registry
        self._admission = admission
        self._metrics = sight.metrics
        self._journal = sight.journal
        self._admin = administration
        self._page = files("proxy").joinpath("status.html").read_bytes()
        self._handlers: dict[str, Handler] = {
            "/health": self._health,
            "/ready": self._ready,
            "/metrics": self._show_metrics,
            "/status": self._show_page,
            "/status.json": self._status,
        }

    def handler(self, request: Request) -> Handler | None:
        """What answers a request for the proxy itself: it is neither queued nor counted, and works while draining.

        None is for the engines' requests, as are our paths with any method that does not only read.
        """
        path = request.path
        if path.startswith(admin.PREFIX):
            return self._admin.handler(request.method, path)
        return self._handlers.get(path) if request.method in _READING_METHODS else None

    async def _health(self, _request: Request) -> Response:
        """Whether this process is alive; says nothing about engines."""
        return json_response(200, {"status": "ok"})

    async def _ready(self, _request: Request) -> Response:
        """Whether requests can be served: not draining, and an engine known to be up in each role."""
        engines: dict[str, dict[str, int]] = {role: {} for role in Role}
        for engine, standing in self._registry.standings():
            counts = engines[engine.role]
            counts[standing] = counts.get(standing, 0) + 1
        draining = self._admission.draining
        ready = not draining and all(self._registry.is_up(role) for role in Role)
        return json_response(200 if ready else 503, {"ready": ready, "draining": draining, "engines": engines})

    async def _show_metrics(self, _request: Request) -> Response:
        return Response(200, CIMultiDict({"Content-Type": "text/plain; version=0.0.4"}), self._metrics.render())

    async def _show_page(self, _request: Request) -> Response:
        """The page itself, which holds nothing; it reads ``/status.json``."""
        headers = {"Content-Type": "text/html; charset=utf-8", "Content-Security-Policy": _PAGE_POLICY}
        return Response(200, CIMultiDict(headers), self._page)

    async def _status(self, request: Request) -> Response:
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
