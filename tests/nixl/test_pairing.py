"""Block ids to byte ranges: which units are paired, in as few ranges as both sides allow, and wrong ids refused.

That the bytes are right ones for any pair of sides is tests/nixl/test_token_positions.py.
"""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvconn.base import NO_BLOCK, GroupView
from kvconn.errors import RequestError
from kvconn.geometry import Region
from kvconn.nixl.blocks import blocks_held
from kvconn.nixl.pairing import pair_units, permuted, ranges, reads, to_runs
from kvconn.nixl.plan import Lane, Memory, Permute, Plan, Slots

FUZZ = settings(derandomize=True, database=None, deadline=None, max_examples=200)
FIELD = "kv_transfer_params.remote_block_ids"
#: whole blocks of 4 tokens, 8 bytes, dense on both sides
LANE = Lane(0, 0, "full", None, Slots(4), Slots(4), 100, 4, 8, 8, 8, 8, 8, Memory(), Memory(), ((0, 1000),))


def lane(**changes: Any) -> Lane:
    return msgspec.structs.replace(LANE, **changes)


def runs_of(local: list[int], remote: list[int], breaks: tuple[int, int] = (0, 0)) -> list[tuple[int, ...]]:
    runs = to_runs(np.array(local, dtype=np.int64), np.array(remote, dtype=np.int64), breaks)
    assert runs.dtype == np.int64
    assert runs.shape == (len(runs), 3)
    return [tuple(map(int, run)) for run in runs]


class TestRuns:
    @pytest.mark.parametrize(
        ("local", "remote", "breaks", "runs"),
        [
            ([], [], (0, 0), []),
            ([5], [9], (0, 0), [(5, 9, 1)]),
            ([3, 4, 5], [7, 8, 9], (0, 0), [(3, 7, 3)]),
            ([3, 4, 5], [9, 8, 7], (0, 0), [(3, 9, 1), (4, 8, 1), (5, 7, 1)]),
            ([1, 2, 8, 9], [4, 5, 6, 7], (0, 0), [(1, 4, 2), (8, 6, 2)]),
            ([1, 2, 3, 4], [4, 5, 9, 10], (0, 0), [(1, 4, 2), (3, 9, 2)]),
            ([1, 2], [4, 4], (0, 0), [(1, 4, 1), (2, 4, 1)]),
            ([1, 2, 3], [5, 6, 7], (1, 0), [(1, 5, 1), (2, 6, 1), (3, 7, 1)]),
            ([1, 2, 3, 4], [5, 6, 7, 8], (2, 0), [(1, 5, 1), (2, 6, 2), (4, 8, 1)]),
            ([1, 2, 3, 4], [5, 6, 7, 8], (0, 4), [(1, 5, 3), (4, 8, 1)]),
        ],
    )
    def test_neighbours_on_both_sides_are_joined_but_not_over_a_break(
        self, local: list[int], remote: list[int], breaks: tuple[int, int], runs: list[tuple[int, ...]]
    ) -> None:
        assert runs_of(local, remote, breaks) == runs

    @FUZZ
    @given(pairs=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), unique_by=lambda p: p[0], max_size=30))
    def test_runs_expand_back_to_exactly_the_pairs_and_cannot_be_joined_further(
        self, pairs: list[tuple[int, int]]
    ) -> None:
        pairs.sort()
        runs = runs_of([p[0] for p in pairs], [p[1] for p in pairs])
        assert [(a + i, b + i) for a, b, n in runs for i in range(n)] == pairs
        for (a, b, n), (c, d, _) in itertools.pairwise(runs):
            assert (a + n, b + n) != (c, d)


def units(lane: Lane, local: Any, remote: Any, hit: int, tokens: int) -> list[tuple[int, int]]:
    at, there = pair_units(lane, local, remote, hit, tokens, tokens)
    return list(zip(at.tolist(), there.tolist(), strict=True))


