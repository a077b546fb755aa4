"""A vLLM connector as a child of our MultiConnector: what ``kvconn.multi`` sees of it.

Rules
1. A child of ours is handed through: its neutral connector is the child, so that its lives and facts are kept.
2. A vLLM-native child is driven with vLLM's own objects. They are at hand in the one call that needs them
   (:class:`Hands`) and kept nowhere.
3. A native child can't load a part of a request: it counts blocks itself. So it is asked only when nothing is offered
   before it, and nobody after it once it offered something.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA
from vllm.v1.outputs import KVConnectorOutput as VllmOutput

from kvconn.base import (
    NO_RESULTS,
    BlockIds,
    ConnectorMetadata,
    ConnectorRole,
    FinishReason,
    HandshakeMetadata,
    KVBlocks,
    KVConnector,
    KVConnectorOutput,
    LayerView,
    RequestView,
    StepView,
    TransferResults,
)
from kvconn.errors import ContractError
from kvconn.multi.connector import HOOKS
from kvconn.vllm.facade import KvconnFacade
from kvconn.vllm.translate import VllmRequestView

__all__ = ["Hands", "NativeChild", "NativeHandshake", "Whole", "as_child"]


#: what goes to a child as it is, in every step, without us between
STRAIGHT: Final = (
    "bind_connector_metadata",
    "clear_connector_metadata",
    "handle_preemptions",
    "start_load_kv",
    "wait_for_layer_load",
    "wait_for_save",
)
#: and to one of ours
STRAIGHT_OURS: Final = (
    *STRAIGHT,
    "build_connector_meta",
    "save_kv_layer",
    "get_transfer_results",
    "get_block_ids_with_load_errors",
    "build_connector_worker_meta",
    "update_connector_output",
)


@dataclass
class Hands:
    """vLLM's objects of the call that is being made, and who offered something in this round of asking."""

    blocks: Any = None
    block_ids: Any = None
    output: Any = None
    kv_caches: Any = None
    worker_meta: Mapping[int, Any] = field(default_factory=dict)
    local_tokens: int = 0
    native_offered: bool = False


@dataclass(frozen=True)
class NativeHandshake(HandshakeMetadata):
    """What a native child's worker half publishes."""

    inner: Any


def as_child(index: int, child: Any, hands: Hands) -> KVConnector:
    """``child`` for the neutral MultiConnector."""
    if isinstance(child, KvconnFacade):
        child.explains.close()
        return Whole(child, hands)
    return NativeChild(index, child, hands)


