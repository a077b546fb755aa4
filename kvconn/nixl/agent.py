"""The NIXL agent of one worker: made, made anew, gone.

Rules
1. While there is none, ``transport`` is None: loads fail, and it is tried again (C7).
2. Destroying it is the only way to end what is posted (F1); whoever has something posted is told by the worker.
Time is an argument, in seconds of the worker's clock.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence

from kvconn.errors import TransportError
from kvconn.transport.base import MemoryRegion, Transport

__all__ = ["Agent"]

log = logging.getLogger("kvconn.nixl")
#: seconds until a NIXL agent that could not be made is tried again
REOPEN = 1.0


class Agent:
    """``make`` makes one, again and again. ``rank``: whose, for the log."""

    def __init__(self, make: Callable[[], Transport], rank: int) -> None:
        self.transport: Transport | None = None
        self._make = make
        self._memory: tuple[MemoryRegion, ...] = ()
        self._rank = rank
        self._reopen_at: float | None = None

    def open(self, memory: Sequence[MemoryRegion]) -> None:
        """The first one; it and all that follow register ``memory``. Raises TransportError."""
        self._memory = tuple(memory)
        self._open()

    def _open(self) -> None:
        self.transport = self._make()
        self.transport.register(self._memory)

    def destroy(self) -> None:
        """Nothing of ours lands any more when this returns (F1). Idempotent."""
        if self.transport is not None:
            self.transport.close()
            self.transport = None

    def reopen(self, now: float) -> bool:
        """Make a new one; False when that failed, and it is tried again."""
        try:
            self._open()
        except TransportError as err:
            self.destroy()  # made, but without its memory: it holds threads and sockets
            self._reopen_at = now + REOPEN
            log.error("rank %d: no new NIXL agent, next try in %g s: %s", self._rank, REOPEN, err)
            return False
        self._reopen_at = None
        return True

    @property
    def next_due(self) -> float:
        """When it is tried again; infinity while there is one."""
        return math.inf if self._reopen_at is None else self._reopen_at

    def due(self, now: float) -> bool:
        """Is it time to try again?"""
        return now >= self.next_due
