"""MultiConnector for vLLM: children of ours and vLLM's own, ``kvconn.multi`` decides.

Contract it keeps, whatever its children do
- A delayed release is emitted once, when every child that claimed it has every rank complete, by identity.
- A load is reported once per rank, when the children that load it are through.

Rules
1. Every method of vLLM's interface reaches every child that it concerns; a test proves it by reflection.
2. A native child's worker metadata travels beside our facts, by the child's index.
3. Metrics are kept by the children's class names, as vLLM's own MultiConnector keeps them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector as StockMultiConnector
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiKVConnectorStats

from kvconn.base import ConnectorRole, KVCacheView, KVConnector, WorkerFacts
from kvconn.config import ConnectorConfig
from kvconn.errors import ConfigError, ContractError
from kvconn.metrics import Stats
from kvconn.multi.connector import MultiConnector as NeutralMultiConnector
from kvconn.vllm import translate
from kvconn.vllm.children import Hands, as_child
from kvconn.vllm.facade import KvconnFacade, VllmWorkerFacts
from kvconn.vllm.stats import KvconnMultiProm, KvconnMultiStats

__all__ = ["KvconnMultiConnector", "MultiConnector", "VllmMultiFacts"]

#: our own counters among the children's
OWN = "kvconn_multi"


@dataclass
class VllmMultiFacts(KVConnectorWorkerMetadata):
    """Our facts, and native children's worker metadata by index (rule 2)."""

    inner: WorkerFacts
    native: dict[int, KVConnectorWorkerMetadata] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> VllmMultiFacts:
        if not isinstance(other, VllmMultiFacts):
            raise ContractError(f"worker metadata: expected another rank's facts, got {type(other).__name__}")
        joined, native = self.inner.aggregate(other.inner), self.native
        if other.native:
            native = dict(native)
            for index, meta in other.native.items():
                native[index] = native[index].aggregate(meta) if index in native else meta
        if joined is self.inner and native is self.native:
            return self
        return VllmMultiFacts(joined, native)


