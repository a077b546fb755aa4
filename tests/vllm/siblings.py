"""A vLLM-native connector that holds every finished request, and reports it on every rank some steps later.

That is vLLM's plain contract for asynchronous saving, and what the stock MultiConnector counts. Loaded by module path.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorTransferResults,
    SupportsHMA,
)

STEPS = 3


@dataclass
class Held(KVConnectorMetadata):
    ids: list[str] = field(default_factory=list)


class HoldingSibling(KVConnectorBase_V1, SupportsHMA):
    """Holds and stores nothing."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._new: list[str] = []
        self._left: dict[str, int] = {}

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        pass

    def build_connector_meta(self, scheduler_output: Any) -> Held:
        held, self._new = Held(self._new), []
        return held

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        self._new.append(request.request_id)
        return True, None

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return self.request_finished(request, block_ids)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._left.update(dict.fromkeys(self._get_connector_metadata().ids, STEPS))

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        self._left = {id: steps - 1 for id, steps in self._left.items()}
        done = {id for id, steps in self._left.items() if steps <= 0}
        for id in done:
            del self._left[id]
        return KVConnectorTransferResults(finished_sending=done)
