"""Everything that crosses between engines, as Structs behind a :class:`WireCodec`.

Version history (``WIRE_VERSION`` is ours; the frames, the two-phase payload and the notification grammar are vLLM's
NIXL connector's, whose version 14 these field names follow):
  1  first version: factors beside the compatibility hash; fence and seal key; an engine's sizes, dtype, cells
     and how far back its blocks are kept.

Rules
1. Decoding is in two phases: compatibility first, then the agent's metadata, so that a mismatch is named and not
   a decoding error.
2. Whatever comes in is bounded and typed here, every frame, list and string of it; a bad frame is a :class:`PeerError`
   or None, never another exception. Lists and maps are refused by the length they claim, before they are made.
3. What we add travels in fields a stock peer ignores.

Side channel, ZMQ over TCP: request ``[b"", msgpack([b"get_meta_msg", pp, tp])]``, reply
``[b"", msgpack(HandshakePayload), msgpack(perf_counter of the producer)]``.
Notifications, over NIXL: ``{transfer id}:{readers}`` (done reading) and ``HB:{id},{id}...`` (heartbeat).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Final, TypeVar

import msgspec

from kvconn.base import Cells
from kvconn.config import ConnectorConfig
from kvconn.errors import PeerError

__all__ = [
    "AgentMetadata",
    "Done",
    "HandshakePayload",
    "Heartbeat",
    "WireCodec",
    "encode_done",
    "encode_heartbeats",
    "parse_notification",
]

WIRE_VERSION: Final = 1
GET_META: Final = b"get_meta_msg"
#: bytes; a thousand regions take a tenth of it, and a reader may have sideclient.MAX_PENDING of them at once
MAX_FRAME: Final = 4 << 20
MAX_REQUEST: Final = 256
MAX_NOTIFICATION: Final = 1 << 20
MAX_REGIONS: Final = 1 << 16
#: layers of several groups in one region
MAX_MEMBERS: Final = 64
#: the group of a region that several groups share
SHARED: Final = -1
MAX_HEARTBEATS: Final = 1 << 14
MAX_READERS: Final = 4096
#: characters; early notifications are kept by transfer id, so that its length is bounded too.
MAX_TRANSFER_ID: Final = 512
_HB: Final = b"HB:"
T = TypeVar("T")
Number = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Numbers = Annotated[list[Number], msgspec.Meta(max_length=MAX_REGIONS)]
Groups = Annotated[list[Annotated[int, msgspec.Meta(ge=SHARED, le=1 << 31)]], msgspec.Meta(max_length=MAX_REGIONS)]
Text = Annotated[str, msgspec.Meta(max_length=512)]
Texts = Annotated[list[Text], msgspec.Meta(max_length=MAX_REGIONS)]
LongText = Annotated[str, msgspec.Meta(max_length=4096)]


Members = Annotated[list[tuple[Text, Number, Number | None]], msgspec.Meta(max_length=MAX_MEMBERS)]


class KvconnAgent(msgspec.Struct, frozen=True):
    """Ours in one serving worker's metadata: its fence, ``fence_slots`` words of 8 bytes at ``fence_address``.

    And the sizes of its engine that stock metadata does not have (:class:`~kvconn.geometry.Side`), the KV's dtype, how
    the blocks of each region are cut where not heads first, and of how many last tokens they are kept
    (:func:`~kvconn.nixl.blocks.reach`). ``members``, where groups share regions: the layers in each, by name, group and
    reach.
    """

    fence_address: Number
    fence_slots: Number
    tp: Number = 1
    pp: Number = 1
    interleave: Number = 1
    dtype: Text = ""
    cells: Annotated[list[Cells | None], msgspec.Meta(max_length=MAX_REGIONS)] | None = None
    reach: Annotated[list[Number | None], msgspec.Meta(max_length=MAX_REGIONS)] | None = None
    members: Annotated[list[Members], msgspec.Meta(max_length=MAX_REGIONS)] | None = None


class AgentMetadata(msgspec.Struct, frozen=True):
    """What a reader must know of one serving worker. Addresses, lengths and strides in bytes, per region."""

    engine_id: Text
    agent_metadata: Annotated[bytes, msgspec.Meta(min_length=1)]
    kv_caches_base_addr: Numbers
    device_id: Annotated[int, msgspec.Meta(ge=-1, le=1 << 31)]
    num_blocks: Number
    block_lens: Numbers
    block_strides: Numbers
    kv_cache_layout: Text
    block_size: Number
    ssm_sizes: tuple[Number, Number] = (0, 0)
    attn_backend_name: Text = "kvconn"
    physical_blocks_per_logical_kv_block: Number = 1
    region_num_blocks: Numbers | None = None
    region_group_ids: Groups | None = None
    region_names: Texts | None = None
    region_mem_types: Texts | None = None
    dcp_size: Number = 1
    pcp_size: Number = 1
    kvconn: KvconnAgent | None = None


class KvconnHandshake(msgspec.Struct, frozen=True):
    """Ours beside the stock payload.

    The factors behind the compatibility hash, in words, and the key that the producer seals its references with.
    """

    version: int = WIRE_VERSION
    factors: Annotated[dict[Text, LongText], msgspec.Meta(max_length=64)] = {}
    seal_key: Annotated[bytes, msgspec.Meta(max_length=64)] = b""


class HandshakePayload(msgspec.Struct, frozen=True):
    """One serving worker's answer on the side channel."""

    compatibility_hash: Text
    agent_metadata_bytes: bytes
    kvconn: KvconnHandshake | None = None


