"""The completion ledger: which lives are open, and who still owes a word on them.

Rules
1. A *life* is (request id, direction, n). :meth:`CompletionLedger.open` draws n; nobody else does (C4).
2. Completion is a set of parties, never a count of reports. A party is (child path, rank). A duplicate changes
   nothing but a counter (C3).
3. A report for a life that is not open is absorbed and counted; therefore there are no tombstones, and an empty
   engine has empty tables (C4).
4. ``failed`` is a result, ``quiet`` is a release: a rank that failed is settled only when it is quiet (C6).
5. :class:`CompletionGate` may hold an id back, never invent one: emitted = seen in the engine's sets and own life
   complete. Of a request that owes a receive and a send only the later is emitted (C13).
No I/O and no clock: ``now`` is an argument, in seconds of any one clock.
"""

from __future__ import annotations

import enum
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

import msgspec

from kvconn.base import Direction, Fact, KVConnectorOutput, WorkerFacts

__all__ = ["Child", "Closed", "CompletionGate", "CompletionLedger", "Emit", "Outcome", "Pending", "filter_output"]

#: path of a connector below the outermost one; () is the outermost itself.
Child = tuple[int, ...]
NOBODY: Final[Mapping[Child, int]] = MappingProxyType({})


class Outcome(enum.Enum):
    """What one report did."""

    ADDED = "added"
    COMPLETED = "completed"
    DUPLICATE = "duplicate"
    UNKNOWN = "unknown life"
    STRANGER = "not a party"


class Pending(msgspec.Struct, frozen=True):
    """An open life and the ranks, per child, that still owe it a word. ``since`` as given to ``open``."""

    id: str
    direction: Direction
    n: int
    owed: tuple[tuple[Child, tuple[int, ...]], ...]
    since: float | None

    def describe(self, names: Mapping[Child, str], now: float | None = None) -> str:
        """One line for a stall table; ``names`` maps child paths to connector names."""
        whom = ", ".join(f"{names.get(c, c or 'connector')} {_ranks(r)}" for c, r in self.owed) or "nobody"
        age = f" for {now - self.since:.1f} s" if now is not None and self.since is not None else ""
        return f"{self.direction} of {self.id} (life {self.n}) owed by {whom}{age}"


class Closed(msgspec.Struct, frozen=True):
    """A life that completed."""

    id: str
    direction: Direction
    n: int
    failed: bool
    #: the first reason a rank gave
    why: str = ""


class _Life(msgspec.Struct, gc=False):
    """Sets of ranks are integers, a bit per rank. ``owed`` is replaced, never changed: lives of which nothing was said
    share it."""

    id: str
    direction: Direction
    n: int
    owed: Mapping[Child, int]
    allow_missing: Mapping[Child, int] | None
    since: float | None
    #: children that owe no more than may be missing
    settled: tuple[Child, ...]
    failed: bool = False
    why: str = ""
    #: replaced when a rank fails, which most never do
    failed_by: Mapping[Child, int] = NOBODY
    seen: bool = False

    @property
    def complete(self) -> bool:
        return len(self.settled) == len(self.owed)


