"""Two TP sizes, one plan: where every (layer, head, token) lies on both sides, and who hears from whom.

The model: a side is a NumPy array of bytes per rank and layer, filled by name of (layer, head, block, token, channel).
Planning and copying must give every reader exactly its own names.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvconn.geometry import HeadShare, Place, RankCache, Region, Side
from kvconn.nixl.leases import SendLeases
from kvconn.nixl.pairing import pair_blocks, ranges
from kvconn.nixl.plan import MAX_TP, Incompatible, Plan, Route, make_plan, routes
from kvconn.nixl.wire import AgentMetadata

FUZZ = settings(derandomize=True, database=None, deadline=None, max_examples=150)
SIZES = [1, 2, 3, 4, 6, 8, 12, 16]
#: KV heads of a model that each size of SIZES divides or is a multiple of; 1 is a latent cache too
PAIRS = [
    (heads, p, d)
    for heads in (1, 2, 4, 8, 12, 16, 48)
    for p in SIZES
    for d in SIZES
    if (p % d == 0 or d % p == 0) and all(heads % tp == 0 or tp % heads == 0 for tp in (p, d))
]
TOKENS, CHANNELS, LAYERS, ITEM = 2, 3, 2, 8


def routed(heads: int, tp: int, rank: int, their_tp: int) -> tuple[Route, ...]:
    got = routes(Side(heads, tp), Side(heads, their_tp), Place(0, rank))
    assert not isinstance(got, Incompatible), got
    return got


def name(layer: int, head: int, block: int) -> npt.NDArray[np.int64]:
    """What a block holds of one head, shape (tokens, channels): no two of them are equal anywhere."""
    first = ((layer * 64 + head) * 64 + block) * TOKENS * CHANNELS
    return 1 + first + np.arange(TOKENS * CHANNELS, dtype=np.int64).reshape(TOKENS, CHANNELS)


class Memory:
    """One rank's cache: a region per layer in one array of bytes, ``gap`` bytes after every block."""

    def __init__(self, heads: int, tp: int, rank: int, blocks: int, gap: int) -> None:
        share = HeadShare.of(heads, tp, rank)
        assert share is not None
        self.share = share
        self.blocks = blocks
        length = share.count * TOKENS * CHANNELS * ITEM
        stride = length + gap
        self.regions = [
            Region(f"layers.{i}", 1 + i * (stride * blocks + 5), stride, length, blocks, 0) for i in range(LAYERS)
        ]
        self.bytes = np.zeros(1 + LAYERS * (stride * blocks + 5), dtype=np.uint8)
        self.written = np.zeros_like(self.bytes, dtype=np.int64)

    def at(self, layer: int, block: int, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The bytes of a block in ``array``."""
        region = self.regions[layer]
        start = region.base + block * region.stride
        return array[start : start + region.length]

    def content(self, layer: int, block: int) -> npt.NDArray[np.uint8]:
        """What a block of this rank is when it is right: heads, then tokens, then channels."""
        heads = range(self.share.first, self.share.first + self.share.count)
        return np.stack([name(layer, head, block) for head in heads]).reshape(-1).view(np.uint8)

    def fill(self) -> None:
        for layer in range(LAYERS):
            for block in range(self.blocks):
                self.at(layer, block, self.bytes)[:] = self.content(layer, block)

    def metadata(self) -> AgentMetadata:
        return AgentMetadata(
            engine_id="P",
            agent_metadata=b"",
            kv_caches_base_addr=[r.base for r in self.regions],
            device_id=0,
            num_blocks=self.blocks,
            block_lens=[r.length for r in self.regions],
            block_strides=[r.stride for r in self.regions],
            kv_cache_layout="LBHNC",
            block_size=TOKENS,
        )

    def read(self, source: Memory, plan: Plan, local: list[int], remote: list[int], hit: int) -> None:
        """Do what a transport does with the plan's ranges."""
        runs = pair_blocks((tuple(local),), (tuple(remote),), (hit,), plan.remote_blocks)
        for (to, size), (at, same) in zip(*ranges(plan, runs), strict=True):
            assert size == same
            assert min(to, at) >= 0
            assert to + size <= len(self.bytes)
            assert at + size <= len(source.bytes)
            self.bytes[to : to + size] = source.bytes[at : at + size]
            self.written[to : to + size] += 1


class TestBytes:
    @FUZZ
    @given(
        pair=st.sampled_from(PAIRS), order=st.permutations(range(9)), n=st.integers(0, 9), hit=st.integers(0, 4),
        gaps=st.tuples(st.sampled_from([0, 0, 7]), st.sampled_from([0, 0, 3])),
    )  # fmt: skip
    def test_every_reader_gets_exactly_its_heads_each_byte_once_and_nothing_else_is_touched(
        self, pair: tuple[int, int, int], order: list[int], n: int, hit: int, gaps: tuple[int, int]
    ) -> None:
        heads, p_tp, d_tp = pair
        producers = [Memory(heads, p_tp, rank, 9, gaps[0]) for rank in range(p_tp)]
        for producer in producers:
            producer.fill()
        remote = list(order[:n])
        local = sorted(order, reverse=True)[: max(0, n - hit)]
        for rank in range(d_tp):
            reader = Memory(heads, d_tp, rank, 11, gaps[1])
            for route in routed(heads, d_tp, rank, p_tp):
                source = producers[route.source.tp]
                plan = make_plan(RankCache(tuple(reader.regions), TOKENS), source.metadata(), route)
                assert isinstance(plan, Plan), plan
                assert plan.readers == route.readers
                assert bool(plan.pairs) == bool(route.count)
                reader.read(source, plan, local, remote, hit)
            expected = np.zeros_like(reader.bytes)
            once = np.zeros_like(reader.written)
            for mine, theirs in zip(local, remote[hit:], strict=True):
                for layer in range(LAYERS):
                    reader.at(layer, mine, expected)[:] = reader.content(layer, theirs)
                    reader.at(layer, mine, once)[:] = 1
            np.testing.assert_array_equal(reader.bytes, expected)
            np.testing.assert_array_equal(reader.written, once)

    def test_equal_sizes_read_whole_regions_so_that_runs_stay_one_range(self) -> None:
        mine, theirs = Memory(8, 4, 2, 9, 0), Memory(8, 4, 2, 9, 0)
        (route,) = routed(8, 4, 2, 4)
        plan = make_plan(RankCache(tuple(mine.regions), TOKENS), theirs.metadata(), route)
        assert isinstance(plan, Plan)
        assert [pair.local for pair in plan.pairs] == mine.regions
        assert all(pair.dense for pair in plan.pairs)
        whole = make_plan(RankCache(tuple(mine.regions), TOKENS), theirs.metadata())
        assert isinstance(whole, Plan)
        assert plan.pairs == whole.pairs


class TestWhoIsTold:
    @pytest.mark.parametrize(("heads", "p_tp", "d_tp"), PAIRS)
    def test_each_rank_of_the_producer_ends_its_hold_with_the_last_that_tells_it_and_not_before(
        self, heads: int, p_tp: int, d_tp: int
    ) -> None:
        told: dict[int, list[tuple[int, int]]] = {source: [] for source in range(p_tp)}
        for rank in range(d_tp):
            mine = routed(heads, d_tp, rank, p_tp)
            assert [route.source.tp for route in mine] == sorted({route.source.tp for route in mine})
            for route in mine:
                told[route.source.tp].append((rank, route.readers))
        for heard in told.values():
            leases = SendLeases(30.0)
            leases.track("r", 1, "t", 30.0, 1)
            ended = [leases.notified("t", f"agent {rank}", n, 0.0) is not None for rank, n in heard]
            assert ended == [False] * (len(heard) - 1) + [True]

    def test_copies_share_the_readers(self) -> None:
        sources = [[r.source.tp for r in routed(1, 4, rank, 2) if r.count] for rank in range(4)]
        assert sources == [[0], [0], [1], [1]]

    def test_a_latent_cache_is_read_once_and_the_other_ranks_are_told(self) -> None:
        assert [[(r.source.tp, r.count, r.readers) for r in routed(1, 2, rank, 4)] for rank in range(2)] == [
            [(0, 1, 1), (1, 0, 1)],
            [(2, 1, 1), (3, 0, 1)],
        ]

    def test_two_heads_at_four_ranks_are_read_from_one_copy_each(self) -> None:
        (only,) = [[(r.source.tp, r.first, r.count, r.readers) for r in routed(2, 1, 0, 4)]]
        assert only == [(0, 0, 1, 1), (1, 0, 0, 1), (2, 1, 1, 1), (3, 1, 0, 1)]

    def test_more_readers_than_ranks_are_counted_where_they_read(self) -> None:
        assert [[(r.source.tp, r.first, r.count, r.readers) for r in routed(4, 4, rank, 2)] for rank in range(4)] == [
            [(0, 0, 1, 2)],
            [(0, 1, 1, 2)],
            [(1, 2, 1, 2)],
            [(1, 3, 1, 2)],
        ]


class TestRefused:
    @pytest.mark.parametrize(
        ("heads", "tp", "their_tp", "field"),
        [
            (12, 3, 2, "tp size"),
            (8, 4, 0, "tp size"),
            (8, 4, -4, "tp size"),
            (8, 4, 1 << 60, "tp size"),
            (64, MAX_TP, 2 * MAX_TP, "tp size"),
            (6, 2, 4, "kv heads per rank"),
        ],
    )
    def test_sizes_that_do_not_fit_are_named_with_what_to_do(
        self, heads: int, tp: int, their_tp: int, field: str
    ) -> None:
        got = routes(Side(heads, tp), Side(heads, their_tp), Place(0, 0))
        assert isinstance(got, Incompatible)
        assert got.field == field
        assert str(their_tp) in got.theirs
        assert got.hint

    def test_models_of_different_heads_and_of_none_are_refused(self) -> None:
        for ours, theirs in ((8, 4), (0, 0), (-1, -1)):
            got = routes(Side(ours), Side(theirs), Place(0, 0))
            assert isinstance(got, Incompatible)
            assert (got.field, got.ours, got.theirs) == ("kv heads", str(ours), str(theirs))

    @FUZZ
    @given(heads=st.integers(-3, 64), tp=st.integers(1, MAX_TP), theirs=st.integers(-(1 << 70), 1 << 70))
    def test_no_number_of_a_peer_raises(self, heads: int, tp: int, theirs: int) -> None:
        assert isinstance(routes(Side(heads, tp), Side(heads, theirs), Place(0, tp - 1)), Incompatible | tuple)

    def test_a_block_length_that_is_not_theirs_per_head_is_refused_with_the_heads_it_is_for(self) -> None:
        mine, theirs = Memory(8, 2, 0, 9, 0), Memory(8, 4, 0, 9, 0)
        route = routed(8, 2, 0, 4)[0]
        wrong = msgspec.structs.replace(theirs.metadata(), block_lens=[96, 95])
        assert make_plan(RankCache(tuple(mine.regions), TOKENS), wrong, route) == Incompatible(
            "block length of layers.1",
            "192 B for 4 heads",
            "95 B for 2 heads",
            "dtype, head size or kv heads differ",
        )

    def test_a_region_of_ours_that_its_heads_do_not_divide_is_refused(self) -> None:
        region = Region("layers.0", 0, 10, 10, 4, 0)
        theirs = msgspec.structs.replace(
            Memory(8, 4, 0, 9, 0).metadata(), kv_caches_base_addr=[1], block_lens=[4], block_strides=[4]
        )
        got = make_plan(RankCache((region,), TOKENS), theirs, routed(8, 2, 0, 4)[0])
        assert isinstance(got, Incompatible)
        assert got.field == "block length of layers.0"