class KvconnMultiConnector(KvconnFacade):
    """``kv_connector_extra_config.connectors`` lists the children. Raises ConfigError with all their problems."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        self._hands = Hands()
        self._built: list[KVConnectorBase_V1] = []
        self._given = (vllm_config, role, kv_cache_config)
        super().__init__(vllm_config, role, kv_cache_config)
        self._native = [(i, child) for i, child in enumerate(self._built) if not isinstance(child, KvconnFacade)]

    def make(self, config: ConnectorConfig, role: ConnectorRole, kv_cache: KVCacheView) -> KVConnector:
        return NeutralMultiConnector(config, role, kv_cache, make_child=self._child, get_class=_child_class)

    def _child(
        self, cls: type[KVConnector], config: ConnectorConfig, role: ConnectorRole, kv_cache: KVCacheView
    ) -> KVConnector:
        vllm_config, vllm_role, kv_cache_config = self._given
        own = copy.copy(vllm_config)
        transfer = config.kv_transfer
        own.kv_transfer_config = copy.copy(vllm_config.kv_transfer_config)
        for name in translate.TRANSFER_FIELDS:
            setattr(own.kv_transfer_config, name, getattr(transfer, name))
        own.kv_transfer_config.engine_id = config.engine_id
        made: Any = cls
        if not vllm_config.scheduler_config.disable_hybrid_kv_cache_manager and not issubclass(made, SupportsHMA):
            raise ConfigError(
                f"kv_transfer_config.kv_connector: {transfer.kv_connector} needs --disable-hybrid-kv-cache-manager"
            )
        child = made(own, vllm_role, kv_cache_config)
        self._built.append(child)
        return as_child(len(self._built) - 1, child, self._hands)

    # -- class level -----------------------------------------------------------------------------------------------

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        wanted = {
            layout
            for child, config in _classes(vllm_config)
            if (layout := child.get_required_kvcache_layout(config)) is not None
        }
        if len(wanted) > 1:
            raise ConfigError(f"kv_transfer_config: children want different KV cache layouts: {sorted(wanted)}")
        return next(iter(wanted), None)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return bool(StockMultiConnector.requires_piecewise_for_cudagraph(extra_config))

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> MultiKVConnectorStats:
        given = dict(data or {})
        own = given.pop(OWN, None)
        stats: MultiKVConnectorStats = StockMultiConnector.build_kv_connector_stats(given)
        if own is not None:
            stats[OWN] = own if isinstance(own, KVConnectorStats) else KvconnMultiStats(data=own)
        return stats

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> KvconnMultiProm:
        given = (metric_types, labelnames, per_engine_labelvalues)
        children: dict[str, Any] = {}
        for child, config in _classes(vllm_config):
            if child.__name__ not in children:
                metrics = child.build_prom_metrics(config, *given)
                if metrics is not None:
                    children[child.__name__] = metrics
        return KvconnMultiProm(vllm_config, *given, children)

    # -- scheduler half --------------------------------------------------------------------------------------------

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        return all(child.supports_divergent_local_hybrid_hits for child in self._built)

    @property
    def requires_kv_delivery(self) -> bool:
        return any(child.requires_kv_delivery for child in self._built)

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        self._kv_cache_manager = kv_cache_manager
        for child in self._built:
            child.bind_kv_cache_manager(kv_cache_manager)

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        for child in self._built:
            child.bind_gpu_block_pool(gpu_block_pool)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        groups = {group for child in self._built for group in child.get_loaded_kv_cache_group_ids(request)}
        return tuple(sorted(groups))

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        self._hands.local_tokens, self._hands.native_offered = num_computed_tokens, False
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[Any, int]:
        sources: dict[Any, int] = super().get_external_cache_hit_sources(request, num_external_tokens)
        return sources

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._hands.blocks = blocks
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        self._hands.blocks = None

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        self._hands.output = scheduler_output
        metadata = super().build_connector_meta(scheduler_output)
        self._hands.output = None
        return metadata

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._hands.block_ids = block_ids
        answer = super().request_finished_all_groups(request, block_ids)
        self._hands.block_ids = None
        return answer

    def register_finished_partial_tail(self, request: Any, block_ids: Any, partial_tail_offloads: Any) -> bool:
        taken = [
            child.register_finished_partial_tail(request, block_ids, partial_tail_offloads) for child in self._built
        ]
        return any(taken)  # every child is asked

    def update_connector_output(self, connector_output: Any) -> None:
        meta = connector_output.kv_connector_worker_meta
        if not isinstance(meta, VllmMultiFacts):
            super().update_connector_output(connector_output)
            return
        self._hands.worker_meta = meta.native
        connector_output.kv_connector_worker_meta = VllmWorkerFacts(meta.inner)
        super().update_connector_output(connector_output)
        connector_output.kv_connector_worker_meta = meta
        self._hands.worker_meta = {}

    def set_xfer_handshake_metadata(self, metadata: Any) -> None:
        self.set_xfer_handshake_metadata_pp_aware({(0, tp): one for tp, one in metadata.items()})

    def has_pending_block_frees(self) -> bool:
        return any(child.has_pending_block_frees() for child in self._built)

    # -- worker half -----------------------------------------------------------------------------------------------

    def get_mem_pool_context(self) -> AbstractContextManager[Any] | None:
        found = [context for child in self._built if (context := child.get_mem_pool_context()) is not None]
        if len(found) > 1:
            raise ConfigError("kv_transfer_config: two children bring a memory pool for the one KV cache")
        return found[0] if found else None

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._hands.kv_caches = kv_caches
        super().register_kv_caches(kv_caches)
        self._hands.kv_caches = None

    def set_host_xfer_buffer_ops(self, copy_operation: Any) -> None:
        for child in self._built:
            child.set_host_xfer_buffer_ops(copy_operation)

    def finish_forward(self) -> None:
        for child in self._built:
            child.finish_forward()

    def reset_capture_state(self) -> None:
        for child in self._built:
            child.reset_capture_state()

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self.inner.get_block_ids_with_load_errors()

    def get_kv_connector_kv_cache_events(self) -> Any:
        found = [events for child in self._built if (events := child.get_kv_connector_kv_cache_events()) is not None]
        return found[0] if found else None

    def build_connector_worker_meta(self) -> Any:
        facts = self.inner.build_connector_worker_meta()
        native = {
            index: meta for index, child in self._native if (meta := child.build_connector_worker_meta()) is not None
        }
        if facts is None and not native:
            return None
        return VllmMultiFacts(facts if isinstance(facts, WorkerFacts) else WorkerFacts(), native)

    # -- both ------------------------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> MultiKVConnectorStats | None:
        said = [
            (type(one).__name__, stats) for one in self._built if (stats := one.get_kv_connector_stats()) is not None
        ]
        own = self.to_vllm_stats(self.inner.get_kv_connector_stats())
        if own is None and not said:
            return None
        out: MultiKVConnectorStats = MultiKVConnectorStats()
        for name, stats in said:
            out[name] = out[name].aggregate(stats) if name in out.data else stats
        if own is not None:
            out[OWN] = own
        return out

    def to_vllm_stats(self, stats: Stats | None) -> KvconnMultiStats | None:
        return None if stats is None else KvconnMultiStats.of(stats)


def _child_class(transfer: Any, path: str) -> type[KVConnector]:
    """The vLLM class that a child's entry names. Raises ConfigError."""
    try:
        found: type[KVConnector] = KVConnectorFactory.get_connector_class(
            KVTransferConfig(
                kv_connector=transfer.kv_connector,
                kv_role=transfer.kv_role,
                kv_connector_module_path=transfer.kv_connector_module_path,
            )
        )
    except ConfigError:
        raise
    except (ValueError, ImportError, AttributeError) as err:
        raise ConfigError(f"{path}.kv_connector: {err}") from err
    return found


def _classes(vllm_config: Any) -> Iterator[tuple[Any, Any]]:
    """Each child's class, and a configuration in which it is the only connector."""
    parent = vllm_config.kv_transfer_config
    for raw in parent.kv_connector_extra_config.get("connectors", ()):
        own = copy.copy(vllm_config)
        given = {"engine_id": parent.engine_id, **raw}
        given.pop("kvconn", None)
        own.kv_transfer_config = KVTransferConfig(**given)
        yield KVConnectorFactory.get_connector_class(own.kv_transfer_config), own


MultiConnector = KvconnMultiConnector
