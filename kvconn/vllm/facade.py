"""One of kvconn's connectors as a vLLM connector. Translates and delegates; subclasses say which connector.

Rules
1. Every method of vLLM's interface that the neutral interface has goes to it through a view; the others keep vLLM's
   default.
2. vLLM's sets are replaced, never mutated, and never grow: veto, never originate (docs/design.md, vLLM).
3. vLLM's one poll is ``get_transfer_results``; ``get_finished`` is derived from it here and nowhere else (C5).
4. Of a model with windows the last token of a prompt is never loaded. vLLM computes it again, and lays blocks out for
   the token after it, whose window may begin one block later.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from kvconn.base import (
    NO_RESULTS,
    ConnectorMetadata,
    ConnectorRole,
    HandshakeMetadata,
    KVCacheView,
    KVConnector,
    KVConnectorOutput,
    WorkerFacts,
)
from kvconn.config import ConnectorConfig
from kvconn.errors import ContractError
from kvconn.explain import ExplainServer
from kvconn.metrics import Stats
from kvconn.vllm import translate

__all__ = ["KvconnFacade", "VllmHandshake", "VllmMetadata", "VllmWorkerFacts"]


#: called in every step, some for every layer: where the neutral connector has none of its own they end here
HOOKS: Final = ("handle_preemptions", "save_kv_layer", "start_load_kv", "wait_for_layer_load", "wait_for_save")
#: of these the ones that need no translation: they are its own
STRAIGHT: Final = ("start_load_kv", "wait_for_layer_load", "wait_for_save")


def _nothing(*_: Any, **__: Any) -> None:
    pass


@dataclass
class VllmMetadata(KVConnectorMetadata):
    """vLLM's envelope around what our scheduler half ships."""

    inner: ConnectorMetadata


@dataclass
class VllmHandshake(KVConnectorHandshakeMetadata):
    """vLLM's envelope around what our worker half publishes."""

    inner: HandshakeMetadata


@dataclass
class VllmWorkerFacts(KVConnectorWorkerMetadata):
    """vLLM's envelope around a worker half's facts."""

    inner: WorkerFacts

    def aggregate(self, other: KVConnectorWorkerMetadata) -> VllmWorkerFacts:
        if not isinstance(other, VllmWorkerFacts):
            raise ContractError(f"worker metadata: expected another rank's facts, got {type(other).__name__}")
        joined = self.inner.aggregate(other.inner)
        return self if joined is self.inner else VllmWorkerFacts(joined)


