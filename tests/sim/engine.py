"""One engine in this process: the reference engine's scheduler, block pool and aggregator, real halves, no processes.

Rules
1. A step has two halves: :meth:`Engine.begin` schedules and lets ranks run it, :meth:`Engine.end` hands the scheduler
   what came back. Anything may happen between them.
2. Ranks that serve or read run with the step; a replica that lags runs its steps later, in order. What a rank has to
   say may be handed over later than that, or twice.
3. KV is a hash of the token's prefix, so that every byte has one right value. A forward first reads all KV before it,
   as attention does: a byte that is not the prompt's is violation (a).
4. A harsh pool forgets and overwrites a block the moment nobody references it; the kind one keeps it, as vLLM's does.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np

from kvconn.aggregator import KVOutputAggregator
from kvconn.base import ConnectorRole, Direction, GroupView, KVCacheView, KVConnector, KVConnectorOutput, LayerView
from kvconn.config import ConnectorConfig, KVTransferConfig, ModelView, ParallelConfig, parse_kv_transfer_config
from kvconn.engine.blocks import BlockPool
from kvconn.engine.config import EngineConfig
from kvconn.engine.request import EngineRequest, Finished
from kvconn.engine.scheduler import Scheduler, Step
from kvconn.factory import get_connector_class
from kvconn.geometry import HeadShare, Share, Side, TokenShare, place_of
from kvconn.ledger import CompletionLedger
from kvconn.multi.connector import MultiConnector
from kvconn.nixl.connector import NixlConnector
from kvconn.offload.connector import OffloadingConnector
from tests.sim.tables import left_over

BLOCK = 4  # tokens of a block on one rank
ROW = 8  # bytes per token and layer, of all heads
LAYERS = ("layers.0.kv", "layers.1.kv")
DIRECTIONS: tuple[Direction, Direction] = ("send", "recv")


@lru_cache(maxsize=1 << 16)
def _link(parent: bytes, token: int) -> bytes:
    return hashlib.blake2b(parent + token.to_bytes(8, "little"), digest_size=ROW * len(LAYERS)).digest()


@lru_cache(maxsize=1 << 12)
def kv(tokens: tuple[int, ...]) -> Any:
    """The KV of ``tokens``: shape (tokens, layers, ROW)."""
    rows, parent = [], b""
    for token in tokens:
        parent = _link(parent, token)
        rows.append(parent)
    return np.frombuffer(b"".join(rows), np.uint8).reshape(len(tokens), len(LAYERS), ROW)


def next_token(tokens: tuple[int, ...]) -> int:
    """Greedy, and a function of the prefix."""
    return 1 << 20 | int.from_bytes(_link(bytes(kv(tokens)[-1]), 0)[:2], "little")


@dataclass(frozen=True)
class Part:
    """What one rank keeps of every prompt."""

    layers: range
    heads: HeadShare
    tokens: TokenShare
    #: bytes of a head
    head: int

    @classmethod
    def of(cls, parallel: ParallelConfig, heads: int, rank: int) -> Part:
        place, share = place_of(parallel, rank), Share.of(Side.of(parallel, heads), place_of(parallel, rank).tp)
        assert share is not None
        each = len(LAYERS) // parallel.pp
        return cls(range(place.pp * each, (place.pp + 1) * each), share.heads, share.tokens, ROW // heads)

    def cache(self, num_blocks: int) -> Any:
        """Blocks of every layer: heads, tokens, bytes."""
        return np.zeros((len(self.layers), num_blocks, self.heads.count, BLOCK, self.head), np.uint8)

    def places(self, table: Any, start: int, end: int) -> tuple[Any, Any, Any]:
        """Positions from ``start`` up to ``end`` that are kept here, their blocks and their rows in them."""
        share = self.tokens
        positions = np.arange(start, end)
        turn, within = np.divmod(positions, share.interleave)
        here = turn % share.dcp == share.rank
        index, rows = np.divmod((turn // share.dcp * share.interleave + within)[here], BLOCK)
        return positions[here], np.array(table, np.int64)[index], rows

    def content(self, tokens: tuple[int, ...], positions: Any) -> Any:
        """What lies there, as numpy gives it for these places: position, layer, head, bytes."""
        first = self.heads.first * self.head
        right = kv(tokens)[positions][
            :, self.layers.start : self.layers.stop, first : first + self.heads.count * self.head
        ]
        return right.reshape(len(positions), len(self.layers), self.heads.count, self.head)


class Pool(BlockPool):
    """Tells which blocks became free; a harsh one forgets what they held."""

    def __init__(self, num_blocks: int, freed: Callable[[list[int]], None] | None) -> None:
        super().__init__(num_blocks)
        self._freed = freed

    def give_back(self, blocks: Any) -> None:
        super().give_back(blocks)
        if self._freed is not None:
            free = [block for block in blocks if self._references[block] == 0]
            for block in free:
                self._forget(block)
            self._freed(free)

    def references(self, block: int) -> int:
        return self._references[block]


class Ordered(set[str]):
    """A set that is iterated in order: blocks return to the pool in the same order in every process."""

    def __iter__(self) -> Any:
        return iter(sorted(super().__iter__()))


class Watched:
    """A scheduler half, with somebody who sees what it is told to fill and what it lets through."""

    def __init__(self, inner: KVConnector, engine: Engine) -> None:
        self._inner = inner
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._inner.update_state_after_alloc(request, blocks, num_external_tokens)
        if num_external_tokens > 0:
            self._engine.watcher.loading(self._engine, request, blocks, num_external_tokens)

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        self._inner.update_connector_output(output)
        sent, received = Ordered(output.finished_sending or ()), Ordered(output.finished_recving or ())
        failed = Ordered(output.failed_recving or ())
        self._engine.emitted(sent, received, failed)
        output.finished_sending, output.finished_recving, output.failed_recving = sent, received, failed


class Output:
    """A worker's output of one step, as an aggregator wants it."""

    def __init__(self, part: KVConnectorOutput) -> None:
        self.kv_connector_output = part


