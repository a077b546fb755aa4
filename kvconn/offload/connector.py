"""OffloadingConnector: the facade. It maps each method of the interface to one method of one half, and reads the clock.

Rules
1. No decision is made here: configuration is checked, views and sets are translated, the halves decide.
2. This version stores and holds; loads from the tier come with a later one, so that ``kvconn.hold`` must be true.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from kvconn.base import (
    BlockIds,
    ConnectorMetadata,
    ConnectorRole,
    FinishReason,
    KVCacheView,
    KVConnector,
    KVConnectorOutput,
    LayerView,
    RequestView,
    StepView,
    TransferResults,
    WorkerFacts,
)
from kvconn.config import ConnectorConfig, OffloadSettings, parse_extra
from kvconn.errors import ConfigError
from kvconn.geometry import RankRole
from kvconn.ledger import filter_output
from kvconn.metrics import Stats
from kvconn.offload.metadata import OffloadMetadata
from kvconn.offload.scheduler import OffloadScheduler
from kvconn.offload.worker import OffloadWorker

__all__ = ["OffloadingConnector"]


class OffloadingConnector(KVConnector):
    """Every request's full blocks to host memory, holding the request until they are there.

    ``clock``: seconds, default ``time.perf_counter``. Raises ConfigError for what this version cannot do.
    """

    def __init__(
        self,
        config: ConnectorConfig,
        role: ConnectorRole,
        kv_cache: KVCacheView,
        *,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.role = role
        self._clock = clock or time.perf_counter
        settings = parse_extra(OffloadSettings, config.kv_transfer)
        _check(config, settings, kv_cache)
        self._scheduler: OffloadScheduler | None = None
        self._worker: OffloadWorker | None = None
        if role is ConnectorRole.SCHEDULER:
            self._scheduler = OffloadScheduler(config, kv_cache)
        else:
            rank = 0 if config.rank is None else config.rank
            self._worker = OffloadWorker(settings, RankRole.of(config.parallel, rank, config.kv_transfer.kv_role))

    # -- scheduler half ------------------------------------------------------------------------------------------

    @property
    def scheduler(self) -> OffloadScheduler:
        """The scheduler half; ConfigError on a worker instance."""
        if self._scheduler is None:
            raise ConfigError("OffloadingConnector: a scheduler method was called on a worker instance")
        return self._scheduler

    def build_connector_meta(self, step: StepView) -> ConnectorMetadata:
        return OffloadMetadata(self.scheduler.step())

    def request_finished(
        self, request: RequestView, blocks: BlockIds, reason: FinishReason
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.scheduler.finished(request, blocks, reason, self._clock()), None

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        filter_output(output, self.scheduler.reports)

    def explain(self, now: float) -> list[str]:
        return self.scheduler.explain(now) if self.role is ConnectorRole.SCHEDULER else []

    # -- worker half ---------------------------------------------------------------------------------------------

    @property
    def worker(self) -> OffloadWorker:
        """The worker half; ConfigError on a scheduler instance."""
        if self._worker is None:
            raise ConfigError("OffloadingConnector: a worker method was called on a scheduler instance")
        return self._worker

    def register_kv_caches(self, layers: Mapping[str, LayerView]) -> None:
        self.worker.register(layers)

    def bind_connector_metadata(self, metadata: ConnectorMetadata) -> None:
        super().bind_connector_metadata(metadata)
        if isinstance(metadata, OffloadMetadata):
            self.worker.bind(metadata.step, self._clock())

    def get_transfer_results(self, finished_req_ids: set[str]) -> TransferResults:
        return self.worker.poll(self._clock())

    def build_connector_worker_meta(self) -> WorkerFacts | None:
        return self.worker.take_facts()

    # -- both ----------------------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> Stats | None:
        half = self._scheduler or self._worker
        return half.meter.take() if half is not None else None

    def shutdown(self) -> None:
        half = self._scheduler or self._worker
        if half is not None:
            half.shutdown()

    def __repr__(self) -> str:
        return f"OffloadingConnector({self._scheduler or self._worker!r})"


def _check(config: ConnectorConfig, settings: OffloadSettings, kv_cache: KVCacheView) -> None:
    problems = []
    if config.kv_transfer.kv_role != "kv_both":
        problems.append(f"kv_transfer_config.kv_role: expected kv_both, got {config.kv_transfer.kv_role}")
    extra = "kv_transfer_config.kv_connector_extra_config"
    if not settings.kvconn.hold:
        problems.append(
            f"{extra}.kvconn.hold: expected true (storing without holding comes with loads, in a later version), "
            "got false"
        )
    if settings.cpu_bytes_to_use < 1:
        problems.append(f"{extra}.cpu_bytes_to_use: expected bytes > 0, got {settings.cpu_bytes_to_use}")
    kinds = sorted({group.kind for group in kv_cache.groups} - {"full"})
    if kinds:
        problems.append(
            "kv_transfer_config.kv_connector: OffloadingConnector stores full-attention groups, "
            f"the model also has {', '.join(kinds)}"
        )
    if problems:
        raise ConfigError(problems)
