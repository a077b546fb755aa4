"""Who reads what of whom: equal geometry passes, anything else is refused by the first field that differs."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvconn.geometry import RankCache, Region
from kvconn.nixl.plan import Incompatible, Plan, RegionPair, make_plan
from kvconn.nixl.wire import AgentMetadata

OURS = (Region("layers.0", 1000, 64, 64, 8, 0), Region("layers.1", 9000, 128, 64, 8, 1))
THEIRS = AgentMetadata(
    engine_id="P",
    agent_metadata=b"",
    kv_caches_base_addr=[50_000, 70_000],
    device_id=0,
    num_blocks=20,
    block_lens=[64, 64],
    block_strides=[64, 96],
    kv_cache_layout="LBHNC",
    block_size=16,
    region_num_blocks=[20, 20],
    region_group_ids=[0, 1],
    region_names=["layers.0", "layers.1"],
)


def plan(**changes: Any) -> Plan | Incompatible:
    return make_plan(RankCache(OURS, 16), msgspec.structs.replace(THEIRS, **changes))


def test_regions_are_paired_in_order_with_the_peers_addresses_and_its_pool() -> None:
    assert plan() == Plan(
        (RegionPair(OURS[0], 50_000, 64), RegionPair(OURS[1], 70_000, 96)), remote_blocks=20, readers=1
    )


def test_a_stock_peer_that_names_no_regions_is_paired_by_order() -> None:
    got = plan(region_names=None, region_group_ids=None, region_num_blocks=None)
    assert isinstance(got, Plan)
    assert [pair.remote_base for pair in got.pairs] == [50_000, 70_000]


def test_pools_of_different_size_are_no_problem() -> None:
    got = plan(num_blocks=3, region_num_blocks=[3, 3])
    assert isinstance(got, Plan)
    assert got.remote_blocks == 3


def test_replicated_pcp_on_the_producer_asks_nothing_of_the_reader() -> None:
    assert plan(pcp_size=8) == plan()


@pytest.mark.parametrize(
    ("changes", "field", "ours", "theirs"),
    [
        ({"dcp_size": 2}, "dcp size", "1", "2"),
        ({"block_size": 32}, "block size", "16", "32"),
        ({"physical_blocks_per_logical_kv_block": 4}, "kernel blocks per block", "1", "4"),
        (
            {"kv_caches_base_addr": [1], "block_lens": [64], "block_strides": [64], "region_names": ["layers.0"]},
            "regions",
            "2",
            "1",
        ),
        ({"region_names": ["layers.0", "layers.x"]}, "region name", "layers.1", "layers.x"),
        ({"region_names": ["layers.1", "layers.0"]}, "region name", "layers.0", "layers.1"),
        ({"block_lens": [64, 32]}, "block length of layers.1", "64 B", "32 B"),
        ({"region_group_ids": [0, 0]}, "cache group of layers.1", "1", "0"),
        ({"region_group_ids": [-1, 1]}, "cache group of layers.0", "0", "-1"),
        ({"region_num_blocks": [20, 5]}, "blocks of layers.1", "20", "5"),
    ],
)
def test_the_first_field_that_differs_is_named_ours_theirs_and_what_to_do(
    changes: dict[str, Any], field: str, ours: str, theirs: str
) -> None:
    got = plan(**changes)
    assert isinstance(got, Incompatible)
    assert (got.field, got.ours, got.theirs) == (field, ours, theirs)
    assert got.hint
    assert str(got) == f"{field}: ours {ours}, theirs {theirs} ({got.hint})"


def test_a_run_is_one_range_only_where_both_sides_are_dense() -> None:
    dense = Region("a", 0, 64, 64, 4, 0)
    gaps = Region("b", 0, 96, 64, 4, 0)
    assert RegionPair(dense, 0, 64).dense
    assert not RegionPair(dense, 0, 96).dense
    assert not RegionPair(gaps, 0, 64).dense
    assert not RegionPair(gaps, 0, 96).dense
