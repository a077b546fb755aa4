"""Faults that the simulator must find: each puts one known mistake back.

Rules
1. A mutant is a context in which the product has the fault, or another NIXL connector to build.
2. Its row says which violation shows it; another one would be another fault.
3. Memory and words must show a fault, not a table that looks odd.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from kvconn.aggregator import KVOutputAggregator
from kvconn.ledger import CompletionLedger
from kvconn.multi.policy import EngineGate
from kvconn.nixl.checks import Checks, Verdict
from kvconn.nixl.reader import Reader
from kvconn.nixl.scheduler import NixlScheduler
from kvconn.nixl.transfers import Reads, Settled
from kvconn.nixl.worker import NixlWorker

Context = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Mutant:
    """``shows``: how the violation begins. ``shape``: what the fault needs to be there at all."""

    context: Context
    shows: str
    shape: dict[str, Any]
    #: what is left at the end counts too
    tables: bool = False


@contextmanager
def counting() -> Iterator[None]:
    """Reports are counted, in the aggregator and in the ledgers: two words of one rank are two words."""

    def report(self: Any, direction: Any, id: str, ranks: int, now: float | None) -> None:
        key = (direction, id)
        if direction == "send" and id in self._sent and key not in self._entries:
            return
        entry = self._entries.get(key) or self._open(key, now)
        entry.ranks = (1 << entry.ranks.bit_count() + ranks.bit_count()) - 1
        if entry.ranks.bit_count() >= self.need:
            self._complete(key, entry)

    def word(self: CompletionLedger, fact: Any, child: Any = None) -> None:
        life = self._open[fact.direction].get(fact.id)
        child = fact.child if child is None else child
        owed = life.owed.get(child) if life is not None and life.n == fact.n else None
        if life is not None and owed:
            life.failed |= fact.state == "failed"
            if fact.state != "failed":
                for _ in range(fact.ranks.bit_count()):
                    owed &= owed - 1
                life.owed = {**life.owed, child: owed}
                if not owed:
                    life.settled = (*life.settled, child)

    with patch.object(KVOutputAggregator, "_report", report), patch.object(CompletionLedger, "report", word):
        yield


def free_on_release() -> AbstractContextManager[Any]:
    """At its deadline a read is released, and the release is taken for its end (F1)."""
    original = Reader._overdue

    def mutant(self: Reader, id: str, now: float) -> None:
        original(self, id, now)
        for handle in list(self._reads._open[id].handles):
            self._posted.pop(handle).peer.ended()
            self._looking.discard(handle)
            del self._agent.transport._reads[handle]  # type: ignore[union-attr]  # what a release does that refuses nothing
            self._reads.done(handle)

    return patch.object(Reader, "_overdue", mutant)


def free_on_failure() -> AbstractContextManager[Any]:
    """A failed load gives its blocks back at once."""

    def mutant(self: Reads) -> list[Settled]:
        over = [r for r in self._open.values() if r.failed is not None or not (r.handles or r.posting)]
        for read in over:
            del self._open[read.id]
        return [Settled(read.id, read.n, read.failed) for read in over]

    return patch.object(Reads, "settle", mutant)


def err_is_quiet() -> AbstractContextManager[Any]:
    """ERR is taken for the end of a read (F4)."""
    original = Reader._handle_error

    def mutant(self: Reader, handle: int, now: float) -> None:
        original(self, handle, now)
        self._forget(handle)
        self._reads.done(handle)

    return patch.object(Reader, "_handle_error", mutant)


def fence_a_step_late() -> AbstractContextManager[Any]:
    """A request's word is written with the step after its first."""
    original = NixlScheduler._fence
    late: dict[int, Any] = {}

    def mutant(self: NixlScheduler, view: Any) -> Any:
        before = late.get(id(self), ())
        late[id(self)] = original(self, view)
        return before

    return patch.object(NixlScheduler, "_fence", mutant)


def fence_after_report() -> AbstractContextManager[Any]:
    """The word comes down one poll after the report."""
    original = NixlWorker._ended_sends
    late: dict[int, list[int]] = {}

    def mutant(self: NixlWorker, now: float) -> set[str]:
        if self._fence is None:
            return original(self, now)
        slots = late.setdefault(id(self), [])
        for slot in slots:
            self._fence.zero(slot)
        slots.clear()
        with patch.object(self._fence, "zero", slots.append):
            return original(self, now)

    return patch.object(NixlWorker, "_ended_sends", mutant)


def no_fence() -> AbstractContextManager[Any]:
    """The fence is read and every answer is good."""
    return patch.object(Checks, "judge", lambda self, id, word: Verdict.HELD)


def lease_before_drain() -> AbstractContextManager[Any]:
    """Leases are judged before the notifications are read (C11)."""
    original = NixlWorker.poll

    def mutant(self: NixlWorker, now: float) -> Any:
        self._ended += self._leases.expire(now)
        return original(self, now)

    return patch.object(NixlWorker, "poll", mutant)


def early_child() -> AbstractContextManager[Any]:
    """A Multi lets go when one of the children that claimed a request is complete."""
    original = EngineGate.open

    def mutant(self: Any, id: str, direction: Any, claimers: Any, now: float | None = None) -> None:
        children = tuple(claimers)
        original(self, id, direction, children[:1] if direction == "send" else children, now)

    return patch.object(EngineGate, "open", mutant)


HIDDEN = "kvconn.testing.contract:HiddenRanksNixlConnector"

MUTANTS: dict[str, Mutant] = {
    "hidden ranks, alone": Mutant(nullcontext, "(d)", {"pcp": 2, "nixl": HIDDEN}, tables=True),
    "hidden ranks, in Multi": Mutant(
        nullcontext, "(d)", {"pcp": 4, "nixl": HIDDEN, "producer": "in Multi"}, tables=True
    ),
    "counting instead of identity": Mutant(counting, "(c)", {"pcp": 2}),
    "counting instead of identity, in Multi": Mutant(counting, "(c)", {"pcp": 2, "producer": "in Multi"}),
    "free on release instead of quiet": Mutant(free_on_release, "(b)", {}),
    "free on failure instead of quiet": Mutant(free_on_failure, "(b)", {}),
    "ERR is quiet": Mutant(err_is_quiet, "(b)", {}),
    "fence opened a step late": Mutant(fence_a_step_late, "(e)", {}),
    "fence closed after the report": Mutant(fence_after_report, "(a)", {}),
    "no fence": Mutant(no_fence, "(a)", {}),
    "lease judged before draining": Mutant(lease_before_drain, "(c)", {}),
    "one child is enough": Mutant(early_child, "(c)", {"producer": "with a slow sibling"}),
}
