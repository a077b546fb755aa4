"""Jobs of the whole engine: which are open, what they are about, which rank still owes its word. No I/O.

Rules
1. A job is a life in a ledger of its own, over all ranks (C3, C4): at most one per kind and key, done when every rank
   has answered, failed when one of them says so. A save is of some blocks; the others are of one.
2. A store reads blocks of the engine's cache: :meth:`JobBook.stores_over` names the stores that must end before those
   blocks are written.
``now`` is an argument, in seconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Literal

import msgspec

from kvconn.base import Fact
from kvconn.ledger import CompletionLedger
from kvconn.offload.events import About

__all__ = ["Job", "JobBook", "Kind"]

Kind = Literal["store", "save", "fetch"]
#: (cache group, block id)
Place = tuple[int, int]


class Job(msgspec.Struct, frozen=True):
    """One open job of blocks ``keys``. ``request``: whose block a store was taken from."""

    name: str
    n: int
    kind: Kind
    keys: tuple[bytes, ...]
    abouts: tuple[About | None, ...]
    places: tuple[Place, ...] = ()
    request: str = ""


class JobBook:
    """Open jobs over ``ranks``."""

    def __init__(self, ranks: range) -> None:
        self._ranks = ranks
        self._ledger = CompletionLedger()
        self._jobs: dict[str, Job] = {}
        self._counts: Counter[Kind] = Counter()
        self._at: dict[Place, set[str]] = {}

    def open(
        self,
        kind: Kind,
        keys: tuple[bytes, ...],
        now: float,
        abouts: tuple[About | None, ...],
        places: tuple[Place, ...] = (),
        request: str = "",
    ) -> Job:
        """A new job; no pair of kind and one of ``keys`` must be open."""
        name = f"{kind}:{keys[0].hex()}"
        n = self._ledger.open(name, "send", {(): self._ranks}, now=now)
        job = self._jobs[name] = Job(name, n, kind, keys, abouts, places, request)
        self._counts[kind] += len(keys)
        for place in places:
            self._at.setdefault(place, set()).add(name)
        return job

    def is_open(self, kind: Kind, key: bytes) -> bool:
        """For kinds of which a job has one block."""
        return f"{kind}:{key.hex()}" in self._jobs

    def count(self, kind: Kind) -> int:
        """Blocks of open jobs of this kind."""
        return self._counts[kind]

    def report(self, facts: Iterable[Fact]) -> list[tuple[Job, bool]]:
        """Ranks' answers. Returns the jobs that are over now, and whether they went well."""
        touched: dict[str, None] = {}
        for fact in facts:
            self._ledger.report(fact)
            touched[fact.id] = None
        over = []
        for name in touched:
            closed = self._ledger.pop_ready(name, "send", require_seen=False)
            if closed is not None:
                over.append((self._close(name), not closed.failed))
        return over

    def _close(self, name: str) -> Job:
        job = self._jobs.pop(name)
        self._counts[job.kind] -= len(job.keys)
        for place in job.places:
            self._at[place].discard(name)
            if not self._at[place]:
                del self._at[place]
        return job

    def stores_over(self, places: Iterable[Place]) -> tuple[int, ...]:
        """Numbers of the open stores that read one of these blocks."""
        names = {name for place in places for name in self._at.get(place, ())}
        return tuple(sorted(self._jobs[name].n for name in names))

    def stores_of(self, request: str) -> tuple[int, ...]:
        """Numbers of the open stores of a request's blocks."""
        return tuple(job.n for job in self._jobs.values() if job.kind == "store" and job.request == request)

    def overdue(self, now: float, after: float) -> list[str]:
        """One line per job that has been open for longer than ``after``."""
        return [life.describe({(): "OffloadingConnector"}, now) for life in self._ledger.overdue(now, after)]

    def __len__(self) -> int:
        return len(self._jobs)

    def __repr__(self) -> str:
        counts = " ".join(f"{kind}={self._counts[kind]}" for kind in ("store", "save", "fetch"))
        return f"JobBook({counts})"
