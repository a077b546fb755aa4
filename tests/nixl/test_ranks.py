"""Engines of several ranks: each of ours reads its part of theirs, byte by byte, and tells exactly those who wait.

Over the loopback network, with a handshake channel without sockets, so that every order of events is the test's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest

from kvconn.base import FinishReason, RequestView, StepView
from kvconn.testing import LoopbackNet, ManualClock
from tests.sim.channel import Client, Directory, Server
from tests.support import BLOCK_SIZE, NIXL_CONSUMER, NIXL_PRODUCER, Side

LEASE = 30.0
#: TP of the producer, of the consumer, KV heads; one head is a latent cache
PAIRS = [
    (1, 1, 1), (2, 2, 4), (1, 2, 4), (2, 1, 4), (2, 4, 4), (4, 2, 4), (4, 1, 4), (1, 4, 8),
    (1, 2, 1), (2, 1, 1), (4, 2, 1), (2, 2, 1),
    (4, 2, 2), (2, 4, 2), (4, 1, 2), (1, 4, 2), (4, 4, 2), (8, 2, 4),
]  # fmt: skip


class Fleet:
    """Engines on one network. ``silent``: ranks whose handshake never answers."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.net = LoopbackNet(0, clock=self.clock)
        self.directory: Directory = {}
        self.mute = False
        self.asked: list[tuple[int, int]] = []
        self.silent: set[tuple[int, int]] = set()
        self.sides: list[Side] = []

    def side(self, name: str, transfer: dict[str, Any], **kwargs: Any) -> Side:
        with (
            patch("kvconn.nixl.contacts.HandshakeClient", lambda timeout, **_: _Client(self, timeout)),
            patch("kvconn.nixl.scheduler.HandshakeServer", lambda *a: Server(self.directory, *a[:3])),
        ):
            side = Side(name, transfer, clock=self.clock, make_transport=self.net.transport, **kwargs)
        self.sides.append(side)
        return side

    def pair(self, p_tp: int, d_tp: int, heads: int, **more: Any) -> tuple[Side, Side]:
        p = self.side("P", NIXL_PRODUCER, tp=p_tp, heads=heads)
        return p, self.side("D", NIXL_CONSUMER, tp=d_tp, heads=heads, **more)

    def until(self, done: Callable[[], bool], *sides: Side, rounds: int = 20) -> None:
        """Step these engines (all of them) and let everything arrive, until ``done``."""
        for _ in range(rounds):
            for side in sides or self.sides:
                side.step()
                self.net.run()
            if done():
                return
        raise AssertionError([repr(side.scheduler) for side in self.sides])


class _Client(Client):
    """A client whose peers have ranks that never answer."""

    def __init__(self, fleet: Fleet, timeout: float) -> None:
        super().__init__(fleet, timeout)
        self._fleet = fleet

    def start(self, key: Any, pp: int = 0, tp: int = 0) -> int:
        self._fleet.asked.append((pp, tp))
        number = super().start(key, pp, tp)
        if (pp, tp) in self._fleet.silent:
            self.silence()
        return number


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    made = Fleet()
    yield made
    for side in made.sides:
        side.close()


def half(side: Side, rank: int) -> Any:
    return side.workers[rank].worker  # type: ignore[attr-defined]


def agent(side: Side, rank: int) -> str:
    return str(half(side, rank)._agent.transport.name)


