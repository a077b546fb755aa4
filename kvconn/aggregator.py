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
import functools
from collections import OrderedDict
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import msgspec

from kvconn.base import Direction, KVConnector
from kvconn.errors import ConfigError

__all__ = ["KVOutputAggregator", "Owed"]

_Key = tuple[Direction, str]
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
        #: those that reported, as bits
        self.ranks = 0
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
        self._entries: dict[_Key, _Entry] = {}
        self._unexpected: OrderedDict[_Key, None] = OrderedDict()
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
        self._hear(outputs, now)
        base = outputs[output_rank]
        if not base:
            return None
        result = _copied(base)
        result.kv_connector_output = self._emit(getattr(base, "kv_connector_output", None))
        return result

    def _hear(self, outputs: Sequence[Any], now: float | None) -> None:
        """What the ranks say, in their order. Those next to each other that name the same ids are taken as one."""
        named: tuple[Any, Any, Any] | None = None
        ranks = 0
        for rank, output in enumerate(outputs):
            part = getattr(output, "kv_connector_output", None)
            if part is None:
                continue
            self._kind = part
            try:
                ids = part.finished_sending, part.finished_recving, part.failed_recving
                blocks, stats = part.invalid_block_ids, part.kv_connector_stats
                events, meta = part.kv_cache_events, part.kv_connector_worker_meta
            except AttributeError:
                ids, blocks, stats, events, meta = _present(part)
            if ids[0] or ids[1] or ids[2]:
                if ids != named:
                    self._take(named, ranks, now)
                    named, ranks = ids, 0
                ranks |= 1 << rank
            if blocks:
                self._invalid |= blocks
            if stats is not None or events is not None or meta is not None:
                self._merge((stats, events, meta))
        self._take(named, ranks, now)

    def _take(self, named: tuple[Any, Any, Any] | None, ranks: int, now: float | None) -> None:
        """``ranks``, as bits, name ids that were sent, received, and failed."""
        if named is None:
            return
        sent, received, failed = named
        for id in failed or ():
            self._note_failed(id, now)
        for id in sent or ():
            self._report("send", id, ranks, now)
        for id in received or ():
            self._report("recv", id, ranks, now)
        self._trim()

    def _merge(self, values: tuple[Any, Any, Any]) -> None:
        for name, value in zip(_MERGED, values, strict=True):
            if value is not None:
                held = self._carry.get(name)
                self._carry[name] = value if held is None else held.aggregate(value)

    def _note_failed(self, id: str, now: float | None) -> None:
        if id in self._done["recv"]:  # complete, waiting for the output rank
            self._failed.add(id)
        elif id not in self._received or ("recv", id) in self._entries:
            key: _Key = ("recv", id)
            entry = self._entries.get(key)
            (self._open(key, now) if entry is None else entry).failed = True

    def _open(self, key: _Key, now: float | None) -> _Entry:
        self._unexpected[key] = None
        entry = self._entries[key] = _Entry(now, expected=False)
        return entry

    def _report(self, direction: Direction, id: str, ranks: int, now: float | None) -> None:
        key = (direction, id)
        entry = self._entries.get(key)
        if entry is None and id in (memory := self._memory_of(direction)):
            memory.move_to_end(id)
            self.duplicates += ranks.bit_count()
            return
        heard = 0 if entry is None else entry.ranks
        count = (heard | ranks).bit_count()
        if heard & ranks or count > self.need:
            self._report_in_turn(direction, id, ranks, now)
        elif count == self.need:
            self._complete(key, entry)
        else:
            (self._open(key, now) if entry is None else entry).ranks = heard | ranks

    def _report_in_turn(self, direction: Direction, id: str, ranks: int, now: float | None) -> None:
        """Some of these have reported before, or are more than are needed: it matters who comes first."""
        entry = self._entries.get((direction, id))
        if ranks.bit_count() == 1 and entry is not None:
            self.duplicates += 1
            return
        for rank in range(ranks.bit_length()):
            if ranks >> rank & 1:
                self._report(direction, id, 1 << rank, now)

    def _complete(self, key: _Key, entry: _Entry | None) -> None:
        """Every rank that is needed has reported; ``entry``: if it was open before that."""
        direction, id = key
        if entry is not None:
            del self._entries[key]
            self._unexpected.pop(key, None)
            if entry.failed:
                self._failed.add(id)
        self._done[direction].add(id)
        if direction == "send" or (entry is not None and entry.expected):
            memory = self._memory_of(direction)
            memory[id] = None
            if len(memory) > self._memory:
                memory.popitem(last=False)

    def _trim(self) -> None:
        while len(self._unexpected) > self._memory:
            key, _ = self._unexpected.popitem(last=False)
            del self._entries[key]
            self.dropped += 1

    def _emit(self, own: Any) -> Any:
        prototype = own if own is not None else self._kind
        part = _copied(prototype) if prototype is not None else SimpleNamespace()
        part.finished_sending, part.finished_recving = self._fetch("send"), self._fetch("recv")
        part.failed_recving = part.kv_connector_stats = part.kv_cache_events = part.kv_connector_worker_meta = None
        if self._failed:
            part.failed_recving, self._failed = self._failed, set()
        part.invalid_block_ids, self._invalid = self._invalid, set()
        for name, value in self._carry.items():
            setattr(part, name, value)
        self._carry.clear()
        self._kind = None
        return part

    def _fetch(self, direction: Direction) -> set[str] | None:
        done = self._done[direction]
        if not done:
            return None
        self._done[direction] = set()
        return done

    def pending(self) -> list[Owed]:
        """Ids that some ranks reported or the engine expects, with the ranks still owed; oldest first."""
        world = range(self.world)
        return [
            Owed(direction, id, tuple(r for r in world if not entry.ranks >> r & 1), entry.since)
            for (direction, id), entry in self._entries.items()
        ]

    def __repr__(self) -> str:
        return (
            f"KVOutputAggregator(world={self.world} need={self.need} pending={len(self._entries)} "
            f"duplicates={self.duplicates})"
        )


def _present(part: Any) -> tuple[tuple[Any, Any, Any], Any, Any, Any, Any]:
    """What a part without some of the attributes says."""
    ids = tuple(getattr(part, name, None) for name in ("finished_sending", "finished_recving", "failed_recving"))
    blocks, stats, events, meta = (getattr(part, name, None) for name in ("invalid_block_ids", *_MERGED))
    return (ids[0], ids[1], ids[2]), blocks, stats, events, meta


class _Plain:
    """Attributes, and nothing else."""


@functools.lru_cache(64)
def _is_plain(cls: type) -> bool:
    own = {"__slots__", "__copy__", "__reduce__", "__reduce_ex__", "__getnewargs__", "__getnewargs_ex__"}
    own |= {"__getstate__", "__setstate__"}
    return cls.__basicsize__ == _Plain.__basicsize__ and not any(own & vars(one).keys() for one in cls.__mro__[:-1])


def _copied(one: Any) -> Any:
    """A shallow copy. ``copy.copy`` is most of an empty step's cost, and nearly all that comes here is plain."""
    cls: Any = type(one)
    if not _is_plain(cls):
        return copy.copy(one)
    new = cls.__new__(cls)
    new.__dict__.update(one.__dict__)
    return new
