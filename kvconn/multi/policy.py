"""What a MultiConnector decides: who loads, who claims, whose word is still missing, whose params the client gets.

Rules
1. The first child that can load loads, and nobody after it is asked. A child's "not yet" delays only when no earlier
   child matched; asking is idempotent (C10).
2. A life of ours opens over the children that claim it and all ranks of the engine: parties are (child, rank), and
   completion is the set of them, never a count (C3).
3. On a rank, an id leaves once per life: when its claim is bound and every claiming child reported there. A report
   that comes before its claim waits, bounded, and counts when the claim comes; a repeated claim changes nothing (C1).
4. In the engine, an id leaves once per life: when the engine's own set named it, every party reported, and every
   claiming child's scheduler half let it through. Veto, never originate. An id that no fact of ours names passes.
5. A request whose receive and send are both open is released by the later one; the earlier is held back (C13).
6. Facts have namespaces by path. ``(i, ...)`` is child i's own word, stripped and handed to it, with n from the
   child's own ledger. ``(OWN, i)`` is this MultiConnector's word about its child i, with n from its own ledger; a
   nested one's arrives as ``(j, OWN, i)``, so that the two never meet.
No I/O and no clock: ``now`` is an argument, in seconds.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvconn.base import Direction, Fact, TransferResults
from kvconn.ledger import Child, CompletionLedger, Emit

__all__ = [
    "OWN",
    "Claim",
    "ClaimTable",
    "EngineGate",
    "Match",
    "MultiStep",
    "RankGate",
    "Share",
    "choose",
    "merge_params",
    "prefixed",
]

#: first element of the path of a MultiConnector's own facts; no child has this index.
OWN = -1
Key = tuple[str, Direction]
DIRECTIONS: tuple[Direction, Direction] = ("send", "recv")
NOBODY: frozenset[str] = frozenset()


# --- who loads, and what the client is told -----------------------------------------------------------------------


class Match(msgspec.Struct, frozen=True):
    """Who loads. ``tokens`` None: not yet, ask again; ``child`` None: nobody."""

    child: int | None = None
    tokens: int | None = 0
    asynchronous: bool = False

    @property
    def answer(self) -> tuple[int | None, bool]:
        """As ``get_num_new_matched_tokens`` returns it."""
        return self.tokens, self.asynchronous


def choose(ask: Iterable[Callable[[], tuple[int | None, bool]]]) -> Match:
    """Ask children in order until one matches or says "not yet"."""
    for child, question in enumerate(ask):
        tokens, asynchronous = question()
        if tokens is None:
            return Match(tokens=None)
        if tokens > 0:
            return Match(child, tokens, asynchronous)
    return Match()


def merge_params(returned: Sequence[Mapping[str, Any] | None]) -> tuple[dict[str, Any] | None, tuple[int, ...]]:
    """The client's params, and the children left out.

    A child that contradicts an earlier one is left out whole: half of its params beside another's would describe
    blocks that nobody holds.
    """
    merged: dict[str, Any] | None = None
    left_out: list[int] = []
    for child, params in enumerate(returned):
        if params is None:
            continue
        if merged is not None and any(key in merged and merged[key] != value for key, value in params.items()):
            left_out.append(child)
        else:
            merged = {**(merged or {}), **params}
    return merged, tuple(left_out)


def prefixed(child: int, facts: Iterable[Fact]) -> list[Fact]:
    """Child ``child``'s own facts, as they travel through this MultiConnector."""
    return [msgspec.structs.replace(fact, child=(child, *fact.child)) for fact in facts]


# --- what crosses from the scheduler half to the ranks ------------------------------------------------------------


class Claim(msgspec.Struct, frozen=True):
    """A life of ours: the children whose reports it waits for."""

    id: str
    n: int
    children: tuple[int, ...]


class MultiStep(msgspec.Struct, frozen=True):
    """Lives opened since the last step, oldest first. ``again``: ids we released that came back as new requests."""

    sends: tuple[Claim, ...] = ()
    loads: tuple[Claim, ...] = ()
    again: tuple[str, ...] = ()


