"""Jobs of one kind on one rank: what waits, what runs, what came of it. Time is an argument, nothing is touched.

Rules
1. A job ends once. WAITING -> RUNNING -> ended; WAITING -> ended when it is given up.
2. ``attached`` jobs read or write the engine's cache or a host slot all the while they run: such a job cannot end
   before its thread has returned, whatever the deadline (C6); it is told to be in vain, and ends failed.
3. Detached jobs (disk) end at their deadline, however long their thread hangs (C7), and what it returns later is
   ignored. So they write a slot only after :meth:`JobTable.land`, and trust what they read of one only if the job
   stands after it.
4. What waits is bounded; a job beyond the bound ends failed at once.
5. Every method is atomic; threads call :meth:`~JobTable.take`, :meth:`~JobTable.land` and :meth:`~JobTable.returned`,
   the step thread everything else.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from typing import Generic, TypeVar

import msgspec

__all__ = ["Ended", "JobTable"]

J = TypeVar("J")
#: (job, part of it)
Number = tuple[int, int]


class Ended(msgspec.Struct, frozen=True):
    """Job ``number`` is over."""

    number: Number
    fine: bool


class _Job(Generic[J]):
    __slots__ = ("attached", "deadline", "vain", "work")

    def __init__(self, work: J, deadline: float, attached: bool) -> None:
        self.work = work
        self.deadline = deadline
        self.attached = attached
        self.vain = False


class JobTable(Generic[J]):
    """At most ``limit`` jobs wait."""

    def __init__(self, limit: int, *, attached: bool) -> None:
        self._limit = limit
        self._attached = attached
        self._waiting: OrderedDict[Number, _Job[J]] = OrderedDict()
        self._running: dict[Number, _Job[J]] = {}
        self._ended: list[Ended] = []
        self._closed = False
        self._changed = threading.Condition()

    # -- the step thread -----------------------------------------------------------------------------------------

    def add(self, number: Number, work: J, deadline: float) -> None:
        """A new job."""
        self.add_all([(number, work)], deadline)

    def add_all(self, jobs: Iterable[tuple[Number, J]], deadline: float) -> None:
        """New jobs; threads are woken once for all of them, since each waking takes the interpreter from the caller."""
        with self._changed:
            for number, work in jobs:
                if self._closed or len(self._waiting) >= self._limit:
                    self._ended.append(Ended(number, False))
                else:
                    self._waiting[number] = _Job(work, deadline, self._attached)
            self._changed.notify_all()

    def claim(self, number: Number) -> J | None:
        """Run a job that waits here and now: the caller is its thread. None: it does not wait."""
        with self._changed:
            return self._start(number) if number in self._waiting else None

    def wait(self, number: Number, seconds: float) -> bool:
        """Until it does not run any more. False: it still does, and will end failed."""
        with self._changed:
            if self._changed.wait_for(lambda: number not in self._running, seconds):
                return True
            self._running[number].vain = True
            return False

    def settle(self, number: Number, seconds: float) -> None:
        """Until it has ended, or not longer than that."""
        with self._changed:
            self._changed.wait_for(lambda: number not in self._waiting and number not in self._running, seconds)

    def expire(self, now: float) -> None:
        """Judge deadlines; call after results were taken (C11)."""
        with self._changed:
            for number in [n for n, job in self._waiting.items() if job.deadline <= now]:
                del self._waiting[number]
                self._ended.append(Ended(number, False))
            for number in [n for n, job in self._running.items() if job.deadline <= now]:
                self._give_up(number)

    def _give_up(self, number: Number) -> None:
        if self._running[number].attached:
            self._running[number].vain = True
        else:
            del self._running[number]
            self._ended.append(Ended(number, False))

    def take_ended(self) -> list[Ended]:
        """Jobs that ended since the last call. Consumes."""
        with self._changed:
            ended, self._ended = self._ended, []
            return ended

    def close(self) -> None:
        """Give up what waits and what is detached; threads find nothing more to take."""
        with self._changed:
            self._closed = True
            self._ended += [Ended(number, False) for number in self._waiting]
            self._waiting.clear()
            for number in list(self._running):
                self._give_up(number)
            self._changed.notify_all()

    def __len__(self) -> int:
        return len(self._waiting) + len(self._running)

    # -- job threads ---------------------------------------------------------------------------------------------

    def take(self, seconds: float) -> tuple[Number, J] | None:
        """The oldest waiting job, which runs from now on. None: nothing came in time, or the table is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed, seconds)
            if self._closed or not self._waiting:
                return None
            number = next(iter(self._waiting))
            return number, self._start(number)

    def _start(self, number: Number) -> J:
        job = self._running[number] = self._waiting.pop(number)
        return job.work

    def land(self, number: Number) -> bool:
        """A detached job is about to touch its slot. False: it was given up, hands off."""
        with self._changed:
            job = self._running.get(number)
            if job is None:
                return False
            job.attached = True
            return not job.vain

    def stands(self, number: Number) -> bool:
        """The job was not given up so far: what it read of its slot until now is the slot's."""
        with self._changed:
            return number in self._running

    def returned(self, number: Number, fine: bool) -> None:
        """A job's thread is done with it."""
        with self._changed:
            job = self._running.pop(number, None)
            if job is not None:
                self._ended.append(Ended(number, fine and not job.vain))
            self._changed.notify_all()

    @property
    def closed(self) -> bool:
        return self._closed

    def __repr__(self) -> str:
        return f"JobTable(waiting={len(self._waiting)} running={len(self._running)})"
