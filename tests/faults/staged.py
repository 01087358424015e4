"""The connector as it is, with its reads held at stages by files in the folder that the environment names.

An engine loads it by ``kv_connector_module_path``. It is for tests of faults only.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from pd_transfer.config import PdConfig
from pd_transfer.core.layout import DescriptorRow, MemoryRange
from pd_transfer.transport.base import PullTransport
from pd_transfer.vllm.connector import PdConnector
from pd_transfer.vllm.parts import Parts, real_parts
from tests.faults.stages import FOLDER_VARIABLE, StagedPull


class StagedConnector(PdConnector):
    """The real connector with real parts, but for a staged pull side."""

    @classmethod
    def make_parts(cls, config: PdConfig) -> Parts:
        """ZeroMQ, NIXL, and stages around NIXL's pull side."""
        parts = real_parts(config)
        folder = Path(os.environ[FOLDER_VARIABLE])

        def pull(name: str, region: MemoryRange, rows: Sequence[DescriptorRow]) -> PullTransport:
            return StagedPull(parts.pull(name, region, rows), rows, folder)

        return Parts(parts.open_side_channel, parts.serve, pull)
