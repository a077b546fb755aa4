"""Children that do as they are told, built from configuration like any other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvconn.base import (
    BlockIds,
    ConnectorMetadata,
    ConnectorRole,
    FinishReason,
    HandshakeMetadata,
    KVBlocks,
    KVCacheView,
    KVConnector,
    KVConnectorOutput,
    RequestView,
    StepView,
    TransferResults,
)
from kvconn.config import ConnectorConfig


@dataclass(frozen=True)
class Published(HandshakeMetadata):
    """What a fake child publishes."""

    what: str


class FakeChild(KVConnector):
    """A bare connector: sets only, no facts. Its extra config says what its scheduler half answers.

    ``claims``, ``match`` (a number, or None for "not yet"), ``asynchronous``, ``params``, ``count``, ``publish``.
    On the worker half :meth:`say` queues what its next poll finds, announced or not.
    """

    def __init__(self, config: ConnectorConfig, role: ConnectorRole, kv_cache: KVCacheView) -> None:
        self.role = role
        self.told: dict[str, Any] = config.kv_transfer.kv_connector_extra_config
        self.config = config
        self.calls: list[tuple[Any, ...]] = []
        self.vetoes = False
        self._next: list[set[str]] = [set(), set(), set()]
        self._vetoed: set[str] = set()

    def say(self, *, sent: str = "", received: str = "", failed: str = "") -> None:
        for kept, ids in zip(self._next, (sent, received, failed), strict=True):
            kept |= set(ids.split())

    def get_num_new_matched_tokens(self, request: RequestView, num_computed_tokens: int) -> tuple[int | None, bool]:
        self.calls.append(("match", request.id, num_computed_tokens))
        return self.told.get("match", 0), self.told.get("asynchronous", True)

    def update_state_after_alloc(self, request: RequestView, blocks: KVBlocks, num_external_tokens: int) -> None:
        self.calls.append(("alloc", num_external_tokens, blocks.hashed))

    def build_connector_meta(self, step: StepView) -> ConnectorMetadata:
        return ConnectorMetadata()

    def request_finished(
        self, request: RequestView, blocks: BlockIds, reason: FinishReason
    ) -> tuple[bool, dict[str, Any] | None]:
        self.calls.append(("finished", request.id))
        return self.told.get("claims", True), self.told.get("params")

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        if output.finished_sending or output.finished_recving:
            sets = (output.finished_sending, output.finished_recving, output.failed_recving)
            self.calls.append(("output", tuple(one or set() for one in sets)))
        if self.vetoes:
            self._vetoed |= output.finished_sending or set()
            output.finished_sending = set()
        else:
            output.finished_sending = (output.finished_sending or set()) | self._vetoed
            self._vetoed = set()

    def get_finished_count(self) -> int | None:
        return self.told.get("count")

    def get_handshake_metadata(self) -> HandshakeMetadata | None:
        what = self.told.get("publish")
        return None if what is None else Published(what)

    def set_handshake_metadata(self, metadata: Any) -> None:
        self.calls.append(("handshake", dict(metadata)))

    def get_transfer_results(self, finished_req_ids: set[str]) -> TransferResults:
        sent, received, failed = self._next
        self._next = [set(), set(), set()]
        return TransferResults(frozenset(sent), frozenset(received), frozenset(failed))

    def handle_preemptions(self, metadata: ConnectorMetadata) -> None:
        """As the hooks below: ours, or it would not be called."""

    def start_load_kv(self, context: object = None, **kwargs: object) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, **kwargs: object) -> None:
        pass

    def wait_for_save(self) -> None:
        pass

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set()

    def build_connector_worker_meta(self) -> None:
        pass

    def get_kv_connector_stats(self) -> None:
        pass

    def shutdown(self) -> None:
        self.calls.append(("shutdown", None))
        if self.told.get("breaks"):
            raise RuntimeError("a child that breaks")


class OtherChild(FakeChild):
    """A second name."""


def fake(name: str = "FakeChild", **told: Any) -> dict[str, Any]:
    """The kv_transfer_config of a fake child."""
    return {
        "kv_connector": name,
        "kv_role": "kv_both",
        "kv_connector_module_path": "tests.multi.fakes",
        "kv_connector_extra_config": told,
    }


def holding(**told: Any) -> dict[str, Any]:
    """The kv_transfer_config of the sibling that holds."""
    return {
        "kv_connector": "HoldingConnector",
        "kv_role": "kv_both",
        "kv_connector_module_path": "kvconn.testing.holding",
        "kv_connector_extra_config": told,
    }