class TestWhole:
    @pytest.mark.parametrize(("p_tp", "d_tp", "heads"), PAIRS)
    @pytest.mark.parametrize("hits", [0, 2])
    def test_every_rank_gets_its_heads_and_every_rank_of_the_producer_hears_from_all_it_waits_for(
        self, fleet: Fleet, p_tp: int, d_tp: int, heads: int, hits: int
    ) -> None:
        p, d = fleet.pair(p_tp, d_tp, heads)
        d.write(list(range(32)), 99)
        params = p.prefill("a", [3, 4, 9, 5], seed=7)
        before = [{name: cache.copy() for name, cache in caches.items()} for caches in d.caches]
        d.load("a-on-d", params, [11, 12, 1, 2], hits=hits)
        fleet.until(lambda: bool(d.received and p.sent))
        assert (d.received, d.failed, p.sent) == (["a-on-d"], [], ["a"])
        assert d.holds([11, 12, 1, 2][hits:], 7, start=hits)
        untouched = [b for b in range(32) if b not in [11, 12, 1, 2][hits:]]
        for rank in d.ranks:
            for name, cache in d.caches[rank].items():
                assert (cache[untouched] == before[rank][name][untouched]).all()
        assert p.stats.values.get("nixl_num_kv_expired_reqs", 0) == 0
        assert p.aggregator.pending() == [] and d.aggregator.pending() == []

    def test_what_is_read_twice_comes_from_known_ranks_without_another_handshake(self, fleet: Fleet) -> None:
        p, d = fleet.pair(4, 2, 4)
        for n in range(2):
            d.load(f"d{n}", p.prefill(f"a{n}", [3, 4], seed=n), [1, 2])
            fleet.until(lambda n=n: len(p.sent) == n + 1)  # type: ignore[misc]
            assert d.holds([1, 2], n)
        assert sorted(fleet.asked) == [(0, 0), (0, 0), (0, 1), (0, 2), (0, 3)]

    @pytest.mark.parametrize(("p_tp", "d_tp", "heads"), PAIRS)
    def test_a_reference_that_nobody_reads_is_told_to_every_rank_and_no_lease_ends(
        self, fleet: Fleet, p_tp: int, d_tp: int, heads: int
    ) -> None:
        p, d = fleet.pair(p_tp, d_tp, heads)
        view = d.load("r", p.prefill("a", [3, 4], seed=1), [1, 2], hits=2)
        d.scheduler.request_finished(view, ((1, 2),), FinishReason.ABORT)
        fleet.until(lambda: bool(p.sent))
        assert d.received == [] and p.stats.values.get("nixl_num_kv_expired_reqs", 0) == 0
        assert not d.scheduler.has_pending_push_work()

    def test_the_producer_waits_for_the_last_of_its_ranks(self, fleet: Fleet) -> None:
        p, d = fleet.pair(2, 2, 4)
        d.load("r", p.prefill("a", [3, 4], seed=1), [1, 2])
        p.step()
        fleet.net.stop(agent(p, 1))
        fleet.until(lambda: [owed.ranks for owed in p.aggregator.pending()] == [(1,)])
        fleet.net.cont(agent(p, 1))
        assert p.sent == [] and d.received == []
        fleet.until(lambda: bool(p.sent and d.received))
        assert d.holds([1, 2], 1)

    @pytest.mark.parametrize(("p_tp", "d_tp", "heads"), PAIRS)
    def test_heartbeats_reach_every_rank_also_those_that_nobody_reads(
        self, fleet: Fleet, p_tp: int, d_tp: int, heads: int
    ) -> None:
        p, d = fleet.pair(p_tp, d_tp, heads)
        params = p.prefill("a", [3, 4], seed=1)
        d.scheduler.on_new_request(RequestView("r", 2 * BLOCK_SIZE, 2 * BLOCK_SIZE, params))
        for _ in range(10):  # two leases
            fleet.until(lambda: True)
            fleet.clock.advance(LEASE / 5)
        assert [owed.ranks for owed in p.aggregator.pending()] == [tuple(p.ranks)]
        fleet.until(lambda: True, p)  # the last heartbeat
        fleet.clock.advance(LEASE)
        fleet.until(lambda: bool(p.sent), p)


