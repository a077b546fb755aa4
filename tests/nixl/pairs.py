"""Sides on one simulated network: every event is the test's to order, every clock its to move.

``Net`` makes them; :meth:`Net.sound` is how every fault must end: all lives over, every table of every side empty.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvconn.base import FinishReason, RequestView
from kvconn.testing import LoopbackNet, ManualClock
from tests.sim.channel import Directory, simulated
from tests.sim.tables import left_over
from tests.support import NIXL_CONSUMER, NIXL_PRODUCER, Side

LEASE = 30.0


class Net:
    """A network, a directory in the place of side channels, one clock unless a side is given another."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.net = LoopbackNet(3, clock=self.clock, cuts=2)
        self.directory: Directory = {}
        self.mute = False
        self.sides: list[Side] = []
        #: requests on consumers that have not ended
        self.loaded: dict[str, tuple[Side, RequestView, list[int]]] = {}

    def side(self, name: str, transfer: dict[str, Any], **kwargs: Any) -> Side:
        kwargs = {"clock": self.clock, "make_transport": self.net.transport} | kwargs
        with simulated(self):
            side = Side(name, transfer, **kwargs)
        self.sides.append(side)
        return side

    def producer(self, name: str = "P", **kwargs: Any) -> Side:
        return self.side(name, NIXL_PRODUCER, **kwargs)

    def consumer(self, name: str = "D", **kwargs: Any) -> Side:
        return self.side(name, NIXL_CONSUMER, **kwargs)

    def load(self, d: Side, id: str, params: Any, blocks: list[int]) -> None:
        self.loaded[id] = d, d.load(id, params, blocks), blocks

    def end(self, id: str, reason: FinishReason = FinishReason.STOP) -> None:
        """A request of a consumer ends; a consumer delays nothing."""
        d, view, blocks = self.loaded.pop(id)
        assert d.scheduler.request_finished(view, (tuple(blocks),), reason) == (False, None)

    def run(self, until: Callable[[], bool], steps: int = 60) -> None:
        """Everything arrives and everybody steps until that is so. AssertionError after ``steps``."""
        for _ in range(steps):
            if until():
                return
            self.net.run()
            for side in self.sides:
                side.step()
            self.clock.advance(0.01)
        raise AssertionError(f"not after {steps} steps: {[side.workers for side in self.sides]}")

    def sound(self) -> None:
        """A lease later nothing is owed by or to anybody, nothing is on its way, every table is empty."""
        for loaded in list(self.loaded):
            self.end(loaded)
        for clock in {id(half._clock): half._clock for side in self.sides for half in halves(side)}.values():
            clock.advance(LEASE + 10)  # what came after its life is forgotten a lease later
        for _ in range(3):
            self.net.run()
            for side in self.sides:
                side.step()
        assert self.net.under_way() == []
        for side in self.sides:
            assert side.aggregator.pending() == [], side.name
            for half in halves(side):
                assert half.explain(self.clock()) == []
                assert left_over(half) == [], left_over(half)

    def close(self) -> None:
        for side in self.sides:
            side.close()


def halves(side: Side) -> list[Any]:
    return [side.scheduler, *side.workers]
