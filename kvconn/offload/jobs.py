"""Store jobs of one rank: one per held request. Pure; time is an argument.

Rules
1. A job ends once: when its copy has returned, or at once when there is nothing to copy, or when it is given up before
   its copy began. While its copy runs it cannot end, whatever the deadline (C6): somebody reads the request's blocks.
2. At its deadline a waiting job is given up; a running one is told to stop after the block it is at (C7).
3. Waiting copies are bounded in blocks; a job beyond the bound is given up at once.
Deadlines are seconds of the worker's clock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

import msgspec

__all__ = ["Copy", "Ended", "StoreJob", "StoreJobs"]


class Copy(msgspec.Struct, frozen=True):
    """One block to copy: ``blocks`` has its id per cache group, ``address`` is where it goes."""

    key: bytes
    blocks: tuple[int, ...]
    address: int


class StoreJob:
    """A held request's copies. ``stop`` is the only word to a running copy, read between blocks."""

    __slots__ = ("copies", "deadline", "id", "n", "stop")

    def __init__(self, id: str, n: int, copies: tuple[Copy, ...], deadline: float) -> None:
        self.id = id
        self.n = n
        self.copies = copies
        self.deadline = deadline
        self.stop = False


class Ended(msgspec.Struct, frozen=True):
    """A job that ended: the blocks it wrote and those it did not."""

    id: str
    n: int
    written: tuple[Copy, ...] = ()
    unwritten: tuple[Copy, ...] = ()


class StoreJobs:
    """At most ``parallel`` copies run, at most ``max_waiting`` blocks wait."""

    def __init__(self, parallel: int, max_waiting: int) -> None:
        self._parallel = parallel
        self._max_waiting = max_waiting
        self._waiting: OrderedDict[int, StoreJob] = OrderedDict()
        self._waiting_blocks = 0
        self._running: dict[int, StoreJob] = {}
        self._ended: list[Ended] = []

    def room(self) -> int:
        """Blocks that may still be queued."""
        return max(0, self._max_waiting - self._waiting_blocks)

    def add(self, id: str, n: int, copies: Iterable[Copy], deadline: float) -> None:
        """A held request; without copies it ends at once."""
        job = StoreJob(id, n, tuple(copies), deadline)
        if not job.copies or len(job.copies) > self.room():
            self._ended.append(Ended(id, n, unwritten=job.copies))
            return
        self._waiting[n] = job
        self._waiting_blocks += len(job.copies)

    def start(self) -> list[StoreJob]:
        """Jobs whose copies begin now."""
        started: list[StoreJob] = []
        while self._waiting and len(self._running) < self._parallel:
            n, job = self._waiting.popitem(last=False)
            self._waiting_blocks -= len(job.copies)
            self._running[n] = job
            started.append(job)
        return started

    def returned(self, n: int, written: int) -> None:
        """Job ``n``'s copy is over; its first ``written`` blocks are in place."""
        job = self._running.pop(n)
        self._ended.append(Ended(job.id, n, job.copies[:written], job.copies[written:]))

    def expire(self, now: float) -> None:
        """Judge deadlines; call after what returned was taken in (C11)."""
        for n in [n for n, job in self._waiting.items() if job.deadline <= now]:
            self._give_up(n)
        for job in self._running.values():
            if job.deadline <= now:
                job.stop = True

    def stop(self) -> None:
        """Give up what waits, and tell what runs to stop."""
        for n in list(self._waiting):
            self._give_up(n)
        for job in self._running.values():
            job.stop = True

    def _give_up(self, n: int) -> None:
        job = self._waiting.pop(n)
        self._waiting_blocks -= len(job.copies)
        self._ended.append(Ended(job.id, n, unwritten=job.copies))

    def take_ended(self) -> list[Ended]:
        """Jobs that ended since the last call. Consumes."""
        ended, self._ended = self._ended, []
        return ended

    def __len__(self) -> int:
        return len(self._waiting) + len(self._running)

    def __repr__(self) -> str:
        return f"StoreJobs(waiting={len(self._waiting)} running={len(self._running)})"
