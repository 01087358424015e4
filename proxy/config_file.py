"""Following the configuration file: engines come and go with it, without a restart."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from proxy.config import ConfigError, ProxyConfig
from proxy.registry import Origin, Registry
from proxy.routing import Role

logger = logging.getLogger("proxy.config_file")

POLL_SECONDS = 1.0
"""How often the file is looked at. Polling works on every file system and for every way of replacing a file."""

_Stamp = tuple[int, int, int]
_NOT_READ: _Stamp = (-1, -1, -1)


def _stamp(path: Path) -> _Stamp | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


class ConfigFile:
    """Keeps a registry in step with a file.

    Only the difference between two readings is applied, so that engines that the admin API added stay. A file that
    cannot be read or understood changes nothing, and so does one that empties a role: it is more likely to be half
    written than meant. Other settings need a restart. A file is read once two looks in a row have found it the same.
    """

    def __init__(
        self,
        path: Path,
        config: ProxyConfig,
        read: Callable[[], ProxyConfig],
        registry: Registry,
        stamp: Callable[[Path], _Stamp | None] = _stamp,
    ) -> None:
        self._path = path
        self._config = config
        self._read = read
        self._stamp = stamp
        self._registry = registry
        # The file may have changed since ``config`` was read, so it is read once more.
        self._read_at: _Stamp | None = _NOT_READ

    async def follow(self, poll_seconds: float = POLL_SECONDS) -> NoReturn:
        """Never returns."""
        seen: _Stamp | None = _NOT_READ
        while True:
            await asyncio.sleep(poll_seconds)
            before, seen = seen, await asyncio.to_thread(self._stamp, self._path)
            if before == seen != self._read_at:
                self._read_at = seen
                self.reload()

    def reload(self) -> None:
        """Read the file and apply what has changed since the last time."""
        try:
            config = self._read()
        except ConfigError as error:
            logger.error("the configuration stays as it is: %s", error)  # noqa: TRY400 - the message says it all
            return
        for role, before, after in (
            (Role.PREFILL, self._config.prefill_urls, config.prefill_urls),
            (Role.DECODE, self._config.decode_urls, config.decode_urls),
        ):
            if before and not after:
                logger.error("the configuration stays as it is: %s names no %s engine any more", self._path, role)
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
            self._registry.add(role, new, self._config.routing.num_ranks, Origin.FILE)
            logger.info("new %s engines: %s", role, ", ".join(new))
