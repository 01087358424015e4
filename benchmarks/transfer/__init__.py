"""``scripts/bench transfer``: pulls over real NIXL between two processes, without an engine."""
