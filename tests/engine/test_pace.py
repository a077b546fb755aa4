"""The pause between steps without tokens: short after something happened, a share of the silence later, bounded."""

from __future__ import annotations

import pytest

from kvconn.engine.pace import LONGEST, SHORTEST, Pace


def test_after_a_step_that_computed_or_ended_something_there_is_none() -> None:
    pace = Pace(0.0)
    assert pace.pause(True, False, 5.0) == 0.0
    assert pace.pause(False, False, 5.001) == SHORTEST, "and the silence begins anew"


@pytest.mark.parametrize(("silence", "pause"), [(0.01, SHORTEST), (0.5, 0.01), (60.0, LONGEST)])
def test_what_takes_long_is_looked_at_less_often(silence: float, pause: float) -> None:
    assert Pace(100.0).pause(False, False, 100.0 + silence) == pytest.approx(pause)


def test_who_waits_for_blocks_has_them_soon() -> None:
    assert Pace(0.0).pause(False, True, 60.0) == SHORTEST


def test_an_order_ends_the_silence() -> None:
    pace = Pace(0.0)
    pace.moved(60.0)
    assert pace.pause(False, False, 60.01) == SHORTEST
