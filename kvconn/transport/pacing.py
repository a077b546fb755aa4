"""When the pump looks next. Pure: what a round found and the time come in, how to wait goes out.

Rules
1. For ``ACTIVE_FOR`` after a post or a notification it only yields; then it waits ``interval`` while reads are posted;
   when nothing is, longer and longer.
2. It waits on UCX's sockets where they are known (*listening*), so that what a peer sends ends the wait. Then it may
   wait ``IDLE_LISTENING``, else ``IDLE``.
3. It does not listen to what it did not look at: not while a caller has the agent, nor after trouble.
4. Sockets are believed for as long as they are true. What is found ``UNTRUE`` times with nothing announced came another
   way (shared memory, a network card): from then on the pump waits as one that does not listen.
5. An event set that stays ready whatever is looked at (those of NIXL's other workers, which progress only under their
   own transfers) is not listened to for a while, longer each time; with none left the pump does not listen.
"""

from __future__ import annotations

import enum
from typing import Final, NamedTuple

__all__ = ["Hearing", "Pacer", "Round", "Wait"]

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
#: looks after which a set was ready all the same
VAIN: Final = 100
#: seconds that it is not listened to; twice as many each time, up to the other
DEAF: Final = 1.0
DEAF_MOST: Final = 60.0
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

    @property
    def listening(self) -> bool:
        """Are the sockets believed?"""
        return self._listening

    def moved(self, now: float) -> None:
        """Something was posted or came in."""
        self._active_until = now + ACTIVE_FOR

    def next(self, round: Round, ready: bool, posted: int, now: float, heard: bool = True) -> Wait:
        """How to wait after this round. ``ready``: a socket was, when the wait before it ended; ``heard``: there are
        sets that are listened to."""
        if round is Round.BUSY:
            return Wait(STAND_BACK, False)
        if round is Round.TROUBLE:
            return Wait(TROUBLE, False)
        if round is Round.FOUND:
            self._judge(ready)
        if now < self._active_until:
            self._last = 0.0
        elif posted:
            self._last = self._interval
        else:
            longest = self._longest if heard else max(self._interval, IDLE)
            self._last = min(max(self._interval, self._last * GROWTH), longest)
        return Wait(self._last, self._listening)

    def _judge(self, ready: bool) -> None:
        """Rule 4. After a short wait it proves nothing: it may have come between the wait's end and the look."""
        if ready:
            self._untrue = 0
        elif self._listening and self._last > IDLE:
            self._untrue += 1
            if self._untrue >= UNTRUE:
                self._listening, self._longest = False, max(self._interval, IDLE)


class Hearing:
    """Whether one event set is listened to (rule 5)."""

    def __init__(self) -> None:
        self._vain = 0
        self._deaf_for = DEAF
        self._deaf_until: float | None = None

    def looked(self, ready: bool, now: float) -> bool:
        """The agent was looked at. ``ready``: is the set, all the same? Returns whether to listen to it."""
        if self._deaf_until is not None:
            if now < self._deaf_until:
                return False
            self._deaf_until, self._vain = None, 0
            return True
        self._vain = self._vain + 1 if ready else 0
        if self._vain < VAIN:
            return True
        self._deaf_until = now + self._deaf_for
        self._deaf_for = min(2 * self._deaf_for, DEAF_MOST)
        return False
