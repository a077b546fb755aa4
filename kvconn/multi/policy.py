"""What a MultiConnector decides about completion: who claims, whose word is still missing, what leaves when.

Rules
1. Who loads what is decided in :mod:`kvconn.multi.ranges`.
2. The receive of a parked request is a life over the asynchronous children that kept a range. A synchronous range in
   such a row is waited for on each rank in the step that announces it, before it reports anything of that step; it is
   in no claim. A range that fails fails the load, once, when all of them are quiet.
3. A life of ours opens over the children that claim it and all ranks of the engine: parties are (child, rank), and
   completion is the set of them, never a count (C3). A child with a quorum is complete in a send, never in a receive,
   when that many distinct ranks reported (C2): a rank that still writes must not lose its blocks.
4. On a rank, an id leaves once per life: when its claim is bound and every claiming child without a quorum reported
   there. A report that comes before its claim waits, bounded, and counts when the claim comes, but not one that is
   older than its request. A repeated step changes nothing (C1). A child with a quorum is not waited for; its word goes
   up as a fact until the engine closes the life, and one word of it that comes after that is absorbed.
5. In the engine, an id leaves once per life: when the engine's own set named it, every party reported, and every
   claiming child's scheduler half let it through. Veto, never originate. An id that no fact of ours names passes.
6. A request whose receive and send are both open is released by the later one; the earlier is held back (C13).
7. ``failed`` is a result and ``received`` a release: a rank that knows of a failure has settled only when it also says
   received (C6).
8. Facts have namespaces by path. ``(i, ...)`` is child i's own word, stripped and handed to it, with n from the
   child's own ledger. ``(OWN, i)`` is this MultiConnector's word about its child i, with n from its own ledger; a
   nested one's arrives as ``(j, OWN, i)``, so that the two never meet.
No I/O and no clock: ``now`` is an argument, in seconds.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

import msgspec

from kvconn.base import NO_RESULTS, Direction, Fact, FactState, Published, TransferResults
from kvconn.ledger import Child, CompletionLedger, Emit

__all__ = [
    "NO_STEP",
    "OWN",
    "Claim",
    "ClaimTable",
    "EngineGate",
    "MultiStep",
    "RankGate",
    "Share",
    "prefixed",
    "published_of",
]

#: first element of the path of a MultiConnector's own facts; no child has this index.
OWN = -1
NO_CHILD = -2
Key = tuple[str, Direction]
DIRECTIONS: tuple[Direction, Direction] = ("send", "recv")
NOBODY: frozenset[str] = frozenset()
K = TypeVar("K")


def prefixed(child: int, facts: Iterable[Fact]) -> list[Fact]:
    """Child ``child``'s own facts, as they travel through this MultiConnector."""
    return [msgspec.structs.replace(fact, child=(child, *fact.child)) for fact in facts]


def published_of(child: int, published: Iterable[Published]) -> tuple[Published, ...]:
    """What child ``child``'s ranks published anew, its path without us."""
    return tuple(msgspec.structs.replace(one, child=one.child[1:]) for one in published if one.child[:1] == (child,))


# --- what crosses from the scheduler half to the ranks ------------------------------------------------------------


class Claim(msgspec.Struct, frozen=True):
    """A life of ours: the children whose reports it waits for, and ``spare``, those that have a quorum."""

    id: str
    n: int
    children: tuple[int, ...]
    spare: tuple[int, ...] = ()


class MultiStep(msgspec.Struct, frozen=True):
    """What happened since the step before ``seq``, oldest first.

    ``sends`` and ``loads`` are lives that opened, ``closed`` sends with a quorum that were emitted, as (id, n), and
    ``arrived`` new requests. ``waits``: children whose synchronous loads of this step no forward waits for (rule 2).
    """

    seq: int
    sends: tuple[Claim, ...] = ()
    loads: tuple[Claim, ...] = ()
    closed: tuple[tuple[str, int], ...] = ()
    arrived: tuple[str, ...] = ()
    waits: tuple[int, ...] = ()


