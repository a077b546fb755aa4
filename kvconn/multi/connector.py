"""MultiConnector: several connectors as one. The facade; :mod:`kvconn.multi.policy` decides.

Contract it keeps, whatever its children do
- A delayed release is emitted once, when every child that claimed it has every rank complete, by identity (C1, C3).
- A load is received once, when every child that fills a part of it has every rank complete. Children without a part are
  told that they load nothing; all are told the blocks, and all save.

Rules
1. Every method of the interface is forwarded; a test proves it.
2. Every child is polled once per poll, and bound to its own metadata.
3. An engine's set is replaced, never mutated: one-process executors share it.
4. ``shutdown`` reaches every child even when one raises.
5. In most steps nobody has news: every child is asked all the same, and what is ours ends there. Left out are hooks
   that a child has not got: the interface's own do nothing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from kvconn.base import (
    NO_RESULTS,
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
    Published,
    RequestView,
    StepView,
    TransferResults,
    WorkerFacts,
)
from kvconn.config import ConnectorConfig
from kvconn.errors import ConfigError, ContractError
from kvconn.factory import get_connector_class
from kvconn.ledger import Emit
from kvconn.metrics import Meter, Stats
from kvconn.multi.children import GetClass, MakeChild, build_children, make_child
from kvconn.multi.policy import (
    EngineGate,
    MultiStep,
    RankGate,
    Share,
    prefixed,
    published_of,
)
from kvconn.multi.ranges import Ask, Match, choose, merge_params

__all__ = ["HOOKS", "MultiConnector", "MultiHandshake", "MultiMetadata"]

log = logging.getLogger("kvconn.multi")


#: called in every step, or for every layer of it
HOOKS: Final = (
    "handle_preemptions",
    "start_load_kv",
    "wait_for_layer_load",
    "save_kv_layer",
    "wait_for_save",
    "get_block_ids_with_load_errors",
    "build_connector_worker_meta",
    "get_kv_connector_stats",
)


@dataclass(frozen=True)
class MultiMetadata(ConnectorMetadata):
    """Each child's metadata, in order, and our own announcements."""

    children: tuple[ConnectorMetadata, ...]
    step: MultiStep


@dataclass(frozen=True)
class MultiHandshake(HandshakeMetadata):
    """The publishing children's handshake metadata, by index."""

    parts: Mapping[int, HandshakeMetadata]


