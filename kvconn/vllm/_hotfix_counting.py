"""Which of the workers' reports a counter may count, when nothing but rank and request id is known.

Rules
1. A rank counts once per life of (direction, id); its second word is a duplicate and is dropped (C3).
2. A life ends when the counter says that it completed. A completed *send* is remembered, and words about it are dropped
   as late, until ``memory`` other sends have completed after it; a *receive* after completion opens a new life (C4).
3. Every table is bounded: ``memory`` completed sends, ``open_max`` lives. What falls out is counted, and from then on
   treated as the stock counter treats everything.
No vLLM, no I/O, no clock: the aggregator's repair feeds it, and it can be tested alone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Literal

__all__ = ["Direction", "ReportFilter"]

Direction = Literal["send", "recv"]


class ReportFilter:
    """One aggregator's memory of who has reported what."""

    def __init__(self, *, memory: int = 4096, open_max: int = 65536) -> None:
        self._memory = memory
        self._open_max = open_max
        self._ranks: OrderedDict[tuple[Direction, str], set[int]] = OrderedDict()
        self._sent: OrderedDict[str, None] = OrderedDict()
        #: second words of a rank within one life.
        self.duplicates = 0
        #: words about a send that had completed.
        self.late = 0
        #: lives forgotten to stay bounded.
        self.dropped = 0

    def admit(self, rank: int, direction: Direction, ids: Iterable[str]) -> set[str]:
        """Of what ``rank`` reports, the ids that may be counted."""
        return {id for id in ids if self._admit_one(rank, direction, id)}

    def _admit_one(self, rank: int, direction: Direction, id: str) -> bool:
        if direction == "send" and id in self._sent:
            self._sent.move_to_end(id)
            self.late += 1
            return False
        ranks = self._ranks.setdefault((direction, id), set())
        if rank in ranks:
            self.duplicates += 1
            return False
        ranks.add(rank)
        while len(self._ranks) > self._open_max:
            self._ranks.popitem(last=False)
            self.dropped += 1
        return True

    def completed(self, direction: Direction, ids: Iterable[str]) -> None:
        """The counter emitted these: their lives are over."""
        for id in ids:
            self._ranks.pop((direction, id), None)
            if direction == "send":
                self._sent[id] = None
                self._sent.move_to_end(id)
        while len(self._sent) > self._memory:
            self._sent.popitem(last=False)

    def __repr__(self) -> str:
        return (
            f"ReportFilter(open={len(self._ranks)} remembered={len(self._sent)} duplicates={self.duplicates} "
            f"late={self.late} dropped={self.dropped})"
        )
