"""The worker half: moves one rank's share of blocks where the scheduler half says, and answers for each.

Contract this half keeps
- Every job is answered once, by every rank: done, or failed when it could not be done in time. A rank with no share
  of it (``hold`` on a replica, saving on a replica) answers at that step's poll.
- Every load is reported once, when none of its copies runs any more (C6), as failed if one of them was not done.
- Every hold is reported once, when the store jobs it names are over here; at that step's poll when none is open.

Rules
1. One poll: :meth:`OffloadWorker.poll` (C5). In it what returned is taken in before deadlines are judged (C11).
2. State changes on the step thread. Threads copy, read and write, and answer through their job table.
3. Stores read blocks that a later step may overwrite. :meth:`OffloadWorker.flush`, before any block of that step is
   written, copies what still waits, waits a moment for what is being copied, and gives up the rest: the bytes stored
   under a key are always that key's.
4. Disk threads hold no slot while they wait for the disk: saving copies the slot first, fetching fills it last.
Time is an argument, in seconds of the worker's clock.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from kvconn.base import Fact, KVCacheView, LayerView, TransferResults, WorkerFacts
from kvconn.config import LIMITS, OffloadSettings
from kvconn.errors import ConfigError
from kvconn.geometry import RankRole, regions_of
from kvconn.ledger import Child
from kvconn.metrics import Meter
from kvconn.offload.copier import Copier, make_copier, slot_bytes
from kvconn.offload.jobs import Ended, JobTable, Number
from kvconn.offload.metadata import GONE, JOBS, Fetch, Hold, Load, OffloadStep, Save, Store
from kvconn.offload.runner import Runner
from kvconn.offload.tiers.base import SecondaryTier
from kvconn.offload.tiers.host import HostTier

__all__ = ["OffloadWorker"]

log = logging.getLogger("kvconn.offload")

T = TypeVar("T")

#: seconds between two log lines about a tier that fails
COMPLAIN_EVERY = 60.0


class _Loading:
    """A load life on this rank."""

    __slots__ = ("failed", "left", "load")

    def __init__(self, load: Load) -> None:
        self.load = load
        self.left = len(load.slots)
        self.failed = load.lost


class OffloadWorker:
    """One rank. ``tiers`` belong to its share."""

    def __init__(
        self,
        settings: OffloadSettings,
        role: RankRole,
        kv_cache: KVCacheView,
        tiers: Sequence[SecondaryTier] = (),
    ) -> None:
        self.role = role
        self.meter = Meter()
        self.tier: HostTier | None = None
        self._limits = settings.kvconn
        self._slots = settings.cpu_bytes_to_use // kv_cache.block_bytes
        self._block_bytes = kv_cache.block_bytes
        self._tiers = tuple(tiers)
        #: under ``hold`` a replica stores nothing; it never writes to secondary tiers, its canonical rank does
        self._idle = role.replicates and settings.kvconn.hold
        self._copier: Copier | None = None
        #: bytes of a block over all regions
        self._length = 0
        #: with the copier's mark, behind which the copy begins
        self._stores: JobTable[tuple[Store, Any]] = JobTable(self._limits.stores_max, attached=True)
        self._copies: JobTable[tuple[int, tuple[int, ...], Any]] = JobTable(kv_cache.num_blocks, attached=True)
        self._saves: JobTable[Save] = JobTable(self._limits.saves_max, attached=False)
        self._fetches: JobTable[Fetch] = JobTable(self._limits.fetches_max, attached=False)
        self._copying: list[Runner[Any]] = []
        self._on_disk: list[Runner[Any]] = []
        self._store_runner: Runner[tuple[Store, Any]] | None = None
        #: jobs not answered yet: n -> name
        self._names: dict[int, str] = {}
        self._open_stores: set[int] = set()
        self._loading: dict[int, _Loading] = {}
        self._holding: dict[int, tuple[Hold, set[int]]] = {}
        self._staged_stores: list[Store] = []
        self._staged_loads: list[Load] = []
        self._newest: dict[type, int] = {}
        self._facts: list[Fact] = []
        self._complained: dict[str, float] = {}

    def register(self, layers: Mapping[str, LayerView]) -> None:
        """The cache of this rank. Raises ConfigError for memory this version cannot copy."""
        problems = [
            f"layer {layer.name}: offloading moves full attention, got {layer.kind}"
            for layer in layers.values()
            if layer.kind != "full"
        ]
        regions = regions_of(layers.values())
        self._length = slot_bytes(regions)
        if self._length > self._block_bytes:
            problems.append(
                f"kv_cache.block_bytes: the engine said {self._block_bytes} bytes a block, "
                f"its layers on rank {self.role.rank} have {self._length}"
            )
        if problems:
            raise ConfigError(problems)
        if self._idle:
            return
        self.tier = HostTier(self._slots, self._block_bytes)
        self._copier = make_copier(regions, self.tier.address(0), self._slots * self._block_bytes)
        name = f"kvconn-offload-{self.role.rank}"
        self._store_runner = Runner(f"{name}-store", 1, self._stores, self._store)
        self._copying = [self._store_runner, Runner(f"{name}-load", 1, self._copies, self._load)]
        if self._tiers:
            self._on_disk = [
                Runner(f"{name}-save", 1, self._saves, self._save),
                Runner(f"{name}-fetch", 2, self._fetches, self._fetch),
            ]

    # -- a step --------------------------------------------------------------------------------------------------

    def flush(self, step: OffloadStep) -> None:
        """Rule 3. Before any block of this step is written."""
        for n in step.flush:
            job = self._stores.claim((n, 0))
            if job is not None and self._store_runner is not None:
                self._store_runner.run((n, 0), job)
            elif not self._stores.wait((n, 0), LIMITS.flush):
                self.meter.add("offload_stores_torn")

    def bind(self, step: OffloadStep, now: float) -> None:
        """This step's orders. What was bound before changes nothing."""
        for hold in self._new(step.holds):
            self._holding[hold.n] = (hold, self._open_stores.intersection(hold.stores))
        for store in self._new(step.stores):
            self._names[store.n] = store.name
            if self._idle:
                self._answer(store.n, True)
            else:
                self._open_stores.add(store.n)
                self._staged_stores.append(store)
        saves, fetches = self._new(step.saves), self._new(step.fetches)
        self._names.update((order.n, order.name) for order in (*saves, *fetches))
        if self.role.replicates:
            for save in saves:
                self._answer(save.n, True)
        elif saves:
            self._saves.add_all([((save.n, 0), save) for save in saves], now + self._limits.store)
        if fetches:
            self._fetches.add_all([((fetch.n, 0), fetch) for fetch in fetches], now + self._limits.load)
        self._staged_loads += self._new(step.loads)

    def _new(self, orders: Sequence[Any]) -> list[Any]:
        """Those that were not bound before."""
        if not orders:
            return []
        newest = self._newest.get(type(orders[0]), 0)
        new = [order for order in orders if order.n > newest]
        self._newest[type(orders[0])] = max(newest, orders[-1].n)
        return new

    def start_loads(self, now: float) -> None:
        """Begin the loads that were bound."""
        mark = self._mark(self._staged_loads)
        for load in self._staged_loads:
            self._loading[load.n] = _Loading(load)
            blocks = zip(*load.blocks, strict=True) if load.blocks else ()
            jobs = [
                ((load.n, k), (slot, ids, mark)) for k, (slot, ids) in enumerate(zip(load.slots, blocks, strict=True))
            ]
            self._copies.add_all(jobs, now + self._limits.load)
        self._staged_loads = []

    def start_stores(self, now: float) -> None:
        """The step's blocks are computed: begin to store them."""
        mark = self._mark(self._staged_stores)
        if self._staged_stores:
            jobs = [((store.n, 0), (store, mark)) for store in self._staged_stores]
            self._stores.add_all(jobs, now + self._limits.store)
        self._staged_stores = []

    def _mark(self, staged: Sequence[Any]) -> Any:
        return self._copier.mark() if staged and self._copier is not None else None

    # -- the poll ------------------------------------------------------------------------------------------------

    def poll(self, now: float) -> TransferResults:
        """Holds and loads that this rank is done with. Consumes (C5)."""
        self.start_loads(now)
        self.start_stores(now)
        self._take()
        for table in (self._stores, self._copies, self._saves, self._fetches):
            table.expire(now)
        self._take()
        for tier in self._tiers if not self.role.replicates else ():
            self._facts += [
                Fact(f"{tier.name}:{key.hex()}", "send", 0, self.role.rank, "done", GONE) for key in tier.take_removed()
            ]
        received, failed = self._loaded()
        return TransferResults(self._released(), received, failed)

    def _take(self) -> None:
        """Answer every job that is over."""
        for ended in self._stores.take_ended():
            self._open_stores.discard(ended.number[0])
            self._answer(ended.number[0], ended.fine)
            self._measure("store", ended)
        for table in (self._saves, self._fetches):
            for ended in table.take_ended():
                self._answer(ended.number[0], ended.fine)
        for ended in self._copies.take_ended():
            loading = self._loading[ended.number[0]]
            loading.left -= 1
            loading.failed |= not ended.fine
            self._measure("load", ended)

    def _answer(self, n: int, fine: bool) -> None:
        self._say(self._names.pop(n), "send", n, fine, JOBS)

    def _say(self, id: str, direction: Any, n: int, fine: bool, child: Child = (), why: str = "") -> None:
        if not fine:
            self._facts.append(Fact(id, direction, n, self.role.rank, "failed", child, why))
        self._facts.append(Fact(id, direction, n, self.role.rank, "done" if fine else "quiet", child))

    def _measure(self, what: str, ended: Ended) -> None:
        if ended.fine:
            self.meter.add(f"kv_offload_{what}_bytes", self._length)
            self.meter.add(f"kv_offload_{what}_blocks")

    def _loaded(self) -> tuple[frozenset[str], frozenset[str]]:
        over = [loading for loading in self._loading.values() if loading.left == 0]
        for loading in over:
            del self._loading[loading.load.n]
            why = "its blocks left the host tier" if loading.load.lost else "not copied from the host tier in time"
            self._say(loading.load.id, "recv", loading.load.n, not loading.failed, why=why)
        failed = frozenset(loading.load.id for loading in over if loading.failed)
        return frozenset(loading.load.id for loading in over), failed

    def _released(self) -> frozenset[str]:
        over = [hold for hold, stores in self._holding.values() if not stores & self._open_stores]
        for hold in over:
            del self._holding[hold.n]
            self._say(hold.id, "send", hold.n, True)
        return frozenset(hold.id for hold in over)

    # -- on threads ----------------------------------------------------------------------------------------------

    def _store(self, number: Number, job: tuple[Store, Any]) -> bool:
        store, mark = job
        self._copy("store", store.slot, store.blocks, mark)
        return True

    def _load(self, number: Number, job: tuple[int, tuple[int, ...], Any]) -> bool:
        slot, blocks, mark = job
        self._copy("load", slot, blocks, mark)
        return True

    def _copy(self, what: str, slot: int, blocks: tuple[int, ...], mark: Any) -> None:
        assert self.tier is not None and self._copier is not None, "a rank without a tier has no jobs"
        began = time.perf_counter()
        self._copier.copy(self.tier.address(slot), blocks, load=what == "load", after=mark)
        self.meter.add(f"kv_offload_{what}_time", time.perf_counter() - began)

    def _save(self, number: Number, save: Save) -> bool:
        assert self.tier is not None, "a rank without a tier has no jobs"
        data = self.tier.read_all(save.slots, self._length)
        if not self._saves.stands(number):
            return False  # given up: a slot may have been another block's when it was copied
        wrote = [self._tried(tier, partial(tier.write_all, save.keys, data), len(save.keys)) for tier in self._tiers]
        return all(one is not None and all(one) for one in wrote)

    def _fetch(self, number: Number, fetch: Fetch) -> bool:
        assert self.tier is not None, "a rank without a tier has no jobs"
        for tier in self._tiers:
            data = self._tried(tier, partial(tier.read, fetch.key), 1)
            if data is None or len(data) != self._length:
                continue
            if not self._fetches.land(number):
                return False
            self.tier.write(fetch.slot, data)
            return True
        return False

    def _tried(self, tier: SecondaryTier, do: Callable[[], T], blocks: int) -> T | None:
        """A tier's answer; None, counted by block and logged now and then, when its medium fails."""
        try:
            return do()
        except OSError as err:
            self.meter.add("offload_tier_errors", blocks)
            now = time.monotonic()
            if now - self._complained.get(tier.name, float("-inf")) >= COMPLAIN_EVERY:
                self._complained[tier.name] = now
                log.error("rank %d: offloading tier %s fails, blocks are skipped: %s", self.role.rank, tier.name, err)
            return None

    # -- the rest ------------------------------------------------------------------------------------------------

    def take_facts(self) -> WorkerFacts | None:
        """The facts behind the last poll."""
        if not self._facts:
            return None
        facts, self._facts = WorkerFacts(tuple(self._facts)), []
        return facts

    def shutdown(self) -> None:
        """Stop the threads, then unmap. Idempotent."""
        ended = [runner.close(LIMITS.end_thread) for runner in self._copying]
        for runner in self._on_disk:
            runner.close(LIMITS.end_disk)
        self._copying, self._on_disk = [], []
        for tier in self._tiers:
            tier.close()
        if self.tier is not None and all(ended):
            if self._copier is not None:
                self._copier.close()
            self.tier.close()
            self.tier = None

    def __repr__(self) -> str:
        return (
            f"OffloadWorker({self.role!r} stores={len(self._stores)} loads={len(self._loading)} "
            f"saves={len(self._saves)} fetches={len(self._fetches)} {self.tier!r})"
        )
