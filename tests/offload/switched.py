"""An OffloadingConnector that is there or not by the request: with ids that begin with ``off`` it is asked nothing.

For measurements: one engine with and without offloading, the same process, memory and machine. What is not taken away
is the engine's calls, which come back at once. Switch only while the engine is idle.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvconn.base import (
    NO_RESULTS,
    BlockIds,
    ConnectorMetadata,
    FinishReason,
    KVBlocks,
    KVConnectorOutput,
    RequestView,
    StepView,
    TransferResults,
    WorkerFacts,
)
from kvconn.metrics import Stats
from kvconn.offload.connector import OffloadingConnector as Real

__all__ = ["OFF", "Nothing", "OffloadingConnector"]

OFF = "off"


class Nothing(ConnectorMetadata):
    """Tells the ranks that there is no connector in this step."""


NOTHING = Nothing()


class OffloadingConnector(Real):
    """``on``: the real one."""

    on = True

    def on_new_request(self, request: RequestView) -> None:
        self.on = not request.id.startswith(OFF)
        if self.on:
            super().on_new_request(request)

    def get_num_new_matched_tokens(self, request: RequestView, num_computed_tokens: int) -> tuple[int | None, bool]:
        return super().get_num_new_matched_tokens(request, num_computed_tokens) if self.on else (0, False)

    def update_state_after_alloc(self, request: RequestView, blocks: KVBlocks, num_external_tokens: int) -> None:
        if self.on:
            super().update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, step: StepView) -> ConnectorMetadata:
        return super().build_connector_meta(step) if self.on else NOTHING

    def request_finished(
        self, request: RequestView, blocks: BlockIds, reason: FinishReason
    ) -> tuple[bool, dict[str, Any] | None]:
        return super().request_finished(request, blocks, reason) if self.on else (False, None)

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        if self.on:
            super().update_connector_output(output)

    def has_pending_push_work(self) -> bool:
        return self.on and super().has_pending_push_work()

    def take_events(self) -> Iterable[Any]:
        return super().take_events() if self.on else ()

    def bind_connector_metadata(self, metadata: ConnectorMetadata) -> None:
        self.on = not isinstance(metadata, Nothing)
        super().bind_connector_metadata(metadata)

    def start_load_kv(self, context: object = None, **kwargs: object) -> None:
        if self.on:
            super().start_load_kv(context, **kwargs)

    def wait_for_save(self) -> None:
        if self.on:
            super().wait_for_save()

    def get_transfer_results(self, finished_req_ids: set[str]) -> TransferResults:
        return super().get_transfer_results(finished_req_ids) if self.on else NO_RESULTS

    def build_connector_worker_meta(self) -> WorkerFacts | None:
        return super().build_connector_worker_meta() if self.on else None

    def get_kv_connector_stats(self) -> Stats | None:
        return super().get_kv_connector_stats() if self.on else None