class KvconnFacade(KVConnectorBase_V1, SupportsHMA):
    """Base of the adapters; ``make`` builds the neutral connector."""

    #: what is shipped over and over, in its envelope, by ``id()``
    repeated: ClassVar[Mapping[int, VllmMetadata]] = {}

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        worker = role == KVConnectorRole.WORKER
        self._view = translate.cache_view(kv_cache_config)
        #: None where no cache group has a window
        self._windows = self._view if any(group.kind == "window" for group in self._view.groups) else None
        #: who was asked about last, and the tokens that vLLM has of it: its blocks come next
        self._asked: tuple[str, int] = "", 0
        self._seq = 0
        config = translate.connector_config(vllm_config, worker)
        self.inner = self.make(config, ConnectorRole.WORKER if worker else ConnectorRole.SCHEDULER, self._view)
        for hook in HOOKS:
            if getattr(type(self.inner), hook) is getattr(KVConnector, hook):
                setattr(self, hook, _nothing)
            elif hook in STRAIGHT:
                setattr(self, hook, getattr(self.inner, hook))
        #: for ``kvconn explain``; a child's is closed by the MultiConnector of ours above it, which tells for all
        self.explains = ExplainServer(
            self.inner.explain, self.__repr__, config.engine_id, "worker" if worker else "scheduler", config.rank
        )

    @abstractmethod
    def make(self, config: ConnectorConfig, role: ConnectorRole, kv_cache: KVCacheView) -> KVConnector:
        """The neutral connector behind this one."""

    @abstractmethod
    def to_vllm_stats(self, stats: Stats | None) -> Any:
        """A step's counters as vLLM's stats object, or None."""

    # -- class level -----------------------------------------------------------------------------------------------

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """A block of a layer must be one piece of memory. What VLLM_KV_CACHE_LAYOUT says goes before (docs/vllm.md)."""
        return "LBHNC"

    # -- scheduler half --------------------------------------------------------------------------------------------

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        return tuple(range(len(self._view.groups)))

    def on_new_request(self, request: Any) -> None:
        self.inner.on_new_request(translate.request_view(request, self._windows))

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        self._asked = request.request_id, num_computed_tokens
        view = translate.request_view(request, self._windows)
        external, asynchronous = self.inner.get_num_new_matched_tokens(view, num_computed_tokens)
        if external and self._windows is not None:
            external = min(external, request.num_tokens - 1 - num_computed_tokens)  # rule 4
            if translate.lost(view.params, self._windows, num_computed_tokens + external):
                external = 0
        return external, asynchronous and external != 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        asked, local = self._asked
        given = translate.kv_blocks(blocks, self._view, local if asked == request.request_id else 0)
        self.inner.update_state_after_alloc(translate.request_view(request, self._windows), given, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> VllmMetadata:
        self._seq += 1
        said = self.inner.build_connector_meta(translate.step_view(scheduler_output, self._seq))
        return self.repeated.get(id(said)) or VllmMetadata(said)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.inner.request_finished(
            translate.request_view(request, self._windows),
            translate.block_ids(block_ids, self._view),
            translate.finish_reason(request),
        )

    def update_connector_output(self, connector_output: Any) -> None:
        meta = connector_output.kv_connector_worker_meta
        sent, received = connector_output.finished_sending, connector_output.finished_recving
        failed = connector_output.failed_recving
        if meta is None and not (sent or received or failed) and not self.inner.hears_silence:
            return
        ours = KVConnectorOutput(
            set(sent) if sent else None,
            set(received) if received else None,
            set(failed) if failed else None,
            kv_connector_worker_meta=meta.inner if isinstance(meta, VllmWorkerFacts) else None,
        )
        self.inner.update_connector_output(ours)
        connector_output.finished_sending = ours.finished_sending
        connector_output.finished_recving = ours.finished_recving
        connector_output.failed_recving = ours.failed_recving or set()

    def get_finished_count(self) -> int | None:
        return self.inner.get_finished_count()

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: Mapping[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        self.inner.set_handshake_metadata(
            {rank: one.inner for rank, one in metadata.items() if isinstance(one, VllmHandshake)}
        )

    def has_pending_push_work(self) -> bool:
        return self.inner.has_pending_push_work()

    def take_events(self) -> Iterable[Any]:
        return self.inner.take_events()

    def reset_cache(self) -> bool | None:
        return self.inner.reset_cache()

    # -- worker half -----------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.inner.register_kv_caches(translate.layer_views(kv_caches, self._view))

    def get_handshake_metadata(self) -> VllmHandshake | None:
        published = self.inner.get_handshake_metadata()
        return None if published is None else VllmHandshake(published)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        self._connector_metadata = connector_metadata
        self.inner.bind_connector_metadata(unwrap(connector_metadata))

    def clear_connector_metadata(self) -> None:
        self._connector_metadata = None
        self.inner.clear_connector_metadata()

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        self.inner.handle_preemptions(unwrap(kv_connector_metadata))

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self.inner.start_load_kv(forward_context, **kwargs)

    def wait_for_layer_load(self, layer_name: str) -> None:
        self.inner.wait_for_layer_load(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        self.inner.save_kv_layer(layer_name, kv_layer=kv_layer, attn_metadata=attn_metadata, **kwargs)

    def wait_for_save(self) -> None:
        self.inner.wait_for_save()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = self.inner.get_transfer_results(finished_req_ids)
        if results is NO_RESULTS:
            return KVConnectorTransferResults(set(), set(), set())
        return KVConnectorTransferResults(
            finished_sending=set(results.finished_sending),
            finished_recving=set(results.finished_recving),
            failed_recving=set(results.failed_recving),
        )

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        results = self.get_transfer_results(finished_req_ids)
        return results.finished_sending, results.finished_recving

    def build_connector_worker_meta(self) -> VllmWorkerFacts | None:
        facts = self.inner.build_connector_worker_meta()
        if facts is None:
            return None
        return VllmWorkerFacts(facts) if isinstance(facts, WorkerFacts) else None

    # -- both ------------------------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> Any:
        stats = self.inner.get_kv_connector_stats()
        return None if stats is None else self.to_vllm_stats(stats)

    def shutdown(self) -> None:
        self.explains.close()
        self.inner.shutdown()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inner!r})"


def unwrap(metadata: KVConnectorMetadata) -> ConnectorMetadata:
    """What our scheduler half shipped. Raises ContractError for anybody else's."""
    if not isinstance(metadata, VllmMetadata):
        raise ContractError(f"metadata: expected our own scheduler half's, got {type(metadata).__name__}")
    return metadata.inner
