"""Pure: two engines' sizes -> whom each rank of ours reads and tells.

Rules
1. No number of a peer is trusted: what does not fit is an :class:`Incompatible` that names the field, ours, theirs and
   what to do. Nothing here raises.
2. Every rank of theirs is told by exactly the ranks of ours that ``Route.readers`` counts: what is read by nobody (a
   copy of a head) is told by one of every stage, so that no rank of theirs waits for its lease.
3. Every stage of ours tells every stage of theirs, whoever has the layers: which they are is known only from both.
"""

from __future__ import annotations

from typing import Final

import msgspec

from kvconn.geometry import HeadShare, Place, Share, Side

__all__ = ["MAX_TP", "WHOLE", "Incompatible", "Route", "routes"]

#: TP ranks of one side; every dividing pair up to it is tested, and it bounds what a peer's number makes us compute.
MAX_TP: Final = 16
#: pipeline stages of one side, and tokens of one turn of DCP
MAX_PP: Final = 64
MAX_INTERLEAVE: Final = 4096


class Incompatible(msgspec.Struct, frozen=True):
    """Why this pair cannot exchange KV: the first field that differs."""

    field: str
    ours: str
    theirs: str
    hint: str

    def __str__(self) -> str:
        return f"{self.field}: ours {self.ours}, theirs {self.theirs} ({self.hint})"


class Route(msgspec.Struct, frozen=True):
    """A rank of theirs that a rank of ours tells when it is done, and reads ``count`` heads of from ``first`` on.

    ``count`` 0: it is told and not read. ``readers``: how many of our ranks tell it.
    """

    source: Place
    first: int
    count: int
    readers: int
    ours: Share
    theirs: Share


#: equal geometry at one rank: all of ours is all of theirs
WHOLE: Final = Route(Place(0, 0), 0, 1, 1, Share(HeadShare(0, 1)), Share(HeadShare(0, 1)))


def routes(ours: Side, theirs: Side, place: Place) -> tuple[Route, ...] | Incompatible:
    """The ranks of a peer that our rank at ``place`` reads or tells, by their place."""
    problem = _impossible(ours, theirs)
    if problem is not None:
        return problem
    mine = [share for tp in range(ours.tp) if (share := Share.of(ours, tp)) is not None]
    others = [share for tp in range(theirs.tp) if (share := Share.of(theirs, tp)) is not None]
    if len(mine) < ours.tp or len(others) < theirs.tp:
        hint = (
            f"{ours.kv_heads} KV heads and the TP size must divide one another, DCP the ranks per head, on both sides"
        )
        return Incompatible("kv heads per rank", _sizes(ours), _sizes(theirs), hint)
    found: list[Route] = []
    for pp in range(theirs.pp):
        for tp, share in enumerate(others):
            readers = [rank for rank, own in enumerate(mine) if _common(own, share)[1]]
            first, count = _common(mine[place.tp], share)
            if place.tp in readers or (not readers and place.tp == tp * ours.tp // theirs.tp):
                told = max(1, len(readers)) * ours.pp
                found.append(Route(Place(pp, tp), first, count, told, mine[place.tp], share))
    return tuple(found)


def _impossible(ours: Side, theirs: Side) -> Incompatible | None:
    """Sizes that no pair can have, or this one can't."""
    bounds = (("tp size", "tp", MAX_TP), ("pp size", "pp", MAX_PP), ("dcp size", "dcp", MAX_TP))
    for field, name, most in bounds:
        a, b = getattr(ours, name), getattr(theirs, name)
        if not (1 <= a <= most and 1 <= b <= most):
            return Incompatible(field, str(a), str(b), f"1 to {most} on either side")
        if name != "pp" and a % b and b % a:
            return Incompatible(field, str(a), str(b), "one must divide the other")
    a, b = ours.interleave, theirs.interleave
    if not (1 <= a <= MAX_INTERLEAVE and 1 <= b <= MAX_INTERLEAVE):
        return Incompatible("dcp interleave", str(a), str(b), f"1 to {MAX_INTERLEAVE} tokens")
    if ours.dcp > 1 and theirs.dcp > 1 and a % b and b % a:
        return Incompatible("dcp interleave", str(a), str(b), "one must divide the other")
    if ours.kv_heads != theirs.kv_heads or ours.kv_heads < 1:
        return Incompatible("kv heads", str(ours.kv_heads), str(theirs.kv_heads), "the models differ")
    return None


def _sizes(side: Side) -> str:
    return f"tp {side.tp}" + (f" dcp {side.dcp}" if side.dcp > 1 else "")


def _common(ours: Share, theirs: Share) -> tuple[int, int]:
    """First and number of the heads that the one reads of the other. Of copies, one: ours spread evenly over theirs."""
    mine, other = ours.heads, theirs.heads
    first = max(mine.first, other.first)
    count = min(mine.first + mine.count, other.first + other.count) - first
    if count <= 0 or mine.copy * other.copies // mine.copies != other.copy or not ours.tokens.meets(theirs.tokens):
        return first, 0
    return first, count
