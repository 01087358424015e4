"""Faults played the same way against vLLM's built-in NIXL connector and against this one: data, not a gate."""
