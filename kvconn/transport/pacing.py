"""When the pump looks next. Pure: what a round found and the time come in, how to wait goes out.

Rules
1. For ``ACTIVE_FOR`` after a post or a notification it only yields; then it waits ``interval`` while reads are posted;
   when nothing is, longer and longer.
2. It waits on UCX's sockets where they are known (*listening*), so that what a peer sends ends the wait. Then it may
   wait ``IDLE_LISTENING``, else ``IDLE``.
3. It does not listen to what it did not look at: not while a caller has the agent, nor after trouble.
4. Sockets are believed for as long as they are true. What is found ``UNTRUE`` times with nothing announced came another
   way (shared memory, a network card): from then on the pump waits as one that does not listen.
5. Sockets that stay ready for ``CROWDED_AFTER`` with nothing found do not keep it from waiting ``interval``.
"""

from __future__ import annotations

import enum
from typing import Final, NamedTuple

__all__ = ["Pacer", "Round", "Wait"]

#: at 1 ms an idle agent that does not listen costs one to a few percent of a core (F2)
IDLE: Final = 1e-3
#: what is not on a socket waits for this long at most: the first contact over a network card
IDLE_LISTENING: Final = 10e-3
#: yielding for the whole of a 128 MiB tcp read was no faster, and a read from a stopped peer would burn a core
ACTIVE_FOR: Final = 2e-3
#: how long the pump stays out of a caller's way; the caller progresses the agent itself
STAND_BACK: Final = 100e-6
#: after the agent refused to progress, which is not expected at all
TROUBLE: Final = 50e-3
UNTRUE: Final = 3
CROWDED_AFTER: Final = 1.0
GROWTH: Final = 1.1


class Round(enum.Enum):
    """What one progress came to."""

    NOTHING = "nothing"
    FOUND = "found"
    #: a caller has the agent
    BUSY = "busy"
    TROUBLE = "trouble"


class Wait(NamedTuple):
    """So long at most; less when a socket is ready and the pump listens."""

    seconds: float
    listen: bool


class Pacer:
    """One pump's. ``listening``: there are sockets to wait on."""

    def __init__(self, interval: float, listening: bool) -> None:
        self._interval = interval
        self._longest = max(interval, IDLE_LISTENING if listening else IDLE)
        self._listening = listening
        self._active_until = 0.0
        self._last = 0.0
        self._untrue = 0
        self._ready_since: float | None = None

    @property
    def listening(self) -> bool:
        """Are the sockets believed?"""
        return self._listening

    def moved(self, now: float) -> None:
        """Something was posted or came in."""
        self._active_until = now + ACTIVE_FOR

    def next(self, round: Round, ready: bool, posted: int, now: float) -> Wait:
        """How to wait after this round. ``ready``: a socket was, when the wait before it ended."""
        if round is Round.BUSY:
            return Wait(STAND_BACK, False)
        if round is Round.TROUBLE:
            return Wait(TROUBLE, False)
        if round is Round.FOUND:
            self._judge(ready)
        if self._crowded(ready and round is Round.NOTHING, now):
            return Wait(self._interval, False)
        if now < self._active_until:
            self._last = 0.0
        elif posted:
            self._last = self._interval
        else:
            self._last = min(max(self._interval, self._last * GROWTH), self._longest)
        return Wait(self._last, self._listening)

    def _judge(self, ready: bool) -> None:
        """Rule 4. After a short wait it proves nothing: it may have come between the wait's end and the look."""
        if ready:
            self._untrue = 0
        elif self._listening and self._last > IDLE:
            self._untrue += 1
            if self._untrue >= UNTRUE:
                self._listening, self._longest = False, max(self._interval, IDLE)

    def _crowded(self, in_vain: bool, now: float) -> bool:
        """Rule 5."""
        if not in_vain:
            self._ready_since = None
            return False
        if self._ready_since is None:
            self._ready_since = now
        return now - self._ready_since >= CROWDED_AFTER
