"""A clock that stands until it is told.

Rules
1. Seconds; it never goes back.
"""

from __future__ import annotations

__all__ = ["ManualClock"]


class ManualClock:
    """Hand it wherever a ``clock`` is wanted."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> float:
        """Let ``seconds`` pass; returns the time. Raises ValueError when that would go back."""
        if seconds < 0:
            raise ValueError(f"advance: {seconds} seconds would go back")
        self.now += seconds
        return self.now

    def __repr__(self) -> str:
        return f"ManualClock({self.now:g})"
