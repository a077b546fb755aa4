"""Fence checks of one reader: whose word is being read, where to, and what it says. Pure.

Rules
1. A check is armed when a life's data is posted, and ends with the life: its scratch word is reused only after the life
   has settled, because a read of ours may still write it (C6).
2. A word that differs is read once more: a torn word can only differ. Then the load is stale (C8).
"""

from __future__ import annotations

import enum

from kvconn.nixl.fence import Fence

__all__ = ["Checks", "Verdict"]

ATTEMPTS = 2


class Verdict(enum.Enum):
    """What one look at the word says."""

    HELD = "held"
    AGAIN = "again"
    STALE = "stale"


class _Check:
    __slots__ = ("attempts", "fence", "scratch", "started")

    def __init__(self, fence: Fence, scratch: int) -> None:
        self.fence = fence
        self.scratch = scratch
        self.attempts = 0
        self.started = False


class Checks:
    """Checks by request id, over ``size`` scratch words."""

    def __init__(self, size: int) -> None:
        self._free = list(range(size - 1, -1, -1))
        self._of: dict[str, _Check] = {}

    def begin(self, id: str, fence: Fence) -> bool:
        """This life will be checked against ``fence``. False when every scratch word is taken."""
        if not self._free:
            return False
        self._of[id] = _Check(fence, self._free.pop())
        return True

    def __contains__(self, id: str) -> bool:
        return id in self._of

    def target(self, id: str) -> tuple[int, int]:
        """(slot to read, scratch word to read it into); counts as an attempt."""
        check = self._of[id]
        check.attempts += 1
        check.started = True
        return check.fence.slot, check.scratch

    def scratch(self, id: str) -> int | None:
        """The scratch word that an attempt was read into; None before the first one."""
        check = self._of[id]
        return check.scratch if check.started else None

    def judge(self, id: str, word: int) -> Verdict:
        """Compare what was read."""
        check = self._of[id]
        if word == check.fence.word:
            return Verdict.HELD
        return Verdict.AGAIN if check.attempts < ATTEMPTS else Verdict.STALE

    def end(self, id: str) -> None:
        """The life has settled."""
        check = self._of.pop(id, None)
        if check is not None:
            self._free.append(check.scratch)

    def __len__(self) -> int:
        return len(self._of)