# --- one rank -----------------------------------------------------------------------------------------------------


@dataclass
class _Open:
    n: int
    owed: set[int]
    failed: bool = False


class ClaimTable:
    """One rank's claims of one direction, and reports that came before theirs."""

    def __init__(self, direction: Direction, rank: int, memory: int) -> None:
        self._direction = direction
        self._rank = rank
        self._memory = memory
        self._open: dict[str, _Open] = {}
        #: id -> {child: failed}, oldest first
        self._early: OrderedDict[str, dict[int, bool]] = OrderedDict()
        #: ids reported here whose next life is not announced: a bare child's second word is absorbed (C4).
        self._done: OrderedDict[str, None] = OrderedDict()
        self._newest = 0
        self._ready: list[tuple[str, bool]] = []
        self.facts: list[Fact] = []
        #: reports that changed nothing.
        self.duplicates = 0
        #: early reports given up: their request ended unclaimed, or too many waited.
        self.dropped = 0

    def announce(self, claim: Claim) -> None:
        """A claim is bound; what was reported early counts now. A claim bound before changes nothing."""
        if claim.n <= self._newest:
            return
        self._newest = claim.n
        self._done.pop(claim.id, None)
        self._open[claim.id] = _Open(claim.n, set(claim.children))
        for child, failed in self._early.pop(claim.id, {}).items():
            self.report(claim.id, child, failed)

    def report(self, id: str, child: int, failed: bool = False) -> None:
        """Child ``child`` has reported ``id`` on this rank."""
        claim = self._open.get(id)
        if claim is None:
            self._unclaimed(id, child, failed)
        elif child not in claim.owed:
            self.duplicates += 1
        else:
            claim.owed.discard(child)
            claim.failed |= failed
            self._say(id, child, claim.n, failed)
            if not claim.owed:
                self._complete(id, claim.failed)

    def _say(self, id: str, child: int, n: int, failed: bool) -> None:
        path = (OWN, child)
        if failed:
            self.facts.append(Fact(id, self._direction, n, self._rank, "failed", path))
        self.facts.append(Fact(id, self._direction, n, self._rank, "quiet" if failed else "done", path))

    def _complete(self, id: str, failed: bool) -> None:
        del self._open[id]
        self._ready.append((id, failed))
        self._done[id] = None
        if len(self._done) > self._memory:
            self._done.popitem(last=False)

    def _unclaimed(self, id: str, child: int, failed: bool) -> None:
        if id in self._done or child in self._early.get(id, ()):
            self.duplicates += 1
            return
        self._early.setdefault(id, {})[child] = failed
        if len(self._early) > self._memory:
            self._early.popitem(last=False)
            self.dropped += 1

    def again(self, id: str) -> None:
        """A released id came back: its reports are news again."""
        self._done.pop(id, None)

    def ended(self, id: str) -> None:
        """The request ended; had anybody claimed it, the claim would be bound by now."""
        if id not in self._open and self._early.pop(id, None) is not None:
            self.dropped += 1

    def take(self) -> list[tuple[str, bool]]:
        """Ids this rank reports now, with whether they failed. Consumes."""
        ready, self._ready = self._ready, []
        return ready

    def __repr__(self) -> str:
        return f"{self._direction}(open={len(self._open)} early={len(self._early)})"


