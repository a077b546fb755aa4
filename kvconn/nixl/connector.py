"""NixlConnector: the facade. It maps each method of the interface to one method of one half, and reads the clock.

Rules
1. No decision is made here: configuration is checked, views and sets are translated, the halves decide.
2. ``get_finished`` is the base class's, derived from the one poll (C5).
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
    HandshakeMetadata,
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
from kvconn.config import ConnectorConfig, NixlSettings, parse_extra
from kvconn.errors import ConfigError
from kvconn.geometry import RankRole, Share, is_replicated
from kvconn.ledger import filter_output
from kvconn.metrics import Stats
from kvconn.nixl.handshake import side_of
from kvconn.nixl.metadata import RESTING, SILENT, NixlHandshake, NixlMetadata
from kvconn.nixl.routes import MAX_PP, MAX_TP
from kvconn.nixl.scheduler import NixlScheduler
from kvconn.nixl.wire import WireCodec
from kvconn.nixl.worker import NixlWorker
from kvconn.transport.base import Transport

__all__ = ["NixlConnector"]


class NixlConnector(KVConnector):
    """KV blocks over NIXL: a producer holds them until they were read, a consumer reads them.

    ``config`` is the whole engine's, ``config.rank`` this worker's. ``codec`` defaults to our own wire, ``clock``
    to ``time.perf_counter``, ``make_transport`` to a NIXL agent. Raises ConfigError for what this version cannot do.
    """

    hears_silence = False

    def __init__(
        self,
        config: ConnectorConfig,
        role: ConnectorRole,
        kv_cache: KVCacheView,
        *,
        codec: WireCodec | None = None,
        clock: Callable[[], float] | None = None,
        make_transport: Callable[[], Transport] | None = None,
    ) -> None:
        self.role = role
        self._half: NixlScheduler | NixlWorker
        self._clock = clock or time.perf_counter
        settings = parse_extra(NixlSettings, config.kv_transfer)
        _check_topology(config)
        if role is ConnectorRole.SCHEDULER:
            self._half = self.scheduler = NixlScheduler(config, settings, kv_cache, codec or WireCodec())
        else:
            rank = 0 if config.rank is None else config.rank
            self._half = self.worker = NixlWorker(
                config,
                settings,
                kv_cache,
                RankRole.of(config.parallel, rank, config.kv_transfer.kv_role),
                codec or WireCodec(),
                make_transport or (lambda: _nixl_transport(settings)),
            )

    def __getattr__(self, name: str) -> Any:
        """Of what is not there: the half that this instance is not."""
        if name in ("scheduler", "worker"):
            raise ConfigError(f"NixlConnector: a {name} method was called on a {self.role.value} instance")
        raise AttributeError(f"NixlConnector has no {name}")

    # -- scheduler half ------------------------------------------------------------------------------------------

    def on_new_request(self, request: RequestView) -> None:
        self.scheduler.arrived(request, self._clock())

    def get_num_new_matched_tokens(self, request: RequestView, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self.scheduler.match(request, num_computed_tokens, self._clock())

    def update_state_after_alloc(self, request: RequestView, blocks: KVBlocks, num_external_tokens: int) -> None:
        self.scheduler.allocated(request, blocks, num_external_tokens, self._clock())

    def build_connector_meta(self, step: StepView) -> ConnectorMetadata:
        scheduler = self.scheduler
        said = scheduler.step(step, self._clock())
        rests = bool(scheduler.loading) and not step.requests
        if said is None:
            return RESTING if rests else SILENT
        return NixlMetadata(said, rests)

    def request_finished(
        self, request: RequestView, blocks: BlockIds, reason: FinishReason
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.scheduler.finished(request, blocks, reason, self._clock())

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        meta = output.kv_connector_worker_meta
        if isinstance(meta, WorkerFacts):
            self.scheduler.serve({(one.pp, one.tp): NixlHandshake(one.payload) for one in meta.published})
        filter_output(output, self.scheduler.reports)

    def drain(self) -> None:
        self.scheduler.drain()

    def has_pending_push_work(self) -> bool:
        return self.scheduler.needs_steps(self._clock())

    def set_handshake_metadata(self, metadata: Mapping[tuple[int, int], HandshakeMetadata]) -> None:
        self.scheduler.serve({rank: m for rank, m in metadata.items() if isinstance(m, NixlHandshake)})

    def reset_cache(self) -> bool | None:
        return self.scheduler.reset()

    # -- worker half ---------------------------------------------------------------------------------------------

    def register_kv_caches(self, layers: Mapping[str, LayerView]) -> None:
        self.worker.register(layers)

    def get_handshake_metadata(self) -> HandshakeMetadata | None:
        return self.worker.handshake()

    def bind_connector_metadata(self, metadata: ConnectorMetadata) -> None:
        if isinstance(metadata, NixlMetadata):
            self.worker.rests = metadata.rests
            if metadata.step is not None:
                self.worker.bind(metadata.step, self._clock())

    def start_load_kv(self, context: object = None, **kwargs: object) -> None:
        if self.worker.loads_wait:
            self.worker.start_loads(self._clock())

    def get_transfer_results(self, finished_req_ids: set[str]) -> TransferResults:
        return self.worker.poll(self._clock())

    def build_connector_worker_meta(self) -> WorkerFacts | None:
        return self.worker.take_facts()

    # -- both ----------------------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> Stats | None:
        return self._half.meter.take()

    def explain(self, now: float) -> list[str]:
        return self._half.explain(now)

    def shutdown(self) -> None:
        self._half.shutdown()

    def __repr__(self) -> str:
        return f"NixlConnector({self._half!r})"


def _check_topology(config: ConnectorConfig) -> None:
    """Refuse, all at once and by name, what no plan covers."""
    parallel, role, side = config.parallel, config.kv_transfer.kv_role, side_of(config)
    problems = [
        f"parallel.{name}: at most {most} ranks transfer, got {size}"
        for name, size, most in (("tp", side.tp, MAX_TP), ("pp", side.pp, MAX_PP))
        if size > most
    ]
    if Share.of(side, 0) is None:
        problems.append(
            f"parallel: expected {side.kv_heads} KV heads and {side.tp} ranks of a stage that divide one another and "
            f"a dcp that divides the ranks per head, got tp {parallel.tp} pcp {parallel.pcp} dcp {parallel.dcp}"
        )
    if is_replicated(parallel) and role != "kv_producer":
        problems.append(f"kv_role: with replicated PCP {parallel.pcp} only kv_producer works, got {role}")
    if problems:
        raise ConfigError(problems)


def _nixl_transport(settings: NixlSettings) -> Transport:
    from kvconn.transport.nixl import NixlTransport  # only processes that move bytes load NIXL

    return NixlTransport(
        progress=settings.kvconn.progress,
        backends=settings.backends,
        num_threads=settings.num_threads,
        pump_interval=settings.kvconn.pump_interval,
        batch=settings.kvconn.batch_reads == "auto",
    )
