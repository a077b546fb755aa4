"""NixlConnector for vLLM: prefill and decode engines over NIXL, with vLLM's side channel and metrics.

Contract this adapter keeps
- Producer: a request that was handed to a reader keeps its blocks until every worker has reported it, each once.
- Consumer: a load is reported once per worker, good or failed, when nothing can write its blocks any more.
Both are the halves' (kvconn.nixl); this module only says how they are built and what their numbers are called.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from kvconn.base import ConnectorRole, KVCacheView, KVConnector
from kvconn.config import ConnectorConfig
from kvconn.errors import ConfigError, RequestError
from kvconn.metrics import Stats
from kvconn.nixl.connector import NixlConnector as NeutralNixlConnector
from kvconn.nixl.metadata import RESTING, SILENT
from kvconn.vllm.codec import VllmCodec
from kvconn.vllm.facade import KvconnFacade, VllmMetadata
from kvconn.vllm.stats import KvconnNixlProm, KvconnNixlStats, TransferStats

try:  # vLLM 0.32 and later tell apart where an external hit came from
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    P2P: Any = CacheHitSource.P2P
except ImportError:
    P2P = None

__all__ = ["KvconnNixlConnector", "NixlConnector", "NixlPullConnector"]


class KvconnNixlConnector(KvconnFacade):
    """The pull connector. Raises ConfigError for what this version cannot do."""

    repeated: ClassVar[Mapping[int, VllmMetadata]] = {id(said): VllmMetadata(said) for said in (SILENT, RESTING)}
    _cache_hit_source = P2P

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        self._codec = VllmCodec(vllm_config)
        self._transfer_stats = TransferStats()
        super().__init__(vllm_config, role, kv_cache_config)

    def on_new_request(self, request: Any) -> None:
        if getattr(request, "abort_immediately", False) and not self._readable(request):
            return  # vLLM's notice that a request failed, with the params that were refused when it came
        super().on_new_request(request)

    def update_connector_output(self, connector_output: Any) -> None:
        said = connector_output
        if said.finished_sending or said.finished_recving or said.failed_recving or said.kv_connector_worker_meta:
            super().update_connector_output(said)

    def _readable(self, request: Any) -> bool:
        assert isinstance(self.inner, NeutralNixlConnector)
        try:
            self.inner.scheduler.reference(request.kv_transfer_params)
        except RequestError:
            return False
        return True

    def make(self, config: ConnectorConfig, role: ConnectorRole, kv_cache: KVCacheView) -> KVConnector:
        if config.parallel.dcp > 1:
            raise ConfigError(
                "parallel.decode_context_parallel_size: expected 1, got "
                f"{config.parallel.dcp}: the halves know it, but vLLM's CPU platform, where this was run, has no "
                "kernel for it; leave --decode-context-parallel-size away, or use vLLM's own NixlConnector"
            )
        return NeutralNixlConnector(config, role, kv_cache, codec=self._codec)

    def to_vllm_stats(self, stats: Stats | None) -> KvconnNixlStats | None:
        return self._transfer_stats.convert(stats)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KvconnNixlStats:
        return KvconnNixlStats(data=data) if data is not None else KvconnNixlStats()

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> KvconnNixlProm:
        return KvconnNixlProm(vllm_config, metric_types, labelnames, per_engine_labelvalues)


NixlConnector = NixlPullConnector = KvconnNixlConnector
