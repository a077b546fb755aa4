"""What one serving rank tells its readers, and what a reader makes of a peer's answers. Pure.

Rules
1. Nothing of a peer is believed: what does not fit is a :class:`~kvconn.errors.PeerError` that names peer and stage.
2. Everything is checked before any agent of the peer is loaded, so that a peer that fails leaves nothing behind.
3. First contact asks the first rank. A peer of ours says its engine's sizes there; a stock peer's come with the
   reference. What a client says against the peer is a :class:`~kvconn.errors.RequestError` that names the field.
4. The ranks of one peer are one engine: what two of them say of it, or of a layer that both have, is the same. One
   that contradicts costs the requests that wait for this peer, by the name of the field.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from kvconn.base import KVCacheView
from kvconn.config import ConnectorConfig
from kvconn.errors import PeerError, RequestError
from kvconn.geometry import Place, RankCache, Region, Side
from kvconn.nixl.blocks import reach
from kvconn.nixl.fence import FenceWords
from kvconn.nixl.metadata import NixlHandshake
from kvconn.nixl.overlay import fold, members_of, unfold
from kvconn.nixl.plan import Plan, make_plan, missing
from kvconn.nixl.routes import Incompatible, Route, routes
from kvconn.nixl.strips import layout_name
from kvconn.nixl.wire import SHARED, AgentMetadata, KvconnAgent, WireCodec
from kvconn.params import PeerKey, peer_name

__all__ = ["FIRST", "MIN_KEY", "Greeting", "Offer", "Ours", "describe", "rank_cache", "side_of"]

#: bytes of a seal key
MIN_KEY = 16
#: the rank that every engine has
FIRST: Final = Place(0, 0)


def side_of(config: ConnectorConfig) -> Side:
    """The sizes of our engine."""
    heads = 1 if config.model.packing == "latent" else config.model.num_kv_heads
    return Side.of(config.parallel, heads)


def rank_cache(config: ConnectorConfig, cache: KVCacheView, regions: Sequence[Region]) -> RankCache:
    """What lies on one rank. A block id stands for a block on each of the DCP ranks."""
    alone = msgspec.structs.replace(cache, block_size=cache.block_size // config.parallel.dcp)
    return RankCache.of(regions, alone, config.model.dtype)


def describe(
    config: ConnectorConfig,
    cache: KVCacheView,
    regions: Sequence[Region],
    codec: WireCodec,
    agent_metadata: bytes,
    fence: FenceWords,
) -> NixlHandshake:
    """What readers need of this rank."""
    side = side_of(config)
    own = rank_cache(config, cache, regions)
    kernel = own.kernel_blocks
    tensors = fold(regions)
    first = [one[0] for one in tensors]
    members = members_of(tensors, cache.groups) if len(first) < len(regions) else None
    cells = [r.cells for r in first] if any(r.cells is not None for r in first) else None
    metadata = AgentMetadata(
        engine_id=config.engine_id,
        agent_metadata=agent_metadata,
        kv_caches_base_addr=[r.base for r in first],
        device_id=regions[0].device_id,
        num_blocks=cache.num_blocks * kernel,
        block_lens=[r.length for r in first],
        block_strides=[r.stride for r in first],
        kv_cache_layout=layout_name(regions),
        block_size=own.block_size // kernel,
        physical_blocks_per_logical_kv_block=kernel,
        region_num_blocks=[r.count for r in first],
        region_group_ids=[one[0].group if len(one) == 1 else SHARED for one in tensors],
        region_names=[r.name for r in first],
        region_mem_types=[r.mem_type for r in first],
        dcp_size=config.parallel.dcp,
        pcp_size=config.parallel.pcp,
        kvconn=KvconnAgent(
            fence.address, fence.size, side.tp, side.pp, side.interleave, config.model.dtype, cells,
            [reach(cache.groups[r.group]) for r in first], members,
        ),
    )  # fmt: skip
    return NixlHandshake(codec.encode_payload(config, metadata))


class Ours(msgspec.Struct, frozen=True):
    """One reading rank: its engine, its cache, its place in it."""

    config: ConnectorConfig
    cache: RankCache
    place: Place
    codec: WireCodec
    enforce_compat: bool = True


class Offer(msgspec.Struct, frozen=True):
    """A rank of a peer that this one reads or tells: the blob of its agent, still to be loaded, and the plan."""

    blob: bytes
    plan: Plan


class Greeting:
    """One handshake with a peer: from its first rank to the plans of all whom ours reads or tells."""

    def __init__(self, ours: Ours, key: PeerKey) -> None:
        self._ours = ours
        self._key = key
        self._name = peer_name(key)
        self._routes: dict[Place, Route] | None = None
        self._seal_key: bytes | None = None
        #: what its ranks say of their engine, and who said it first
        self._said: dict[str, tuple[Place, object]] = {}
        self._offers: dict[Place, Offer] = {}

    @property
    def done(self) -> bool:
        """Everybody has answered."""
        return self._routes is not None and self._offers.keys() == self._routes.keys()

    @property
    def offers(self) -> list[Offer]:
        """Of all whom this rank reads or tells, in their order. Raises PeerError where they lack what we need."""
        offers = [self._offers[place] for place in sorted(self._offers)]
        lacking = missing(self._ours.cache, [offer.plan for offer in offers])
        if lacking is not None:
            raise PeerError(self._name, "plan", str(lacking))
        return offers

    def answered(self, place: Place, frame: bytes) -> list[Place]:
        """The rank at ``place`` answered; whom to ask now. Raises PeerError, RequestError."""
        metadata = self._read(place, frame)
        ask: list[Place] = []
        if self._routes is None:
            self._routes = {route.source: route for route in self._route(self._sizes(metadata), metadata)}
            ask = [source for source in self._routes if source != place]
        if place in self._routes:
            plan = self._plan(metadata, self._routes[place])
            whole = msgspec.structs.replace(plan, fence=metadata.kvconn, seal_key=self._seal_key or b"")
            self._offers[place] = Offer(metadata.agent_metadata, whole)
        return ask

    def _read(self, place: Place, frame: bytes) -> AgentMetadata:
        codec, name = self._ours.codec, self._name
        payload = codec.decode_payload(frame, name)
        if self._ours.enforce_compat:
            codec.check(self._ours.config, payload, name)
        metadata = unfold(codec.decode_metadata(payload, name), self._ours.cache)
        if metadata is None:
            raise PeerError(name, "agent metadata", "its layers share regions in another way than ours: other groups")
        if metadata.engine_id != self._key.engine:
            raise PeerError(name, "handshake", f"the engine there is now {metadata.engine_id}")
        self._agrees(place, _of_engine(metadata))
        seal_key = payload.kvconn.seal_key if metadata.kvconn is not None and payload.kvconn is not None else b""
        if metadata.kvconn is not None and len(seal_key) < MIN_KEY:
            raise PeerError(name, "handshake", f"a fence without a seal key of at least {MIN_KEY} bytes")
        if self._seal_key is not None and seal_key != self._seal_key:
            raise PeerError(
                name,
                "handshake",
                f"rank pp {place.pp} tp {place.tp} has another seal key than the first: not one engine",
            )
        self._seal_key = seal_key
        return metadata

    def _agrees(self, place: Place, said: dict[str, object]) -> None:
        """With what ranks before it said of the same. Raises PeerError."""
        for field, value in said.items():
            first, before = self._said.setdefault(field, (place, value))
            if value != before:
                who = f"rank pp {first.pp} tp {first.tp} says {before}, pp {place.pp} tp {place.tp} {value}"
                raise PeerError(self._name, "handshake", f"its ranks contradict each other: {field}: {who}")

    def _sizes(self, metadata: AgentMetadata) -> Side:
        """The peer's sizes. Raises RequestError where the client says others."""
        ours, said = metadata.kvconn, self._key
        stated = [("dcp_size", said.dcp, metadata.dcp_size)]
        if ours is not None:
            stated += [("tp_size", said.tp, ours.tp), ("pp_size", said.pp, ours.pp)]
        for field, claimed, real in stated:
            if claimed != real:
                raise RequestError(f"kv_transfer_params.{field}", f"{real}, which {self._name} has", claimed)
        interleave = ours.interleave if ours is not None else 1
        if ours is None and said.dcp > 1:  # a stock engine with this connector deals whole blocks
            interleave = metadata.block_size * metadata.physical_blocks_per_logical_kv_block
        heads = side_of(self._ours.config).kv_heads
        return Side(heads, said.tp, said.pp, said.dcp, interleave)

    def _route(self, theirs: Side, first: AgentMetadata) -> tuple[Route, ...]:
        """Whom our rank reads or tells. That the first rank is as these sizes say shows before another is asked: a
        stock engine ends its side channel when it is asked for a rank that it does not have."""
        side = side_of(self._ours.config)
        names = first.region_names
        whole = names is None or {region.name for region in self._ours.cache.regions} <= set(names)
        if first.kvconn is None and theirs.pp > 1 and whole:
            raise RequestError("kv_transfer_params.pp_size", f"1: {self._name}'s first rank has every layer", theirs.pp)
        found, of_first = routes(side, theirs, self._ours.place), routes(side, theirs, FIRST)
        if isinstance(found, Incompatible) or isinstance(of_first, Incompatible):
            raise PeerError(self._name, "plan", str(found))
        self._plan(first, of_first[0])
        return found

    def _plan(self, metadata: AgentMetadata, route: Route) -> Plan:
        plan = make_plan(self._ours.cache, metadata, route)
        if isinstance(plan, Incompatible):
            raise PeerError(self._name, "plan", str(plan))
        return plan