class CompletionLedger:
    """Open lives by (id, direction); at most one is open per pair."""

    def __init__(self) -> None:
        self._open: dict[Direction, dict[str, _Life]] = {"send": {}, "recv": {}}
        self._next_n = itertools.count(1)
        #: reports that changed nothing, by outcome.
        self.absorbed: Counter[Outcome] = Counter()

    def open(
        self,
        id: str,
        direction: Direction,
        owed: Mapping[Child, Iterable[int]],
        *,
        quorum: Mapping[Child, int] | None = None,
        now: float | None = None,
    ) -> int:
        """Open a life and return its n. ``owed`` names the ranks of each child.

        ``quorum[child]``: that many distinct ranks complete this child (C2). Raises ValueError when the pair is
        already open: its engine would free blocks twice.
        """
        if id in self._open[direction]:
            raise ValueError(f"life of {id} ({direction}) is open already: {self._open[direction][id].n}")
        sets = {child: _bits(ranks) for child, ranks in owed.items()}
        spare = {c: max(0, sets[c].bit_count() - q) for c, q in quorum.items() if c in sets} if quorum else {}
        settled = tuple(child for child, ranks in sets.items() if ranks.bit_count() <= spare.get(child, 0))
        lives = self._open[direction]
        newest = next(reversed(lives.values()), None)
        shared = newest.owed if newest is not None and newest.owed == sets else sets
        lives[id] = life = _Life(id, direction, next(self._next_n), shared, spare or None, now, settled)
        return life.n

    def report(self, fact: Fact, child: Child | None = None) -> Outcome:
        """Take one rank's word, or what several say alike. Never raises. ``child``: whose it is, if not the fact's."""
        life = self._open[fact.direction].get(fact.id)
        if life is None or life.n != fact.n:
            return self._absorb(Outcome.UNKNOWN)
        child = fact.child if child is None else child
        owed = life.owed.get(child)
        if owed is None:
            return self._absorb(Outcome.STRANGER)
        said = fact.ranks
        news = said & owed
        if life.failed_by and fact.state != "quiet":  # who failed does so once, and is not done but quiet
            news &= ~life.failed_by.get(child, 0)
        if news != said or not said:
            self._absorb(Outcome.DUPLICATE, max(1, (said & ~news).bit_count()))
        if not news:
            return Outcome.DUPLICATE
        if fact.state == "failed":
            return self._fail(life, child, news, fact.why)
        left = owed & ~news
        life.owed = {**life.owed, child: left}
        spare = life.allow_missing.get(child, 0) if life.allow_missing else 0
        if left.bit_count() > spare or owed.bit_count() <= spare:
            return Outcome.ADDED
        life.settled = (*life.settled, child)
        return Outcome.COMPLETED if life.complete else Outcome.ADDED

    def _fail(self, life: _Life, child: Child, ranks: int, why: str) -> Outcome:
        life.failed = True
        life.why = life.why or why
        life.failed_by = {**life.failed_by, child: life.failed_by.get(child, 0) | ranks}
        return Outcome.ADDED

    def _absorb(self, outcome: Outcome, times: int = 1) -> Outcome:
        self.absorbed[outcome] += times
        return outcome

    def get(self, id: str, direction: Direction) -> Pending | None:
        """The open life of this pair, if any."""
        life = self._open[direction].get(id)
        return None if life is None else _pending(life)

    def is_open(self, id: str, direction: Direction) -> bool:
        """Is a life open for this pair?"""
        return id in self._open[direction]

    def settled(self, id: str, direction: Direction) -> Sequence[Child]:
        """The children of the pair's open life that owe nothing more, in the order in which they were done."""
        life = self._open[direction].get(id)
        return () if life is None else life.settled

    def mark_seen(self, id: str, direction: Direction) -> bool:
        """Note that the engine's own sets named this id. False when no life of ours is open for it."""
        life = self._open[direction].get(id)
        if life is None:
            return False
        life.seen = True
        return True

    def pop_ready(self, id: str, direction: Direction, *, require_seen: bool = True) -> Closed | None:
        """Close the pair's life if it is complete (and seen); None otherwise."""
        life = self._open[direction].get(id)
        if life is None or not life.complete or (require_seen and not life.seen):
            return None
        del self._open[direction][id]
        return Closed(id, direction, life.n, life.failed, life.why)

    def close(self, id: str, direction: Direction) -> Closed | None:
        """Close the pair's life whatever it is owed (the engine threw its blocks away itself)."""
        life = self._open[direction].pop(id, None)
        return None if life is None else Closed(id, direction, life.n, life.failed, life.why)

    def pending(self) -> list[Pending]:
        """Open lives, oldest first."""
        return [_pending(life) for life in self._lives()]

    def overdue(self, now: float, after: float) -> list[Pending]:
        """Open, incomplete lives older than ``after`` seconds."""
        return [
            _pending(life)
            for life in self._lives()
            if not life.complete and life.since is not None and now - life.since > after
        ]

    def _lives(self) -> list[_Life]:
        lives = [*self._open["send"].values(), *self._open["recv"].values()]  # another thread may be asking
        return sorted(lives, key=lambda life: life.n)

    def __len__(self) -> int:
        return len(self._open["send"]) + len(self._open["recv"])

    def __repr__(self) -> str:
        sends, receives = len(self._open["send"]), len(self._open["recv"])
        return f"CompletionLedger(send={sends} recv={receives} absorbed={self.absorbed.total()})"


