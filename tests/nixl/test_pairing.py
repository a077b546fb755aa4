"""Block ids to byte ranges: exactly the bytes that are meant, in as few ranges as both sides allow."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvconn.errors import RequestError
from kvconn.geometry import Region
from kvconn.nixl.pairing import pair_blocks, ranges, to_runs
from kvconn.nixl.plan import Plan, RegionPair

FUZZ = settings(derandomize=True, database=None, deadline=None, max_examples=200)
FIELD = "kv_transfer_params.remote_block_ids"


def runs_of(local: list[int], remote: list[int]) -> list[tuple[int, ...]]:
    runs = to_runs(np.array(local, dtype=np.int64), np.array(remote, dtype=np.int64))
    assert runs.dtype == np.int64
    assert runs.shape == (len(runs), 3)
    return [tuple(map(int, run)) for run in runs]


class TestRuns:
    @pytest.mark.parametrize(
        ("local", "remote", "runs"),
        [
            ([], [], []),
            ([5], [9], [(5, 9, 1)]),
            ([3, 4, 5], [7, 8, 9], [(3, 7, 3)]),
            ([5, 4, 3], [9, 8, 7], [(3, 7, 3)]),  # both descend: sorted, it is one run
            ([3, 4, 5], [9, 8, 7], [(3, 9, 1), (4, 8, 1), (5, 7, 1)]),
            ([1, 2, 8, 9], [4, 5, 6, 7], [(1, 4, 2), (8, 6, 2)]),
            ([1, 2, 3, 4], [4, 5, 9, 10], [(1, 4, 2), (3, 9, 2)]),
            ([1, 2], [4, 4], [(1, 4, 1), (2, 4, 1)]),
        ],
    )
    def test_pairs_are_sorted_by_local_block_and_joined(
        self, local: list[int], remote: list[int], runs: list[tuple[int, ...]]
    ) -> None:
        assert runs_of(local, remote) == runs

    @FUZZ
    @given(pairs=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), unique_by=lambda p: p[0], max_size=30))
    def test_runs_expand_back_to_exactly_the_sorted_pairs_and_cannot_be_joined_further(
        self, pairs: list[tuple[int, int]]
    ) -> None:
        runs = runs_of([p[0] for p in pairs], [p[1] for p in pairs])
        assert [(a + i, b + i) for a, b, n in runs for i in range(n)] == sorted(pairs)
        for (a, b, n), (c, d, _) in itertools.pairwise(runs):
            assert (a + n, b + n) != (c, d)


class TestPairing:
    def pairs(self, local: Any, remote: Any, hits: Any, pool: int = 100) -> list[list[tuple[int, ...]]]:
        return [[tuple(map(int, run)) for run in runs] for runs in pair_blocks(local, remote, hits, pool)]

    def test_prefix_hits_skip_the_producers_first_blocks_and_its_tail_is_not_read(self) -> None:
        assert self.pairs([(10, 11)], [(1, 2, 3, 4, 5)], [2]) == [[(10, 3, 2)]]

    def test_each_group_has_its_own_blocks_and_hits(self) -> None:
        assert self.pairs([(10,), (), (7, 8)], [(1, 2), (5,), (3, 4)], [1, 1, 0]) == [[(10, 2, 1)], [], [(7, 3, 2)]]

    def test_nothing_to_fill_reads_nothing(self) -> None:
        assert self.pairs([()], [(1, 2, 3)], [3]) == [[]]

    @pytest.mark.parametrize(("remote", "got"), [([], 0), ([(1,), (2,)], 2)])
    def test_another_number_of_groups_is_refused(self, remote: Any, got: int) -> None:
        with pytest.raises(RequestError, match=f"expected 1 cache groups, got {got}") as caught:
            pair_blocks(((1,),), tuple(remote), (0,), 100)
        assert caught.value.field == FIELD

    @pytest.mark.parametrize(("theirs", "hits"), [((), 0), ((1,), 0), ((1, 2), 1), ((1, 2, 3), 9)])
    def test_too_few_blocks_are_refused(self, theirs: tuple[int, ...], hits: int) -> None:
        with pytest.raises(RequestError, match=f"at least {hits + 2} blocks, got {len(theirs)}") as caught:
            pair_blocks(((), (5, 6)), ((), theirs), (0, hits), 100)
        assert caught.value.field == f"{FIELD}[1]"

    @pytest.mark.parametrize("bad", [100, 101, (1 << 31) - 1])
    def test_ids_beyond_the_peers_pool_are_refused(self, bad: int) -> None:
        with pytest.raises(RequestError, match=f"block ids below the peer's 100, got {bad}") as caught:
            pair_blocks(((5, 6),), ((1, bad),), (0,), 100)
        assert caught.value.field == f"{FIELD}[0]"

    def test_ids_beyond_the_pool_in_the_part_nobody_reads_do_no_harm(self) -> None:
        assert self.pairs([(5,)], [(999, 7, 999)], [1]) == [[(5, 7, 1)]]


@st.composite
def plans(draw: st.DrawFn) -> tuple[Plan, list[Any]]:
    """A plan over one to three groups and the runs of each; regions lie 10,000 bytes apart."""
    n_groups = draw(st.integers(1, 3))
    pairs = []
    for index in range(draw(st.integers(1, 4))):
        length = draw(st.integers(1, 4))
        region = Region(
            f"l{index}", 10_000 * index, length + draw(st.sampled_from([0, 0, 3])), length, 12,
            draw(st.integers(0, n_groups - 1)),
        )  # fmt: skip
        pairs.append(RegionPair(region, 500_000 + 10_000 * index, length + draw(st.sampled_from([0, 0, 5]))))
    runs = []
    for _ in range(n_groups):
        local = draw(st.lists(st.integers(0, 11), unique=True, max_size=8))
        remote = draw(st.lists(st.integers(0, 11), min_size=len(local), max_size=len(local)))
        if draw(st.booleans()):
            remote = [(x + 3) % 12 for x in local]
        runs.append(to_runs(np.array(local, dtype=np.int64), np.array(remote, dtype=np.int64)))
    return Plan(tuple(pairs), 12), runs


class TestRanges:
    @FUZZ
    @given(case=plans())
    def test_ranges_cover_exactly_the_bytes_a_brute_force_copy_would(self, case: tuple[Plan, list[Any]]) -> None:
        plan, runs = case
        expected: list[tuple[int, int]] = []
        for pair in plan.pairs:
            for a, b, n in runs[pair.local.group]:
                for i, byte in ((i, byte) for i in range(n) for byte in range(pair.local.length)):
                    expected.append(
                        (
                            int(pair.local.base + (a + i) * pair.local.stride + byte),
                            int(pair.remote_base + (b + i) * pair.remote_stride + byte),
                        )
                    )
        local, remote = ranges(plan, runs)
        assert local.shape == remote.shape == (len(local), 2)
        assert local.dtype == remote.dtype == np.int64
        assert np.array_equal(local[:, 1], remote[:, 1])
        got = [
            (int(at) + i, int(there) + i)
            for (at, n), (there, _) in zip(local, remote, strict=True)
            for i in range(int(n))
        ]
        assert sorted(got) == sorted(expected)

    def test_a_run_is_one_range_where_both_sides_are_dense_and_one_per_block_elsewhere(self) -> None:
        run = to_runs(np.arange(3), np.arange(5, 8))
        for stride, remote_stride, n in ((8, 8, 1), (8, 10, 3), (10, 8, 3), (10, 10, 3)):
            plan = Plan((RegionPair(Region("l", 0, stride, 8, 9, 0), 1000, remote_stride),), 9)
            local, remote = ranges(plan, [run])
            assert len(local) == len(remote) == n

    def test_within_a_region_ranges_ascend_locally(self) -> None:
        plan = Plan((RegionPair(Region("l", 0, 8, 8, 20, 0), 1000, 8),), 20)
        local, _ = ranges(plan, pair_blocks(((9, 2, 5),), ((1, 7, 3),), (0,), 20))
        assert local[:, 0].tolist() == [16, 40, 72]

    def test_nothing_to_read_is_no_ranges(self) -> None:
        plan = Plan((RegionPair(Region("l", 0, 8, 8, 9, 0), 0, 8),), 9)
        local, remote = ranges(plan, pair_blocks(((),), ((1,),), (1,), 9))
        assert local.shape == remote.shape == (0, 2)

    def test_addresses_near_the_end_of_the_address_space_do_not_wrap(self) -> None:
        base = (1 << 63) - 1 - 8 * 100
        plan = Plan((RegionPair(Region("l", base, 8, 8, 100, 0), base, 8),), 100)
        local, remote = ranges(plan, pair_blocks(((99,),), ((99,),), (0,), 100))
        assert local[0, 0] == remote[0, 0] == base + 8 * 99
