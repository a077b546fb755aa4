"""Our counters as vLLM's metrics: its NIXL connector's names, and ``kvconn_*`` for what is ours alone.

Rules
1. vLLM's NIXL metrics take one observation per transfer. A step's counters are sums, so that n transfers which ended in
   one step are n observations of their mean; sums and counts are exact.
2. Every value is a list of numbers: vLLM joins ranks and steps by joining lists.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlKVConnectorStats, NixlPromMetrics
from vllm.v1.metrics.utils import create_metric_per_engine

from kvconn.metrics import Stats

__all__ = [
    "CounterProm",
    "CounterStats",
    "KvconnMultiProm",
    "KvconnMultiStats",
    "KvconnNixlProm",
    "KvconnNixlStats",
    "TransferStats",
]

#: counters of ours -> what they count. Exported as ``kvconn_<name>_total``.
OURS: dict[str, str] = {
    "stale_reads": "Reads whose blocks the producer had let go of before they ended; failed, never handed over.",
    "unfenced_reads": "Reads from peers without fences, which nothing can prove.",
    "params_refused": "Requests whose kv_transfer_params were wrong.",
    "handshakes_refused": "Connections and requests on the side channel that were refused: key, network or rate.",
    "seals_refused": "Requests whose kv_transfer_params were not what the producer returned.",
    "notifications_malformed": "Notifications from peers that could not be read.",
    "agent_recreations": "NIXL agents made anew because a transfer never ended.",
    "introductions_overdue": "Peers whose NIXL agents were not loaded within the handshake's deadline.",
    "other": "Counters that have no metric of their own.",
}
#: a counter of ours -> the list of vLLM's that gets one 1 per event
_EVENTS = {
    "nixl_num_failed_transfers": "num_failed_transfers",
    "nixl_num_failed_notifications": "num_failed_notifications",
    "nixl_num_failed_handshakes": "num_failed_handshakes",
    "nixl_num_kv_expired_reqs": "num_kv_expired_reqs",
    "nixl_num_notifications_after_expiry": "num_notifications_after_expiry",
}
_TRANSFERS = {"nixl_num_transfers", "nixl_bytes_transferred", "nixl_xfer_seconds", "nixl_num_descriptors"}


class KvconnNixlStats(NixlKVConnectorStats):
    """vLLM's lists, and one list per counter of ours, ``kvconn_<name>``."""

    def reset(self) -> None:
        super().reset()
        self.data.update({f"kvconn_{name}": [] for name in OURS})

    def is_empty(self) -> bool:
        return not any(self.data.values())

    def reduce(self) -> dict[str, int | float]:
        ours = {f"kvconn {name}": sum(self.data.get(f"kvconn_{name}", ())) for name in OURS}
        return {**super().reduce(), **{name: total for name, total in ours.items() if total}}


class TransferStats:
    """Turns one worker's counters into observations. Keeps descriptors until the transfer they belong to ends."""

    def __init__(self) -> None:
        self._descriptors = 0.0

    def convert(self, stats: Stats | None) -> KvconnNixlStats | None:
        """None when there is nothing to say."""
        if stats is None:
            return None
        out, values = KvconnNixlStats(), stats.values
        self._transfers(out, values)
        for name, amount in values.items():
            if name in _EVENTS:
                out.data[_EVENTS[name]] += [1] * int(amount)
            elif name not in _TRANSFERS:
                out.data[f"kvconn_{name if name in OURS else 'other'}"].append(amount)
        return None if out.is_empty() else out

    def _transfers(self, out: KvconnNixlStats, values: Mapping[str, float]) -> None:
        self._descriptors += values.get("nixl_num_descriptors", 0)
        n = int(values.get("nixl_num_transfers", 0))
        if not n:
            return
        out.data["transfer_duration"] += [values.get("nixl_xfer_seconds", 0.0) / n] * n
        out.data["post_duration"] += [0.0] * n
        out.data["bytes_transferred"] += [values.get("nixl_bytes_transferred", 0) / n] * n
        out.data["num_descriptors"] += [self._descriptors / n] * n
        self._descriptors = 0.0


class KvconnNixlProm(NixlPromMetrics):
    """vLLM's NIXL metrics, and a counter for each of ours."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._ours = {
            f"kvconn_{name}": create_metric_per_engine(
                self._counter_cls(name=f"kvconn_{name}", documentation=text, labelnames=labelnames),
                per_engine_labelvalues,
            )
            for name, text in OURS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        super().observe(transfer_stats_data, engine_idx)
        for name, counters in self._ours.items():
            total = sum(transfer_stats_data.get(name, ()))
            if total:
                counters[engine_idx].inc(total)


MULTI: dict[str, str] = {
    "duplicates_absorbed": "Reports of children that changed nothing.",
    "early_reports_dropped": "Reports of requests that nobody had claimed when they ended.",
    "params_conflicts": "Children whose kv_transfer_params contradicted an earlier child's.",
}


class CounterStats(KVConnectorStats):
    """Counters as they are: numbers by name."""

    @classmethod
    def of(cls, stats: Stats) -> Self:
        return cls(data=dict(stats.values))

    def reset(self) -> None:
        self.data: dict[str, float] = {}

    def aggregate(self, other: KVConnectorStats) -> Self:
        for name, amount in other.data.items():
            self.data[name] = self.data.get(name, 0) + amount
        return self

    def reduce(self) -> dict[str, int | float]:
        return dict(self.data)

    def is_empty(self) -> bool:
        return not self.data


class CounterProm(KVConnectorPromMetrics):
    """A counter for each name, made when it first comes: ``vllm:<name>`` for vLLM's names, else ``kvconn_<name>``."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._labels = labelnames
        self._made: dict[str, Any] = {}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, amount in transfer_stats_data.items():
            if name not in self._made:
                full = f"vllm:{name}" if name.startswith("kv_offload_") else f"kvconn_{name}"
                counter = self._counter_cls(name=full, documentation=name.replace("_", " "), labelnames=self._labels)
                self._made[name] = create_metric_per_engine(counter, self.per_engine_labelvalues)
            self._made[name][engine_idx].inc(amount)


class KvconnMultiStats(CounterStats):
    """A MultiConnector's own counters."""


class KvconnMultiProm(KVConnectorPromMetrics):
    """Each child's metrics by its class's name, and a counter for each of the MultiConnector's own."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: Any,
        per_engine_labelvalues: Any,
        children: Mapping[str, KVConnectorPromMetrics],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._children = children
        self._own = {
            name: create_metric_per_engine(
                self._counter_cls(name=f"kvconn_{name}", documentation=text, labelnames=labelnames),
                per_engine_labelvalues,
            )
            for name, text in MULTI.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, data in transfer_stats_data.items():
            if name in self._children:
                self._children[name].observe(data, engine_idx)
        for name, amount in transfer_stats_data.get("kvconn_multi", {}).items():
            if name in self._own:
                self._own[name][engine_idx].inc(amount)
