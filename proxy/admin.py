"""The admin API: list, add, drain and remove engines, for whoever holds the token.

    GET    /admin/engines                               every engine with its standing and load
    POST   /admin/engines        {"role", "url"}        add, or take back from draining
    POST   /admin/engines/drain  {"role", "url"}        no new requests; "requests" in the answer falls to 0
    DELETE /admin/engines        {"role", "url"}        forget; open requests go on

Each answers with the list. What the file says of other engines is not touched; a restart forgets all of this.

Engines speak for themselves, again and again, and are answered without the list:

    POST   /admin/registrations  {"role", "url"}        it serves: added, unless it is a member already
    DELETE /admin/registrations  {"role", "url"}        it stops: forgotten, unless an operator has added it
"""

import hmac
import logging
from collections.abc import Awaitable, Callable
from ipaddress import IPv6Address, ip_address
from pathlib import Path

import msgspec

from proxy.config import ConfigError, engine_url
from proxy.errors import ProxyError
from proxy.http1.errors import MessageError
from proxy.http1.request import Request, Response
from proxy.registry import Origin, Registry
from proxy.respond import json_response
from proxy.routing import Role

logger = logging.getLogger("proxy.admin")

PREFIX = "/admin/"
PATH = PREFIX + "engines"
DRAIN_PATH = PATH + "/drain"
REGISTRATIONS_PATH = PREFIX + "registrations"

Handler = Callable[[Request], Awaitable[Response]]

SHORTEST_TOKEN = 16
_SCHEME = "bearer "
_MOST_BYTES = 1 << 16


class _Named(msgspec.Struct, forbid_unknown_fields=True):
    role: Role
    url: str


def read_token(path: Path) -> str:
    """The token in a file, without the white space around it. Raises ``ConfigError``."""
    try:
        token = path.read_text(encoding="ascii").strip()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from error
    if len(token) < SHORTEST_TOKEN:
        raise ConfigError(f"{path}: a token has at least {SHORTEST_TOKEN} characters")
    return token


def _is_loopback(remote: str | None) -> bool:
    if not remote:
        return False
    address = ip_address(remote)
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return (mapped or address).is_loopback


class Admin:
    """The handlers. Without a token, all of it is refused."""

    def __init__(self, registry: Registry, token: str | None, num_ranks: int = 0) -> None:
        self._registry = registry
        self._token = token
        self._num_ranks = num_ranks
        self._handlers: dict[tuple[str, str], Handler] = {
            ("GET", PATH): self._list,
            ("HEAD", PATH): self._list,
            ("POST", PATH): self._add,
            ("DELETE", PATH): self._remove,
            ("POST", DRAIN_PATH): self._drain,
            ("POST", REGISTRATIONS_PATH): self._register,
            ("DELETE", REGISTRATIONS_PATH): self._deregister,
        }

    def handler(self, method: str, path: str) -> Handler:
        """What answers a path below ``PREFIX``; none of them ever reaches an engine."""
        return self._handlers.get((method, path), self._nothing)

    def allow_reading(self, request: Request) -> None:
        """Raises ``ProxyError``: 401 without the token if there is one, 403 from another machine if there is none."""
        if self._token is not None:
            self._authorize(request)
        elif not _is_loopback(request.remote):
            raise ProxyError(403, "Without an --admin-token-file this is told on the proxy's own machine only")

    async def _list(self, request: Request) -> Response:
        self._authorize(request)
        return self._answer()

    async def _add(self, request: Request) -> Response:
        named = await self._named(request)
        self._registry.add(named.role, [_checked_url(named)], self._num_ranks, Origin.ADMIN)
        return self._done("added", named)

    async def _drain(self, request: Request) -> Response:
        named = await self._named(request)
        self._must_exist(named, self._registry.drain(named.role, named.url.rstrip("/")))
        return self._done("draining", named)

    async def _remove(self, request: Request) -> Response:
        named = await self._named(request)
        self._must_exist(named, self._registry.remove(named.role, named.url.rstrip("/")))
        return self._done("removed", named)

    async def _register(self, request: Request) -> Response:
        named = await self._named(request)
        if self._registry.register(named.role, _checked_url(named), self._num_ranks):
            logger.warning("%s engine %s has registered itself", named.role, named.url)
        return json_response(200, {"registered": True})

    async def _deregister(self, request: Request) -> Response:
        named = await self._named(request)
        if self._registry.deregister(named.role, named.url.rstrip("/")):
            logger.warning("%s engine %s stops and is forgotten; its open requests go on", named.role, named.url)
        return json_response(200, {"registered": False})

    async def _nothing(self, request: Request) -> Response:
        self._authorize(request)
        raise ProxyError(404, "The admin API has no such call")

    async def _named(self, request: Request) -> _Named:
        self._authorize(request)
        try:
            return msgspec.json.decode(await request.read(_MOST_BYTES), type=_Named)
        except MessageError as error:
            raise ProxyError(error.status, f"The request body cannot be read: {error}") from error
        except msgspec.DecodeError as error:
            raise ProxyError(400, f'write {{"role": "prefill" or "decode", "url": ...}}: {error}') from error

    def _authorize(self, request: Request) -> None:
        if self._token is None:
            raise ProxyError(404, "The admin API is off: it needs --admin-token-file")
        given = request.headers.get("Authorization", "")
        token = given[len(_SCHEME) :] if given.lower().startswith(_SCHEME) else ""
        if not hmac.compare_digest(token.strip().encode(errors="replace"), self._token.encode()):
            raise ProxyError(401, "The admin API needs its token: Authorization: Bearer TOKEN")

    def _must_exist(self, named: _Named, exists: bool) -> None:
        if not exists:
            raise ProxyError(404, f"There is no {named.role} engine {named.url}", "url")

    def _done(self, what: str, named: _Named) -> Response:
        logger.warning("by the admin API: %s engine %s %s", named.role, named.url, what)
        return self._answer()

    def _answer(self) -> Response:
        return json_response(200, {"engines": engine_list(self._registry)})


def _checked_url(named: _Named) -> str:
    try:
        return engine_url(named.url)
    except ValueError as error:
        raise ProxyError(400, str(error), "url") from error


def engine_list(registry: Registry) -> list[dict[str, object]]:
    """Every engine as plain values."""
    return [
        {
            "role": engine.role,
            "url": engine.url,
            "origin": engine.origin,
            "standing": standing,
            "requests": engine.requests,
            "tokens": engine.tokens,
            "ejections": engine.ejections,
        }
        for engine, standing in registry.standings()
    ]
