"""OffloadingConnector for vLLM: blocks to host memory and files; it needs no accelerator.

Contract this adapter keeps
- A request that the connector holds keeps its blocks until every worker has reported it, each once.
That and all else is the halves' (kvconn.offload); this module only says how they are built and what their numbers are
called.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from kvconn.base import ConnectorRole, KVCacheView, KVConnector
from kvconn.config import ConnectorConfig
from kvconn.errors import ConfigError
from kvconn.metrics import Stats
from kvconn.offload import events
from kvconn.offload.connector import OffloadingConnector as NeutralOffloadingConnector
from kvconn.vllm.facade import KvconnFacade
from kvconn.vllm.stats import CounterProm, CounterStats

__all__ = ["KvconnOffloadingConnector", "OffloadingConnector"]

try:  # vLLM 0.32 and later tell apart where an external hit came from
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    HOST: Any = CacheHitSource.HOST
except ImportError:
    HOST = None


class KvconnOffloadingConnector(KvconnFacade):
    """Host memory behind the prefix cache. Raises ConfigError for what this version cannot do."""

    _cache_hit_source = HOST

    def make(self, config: ConnectorConfig, role: ConnectorRole, kv_cache: KVCacheView) -> KVConnector:
        windows = [group.layers[0] for group in kv_cache.groups if group.kind == "window"]
        if windows:
            raise ConfigError(
                f"model: OffloadingConnector expects full attention in every layer, got a window ({windows[0]}): "
                "take it out, or, where other layers are full, make them all so with --disable-hybrid-kv-cache-manager"
            )
        return NeutralOffloadingConnector(config, role, kv_cache)

    def take_events(self) -> Iterable[Any]:
        return [_event(event) for event in self.inner.take_events()]

    @property
    def requires_kv_delivery(self) -> bool:
        """A store that is lost is a cache miss."""
        return False

    def to_vllm_stats(self, stats: Stats | None) -> CounterStats | None:
        return None if stats is None else CounterStats.of(stats)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> CounterStats:
        return CounterStats(data=dict(data or {}))

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> CounterProm:
        return CounterProm(vllm_config, metric_types, labelnames, per_engine_labelvalues)


def _event(event: events.BlockStored | events.BlockRemoved) -> BlockStored | BlockRemoved:
    """vLLM's class for it; its name for host memory is CPU. LoRA adapters are not named: the hash covers them."""
    hashes = [maybe_convert_block_hash(one) for one in event.block_hashes]
    medium = "CPU" if event.medium == events.HOST else event.medium
    if isinstance(event, events.BlockRemoved):
        return BlockRemoved(block_hashes=hashes, medium=medium)
    parent = event.parent_block_hash
    return BlockStored(
        block_hashes=hashes,
        parent_block_hash=None if parent is None else maybe_convert_block_hash(parent),
        token_ids=list(event.token_ids),
        block_size=event.block_size,
        lora_id=None,
        medium=medium,
        lora_name=None,
    )


OffloadingConnector = KvconnOffloadingConnector
