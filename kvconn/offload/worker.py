"""The worker half: copies held requests' blocks to the host tier, and reports each held request once.

Contract this half keeps
- The canonical replica reports when the request's blocks are stored, were stored before, were skipped, or the deadline
  passed and no copy of it runs; at the poll of the announcing step when there is nothing to copy.
- A replicated rank (PCP > 0) stores nothing and reports at the poll of the announcing step (C1).

Rules
1. One poll: :meth:`OffloadWorker.poll` (C5). In it copies that returned are taken in before deadlines are judged (C11).
2. Copies run on a small pool; state changes only on the step thread. A pool thread reads the cache, writes reserved
   slots, and answers through one queue.
3. What cannot be stored is skipped and counted: holding a request costs the engine's memory, losing a stored block
   costs a recomputation.
Time is an argument, in seconds of the worker's clock.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import queue
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from kvconn.base import Fact, LayerView, TransferResults, WorkerFacts
from kvconn.config import OffloadSettings
from kvconn.errors import ConfigError
from kvconn.geometry import RankRole, Region, regions_of
from kvconn.metrics import Meter
from kvconn.offload.jobs import Copy, Ended, StoreJob, StoreJobs
from kvconn.offload.metadata import OffloadStep, StoreSpec
from kvconn.offload.tiers.host import HostTier

__all__ = ["OffloadWorker"]

log = logging.getLogger("kvconn.offload")

#: copying threads of one rank
THREADS = 2
#: blocks that may wait to be copied
MAX_WAITING = 4096


class OffloadWorker:
    """One rank. Only a rank that stores has a tier and threads."""

    def __init__(self, settings: OffloadSettings, role: RankRole) -> None:
        self.role = role
        self.meter = Meter()
        self.tier: HostTier | None = None
        self._settings = settings
        self._regions: tuple[Region, ...] = ()
        self._offsets: tuple[int, ...] = ()
        self._jobs = StoreJobs(THREADS, MAX_WAITING)
        self._pool: ThreadPoolExecutor | None = None
        self._returned: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        self._newest = 0
        self._facts: list[Fact] = []

    def register(self, layers: Mapping[str, LayerView]) -> None:
        """The cache of this rank. Raises ConfigError for memory this version cannot copy."""
        if self.role.replicates:
            return
        self._regions = regions_of(layers.values())
        problems = [
            f"layer {layer.name}: this version stores full attention in DRAM, got {layer.kind} in {layer.mem_type}"
            for layer in layers.values()
            if layer.kind != "full" or layer.mem_type != "DRAM"
        ]
        if problems:
            raise ConfigError(problems)
        self._offsets = tuple(itertools.accumulate((r.length for r in self._regions), initial=0))
        self.tier = HostTier(self._settings.cpu_bytes_to_use, self._offsets[-1])
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix=f"kvconn-offload-{self.role.rank}")

    # -- a step --------------------------------------------------------------------------------------------------

    def bind(self, step: OffloadStep, now: float) -> None:
        """This step's announcements. An announcement bound before changes nothing."""
        for spec in step.stores:
            if spec.n > self._newest:
                self._newest = spec.n
                self._jobs.add(spec.id, spec.n, self._copies(spec), now + self._settings.kvconn.store)
        self._start()

    def _copies(self, spec: StoreSpec) -> list[Copy]:
        """What of ``spec`` has to be copied, with a reserved slot for each."""
        tier, copies = self.tier, list[Copy]()
        if tier is None:
            return copies
        known = skipped = 0
        room = self._jobs.room()
        for k, key in enumerate(spec.keys):
            if tier.touch(key):
                known += 1
                continue
            address = tier.reserve(key) if len(copies) < room else None
            if address is None:
                skipped += 1
            else:
                copies.append(Copy(key, tuple(ids[k] for ids in spec.blocks), address))
        self._count("offload_blocks_deduplicated", known)
        self._count("offload_blocks_skipped", skipped)
        return copies

    def _start(self) -> None:
        for job in self._jobs.start():
            assert self._pool is not None, "a job with copies on a rank without a tier"
            self._pool.submit(self._copy, job)

    def _copy(self, job: StoreJob) -> None:
        """On a pool thread: copy until done or told to stop, then say how far it came."""
        written = 0
        try:
            for copy in job.copies:
                if job.stop:
                    break
                for region, offset in zip(self._regions, self._offsets, strict=False):
                    source = region.base + copy.blocks[region.group] * region.stride
                    ctypes.memmove(copy.address + offset, source, region.length)
                written += 1
        except Exception:  # a thread of ours must answer, or the request is held for ever
            log.exception("rank %d: storing blocks of %s", self.role.rank, job.id)
        self._returned.put((job.n, written))

    # -- the poll ------------------------------------------------------------------------------------------------

    def poll(self, now: float) -> TransferResults:
        """Held requests this rank is done with since the last poll. Consumes (C5)."""
        self._drain()
        self._jobs.expire(now)
        self._start()
        sent = frozenset(ended.id for ended in self._settle())
        return TransferResults(finished_sending=sent)

    def _drain(self) -> None:
        while True:
            try:
                n, written = self._returned.get_nowait()
            except queue.Empty:
                return
            self._jobs.returned(n, written)

    def _settle(self) -> list[Ended]:
        ended = self._jobs.take_ended()
        for job in ended:
            self._keep(job)
            self._facts.append(Fact(job.id, "send", job.n, self.role.rank, "done"))
        return ended

    def _keep(self, job: Ended) -> None:
        if self.tier is None:
            return
        for copy in job.written:
            self.tier.commit(copy.key)
        for copy in job.unwritten:
            self.tier.abandon(copy.key)
        self._count("offload_blocks_stored", len(job.written))
        self._count("offload_bytes_stored", len(job.written) * self.tier.block_bytes)
        self._count("offload_blocks_skipped", len(job.unwritten))

    def _count(self, name: str, amount: int) -> None:
        if amount:
            self.meter.add(name, amount)

    def take_facts(self) -> WorkerFacts | None:
        """The facts behind the sets of the last poll."""
        if not self._facts:
            return None
        facts, self._facts = WorkerFacts(tuple(self._facts)), []
        return facts

    def shutdown(self) -> None:
        """Stop copying, join the threads, then unmap. Idempotent."""
        self._jobs.stop()
        if self._pool is not None:
            self._pool.shutdown(wait=True)
            self._pool = None
        if self.tier is not None:
            self.tier.close()
            self.tier = None

    def __repr__(self) -> str:
        return f"OffloadWorker({self.role!r} {self._jobs!r} {self.tier!r})"
