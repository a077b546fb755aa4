"""Where KV lives and who holds what.

Rules
1. Outside configuration, the engine and the adapters, which supply them, only this module reads a rank's PCP
   coordinate: everybody else asks the one :class:`RankRole` (C5).
2. A region is one contiguous cache tensor, in bytes; block ``b`` lies at ``base + b * stride``, ``length`` long.
   Region order is part of the wire: layers by natural sort of their names, a repeated (address, stride) of one
   group folded into the first. Groups may lie over each other: a block is the group's whose id it is.
3. Inside a block lie cells, one per head and token (:class:`~kvconn.base.Cells`); unless a layer says otherwise heads
   come first, ``[heads, tokens, channels]``. A latent (MLA) cache counts as one head of which every TP rank has a copy.
4. Where DCP shards, a block id stands for ``dcp`` blocks, one per rank, and token ``t`` of a prompt is number
   ``t // (interleave * dcp) * interleave + t % interleave`` of rank ``t // interleave % dcp`` (vLLM's rule).
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec

from kvconn.base import Cells, GroupView, KVCacheView, LayerView
from kvconn.config import ParallelConfig
from kvconn.errors import ConfigError

__all__ = [
    "HeadShare",
    "Place",
    "RankCache",
    "RankRole",
    "Region",
    "Share",
    "Side",
    "TokenShare",
    "blocks_for",
    "coordinates",
    "is_replicated",
    "place_of",
    "regions_of",
    "share_of",
    "spans",
]


class Coordinates(msgspec.Struct, frozen=True):
    """A worker's place in its engine."""

    pp: int
    pcp: int
    tp: int


class RankRole(msgspec.Struct, frozen=True):
    """What one worker is, computed once.

    ``serves``: peers read this rank's blocks. ``replicates``: its KV is a copy of the canonical replica's and nobody
    reads it (replicated PCP rank > 0). ``reads``: it reads peers' blocks.
    """

    rank: int
    world: int
    coords: Coordinates
    serves: bool
    replicates: bool
    reads: bool

    @classmethod
    def of(cls, parallel: ParallelConfig, rank: int, kv_role: str) -> RankRole:
        """The role of ``rank`` under ``kv_role``. Raises ConfigError for a rank outside the world."""
        where = coordinates(parallel, rank)
        replicates = is_replicated(parallel) and where.pcp > 0
        return cls(
            rank=rank,
            world=parallel.world,
            coords=where,
            serves=kv_role in ("kv_producer", "kv_both") and not replicates,
            replicates=replicates,
            reads=kv_role in ("kv_consumer", "kv_both"),
        )

    def __repr__(self) -> str:
        does = [w for w, on in (("serves", self.serves), ("replicates", self.replicates), ("reads", self.reads)) if on]
        return f"RankRole({self.rank}/{self.world} {'+'.join(does) or 'idle'})"


def coordinates(parallel: ParallelConfig, rank: int) -> Coordinates:
    """Rank order is pp-major, then pcp, then tp (see ParallelConfig). Raises ConfigError."""
    if not 0 <= rank < parallel.world:
        raise ConfigError(f"rank: expected 0..{parallel.world - 1}, got {rank}")
    rest, tp = divmod(rank, parallel.tp)
    pp, pcp = divmod(rest, parallel.pcp)
    return Coordinates(pp=pp, pcp=pcp, tp=tp)


def is_replicated(parallel: ParallelConfig) -> bool:
    """True when every PCP rank holds the same KV (no DCP shards it)."""
    return parallel.pcp > 1 and parallel.dcp == 1


def share_of(parallel: ParallelConfig, rank: int) -> str:
    """A name for what ``rank`` holds of every block; replicas hold the same. Raises ConfigError."""
    where = coordinates(parallel, rank)
    return f"pp{where.pp}-pcp{0 if is_replicated(parallel) else where.pcp}-tp{where.tp}"


class Place(msgspec.Struct, frozen=True, order=True):
    """Where peers find a rank: its pipeline stage and its number there, the two numbers of a side channel request."""

    pp: int
    tp: int


def place_of(parallel: ParallelConfig, rank: int) -> Place:
    """Where ``rank`` publishes itself. Ranks of a sharded PCP count as TP ranks, PCP-major. Raises ConfigError."""
    where = coordinates(parallel, rank)
    return Place(where.pp, where.tp if is_replicated(parallel) else where.pcp * parallel.tp + where.tp)


class Side(msgspec.Struct, frozen=True):
    """The sizes of one engine that decide which of its ranks holds what.

    ``tp``: ranks of one stage that serve, those of a sharded PCP included. ``dcp``: of them, neighbours share the
    tokens of what they hold copies of, ``interleave`` tokens in turn. ``kv_heads``: of the model, 1 for a latent cache.
    """

    kv_heads: int
    tp: int = 1
    pp: int = 1
    dcp: int = 1
    interleave: int = 1

    @classmethod
    def of(cls, parallel: ParallelConfig, kv_heads: int) -> Side:
        sharded = parallel.pcp if not is_replicated(parallel) else 1
        return cls(kv_heads, parallel.tp * sharded, parallel.pp, parallel.dcp, parallel.dcp_interleave)