class Engine:
    """``watcher`` is the world: it is told of loads, emissions, references and stale reads."""

    def __init__(
        self,
        watcher: Any,
        name: str,
        transfer: dict[str, Any],
        *,
        parallel: ParallelConfig,
        heads: int,
        num_blocks: int,
        port: int,
        chunk: int,
        harsh: bool,
        clock: Callable[[], float],
        make_transport: Callable[[], Any],
    ) -> None:
        self.watcher = watcher
        self.name = name
        self.port = port
        self.clock = clock
        self.ranks = range(parallel.world)
        parsed = parse_kv_transfer_config(transfer)
        config = EngineConfig(
            name=name, parallel=parallel, num_blocks=num_blocks, block_size=BLOCK, max_num_batched_tokens=chunk,
            max_num_seqs=4,
        )  # fmt: skip
        self.block_tokens = config.block_tokens
        view = KVCacheView(num_blocks, self.block_tokens, (GroupView("full", LAYERS),))
        self.parts = [Part.of(parallel, heads, rank) for rank in self.ranks]
        self.caches = [part.cache(num_blocks) for part in self.parts]
        make = partial(_make, clock, make_transport)
        self.workers = [
            make(get_connector_class(parsed), _connector_config(name, parsed, parallel, heads, port, rank),
                 ConnectorRole.WORKER, view)
            for rank in self.ranks
        ]  # fmt: skip
        for worker, part, cache in zip(self.workers, self.parts, self.caches, strict=True):
            worker.register_kv_caches({LAYERS[n]: _layer(LAYERS[n], cache[i]) for i, n in enumerate(part.layers)})
        whole = _connector_config(name, parsed, parallel, heads, port, None)
        self.connector = make(get_connector_class(parsed), whole, ConnectorRole.SCHEDULER, view)
        self._publish(parallel)
        self.aggregator = KVOutputAggregator.from_connector(self.connector, parallel.world)
        policy = parsed.kv_load_failure_policy
        self.scheduler = Scheduler(config, Watched(self.connector, self), self._expect, policy)  # type: ignore[arg-type]
        self.scheduler.tables.groups[0].pool = self.pool = Pool(num_blocks, self._overwrite if harsh else None)
        self.halves = [h.worker for w in self.workers for h in leaves(w) if isinstance(h, NixlConnector)]
        #: ranks that serve or read; the others are replicas
        self.active = [rank for rank in self.ranks if self.halves[rank]._agent.transport is not None]
        self._ledgers = [_ledger_of(one) for one in leaves(self.connector)]
        self._junk = 0
        self._queues: list[deque[Any]] = [deque() for _ in self.ranks]
        self._said: list[deque[KVConnectorOutput]] = [deque() for _ in self.ranks]
        self._again: list[tuple[int, int, KVConnectorOutput]] = []
        self._running: tuple[Step, dict[str, int]] | None = None
        #: ranks that run nothing for now; steps for which a rank's word is withheld; ranks whose next word comes twice
        self.lagging: set[int] = set()
        self.withheld: dict[int, int] = {}
        self.repeats: dict[int, int] = {}

    def _publish(self, parallel: ParallelConfig) -> None:
        published: dict[tuple[int, int], Any] = {}
        for rank, worker in enumerate(self.workers):
            place, metadata = place_of(parallel, rank), worker.get_handshake_metadata()
            assert metadata is None or (place.pp, place.tp) not in published, f"{self.name}: rank {rank} is two"
            if metadata is not None:
                published[place.pp, place.tp] = metadata
        if published:
            self.connector.set_handshake_metadata(published)

    @property
    def half(self) -> Any:
        return self.halves[0]

    def transport(self, rank: int) -> Any:
        return self.halves[rank]._agent.transport

    def agent(self, pick: int) -> str:
        """That of one of the active ranks."""
        return str(self.transport(self.active[pick % len(self.active)]).name)

    @property
    def agents(self) -> list[str]:
        return [self.agent(index) for index in range(len(self.active))]

    def _expect(self, direction: Direction, id: str, now: float) -> None:
        self.aggregator.expect(direction, id, now)

    # -- requests

    def add(self, id: str, tokens: tuple[int, ...], max_tokens: int, params: dict[str, Any] | None) -> None:
        self.scheduler.add(EngineRequest(id, tokens, max_tokens, params), self.clock())

    def abort(self, id: str) -> None:
        self.scheduler.abort(id, self.clock())

    # -- a step

    def step(self) -> None:
        self.begin()
        self.end()

    def begin(self) -> None:
        """Schedule, and run it on every rank that does not lag. Nothing while a step runs."""
        if self._running is not None:
            return
        step = self.scheduler.schedule(self.clock())
        metadata = self.connector.build_connector_meta(step.view)
        self.watcher.announced(self)
        self.watcher.counts["preemptions"] += len(step.view.preempted)
        requests = self.scheduler.requests
        texts = [(s, tuple(requests[s.id].tokens[: s.start + s.n])) for s in step.requests]
        for queue in self._queues:
            queue.append((step, metadata, texts))
        self._running = step, {s.id: next_token(tokens) for s, tokens in texts if s.sample}
        self.catch_up()

    def catch_up(self) -> None:
        """Ranks that do not lag run what is queued for them."""
        for rank in self.ranks:
            while rank not in self.lagging and self._queues[rank]:
                one = self._queues[rank].popleft()
                if isinstance(one, tuple):
                    self._said[rank].append(self._run(rank, *one))
                else:
                    one()

    def _run(self, rank: int, step: Step, metadata: Any, texts: list[Any]) -> KVConnectorOutput:
        """What one worker does around a step, in the order of the reference engine's."""
        worker, finished = self.workers[rank], set(step.view.finished)
        worker.handle_preemptions(metadata)
        worker.bind_connector_metadata(metadata)
        if step.loads_first:
            worker.start_load_kv()
        for scheduled, tokens in texts:
            self._forward(rank, scheduled, tokens)
        if not step.loads_first:
            worker.start_load_kv()
        worker.wait_for_save()
        if rank in self.active:
            self.watcher.polls(self, rank)
        results = worker.get_transfer_results(finished)
        part = KVConnectorOutput(
            finished_sending=set(results.finished_sending) or None,
            finished_recving=set(results.finished_recving) or None,
            failed_recving=set(results.failed_recving) or None,
            kv_connector_stats=worker.get_kv_connector_stats(),
            kv_connector_worker_meta=worker.build_connector_worker_meta(),
        )
        worker.clear_connector_metadata()
        if rank in self.active:
            self.watcher.polled(self, rank, part)
        return part

    def _forward(self, rank: int, scheduled: Any, tokens: tuple[int, ...]) -> None:
        self.check(rank, scheduled.blocks, tokens[: scheduled.start], 0, scheduled.id)
        positions, blocks, rows = self.parts[rank].places(scheduled.blocks, scheduled.start, len(tokens))
        self.caches[rank][:, blocks, :, rows] = self.parts[rank].content(tokens, positions)

    def check(self, rank: int, blocks: Any, tokens: tuple[int, ...], start: int, what: str) -> None:
        """From position ``start`` on the blocks hold the KV of ``tokens``."""
        if not tokens:
            return
        positions, blocks, rows = self.parts[rank].places(blocks, start, len(tokens))
        ours, right = self.caches[rank][:, blocks, :, rows], self.parts[rank].content(tokens, positions)
        assert np.array_equal(ours, right), f"(a) {self.name} rank {rank}: {what} reads bytes that are not its prompt's"

    def end(self) -> None:
        """Hand over what ranks have said, and let the scheduler see it."""
        if self._running is None:
            return
        (step, tokens), self._running = self._running, None
        outputs = [Output(self._word(rank)) for rank in self.ranks]
        joined = self.aggregator.aggregate(outputs, 0, self.clock())
        events = self.scheduler.update(step, tokens, joined.kv_connector_output, self.clock())
        self._repeat()
        assert self.scheduler.absorbed == 0, f"(c) {self.name}: an id was emitted that nothing waited for"
        for event in events:
            if isinstance(event, Finished):
                self.watcher.finished(self, event)

    def _word(self, rank: int) -> KVConnectorOutput:
        """What this rank's output of the step says, or an empty one."""
        if self.withheld.get(rank, 0) > 0:
            self.withheld[rank] -= 1
            return KVConnectorOutput()
        part, said = KVConnectorOutput(), self._said[rank]
        while said and part.kv_connector_worker_meta is None:  # what says nothing does not hold up what does
            part = said.popleft()
        if rank in self.repeats and part.kv_connector_worker_meta is not None:
            self._again.append((self.repeats.pop(rank), rank, part))
        return part

    def _repeat(self) -> None:
        due = [(rank, part) for left, rank, part in self._again if left <= 0]
        self._again = [(left - 1, rank, part) for left, rank, part in self._again if left > 0]
        for rank, part in due:
            self._said[rank].append(part)

    # -- what the pool and the connector say

    def _overwrite(self, blocks: list[int]) -> None:
        """The blocks are somebody else's now; every rank learns it in the order of its steps."""
        for rank in self.ranks:
            self._queues[rank].append(partial(self._fill, rank, blocks))
        self.catch_up()

    def _fill(self, rank: int, blocks: list[int]) -> None:
        self._junk = (self._junk + 1) % 256
        self.caches[rank][:, blocks] = self._junk

    def emitted(self, sent: Ordered, received: Ordered, failed: Ordered) -> None:
        """The connector let these through."""
        assert not sent & received, f"(c) {self.name}: {sent & received} emitted in both directions at once"
        for id in sent | received:
            for ledger in self._ledgers:
                held = [direction for direction in DIRECTIONS if ledger.get(id, direction) is not None]
                assert not held, f"(c) {self.name}: {id} was emitted while a life of it is open: {held}"
        for id in sent:
            self.watcher.sent(self, id)
        for id in received:
            self.watcher.received(self, id, id in failed)

    @property
    def in_step(self) -> bool:
        """Ranks have run a step that the scheduler has not heard of."""
        return self._running is not None

    def busy(self) -> bool:
        """Whether it has requests, or words under way."""
        return bool(self.scheduler.requests or any(self._said) or any(self._queues) or self._again or self._running)

    def close(self) -> None:
        for connector in (*self.workers, self.connector):
            connector.shutdown()

    def __repr__(self) -> str:
        return f"Engine({self.name} {self.scheduler!r})"


