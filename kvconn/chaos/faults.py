"""What happens to engines, and when. Pure: draws and timing; :mod:`kvconn.chaos.fleet` does it.

Rules
1. Kinds come from a shuffled deck, so that a short run has all of them, in an order that its seed decides.
2. One fault is under way at a time, and the next one waits until every engine is back: what is seen afterwards has one
   cause. A decode engine is not ended, and makes no new agent, while the prefill engine is stopped (F6).
3. A fault counts when it was seen to have happened, and as survived when every engine has served a request since.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

__all__ = ["FAULTS", "Director", "Fault"]

Kind = Literal["kill", "kill rank", "stop", "drain", "garbage", "flood"]


class Fault(msgspec.Struct, frozen=True):
    """``kind`` to an engine there. ``lasts``: seconds, drawn between the two. ``same_id``: it comes back as itself."""

    name: str
    kind: Kind
    where: Literal["P", "D"]
    lasts: tuple[float, float] = (0.0, 0.0)
    same_id: bool = False


def faults(read: float, lease: float) -> tuple[Fault, ...]:
    """All kinds, for engines with these deadlines in seconds."""
    return (
        Fault("P killed, back with a new engine id", "kill", "P"),
        Fault("P killed, back with its engine id", "kill", "P", same_id=True),
        Fault("a rank of P killed", "kill rank", "P"),
        Fault("P stopped, goes on", "stop", "P", (0.3, read)),
        Fault("P stopped past the read's deadline", "stop", "P", (read + 1, read + 2)),
        Fault("P told to end (SIGTERM)", "drain", "P"),
        Fault("garbage at P's side channel", "garbage", "P"),
        Fault("a message without an end at P's side channel", "flood", "P"),
        Fault("D killed, back at its address", "kill", "D"),
        Fault("a rank of D killed", "kill rank", "D"),
        Fault("D stopped past the lease", "stop", "D", (lease + 0.5, lease + 1.5)),
    )


FAULTS = tuple(fault.name for fault in faults(1.0, 1.0))


class Director:
    """Says which fault is next and when it ends; is told what became of it."""

    def __init__(self, kinds: Sequence[Fault], decoders: Sequence[str], rng: random.Random, now: float) -> None:
        self._kinds = tuple(kinds)
        self._decoders = tuple(decoders)
        self._rng = rng
        self._deck: list[Fault] = []
        self._next = now + 1.0
        #: the fault under way, its engine, and when it ends
        self.under_way: tuple[Fault, str, float] | None = None
        #: faults that happened, and what each engine had served then
        self._waiting: list[tuple[str, Mapping[str, int]]] = []
        self.injected: Counter[str] = Counter()
        self.survived: Counter[str] = Counter()

    @property
    def busy(self) -> bool:
        """A fault is under way, or was not seen to be survived yet."""
        return self.under_way is not None or bool(self._waiting)

    def draw(self, now: float) -> tuple[Fault, str] | None:
        """A fault and its engine, when it is time for one."""
        if self.busy or now < self._next or not self._kinds:
            return None
        if not self._deck:
            self._deck = self._rng.sample(self._kinds, len(self._kinds))
        fault = self._deck.pop()
        where = "P" if fault.where == "P" else self._rng.choice(self._decoders)
        self.under_way = fault, where, now + self._rng.uniform(*fault.lasts)
        return fault, where

    def ending(self, now: float) -> tuple[Fault, str] | None:
        """The fault under way whose time is over."""
        if self.under_way is None or now < self.under_way[2]:
            return None
        fault, where, _ = self.under_way
        return fault, where

    def over(self, happened: bool, served: Mapping[str, int], now: float) -> None:
        """The fault under way is over. ``served``: requests done per engine so far."""
        assert self.under_way is not None
        name = self.under_way[0].name
        self.under_way = None
        self._next = now + self._rng.uniform(0.3, 1.5)
        if happened:
            self.injected[name] += 1
            self._waiting.append((name, dict(served)))

    def look(self, served: Mapping[str, int]) -> None:
        """Faults since which every engine has served again are survived."""
        for name, before in list(self._waiting):
            if all(served.get(where, 0) > before.get(where, 0) for where in ("P", *self._decoders)):
                self.survived[name] += 1
                self._waiting.remove((name, before))