class HeadShare(msgspec.Struct, frozen=True):
    """The KV heads one TP rank holds: ``count`` from ``first`` on. It is copy number ``copy`` of ``copies``."""

    first: int
    count: int
    copy: int = 0
    copies: int = 1

    @classmethod
    def of(cls, kv_heads: int, tp: int, rank: int) -> HeadShare | None:
        """The share of ``rank`` below ``tp``, both in range; None where heads and ranks don't divide.

        With fewer heads than ranks, neighbouring ranks hold copies of one head.
        """
        if kv_heads % tp == 0:
            return cls(rank * (kv_heads // tp), kv_heads // tp)
        if tp % kv_heads == 0:
            head, copy = divmod(rank, tp // kv_heads)
            return cls(head, 1, copy, tp // kv_heads)
        return None


class TokenShare(msgspec.Struct, frozen=True):
    """The tokens one DCP rank holds: of ``dcp`` ranks that take turns every ``interleave`` tokens, number ``rank``."""

    dcp: int = 1
    rank: int = 0
    interleave: int = 1

    def meets(self, other: TokenShare) -> bool:
        """True where some token is in both shares. One interleave divides the other."""
        if self.dcp == 1 or other.dcp == 1:
            return True
        few, many = sorted((self, other), key=lambda share: share.interleave)
        times = many.interleave // few.interleave
        turns = range(few.dcp)
        return any(
            ((many.rank + many.dcp * turn) * times + within) % few.dcp == few.rank
            for turn in turns
            for within in range(min(times, few.dcp))
        )


class Share(msgspec.Struct, frozen=True):
    """What one rank holds of every layer of its stage: some heads, of some tokens."""

    heads: HeadShare
    tokens: TokenShare = TokenShare()

    @classmethod
    def of(cls, side: Side, tp: int) -> Share | None:
        """The share of rank ``tp`` of a stage; None where heads, ranks and DCP don't divide. Sizes are positive."""
        heads = HeadShare.of(side.kv_heads, side.tp, tp)
        if heads is None or heads.copies % side.dcp:
            return None
        one = msgspec.structs.replace(heads, copy=heads.copy // side.dcp, copies=heads.copies // side.dcp)
        return cls(one, TokenShare(side.dcp, tp % side.dcp, side.interleave) if side.dcp > 1 else TokenShare())


class Region(msgspec.Struct, frozen=True):
    """One registered cache tensor. Bytes throughout; ``count`` blocks. ``cells`` None: heads first, nothing between."""

    name: str
    base: int
    stride: int
    length: int
    count: int
    group: int
    mem_type: str = "DRAM"
    device_id: int = 0
    cells: Cells | None = None

    @property
    def span(self) -> int:
        """Bytes from the first byte of the first block to the last byte of the last."""
        return self.stride * (self.count - 1) + self.length


class RankCache(msgspec.Struct, frozen=True):
    """One rank's cache: regions in wire order and the groups they belong to.

    ``block_size`` in tokens is a logical block's, of the ids that a scheduler hands out; it lies in ``kernel_blocks``
    consecutive blocks of every region of attention.
    """

    regions: tuple[Region, ...]
    block_size: int
    groups: tuple[GroupView, ...] = (GroupView("full", ()),)
    kernel_blocks: int = 1
    dtype: str = ""

    @classmethod
    def of(cls, regions: Iterable[Region], view: KVCacheView, dtype: str = "") -> RankCache:
        """The cache of an engine that says ``view``; regions of attention may have several blocks per block of it."""
        regions = tuple(regions)
        counts = [r.count // view.num_blocks for r in regions if view.groups[r.group].kind != "state"]
        return cls(regions, view.block_size, view.groups, max(1, min(counts, default=1)), dtype)


def spans(regions: Iterable[Region]) -> list[tuple[int, int, str, int]]:
    """Memory to register, as (address, bytes, memory type, device): what overlaps or touches is one piece.

    In a block-first pool every layer's region covers nearly all of it.
    """
    merged: list[tuple[int, int, str, int]] = []
    for region in sorted(regions, key=lambda r: (r.mem_type, r.device_id, r.base)):
        base, end, where = region.base, region.base + region.span, (region.mem_type, region.device_id)
        if merged and merged[-1][2:] == where and base <= merged[-1][0] + merged[-1][1]:
            base, end = merged[-1][0], max(end, merged[-1][0] + merged[-1][1])
            merged.pop()
        merged.append((base, end - base, *where))
    return merged


def regions_of(layers: Iterable[LayerView]) -> tuple[Region, ...]:
    """Regions in wire order. Raises ConfigError for a layer whose numbers cannot be."""
    seen: set[tuple[int, int, int]] = set()
    regions: list[Region] = []
    for layer in sorted(layers, key=lambda v: _natural(v.name)):
        if layer.count < 1 or layer.length < 1 or layer.stride < layer.length:
            raise ConfigError(
                f"layer {layer.name}: expected count >= 1 and stride >= length >= 1, "
                f"got count={layer.count} stride={layer.stride} length={layer.length}"
            )
        if layer.cells is not None and not layer.cells.fit(layer.length):
            raise ConfigError(f"layer {layer.name}: expected cells within {layer.length} bytes, got {layer.cells}")
        key = (layer.address, layer.stride, layer.group)
        if key in seen:
            continue
        seen.add(key)
        regions.append(
            Region(
                layer.name, layer.address, layer.stride, layer.length, layer.count, layer.group,
                layer.mem_type, layer.device_id, layer.cells,
            )
        )  # fmt: skip
    return tuple(regions)


def blocks_for(tokens: int, block_size: int) -> int:
    """Blocks that hold ``tokens`` tokens."""
    return -(-tokens // block_size)


def _natural(name: str) -> list[tuple[int, int, str]]:
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.split(r"(\d+)", name) if part]
