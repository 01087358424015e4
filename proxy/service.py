"""A running proxy: everything put together, started, and stopped without losing requests."""

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import NoReturn

from proxy.admin import Admin, read_token
from proxy.admission import Admission
from proxy.background import in_background
from proxy.canary import Canary
from proxy.checks import Checks
from proxy.command_line import configuration, engines_named
from proxy.config import ProxyConfig, Timeouts
from proxy.config_file import ConfigFile
from proxy.engines import KEEP_ALIVE_SECONDS, EngineClient
from proxy.exchange import Exchange
from proxy.http1.listener import Listener
from proxy.http1.pool import Pool
from proxy.http1.server import Patience, Service
from proxy.operations import Operations
from proxy.registry import Origin, Registry
from proxy.releases import Releases
from proxy.routing import POLICIES, Role
from proxy.server import Server
from proxy.sight import sight
from proxy.tracing import tracing_to

logger = logging.getLogger("proxy.service")

ENGINE_KEY_VARIABLE = "VLLM_API_KEY"
"""The environment variable with the canary's API key, as for ``vllm serve``. Requests bring their clients' own."""

_CANCEL_SECONDS = 0.1
"""How long open requests get before they are cut off, when nobody waits for them any more."""

_CUT_OFF_SECONDS = 2.0
"""How long a request that was cut off may take to hang up on its engines."""


class RunningProxy:
    """A proxy that accepts requests at ``address``."""

    def __init__(self, listener: Listener, address: str, admission: Admission) -> None:
        self.address = address
        self.admission = admission
        self._listener = listener

    async def drain(self, timeout_seconds: float) -> bool:
        """Take no new requests and wait for the open ones and until their answers are on their way; whether that was in
        time."""
        self.admission.draining = True
        self._listener.stop()
        logger.info("draining: %d requests are open", self.admission.in_flight)
        try:
            async with asyncio.timeout(timeout_seconds):
                await self.admission.wait_idle()
                await self._listener.idle()
        except TimeoutError:
            return False
        return True


@asynccontextmanager
async def running(config: ProxyConfig) -> AsyncIterator[RunningProxy]:
    """A proxy for as long as the context lasts.

    Raises ``OSError`` if it cannot listen where it is told to, and ``ConfigError`` if the token file holds no token
    or spans cannot be made.

    Requests that are open when the context ends are cut off; ``RunningProxy.drain`` first.
    """
    token = None if config.admin_token_file is None else read_token(config.admin_token_file)
    policies = {Role.PREFILL: config.routing.prefill_policy, Role.DECODE: config.routing.decode_policy}
    registry = Registry({role: POLICIES[name] for role, name in policies.items()})
    _add_members(registry, config)
    admission = Admission(config.limits)
    seen = sight(tracing_to(config.otlp_endpoint))
    seen.metrics.watch(registry, admission)
    async with _pool(config.timeouts) as pool:
        client = EngineClient(pool, config.timeouts)
        releases = Releases(client, registry, seen.metrics)
        exchange = Exchange(client, registry, seen, releases, config.routing)
        administration = Admin(registry, token, config.routing.num_ranks)
        operations = Operations(registry, admission, seen, administration)
        server = Server(config, exchange, admission, seen, operations)
        patience = Patience(stall_seconds=config.timeouts.idle_seconds)
        listener = Listener(Service(server.serve, server.refuse, patience))
        try:
            await listener.start(config.host, config.port)
            checks = Checks(client, registry, config.timeouts.health_seconds)
            async with in_background(checks.run(), *_following(config, registry)):
                yield RunningProxy(listener, _address(listener), admission)
        finally:
            await listener.close(_CANCEL_SECONDS)
            with suppress(TimeoutError):
                async with asyncio.timeout(_CUT_OFF_SECONDS):
                    await admission.wait_idle()
            await releases.finish()
            await asyncio.to_thread(seen.tracing.close)


def _add_members(registry: Registry, config: ProxyConfig) -> None:
    if config.config_file is not None:
        for role, urls in engines_named(config.arguments).items():
            registry.add(role, urls, config.routing.num_ranks)
    rest = Origin.COMMAND_LINE if config.config_file is None else Origin.FILE
    registry.add(Role.PREFILL, config.prefill_urls, config.routing.num_ranks, rest)
    registry.add(Role.DECODE, config.decode_urls, config.routing.num_ranks, rest)


def _following(config: ProxyConfig, registry: Registry) -> list[Coroutine[None, None, NoReturn]]:
    if config.config_file is None:
        return []
    file = ConfigFile(config.config_file, config, lambda: configuration(config.arguments), registry)
    return [file.follow()]


async def serve(config: ProxyConfig, announce: Callable[[str], None]) -> None:
    """Run a proxy until SIGTERM or SIGINT, then drain it; a second signal ends the wait.

    ``announce`` gets the address as soon as requests are accepted: after the canary, if there is one. Raises like
    ``running``, and ``CanaryError``.
    """
    signals: asyncio.Queue[int] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signals.put_nowait, number)
    if config.canary_seconds and not await _ended_before_a_signal(_canary(config), signals):
        return
    async with running(config) as proxy:
        announce(proxy.address)
        await signals.get()
        drained = asyncio.create_task(proxy.drain(config.timeouts.drain_seconds))
        impatient = asyncio.create_task(signals.get())
        await asyncio.wait((drained, impatient), return_when=asyncio.FIRST_COMPLETED)
        if not (drained.done() and drained.result()):
            logger.warning("stopping although requests are open")
        for task in (drained, impatient):
            task.cancel()


async def _canary(config: ProxyConfig) -> None:
    async with _pool(config.timeouts) as pool:
        canary = Canary(EngineClient(pool, config.timeouts), os.environ.get(ENGINE_KEY_VARIABLE))
        await canary.move_kv(config.prefill_urls, config.decode_urls, config.canary_seconds)


async def _ended_before_a_signal(work: Coroutine[None, None, None], signals: asyncio.Queue[int]) -> bool:
    """Do some work unless there is a signal; whether it was done. Raises like the work."""
    working, waiting = asyncio.create_task(work), asyncio.create_task(signals.get())
    await asyncio.wait((working, waiting), return_when=asyncio.FIRST_COMPLETED)
    done = working.done()
    for task in (working, waiting):
        task.cancel()
    await asyncio.wait((working, waiting))
    if done:
        working.result()
    return done


def _pool(timeouts: Timeouts) -> Pool:
    """One pool for all engines."""
    return Pool(timeouts.connect_seconds, KEEP_ALIVE_SECONDS)


def _address(listener: Listener) -> str:
    host, port = listener.address
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
