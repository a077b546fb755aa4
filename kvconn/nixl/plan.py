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

from kvconn.geometry import HeadShare, Region
from kvconn.nixl.wire import AgentMetadata, KvconnAgent

__all__ = ["Incompatible", "Plan", "RegionPair", "Route", "make_plan", "routes"]

#: TP ranks of one side; every dividing pair up to it is tested, and it bounds what a peer's number makes us compute.
MAX_TP: Final = 16


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
    #: the peer's fence and the key its references are sealed with; None for a peer that has none
    fence: KvconnAgent | None = None
    seal_key: bytes = b""


class Route(msgspec.Struct, frozen=True):
    """A rank of theirs that a rank of ours tells when it is done, and reads ``count`` heads of from ``first`` on.

    ``count`` 0: it is told and not read. ``readers``: how many of our ranks tell it.
    """

    tp: int
    first: int
    count: int
    readers: int
    ours: HeadShare
    theirs: HeadShare


#: equal geometry at one rank: all of ours is all of theirs
WHOLE: Final = Route(0, 0, 1, 1, HeadShare(0, 1), HeadShare(0, 1))


def routes(kv_heads: int, tp: int, rank: int, their_tp: int) -> tuple[Route, ...] | Incompatible:
    """The ranks of a peer of ``their_tp`` ranks that our ``rank`` of ``tp`` reads or tells, by their rank.

    ``kv_heads``: of the whole model, 1 for a latent cache.
    """
    for size in (tp, their_tp):
        if not 1 <= size <= MAX_TP:
            return Incompatible("tp size", str(tp), str(their_tp), f"1 to {MAX_TP} ranks on either side")
    if tp % their_tp and their_tp % tp:
        return Incompatible("tp size", str(tp), str(their_tp), "one must divide the other")
    ours = _shares(kv_heads, tp)
    theirs = _shares(kv_heads, their_tp)
    if ours is None or theirs is None:
        hint = f"{kv_heads} KV heads and the TP size must divide one another on both sides"
        return Incompatible("kv heads per rank", f"tp {tp}", f"tp {their_tp}", hint)
    found: list[Route] = []
    for source, share in enumerate(theirs):
        readers = [r for r, mine in enumerate(ours) if _common(mine, share)[1]]
        first, count = _common(ours[rank], share)
        if rank in readers or (not readers and rank == source * tp // their_tp):
            found.append(Route(source, first, count, max(1, len(readers)), ours[rank], share))
    return tuple(found)


def _shares(kv_heads: int, tp: int) -> list[HeadShare] | None:
    shares = [HeadShare.of(kv_heads, tp, rank) for rank in range(tp)] if kv_heads >= 1 else []
    known = [share for share in shares if share is not None]
    return known if len(known) == tp else None


def _common(ours: HeadShare, theirs: HeadShare) -> tuple[int, int]:
    """First and number of the heads that the one reads of the other. Of copies, one: ours spread evenly over theirs."""
    first = max(ours.first, theirs.first)
    count = min(ours.first + ours.count, theirs.first + theirs.count) - first
    if count <= 0 or ours.copy * theirs.copies // ours.copies != theirs.copy:
        return first, 0
    return first, count


def make_plan(
    regions: Sequence[Region], block_size: int, theirs: AgentMetadata, route: Route = WHOLE
) -> Plan | Incompatible:
    """What one rank of ours reads of the rank of theirs that ``route`` names. ``block_size`` in tokens."""
    problem = _differs(regions, block_size, theirs, route)
    if problem is not None:
        return problem
    pairs: list[RegionPair] = []
    for region, base, stride in zip(regions, theirs.kv_caches_base_addr, theirs.block_strides, strict=True):
        head = region.length // route.ours.count
        if route.count:
            part = region.part((route.first - route.ours.first) * head, route.count * head)
            pairs.append(RegionPair(part, base + (route.first - route.theirs.first) * head, stride))
    return Plan(tuple(pairs), theirs.num_blocks, route.readers)


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
        head, odd = divmod(region.length, route.ours.count)
        if odd or theirs.block_lens[index] != head * route.theirs.count:
            return Incompatible(
                f"block length of {region.name}",
                _length(region.length, route.ours),
                _length(theirs.block_lens[index], route.theirs),
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
