"""Which blocks of a group are held and filled."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from kvconn.base import NO_BLOCK, GroupView
from kvconn.errors import RequestError
from kvconn.nixl.blocks import blocks_held, blocks_to_fill, check_state

FULL, WINDOW, STATE = GroupView("full", ()), GroupView("window", (), 20), GroupView("state", ())
IDS = (3, 9, 4, 5)


@pytest.mark.parametrize(
    ("group", "tokens", "held"),
    [
        (FULL, 64, IDS),
        (FULL, 33, (3, 9, 4)),
        (WINDOW, 64, (4, 5)),  # tokens 44 to 63
        (WINDOW, 52, (4, 5)),  # 32 to 51
        (WINDOW, 51, (9, 4, 5)),  # 31 to 50
        (WINDOW, 20, (3, 9)),
        (STATE, 64, (5,)),
    ],
)
def test_what_a_reader_needs_is_held(group: GroupView, tokens: int, held: tuple[int, ...]) -> None:
    assert blocks_held(group, IDS, tokens, 16) == held


@pytest.mark.parametrize(
    ("group", "hit", "tokens", "filled"),
    [
        (FULL, 0, 64, IDS),
        (FULL, 1, 33, (9, 4)),
        (WINDOW, 0, 64, (NO_BLOCK, NO_BLOCK, 4, 5)),
        (WINDOW, 1, 64, (NO_BLOCK, 4, 5)),
        (WINDOW, 3, 64, (5,)),
        (STATE, 2, 64, (5,)),
    ],
)
def test_what_is_not_here_yet_is_filled(group: GroupView, hit: int, tokens: int, filled: tuple[int, ...]) -> None:
    assert blocks_to_fill(group, IDS, hit, tokens, 16) == filled


@pytest.mark.parametrize(("held", "prompt", "fine"), [(63, 64, True), (1, 64, True), (64, 64, False), (70, 64, False)])
def test_a_state_is_read_where_a_token_is_left_to_compute_and_nowhere_else(held: int, prompt: int, fine: bool) -> None:
    check_state((FULL, WINDOW), held, prompt)
    with nullcontext() if fine else pytest.raises(RequestError, match=f"remote_num_tokens: expected below .* {prompt}"):
        check_state((FULL, STATE), held, prompt)
