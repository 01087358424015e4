"""How many files, and so connections, the process may have open."""

import logging
import resource

logger = logging.getLogger("proxy.open_files")

_FILES_FOR_A_REQUEST = 2
"""One to the client and one to an engine."""


def allow_open_files(max_in_flight: int) -> None:
    """Raise the soft limit to the hard one; a warning is logged if that is too few for ``max_in_flight`` requests."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    needed = _FILES_FOR_A_REQUEST * max_in_flight
    if hard != resource.RLIM_INFINITY and hard < needed:
        logger.warning(
            "at most %d files may be open, and %d requests at once need %d: raise the limit (ulimit -Hn) "
            "or lower --max-in-flight",
            hard,
            max_in_flight,
            needed,
        )
