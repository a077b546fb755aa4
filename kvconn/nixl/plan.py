"""Pure: my regions and a peer's -> which bytes to read of whom, or why that cannot work.

Rules
1. No value of a peer is trusted: whatever does not fit is an :class:`Incompatible` that names the field, ours, theirs
   and what to do. Nothing here raises.
2. A feature is data in the plan, never a branch in the worker. A head group is a region whose blocks are a part of the
   blocks it lies in, so that pairing knows nothing of heads.
3. :func:`routes` says whom one rank reads or tells, :func:`make_plan` what it reads of one of them. Every rank of
   theirs is told by exactly the ranks of ours that ``Route.readers`` counts: what is read by nobody (a copy of a head)
   is told by one, so that no rank of theirs waits for its lease.
Both sides have pp 1, dcp 1, equal blocks and equal groups, and TP sizes of which one divides the other; replicated PCP
on the producer needs nothing of the reader, because only the canonical replica publishes itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from kvconn.geometry import HeadShare, Place, RankCache, Region, Share, Side
from kvconn.nixl.wire import AgentMetadata, KvconnAgent

__all__ = ["Incompatible", "Plan", "RegionPair", "Route", "make_plan", "missing", "routes"]

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


class RegionPair(msgspec.Struct, frozen=True):
    """A region of ours, or a part of one, and where the peer has what fills it. Bytes; equal block lengths."""

    local: Region
    remote_base: int
    remote_stride: int

    @property
    def dense(self) -> bool:
        """True when a run of blocks is one range on both sides."""
        return self.local.dense and self.remote_stride == self.local.length


class Plan(msgspec.Struct, frozen=True):
    """What one rank of ours reads of one rank of theirs. ``readers``: how many of our ranks read from that rank."""

    pairs: tuple[RegionPair, ...]
    remote_blocks: int
    readers: int = 1
    source: Place = Place(0, 0)
    #: the peer's fence and the key its references are sealed with; None for a peer that has none
    fence: KvconnAgent | None = None
    seal_key: bytes = b""


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
    """The ranks of a peer that our rank at ``place`` reads or tells, by their place.

    Every stage of ours tells every stage of theirs, whoever has the layers: which they are is known only from both.
    """
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
    if not (1 <= a <= MAX_INTERLEAVE and 1 <= b <= MAX_INTERLEAVE) or (a % b and b % a):
        return Incompatible(
            "dcp interleave", str(a), str(b), f"tokens, 1 to {MAX_INTERLEAVE}, one a multiple of the other"
        )
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


def make_plan(ours: RankCache, theirs: AgentMetadata, route: Route = WHOLE) -> Plan | Incompatible:
    """What one rank of ours reads of the rank of theirs that ``route`` names."""
    problem = _differs(ours.regions, ours.block_size, theirs, route)
    if problem is not None:
        return problem
    mine, other = route.ours.heads, route.theirs.heads
    pairs: list[RegionPair] = []
    for region, base, stride in zip(ours.regions, theirs.kv_caches_base_addr, theirs.block_strides, strict=True):
        head = region.length // mine.count
        if route.count:
            part = region.part((route.first - mine.first) * head, route.count * head)
            pairs.append(RegionPair(part, base + (route.first - other.first) * head, stride))
    return Plan(tuple(pairs), theirs.num_blocks, route.readers, route.source)


def missing(ours: RankCache, plans: Sequence[Plan]) -> Incompatible | None:
    """What of ours no source of a peer has, when all its sources that we read are planned."""
    return None


def _differs(regions: Sequence[Region], block_size: int, theirs: AgentMetadata, route: Route) -> Incompatible | None:
    planned = "this version reads from peers of equal geometry"
    if theirs.dcp_size != 1:
        return Incompatible("dcp size", "1", str(theirs.dcp_size), planned)
    if theirs.block_size != block_size:
        return Incompatible("block size", str(block_size), str(theirs.block_size), planned)
    if theirs.physical_blocks_per_logical_kv_block != 1:
        return Incompatible("kernel blocks per block", "1", str(theirs.physical_blocks_per_logical_kv_block), planned)
    if len(regions) != len(theirs.kv_caches_base_addr):
        return Incompatible("regions", str(len(regions)), str(len(theirs.kv_caches_base_addr)), "layers differ")
    names = [region.name for region in regions]
    if theirs.region_names is not None and theirs.region_names != names:
        mine, other = next((a, b) for a, b in zip(names, theirs.region_names, strict=True) if a != b)
        return Incompatible("region name", mine, other, "layers are paired by name and order")
    for index, region in enumerate(regions):
        head, odd = divmod(region.length, route.ours.heads.count)
        if odd or theirs.block_lens[index] != head * route.theirs.heads.count:
            return Incompatible(
                f"block length of {region.name}",
                _length(region.length, route.ours.heads),
                _length(theirs.block_lens[index], route.theirs.heads),
                "dtype, head size or kv heads differ",
            )
        if theirs.region_group_ids is not None and theirs.region_group_ids[index] != region.group:
            return Incompatible(
                f"cache group of {region.name}", str(region.group), str(theirs.region_group_ids[index]), planned
            )
        blocks = theirs.region_num_blocks[index] if theirs.region_num_blocks is not None else theirs.num_blocks
        if blocks != theirs.num_blocks:
            return Incompatible(
                f"blocks of {region.name}", str(theirs.num_blocks), str(blocks), "one pool size per peer"
            )
    return None


def _length(length: int, share: HeadShare) -> str:
    return f"{length} B" if share.count == 1 else f"{length} B for {share.count} heads"