#: of most steps; older than any that says something
NO_STEP: Final = MultiStep(0)


# --- one rank -----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Open:
    n: int
    owed: set[int]
    spare: set[int]
    failed: set[int] = field(default_factory=set)
    told: bool = False


class ClaimTable:
    """One rank's claims of one direction, and reports that came before theirs.

    ``memory``: ids remembered after their life; ``early_max``: ids reported before theirs.
    """

    def __init__(self, direction: Direction, rank: int, memory: int = 4096, early_max: int = 4096) -> None:
        self._direction = direction
        self._rank = rank
        self._memory = memory
        self._early_max = early_max
        self._open: dict[str, _Open] = {}
        #: id -> {child: what it said}, oldest first; True: settled, False: failed, True after False both
        self._early: OrderedDict[str, dict[int, list[bool]]] = OrderedDict()
        #: ids reported here whose next life is not announced: a bare child's second word is absorbed (C4).
        self._done: OrderedDict[str, None] = OrderedDict()
        #: (id, child with a quorum) of closed lives that this child never mentioned: its next word is about those.
        self._late: OrderedDict[tuple[str, int], None] = OrderedDict()
        self.ready: list[tuple[str, bool]] = []
        self.facts: list[Fact] = []
        #: reports that changed nothing.
        self.duplicates = 0
        #: early reports given up: their request ended unclaimed or began later, or too many waited.
        self.dropped = 0

    def announce(self, claim: Claim) -> None:
        """A claim is bound; what was reported early counts now."""
        self._done.pop(claim.id, None)
        self._open[claim.id] = _Open(claim.n, set(claim.children), set(claim.spare))
        for child, words in self._early.pop(claim.id, {}).items():
            for settled in words:
                self.report(claim.id, child, settled)
        self._settle(claim.id)

    def report(self, id: str, child: int, settled: bool = True) -> None:
        """Child ``child`` has reported ``id`` on this rank: settled, or failed and not settled yet."""
        claim = self._open.get(id)
        if settled and (id, child) in self._late:
            del self._late[id, child]
            self.duplicates += 1
        elif claim is None:
            self._unclaimed(id, child, settled)
        elif child not in claim.owed | claim.spare or (not settled and child in claim.failed):
            self.duplicates += 1
        elif settled:
            claim.owed.discard(child)
            claim.spare.discard(child)
            self._say(id, child, claim.n, "quiet" if child in claim.failed else "done")
            self._settle(id)
        else:
            claim.failed.add(child)
            self._say(id, child, claim.n, "failed")

    def _say(self, id: str, child: int, n: int, state: FactState) -> None:
        self.facts.append(Fact(id, self._direction, n, self._rank, state, (OWN, child)))

    def _settle(self, id: str) -> None:
        """This rank's report, once, when it waits for nobody; the claim stays while a spare child may speak."""
        claim = self._open.get(id)
        if claim is None or claim.owed:
            return
        if not claim.told:
            claim.told = True
            self.ready.append((id, bool(claim.failed)))
        if not claim.spare:
            self._end(id)

    def close(self, id: str, n: int) -> None:
        """The engine emitted life ``n``; children with a quorum that did not speak may do so late."""
        claim = self._open.get(id)
        if claim is not None and claim.n == n:
            for child in claim.spare:
                _remember(self._late, (id, child), self._memory)
            self._end(id)

    def _end(self, id: str) -> None:
        del self._open[id]
        _remember(self._done, id, self._memory)

    def _unclaimed(self, id: str, child: int, settled: bool) -> None:
        words = self._early.get(id, {}).get(child, [])
        if id in self._done or settled in words or True in words:
            self.duplicates += 1
            return
        self._early.setdefault(id, {}).setdefault(child, []).append(settled)
        if len(self._early) > self._early_max:
            self._early.popitem(last=False)
            self.dropped += 1

    def arrived(self, id: str) -> None:
        """A new request. What was said of its id before is about another one; what is said from now on is news."""
        self._done.pop(id, None)
        self.ended(id)

    def ended(self, id: str) -> None:
        """The request ended; had anybody claimed it, the claim would be bound by now."""
        if id not in self._open and self._early.pop(id, None) is not None:
            self.dropped += 1

    def take(self) -> list[tuple[str, bool]]:
        """Ids this rank reports now, with whether they failed. Consumes."""
        ready, self.ready = self.ready, []
        return ready

    def __repr__(self) -> str:
        return f"{self._direction}(open={len(self._open)} early={len(self._early)})"