def _make(clock: Any, make_transport: Any, cls: Any, config: Any, role: Any, view: Any) -> Any:
    """A connector on this clock and net, and all of its children."""
    if issubclass(cls, MultiConnector):
        return cls(config, role, view, clock=clock, make_child=partial(_make, clock, make_transport))
    if issubclass(cls, NixlConnector):
        return cls(config, role, view, clock=clock, make_transport=make_transport)
    if issubclass(cls, OffloadingConnector):
        return cls(config, role, view, clock=clock)
    return cls(config, role, view)


def leaves(connector: Any) -> list[Any]:
    """This connector and everything below it."""
    below = [leaf for child in getattr(connector, "children", ()) for leaf in leaves(child)]
    return [connector, *below]


def _ledger_of(connector: Any) -> CompletionLedger:
    if isinstance(connector, MultiConnector):
        return connector._gate.ledger
    half: Any = getattr(connector, "scheduler", connector)
    return half.ledger


def all_tables(engine: Engine) -> list[str]:
    """Left over in any table of the engine's halves, gates and aggregator."""
    parts = [engine.connector, *engine.workers, engine.aggregator]
    return [f"{engine.name} {line}" for part in parts for line in left_over(part)]


def _connector_config(
    name: str, parsed: KVTransferConfig, parallel: ParallelConfig, heads: int, port: int, rank: int | None
) -> ConnectorConfig:
    model = ModelView("m", "uint8", len(LAYERS), heads, ROW, BLOCK, "latent" if heads == 1 else "kv")
    return ConnectorConfig(parsed, name, parallel, model, rank=rank, port=port)


def _layer(name: str, array: Any) -> LayerView:
    return LayerView(name, array.ctypes.data, array.strides[0], array[0].nbytes, array.shape[0])
