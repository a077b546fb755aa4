"""The engine: scheduler, connector's scheduler half, workers and aggregator, step by step.

Rules
1. A step is schedule, run, update; the clock is read here.
2. While only delayed releases or remote loads are pending the engine keeps stepping (C12), as often as ``pace`` says,
   and at once after a step in which one of them ended.
3. A release or receive that is pending longer than ``stall_after`` is named once in the log and stays in the stall
   table: which request, owed by which ranks of which child, since when (C7).
4. An engine that was told to end refuses new requests and goes on until nothing runs and nothing is held, at most
   ``config.drain`` seconds; then it ends what is left, naming it.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable

import msgspec

from kvconn.aggregator import KVOutputAggregator, Owed
from kvconn.base import ConnectorRole, Direction, HandshakeMetadata, KVConnector
from kvconn.config import fresh_engine_id
from kvconn.engine.config import EngineConfig, check, kv_cache_view
from kvconn.engine.executor import Executor
from kvconn.engine.request import EngineRequest, Finished, FirstToken
from kvconn.engine.scheduler import Scheduler
from kvconn.engine.worker import connector_config
from kvconn.errors import ContractError
from kvconn.explain import ExplainServer
from kvconn.factory import get_connector_class
from kvconn.geometry import place_of
from kvconn.metrics import Stats

__all__ = ["EngineCore", "EngineStats"]

log = logging.getLogger("kvconn.engine")
#: lines of what was left that go into an engine's last words
MOST = 8


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """A look at an engine. ``connector`` are its connector's counters, summed over ranks and time."""

    running: int = 0
    waiting: int = 0
    parked: int = 0
    pending_release: int = 0
    kv_blocks_used: int = 0
    kv_blocks_total: int = 0
    prefill_tokens: int = 0
    prefix_hit_tokens: int = 0
    external_tokens: int = 0
    steps: int = 0
    min_margin: float = math.inf
    stalls: tuple[str, ...] = ()
    connector: dict[str, float] = {}


