"""What the scheduler half knows of one request: its block table, and how far it was looked at for storing.

Rules
1. A *stay* is the time between an admission and the preemption or end that follows. Each stay looks at every block
   once: those found in the engine's own cache too, for they may have left the tiers.
2. The table is told whole at an admission; what steps add later is appended.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from kvconn.base import BlockIds, RequestView
from kvconn.offload.events import About

__all__ = ["Content", "Tracked"]


class Content:
    """A request's hashes and tokens, each fetched from the engine once. For the length of one call."""

    def __init__(self, view: RequestView, block_size: int) -> None:
        self.view = view
        self._size = block_size

    @cached_property
    def hashes(self) -> Sequence[bytes]:
        """One per full block."""
        return self.view.block_hashes()

    @cached_property
    def _tokens(self) -> Sequence[int]:
        return self.view.tokens()

    def about(self, at: int) -> About:
        """Block ``at``, for an event; without tokens when the engine tells none."""
        tokens = tuple(self._tokens[at * self._size : (at + 1) * self._size])
        return About(self.hashes[at - 1] if at else None, tokens if len(tokens) == self._size else ())


class Tracked:
    """One request. ``loaded``: blocks that a load of this stay brought. ``refused``: a load failed, offer nothing."""

    __slots__ = ("_admitted", "_cursor", "_since", "_staying", "loaded", "refused", "table", "view")

    def __init__(self, view: RequestView) -> None:
        self.view = view
        self.table: list[list[int]] = []
        self.loaded = range(0)
        self.refused = False
        self._cursor = 0
        self._admitted = False
        self._staying = False
        self._since: float | None = None

    def waits(self, now: float, patience: float) -> bool:
        """True while it may wait for blocks that are on their way; from the first such answer for ``patience``."""
        if self._since is None:
            self._since = now
        return now - self._since < patience

    def admit(self, view: RequestView, blocks: BlockIds) -> bool:
        """Blocks were given; these are all of its blocks. True: a stay begins."""
        begins = not self._staying
        self.view = view
        self.table = [list(ids) for ids in blocks]
        self._staying = self._admitted = True
        self._since = None
        return begins

    def extend(self, new: BlockIds) -> None:
        """A step's new blocks; after an admission they were told already."""
        if not self._admitted and self.table:
            for ids, more in zip(self.table, new, strict=False):
                ids.extend(more)
        elif not self.table:
            self.table = [list(ids) for ids in new]
        self._staying = True
        self._admitted = False

    def advance(self, full: int) -> list[int]:
        """Indexes of the blocks to look at, now that the first ``full`` hold what they should; each once a stay."""
        full = min([full, *(len(ids) for ids in self.table)])
        todo = [at for at in range(self._cursor, full) if at not in self.loaded]
        self._cursor = max(self._cursor, full)
        return todo

    def leave(self) -> None:
        """Preempted, or its load failed: its blocks are gone."""
        self.table = []
        self.loaded = range(0)
        self._cursor = 0
        self._admitted = self._staying = False
        self._since = None

    def __repr__(self) -> str:
        return f"Tracked({self.view.id} blocks={len(self.table[0]) if self.table else 0} looked_at={self._cursor})"
