"""Where an engine is."""

import ssl
from typing import NamedTuple
from urllib.parse import urlsplit

_DEFAULT_PORTS = {"http": 80, "https": 443}


class Origin(NamedTuple):
    """A base address, in parts."""

    host: str
    port: int
    is_secure: bool
    base_path: str
    """Without a slash at its end."""
    authority: str
    """For the header ``Host``."""

    def tls(self) -> ssl.SSLContext | None:
        """Checks the engine's certificate, if the address wants that."""
        return ssl.create_default_context() if self.is_secure else None


def origin_of(url: str) -> Origin:
    """A base address that ``config.engine_url`` has checked."""
    parts = urlsplit(url)
    port = parts.port or _DEFAULT_PORTS.get(parts.scheme, 80)
    host = parts.hostname or ""
    shown = f"[{host}]" if ":" in host else host
    authority = shown if parts.port is None else f"{shown}:{port}"
    return Origin(host, port, parts.scheme == "https", parts.path.rstrip("/"), authority)
