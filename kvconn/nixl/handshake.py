"""What one serving rank tells its readers, and what a reader makes of a peer's answer. Pure.

Rules
1. Nothing of a peer is believed: what does not fit is a :class:`~kvconn.errors.PeerError` that names peer and stage.
2. Everything is checked before the peer's agent is loaded, so that a peer that fails leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvconn.base import GroupView, KVCacheView
from kvconn.config import ConnectorConfig
from kvconn.errors import PeerError
from kvconn.geometry import RankCache, Region
from kvconn.nixl.metadata import NixlHandshake
from kvconn.nixl.peers import PeerKey
from kvconn.nixl.plan import Incompatible, Plan, make_plan
from kvconn.nixl.wire import AgentMetadata, KvconnAgent, WireCodec

__all__ = ["MIN_KEY", "admit", "describe"]

#: bytes of a seal key
MIN_KEY = 16


def describe(
    config: ConnectorConfig,
    cache: KVCacheView,
    regions: Sequence[Region],
    codec: WireCodec,
    agent_metadata: bytes,
    fence: KvconnAgent,
) -> NixlHandshake:
    """What readers need of this rank."""
    metadata = AgentMetadata(
        engine_id=config.engine_id,
        agent_metadata=agent_metadata,
        kv_caches_base_addr=[r.base for r in regions],
        device_id=regions[0].device_id,
        num_blocks=cache.num_blocks,
        block_lens=[r.length for r in regions],
        block_strides=[r.stride for r in regions],
        kv_cache_layout="LBHNC",
        block_size=cache.block_size,
        region_num_blocks=[r.count for r in regions],
        region_group_ids=[r.group for r in regions],
        region_names=[r.name for r in regions],
        region_mem_types=[r.mem_type for r in regions],
        dcp_size=config.parallel.dcp,
        pcp_size=config.parallel.pcp,
        kvconn=fence,
    )
    return NixlHandshake(codec.encode_payload(config, metadata))


def admit(
    raw: bytes,
    key: PeerKey,
    peer: str,
    config: ConnectorConfig,
    regions: Sequence[Region],
    block_size: int,
    codec: WireCodec,
    enforce_compat: bool,
) -> tuple[bytes, Plan]:
    """A peer's agent metadata and the plan to read of it. ``peer`` names it in errors. Raises PeerError."""
    payload = codec.decode_payload(raw, peer)
    if enforce_compat:
        codec.check(config, payload, peer)
    metadata = codec.decode_metadata(payload, peer)
    if metadata.engine_id != key[0]:
        raise PeerError(peer, "handshake", f"the engine there is now {metadata.engine_id}")
    groups = (GroupView("full", ()),) * (1 + max(region.group for region in regions))
    plan = make_plan(RankCache(tuple(regions), block_size, groups), metadata)
    if isinstance(plan, Incompatible):
        raise PeerError(peer, "plan", str(plan))
    seal_key = payload.kvconn.seal_key if payload.kvconn is not None else b""
    if metadata.kvconn is not None and len(seal_key) < MIN_KEY:
        raise PeerError(peer, "handshake", f"a fence without a seal key of at least {MIN_KEY} bytes")
    return metadata.agent_metadata, msgspec.structs.replace(plan, fence=metadata.kvconn, seal_key=seal_key)
