"""Pieces of two blocks: as long as both layouts allow, and where a block can take bytes as they come."""

from __future__ import annotations

import msgspec
import pytest

from kvconn.base import Cells
from kvconn.geometry import Region
from kvconn.nixl.strips import Strip, cut, halves, joined, landing, layout_name, plain, unit_of

#: 4 heads, 8 tokens, 2 bytes
HEADS = Cells(4, 8, 2, 16, 2)
TOKENS = Cells(4, 8, 2, 2, 8)


class TestCells:
    def test_plain_cells_fill_a_block_in_either_order(self) -> None:
        assert plain(64, 4, 8) == HEADS
        assert plain(64, 4, 8, tokens_first=True) == TOKENS
        assert plain(63, 4, 8) is None
        assert plain(16, 4, 8) is None

    def test_a_row_of_k_and_v_is_two_cells_and_back(self) -> None:
        two = halves(HEADS)
        assert two == Cells(4, 8, 1, 16, 2, 2, 1)
        assert joined(two) == HEADS
        assert joined(HEADS) == HEADS
        apart = Cells(4, 8, 2, 16, 2, 2, 64)
        assert joined(apart) == apart

    @pytest.mark.parametrize(
        "cells", [Cells(4, 8, 1, 8, 1), Cells(4, 8, 2, 16, 2, 2, 64), Cells(4, 8, 2, 16, 2, part=1)]
    )
    def test_odd_cells_and_those_that_are_told_apart_already_have_no_halves(self, cells: Cells) -> None:
        assert halves(cells) is None

    @pytest.mark.parametrize(
        ("cells", "name"),
        [
            ([None, None], "LBHNC"),
            ([HEADS, None], "LBHNC"),
            ([halves(HEADS)], "LBHNC"),
            ([TOKENS, TOKENS], "LBNHC"),
            ([HEADS, TOKENS], "kvconn"),
            ([Cells(4, 8, 1, 8, 1, 2, 32)], "kvconn"),
        ],
    )
    def test_a_peer_that_reads_no_cells_is_told_a_layout_or_one_that_it_refuses(
        self, cells: list[Cells | None], name: str
    ) -> None:
        assert layout_name(Region("l", 0, 64, 64, 4, 0, cells=one) for one in cells) == name


class TestUnits:
    @pytest.mark.parametrize(
        ("ours", "theirs", "unit"),
        [
            ((16, 1, 1), (16, 1, 1), 16),
            ((16, 1, 1), (32, 1, 1), 16),
            ((24, 1, 1), (16, 1, 1), 8),
            ((16, 4, 1), (16, 4, 1), 16),  # the same turns on both sides cut nothing
            ((16, 4, 4), (32, 4, 4), 16),
            ((16, 1, 1), (16, 4, 4), 4),
            ((16, 1, 1), (16, 4, 1), 1),
            ((16, 2, 4), (16, 4, 16), 4),
            ((16, 1, 8), (16, 2, 16), 16),  # without DCP there are no turns
        ],
    )
    def test_no_block_and_no_turn_of_either_side_cuts_a_unit(
        self, ours: tuple[int, int, int], theirs: tuple[int, int, int], unit: int
    ) -> None:
        assert unit_of(ours, theirs) == unit == unit_of(theirs, ours)


class TestCut:
    @pytest.mark.parametrize("cells", [HEADS, TOKENS])
    def test_equal_blocks_are_one_piece(self, cells: Cells) -> None:
        assert cut(1, 4, 8, cells, cells) == Strip(8, 64, 8 * cells.token_stride, 8 * cells.token_stride, ((0, 0),))

    def test_some_heads_are_one_piece_where_heads_come_first(self) -> None:
        assert cut(1, 2, 8, HEADS, msgspec.structs.replace(HEADS, heads=2)).length == 32

    def test_some_heads_are_a_piece_per_token_where_tokens_come_first(self) -> None:
        assert cut(1, 2, 8, TOKENS, Cells(2, 8, 2, 2, 4)) == Strip(1, 4, 8, 4, ((0, 0),))

    def test_half_a_block_is_a_piece_per_head(self) -> None:
        got = cut(1, 4, 4, HEADS, Cells(4, 4, 2, 8, 2))
        assert got == Strip(4, 8, 8, 8, ((0, 0), (16, 8), (32, 16), (48, 24)))

    def test_half_a_block_of_tokens_first_is_one_piece(self) -> None:
        assert cut(1, 4, 4, TOKENS, Cells(4, 4, 2, 2, 8)).offsets == ((0, 0),)


class TestLanding:
    def test_heads_first_lands_in_tokens_first_and_some_heads_beside_the_others(self) -> None:
        assert landing(64, 2, 2, TOKENS, Cells(2, 8, 2, 16, 2)) == (HEADS, 32, (1, 4, 8, 2))

    def test_tokens_first_lands_in_heads_first_a_group_of_heads_after_the_other(self) -> None:
        got = landing(64, 2, 2, HEADS, Cells(2, 8, 2, 2, 4))
        assert got == (Cells(4, 8, 2, 2, 4), 32, (2, 8, 2, 2))

    def test_halves_of_a_block_are_put_in_order_one_by_one(self) -> None:
        mine = Cells(4, 8, 2, 2, 8, 2, 64)
        got = landing(128, 0, 4, mine, Cells(4, 8, 2, 16, 2, 2, 64))
        assert got is not None
        assert got[2] == (2, 4, 8, 2)

    @pytest.mark.parametrize(
        ("length", "mine", "theirs"),
        [
            (72, TOKENS, HEADS),  # a block with room behind
            (64, msgspec.structs.replace(TOKENS, size=1), msgspec.structs.replace(HEADS, size=1)),  # between cells
            (128, Cells(4, 8, 2, 4, 16, 2, 2), Cells(4, 8, 2, 16, 2, 2, 64)),  # parts between tokens
            (64, TOKENS, msgspec.structs.replace(HEADS, size=1)),
            (64, HEADS, HEADS),
        ],
    )
    def test_nothing_lands_where_a_block_is_not_full_or_nothing_is_won(
        self, length: int, mine: Cells, theirs: Cells
    ) -> None:
        assert landing(length, 0, 4, mine, theirs) is None

    def test_nor_where_some_heads_of_every_token_are_torn_apart_anyway(self) -> None:
        assert landing(32, 0, 2, Cells(2, 8, 2, 16, 2), TOKENS) is None