class TestPairing:
    def test_prefix_hits_skip_the_producers_first_blocks_and_its_tail_is_not_read(self) -> None:
        assert units(LANE, [(10, 11)], [(1, 2, 3, 4, 5)], 2, 16) == [(10, 3), (11, 4)]

    def test_pairs_ascend_in_their_blocks(self) -> None:
        assert units(LANE, [(9, 2, 5)], [(1, 7, 3)], 0, 12) == [(9, 1), (5, 3), (2, 7)]

    def test_blocks_beyond_the_tokens_that_are_held_are_left_alone(self) -> None:
        assert units(LANE, [(10, 11)], [(1,)], 0, 3) == [(10, 1)]

    def test_a_group_of_theirs_may_have_another_number(self) -> None:
        assert units(lane(remote_group=1), [(10,)], [(7,), (1,)], 0, 4) == [(10, 1)]

    def test_where_there_is_no_block_nothing_is_filled(self) -> None:
        assert units(LANE, [(NO_BLOCK, 11)], [(1, 2)], 0, 8) == [(11, 2)]

    def test_half_as_long_blocks_of_theirs_fill_halves_of_ours_as_far_as_there_are_any(self) -> None:
        half = lane(ours=Slots(4), theirs=Slots(2), unit=2)
        assert units(half, [(3, 4)], [(9, 8, 7)], 0, 6) == [(8, 7), (7, 8), (6, 9)]

    def test_logical_blocks_are_kernel_blocks_in_a_row(self) -> None:
        kernel = lane(ours=Slots(2, 2), theirs=Slots(4), unit=2)
        assert units(kernel, [(3,)], [(9,)], 0, 4) == [(6, 18), (7, 19)]

    def test_of_a_window_the_producer_sends_its_last_blocks_and_where_we_have_none_nothing_is_missed(self) -> None:
        window = lane(kind="window", window=5)
        # 13 tokens in 4 blocks; the last of them, computed again, looks at tokens 8 to 12
        assert units(window, [(NO_BLOCK, NO_BLOCK, 7, 8)], [(1, 2, 3)], 0, 13) == [(7, 2), (8, 3)]
        assert units(window, [(NO_BLOCK, NO_BLOCK, 7, 8)], [(2, 3)], 0, 13) == [(7, 2), (8, 3)]
        with pytest.raises(RequestError, match="at least 2 blocks, got 1"):
            units(window, [(NO_BLOCK, NO_BLOCK, 7, 8)], [(3,)], 0, 13)

    def test_a_block_of_a_window_that_would_be_filled_in_part_is_refused(self) -> None:
        """13 tokens, of which 8 to 12 are seen: theirs begin at 8, our block with 8 begins at 6, or 0."""
        for ours, local in ((6, (NO_BLOCK, 7, 8)), (16, (7,))):
            window = lane(kind="window", window=5, ours=Slots(ours), unit=2)
            with pytest.raises(RequestError, match="at least 3 blocks, got 2"):
                units(window, [local], [(2, 3)], 0, 13)
            assert units(window, [local], [(0, 1, 2, 3)], 0, 13)

    def test_a_block_of_a_window_that_is_named_again_has_no_other_blocks_tokens(self) -> None:
        """They hold 16 tokens, whose window begins at 8; we want 12, whose window begins in the block before."""
        window = lane(kind="window", window=8)
        named = blocks_held(GroupView("window", (), 8, named=3), (4, 5, 6, 7), 16, 4)
        assert named == (6, 6, 7)
        assert units(window, [(NO_BLOCK, NO_BLOCK, 1, 2)], [named], 0, 16) == [(1, 6), (2, 7)]
        with pytest.raises(RequestError, match="at least 4 blocks, got 3"):
            pair_units(window, ((NO_BLOCK, 1, 2),), (named,), 0, 12, 16)

    def test_of_state_the_one_slot_is_read_whatever_the_tokens(self) -> None:
        state = lane(kind="state", ours=Slots(1), theirs=Slots(1), unit=1)
        assert units(state, [(5,)], [(9,)], 3, 1) == [(5, 9)]
        assert units(state, [(NO_BLOCK, 5)], [(9,)], 0, 1) == [(5, 9)]
        assert units(state, [()], [(9,)], 0, 1) == []
        with pytest.raises(RequestError, match="the slot of the state"):
            units(state, [(5,)], [()], 0, 1)

    @pytest.mark.parametrize("remote", [[], [(1,)]])
    def test_too_few_groups_are_refused(self, remote: Any) -> None:
        with pytest.raises(RequestError, match=f"at least 2 cache groups, got {len(remote)}") as caught:
            units(lane(group=0, remote_group=1), [(1,)], remote, 0, 4)
        assert caught.value.field == FIELD

    @pytest.mark.parametrize(("theirs", "hit"), [((), 0), ((1,), 0), ((1, 2), 1), ((1, 2, 3), 9)])
    def test_too_few_blocks_are_refused(self, theirs: tuple[int, ...], hit: int) -> None:
        with pytest.raises(RequestError, match=f"at least {hit + 2} blocks, got {len(theirs)}") as caught:
            units(lane(group=1, remote_group=1), ((), (5, 6)), ((), theirs), hit, 4 * (hit + 2))
        assert caught.value.field == f"{FIELD}[1]"

    @pytest.mark.parametrize("bad", [100, 101, (1 << 31) - 1])
    def test_ids_beyond_the_peers_pool_are_refused(self, bad: int) -> None:
        with pytest.raises(RequestError, match=f"block ids below the peer's 100, got {bad}") as caught:
            units(LANE, ((5, 6),), ((1, bad),), 0, 8)
        assert caught.value.field == f"{FIELD}[0]"

    def test_ids_beyond_the_pool_in_the_part_nobody_reads_do_no_harm(self) -> None:
        assert units(LANE, [(5,)], [(999, 7, 999)], 1, 8) == [(5, 7)]