class RankGate:
    """Rules 4 and 7, for one worker: children's reports in, this rank's reports and facts out."""

    table: type[ClaimTable] = ClaimTable

    def __init__(self, rank: int, memory: int = 4096) -> None:
        self._sends = self.table("send", rank, memory)
        self._loads = self.table("recv", rank, memory)
        self._newest = 0

    def bind(self, step: MultiStep) -> None:
        """This step's announcements. A step bound before changes nothing."""
        if step.seq <= self._newest:
            return
        self._newest = step.seq
        for id, n in step.closed:
            self._sends.close(id, n)
        for id in step.arrived:
            self._sends.arrived(id)
            self._loads.arrived(id)
        for claim in step.sends:
            self._sends.announce(claim)
        for claim in step.loads:
            self._loads.announce(claim)

    def reports(self, child: int, results: TransferResults) -> None:
        """What child ``child`` said in this poll (rule 7)."""
        for id in sorted(results.finished_sending):
            self._sends.report(id, child)
        for id in sorted(results.failed_recving):
            self._loads.report(id, child, settled=False)
        for id in sorted(results.finished_recving):
            self._loads.report(id, child)

    def ended(self, ids: Iterable[str]) -> None:
        """Requests that ended since the last step, after their claims were bound and this step's reports taken."""
        for id in ids:
            self._sends.ended(id)
            self._loads.ended(id)

    def take(self) -> TransferResults:
        """What this rank reports. Consumes."""
        if not (self._sends.ready or self._loads.ready):
            return NO_RESULTS
        received = self._loads.take()
        return TransferResults(
            frozenset(id for id, _ in self._sends.take()),
            frozenset(id for id, _ in received),
            frozenset(id for id, failed in received if failed),
        )

    def take_facts(self) -> list[Fact]:
        """Our own facts since the last call. Consumes."""
        if not (self._sends.facts or self._loads.facts):
            return []
        facts = self._sends.facts + self._loads.facts
        self._sends.facts, self._loads.facts = [], []
        return facts

    def take_counts(self) -> tuple[int, int]:
        """Duplicates absorbed and early reports dropped since the last call."""
        sends, loads = self._sends, self._loads
        counts = sends.duplicates + loads.duplicates, sends.dropped + loads.dropped
        sends.duplicates = loads.duplicates = sends.dropped = loads.dropped = 0
        return counts

    def __repr__(self) -> str:
        return f"RankGate({self._sends!r} {self._loads!r})"


def _remember(table: OrderedDict[K, None], key: K, memory: int) -> None:
    table[key] = None
    table.move_to_end(key)
    while len(table) > memory:
        table.popitem(last=False)


# --- the engine ---------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Held:
    """An open life: who claims it, whose ranks are complete (``given`` to that child), who let it through."""

    n: int
    claimers: frozenset[int]
    spare: bool
    given: list[int] = field(default_factory=list)
    passed: set[int] = field(default_factory=set)
    failed: bool = False
    why: str = ""


class Share(msgspec.Struct, frozen=True):
    """One child's part of one step's output: the ids whose ranks have all reported for it, and its own facts."""

    sent: frozenset[str] = NOBODY
    received: frozenset[str] = NOBODY
    failed: frozenset[str] = NOBODY
    facts: tuple[Fact, ...] = ()