class RankGate:
    """Rule 3, for one worker: children's reports in, this rank's reports and facts out."""

    table: type[ClaimTable] = ClaimTable

    def __init__(self, rank: int, memory: int = 4096) -> None:
        self._sends = self.table("send", rank, memory)
        self._loads = self.table("recv", rank, memory)

    def bind(self, step: MultiStep) -> None:
        """This step's announcements."""
        for id in step.again:
            self._sends.again(id)
            self._loads.again(id)
        for claim in step.sends:
            self._sends.announce(claim)
        for claim in step.loads:
            self._loads.announce(claim)

    def reports(self, child: int, results: TransferResults) -> None:
        """What child ``child`` said in this poll. A failed receive is a receive."""
        for id in sorted(results.finished_sending):
            self._sends.report(id, child)
        for id in sorted(results.finished_recving | results.failed_recving):
            self._loads.report(id, child, id in results.failed_recving)

    def ended(self, ids: Iterable[str]) -> None:
        """Requests that ended since the last step, after their claims were bound and this step's reports taken."""
        for id in ids:
            self._sends.ended(id)
            self._loads.ended(id)

    def take(self) -> TransferResults:
        """What this rank reports. Consumes."""
        received = self._loads.take()
        return TransferResults(
            frozenset(id for id, _ in self._sends.take()),
            frozenset(id for id, _ in received),
            frozenset(id for id, failed in received if failed),
        )

    def take_facts(self) -> list[Fact]:
        """Our own facts since the last call. Consumes."""
        facts = self._sends.facts + self._loads.facts
        self._sends.facts, self._loads.facts = [], []
        return facts

    def take_counts(self) -> tuple[int, int]:
        """Duplicates absorbed and early reports dropped since the last call."""
        tables = (self._sends, self._loads)
        counts = sum(t.duplicates for t in tables), sum(t.dropped for t in tables)
        for table in tables:
            table.duplicates = table.dropped = 0
        return counts

    def __repr__(self) -> str:
        return f"RankGate({self._sends!r} {self._loads!r})"


# --- the engine ---------------------------------------------------------------------------------------------------


@dataclass
class _Held:
    """An open life: who claims it, whose ranks are complete (``given`` to that child), who let it through."""

    n: int
    claimers: frozenset[int]
    given: set[int] = field(default_factory=set)
    passed: set[int] = field(default_factory=set)
    failed: bool = False


class Share(msgspec.Struct, frozen=True):
    """One child's part of one step's output: the ids whose ranks have all reported for it, and its own facts."""

    sent: frozenset[str] = NOBODY
    received: frozenset[str] = NOBODY
    failed: frozenset[str] = NOBODY
    facts: tuple[Fact, ...] = ()


