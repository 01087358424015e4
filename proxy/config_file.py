"""Following the configuration file: engines come and go with it, without a restart."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from proxy.config import ConfigError, ProxyConfig
from proxy.registry import Registry
from proxy.routing import Role

logger = logging.getLogger("proxy.config_file")

POLL_SECONDS = 1.0
"""How often the file is looked at. Polling works on every file system and for every way of replacing a file."""

_Stamp = tuple[int, int, int]


class ConfigFile:
    """Keeps a registry in step with a file.

    Only the difference between two readings is applied, so that engines that the admin API added stay. A file that
    cannot be read or understood changes nothing; neither do its other settings, which need a restart.
    """

    def __init__(self, path: Path, config: ProxyConfig, read: Callable[[], ProxyConfig], registry: Registry) -> None:
        self._path = path
        self._config = config
        self._read = read
        self._registry = registry
        self._stamp = _stamp(path)

    async def follow(self, poll_seconds: float = POLL_SECONDS) -> NoReturn:
        """Never returns."""
        while True:
            await asyncio.sleep(poll_seconds)
            stamp = await asyncio.to_thread(_stamp, self._path)
            if stamp != self._stamp:
                self._stamp = stamp
                self.reload()

    def reload(self) -> None:
        """Read the file and apply what has changed since the last time."""
        try:
            config = self._read()
        except ConfigError as error:
            logger.error("the configuration stays as it is: %s", error)  # noqa: TRY400 - the message says it all
            return
        self._apply(Role.PREFILL, self._config.prefill_urls, config.prefill_urls)
        self._apply(Role.DECODE, self._config.decode_urls, config.decode_urls)
        self._config = replace(self._config, prefill_urls=config.prefill_urls, decode_urls=config.decode_urls)
        if self._config != config:
            logger.warning("%s has other new settings; they take effect after a restart", self._path)

    def _apply(self, role: Role, before: tuple[str, ...], after: tuple[str, ...]) -> None:
        for url in before:
            if url not in after:
                self._registry.remove(role, url)
                logger.info("%s engine %s is gone from the file; its open requests go on", role, url)
        if new := [url for url in after if url not in before]:
            self._registry.add(role, new, self._config.routing.num_ranks)
            logger.info("new %s engines: %s", role, ", ".join(new))


def _stamp(path: Path) -> _Stamp | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
