"""Fence checks of one reader: whose words are being read, where to, and what they say. Pure.

Rules
1. A check is armed when a life's data is posted, and ends with the life: its scratch words are reused only after the
   life has settled, because reads of ours may still write them (C6).
2. A life has one word in the fence of each rank that it is read from, and they are all looked at.
3. A word that differs is read once more: a torn word can only differ. Then the load is stale (C8).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence

import msgspec

from kvconn.geometry import Place
from kvconn.nixl.fence import Fence, Numbers

__all__ = ["Checks", "Verdict"]

ATTEMPTS = 2


class Verdict(enum.Enum):
    """What the words of a life say together."""

    HELD = "held"
    #: some are still to be read, for the first time or once more
    AGAIN = "again"
    STALE = "stale"


class _Word(msgspec.Struct, gc=False):
    """One rank's word of a life."""

    place: Place
    scratch: int
    attempts: int = 0
    held: bool = False


class Checks:
    """Checks by request id, over ``size`` scratch words."""

    def __init__(self, size: int) -> None:
        self._free = Numbers(size)
        self._of: dict[str, tuple[Fence, tuple[_Word, ...]]] = {}

    def begin(self, id: str, fence: Fence, places: Sequence[Place]) -> bool:
        """This life will be checked against ``fence`` at each of these ranks. False when there is no scratch for it."""
        if len(places) > len(self._free):
            return False
        self._of[id] = fence, tuple([_Word(place, self._free.take()) for place in places])
        return True

    def __contains__(self, id: str) -> bool:
        return id in self._of

    def targets(self, id: str) -> list[tuple[Place, int, int]]:
        """(rank, slot to read of it, scratch word to read it into) of all that are to be read; counts as an attempt."""
        fence, words = self._of[id]
        out: list[tuple[Place, int, int]] = []
        for word in words:
            if not word.held:
                word.attempts += 1
                out.append((word.place, fence.slot, word.scratch))
        return out

    def judge(self, id: str, read: Callable[[int], int]) -> Verdict:
        """Compare what was read since; ``read`` gives a scratch word."""
        fence, words = self._of[id]
        for word in words:
            word.held = word.held or (word.attempts > 0 and read(word.scratch) == fence.word)
        if all(word.held for word in words):
            return Verdict.HELD
        return Verdict.STALE if any(w.attempts >= ATTEMPTS and not w.held for w in words) else Verdict.AGAIN

    def end(self, id: str) -> None:
        """The life has settled."""
        _, words = self._of.pop(id, (None, ()))
        self._free.give(word.scratch for word in words)

    def __len__(self) -> int:
        return len(self._of)