class MultiConnector(KVConnector):
    """``kv_connector_extra_config.connectors`` lists the children's ``kv_transfer_config`` objects.

    ``clock`` (seconds, default ``time.perf_counter``) stamps lives; ``make_child`` is the seam tests and adapters build
    children through, ``get_class`` how an adapter finds their classes. Raises ConfigError with every child's problems
    at once.
    """

    def __init__(
        self,
        config: ConnectorConfig,
        role: ConnectorRole,
        kv_cache: KVCacheView,
        *,
        clock: Callable[[], float] | None = None,
        make_child: MakeChild = make_child,
        get_class: GetClass = get_connector_class,
    ) -> None:
        self.role = role
        built = build_children(config, role, kv_cache, make_child, get_class)
        self.names, self.children = built.names, built.connectors
        self._clock = clock or time.perf_counter
        self._block_size = kv_cache.block_size
        self._meter = Meter()
        self._gate = EngineGate(len(self.children), range(config.parallel.world), built.quorum)
        self._rank = RankGate(config.rank or 0)
        self._matches: dict[str, Match] = {}
        self._layers: tuple[str, ...] = ()
        #: who has a hook of its own, with its place
        self._hooked = {hook: self._having(hook) for hook in HOOKS}
        self._hearing = tuple((index, child) for index, child in enumerate(self.children) if child.hears_silence)
        self.hears_silence = bool(self._hearing)
        #: children whose synchronous loads of the bound step this half waits for itself.
        self._waits: tuple[int, ...] = ()

    def _having(self, hook: str) -> tuple[tuple[int, KVConnector], ...]:
        nothing = getattr(KVConnector, hook)
        return tuple(
            (index, child)
            for index, child in enumerate(self.children)
            if getattr(getattr(child, hook), "__func__", None) is not nothing
        )

    # -- scheduler half ------------------------------------------------------------------------------------------

    def on_new_request(self, request: RequestView) -> None:
        self._gate.arrived(request.id)
        for child in self.children:
            child.on_new_request(request)

    def get_num_new_matched_tokens(self, request: RequestView, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self._gate.loading(request.id):
            return None, False  # the id of an aborted request came back before its blocks did
        match = choose(
            [self._ask(child, request) for child in self.children],
            num_computed_tokens,
            self._block_size,
            request.n_total,
        )
        self._matches[request.id] = match
        return match.answer

    @staticmethod
    def _ask(child: KVConnector, request: RequestView) -> Ask:
        return lambda tokens: child.get_num_new_matched_tokens(request, tokens)

    def update_state_after_alloc(self, request: RequestView, blocks: KVBlocks, num_external_tokens: int) -> None:
        match = self._matches.pop(request.id, Match())
        if num_external_tokens > match.tokens:
            offered = f"children offered {match.tokens}" if match.tokens else "no child offered any"
            raise ContractError(f"{request.id}: {num_external_tokens} external tokens allocated, but {offered}")
        ranges = {part.child: part for part in match.cut(num_external_tokens)}
        if ranges and match.asynchronous:
            claimers = [child for child, part in ranges.items() if part.asynchronous]
            self._gate.open(request.id, "recv", claimers, self._clock())
            self._gate.wait_for(ranges.keys() - set(claimers))
        for index, child in enumerate(self.children):
            part = ranges.get(index)
            if part is None:
                child.update_state_after_alloc(request, blocks, 0)
            else:
                child.update_state_after_alloc(request, match.blocks(blocks, part, self._block_size), part.n)

    def build_connector_meta(self, step: StepView) -> ConnectorMetadata:
        return MultiMetadata(tuple([child.build_connector_meta(step) for child in self.children]), self._gate.step())

    def request_finished(
        self, request: RequestView, blocks: BlockIds, reason: FinishReason
    ) -> tuple[bool, dict[str, Any] | None]:
        self._matches.pop(request.id, None)
        answers = [child.request_finished(request, blocks, reason) for child in self.children]
        claimers = [index for index, (delays, _) in enumerate(answers) if delays]
        if claimers:
            self._gate.open(request.id, "send", claimers, self._clock())
        params, left_out = merge_params([returned for _, returned in answers])
        for index in left_out:
            self._meter.add("params_conflicts")
            log.warning(
                "request %s: params of %s contradict an earlier child's; left out", request.id, self.names[index]
            )
        return bool(claimers), params

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        if output.silent:
            self._pass_silence(output)
            return
        for index, part in self._parts(output):
            self.children[index].update_connector_output(part)
            self._passed(index, part)
        emit = self._gate.emit(
            output.finished_sending or (), output.finished_recving or (), output.failed_recving or ()
        )
        emit.replace_sets(output)

    def _pass_silence(self, output: KVConnectorOutput) -> None:
        """Nobody said anything, as in most steps: whoever hears that may let through what it held back."""
        news = False
        for index, child in self._hearing:
            child.update_connector_output(output)
            if not output.silent:
                news = True
                self._passed(index, output)
                Emit().replace_sets(output)
        if news:
            self._gate.emit((), (), ()).replace_sets(output)

    def _passed(self, index: int, part: KVConnectorOutput) -> None:
        self._gate.passed(
            index,
            part.finished_sending or (),
            part.finished_recving or (),
            part.failed_recving or (),
            part.failure_reasons,
        )

    def _parts(self, output: KVConnectorOutput) -> list[tuple[int, KVConnectorOutput]]:
        """Each child's view of the engine's output, where it means something to that child."""
        meta = output.kv_connector_worker_meta
        said = meta if isinstance(meta, WorkerFacts) else WorkerFacts()
        parts: list[tuple[int, KVConnectorOutput]] = []
        for index, share in enumerate(self._gate.take(said.facts)):
            part = _part(share, output, published_of(index, said.published) if said.published else ())
            if self.children[index].hears_silence or not part.silent:
                parts.append((index, part))
        return parts

    def get_finished_count(self) -> int | None:
        return None

    def set_handshake_metadata(self, metadata: Mapping[tuple[int, int], HandshakeMetadata]) -> None:
        serving: list[str] = []
        for index, child in enumerate(self.children):
            own = {
                rank: published.parts[index]
                for rank, published in metadata.items()
                if isinstance(published, MultiHandshake) and index in published.parts
            }
            try:
                child.set_handshake_metadata(own)
            except ConfigError as err:
                beside = f" (beside {' and '.join(serving)}, which publish on the same address)" if serving else ""
                raise ConfigError([f"{self.names[index]}{beside}: {problem}" for problem in err.problems]) from None
            if own:
                serving.append(self.names[index])

    def drain(self) -> None:
        for child in self.children:
            child.drain()

    def has_pending_push_work(self) -> bool:
        return self._gate.unshipped or any(child.has_pending_push_work() for child in self.children)

    def take_events(self) -> Iterable[Any]:
        return [event for child in self.children for event in child.take_events()]

    def reset_cache(self) -> bool | None:
        answers = [answer for child in self.children if (answer := child.reset_cache()) is not None]
        return all(answers) if answers else None

    def explain(self, now: float) -> list[str]:
        lines = self._gate.explain(self.names, now) if self.role is ConnectorRole.SCHEDULER else []
        for index, child in enumerate(self.children):
            lines += [f"{self.names[index]}: {line}" for line in child.explain(now)]
        return lines

    # -- worker half ---------------------------------------------------------------------------------------------

    def register_kv_caches(self, layers: Mapping[str, LayerView]) -> None:
        self._layers = tuple(layers)
        for child in self.children:
            child.register_kv_caches(layers)

    def get_handshake_metadata(self) -> HandshakeMetadata | None:
        asked = {index: child.get_handshake_metadata() for index, child in enumerate(self.children)}
        parts = {index: metadata for index, metadata in asked.items() if metadata is not None}
        return MultiHandshake(parts) if parts else None

    def bind_connector_metadata(self, metadata: ConnectorMetadata) -> None:
        self._metadata = metadata
        own = self._own(metadata)
        if own.step.seq:
            self._rank.bind(own.step)
        self._waits = own.step.waits
        for child, part in zip(self.children, own.children, strict=True):
            child.bind_connector_metadata(part)

    def clear_connector_metadata(self) -> None:
        self._metadata = None
        self._waits = ()
        for child in self.children:
            child.clear_connector_metadata()

    def handle_preemptions(self, metadata: ConnectorMetadata) -> None:
        parts = self._own(metadata).children
        for index, child in self._hooked["handle_preemptions"]:
            child.handle_preemptions(parts[index])

    def start_load_kv(self, context: object = None, **kwargs: object) -> None:
        for _, child in self._hooked["start_load_kv"]:
            child.start_load_kv(context, **kwargs)
        for index in self._waits:
            for layer in self._layers:
                self.children[index].wait_for_layer_load(layer)

    def wait_for_layer_load(self, layer_name: str) -> None:
        for _, child in self._hooked["wait_for_layer_load"]:
            child.wait_for_layer_load(layer_name)

    def save_kv_layer(self, layer_name: str, **kwargs: object) -> None:
        for _, child in self._hooked["save_kv_layer"]:
            child.save_kv_layer(layer_name, **kwargs)

    def wait_for_save(self) -> None:
        for _, child in self._hooked["wait_for_save"]:
            child.wait_for_save()

    def get_transfer_results(self, finished_req_ids: set[str]) -> TransferResults:
        for index, child in enumerate(self.children):
            results = child.get_transfer_results(set(finished_req_ids))
            if results is not NO_RESULTS:
                self._rank.reports(index, results)
        if finished_req_ids:
            self._rank.ended(finished_req_ids)
        return self._rank.take()

    def get_block_ids_with_load_errors(self) -> set[int]:
        blocks: set[int] = set()
        for _, child in self._hooked["get_block_ids_with_load_errors"]:
            blocks |= child.get_block_ids_with_load_errors()
        return blocks

    def build_connector_worker_meta(self) -> WorkerFacts | None:
        facts = self._rank.take_facts()
        published: list[Published] = []
        for index, child in self._hooked["build_connector_worker_meta"]:
            meta = child.build_connector_worker_meta()
            if isinstance(meta, WorkerFacts):
                facts += prefixed(index, meta.facts)
                published += [msgspec.structs.replace(one, child=(index, *one.child)) for one in meta.published]
            elif meta is not None:
                raise ContractError(
                    f"{self.names[index]}.build_connector_worker_meta(): expected WorkerFacts or None, "
                    f"got {type(meta).__name__}"
                )
        return WorkerFacts(tuple(facts), tuple(published)) if facts or published else None

    def _own(self, metadata: ConnectorMetadata) -> MultiMetadata:
        if not isinstance(metadata, MultiMetadata) or len(metadata.children) != len(self.children):
            raise ContractError(
                f"MultiConnector: expected its own scheduler half's metadata for {len(self.children)} children, "
                f"got {type(metadata).__name__}"
            )
        return metadata

    # -- both ----------------------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> Stats | None:
        if self.role is ConnectorRole.SCHEDULER:
            duplicates, dropped = self._gate.take_absorbed(), 0
        else:
            duplicates, dropped = self._rank.take_counts()
        if duplicates:
            self._meter.add("duplicates_absorbed", duplicates)
        if dropped:
            self._meter.add("early_reports_dropped", dropped)
        total = self._meter.take()
        for index, child in self._hooked["get_kv_connector_stats"]:
            stats = child.get_kv_connector_stats()
            if isinstance(stats, Stats):
                total = stats if total is None else total.aggregate(stats)
            elif stats is not None:
                raise ContractError(
                    f"{self.names[index]}.get_kv_connector_stats(): expected Stats or None, got {type(stats).__name__}"
                )
        return total

    def shutdown(self) -> None:
        errors: list[Exception] = []
        for index, child in enumerate(self.children):
            try:
                child.shutdown()
            except Exception as err:  # the others must be reached; raised below
                log.exception("%s: shutdown failed", self.names[index])
                errors.append(err)
        if errors:
            raise errors[0]

    def __repr__(self) -> str:
        gate = self._gate if self.role is ConnectorRole.SCHEDULER else self._rank
        return f"MultiConnector([{', '.join(self.names.values())}] {gate!r})"


def _part(share: Share, output: KVConnectorOutput, published: tuple[Published, ...]) -> KVConnectorOutput:
    """One child's view of the engine's output."""
    return KVConnectorOutput(
        finished_sending=set(share.sent) if share.sent else None,
        finished_recving=set(share.received) if share.received else None,
        failed_recving=set(share.failed) if share.failed else None,
        invalid_block_ids=set(output.invalid_block_ids),
        kv_connector_worker_meta=WorkerFacts(share.facts, published) if share.facts or published else None,
    )
