"""Other connectors beside ours under MultiConnector, controlled by a test."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorTransferResults,
    SupportsHMA,
)


class SiblingMetadata(KVConnectorMetadata):
    """Nothing."""


@dataclass
class Control:
    """What a test wants of the sibling: tokens that it offers (None: ask again), and receives that have ended."""

    offers: dict[str, int | None] = field(default_factory=dict)
    ended: set[str] = field(default_factory=set)
    allocated: list[tuple[str, int]] = field(default_factory=list)
    params: dict[str, Any] | None = None


class FlatSibling(KVConnectorBase_V1):
    """A connector that loads in the background what a test says. It does not know about layer groups."""

    control: ClassVar[Control]

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        offer = self.control.offers.get(request.request_id, 0)
        if offer is None:
            return None, False
        found = max(0, offer - num_computed_tokens)
        return found, found > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self.control.allocated.append((request.request_id, num_external_tokens))
        if num_external_tokens:
            self.control.offers[request.request_id] = 0

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return SiblingMetadata()

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return False, self.control.params

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        ended, self.control.ended = self.control.ended, set()
        return KVConnectorTransferResults(finished_recving=ended)

    def start_load_kv(self, *args: Any, **kwargs: Any) -> None: ...
    def wait_for_layer_load(self, layer_name: str) -> None: ...
    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None: ...
    def wait_for_save(self) -> None: ...


class Sibling(FlatSibling, SupportsHMA):
    """The same for models with several layer groups."""

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        return tuple(self._kv_cache_config.transfer_group_ids)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, self.control.params