def _of_engine(metadata: AgentMetadata) -> dict[str, object]:
    """What a rank says that other ranks of its engine would say too: of the engine, and of each of its layers."""
    ours, kernel = metadata.kvconn, metadata.physical_blocks_per_logical_kv_block
    said: dict[str, object] = {
        "tokens of a block": metadata.block_size * kernel,
        "dcp size": metadata.dcp_size,
        "pcp size": metadata.pcp_size,
        "fences": ours is not None,
    }
    if ours is not None:  # a stock engine's pools may differ by stage
        said |= {
            "blocks": metadata.num_blocks // kernel if kernel else 0,
            "fence slots": ours.fence_slots,
            "tp size": ours.tp,
            "pp size": ours.pp,
            "dcp interleave": ours.interleave,
            "kv dtype": ours.dtype,
        }
        said |= {f"layer {name}": tuple(regions) for name, regions in _layers(metadata, ours).items()}
    return said


def _layers(metadata: AgentMetadata, ours: KvconnAgent) -> dict[str, list[tuple[object, ...]]]:
    """What it says of each layer's regions, but for where they are. TP ranks have equal shares of a layer."""
    lists = (
        metadata.block_lens,
        metadata.block_strides,
        metadata.region_num_blocks,
        metadata.region_group_ids,
        metadata.region_mem_types,
        ours.cells,
    )
    layers: dict[str, list[tuple[object, ...]]] = {}
    for index, name in enumerate(metadata.region_names or ()):
        layers.setdefault(name, []).append(tuple(one[index] if one is not None else None for one in lists))
    return layers
