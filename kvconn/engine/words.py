"""One pipe's end, for whoever must not wait for the other.

Rules
1. An engine that takes steps, beats for its readers and judges leases does none of that while it waits in a pipe. What
   it says waits here instead until its driver listens; of statistics the newest alone does.
2. What waits is bounded by what the driver asked for: two events of a request, an answer of an order.
3. Whoever has to be sure that it was sent says until when it waits.
"""

from __future__ import annotations

import select
import time
from collections import deque
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

__all__ = ["Words", "room"]

#: events in one message: what is written has to fit into a pipe that has room
_AT_ONCE = 16


def room(pipe: Connection, timeout: float = 0.0) -> bool:
    """Whether a message of 100 KB can be written without waiting, or the other end is gone; waits at most ``timeout``
    seconds for it."""
    asked = select.poll()
    asked.register(pipe.fileno(), select.POLLOUT)
    return bool(asked.poll(max(0.0, timeout) * 1000))


class Words:
    """What one end says, in order. Not thread-safe. Raises OSError where the other end is gone."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._queue: deque[tuple[str, Any]] = deque()
        self._stats: object = None

    @property
    def waiting(self) -> bool:
        """Something is still to be sent."""
        return bool(self._queue) or self._stats is not None

    def say(self, kind: str, value: object) -> None:
        self._queue.append((kind, value))
        self.flush()

    def events(self, events: Sequence[object]) -> None:
        for at in range(0, len(events), _AT_ONCE):
            self.say("events", list(events[at : at + _AT_ONCE]))

    def stats(self, stats: object) -> None:
        """In place of those that still wait, behind everything else."""
        self._stats = stats
        self.flush()

    def flush(self) -> None:
        """Send what there is room for."""
        while self.waiting and room(self._pipe):
            self._next()

    def last(self, kind: str, value: object, timeout: float) -> bool:
        """Behind all else, statistics too, and wait until it is sent, at most so many seconds. False: it was not."""
        if self._stats is not None:
            self._queue.append(("stats", self._stats))
            self._stats = None
        self.say(kind, value)
        deadline = time.monotonic() + timeout
        while self.waiting and room(self._pipe, deadline - time.monotonic()):
            self._next()
        return not self.waiting

    def _next(self) -> None:
        if self._queue:
            self._pipe.send(self._queue.popleft())
        else:
            stats, self._stats = self._stats, None
            self._pipe.send(("stats", stats))

    def __repr__(self) -> str:
        return f"Words(waiting={len(self._queue) + (self._stats is not None)})"