class EngineGate:
    """Rules 3, 5 and 6, for the scheduler half. ``quorum``: by child, how many ranks complete its sends."""

    def __init__(self, children: int, ranks: Collection[int], quorum: Mapping[int, int] | None = None) -> None:
        self.ledger = CompletionLedger()
        self._children = children
        self._ranks = ranks
        self._quorum = dict(quorum or {})
        self._held: dict[Key, _Held] = {}
        self._touched: dict[Key, None] = {}
        self._seq = 0
        self._sends: list[Claim] = []
        self._loads: list[Claim] = []
        self._closed: list[tuple[str, int]] = []
        self._arrived: list[str] = []
        self._waits: set[int] = set()
        #: ids in the engine's sets that named closed lives of ours.
        self.late = 0

    # -- lives -------------------------------------------------------------------------------------------------

    def open(self, id: str, direction: Direction, claimers: Iterable[int], now: float | None = None) -> None:
        """A life begins; the next step announces it. Without claimers every rank reports it at once."""
        children = sorted(claimers)
        few = {child: self._quorum[child] for child in children if direction == "send" and child in self._quorum}
        n = self.ledger.open(
            id,
            direction,
            {(child,): self._ranks for child in children},
            quorum={(child,): ranks for child, ranks in few.items()},
            now=now,
        )
        self._held[id, direction] = _Held(n, frozenset(children), bool(few))
        claim = Claim(id, n, tuple(child for child in children if child not in few), tuple(few))
        (self._sends if direction == "send" else self._loads).append(claim)

    def loading(self, id: str) -> bool:
        """True while a receive of this id is open: its blocks are not given back yet."""
        return (id, "recv") in self._held

    def wait_for(self, children: Iterable[int]) -> None:
        """Children whose synchronous ranges, announced with the next step, belong to a parked request."""
        self._waits |= set(children)

    def arrived(self, id: str) -> None:
        """A new request: the ranks must not take older words for words about it."""
        self._arrived.append(id)

    @property
    def unshipped(self) -> bool:
        """True while ranks keep a claim only because they have not heard that it is closed."""
        return bool(self._closed)

    def step(self) -> MultiStep:
        """Everything since the last step; ``NO_STEP`` when that is nothing."""
        if not (self._sends or self._loads or self._closed or self._arrived or self._waits):
            return NO_STEP
        self._seq += 1
        step = MultiStep(
            self._seq,
            tuple(self._sends),
            tuple(self._loads),
            tuple(self._closed),
            tuple(self._arrived),
            tuple(sorted(self._waits)),
        )
        self._sends, self._loads, self._closed, self._arrived, self._waits = [], [], [], [], set()
        return step

    # -- reports -----------------------------------------------------------------------------------------------

    def take(self, facts: Iterable[Fact]) -> list[Share]:
        """Apply our own facts; hand every child its facts and the ids that became complete for it."""
        theirs: list[list[Fact]] = [[] for _ in range(self._children)]
        touched: dict[Key, None] = {}
        for fact in facts:
            path = fact.child
            head, rest = path[0] if path else NO_CHILD, path[1:]
            if head == OWN:
                key = (fact.id, fact.direction)
                touched[key] = None
                self.ledger.report(fact, rest)
                if fact.state == "failed" and (held := self._held.get(key)) is not None and held.n == fact.n:
                    held.failed = True
            elif 0 <= head < self._children:
                theirs[head].append(
                    Fact(fact.id, fact.direction, fact.n, fact.rank, fact.state, rest, fact.why, fact.more)
                )
        self._touched = touched
        news: list[list[Key]] = [[] for _ in range(self._children)]
        for key in touched:
            held = self._held.get(key)
            if held is not None:
                for (child,) in self.ledger.settled(*key)[len(held.given) :]:
                    held.given.append(child)
                    news[child].append(key)
        return [self._share(keys, child_facts) for keys, child_facts in zip(news, theirs, strict=True)]

    def _share(self, keys: Sequence[Key], facts: Sequence[Fact]) -> Share:
        if not keys:
            return Share(facts=tuple(facts))
        received = [id for id, direction in keys if direction == "recv"]
        return Share(
            frozenset([id for id, direction in keys if direction == "send"]),
            frozenset(received),
            frozenset([id for id in received if self._held[id, "recv"].failed]),
            tuple(facts),
        )

    def passed(
        self,
        child: int,
        sent: Iterable[str],
        received: Iterable[str],
        failed: Iterable[str],
        why: Mapping[str, str] | None = None,
    ) -> None:
        """What child ``child``'s scheduler half let through, now or after holding it back. It cannot originate.

        A child that owed both directions lets its request through once, at the later one (rule 6), so that its word
        counts for every direction whose ranks are complete for it. ``why``: of the failed ones.
        """
        for id in (*sent, *received):
            for direction in DIRECTIONS:
                held = self._held.get((id, direction))
                if held is not None and child in held.given:
                    held.passed.add(child)
                    self._touched[id, direction] = None
        for id in failed:
            held = self._held.get((id, "recv"))
            if held is not None and child in held.passed:
                held.failed = True
                held.why = held.why or (why or {}).get(id, "")

    def emit(self, sent: Iterable[str], received: Iterable[str], failed: Iterable[str]) -> Emit:
        """Filter the engine's sets; call after :meth:`take` and :meth:`passed` of the same step."""
        named = dict(self._touched)
        out_sent = self._siblings("send", sent, named)
        out_received = self._siblings("recv", received, named)
        out_failed = out_received.intersection(failed)
        why: dict[str, str] = {}
        for id, direction in self._touched:
            over = self._release(id, direction)
            if over is None:
                continue
            if direction == "send":
                out_sent.add(id)
                continue
            out_received.add(id)
            if over.failed:
                out_failed.add(id)
                why |= {id: over.why} if over.why else {}
        self._touched = {}
        return Emit(frozenset(out_sent), frozenset(out_received), frozenset(out_failed), why)

    def _siblings(self, direction: Direction, ids: Iterable[str], named: Mapping[Key, None]) -> set[str]:
        """Of the engine's set what is no business of ours; what is has been seen now."""
        others: set[str] = set()
        for id in ids:
            key = (id, direction)
            if self.ledger.mark_seen(id, direction):
                self._touched[key] = None
            elif key in named:
                self.late += 1
            else:
                others.add(id)
        return others

    def _release(self, id: str, direction: Direction) -> _Held | None:
        """Close a life that is due. None: nothing to emit."""
        held = self._held.get((id, direction))
        if held is None or held.passed != held.claimers or self.ledger.pop_ready(id, direction) is None:
            return None
        del self._held[id, direction]
        if held.spare:
            self._closed.append((id, held.n))
        return None if (id, "recv" if direction == "send" else "send") in self._held else held

    def take_absorbed(self) -> int:
        """Reports and ids that changed nothing, since the last call."""
        if not (self.late or self.ledger.absorbed):
            return 0
        count = self.ledger.absorbed.total() + self.late
        self.ledger.absorbed.clear()
        self.late = 0
        return count

    def explain(self, names: Mapping[int, str], now: float) -> list[str]:
        """One line per open life: owed by which ranks of which child, or held back by which child."""
        paths: dict[Child, str] = {(child,): name for child, name in names.items()}
        lines: list[str] = []
        for life in self.ledger.pending():
            line = life.describe(paths, now)
            held = self._held[life.id, life.direction]
            vetoed = sorted(set(held.given) - held.passed)
            if vetoed:
                line += ", held back by " + ", ".join(names[child] for child in vetoed)
            lines.append(line)
        return lines

    def __repr__(self) -> str:
        return f"EngineGate(open={len(self._held)} {self.ledger!r})"
