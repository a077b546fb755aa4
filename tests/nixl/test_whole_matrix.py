"""Every pair of docs/compatibility.md through the real halves: what is planned is read, proved, told and forgotten.

Over the loopback network and over NIXL, a real agent per rank. Bytes are judged as in test_token_positions.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvconn.base import FinishReason
from kvconn.testing import LoopbackNet, ManualClock
from kvconn.transport.base import Transport
from tests.nixl.geometries import Engine, other
from tests.nixl.test_matrix import PAIRS, loads
from tests.nixl.test_token_positions import D_FILL, P_FILL, Load, check, pairs
from tests.nixl.test_token_positions import loads as drawn_loads
from tests.nixl.whole import Whole
from tests.sim.channel import Directory, simulated
from tests.support import NIXL_CONSUMER, NIXL_PRODUCER, wait_until

LEASE = 30.0


class Wires:
    """What a pair is connected by. ``move``: everybody steps and what is under way arrives."""

    def __init__(self, simulated: bool) -> None:
        self._stack = ExitStack()
        self.sides: list[Whole] = []
        if simulated:
            self._now = ManualClock()
            self.net: LoopbackNet | None = LoopbackNet(5, clock=self._now, cuts=2)
            self.directory: Directory = {}
            self.mute = False
        else:
            self.net = None
            self._ahead = 0.0

    def clock(self) -> float:
        return self._now() if self.net is not None else time.perf_counter() + self._ahead

    def pass_lease(self) -> None:
        if self.net is not None:
            self._now.advance(LEASE + 10)
        else:
            self._ahead += LEASE + 10

    def side(self, name: str, engine: Engine, transfer: dict[str, Any], fill: int) -> Whole:
        make: Callable[[], Transport] = _nixl if self.net is None else self.net.transport
        with nullcontext() if self.net is None else simulated(self):
            side = Whole(name, engine, transfer, fill, self.clock, make)
        self.sides.append(side)
        return side

    def move(self, *sides: Whole) -> None:
        for side in sides or self.sides:
            if self.net is not None:
                self.net.run()
            side.step()

    def until(self, condition: Callable[[], bool], *sides: Whole) -> None:
        def moved() -> bool:
            self.move(*sides)
            return condition()

        wait_until(moved, 20.0, repr([(side.scheduler, side.workers) for side in self.sides]))

    def close(self) -> None:
        for side in reversed(self.sides):
            side.close()


def _nixl() -> Transport:
    from kvconn.transport.nixl import NixlTransport

    return NixlTransport()


@pytest.fixture
def wires() -> Iterator[Callable[[bool], Wires]]:
    made: list[Wires] = []

    def make(simulated: bool) -> Wires:
        made.append(Wires(simulated))
        return made[-1]

    yield make
    for one in made:
        one.close()


def moves(p: Whole, d: Whole, wires: Wires, number: int, load: Load) -> None:
    """One request from P to D, and everything that must be so of it."""
    for memory in d.memory:
        memory.bytes[:] = D_FILL
        memory.written[:] = 0
    for side in (p, d):
        for noted in side.noted:
            if noted is not None:
                noted.asked.clear()
                noted.told.clear()
    p_id, d_id = f"p{number}", f"d{number}"
    view = d.begin(d_id, load, p.prefilled(p_id, load))
    loaded = load.tokens > max(load.hits) * d.engine.span
    wires.until(lambda: p_id in p.sent and (d_id in d.received or not loaded))
    assert (d.failed, p.stats.values.get("nixl_num_kv_expired_reqs", 0)) == ([], 0)
    fences, read = p.fences, set[str]()
    for rank, memory in enumerate(d.memory):
        if loaded:
            check(memory, load.table(d.engine, "D"), load)
        read |= d.check_fences(rank, fences)
    assert bool(read) is loaded
    told = [p.done_words(rank) for rank in p.ranks]
    for rank, words in zip(p.ranks, told, strict=True):
        assert bool(words) is (p.noted[rank] is not None), "replicas are told nothing, everybody else is"
        assert len({sender for sender, _ in words}) == len(words)
        assert {n for _, n in words} <= {len(words)}, "as many as each of them says"
    tables = tuple(map(tuple, load.table(d.engine, "D")))
    assert d.scheduler.request_finished(view, tables, FinishReason.STOP) == (False, None)


def ends(wires: Wires) -> None:
    wires.pass_lease()
    for _ in range(3):
        wires.move()
    for side in wires.sides:
        side.check_empty()


@pytest.mark.parametrize(("p", "d"), PAIRS)
def test_every_pair_through_the_halves(wires: Callable[[bool], Wires], p: Engine, d: Engine) -> None:
    pair = wires(True)
    producer, consumer = pair.side("P", p, NIXL_PRODUCER, P_FILL), pair.side("D", d, NIXL_CONSUMER, D_FILL)
    for number, load in enumerate(loads(d)):
        moves(producer, consumer, pair, number, load)
    ends(pair)


@pytest.mark.parametrize(("p", "d"), PAIRS)
def test_every_pair_through_the_halves_over_nixl(wires: Callable[[bool], Wires], p: Engine, d: Engine) -> None:
    pair = wires(False)
    producer, consumer = pair.side("P", p, NIXL_PRODUCER, P_FILL), pair.side("D", d, NIXL_CONSUMER, D_FILL)
    for number, load in enumerate(list(loads(d))[1::2]):
        moves(producer, consumer, pair, number, load)
    ends(pair)


@pytest.mark.parametrize(("p", "d"), PAIRS)
def test_whichever_rank_that_is_read_let_go_the_load_is_refused(
    wires: Callable[[bool], Wires], p: Engine, d: Engine
) -> None:
    """A word of one rank alone is down when D has read. Ranks that are only told need not hold."""
    pair = wires(True)
    producer, consumer = pair.side("P", p, NIXL_PRODUCER, P_FILL), pair.side("D", d, NIXL_CONSUMER, D_FILL)
    load = next(iter(loads(d)))
    moves(producer, consumer, pair, 99, load)
    fences, names = producer.fences, [noted.name if noted is not None else "" for noted in producer.noted]
    read = {peer for rank in consumer.ranks for peer in consumer.check_fences(rank, fences)}
    for rank in producer.ranks:
        if not names[rank]:
            continue
        params = producer.prefilled(f"p{rank}", load)
        producer.step()
        producer.workers[rank].worker._fence.zero(params["kvconn"]["slot"])  # type: ignore[attr-defined]
        before = len(consumer.failed)
        consumer.begin(f"d{rank}", load, params)
        pair.until(lambda rank=rank: f"d{rank}" in consumer.received and f"p{rank}" in producer.sent)  # type: ignore[misc]
        assert (len(consumer.failed) > before) is (names[rank] in read)


@settings(derandomize=True, database=None, deadline=None, max_examples=60)
@given(data=st.data())
def test_any_pair_through_the_halves(data: st.DataObject) -> None:
    """Odd blocks, windows longer than the prompt, hits at every boundary and of every group, nothing left to read."""
    p, d = (other(engine, mem_type="DRAM") for engine in data.draw(pairs()))
    pair = Wires(True)
    try:
        producer, consumer = pair.side("P", p, NIXL_PRODUCER, P_FILL), pair.side("D", d, NIXL_CONSUMER, D_FILL)
        for number in range(2):
            load = data.draw(drawn_loads(d))
            moves(producer, consumer, pair, number, load)
        ends(pair)
    finally:
        pair.close()
