"""How long an engine waits between steps without tokens. Pure; time is an argument.

While only delayed releases or remote loads are pending, what is awaited is seen late by at most a fiftieth of the time
for which nothing has happened: a millisecond at first, then more, so that an engine whose readers take long does not
step a thousand times a second.
"""

from __future__ import annotations

from typing import Final

__all__ = ["LONGEST", "SHORTEST", "Pace"]

#: as vLLM's core waits
SHORTEST: Final = 1e-3
LONGEST: Final = 100e-3
SHARE: Final = 1 / 50


class Pace:
    """One engine's."""

    def __init__(self, now: float) -> None:
        self._moved = now

    def moved(self, now: float) -> None:
        """Tokens were computed, something ended, or an order came."""
        self._moved = now

    def pause(self, busy: bool, wanted: bool, now: float) -> float:
        """After a step. ``busy``: there may be something to do at once; ``wanted``: requests wait for blocks."""
        if busy:
            self._moved = now
            return 0.0
        if wanted:
            return SHORTEST
        return min(max(SHORTEST, (now - self._moved) * SHARE), LONGEST)
