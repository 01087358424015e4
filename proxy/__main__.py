"""``python -m proxy``: the command line of the proxy."""

import gc
import logging
import sys
from collections.abc import Sequence

import uvloop

from proxy.canary import CanaryError
from proxy.command_line import parse_arguments
from proxy.config import ConfigError, ProxyConfig
from proxy.log_lines import log_to_stderr
from proxy.open_files import allow_open_files
from proxy.service import serve
from proxy.settings_file import text_of

logger = logging.getLogger("proxy")

_OBJECTS_BETWEEN_COLLECTIONS = 20_000
"""Requests leave no cycles behind, so that the collector finds nothing: what it costs is all that can be saved. At
Python's own threshold, 700, that is a fifth of the CPU time of a busy proxy."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a proxy until it is told to stop.

    Returns the exit status: 0 after a stop, 1 if it cannot listen or its canary saw no KV move.
    """
    config = parse_arguments(sys.argv[1:] if arguments is None else arguments)
    log_to_stderr()
    logger.info("the configuration, as a --config file would say it:\n%s", text_of(config))
    allow_open_files(config.limits.max_in_flight)
    gc.freeze()
    gc.set_threshold(_OBJECTS_BETWEEN_COLLECTIONS)
    try:
        uvloop.run(serve(config, lambda address: _announce(address, config)))
    except (ConfigError, CanaryError) as error:
        print(f"pd-proxy: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"pd-proxy: cannot listen on {config.host}:{config.port}: {error.strerror or error}", file=sys.stderr)
        return 1
    return 0


def _announce(address: str, config: ProxyConfig) -> None:
    engines = f"{len(config.prefill_urls)} prefill, {len(config.decode_urls)} decode"
    print(f"pd-proxy listens on {address} ({engines})", flush=True)


if __name__ == "__main__":
    sys.exit(main())
