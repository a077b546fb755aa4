"""Pure: cache groups that lie over each other in one pool, on the wire.

Rules
1. In memory a region is one layer's. On the wire a tensor that several groups share is one region without a group, as
   vLLM's connector has it; which layers lie there, and whose they are, is ours beside it.
2. Read back, a region is one layer's again. A peer that does not say which layers lie in a shared region has them where
   we have them, or it is refused: the same model in the same engine is laid out the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from kvconn.base import GroupView
from kvconn.geometry import RankCache, Region
from kvconn.nixl.blocks import reach
from kvconn.nixl.wire import MAX_MEMBERS, SHARED, AgentMetadata

__all__ = ["fold", "members_of", "unfold"]

#: lists of the metadata that have an entry per region
PER_REGION: Final = (
    "kv_caches_base_addr", "block_lens", "block_strides", "region_num_blocks", "region_mem_types",
)  # fmt: skip
Members = list[list[tuple[str, int, int | None]]]


def fold(regions: Sequence[Region]) -> list[list[Region]]:
    """Regions by the tensor they are views of, in their order."""
    tensors: dict[tuple[int, int, int], list[Region]] = {}
    for region in regions:
        tensors.setdefault((region.base, region.stride, region.length), []).append(region)
    return list(tensors.values())


def members_of(tensors: Sequence[Sequence[Region]], groups: Sequence[GroupView]) -> Members:
    """Name, cache group and reach of every layer in each tensor."""
    return [[(one.name, one.group, reach(groups[one.group])) for one in tensor] for tensor in tensors]


def unfold(metadata: AgentMetadata, ours: RankCache) -> AgentMetadata | None:
    """One region per layer; None for a peer whose shared tensors are not as ours are."""
    groups, told = metadata.region_group_ids, metadata.kvconn.members if metadata.kvconn is not None else None
    if told is None and (groups is None or SHARED not in groups):
        return metadata
    members = told if told is not None else members_of(fold(ours.regions), ours.groups)
    names = metadata.region_names
    if names is None or len(members) != len(names) or any(len(one) > MAX_MEMBERS for one in members):
        return None
    if any(not one or one[0][0] != name for one, name in zip(members, names, strict=True)):
        return None
    lists: dict[str, Any] = {}
    for field in PER_REGION:
        values = getattr(metadata, field)
        if values is not None:
            lists[field] = [value for value, one in zip(values, members, strict=True) for _ in one]
    lists["region_names"] = [layer[0] for one in members for layer in one]
    lists["region_group_ids"] = [layer[1] for one in members for layer in one]
    kvconn = metadata.kvconn
    if kvconn is not None:
        cells = kvconn.cells and [cell for cell, one in zip(kvconn.cells, members, strict=True) for _ in one]
        reaches = [layer[2] for one in members for layer in one]
        kvconn = msgspec.structs.replace(kvconn, cells=cells, reach=reaches, members=None)
    return msgspec.structs.replace(metadata, **lists, kvconn=kvconn)
