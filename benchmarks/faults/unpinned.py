"""vLLM's built-in connector as it is, but for one thing: its workers keep the CPU cores that the operator gave them.

On a CPU the built-in worker moves itself to the last core of the machine. With two engines on two cores both would
share one, and a slow engine would look like a fault. An engine loads this by ``kv_connector_module_path``; the name
stays, because vLLM looks for it.
"""

import os
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlConnector as BuiltinConnector

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


class NixlConnector(BuiltinConnector):  # type: ignore[misc]  # vLLM is Any to mypy
    """The built-in pull connector on the cores that its process had before."""

    def __init__(self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig") -> None:
        cores = os.sched_getaffinity(0)
        super().__init__(vllm_config, role, kv_cache_config)
        os.sched_setaffinity(0, cores)
