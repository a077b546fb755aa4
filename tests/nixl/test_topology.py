"""Whom one rank reads and tells at any two sizes, so that every rank of the producer ends its hold when all is read."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvconn.config import ParallelConfig
from kvconn.geometry import Place, Side, TokenShare, place_of
from kvconn.nixl.leases import SendLeases
from kvconn.nixl.routes import MAX_INTERLEAVE, MAX_PP, MAX_TP, Incompatible, Route, routes

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
#: two sides with stages and DCP
SIDES = [
    (Side(heads, tp, pp, dcp, turn), Side(heads, d_tp, d_pp, d_dcp, d_turn))
    for heads, tp, d_tp in [(1, 1, 4), (1, 4, 1), (1, 4, 4), (1, 4, 8), (2, 4, 8), (2, 8, 2), (4, 4, 2)]
    for pp, d_pp in [(1, 1), (2, 1), (1, 3), (2, 2)]
    for dcp, d_dcp in itertools.product((1, 2, 4), (1, 2, 4))
    for turn, d_turn in [(1, 1), (1, 16), (16, 16)]
    if max(1, tp // heads) % dcp == 0 and max(1, d_tp // heads) % d_dcp == 0
]


def routed(heads: int, tp: int, rank: int, their_tp: int) -> tuple[Route, ...]:
    got = routes(Side(heads, tp), Side(heads, their_tp), Place(0, rank))
    assert not isinstance(got, Incompatible), got
    return got


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

    @pytest.mark.parametrize(("p", "d"), SIDES, ids=str)
    def test_so_it_does_with_stages_and_dcp(self, p: Side, d: Side) -> None:
        told: dict[Place, list[tuple[Place, int]]] = {}
        for place in (Place(pp, tp) for pp in range(d.pp) for tp in range(d.tp)):
            mine = routes(d, p, place)
            assert not isinstance(mine, Incompatible), mine
            for route in mine:
                told.setdefault(route.source, []).append((place, route.readers))
        assert sorted(told) == [Place(pp, tp) for pp in range(p.pp) for tp in range(p.tp)]
        for heard in told.values():
            assert {n for _, n in heard} == {len(heard)}

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

    def test_equal_dcp_reads_its_own_slice_and_unequal_one_all_that_meet_it(self) -> None:
        def read(d: Side, p: Side, tp: int) -> list[int]:
            found = routes(d, p, Place(0, tp))
            assert not isinstance(found, Incompatible), found
            return [route.source.tp for route in found if route.count]

        assert read(Side(1, 4, dcp=4), Side(1, 4, dcp=4), 2) == [2]
        assert read(Side(1, 2, dcp=2), Side(1, 4, dcp=4), 1) == [1, 3]
        assert read(Side(1, 4, dcp=4), Side(1, 2, dcp=2), 3) == [1]
        assert read(Side(1, 1), Side(1, 4, dcp=4), 0) == [0, 1, 2, 3]
        assert read(Side(1, 4, dcp=4), Side(1, 4, dcp=4, interleave=16), 2) == [0, 1, 2, 3]

    @FUZZ
    @given(
        a=st.tuples(st.sampled_from([1, 2, 3, 4, 8]), st.sampled_from([1, 2, 4, 16])),
        b=st.tuples(st.sampled_from([1, 2, 3, 4, 8]), st.sampled_from([1, 2, 4, 16])),
    )
    def test_shares_meet_where_some_token_is_in_both(self, a: tuple[int, int], b: tuple[int, int]) -> None:
        for i, j in itertools.product(range(a[0]), range(b[0])):
            one, other = TokenShare(a[0], i, a[1]), TokenShare(b[0], j, b[1])
            common = any(t // a[1] % a[0] == i and t // b[1] % b[0] == j for t in range(16 * 8 * 8))
            assert one.meets(other) == common

    def test_ranks_of_a_sharded_pcp_are_found_as_tp_ranks_and_replicas_where_the_first_is(self) -> None:
        sharded, replicated = ParallelConfig(pcp=4, dcp=4, pp=2, dcp_interleave=16), ParallelConfig(tp=2, pcp=2)
        assert [place_of(sharded, rank) for rank in (0, 3, 5)] == [Place(0, 0), Place(0, 3), Place(1, 1)]
        assert [place_of(replicated, rank) for rank in range(4)] == [Place(0, 0), Place(0, 1)] * 2
        assert Side.of(sharded, 1) == Side(1, 4, 2, 4, 16)
        assert Side.of(replicated, 8) == Side(8, 2)


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

    @pytest.mark.parametrize(
        ("ours", "theirs", "field"),
        [
            (Side(1), Side(1, pp=0), "pp size"),
            (Side(1), Side(1, pp=MAX_PP + 1), "pp size"),
            (Side(1, 2), Side(1, 2, dcp=0), "dcp size"),
            (Side(1, 6, dcp=2), Side(1, 6, dcp=3), "dcp size"),
            (Side(1, 4), Side(1, 2, dcp=4), "kv heads per rank"),
            (Side(8, 4), Side(8, 4, dcp=2), "kv heads per rank"),
            (Side(1, 2, dcp=2, interleave=2), Side(1, 2, dcp=2, interleave=3), "dcp interleave"),
            (Side(1), Side(1, 2, dcp=2, interleave=0), "dcp interleave"),
            (Side(1), Side(1, 2, dcp=2, interleave=MAX_INTERLEAVE + 1), "dcp interleave"),
        ],
        ids=str,
    )
    def test_so_are_stages_and_dcp(self, ours: Side, theirs: Side, field: str) -> None:
        got = routes(ours, theirs, Place(0, 0))
        assert isinstance(got, Incompatible)
        assert got.field == field
        assert got.hint

    def test_models_of_different_heads_and_of_none_are_refused(self) -> None:
        for ours, theirs in ((8, 4), (0, 0), (-1, -1)):
            got = routes(Side(ours), Side(theirs), Place(0, 0))
            assert isinstance(got, Incompatible)
            assert (got.field, got.ours, got.theirs) == ("kv heads", str(ours), str(theirs))

    @FUZZ
    @given(
        heads=st.integers(-3, 64), tp=st.integers(1, MAX_TP),
        theirs=st.tuples(*[st.integers(-(1 << 70), 1 << 70) | st.integers(1, 16)] * 4),
    )  # fmt: skip
    def test_no_number_of_a_peer_raises(self, heads: int, tp: int, theirs: tuple[int, ...]) -> None:
        assert isinstance(routes(Side(heads, tp), Side(heads, *theirs), Place(0, tp - 1)), Incompatible | tuple)
