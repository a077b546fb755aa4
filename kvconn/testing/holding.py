"""A sibling that holds every request on every rank until told, for connector authors and tests.

Rules
1. It keeps the contract: one report per rank and life, after the announcement was bound; a repeated announcement
   changes nothing.
2. A rank lets go after ``polls`` polls, or on :meth:`HoldingConnector.release` (on a worker half: that rank; on the
   scheduler half: every rank, with the next step).
3. With ``facts`` false it is a bare connector, as an engine's own may be: sets only.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from kvconn.base import (
    BlockIds,
    ConnectorMetadata,
    ConnectorRole,
    Fact,
    FinishReason,
    KVCacheView,
    KVConnector,
    KVConnectorOutput,
    RequestView,
    StepView,
    TransferResults,
    WorkerFacts,
)
from kvconn.config import ConnectorConfig, parse_extra
from kvconn.ledger import CompletionGate, CompletionLedger, filter_output

__all__ = ["HoldSettings", "HoldingConnector"]


class HoldSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``kv_connector_extra_config``. ``polls`` None: until :meth:`HoldingConnector.release`."""

    polls: int | None = None
    facts: bool = True


class _Step(msgspec.Struct, frozen=True):
    holds: tuple[tuple[str, int], ...] = ()
    releases: tuple[str, ...] = ()


@dataclass(frozen=True)
class HoldingMetadata(ConnectorMetadata):
    """Requests held and released since the last step."""

    step: _Step


class HoldingConnector(KVConnector):
    """Holds; loads nothing, stores nothing."""

    def __init__(self, config: ConnectorConfig, role: ConnectorRole, kv_cache: KVCacheView) -> None:
        self.role = role
        self.rank = config.rank or 0
        self._settings = parse_extra(HoldSettings, config.kv_transfer)
        self._ranks = range(config.parallel.world)
        self.ledger = CompletionLedger()
        self._gate = CompletionGate(self.ledger)
        self._holds: list[tuple[str, int]] = []
        self._released: list[str] = []
        #: worker: id -> [n, polls left]; None left: until released.
        self._held: dict[str, tuple[int, int | None]] = {}
        self._newest = 0
        self._facts: list[Fact] = []

    @property
    def held(self) -> set[str]:
        """Requests this half still holds."""
        return set(self._held) if self.role is ConnectorRole.WORKER else {life.id for life in self.ledger.pending()}

    def release(self, *ids: str) -> None:
        """Let go of ``ids`` (default: of everything held)."""
        for id in ids or tuple(self.held):
            if self.role is ConnectorRole.SCHEDULER:
                self._released.append(id)
            elif id in self._held:
                self._held[id] = (self._held[id][0], 0)

    # -- scheduler half ------------------------------------------------------------------------------------------

    def build_connector_meta(self, step: StepView) -> ConnectorMetadata:
        shipped = _Step(tuple(self._holds), tuple(self._released))
        self._holds, self._released = [], []
        return HoldingMetadata(shipped)

    def request_finished(
        self, request: RequestView, blocks: BlockIds, reason: FinishReason
    ) -> tuple[bool, dict[str, Any] | None]:
        n = self.ledger.open(request.id, "send", {(): self._ranks} if self._settings.facts else {})
        self._holds.append((request.id, n))
        return True, None

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        filter_output(output, self._gate.reports)

    def explain(self, now: float) -> list[str]:
        return [life.describe({(): "HoldingConnector"}, now) for life in self.ledger.pending()]

    # -- worker half ---------------------------------------------------------------------------------------------

    def bind_connector_metadata(self, metadata: ConnectorMetadata) -> None:
        super().bind_connector_metadata(metadata)
        if not isinstance(metadata, HoldingMetadata):
            return
        for id, n in metadata.step.holds:
            if n > self._newest:
                self._newest = n
                self._held[id] = (n, self._settings.polls)
        self.release_all(metadata.step.releases)

    def release_all(self, ids: Iterable[str]) -> None:
        """:meth:`release` of exactly ``ids``, which may be none."""
        for id in ids:
            self.release(id)

    def get_transfer_results(self, finished_req_ids: set[str]) -> TransferResults:
        sent: set[str] = set()
        for id, (n, left) in list(self._held.items()):
            if left is not None and left <= 0:
                del self._held[id]
                sent.add(id)
                self._facts.append(Fact(id, "send", n, self.rank, "done"))
            elif left is not None:
                self._held[id] = (n, left - 1)
        return TransferResults(frozenset(sent))

    def build_connector_worker_meta(self) -> WorkerFacts | None:
        facts, self._facts = self._facts, []
        return WorkerFacts(tuple(facts)) if facts and self._settings.facts else None

    def __repr__(self) -> str:
        return f"HoldingConnector({self.role.value} held={len(self.held)})"