class EngineCore:
    """One engine in this process, its workers in theirs. Raises ConfigError, EngineDeadError."""

    def __init__(self, config: EngineConfig, clock: Callable[[], float] = time.perf_counter) -> None:
        transfer = check(config)
        self.config = config
        self._clock = clock
        engine_id = fresh_engine_id(transfer) if transfer is not None else config.name
        self.executor = Executor(config, transfer, engine_id)
        self.connector: KVConnector | None = None
        self._explains: ExplainServer | None = None
        self.aggregator = KVOutputAggregator(config.parallel.world)
        self._totals = Stats()
        self._steps = 0
        self._margin = math.inf
        self._named: set[tuple[Direction, str]] = set()
        self._drain_from: float | None = None
        try:
            if transfer is not None:
                cls = get_connector_class(transfer)
                self.connector = cls(  # type: ignore[call-arg]  # base.KVConnector documents the constructor
                    connector_config(config, transfer, engine_id, None), ConnectorRole.SCHEDULER, kv_cache_view(config)
                )
                self.aggregator = KVOutputAggregator.from_connector(self.connector, config.parallel.world)
                self._shake_hands()
            policy = transfer.kv_load_failure_policy if transfer is not None else "fail"
            self.scheduler = Scheduler(config, self.connector, self._expect, policy)
            if self.connector is not None:
                self._explains = ExplainServer(self._explain, self.__repr__, engine_id, "scheduler", clock=clock)
        except BaseException:
            self.close()
            raise

    def _shake_hands(self) -> None:
        """Workers' handshake metadata, by (pp, tp): replicated ranks publish none, so that nothing is overwritten."""
        published: dict[tuple[int, int], HandshakeMetadata] = {}
        parallel = self.config.parallel
        for rank, metadata in enumerate(self.executor.handshakes()):
            if metadata is None:
                continue
            place = place_of(parallel, rank)
            if (place.pp, place.tp) in published:
                raise ContractError(f"rank {rank} publishes itself as {place}, as another rank does")
            published[place.pp, place.tp] = metadata
        if self.connector is not None and published:
            self.connector.set_handshake_metadata(published)

    def _expect(self, direction: Direction, id: str, now: float) -> None:
        self.aggregator.expect(direction, id, now)

    def add(self, request: EngineRequest) -> None:
        self.scheduler.add(request, self._clock())

    def abort(self, id: str) -> None:
        self.scheduler.abort(id, self._clock())

    def has_work(self) -> bool:
        return self.scheduler.has_work()

    # -- ending --------------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Told to end (rule 4). Idempotent."""
        if self._drain_from is not None:
            return
        self._drain_from = self._clock()
        self.scheduler.drain()
        limit = self.config.drain
        log.warning(
            "engine %s was told to end and takes nothing new; %g s for %r", self.config.name, limit, self.scheduler
        )

    def drained(self) -> bool:
        """It was told to end, and nothing is left to wait for, or no time."""
        if self._drain_from is None:
            return False
        return not self.has_work() or self._clock() >= self._drain_from + self.config.drain

    def end(self) -> tuple[str, list[FirstToken | Finished]]:
        """End what is left, at the drain's end. Returns what came of the drain, and what the driver is told."""
        age = self._clock() - (self._drain_from or 0.0)
        if not self.has_work():
            return f"told to end, nothing was left after {age:.1f} s", []
        lines = self._explain(self._clock())
        for id in list(self.scheduler.requests):
            self.abort(id)
        _, events = self.step()
        for line in lines:
            log.error("engine %s ends without waiting any longer: %s", self.config.name, line)
        left = f"{len(self.scheduler.requests)} requests still hold blocks"
        return (
            f"told to end, not over after {age:.1f} s: {left}; {'; '.join(lines[:MOST]) or 'nobody owes a word'}",
            events,
        )

    def step(self) -> tuple[bool, list[FirstToken | Finished]]:
        """One step. Returns whether there may be something to do at once, and what the driver is told."""
        step = self.scheduler.schedule(self._clock())
        metadata = self.connector.build_connector_meta(step.view) if self.connector is not None else None
        outputs = self.executor.step(step, metadata)
        self._steps += 1
        now = self._clock()
        rank = self.config.parallel.output_rank
        joined = self.aggregator.aggregate(outputs, rank, now)
        self._margin = min(self._margin, joined.min_margin)
        part = joined.kv_connector_output if self.connector is not None else None
        events = self.scheduler.update(step, joined.tokens, part, now)
        if self.connector is not None and part is not None:
            self._count(part.kv_connector_stats)
            self._count(self.connector.get_kv_connector_stats())
            for _ in self.connector.take_events():
                pass  # nobody subscribes to KV events here
            self._name_stalls(now)
        arrived = part is not None and bool(part.finished_recving or part.finished_sending)
        return bool(step.requests) or arrived, events

    def _count(self, stats: Stats | None) -> None:
        if stats is not None:
            self._totals = self._totals.aggregate(stats)

    # -- stalls --------------------------------------------------------------------------------------------------

    def _name_stalls(self, now: float) -> None:
        after = self.config.stall_after
        overdue = {
            (o.direction, o.id) for o in self.aggregator.pending() if o.since is not None and now - o.since > after
        }
        news = overdue - self._named
        self._named = overdue
        for line in self._lines(news, now):
            log.error("engine %s stalls: %s", self.config.name, line)

    def _lines(self, ids: set[tuple[Direction, str]], now: float) -> list[str]:
        """One line per id: from the connector, which knows children, else from the aggregator, which knows ranks."""
        if not ids:
            return []
        known = self._explain(now)
        abouts = [_about(owed) for owed in self.aggregator.pending() if (owed.direction, owed.id) in ids]
        return [next(line for line in known if line.startswith(about)) for about in abouts]

    def stalls(self) -> tuple[str, ...]:
        """The stall table now: one line about every overdue id; empty when nothing is."""
        return tuple(self._lines(self._named, self._clock()))

    def _explain(self, now: float) -> list[str]:
        """Everything that is owed: what the connector knows, and what only the aggregator misses."""
        lines = list(self.connector.explain(now)) if self.connector is not None else []
        for owed in self.aggregator.pending():
            if not any(line.startswith(_about(owed)) for line in lines):
                missing = f"{_about(owed)}is incomplete: the aggregator misses ranks {','.join(map(str, owed.ranks))}"
                lines.append(missing if owed.since is None else f"{missing} for {now - owed.since:.1f} s")
        return lines

    def stats(self) -> EngineStats:
        scheduler = self.scheduler
        totals = dict(self._totals.values)
        totals["duplicates_absorbed"] = (
            totals.get("duplicates_absorbed", 0) + self.aggregator.duplicates + scheduler.absorbed
        )
        return EngineStats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            parked=len(scheduler.parked),
            pending_release=len(scheduler.delayed),
            kv_blocks_used=scheduler.tables.num_used,
            kv_blocks_total=scheduler.tables.num_blocks,
            prefill_tokens=scheduler.prefill_tokens,
            prefix_hit_tokens=scheduler.prefix_hit_tokens,
            external_tokens=scheduler.external_tokens,
            steps=self._steps,
            min_margin=self._margin,
            stalls=self.stalls(),
            connector=totals,
        )

    def close(self) -> None:
        """Workers first, then the scheduler half. Idempotent."""
        if self._explains is not None:
            self._explains.close()
        self.executor.close()
        if self.connector is not None:
            self.connector.shutdown()

    def __repr__(self) -> str:
        return f"EngineCore({self.config.name} {self.scheduler!r} {self.connector!r})"


def _about(owed: Owed) -> str:
    """How a line about this id begins (``ledger.Pending.describe``)."""
    return f"{owed.direction} of {owed.id} "