class Done(msgspec.Struct, frozen=True):
    """A reader is done with a transfer id; ``readers`` ranks of its engine read from the rank it tells."""

    transfer_id: str
    readers: int


class Heartbeat(msgspec.Struct, frozen=True):
    """A reader still means to read these transfer ids."""

    transfer_ids: tuple[str, ...]


class WireCodec:
    """Encodes and decodes the side channel. An adapter to another engine overrides what its engine defines."""

    def factors(self, config: ConnectorConfig) -> dict[str, str]:
        """What must be equal on both sides for bytes to mean the same."""
        model = config.model
        return {
            "model": model.name,
            "kv dtype": model.dtype,
            "kv heads": str(model.num_kv_heads),
            "head size": str(model.head_size),
            "layers": str(model.num_layers),
            "packing": model.packing,
            "wire version": str(WIRE_VERSION),
        }

    def compatibility_hash(self, factors: Mapping[str, str]) -> str:
        """sha256 over the canonical JSON of ``factors``."""
        return hashlib.sha256(json.dumps(dict(factors), sort_keys=True).encode()).hexdigest()

    def encode_payload(self, config: ConnectorConfig, metadata: AgentMetadata) -> bytes:
        factors = self.factors(config)
        return msgspec.msgpack.encode(
            HandshakePayload(
                self.compatibility_hash(factors), msgspec.msgpack.encode(metadata), KvconnHandshake(factors=factors)
            )
        )

    def with_seal_key(self, payload: bytes, key: bytes) -> bytes:
        """Our own worker's payload with the key that our scheduler half drew. Raises PeerError on anything else."""
        decoded = self.decode_payload(payload, "our own worker")
        ours = msgspec.structs.replace(decoded.kvconn or KvconnHandshake(), seal_key=key)
        return msgspec.msgpack.encode(msgspec.structs.replace(decoded, kvconn=ours))

    def decode_payload(self, frame: bytes, peer: str) -> HandshakePayload:
        """First phase. Raises PeerError."""
        return self._decode(frame, HandshakePayload, peer, "handshake payload")

    def check(self, config: ConnectorConfig, payload: HandshakePayload, peer: str) -> None:
        """Raises PeerError naming the factors that differ, ours and theirs."""
        ours = self.factors(config)
        if payload.compatibility_hash == self.compatibility_hash(ours):
            return
        theirs = payload.kvconn.factors if payload.kvconn is not None else {}
        differing = [
            f"{key}: ours {ours.get(key, 'absent')}, theirs {theirs.get(key, 'absent')}"
            for key in sorted(ours.keys() | theirs.keys())
            if ours.get(key) != theirs.get(key)
        ]
        if theirs and not differing:
            differing = ["the hashes differ although every factor is equal"]
        if not theirs:
            differing = ["the peer does not say which factors (it is not kvconn); compare both engines' arguments"]
        raise PeerError(peer, "compatibility", "; ".join(differing)[:2000])

    def decode_metadata(self, payload: HandshakePayload, peer: str) -> AgentMetadata:
        """Second phase. Raises PeerError; lists are as long as each other and numbers are possible."""
        meta = self._decode(payload.agent_metadata_bytes, AgentMetadata, peer, "agent metadata")
        n = len(meta.kv_caches_base_addr)
        lists: Iterable[tuple[str, list[Any] | None]] = (
            ("block_lens", meta.block_lens),
            ("block_strides", meta.block_strides),
            ("region_num_blocks", meta.region_num_blocks),
            ("region_group_ids", meta.region_group_ids),
            ("region_names", meta.region_names),
            ("region_mem_types", meta.region_mem_types),
            ("kvconn.cells", meta.kvconn.cells if meta.kvconn is not None else None),
            ("kvconn.reach", meta.kvconn.reach if meta.kvconn is not None else None),
            ("kvconn.members", meta.kvconn.members if meta.kvconn is not None else None),
        )
        for name, values in lists:
            if values is not None and len(values) != n:
                raise PeerError(peer, "agent metadata", f"{name}: expected {n} entries, got {len(values)}")
        layers = sum(map(len, (meta.kvconn.members if meta.kvconn is not None else None) or ()))
        if layers > MAX_REGIONS:  # each becomes a region: a small frame, and a second of the step thread
            raise PeerError(peer, "agent metadata", f"kvconn.members: {layers} layers, at most {MAX_REGIONS} are read")
        if not 0 < n <= MAX_REGIONS or meta.num_blocks < 1 or meta.block_size < 1:
            raise PeerError(peer, "agent metadata", f"impossible: {n} regions, {meta.num_blocks} blocks")
        if any(not 0 < length <= stride for length, stride in zip(meta.block_lens, meta.block_strides, strict=True)):
            raise PeerError(peer, "agent metadata", "expected 0 < block_lens <= block_strides")
        fence = meta.kvconn
        if fence is not None and not (0 < fence.fence_slots <= 1 << 31 and 0 < fence.fence_address < 1 << 62):
            raise PeerError(peer, "agent metadata", f"impossible fence: {fence}")
        ends = (b + s * meta.num_blocks for b, s in zip(meta.kv_caches_base_addr, meta.block_strides, strict=True))
        if any(end >= 1 << 63 for end in ends):
            raise PeerError(peer, "agent metadata", "a region ends outside of the address space")
        return meta

    def _decode(self, frame: bytes, kind: type[T], peer: str, stage: str) -> T:
        if len(frame) > MAX_FRAME:
            raise PeerError(peer, stage, f"frame of {len(frame)} bytes, at most {MAX_FRAME} are read")
        try:
            return msgspec.msgpack.decode(frame, type=kind)
        except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError) as err:
            raise PeerError(peer, stage, f"malformed: {err}") from None