class TestRanges:
    def test_a_run_is_one_range_where_both_sides_are_dense_and_one_per_block_elsewhere(self) -> None:
        for stride, remote_stride, n in ((8, 8, 1), (8, 10, 3), (10, 8, 3), (10, 10, 3)):
            local, remote = ranges(
                lane(local_stride=stride, remote_stride=remote_stride), np.arange(3), np.arange(5, 8)
            )
            assert len(local) == len(remote) == n
            assert local[:, 1].sum() == 24

    def test_units_of_one_block_are_one_range_where_they_lie_together(self) -> None:
        half = lane(ours=Slots(4), theirs=Slots(2), unit=2, length=4, local_step=4, remote_step=4, remote_stride=6)
        local, remote = ranges(half, np.arange(2, 6), np.arange(4, 8))
        assert local.tolist() == [[8, 4], [12, 4], [16, 4], [20, 4]]  # theirs have gaps between blocks
        assert remote.tolist() == [[1024, 4], [1030, 4], [1036, 4], [1042, 4]]
        local, _ = ranges(msgspec.structs.replace(half, remote_stride=4), np.arange(2, 6), np.arange(4, 8))
        assert local.tolist() == [[8, 16]]

    def test_pieces_of_a_block_ascend_block_by_block(self) -> None:
        block_first = lane(local_stride=32, remote_stride=32, bases=((0, 0), (16, 16)))
        local, _ = ranges(block_first, np.arange(2), np.arange(2))
        assert local[:, 0].tolist() == [0, 16, 32, 48]

    def test_pieces_of_layers_with_pools_of_their_own_ascend_layer_by_layer(self) -> None:
        layers = lane(bases=((0, 0), (800, 800)))
        local, _ = ranges(layers, np.array([1, 3]), np.array([2, 1]))
        assert local[:, 0].tolist() == [8, 24, 808, 824]

    def test_addresses_near_the_end_of_the_address_space_do_not_wrap(self) -> None:
        base = (1 << 63) - 1 - 8 * 100
        local, remote = ranges(lane(bases=((base, base),)), np.array([99]), np.array([99]))
        assert local[0, 0] == remote[0, 0] == base + 8 * 99

    def test_each_pair_of_memories_is_a_read_of_its_own(self) -> None:
        plan = Plan((LANE, lane(remote=Memory("VRAM", 3)), lane(bases=((800, 0),))))
        got = reads(plan, ((1, 2),), ((3, 4),), (0,), tokens=8, held=8)
        assert [(r.local_mem, r.remote_mem, r.local_device, r.remote_device) for r in got] == [
            ("DRAM", "DRAM", 0, 0),
            ("DRAM", "VRAM", 0, 3),
        ]
        assert [r.nbytes for r in got] == [32, 16]
        assert [r.local[:, 0].tolist() for r in got] == [[8, 808], [8]]

    def test_nothing_to_read_is_no_read(self) -> None:
        plan = Plan((LANE,))
        assert reads(plan, ((),), ((1,),), (1,), tokens=4, held=4) == ()
        assert reads(Plan(()), ((1,),), ((1,),), (0,), tokens=4, held=4) == ()


class TestPermuted:
    def test_every_block_to_fill_is_put_in_order_once_whoever_it_came_from(self) -> None:
        permute = Permute(Region("l", 0, 8, 8, 20, 0), 1, 2, 2, 2)
        one = Plan((lane(ours=Slots(2, 2)),), permutes=(permute,))
        ((what, blocks),) = permuted([one, one], ((3, NO_BLOCK, 5),))
        assert what == permute
        assert blocks.tolist() == [6, 7, 10, 11]
        assert permuted([one], ((),)) == []
