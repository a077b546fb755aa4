"""The scheduler half: holds every request until its blocks are stored.

Rules
1. ``finished`` answers True whatever the reason: a send life is open over every worker of the engine, its announcement
   is in the next step's metadata, and the id is emitted once, when every worker has reported that life (C1, C3).
2. Only full blocks of a request that ended well are stored: after an abort, hashes may name what was never computed.
3. The last sampled token has no KV.
Time is an argument.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvconn.base import BlockIds, Fact, FinishReason, KVCacheView, RequestView
from kvconn.config import ConnectorConfig
from kvconn.ledger import CompletionGate, CompletionLedger, Emit
from kvconn.metrics import Meter
from kvconn.offload.metadata import OffloadStep, StoreSpec

__all__ = ["OffloadScheduler"]


class OffloadScheduler:
    """Lives of held requests, and what to store of them."""

    def __init__(self, config: ConnectorConfig, kv_cache: KVCacheView) -> None:
        self._ranks = range(config.parallel.world)
        self._block_size = kv_cache.block_size
        self.ledger = CompletionLedger()
        self._gate = CompletionGate(self.ledger)
        self.meter = Meter()
        self._stores: list[StoreSpec] = []

    def finished(self, view: RequestView, blocks: BlockIds, reason: FinishReason, now: float) -> bool:
        """Hold the request; announce it with the next step."""
        n = self.ledger.open(view.id, "send", {(): self._ranks}, now=now)
        full = 0
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            full = min([(view.n_total - 1) // self._block_size, *(len(ids) for ids in blocks)])
        keys = tuple(view.block_hashes()[:full]) if full > 0 else ()
        self._stores.append(StoreSpec(view.id, n, keys, tuple(ids[: len(keys)] for ids in blocks)))
        return True

    def step(self) -> OffloadStep:
        """Everything held since the last step, for the worker halves."""
        step, self._stores = OffloadStep(tuple(self._stores)), []
        return step

    def reports(
        self, sent: Iterable[str], received: Iterable[str], failed: Iterable[str], facts: Iterable[Fact]
    ) -> Emit:
        """Filter the engine's sets (veto, never originate)."""
        return self._gate.reports(sent, received, failed, facts)

    def explain(self, now: float) -> list[str]:
        """One line per held request."""
        return [life.describe({(): "OffloadingConnector"}, now) for life in self.ledger.pending() if life.owed]

    def shutdown(self) -> None:
        """Nothing to stop."""

    def __repr__(self) -> str:
        return f"OffloadScheduler({self.ledger!r} unannounced={len(self._stores)})"