def encode_request(pp: int, tp: int) -> bytes:
    """A side-channel request for one serving worker's metadata."""
    return msgspec.msgpack.encode((GET_META, pp, tp))


def parse_request(body: bytes) -> tuple[int, int] | None:
    """(pp, tp) of a request, or None for anything else."""
    if len(body) > MAX_REQUEST:
        return None
    try:
        magic, pp, tp = msgspec.msgpack.decode(body, type=tuple[bytes, int, int])
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError):
        return None
    return (pp, tp) if magic == GET_META else None


def parse_timestamp(frame: bytes) -> float | None:
    """The producer's perf_counter in a reply, or None."""
    try:
        value = msgspec.msgpack.decode(frame, type=float)
    except (msgspec.DecodeError, msgspec.ValidationError):
        return None
    return value if math.isfinite(value) else None


def encode_done(transfer_id: str, readers: int) -> bytes:
    return f"{transfer_id}:{readers}".encode()


def encode_heartbeats(transfer_ids: Iterable[str]) -> bytes:
    return _HB + ",".join(transfer_ids).encode()


def parse_notification(message: bytes) -> Done | Heartbeat | None:
    """A notification, or None for anything that is not one. Never raises (C9)."""
    if len(message) > MAX_NOTIFICATION:
        return None
    try:
        text = message.decode()
    except UnicodeDecodeError:
        return None
    if message.startswith(_HB):
        ids = tuple(id for id in text[len(_HB) :].split(",", MAX_HEARTBEATS) if id)
        return Heartbeat(ids) if all(len(id) <= MAX_TRANSFER_ID for id in ids) else None
    transfer_id, colon, readers = text.rpartition(":")
    if not colon or not 1 <= len(transfer_id) <= MAX_TRANSFER_ID:
        return None
    if not (readers.isascii() and readers.isdigit()) or len(readers) > 4:
        return None
    count = int(readers)
    return Done(transfer_id, count) if 1 <= count <= MAX_READERS else None
