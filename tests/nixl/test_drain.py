"""The connector's share of a drain: nothing new is held, what was there before is held and read as ever."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support import COMPOSITIONS, NIXL_CONSUMER, Side, wait_until


@pytest.mark.parametrize("composition", COMPOSITIONS)
def test_who_arrives_after_the_drain_began_is_not_held_and_who_was_there_is_read(composition: str) -> None:
    p, d = Side("P", COMPOSITIONS[composition], pcp=2), Side("D", NIXL_CONSUMER)
    try:
        params: Any = p.prefill("before", [1, 2], 1)
        p.scheduler.drain()
        p.scheduler.drain()
        assert p.prefill("after", [3, 4], 2) is None
        d.load("before", params, [5, 6])
        wait_until(lambda: p.step() is not None and d.step() is not None and "before" in p.sent)
        assert (d.received, d.failed) == (["before"], []) and d.holds([5, 6], 1)
        wait_until(lambda: p.step() is not None and not p.aggregator.pending() and not p.scheduler.explain(0.0))
    finally:
        d.close()
        p.close()
