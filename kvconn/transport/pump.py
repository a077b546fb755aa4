"""The pump: a thread that progresses an agent while its owner does something else, and waits in between (F2).

Rules
1. How long is :class:`~kvconn.transport.pacing.Pacer`'s to say; this module waits, and looks.
2. It holds its owner only for one round, so that a forgotten one can end.
3. It waits on UCX's own event sets, which nobody hands out: they are the epoll descriptors that appear when an agent is
   made. One of somebody else's among them costs a look now and then. Ours are copies, so that their numbers stay ours.
   Where they cannot all be waited on, none is: the pump looks as one that has none.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import threading
import time
import weakref
from collections.abc import Iterable
from typing import Final, Protocol

from kvconn.config import LIMITS
from kvconn.transport.pacing import Hearing, Pacer, Round, Wait

__all__ = ["Owner", "Pump", "event_sets"]

NAME: Final = "kvconn-nixl-pump"
#: what ``select`` can wait on
_SELECT_MAX: Final = 1024
_FDS: Final = "/proc/self/fd"
_EPOLL: Final = "anon_inode:[eventpoll]"
#: where a network card shows; what comes through one is on no socket
_CARDS: Final = "/sys/class/infiniband"


class Owner(Protocol):
    """Whose agent it is."""

    def progress_once(self) -> Round:
        """Never raises."""

    @property
    def posted(self) -> int:
        """Reads under way."""


def event_sets() -> frozenset[int]:
    """This process's epoll descriptors; none where what comes in need not be on a socket, or nothing can be known."""
    found: set[int] = set()
    with contextlib.suppress(OSError):
        if os.path.isdir(_CARDS) and os.listdir(_CARDS):
            return frozenset()
    with contextlib.suppress(OSError):
        for name in os.listdir(_FDS):
            with contextlib.suppress(OSError):  # this directory's own
                if os.readlink(f"{_FDS}/{name}") == _EPOLL:
                    found.add(int(name))
    return frozenset(found)


class Pump:
    """Runs until :meth:`close`, or until ``owner`` is forgotten. Raises OSError or RuntimeError where there is no
    descriptor or no thread left, and leaves none behind."""

    def __init__(self, owner: Owner, interval: float, sets: Iterable[int]) -> None:
        self._ears = _Ears(sets)
        self.pacer = Pacer(interval, self._ears.any)
        self._closing = False
        self._thread = threading.Thread(target=_run, args=(self, weakref.ref(owner)), name=NAME, daemon=True)
        try:
            self._thread.start()
        except RuntimeError:
            self._ears.close()
            raise

    def moved(self) -> None:
        """Something was posted that is not done: look now, and often for a while."""
        self.pacer.moved(time.monotonic())
        self._ears.ring()

    def close(self) -> None:
        """Returns when the thread has ended, which is one round away. Idempotent."""
        self._closing = True
        self._ears.ring()
        if self._thread is not threading.current_thread():
            self._thread.join(LIMITS.end_thread)

    def _round(self, owner: Owner, ready: bool) -> Wait:
        round, now = owner.progress_once(), time.monotonic()
        if round is Round.FOUND:
            self.pacer.moved(now)
        wait = self.pacer.next(round, ready, owner.posted, now, self._ears.heard)
        if wait.listen and wait.seconds:
            self._ears.tune(now)
        return wait


def _run(pump: Pump, ref: weakref.ref[Owner]) -> None:
    ready = False
    try:
        while not pump._closing:
            owner = ref()
            if owner is None:
                return
            wait = pump._round(owner, ready)
            del owner
            ready = pump._ears.wait(wait)
    finally:
        pump._ears.close()


class _Ears:
    """What the thread waits on: the event sets, and a bell for whoever has something for it."""

    def __init__(self, sets: Iterable[int]) -> None:
        self._open = threading.Lock()
        self._sets: dict[int, Hearing] = {}
        self._heard: set[int] = set()
        self._bell = -1
        self._poll = select.epoll()
        try:
            self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            self._poll.register(self._bell, select.EPOLLIN)
        except OSError:
            self.close()
            raise
        try:
            for fd in sets:
                self._copy(fd)
        except OSError:  # no descriptor, watch or memory left
            self._forget_sets()
        self.any = bool(self._sets)

    def _copy(self, fd: int) -> None:
        """Listen to this set, if it is one still: since it was found, somebody else's may have gone."""
        try:
            copy = os.dup(fd)
        except OSError as err:
            if err.errno == errno.EBADF:
                return
            raise
        self._sets[copy] = Hearing()
        if os.readlink(f"{_FDS}/{copy}") != _EPOLL:  # the number is another file's now, whose peer must see it close
            del self._sets[copy]
            os.close(copy)
            return
        self._poll.register(copy, select.EPOLLIN)
        self._heard.add(copy)

    def _forget_sets(self) -> None:
        for fd in self._heard:
            self._poll.unregister(fd)  # closing a copy ends no watch
        for fd in self._sets:
            os.close(fd)
        self._sets, self._heard = {}, set()

    def ring(self) -> None:
        with self._open:
            if self._bell >= 0:
                os.eventfd_write(self._bell, 1)

    @property
    def heard(self) -> bool:
        """Is an event set listened to?"""
        return bool(self._heard)

    def tune(self, now: float) -> None:
        """Before a wait: leave out what is ready all the same."""
        ready = {fd for fd, _ in self._poll.poll(0)}
        for fd, hearing in self._sets.items():
            listen = hearing.looked(fd in ready, now)
            if listen and fd not in self._heard:
                with contextlib.suppress(OSError):  # no watch left: tried again before the next wait
                    self._poll.register(fd, select.EPOLLIN)
                    self._heard.add(fd)
            elif not listen and fd in self._heard:
                self._poll.unregister(fd)
                self._heard.remove(fd)

    def wait(self, wait: Wait) -> bool:
        """Is an event set ready when it is over?"""
        heard = self._poll.fileno() if wait.listen else self._bell
        if wait.seconds and heard < _SELECT_MAX:
            select.select([heard], [], [], wait.seconds)
        elif wait.seconds and wait.listen:
            self._poll.poll(wait.seconds)  # in whole milliseconds
        else:
            time.sleep(wait.seconds)
        ready = False
        for fd, _ in self._poll.poll(0):
            if fd != self._bell:
                ready = True
            else:
                os.eventfd_read(fd)
        return ready

    def close(self) -> None:
        with self._open:
            self._poll.close()
            for fd in (*self._sets, self._bell):
                if fd >= 0:
                    os.close(fd)
            self._bell, self._sets, self._heard = -1, {}, set()
