"""A poll looks on for an end that is near, where its engine would only sleep: loads end in the step that began them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kvconn.base import StepRequest
from kvconn.nixl.reader import NEAR, SPIN
from tests.nixl.pairs import Net
from tests.support import Side

#: seconds; what is tested ends at a number of looks
PATIENCE = 60.0


@pytest.fixture
def net() -> Iterator[Net]:
    one = Net()
    yield one
    one.close()


def reader(side: Side) -> Any:
    half: Any = side.workers[0]
    return half.worker._reader


class Looks:
    """Lets the network of ``net`` move at every third look of ``side``'s worker, as time does elsewhere."""

    def __init__(self, net: Net, side: Side, patience: float = PATIENCE) -> None:
        half: Any = side.workers[0]
        self.count, self.transport = 0, half.worker._agent.transport
        self.transport.patience = patience
        self._net, self._drain, reader(side).drain = net, reader(side).drain, self._look

    def _look(self, now: float) -> None:
        self.count += 1
        if self.count % 3 == 0:
            self._net.net.run()
        self._drain(now)


def _held(net: Net) -> tuple[Side, Any]:
    p = net.producer()
    params = p.prefill("a", [1, 2], seed=1)
    p.step()
    return p, params


def test_a_load_ends_in_the_step_that_began_it_handshake_included(net: Net) -> None:
    _, params = _held(net)
    d = net.consumer()
    looks = Looks(net, d)
    net.load(d, "a", params, [3, 4])
    d.step()
    assert d.received == ["a"] and d.holds([3, 4], seed=1)
    assert looks.count > 3
    net.run(lambda: True)
    net.sound()


def test_without_patience_it_looks_once_a_step(net: Net) -> None:
    _, params = _held(net)
    d = net.consumer()
    looks = Looks(net, d, patience=0.0)
    net.load(d, "a", params, [3, 4])
    d.step()
    assert (d.received, looks.count) == ([], 1)
    net.run(lambda: d.received == ["a"])
    net.sound()


def test_a_step_with_tokens_is_kept_for_no_longer_than_a_fence_word_takes(net: Net) -> None:
    _, params = _held(net)
    d = net.consumer()
    looks = Looks(net, d, patience=0.0)
    net.load(d, "a", params, [3, 4])
    d.step(requests=(StepRequest("other", 0, 16, ()),))
    looks.transport.patience = PATIENCE
    half: Any = d.workers[0]
    assert half.worker.rests is False
    assert reader(d).patience(net.clock(), rests=False) == 0.0, "nothing was posted since the last poll"
    reader(d)._fresh = True
    assert reader(d).patience(net.clock(), rests=False) == SPIN
    looks.transport.patience = 0.0
    net.run(lambda: d.received == ["a"])
    net.sound()


def test_what_does_not_move_is_not_waited_for(net: Net) -> None:
    _, params = _held(net)
    d = net.consumer()
    looks = Looks(net, d, patience=0.0)
    net.mute = True
    net.load(d, "a", params, [3, 4])
    d.step()
    looks.transport.patience = PATIENCE
    assert reader(d).patience(net.clock(), rests=True) == PATIENCE
    net.clock.advance(NEAR)
    assert reader(d).patience(net.clock(), rests=True) == 0.0
    looks.count = 0
    d.step()
    assert looks.count == 1
    looks.transport.patience = 0.0
    net.mute = False
    net.run(lambda: d.received == ["a"])
    net.sound()