class EngineGate:
    """Rules 2, 4 and 5, for the scheduler half."""

    def __init__(self, children: int, ranks: Collection[int], memory: int = 4096) -> None:
        self.ledger = CompletionLedger()
        self._children = children
        self._ranks = ranks
        self._memory = memory
        self._held: dict[Key, _Held] = {}
        self._touched: dict[Key, None] = {}
        self._released: OrderedDict[str, None] = OrderedDict()
        self._sends: list[Claim] = []
        self._loads: list[Claim] = []
        self._again: list[str] = []
        #: ids in the engine's sets that named closed lives of ours.
        self.late = 0

    # -- lives -------------------------------------------------------------------------------------------------

    def open(self, id: str, direction: Direction, claimers: Iterable[int], now: float | None = None) -> None:
        """A life begins; the next step announces it."""
        children = tuple(sorted(claimers))
        n = self.ledger.open(id, direction, {(child,): self._ranks for child in children}, now=now)
        self._held[id, direction] = _Held(n, frozenset(children))
        (self._sends if direction == "send" else self._loads).append(Claim(id, n, children))

    def arrived(self, id: str) -> None:
        """A new request; its id may be one we released before."""
        if id in self._released:
            del self._released[id]
            self._again.append(id)

    def step(self) -> MultiStep:
        """Everything opened since the last step."""
        step = MultiStep(tuple(self._sends), tuple(self._loads), tuple(self._again))
        self._sends, self._loads, self._again = [], [], []
        return step

    # -- reports -----------------------------------------------------------------------------------------------

    def take(self, facts: Iterable[Fact]) -> list[Share]:
        """Apply our own facts; hand every child its facts and the ids that became complete for it."""
        own: list[Fact] = []
        theirs: list[list[Fact]] = [[] for _ in range(self._children)]
        for fact in facts:
            head, rest = fact.child[:1], fact.child[1:]
            if head == (OWN,):
                own.append(msgspec.structs.replace(fact, child=rest))
            elif head and 0 <= head[0] < self._children:
                theirs[head[0]].append(msgspec.structs.replace(fact, child=rest))
        news: list[list[Key]] = [[] for _ in range(self._children)]
        for key in self._apply(own):
            for child in self._give(key):
                news[child].append(key)
        return [self._share(keys, child_facts) for keys, child_facts in zip(news, theirs, strict=True)]

    def _apply(self, own: Iterable[Fact]) -> dict[Key, None]:
        touched: dict[Key, None] = {}
        for fact in own:
            self.ledger.report(fact)
            key = (fact.id, fact.direction)
            held = self._held.get(key)
            touched[key] = None
            if held is not None and held.n == fact.n and fact.state == "failed":
                held.failed = True
        self._touched = touched
        return touched

    def _give(self, key: Key) -> frozenset[int]:
        """The claimers whose ranks have all reported since the last call."""
        held, pending = self._held.get(key), self.ledger.get(*key)
        if held is None or pending is None:
            return frozenset()
        new = held.claimers - held.given - {path[0] for path, _ in pending.owed}
        held.given |= new
        return new

    def _share(self, keys: Sequence[Key], facts: Sequence[Fact]) -> Share:
        return Share(
            frozenset(id for id, direction in keys if direction == "send"),
            frozenset(id for id, direction in keys if direction == "recv"),
            frozenset(id for id, direction in keys if direction == "recv" and self._held[id, direction].failed),
            tuple(facts),
        )

    def passed(self, child: int, sent: Iterable[str], received: Iterable[str], failed: Iterable[str]) -> None:
        """What child ``child``'s scheduler half let through, now or after holding it back. It cannot originate.

        A child that owed both directions lets its request through once, at the later one (rule 5), so that its word
        counts for every direction whose ranks are complete for it.
        """
        for id in (*sent, *received):
            for direction in DIRECTIONS:
                held = self._held.get((id, direction))
                if held is not None and child in held.given:
                    held.passed.add(child)
                    self._touched[id, direction] = None
        for id in failed:
            if (id, "recv") in self._held and child in self._held[id, "recv"].passed:
                self._held[id, "recv"].failed = True

    def emit(self, sent: Iterable[str], received: Iterable[str], failed: Iterable[str]) -> Emit:
        """Filter the engine's sets; call after :meth:`take` and :meth:`passed` of the same step."""
        failed = set(failed)
        out: dict[Direction, set[str]] = {"send": set(), "recv": set()}
        out_failed: set[str] = set()
        named = dict(self._touched)
        for direction, ids in zip(DIRECTIONS, (sent, received), strict=True):
            for id in ids:
                if self.ledger.mark_seen(id, direction):
                    self._touched[id, direction] = None
                elif (id, direction) in named:
                    self.late += 1
                else:
                    out[direction].add(id)
                    out_failed |= {id} & failed if direction == "recv" else set()
        for id, direction in self._touched:
            lost = self._release(id, direction)
            if lost is None:
                continue
            out[direction].add(id)
            if lost:
                out_failed.add(id)
        self._touched = {}
        return Emit(frozenset(out["send"]), frozenset(out["recv"]), frozenset(out_failed))

    def _release(self, id: str, direction: Direction) -> bool | None:
        """Close a life that is due. None: nothing to emit; else whether it failed."""
        held = self._held.get((id, direction))
        if held is None or held.passed != held.claimers or self.ledger.pop_ready(id, direction) is None:
            return None
        del self._held[id, direction]
        if (id, "recv" if direction == "send" else "send") in self._held:
            return None
        self._released[id] = None
        if len(self._released) > self._memory:
            self._released.popitem(last=False)
        return held.failed

    def take_absorbed(self) -> int:
        """Reports and ids that changed nothing, since the last call."""
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
            vetoed = sorted(held.given - held.passed)
            if vetoed:
                line += ", held back by " + ", ".join(names[child] for child in vetoed)
            lines.append(line)
        return lines

    def __repr__(self) -> str:
        return f"EngineGate(open={len(self._held)} {self.ledger!r})"
