"""What can be planned with a peer, and how what cannot is named. Which bytes is tests/nixl/test_token_positions.py."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvconn.base import Cells, GroupView
from kvconn.errors import RequestError
from kvconn.geometry import HeadShare, Place, RankCache, Region, Share, TokenShare
from kvconn.nixl.pairing import reads
from kvconn.nixl.plan import Memory, Plan, make_plan, missing
from kvconn.nixl.routes import Incompatible, Route
from kvconn.nixl.wire import AgentMetadata, KvconnAgent

FUZZ = settings(derandomize=True, database=None, deadline=None, max_examples=150)
OURS = (Region("layers.0", 1000, 64, 64, 8, 0), Region("layers.1", 9000, 128, 64, 8, 1))
GROUPS = (GroupView("full", ("layers.0",)), GroupView("window", ("layers.1",), 32))
CACHE = RankCache(OURS, 16, GROUPS, dtype="bfloat16")
THEIRS = AgentMetadata(
    engine_id="P",
    agent_metadata=b"",
    kv_caches_base_addr=[50_000, 70_000],
    device_id=3,
    num_blocks=20,
    block_lens=[64, 64],
    block_strides=[64, 96],
    kv_cache_layout="LBHNC",
    block_size=16,
    region_num_blocks=[20, 20],
    region_group_ids=[0, 1],
    region_names=["layers.0", "layers.1"],
    kvconn=KvconnAgent(8, 1, dtype="bfloat16"),
)


def plan(route: Route | None = None, **changes: Any) -> Plan | Incompatible:
    theirs = msgspec.structs.replace(THEIRS, **changes)
    return make_plan(CACHE, theirs, route) if route is not None else make_plan(CACHE, theirs)


def bases(got: Plan | Incompatible) -> list[tuple[int, int]]:
    assert isinstance(got, Plan), got
    return [base for lane in got.lanes for base in lane.bases]


def test_regions_are_paired_by_layer_whatever_their_order() -> None:
    assert bases(plan()) == [(1000, 50_000), (9000, 70_000)]
    turned = plan(region_names=["layers.1", "layers.0"], region_group_ids=[1, 0], block_strides=[96, 64])
    assert bases(turned) == [(1000, 70_000), (9000, 50_000)]


def test_layers_of_theirs_that_are_not_ours_are_not_read() -> None:
    more = plan(
        kv_caches_base_addr=[50_000, 60_000, 70_000], block_lens=[64] * 3, block_strides=[64] * 3,
        region_names=["layers.0", "draft.0", "layers.1"], region_group_ids=[0, 0, 1], region_num_blocks=None,
    )  # fmt: skip
    assert bases(more) == [(1000, 50_000), (9000, 70_000)]


def test_a_stock_peer_that_names_no_regions_is_paired_by_order() -> None:
    got = plan(region_names=None, region_group_ids=None, region_num_blocks=None, kvconn=None)
    assert bases(got) == [(1000, 50_000), (9000, 70_000)]


def test_pools_of_different_size_are_no_problem_and_bound_their_ids() -> None:
    got = plan(num_blocks=3, region_num_blocks=[3, 2])
    assert isinstance(got, Plan)
    assert [lane.pool for lane in got.lanes] == [3, 2]


def test_a_pool_is_counted_in_the_blocks_that_ids_name() -> None:
    got = plan(
        block_size=4, physical_blocks_per_logical_kv_block=4, num_blocks=23, region_num_blocks=None, block_lens=[16, 16]
    )
    assert isinstance(got, Plan)
    assert [lane.pool for lane in got.lanes] == [5, 5]


def test_replicated_pcp_on_the_producer_asks_nothing_of_the_reader() -> None:
    assert plan(pcp_size=8) == plan()


def test_memory_of_both_sides_is_in_the_plan() -> None:
    got = plan(region_mem_types=["VRAM", "DRAM"])
    assert isinstance(got, Plan)
    assert [lane.remote for lane in got.lanes] == [Memory("VRAM", 3), Memory("DRAM", 3)]
    assert {lane.local for lane in got.lanes} == {Memory("DRAM", 0)}


def test_a_source_that_is_only_told_is_checked_and_not_read() -> None:
    told = Route(Place(1, 2), 0, 0, 4, Share(HeadShare(0, 1)), Share(HeadShare(0, 1)))
    got = plan(told)
    assert isinstance(got, Plan)
    assert (got.lanes, got.readers, got.source) == ((), 4, Place(1, 2))
    assert isinstance(plan(told, block_size=0), Incompatible)


DCP = Route(
    Place(0, 1), 0, 1, 1, Share(HeadShare(0, 1)), Share(HeadShare(0, 1), TokenShare(2, 1, 16))
)  # fmt: skip


@pytest.mark.parametrize(
    ("route", "changes", "field", "ours", "theirs"),
    [
        (None, {"dcp_size": 2}, "dcp size", "1", "2"),
        (DCP, {}, "dcp size", "2", "1"),
        (DCP, {"dcp_size": 2}, "dcp interleave", "16", "1"),
        (
            DCP,
            {"dcp_size": 2, "block_size": 8, "kvconn": KvconnAgent(8, 1, interleave=16)},
            "dcp interleave",
            "16 tokens",
            "8 tokens",
        ),
        (None, {"block_size": 0}, "block size", "16", "0"),
        (None, {"block_size": 1 << 40}, "block size", "16", str(1 << 40)),
        (None, {"physical_blocks_per_logical_kv_block": 0}, "kernel blocks per block", "1", "0"),
        (None, {"physical_blocks_per_logical_kv_block": 1 << 40}, "kernel blocks per block", "1", str(1 << 40)),
        (None, {"kvconn": KvconnAgent(8, 1, dtype="float16")}, "kv dtype", "bfloat16", "float16"),
        (
            None,
            {"kv_caches_base_addr": [1], "block_lens": [64], "block_strides": [64], "region_names": None},
            "regions",
            "2",
            "1",
        ),
        (
            None,
            {"block_lens": [64, 32]},
            "block length of layers.1",
            "64 B for 1 head x 16 tokens",
            "32 B for 1 head x 16 tokens",
        ),
        (
            None,
            {"block_lens": [64, 63]},
            "block length of layers.1",
            "64 B for 1 head x 16 tokens",
            "63 B for 1 head x 16 tokens",
        ),
        (None, {"region_group_ids": [-1, 1]}, "cache group of layers.0", "0", "-1"),
        (None, {"region_group_ids": [0, 1 << 40]}, "cache group of layers.1", "1", str(1 << 40)),
        (None, {"region_num_blocks": [20, 21]}, "blocks of layers.1", "20", "21"),
        (None, {"region_num_blocks": [0, 20]}, "blocks of layers.0", "20", "0"),
        (None, {"region_mem_types": ["FILE", "DRAM"]}, "memory of layers.0", "DRAM", "FILE"),
        (
            None,
            {"kvconn": KvconnAgent(8, 1, cells=[None, Cells(1, 16, 8, 0, 8)])},
            "cells of layers.1",
            "1 heads x 16 tokens in 64 B",
            str(Cells(1, 16, 8, 0, 8)),
        ),
        (
            None,
            {"kvconn": KvconnAgent(8, 1, cells=[Cells(2, 16, 1, 16, 1), None])},
            "cells of layers.0",
            "1 heads x 16 tokens in 64 B",
            str(Cells(2, 16, 1, 16, 1)),
        ),
    ],
)  # fmt: skip
def test_the_first_field_that_differs_is_named_ours_theirs_and_what_to_do(
    route: Route | None, changes: dict[str, Any], field: str, ours: str, theirs: str
) -> None:
    got = plan(route, **changes)
    assert isinstance(got, Incompatible)
    assert (got.field, got.ours, got.theirs) == (field, ours, theirs)
    assert got.hint
    assert str(got) == f"{field}: ours {ours}, theirs {theirs} ({got.hint})"


def test_a_layer_that_a_peer_has_twice_is_not_read_twice() -> None:
    twice = {
        "kv_caches_base_addr": [1, 2, 3], "block_lens": [64] * 3, "block_strides": [64] * 3, "region_num_blocks": None,
        "region_group_ids": None, "region_names": ["layers.0", "layers.0", "layers.1"],
    }  # fmt: skip
    got = plan(**twice)
    assert isinstance(got, Incompatible)
    assert (got.field, got.ours, got.theirs) == ("layer layers.0", "once", "twice")


def test_thousands_of_regions_of_one_layer_cost_nothing() -> None:
    n = 1 << 16
    got = plan(
        kv_caches_base_addr=[1] * n, block_lens=[64] * n, block_strides=[64] * n, region_num_blocks=None,
        region_group_ids=None, region_names=["layers.0"] * n,
    )  # fmt: skip
    assert isinstance(got, Incompatible)
    assert (got.field, got.theirs) == ("tensors of layers.0", str(n))


def test_a_layout_that_does_not_say_where_heads_lie_needs_cells() -> None:
    heads = Route(Place(0, 0), 0, 2, 1, Share(HeadShare(0, 2)), Share(HeadShare(0, 2)))
    got = plan(heads, kv_cache_layout="BHLNC")
    assert isinstance(got, Incompatible)
    assert (got.field, got.theirs) == ("kv cache layout", "BHLNC")
    assert isinstance(plan(kv_cache_layout="BHLNC"), Plan)  # with one head there is nothing to know


class TestMissing:
    def test_layers_may_come_from_several_stages(self) -> None:
        first = {"kv_caches_base_addr": [1], "block_lens": [64], "block_strides": [64], "region_num_blocks": None}
        one = plan(**first, region_names=["layers.0"], region_group_ids=[0])
        two = plan(**first, region_names=["layers.1"], region_group_ids=[1])
        assert isinstance(one, Plan)
        assert isinstance(two, Plan)
        assert missing(CACHE, [one, two]) is None
        got = missing(CACHE, [one, one])
        assert isinstance(got, Incompatible)
        assert (got.field, got.ours, got.theirs) == ("layer layers.1", "needed", "in no stage")

    def test_a_head_that_no_source_has_is_missing_too(self) -> None:
        cache = RankCache((Region("layers.0", 1000, 128, 128, 8, 0),), 16)
        half = Route(Place(0, 0), 0, 1, 1, Share(HeadShare(0, 2)), Share(HeadShare(0, 1)))
        theirs = msgspec.structs.replace(
            THEIRS, kv_caches_base_addr=[1], block_lens=[64], block_strides=[64], region_num_blocks=None,
            region_group_ids=None, region_names=["layers.0"],
        )  # fmt: skip
        one = make_plan(cache, theirs, half)
        two = make_plan(cache, theirs, msgspec.structs.replace(half, first=1, theirs=Share(HeadShare(1, 1))))
        assert isinstance(one, Plan)
        assert isinstance(two, Plan)
        assert missing(cache, [one]) is not None
        assert missing(cache, [one, two]) is None

    def test_sources_that_would_land_a_block_in_different_orders_are_refused(self) -> None:
        cache = RankCache((Region("layers.0", 1000, 256, 256, 8, 0, cells=Cells(4, 16, 4, 4, 16)),), 16)
        route = Route(Place(0, 0), 0, 2, 1, Share(HeadShare(0, 4)), Share(HeadShare(0, 2)))
        theirs = msgspec.structs.replace(
            THEIRS, kv_caches_base_addr=[1], block_lens=[128], block_strides=[128], region_num_blocks=None,
            region_group_ids=None, region_names=["layers.0"],
        )  # fmt: skip
        other = msgspec.structs.replace(route, first=2, theirs=Share(HeadShare(2, 2)))
        one, two = make_plan(cache, theirs, route), make_plan(cache, theirs, other)
        assert isinstance(one, Plan)
        assert isinstance(two, Plan)
        assert one.permutes
        assert missing(cache, [one, two]) is None
        odd = msgspec.structs.replace(two, permutes=(msgspec.structs.replace(two.permutes[0], rows=1, outer=4),))
        assert isinstance(missing(cache, [one, odd]), Incompatible)


class TestState:
    """One slot of two tensors per layer, read whole of the rank with the same share."""

    CACHE = RankCache(
        (Region("mamba.0", 100, 48, 40, 8, 0), Region("mamba.0", 1000, 24, 24, 8, 0)),
        16,
        (GroupView("state", ("mamba.0",)),),
        kernel_blocks=4,
    )
    THEIRS = msgspec.structs.replace(
        THEIRS, kv_caches_base_addr=[500, 900], block_lens=[40, 24], block_strides=[40, 24], region_num_blocks=[5, 5],
        region_group_ids=[0, 0], region_names=["mamba.0", "mamba.0"], physical_blocks_per_logical_kv_block=4,
    )  # fmt: skip
    EQUAL = Route(Place(0, 1), 2, 2, 1, Share(HeadShare(2, 2)), Share(HeadShare(2, 2)))

    def test_tensors_of_one_layer_are_told_apart_by_their_order(self) -> None:
        got = make_plan(self.CACHE, self.THEIRS, self.EQUAL)
        assert isinstance(got, Plan)
        assert bases(got) == [(100, 500), (1000, 900)]
        assert [(lane.length, lane.pool) for lane in got.lanes] == [(40, 5), (24, 5)]
        assert missing(self.CACHE, [got]) is None

    def test_unequal_tp_is_refused(self) -> None:
        other = msgspec.structs.replace(self.EQUAL, theirs=Share(HeadShare(0, 4)))
        got = make_plan(self.CACHE, self.THEIRS, other)
        assert isinstance(got, Incompatible)
        assert got.field == "share of mamba.0"

    def test_unequal_sizes_are_refused(self) -> None:
        got = make_plan(self.CACHE, msgspec.structs.replace(self.THEIRS, block_lens=[40, 23]), self.EQUAL)
        assert got == Incompatible("state of mamba.0", "24 B", "23 B", "dtype or state sizes differ")


@st.composite
def hostile(draw: st.DrawFn) -> AgentMetadata:
    """Numbers that pass the wire's checks and nothing more."""
    n = draw(st.integers(1, 3))
    number = st.integers(-(1 << 63), (1 << 63) - 1) | st.integers(-2, 70)
    length = st.integers(1, 1 << 40) | st.sampled_from([32, 64, 128])
    numbers = st.lists(number, min_size=n, max_size=n)
    cells = st.none() | st.builds(Cells, *[st.integers(-2, 70) | number] * 8)
    return AgentMetadata(
        engine_id="P",
        agent_metadata=b"",
        kv_caches_base_addr=draw(st.lists(st.integers(0, 1 << 60), min_size=n, max_size=n)),
        device_id=draw(number),
        num_blocks=draw(st.integers(1, 1 << 40)),
        block_lens=draw(st.lists(length, min_size=n, max_size=n)),
        block_strides=draw(st.lists(length, min_size=n, max_size=n)),
        kv_cache_layout=draw(st.text(max_size=6) | st.sampled_from(["LBHNC", "LBNHC"])),
        block_size=draw(st.integers(1, 1 << 62) | st.sampled_from([8, 16, 32])),
        physical_blocks_per_logical_kv_block=draw(number | st.just(1)),
        region_num_blocks=draw(st.none() | numbers),
        region_group_ids=draw(st.none() | numbers),
        region_names=draw(st.none() | st.lists(st.sampled_from(["layers.0", "layers.1"]), min_size=n, max_size=n)),
        region_mem_types=draw(st.none() | st.lists(st.sampled_from(["DRAM", "VRAM", ""]), min_size=n, max_size=n)),
        dcp_size=draw(st.just(1) | number),
        kvconn=draw(
            st.none()
            | st.builds(
                KvconnAgent, st.just(8), st.just(1), interleave=number, cells=st.lists(cells, min_size=n, max_size=n)
            )
        ),
    )  # fmt: skip


@FUZZ
@given(theirs=hostile(), ids=st.lists(st.integers(0, (1 << 31) - 1), max_size=4), hit=st.integers(0, 3))
def test_no_number_of_a_peer_raises(theirs: AgentMetadata, ids: list[int], hit: int) -> None:
    got = make_plan(CACHE, theirs)
    assert isinstance(got, Plan | Incompatible)
    if isinstance(got, Plan):
        with suppress(RequestError):
            reads(got, ((1, 2), (3,)), (tuple(ids), (0, 1)), (hit, 0), tokens=33, held=33)