class Emit(msgspec.Struct, frozen=True):
    """What a scheduler half lets the engine see of one step's sets."""

    sent: frozenset[str] = frozenset()
    received: frozenset[str] = frozenset()
    failed: frozenset[str] = frozenset()
    #: of ``failed``, where a rank said it
    why: dict[str, str] = {}

    def replace_sets(self, output: KVConnectorOutput) -> None:
        """Put these in place of the engine's sets. New ones, never mutated: one-process executors share them."""
        output.finished_sending = set(self.sent)
        output.finished_recving = set(self.received)
        output.failed_recving = set(self.failed)
        output.failure_reasons = dict(self.why)


Reports = Callable[[Iterable[str], Iterable[str], Iterable[str], Iterable[Fact]], Emit]


def filter_output(output: KVConnectorOutput, reports: Reports) -> None:
    """``update_connector_output`` of a connector whose scheduler half answers ``reports``."""
    meta = output.kv_connector_worker_meta
    facts = meta.facts if isinstance(meta, WorkerFacts) else ()
    sets = (output.finished_sending or (), output.finished_recving or (), output.failed_recving or ())
    if facts or any(sets):  # most steps say nothing
        reports(*sets, facts).replace_sets(output)


class CompletionGate:
    """Between the engine's aggregated sets and its scheduler: vetoes, never originates."""

    def __init__(self, ledger: CompletionLedger) -> None:
        self.ledger = ledger
        #: ids in the sets that named closed lives of ours.
        self.late = 0

    def reports(
        self, sent: Iterable[str], received: Iterable[str], failed: Iterable[str], facts: Iterable[Fact]
    ) -> Emit:
        """Apply ``facts``, then filter the sets. An id that no fact and no life of ours names passes."""
        named: dict[Direction, dict[str, None]] = {"send": {}, "recv": {}}
        for fact in facts:
            self.ledger.report(fact)
            named[fact.direction][fact.id] = None
        out_sent, _ = self._filter("send", sent, named["send"])
        out_recv, why = self._filter("recv", received, named["recv"])
        siblings_failed = {id for id in failed if id not in named["recv"] and id in out_recv}
        return Emit(
            frozenset(out_sent),
            frozenset(out_recv),
            frozenset(why) | siblings_failed,
            {id: reason for id, reason in why.items() if reason},
        )

    def _filter(
        self, direction: Direction, seen: Iterable[str], named: Mapping[str, None]
    ) -> tuple[set[str], dict[str, str]]:
        """Ids to emit, and of those the failed ones with their reasons."""
        emitted: set[str] = set()
        failed: dict[str, str] = {}
        candidates = dict(named)
        for id in seen:
            if self.ledger.mark_seen(id, direction):
                candidates[id] = None
            elif id in named:
                self.late += 1
            else:
                emitted.add(id)
        other: Direction = "recv" if direction == "send" else "send"
        for id in candidates:
            closed = self.ledger.pop_ready(id, direction)
            if closed is not None and not self.ledger.is_open(id, other):
                emitted.add(id)
                if closed.failed:
                    failed[id] = closed.why
        return emitted, failed


def _pending(life: _Life) -> Pending:
    spare = life.allow_missing or NOBODY
    owed = tuple((c, _numbers(r)) for c, r in sorted(life.owed.items()) if r.bit_count() > spare.get(c, 0))
    return Pending(life.id, life.direction, life.n, owed, life.since)


def _bits(ranks: Iterable[int]) -> int:
    if isinstance(ranks, range) and ranks.start == 0 and ranks.step == 1:
        return (1 << len(ranks)) - 1
    bits = 0
    for rank in ranks:
        bits |= 1 << rank
    return bits


def _numbers(ranks: int) -> tuple[int, ...]:
    return tuple(rank for rank in range(ranks.bit_length()) if ranks >> rank & 1)


def _ranks(ranks: tuple[int, ...]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 2 and ranks == tuple(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]}..{ranks[-1]}"
    return "ranks " + ",".join(map(str, ranks))
