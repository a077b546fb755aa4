"""The first contact with a stock engine: what it does not say is taken from what stock engines do."""

from __future__ import annotations

import msgspec

from kvconn.base import GroupView
from kvconn.config import ConnectorConfig, KVTransferConfig, ModelView, ParallelConfig
from kvconn.geometry import Place, RankCache, Region
from kvconn.nixl.handshake import FIRST, Greeting, Ours
from kvconn.nixl.wire import AgentMetadata, HandshakePayload, WireCodec
from kvconn.params import PeerKey

BLOCK = 16
OURS = Ours(
    ConnectorConfig(
        KVTransferConfig("NixlConnector", "kv_consumer"),
        "D",
        ParallelConfig(),
        ModelView("m", "float64", 1, 1, 1, BLOCK),
    ),
    RankCache((Region("layers.0", 1000, 128, 128, 8, 0),), BLOCK, (GroupView("full", ("layers.0",)),)),
    FIRST,
    WireCodec(),
    enforce_compat=False,
)


def stock(tp: int) -> bytes:
    metadata = AgentMetadata(
        engine_id="P", agent_metadata=b"agent", kv_caches_base_addr=[1000 * tp + 1000], device_id=0, num_blocks=8,
        block_lens=[128], block_strides=[128], kv_cache_layout="LBHNC", block_size=BLOCK, dcp_size=2,
    )  # fmt: skip
    return msgspec.msgpack.encode(HandshakePayload("hash", msgspec.msgpack.encode(metadata)))


def test_a_stock_engine_with_dcp_deals_whole_blocks() -> None:
    greeting = Greeting(OURS, PeerKey("P", "127.0.0.1", 5600, tp=2, dcp=2))
    assert greeting.answered(FIRST, stock(0)) == [Place(0, 1)]
    assert greeting.answered(Place(0, 1), stock(1)) == []
    assert greeting.done
    lanes = [lane for offer in greeting.offers for lane in offer.plan.lanes]
    assert [(lane.theirs.share.rank, lane.theirs.share.interleave, lane.unit) for lane in lanes] == [
        (0, BLOCK, BLOCK),
        (1, BLOCK, BLOCK),
    ]
