"""OffloadingConnector: the facade. It maps each method of the interface to one method of one half, and reads the clock.

Rules
1. No decision is made here: configuration is checked, views and sets are translated, the halves decide.
2. Both halves are made from one identity of the engine's blocks (:mod:`kvconn.offload.keys`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from kvconn.base import (
    BlockIds,
    ConnectorMetadata,
    ConnectorRole,
    FinishReason,
    KVBlocks,
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
from kvconn.offload.keys import identity_of
from kvconn.offload.metadata import OffloadMetadata
from kvconn.offload.scheduler import OffloadScheduler
from kvconn.offload.tiers.make import make_tiers
from kvconn.offload.worker import OffloadWorker

__all__ = ["OffloadingConnector"]


class OffloadingConnector(KVConnector):
    """Prompt blocks to host memory as they are computed, to secondary tiers from there, and back on a prefix hit.

    ``clock``: seconds, default ``time.perf_counter``. Raises ConfigError for what this version cannot do.
    """

    hears_silence = False

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
            identity = identity_of(config.model, config.parallel, kv_cache.block_size, None)
            tiers = make_tiers(settings, identity, kv_cache.block_bytes)
            self._scheduler = OffloadScheduler(config, settings, kv_cache, tiers)
        else:
            rank = 0 if config.rank is None else config.rank
            identity = identity_of(config.model, config.parallel, kv_cache.block_size, rank)
            tiers = make_tiers(settings, identity, kv_cache.block_bytes)
            role_of = RankRole.of(config.parallel, rank, config.kv_transfer.kv_role)
            self._worker = OffloadWorker(settings, role_of, kv_cache, tiers)

    # -- scheduler half ------------------------------------------------------------------------------------------

    @property
    def scheduler(self) -> OffloadScheduler:
        """The scheduler half; ConfigError on a worker instance."""
        if self._scheduler is None:
            raise ConfigError("OffloadingConnector: a scheduler method was called on a worker instance")
        return self._scheduler

    def on_new_request(self, request: RequestView) -> None:
        self.scheduler.arrived(request, self._clock())

    def get_num_new_matched_tokens(self, request: RequestView, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self.scheduler.match(request, num_computed_tokens, self._clock())

    def update_state_after_alloc(self, request: RequestView, blocks: KVBlocks, num_external_tokens: int) -> None:
        self.scheduler.allocated(request, blocks, num_external_tokens, self._clock())

    def build_connector_meta(self, step: StepView) -> ConnectorMetadata:
        return OffloadMetadata(self.scheduler.step(step, self._clock()))

    def request_finished(
        self, request: RequestView, blocks: BlockIds, reason: FinishReason
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.scheduler.finished(request, blocks, reason, self._clock()), None

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        filter_output(output, partial(self.scheduler.reports, now=self._clock()))

    def has_pending_push_work(self) -> bool:
        return self.scheduler.busy()

    def take_events(self) -> Iterable[Any]:
        return self.scheduler.take_events()

    def reset_cache(self) -> bool | None:
        return self.scheduler.reset()

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

    def handle_preemptions(self, metadata: ConnectorMetadata) -> None:
        if isinstance(metadata, OffloadMetadata):
            self.worker.flush(metadata.step)

    def start_load_kv(self, context: object = None, **kwargs: object) -> None:
        self.worker.start_loads(self._clock())

    def wait_for_save(self) -> None:
        self.worker.start_stores(self._clock())

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
    if kv_cache.block_bytes < 1:
        problems.append(
            "kv_transfer_config.kv_connector: OffloadingConnector needs the engine to say how many bytes a block has "
            f"(KVCacheView.block_bytes), got {kv_cache.block_bytes}"
        )
    elif settings.cpu_bytes_to_use < kv_cache.block_bytes:
        problems.append(
            f"{extra}.cpu_bytes_to_use: expected at least one block of {kv_cache.block_bytes} bytes (all layers), "
            f"got {settings.cpu_bytes_to_use}"
        )
    tiering, tiers = settings.spec_name == "TieringOffloadingSpec", bool(settings.secondary_tiers)
    if tiering != tiers:
        wanted = "at least one with TieringOffloadingSpec" if tiering else "none with CPUOffloadingSpec"
        problems.append(f"{extra}.secondary_tiers: expected {wanted}, got {len(settings.secondary_tiers)}")
    kinds = sorted({group.kind for group in kv_cache.groups} - {"full"})
    if kinds:
        problems.append(
            "kv_transfer_config.kv_connector: OffloadingConnector stores full-attention groups, "
            f"the model also has {', '.join(kinds)}"
        )
    if problems:
        raise ConfigError(problems)
