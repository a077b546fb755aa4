"""Pure: my regions and a peer's -> which bytes to read of whom, or why that cannot work.

Rules
1. No value of a peer is trusted: whatever does not fit is an :class:`Incompatible` that names the field, ours, theirs
   and what to do. Nothing here raises.
2. A feature is data in the plan, never a branch in the worker.
Today both sides have equal geometry (tp 1, pp 1, dcp 1, equal blocks, equal groups); replicated PCP on the producer
needs nothing of the reader, because only the canonical replica publishes itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvconn.geometry import Region
from kvconn.nixl.wire import AgentMetadata, KvconnAgent

__all__ = ["Incompatible", "Plan", "RegionPair", "make_plan"]


class Incompatible(msgspec.Struct, frozen=True):
    """Why this pair cannot exchange KV: the first field that differs."""

    field: str
    ours: str
    theirs: str
    hint: str

    def __str__(self) -> str:
        return f"{self.field}: ours {self.ours}, theirs {self.theirs} ({self.hint})"


class RegionPair(msgspec.Struct, frozen=True):
    """A region of ours and the peer's that fills it. Bytes; equal block lengths."""

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


def make_plan(regions: Sequence[Region], block_size: int, theirs: AgentMetadata) -> Plan | Incompatible:
    """The plan for equal geometry. ``block_size`` in tokens."""
    problem = _differs(regions, block_size, theirs)
    if problem is not None:
        return problem
    pairs = tuple(
        RegionPair(region, base, stride)
        for region, base, stride in zip(regions, theirs.kv_caches_base_addr, theirs.block_strides, strict=True)
    )
    return Plan(pairs, theirs.num_blocks)


def _differs(regions: Sequence[Region], block_size: int, theirs: AgentMetadata) -> Incompatible | None:
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
        if theirs.block_lens[index] != region.length:
            return Incompatible(
                f"block length of {region.name}", f"{region.length} B", f"{theirs.block_lens[index]} B",
                "dtype, head size or kv heads differ",
            )  # fmt: skip
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
