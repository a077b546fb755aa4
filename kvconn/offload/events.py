"""KV events of the offloading tiers, for routers that follow what is cached where.

Rules
1. An event names the engine's block hashes. What is stored also names the block's tokens, its predecessor and the
   block size; a block whose tokens the engine does not tell is stored without an event.
2. At most ``limit`` events wait to be taken; the oldest is dropped and counted.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable

import msgspec

__all__ = ["HOST", "About", "BlockRemoved", "BlockStored", "EventLog"]

HOST = "host"


class About(msgspec.Struct, frozen=True):
    """What an event says of a block's content."""

    parent: bytes | None
    tokens: tuple[int, ...]


class BlockStored(msgspec.Struct, frozen=True):
    """These blocks can be loaded from ``medium``."""

    block_hashes: tuple[bytes, ...]
    parent_block_hash: bytes | None
    token_ids: tuple[int, ...]
    block_size: int
    medium: str


class BlockRemoved(msgspec.Struct, frozen=True):
    """These blocks are gone from ``medium``."""

    block_hashes: tuple[bytes, ...]
    medium: str


class EventLog:
    """Events until they are taken."""

    def __init__(self, block_size: int, limit: int) -> None:
        self._block_size = block_size
        self._limit = limit
        self._events: deque[BlockStored | BlockRemoved] = deque()
        #: blocks that several ranks say are gone, told once
        self._gone: OrderedDict[tuple[bytes, str], None] = OrderedDict()
        self.dropped = 0

    def stored(self, key: bytes, about: About | None, medium: str) -> None:
        """``key`` is in ``medium`` now."""
        self._gone.pop((key, medium), None)
        if about is not None and about.tokens:
            self._add(BlockStored((key,), about.parent, about.tokens, self._block_size, medium))

    def removed(self, keys: Iterable[bytes], medium: str = HOST) -> None:
        """``keys`` are gone from ``medium``."""
        gone = tuple(keys)
        if gone:
            self._add(BlockRemoved(gone, medium))

    def removed_by_rank(self, key: bytes, medium: str) -> None:
        """One rank's share of ``key`` is gone, so the block is."""
        if (key, medium) not in self._gone:
            self._gone[key, medium] = None
            if len(self._gone) > self._limit:
                self._gone.popitem(last=False)
            self.removed((key,), medium)

    def _add(self, event: BlockStored | BlockRemoved) -> None:
        self._events.append(event)
        if len(self._events) > self._limit:
            self._events.popleft()
            self.dropped += 1

    def take(self) -> list[BlockStored | BlockRemoved]:
        """Events since the last call. Consumes."""
        events = list(self._events)
        self._events.clear()
        return events
