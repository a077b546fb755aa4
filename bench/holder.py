"""A connector of vLLM's interface that holds each finished request for two steps: a sibling for NIXL's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorTransferResults,
    SupportsHMA,
)

__all__ = ["Holder"]

STEPS = 2


@dataclass
class Announced(KVConnectorMetadata):
    """Requests that ended since the last step."""

    ids: set[str] = field(default_factory=set)


class Holder(KVConnectorBase_V1, SupportsHMA):
    """Delays every release, loads nothing, saves nothing."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._finished: set[str] = set()
        self._left: dict[str, int] = {}

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._left |= dict.fromkeys(self._get_connector_metadata().ids, STEPS)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        done = {id for id, left in self._left.items() if left <= 1}
        self._left = {id: left - 1 for id, left in self._left.items() if left > 1}
        return KVConnectorTransferResults(finished_sending=done)

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        pass

    def build_connector_meta(self, scheduler_output: Any) -> Announced:
        announced, self._finished = Announced(self._finished), set()
        return announced

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        self._finished.add(request.request_id)
        return True, None

    request_finished_all_groups = request_finished
