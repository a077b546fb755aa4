"""Where KV lives and what each rank is."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvconn.base import Cells, LayerView
from kvconn.config import ParallelConfig
from kvconn.errors import ConfigError
from kvconn.geometry import HeadShare, RankRole, Region, blocks_for, coordinates, is_replicated, regions_of, spans

FUZZ = settings(derandomize=True, database=None, deadline=None, max_examples=200)
SIZES = [(1, 1, 1), (1, 1, 8), (2, 1, 4), (2, 3, 2), (4, 2, 1)]


def layer(name: str, address: int = 0, stride: int = 64, length: int = 64, count: int = 4, group: int = 0) -> LayerView:
    return LayerView(name, address, stride, length, count, group)


class TestCoordinates:
    @pytest.mark.parametrize(("tp", "pp", "pcp"), SIZES)
    def test_ranks_are_ordered_by_stage_then_pcp_then_tp(self, tp: int, pp: int, pcp: int) -> None:
        parallel = ParallelConfig(tp=tp, pp=pp, pcp=pcp)
        got = [coordinates(parallel, rank) for rank in range(parallel.world)]
        assert [(c.pp, c.pcp, c.tp) for c in got] == list(itertools.product(range(pp), range(pcp), range(tp)))

    @pytest.mark.parametrize("rank", [-1, 8, 100])
    def test_a_rank_outside_the_world_is_refused(self, rank: int) -> None:
        with pytest.raises(ConfigError, match=rf"rank: expected 0\.\.7, got {rank}"):
            coordinates(ParallelConfig(pcp=8), rank)


class TestRoles:
    @pytest.mark.parametrize("pcp", [2, 8])
    def test_under_replicated_pcp_only_the_first_replica_serves(self, pcp: int) -> None:
        roles = [RankRole.of(ParallelConfig(pcp=pcp), rank, "kv_producer") for rank in range(pcp)]
        assert [r.serves for r in roles] == [True] + [False] * (pcp - 1)
        assert [r.replicates for r in roles] == [False] + [True] * (pcp - 1)
        assert not any(r.reads for r in roles)

    def test_every_tp_rank_of_the_first_replica_serves(self) -> None:
        roles = [RankRole.of(ParallelConfig(tp=2, pcp=2), rank, "kv_producer") for rank in range(4)]
        assert [r.serves for r in roles] == [True, True, False, False]

    def test_each_stage_has_its_own_canonical_replica(self) -> None:
        roles = [RankRole.of(ParallelConfig(pp=2, pcp=2), rank, "kv_both") for rank in range(4)]
        assert [r.serves for r in roles] == [True, False, True, False]

    def test_where_dcp_shards_the_kv_every_rank_serves(self) -> None:
        parallel = ParallelConfig(pcp=4, dcp=4)
        assert not is_replicated(parallel)
        assert all(RankRole.of(parallel, rank, "kv_producer").serves for rank in range(4))

    @pytest.mark.parametrize(
        ("kv_role", "serves", "reads"),
        [("kv_producer", True, False), ("kv_consumer", False, True), ("kv_both", True, True)],
    )
    def test_the_role_says_who_serves_and_who_reads(self, kv_role: str, serves: bool, reads: bool) -> None:
        role = RankRole.of(ParallelConfig(), 0, kv_role)
        assert (role.serves, role.reads, role.replicates) == (serves, reads, False)

    def test_a_rank_outside_the_world_has_no_role(self) -> None:
        with pytest.raises(ConfigError):
            RankRole.of(ParallelConfig(pcp=2), 2, "kv_producer")

    def test_repr_is_one_line_that_says_what_the_rank_does(self) -> None:
        assert repr(RankRole.of(ParallelConfig(pcp=8), 0, "kv_both")) == "RankRole(0/8 serves+reads)"
        assert repr(RankRole.of(ParallelConfig(pcp=8), 3, "kv_producer")) == "RankRole(3/8 replicates)"
        assert repr(RankRole.of(ParallelConfig(), 0, "none")) == "RankRole(0/1 idle)"


class TestRegions:
    def test_layers_are_in_natural_order_whatever_order_they_came_in(self) -> None:
        names = ["layers.10.kv", "layers.2.kv", "layers.1.v", "layers.1.k", "embed", "layers"]
        regions = regions_of(layer(name, address=index * 4096) for index, name in enumerate(names))
        assert [r.name for r in regions] == [
            "embed",
            "layers",
            "layers.1.k",
            "layers.1.v",
            "layers.2.kv",
            "layers.10.kv",
        ]

    @FUZZ
    @given(names=st.lists(st.text("a12²٣.-", min_size=1, max_size=6), unique=True, max_size=8))
    def test_the_order_does_not_depend_on_the_order_given(self, names: list[str]) -> None:
        views = [layer(name, address=4096 * index) for index, name in enumerate(names)]
        assert regions_of(views) == regions_of(reversed(views))
        assert {r.name for r in regions_of(views)} == set(names)

    @FUZZ
    @given(names=st.lists(st.text(max_size=6), unique=True, max_size=6))
    def test_any_names_can_be_ordered(self, names: list[str]) -> None:
        assert len(regions_of(layer(name, address=4096 * i) for i, name in enumerate(names))) == len(names)

    def test_a_tensor_that_two_layers_share_is_one_region_named_by_the_first(self) -> None:
        regions = regions_of([layer("b", address=100), layer("a", address=100), layer("c", address=100, stride=128)])
        assert [(r.name, r.stride) for r in regions] == [("a", 64), ("c", 128)]

    @pytest.mark.parametrize(
        ("stride", "length", "count"), [(64, 64, 0), (64, 0, 4), (63, 64, 4), (0, 0, 4), (8, -1, 1)]
    )
    def test_a_layer_whose_numbers_cannot_be_is_refused_by_name(self, stride: int, length: int, count: int) -> None:
        with pytest.raises(ConfigError, match=r"layer bad: expected .* got count="):
            regions_of([layer("good"), layer("bad", stride=stride, length=length, count=count)])

    def test_everything_of_a_layer_is_carried_over(self) -> None:
        view = LayerView("l", 4096, 128, 64, 7, 2, "window", "VRAM", 3)
        assert regions_of([view]) == (Region("l", 4096, 128, 64, 7, 2, "VRAM", 3),)

    def test_span_ends_with_the_last_byte_of_the_last_block(self) -> None:
        assert Region("l", 0, 128, 64, 3, 0).span == 2 * 128 + 64
        assert Region("l", 0, 64, 64, 3, 0).span == 192

    def test_two_tensors_at_one_address_with_different_strides_are_two_regions(self) -> None:
        views = [layer("a", 4096, 64, 64), layer("b", 4096, 128, 128), layer("c", 4096, 64, 64)]
        assert [region.name for region in regions_of(views)] == ["a", "b"]

    @pytest.mark.parametrize(
        "cells",
        [
            Cells(4, 4, 4, 16, 5),
            Cells(4, 4, 5, 16, 4),
            Cells(0, 4, 4, 16, 4),
            Cells(4, 4, 4, -16, 4),
            Cells(2, 4, 4, 16, 4, 2, 48),
            Cells(4, 4, 4, 16, 4, part=2),
            Cells(1, 1, 16, 0, 1 << 63),
            Cells(1 << 62, 1, 16, 0, 16),
        ],
    )
    def test_cells_that_do_not_fit_their_block_are_refused(self, cells: Cells) -> None:
        with pytest.raises(ConfigError, match="layer l: expected cells within 64 bytes"):
            regions_of([LayerView("l", 0, 64, 64, 4, cells=cells)])
        (region,) = regions_of([LayerView("l", 0, 64, 64, 4, cells=Cells(4, 4, 4, 16, 4))])
        assert region.cells is not None
        assert region.cells.at(0, 3, 2) == 56

    def test_memory_to_register_has_every_byte_once(self) -> None:
        rows = [Region(f"l{i}", 1000 + 8 * i, 32, 8, 4, 0) for i in range(4)]  # a block-first pool of 128 bytes
        apart = Region("x", 4000, 8, 8, 2, 0)
        device = Region("y", 1000, 8, 8, 2, 0, "VRAM", 1)
        assert spans([*rows, device, apart]) == [
            (1000, 128, "DRAM", 0),
            (4000, 16, "DRAM", 0),
            (1000, 16, "VRAM", 1),
        ]
        inside = Region("z", 1016, 8, 8, 2, 0)
        assert spans([inside, *rows]) == [(1000, 128, "DRAM", 0)]


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (160, 10)])
def test_blocks_hold_tokens_rounded_up(tokens: int, blocks: int) -> None:
    assert blocks_for(tokens, 16) == blocks


class TestHeadShares:
    @pytest.mark.parametrize(("heads", "tp"), [(8, 1), (8, 4), (8, 8), (1, 16), (2, 4), (4, 16)])
    def test_every_head_lies_on_equally_many_ranks_and_copies_are_neighbours(self, heads: int, tp: int) -> None:
        shares = [HeadShare.of(heads, tp, rank) for rank in range(tp)]
        held = [h for s in shares if s is not None for h in range(s.first, s.first + s.count)]
        copies = max(1, tp // heads)
        assert held == [h for h in range(heads) for _ in range(copies)]
        assert [(s.copy, s.copies) for s in shares if s is not None] == [(r % copies, copies) for r in range(tp)]

    @pytest.mark.parametrize(("heads", "tp"), [(6, 4), (4, 6), (3, 2)])
    def test_heads_and_ranks_that_do_not_divide_have_no_shares(self, heads: int, tp: int) -> None:
        assert HeadShare.of(heads, tp, 0) is None