class Whole(KVConnector):
    """A child of ours (rule 1), silent once a native child took the load (rule 3).

    The adapter asks it for its stats itself, by its class's name.
    """

    def __init__(self, facade: KvconnFacade, hands: Hands) -> None:
        self.facade = facade
        self._inner = facade.inner
        self._hands = hands
        self.role = self._inner.role
        self.hears_silence = self._inner.hears_silence
        for method in STRAIGHT_OURS:
            setattr(self, method, getattr(self._inner, method))

    def on_new_request(self, request: RequestView) -> None:
        self._inner.on_new_request(request)

    def get_num_new_matched_tokens(self, request: RequestView, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self._hands.native_offered:
            return 0, False
        return self._inner.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: RequestView, blocks: KVBlocks, num_external_tokens: int) -> None:
        self._inner.update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, step: StepView) -> ConnectorMetadata:
        return self._inner.build_connector_meta(step)

    def request_finished(
        self, request: RequestView, blocks: BlockIds, reason: FinishReason
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._inner.request_finished(request, blocks, reason)

    def get_finished_count(self) -> int | None:
        return self._inner.get_finished_count()

    def set_handshake_metadata(self, metadata: Mapping[tuple[int, int], HandshakeMetadata]) -> None:
        self._inner.set_handshake_metadata(metadata)

    def has_pending_push_work(self) -> bool:
        return self._inner.has_pending_push_work()

    def take_events(self) -> Iterable[Any]:
        return self.facade.take_events()  # in vLLM's classes

    def reset_cache(self) -> bool | None:
        return self._inner.reset_cache()

    def register_kv_caches(self, layers: Mapping[str, LayerView]) -> None:
        self._inner.register_kv_caches(layers)

    def get_handshake_metadata(self) -> HandshakeMetadata | None:
        return self._inner.get_handshake_metadata()

    def get_transfer_results(self, finished_req_ids: set[str]) -> TransferResults:
        return self._inner.get_transfer_results(finished_req_ids)

    def explain(self, now: float) -> list[str]:
        return self._inner.explain(now)

    def shutdown(self) -> None:
        self.facade.shutdown()

    def __repr__(self) -> str:
        return repr(self._inner)


class NativeChild(KVConnector):
    """A connector of vLLM's, or of anybody who wrote one for vLLM (rules 2 and 3).

    The adapter asks it for its stats, by its class's name, and for its worker metadata, which is vLLM's and travels
    beside our facts.
    """

    def __init__(self, index: int, child: Any, hands: Hands) -> None:
        self.child = child
        for method in STRAIGHT:
            setattr(self, method, getattr(child, method))
        for hook in HOOKS:  # vLLM's own do nothing either
            if getattr(type(child), hook) is getattr(KVConnectorBase_V1, hook):
                setattr(self, hook, getattr(super(), hook))
        self.hears_silence = type(child).update_connector_output is not KVConnectorBase_V1.update_connector_output
        self._index = index
        self._hands = hands
        self.role = ConnectorRole[child.role.name]

    # -- scheduler half ------------------------------------------------------------------------------------------

    def on_new_request(self, request: RequestView) -> None:
        self.child.on_new_request(_source(request))

    def get_num_new_matched_tokens(self, request: RequestView, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self._hands.native_offered or num_computed_tokens != self._hands.local_tokens:
            return 0, False
        tokens, asynchronous = self.child.get_num_new_matched_tokens(_source(request), num_computed_tokens)
        self._hands.native_offered = bool(tokens)
        return tokens, asynchronous

    def update_state_after_alloc(self, request: RequestView, blocks: KVBlocks, num_external_tokens: int) -> None:
        self.child.update_state_after_alloc(_source(request), self._hands.blocks, num_external_tokens)

    def build_connector_meta(self, step: StepView) -> ConnectorMetadata:
        metadata: ConnectorMetadata = self.child.build_connector_meta(self._hands.output)
        return metadata  # vLLM's, which nobody looks into on its way to this child's worker half

    def request_finished(
        self, request: RequestView, blocks: BlockIds, reason: FinishReason
    ) -> tuple[bool, dict[str, Any] | None]:
        source, ids = _source(request), self._hands.block_ids
        if isinstance(self.child, SupportsHMA):
            answer: tuple[bool, dict[str, Any] | None] = self.child.request_finished_all_groups(source, ids)
        else:
            answer = self.child.request_finished(source, ids[0])
        return answer

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        if not self.hears_silence:
            return  # vLLM's own, which does nothing
        theirs = VllmOutput(
            finished_sending=output.finished_sending,
            finished_recving=output.finished_recving,
            failed_recving=output.failed_recving or set(),
            kv_connector_worker_meta=self._hands.worker_meta.get(self._index),
        )
        self.child.update_connector_output(theirs)
        output.finished_sending = theirs.finished_sending
        output.finished_recving = theirs.finished_recving
        output.failed_recving = theirs.failed_recving

    def get_finished_count(self) -> int | None:
        count: int | None = self.child.get_finished_count()
        return count

    def set_handshake_metadata(self, metadata: Mapping[tuple[int, int], HandshakeMetadata]) -> None:
        theirs = {rank: one.inner for rank, one in metadata.items() if isinstance(one, NativeHandshake)}
        if theirs:
            self.child.set_xfer_handshake_metadata_pp_aware(theirs)

    def has_pending_push_work(self) -> bool:
        return bool(self.child.has_pending_push_work())

    def take_events(self) -> Iterable[Any]:
        events: Iterable[Any] = self.child.take_events()
        return events

    def reset_cache(self) -> bool | None:
        answer: bool | None = self.child.reset_cache()
        return answer

    # -- worker half ---------------------------------------------------------------------------------------------

    def register_kv_caches(self, layers: Mapping[str, LayerView]) -> None:
        self.child.register_kv_caches(self._hands.kv_caches)

    def get_handshake_metadata(self) -> HandshakeMetadata | None:
        published = self.child.get_handshake_metadata()
        return None if published is None else NativeHandshake(published)

    def save_kv_layer(self, layer_name: str, **kwargs: object) -> None:
        self.child.save_kv_layer(layer_name, kwargs.pop("kv_layer"), kwargs.pop("attn_metadata"), **kwargs)

    def get_transfer_results(self, finished_req_ids: set[str]) -> TransferResults:
        results = self.child.get_transfer_results(finished_req_ids)
        if not (results.finished_sending or results.finished_recving or results.failed_recving):
            return NO_RESULTS
        return TransferResults(
            frozenset(results.finished_sending or ()),
            frozenset(results.finished_recving or ()),
            frozenset(results.failed_recving or ()),
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set(self.child.get_block_ids_with_load_errors())

    # -- both ----------------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        self.child.shutdown()

    def __repr__(self) -> str:
        return type(self.child).__name__


def _source(request: RequestView) -> Any:
    if not isinstance(request, VllmRequestView):
        raise ContractError(f"{request.id}: expected a view of vLLM's request, got {type(request).__name__}")
    return request.source