class TestFaults:
    def test_a_rank_that_dies_fails_the_load_and_names_itself(self, fleet: Fleet) -> None:
        p, d = fleet.pair(4, 2, 4)
        other = fleet.side("Q", NIXL_PRODUCER, tp=2, heads=4)
        d.load("warm", p.prefill("warm", [1], seed=1), [1])
        fleet.until(lambda: bool(d.received and p.sent))
        d.load("r", p.prefill("a", [3, 4], seed=2), [3, 4])
        d.load("fine", other.prefill("b", [3, 4], seed=3), [5, 6])
        fleet.net.kill(agent(p, 1))
        fleet.until(lambda: {"r", "fine"} <= set(d.received), d, other)
        assert d.failed == ["r"] and "P@" in d.reasons["r"] and "pp 0 tp 1" in d.reasons["r"]
        assert d.holds([5, 6], 3)
        assert all(len(half(d, rank)._contacts._peers) == 1 for rank in d.ranks[:1])  # the dead engine is forgotten

    def test_a_rank_that_never_answers_fails_what_waits_for_its_engine_only(self, fleet: Fleet) -> None:
        p, d = fleet.pair(2, 1, 4)
        other = fleet.side("Q", NIXL_PRODUCER, heads=4)
        d.load("r", p.prefill("a", [3, 4], seed=2), [3, 4])
        d.load("fine", other.prefill("b", [3, 4], seed=3), [5, 6])
        fleet.silent = {(0, 1)}
        fleet.until(lambda: d.received == ["fine"])
        fleet.clock.advance(11.0)
        fleet.until(lambda: "r" in d.received)
        assert d.failed == ["r"] and "pp 0 tp 1" in d.reasons["r"] and d.holds([5, 6], 3)
        assert half(d, 0)._contacts._asked == {}

    def test_a_rank_that_stops_keeps_the_blocks_in_quarantine_until_it_goes_on(self, fleet: Fleet) -> None:
        p, d = fleet.pair(2, 1, 4)
        d.load("warm", p.prefill("warm", [1], seed=1), [1])
        fleet.until(lambda: bool(d.received))
        d.load("r", p.prefill("a", [3, 4], seed=2), [3, 4])
        fleet.net.stop(agent(p, 1))
        fleet.until(lambda: True, d)
        fleet.clock.advance(61.0)
        fleet.until(lambda: True, d)
        assert d.received == ["warm"] and half(d, 0)._reader._reads.quarantined_blocks() == 2
        fleet.net.cont(agent(p, 1))
        fleet.until(lambda: "r" in d.received, d)
        assert d.failed == ["r"]

    @pytest.mark.parametrize("rank", [0, 1])
    def test_a_rank_that_let_go_makes_the_load_stale_whatever_the_others_hold(self, fleet: Fleet, rank: int) -> None:
        p, d = fleet.pair(2, 1, 4)
        params = p.prefill("a", [3, 4], seed=2)
        p.step()
        assert params is not None
        half(p, rank)._fence.zero(params["kvconn"]["slot"])
        d.load("r", params, [3, 4])
        fleet.until(lambda: bool(d.received), d)
        assert d.failed == ["r"] and "fence" in d.reasons["r"]
        assert d.stats.values["stale_reads"] == 1

    def test_a_lease_that_ends_on_one_rank_alone_is_noticed(self, fleet: Fleet) -> None:
        p, d = fleet.pair(2, 2, 4)
        params = p.prefill("a", [3, 4], seed=2)
        p.step()
        fleet.clock.advance(LEASE + 1)
        p.rank_step(1, p.scheduler.build_connector_meta(StepView(99)))
        d.load("r", params, [3, 4])
        fleet.until(lambda: bool(d.received), d)
        assert d.failed == ["r"]

    def test_ranks_of_two_lives_of_an_engine_are_not_taken_for_one_peer(self, fleet: Fleet) -> None:
        p, d = fleet.pair(2, 1, 4)
        params = p.prefill("a", [3, 4], seed=2)
        again = fleet.side("P", NIXL_PRODUCER, tp=2, heads=4)
        places = list(fleet.directory)
        fleet.directory[places[0]][0, 1] = fleet.directory[places[-1]][0, 1]
        d.load("r", params, [3, 4])
        fleet.until(lambda: bool(d.received), p, d)
        assert d.failed == ["r"] and "another seal key" in d.reasons["r"]
        assert again.sent == []


class TestForged:
    @pytest.mark.parametrize(("field", "value"), [("tp_size", 1), ("tp_size", 64), ("pp_size", 2), ("dcp_size", 2)])
    def test_a_size_that_is_not_the_peers_costs_that_request_and_asks_nobody_else(
        self, fleet: Fleet, field: str, value: int
    ) -> None:
        p, d = fleet.pair(2, 2, 4)
        params = p.prefill("a", [3, 4], seed=2)
        assert params is not None
        d.load("forged", {**params, field: value}, [1, 2])
        fleet.until(lambda: bool(d.received), d)
        assert set(fleet.asked) == {(0, 0)}
        assert d.failed == ["forged"]
        assert f"kv_transfer_params.{field}: expected " in d.reasons["forged"] and f"got {value}" in d.reasons["forged"]
        d.load("good", params, [3, 4])
        fleet.until(lambda: "good" in d.received)
        assert d.failed == ["forged"] and d.holds([3, 4], 2)
