"""The scheduler half: what lies where, what is stored next, who loads what. The ranks obey.

Rules
1. A full block that a step computes is stored by that step, if it is not known and there is room; else it is skipped
   and counted. Nothing waits for a store unless the operator asked for ``hold``.
2. A block is offered when every rank has stored its share. What is on its way is waited for, up to ``lookup``
   seconds; then the request takes what is there (C7). An offer is not held beyond its step (C10).
3. A load is a receive life over all ranks, a hold a send life; both go through one gate (C1, C3, C13). A load whose
   blocks were evicted between offer and allocation fails at once; a request whose load failed is offered nothing
   more, so that a bad block cannot keep it from running.
4. Stores whose blocks were given to somebody are named to the ranks before the step that may write them.
5. What every rank stored is written to the secondary tiers; what only they have is first fetched into a host slot,
   while the request waits in the queue and holds nothing.
6. With ``hold`` on replicated PCP only the canonical replica stores, so nothing can be loaded there, and nothing is
   offered.
Time is an argument.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from kvconn.base import BlockIds, Fact, FinishReason, KVBlocks, KVCacheView, RequestView, StepRequest, StepView
from kvconn.config import LIMITS, ConnectorConfig, OffloadSettings
from kvconn.geometry import blocks_for, is_replicated
from kvconn.ledger import CompletionGate, CompletionLedger, Emit
from kvconn.metrics import Meter
from kvconn.offload.book import Job, JobBook, Place
from kvconn.offload.events import BlockRemoved, BlockStored, EventLog
from kvconn.offload.index import HostIndex, Room
from kvconn.offload.lookups import Lookups
from kvconn.offload.metadata import GONE, JOBS, Fetch, Hold, Load, OffloadStep, Save, Store
from kvconn.offload.policy import make_policy
from kvconn.offload.requests import Content, Tracked
from kvconn.offload.tiers.base import MAX_KEY, SecondaryTier

__all__ = ["OffloadScheduler"]


class OffloadScheduler:
    """One engine's tiers. ``tiers`` are instances that only answer what is present."""

    def __init__(
        self,
        config: ConnectorConfig,
        settings: OffloadSettings,
        kv_cache: KVCacheView,
        tiers: Sequence[SecondaryTier] = (),
    ) -> None:
        self._limits = settings.kvconn
        self._prompt_only = settings.offload_prompt_only
        self._hold = settings.kvconn.hold
        self._offers = not (self._hold and is_replicated(config.parallel))
        self._ranks = range(config.parallel.world)
        self._size = kv_cache.block_size
        self._tiers = tuple(tiers)
        #: blocks of a save, at most
        self._together = max(1, min([LIMITS.save_bytes // kv_cache.block_bytes, *(tier.batch for tier in tiers)]))
        self.index = HostIndex(make_policy(settings.eviction_policy, settings.cpu_bytes_to_use // kv_cache.block_bytes))
        self.lookups = Lookups(tiers, LIMITS.lookups_max)
        self.book = JobBook(self._ranks)
        self.ledger = CompletionLedger()
        self._gate = CompletionGate(self.ledger)
        self.events = EventLog(self._size, LIMITS.events_max)
        self.meter = Meter()
        self._requests: dict[str, Tracked] = {}
        #: keys that a load life reads, by request
        self._loading: dict[str, tuple[bytes, ...]] = {}
        self._fetched: set[bytes] = set()
        self._given: set[Place] = set()
        self._saves: list[Save] = []
        self._fetches: list[Fetch] = []
        self._loads: list[Load] = []
        self._holds: list[Hold] = []

    # -- what could be loaded ------------------------------------------------------------------------------------

    def arrived(self, view: RequestView, now: float) -> None:
        """A request entered the queue: the disks are asked while it waits for its turn."""
        self._requests[view.id] = Tracked(view)
        if self._offers and self.lookups.usable(now) and self.lookups.roomy():
            keys = view.block_hashes()[: (view.n_total - 1) // self._size]
            unknown = next((at for at, key in enumerate(keys) if not self.index.stored(key)), len(keys))
            if unknown < len(keys):
                self.lookups.ask(view.id, keys[unknown:], now + 2 * self._limits.lookup)

    def match(self, view: RequestView, local_tokens: int, now: float) -> tuple[int | None, bool]:
        """Tokens beyond ``local_tokens`` that can be loaded; None: some are on their way, ask again."""
        tracked = self._requests.setdefault(view.id, Tracked(view))
        if not self._offers or tracked.refused or local_tokens % self._size:
            return 0, False
        first, beyond = local_tokens // self._size, (view.n_total - 1) // self._size
        ready, waiting, disk = self._walk(tracked, Content(view, self._size), range(first, beyond), now)
        if waiting:
            if tracked.waits(now, self._limits.lookup):
                return None, True
            if disk:
                self.meter.add("offload_lookups_timed_out")
                self.lookups.rest(now + self._limits.disk_rest)
        return ready * self._size, ready > 0

    def _walk(self, tracked: Tracked, content: Content, blocks: range, now: float) -> tuple[int, bool, bool]:
        """How many of ``blocks`` can be loaded now; whether more are on their way; whether from a disk."""
        ready, waiting, disk = 0, False, False
        for at, key in zip(blocks, content.hashes[blocks.start : blocks.stop], strict=False):
            if self.index.stored(key):
                self.index.offer(key)
                ready += not waiting
            elif self.index.writing(key):
                waiting = True
                disk |= self.book.is_open("fetch", key)
            elif self._from_disk(content, at, blocks.stop, now):
                waiting = disk = True
            else:
                break
        return ready, waiting, disk

    def _from_disk(self, content: Content, at: int, stop: int, now: float) -> bool:
        """True when a secondary tier is being asked for block ``at``, or is bringing it."""
        if not self.lookups.usable(now):
            return False
        id, key = content.view.id, content.hashes[at]
        found = self.lookups.answer(id, now)
        if found is None:
            # twice as long as the request waits: whoever waits in vain lets the disk rest
            self.lookups.ask(id, content.hashes[at:stop], now + 2 * self._limits.lookup)
            found = self.lookups.soon(id, now)
        if found is None:
            return True
        if key not in found or self.book.count("fetch") >= self._limits.fetches_max:
            return False
        room = self._reserve(key)
        if room is None:
            return False
        job = self.book.open("fetch", (key,), now, (content.about(at),))
        self._fetches.append(Fetch(job.name, job.n, key, room.slot))
        return True

    def _reserve(self, key: bytes) -> Room | None:
        room = self.index.reserve(key)
        if room is not None and room.evicted is not None:
            self._fetched.discard(room.evicted)
            self.events.removed((room.evicted,))
            self.meter.add("offload_evictions")
        return room

    # -- blocks were given ---------------------------------------------------------------------------------------

    def allocated(self, view: RequestView, blocks: KVBlocks, n_external: int, now: float) -> None:
        """An admission; ``n_external`` tokens behind the first ``blocks.hashed`` blocks are ours to load."""
        tracked = self._requests.setdefault(view.id, Tracked(view))
        self._given.update((group, block) for group, ids in enumerate(blocks.ids) for block in ids)
        if tracked.admit(view, blocks.ids):
            asked = (view.n_total - 1) // self._size - blocks.hashed[0]
            self._count("offload_blocks_asked", asked if self._offers else 0)
        self.lookups.forget(view.id)
        if n_external > 0:
            self._load(tracked, blocks, blocks_for(n_external, self._size), now)

    def _load(self, tracked: Tracked, blocks: KVBlocks, count: int, now: float) -> None:
        id, first = tracked.view.id, blocks.hashed[0]
        keys = tuple(tracked.view.block_hashes()[first : first + count])
        slots = [self.index.slot(key) for key in keys]
        n = self.ledger.open(id, "recv", {(): self._ranks}, now=now)
        if len(keys) < count or None in slots:
            self.meter.add("offload_loads_lost")
            self._loading[id] = ()
            self._loads.append(Load(id, n, lost=True))
            return
        for key in keys:
            self.index.pin(key)
            self.index.touch(key)
        fetched = self._fetched.intersection(keys)
        self._fetched -= fetched
        self._count("offload_hit_blocks_secondary", len(fetched))
        self._count("offload_hit_blocks_host", count - len(fetched))
        self._count("offload_tokens_loaded", count * self._size)
        tracked.loaded = range(first, first + count)
        self._loading[id] = keys
        parts = tuple(ids[at : at + count] for ids, at in zip(blocks.ids, blocks.hashed, strict=True))
        self._loads.append(Load(id, n, tuple(slot for slot in slots if slot is not None), parts))

    # -- a step --------------------------------------------------------------------------------------------------

    def step(self, view: StepView, now: float) -> OffloadStep:
        """Everything the ranks have to do with this step."""
        for id in view.preempted:
            if id in self._requests:
                self._requests[id].leave()
        for share in view.requests:
            self._given.update((group, block) for group, ids in enumerate(share.new_blocks) for block in ids)
        flush = self.book.stores_over(self._given)
        self._given.clear()
        stores = tuple(store for share in view.requests for store in self._stores_of(share, now))
        self.index.withdraw()
        step = OffloadStep(
            flush, stores, tuple(self._saves), tuple(self._fetches), tuple(self._loads), tuple(self._holds)
        )
        self._saves, self._fetches, self._loads, self._holds = [], [], [], []
        return step

    def _stores_of(self, share: StepRequest, now: float) -> list[Store]:
        """What of the blocks that ``share`` fills has to be stored."""
        tracked = self._requests.get(share.id)
        if tracked is None:
            return []
        tracked.extend(share.new_blocks)
        end = share.start + share.n
        limit = min(end, tracked.view.n_prompt) if self._prompt_only else end
        content = Content(tracked.view, self._size)
        todo = tracked.advance(limit // self._size)
        found = [self._store(tracked, content, at, now) for at in todo if at < len(content.hashes)]
        return [store for store in found if store is not None]

    def _store(self, tracked: Tracked, content: Content, at: int, now: float) -> Store | None:
        key = content.hashes[at]
        if self.index.stored(key) or self.index.writing(key):
            self.index.touch(key)
            self.meter.add("offload_blocks_deduplicated")
            return None
        room = self._reserve(key) if self.book.count("store") < self._limits.stores_max else None
        if room is None:
            self.meter.add("kv_offload_stores_skipped")
            return None
        blocks = tuple(ids[at] for ids in tracked.table)
        places = tuple(enumerate(blocks))
        job = self.book.open("store", (key,), now, (content.about(at),), places, tracked.view.id)
        return Store(job.name, job.n, blocks, room.slot)

    def finished(self, view: RequestView, blocks: BlockIds, reason: FinishReason, now: float) -> bool:
        """A request ended. Its blocks may go, unless the operator wants it held until they are stored."""
        self._requests.pop(view.id, None)
        self.lookups.forget(view.id)
        if not self._hold:
            return False
        n = self.ledger.open(view.id, "send", {(): self._ranks}, now=now)
        self._holds.append(Hold(view.id, n, self.book.stores_of(view.id)))
        return True

    # -- what came of it -----------------------------------------------------------------------------------------

    def reports(
        self, sent: Iterable[str], received: Iterable[str], failed: Iterable[str], facts: Iterable[Fact], now: float
    ) -> Emit:
        """Take the ranks' words; filter the engine's sets (veto, never originate)."""
        lives, jobs, gone = [], [], []
        for fact in facts:
            if fact.child == JOBS:
                jobs.append(msgspec.structs.replace(fact, child=()))
            elif fact.child == GONE:
                gone.append(fact)
            else:
                lives.append(fact)
                if fact.direction == "recv" and fact.state == "failed" and fact.id in self._requests:
                    self._requests[fact.id].refused = True
                    self._requests[fact.id].leave()
        stored = [job for job, fine in self.book.report(jobs) if self._settle(job, fine)]
        for fact in gone:  # after what was stored: a tier does not tell what came back
            self._gone(fact)
        self._save(stored, now)
        emit = self._gate.reports(sent, received, failed, lives)
        for id in [id for id in self._loading if self.ledger.get(id, "recv") is None]:
            for key in self._loading.pop(id):
                self.index.unpin(key)
        return emit

    def _gone(self, fact: Fact) -> None:
        tier, _, key = fact.id.rpartition(":")
        self.events.removed_by_rank(bytes.fromhex(key), tier)

    def _settle(self, job: Job, fine: bool) -> bool:
        """A job is over on every rank. True: its block is stored now, and may be saved."""
        if job.kind == "save":
            self._saved(job, fine)
            return False
        (key,), (about,) = job.keys, job.abouts
        if not fine:
            self.index.abandon(key)
            if job.kind == "fetch":
                self.lookups.missed(key)
                self.meter.add("offload_fetches_failed")
            else:
                self.meter.add("kv_offload_stores_skipped")
            return False
        if not self.index.commit(key):
            return False
        self.events.stored(key, about, "host")
        if job.kind == "fetch":
            self._fetched.add(key)
        self.meter.add("offload_blocks_fetched" if job.kind == "fetch" else "offload_blocks_stored")
        return job.kind == "store"

    def _saved(self, job: Job, fine: bool) -> None:
        for key in job.keys:
            self.index.unpin(key)
        self.meter.add("offload_blocks_saved" if fine else "offload_saves_failed", len(job.keys))
        for tier in self._tiers if fine else ():
            for key, about in zip(job.keys, job.abouts, strict=True):
                self.events.stored(key, about, tier.name)

    def _save(self, stored: Sequence[Job], now: float) -> None:
        """Write to the secondary tiers what ``stored`` brought, some blocks at once."""
        wanted = [job for job in stored if self._tiers and len(job.keys[0]) <= MAX_KEY]
        room = max(0, self._limits.saves_max - self.book.count("save"))
        self._count("offload_saves_skipped", len(wanted) - room)
        for at in range(0, min(len(wanted), room), self._together):
            batch = wanted[at : min(at + self._together, room)]
            keys = tuple(job.keys[0] for job in batch)
            slots = tuple(slot for key in keys if (slot := self.index.slot(key)) is not None)
            assert len(slots) == len(keys), "stored a moment ago"
            for key in keys:
                self.index.pin(key)
            job = self.book.open("save", keys, now, tuple(job.abouts[0] for job in batch))
            self._saves.append(Save(job.name, job.n, keys, slots))

    def _count(self, name: str, amount: int) -> None:
        if amount > 0:
            self.meter.add(name, amount)

    # -- the rest ------------------------------------------------------------------------------------------------

    def busy(self) -> bool:
        """Jobs need steps to be answered in."""
        return len(self.book) > 0

    def take_events(self) -> list[BlockStored | BlockRemoved]:
        """KV events since the last call. Consumes."""
        return self.events.take()

    def reset(self) -> bool:
        """The model changed: forget what is stored. Files are not read or written again by this engine."""
        gone, clean = self.index.reset()
        self.events.removed(gone)
        self._fetched.clear()
        if self._tiers:
            self.lookups.rest(float("inf"))
            self._tiers = ()
        return clean

    def explain(self, now: float) -> list[str]:
        """One line per load and hold that is owed, and per job that is overdue."""
        lives = [life.describe({(): "OffloadingConnector"}, now) for life in self.ledger.pending() if life.owed]
        return lives + self.book.overdue(now, LIMITS.stall_after)

    def shutdown(self) -> None:
        """Stop the look-ups. Idempotent."""
        self.lookups.close()

    def __repr__(self) -> str:
        return f"OffloadScheduler({self.ledger!r} {self.book!r} {self.index!r})"
