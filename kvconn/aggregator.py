"""KVOutputAggregator: one engine-wide answer out of the workers' answers, by identity.

Rules
1. An id is finished when every rank of the world (or a quorum the operator named) has reported it (C2, C3).
2. A rank's duplicate changes nothing but :attr:`KVOutputAggregator.duplicates`.
3. The aggregator knows no lives. With :meth:`~KVOutputAggregator.expect` the engine opens a fresh entry; what is said
   of one that completed is absorbed, from a bounded LRU, until the next. Without it the stock rule applies: a completed
   *send* is absorbed as well, a *receive* after completion opens a new entry (C4).
4. Nothing is lost while the output rank has nothing to say: completions, facts, stats and events wait for the next
   call.
5. Entries nobody expected are bounded; the oldest is dropped and counted.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import msgspec

from kvconn.base import Direction, KVConnector
from kvconn.errors import ConfigError

__all__ = ["KVOutputAggregator", "Owed"]

_DIRECTIONS: tuple[tuple[Direction, str], ...] = (("send", "finished_sending"), ("recv", "finished_recving"))
_MERGED = ("kv_connector_stats", "kv_cache_events", "kv_connector_worker_meta")


class Owed(msgspec.Struct, frozen=True):
    """An id some ranks have not reported. ``since`` is the first report's or ``expect``'s ``now``, if it was given."""

    direction: Direction
    id: str
    ranks: tuple[int, ...]
    since: float | None


class _Entry:
    __slots__ = ("expected", "failed", "ranks", "since")

    def __init__(self, since: float | None, expected: bool) -> None:
        self.ranks: set[int] = set()
        self.since = since
        self.expected = expected
        self.failed = False


class KVOutputAggregator:
    """Joins one step's worker outputs. ``world`` ranks; ``quorum`` distinct ranks complete an id (default: all)."""

    def __init__(self, world: int, *, quorum: int | None = None, memory: int = 4096) -> None:
        if world < 1 or (quorum is not None and not 1 <= quorum <= world):
            raise ConfigError(f"aggregator: expected 1 <= quorum <= world, got quorum={quorum} world={world}")
        self.world = world
        self.need = world if quorum is None else quorum
        self._memory = memory
        self._entries: dict[tuple[Direction, str], _Entry] = {}
        self._unexpected: OrderedDict[tuple[Direction, str], None] = OrderedDict()
        self._sent: OrderedDict[str, None] = OrderedDict()
        #: receives that were expected and are complete
        self._received: OrderedDict[str, None] = OrderedDict()
        self._done: dict[Direction, set[str]] = {"send": set(), "recv": set()}
        #: ids in ``_done["recv"]`` that some rank called failed.
        self._failed: set[str] = set()
        self._invalid: set[int] = set()
        self._carry: dict[str, Any] = {}
        self._kind: Any = None
        #: reports absorbed: a rank's second word, or any word on a completed send.
        self.duplicates = 0
        #: unexpected entries dropped to stay bounded.
        self.dropped = 0

    @classmethod
    def from_connector(cls, connector: KVConnector, world: int, *, quorum: int | None = None) -> KVOutputAggregator:
        """Refuses, by name, a connector that narrows the count without an operator's ``quorum`` (C2)."""
        count = connector.get_finished_count()
        if count is not None and quorum is None:
            raise ConfigError(
                f"{type(connector).__name__}.get_finished_count(): expected None (every one of the {world} workers "
                f"reports), got {count}; name a quorum for it if its silent ranks really serve nobody"
            )
        return cls(world, quorum=quorum)

    def expect(self, direction: Direction, id: str, now: float | None = None) -> None:
        """A life begins: forget whatever was known of this id."""
        key = (direction, id)
        self._unexpected.pop(key, None)
        self._entries[key] = _Entry(now, expected=True)
        self._done[direction].discard(id)
        self._memory_of(direction).pop(id, None)
        if direction == "recv":
            self._failed.discard(id)

    def _memory_of(self, direction: Direction) -> OrderedDict[str, None]:
        return self._sent if direction == "send" else self._received

    def aggregate(self, outputs: Sequence[Any], output_rank: int = 0, now: float | None = None) -> Any:
        """Join ``outputs`` (index = rank, entries may be None) and return the output rank's, completed.

        A shallow copy of ``outputs[output_rank]`` with a new ``kv_connector_output``, or None, keeping everything for
        the next call, when that entry is falsy. Raises ValueError when the list is not one entry per rank.
        """
        if len(outputs) != self.world:
            raise ValueError(f"expected {self.world} outputs, one per rank, got {len(outputs)}")
        for rank, output in enumerate(outputs):
            part = getattr(output, "kv_connector_output", None)
            if part is not None:
                self._take(rank, part, now)
        base = outputs[output_rank]
        if not base:
            return None
        result = copy.copy(base)
        result.kv_connector_output = self._emit(getattr(base, "kv_connector_output", None))
        return result

    def _take(self, rank: int, part: Any, now: float | None) -> None:
        self._kind = part
        for id in getattr(part, "failed_recving", None) or ():
            self._note_failed(id, now)
        for direction, attribute in _DIRECTIONS:
            for id in getattr(part, attribute, None) or ():
                self._report(direction, id, rank, now)
        self._trim()
        self._invalid |= getattr(part, "invalid_block_ids", None) or set()
        for name in _MERGED:
            value = getattr(part, name, None)
            if value is not None:
                held = self._carry.get(name)
                self._carry[name] = value if held is None else held.aggregate(value)

    def _note_failed(self, id: str, now: float | None) -> None:
        if id in self._done["recv"]:  # complete, waiting for the output rank
            self._failed.add(id)
        elif id not in self._received or ("recv", id) in self._entries:
            self._entry(("recv", id), now).failed = True

    def _entry(self, key: tuple[Direction, str], now: float | None) -> _Entry:
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = _Entry(now, expected=False)
            self._unexpected[key] = None
        return entry

    def _report(self, direction: Direction, id: str, rank: int, now: float | None) -> None:
        key = (direction, id)
        memory = self._memory_of(direction)
        if id in memory and key not in self._entries:
            memory.move_to_end(id)
            self.duplicates += 1
            return
        entry = self._entry(key, now)
        if rank in entry.ranks:
            self.duplicates += 1
            return
        entry.ranks.add(rank)
        if len(entry.ranks) >= self.need:
            self._complete(key)

    def _complete(self, key: tuple[Direction, str]) -> None:
        direction, id = key
        entry = self._entries.pop(key)
        self._unexpected.pop(key, None)
        self._done[direction].add(id)
        if entry.failed:
            self._failed.add(id)
        if direction == "send" or entry.expected:
            memory = self._memory_of(direction)
            memory[id] = None
            while len(memory) > self._memory:
                memory.popitem(last=False)

    def _trim(self) -> None:
        while len(self._unexpected) > self._memory:
            key, _ = self._unexpected.popitem(last=False)
            del self._entries[key]
            self.dropped += 1

    def _emit(self, own: Any) -> Any:
        prototype = own if own is not None else self._kind
        part = copy.copy(prototype) if prototype is not None else SimpleNamespace()
        sent, received = self._done["send"], self._done["recv"]
        self._done = {"send": set(), "recv": set()}
        failed, self._failed = self._failed, set()
        part.finished_sending = sent or None
        part.finished_recving = received or None
        part.failed_recving = failed or None
        part.invalid_block_ids, self._invalid = self._invalid, set()
        for name in _MERGED:
            setattr(part, name, self._carry.pop(name, None))
        self._kind = None
        return part

    def pending(self) -> list[Owed]:
        """Ids that some ranks reported or the engine expects, with the ranks still owed; oldest first."""
        world = range(self.world)
        return [
            Owed(direction, id, tuple(r for r in world if r not in entry.ranks), entry.since)
            for (direction, id), entry in self._entries.items()
        ]

    def __repr__(self) -> str:
        return (
            f"KVOutputAggregator(world={self.world} need={self.need} pending={len(self._entries)} "
            f"duplicates={self.duplicates})"
        )
