"""Connectors that break the completion contract on purpose, to show what that does and that it is named.

Rules
1. Nothing of the product imports this; an operator has to name it by module path.
2. ``hidden_ranks`` is the accounting before the fix: replicated PCP ranks > 0 stay silent about their sends in both
   polls and in their facts, while the count stays the world (docs/design.md, settled detail 16).
"""

from __future__ import annotations

from typing import Any

import msgspec

from kvconn.base import ConnectorRole, KVCacheView, KVConnector, TransferResults, WorkerFacts
from kvconn.config import ConnectorConfig
from kvconn.geometry import RankRole
from kvconn.nixl.connector import NixlConnector

__all__ = ["HiddenRanks", "HiddenRanksNixlConnector", "hidden_ranks"]


class HiddenRanks(KVConnector):
    """Mixin before a connector class: its replicated ranks drop their finished sends."""

    def __init__(self, config: ConnectorConfig, role: ConnectorRole, kv_cache: KVCacheView, **options: Any) -> None:
        super().__init__(config, role, kv_cache, **options)  # type: ignore[call-arg]  # the class mixed with
        rank = 0 if config.rank is None else config.rank
        where = RankRole.of(config.parallel, rank, config.kv_transfer.kv_role)
        self.hides = role is ConnectorRole.WORKER and where.replicates

    def get_transfer_results(self, finished_req_ids: set[str]) -> TransferResults:
        results = super().get_transfer_results(finished_req_ids)  # type: ignore[safe-super]  # the class mixed with
        return msgspec.structs.replace(results, finished_sending=frozenset()) if self.hides else results

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        sent, received = super().get_finished(finished_req_ids)
        return (set(), received) if self.hides else (sent, received)

    def build_connector_worker_meta(self) -> Any:
        meta = super().build_connector_worker_meta()
        if not self.hides or not isinstance(meta, WorkerFacts):
            return meta
        kept = tuple(fact for fact in meta.facts if fact.direction != "send")
        return WorkerFacts(kept) if kept else None


def hidden_ranks(cls: type[KVConnector]) -> type[KVConnector]:
    """``cls`` with its replicated ranks hidden."""
    return type(f"HiddenRanks{cls.__name__}", (HiddenRanks, cls), {"__doc__": HiddenRanks.__doc__})


class HiddenRanksNixlConnector(HiddenRanks, NixlConnector):
    """The NIXL connector as released with the fault: ranks > 0 of a replicated PCP group never report a send."""
