"""Engines of several ranks: each of ours reads its part of theirs, byte by byte, and tells exactly those who wait.

Over the loopback network, with a handshake channel without sockets, so that every order of events is the test's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import msgspec
import pytest

from kvconn.base import FinishReason, GroupView, RequestView, StepView
from kvconn.config import ParallelConfig
from kvconn.nixl.wire import HandshakePayload
from kvconn.testing import LoopbackNet, ManualClock
from tests.sim.channel import Client, Directory, simulated
from tests.support import BLOCK_SIZE, LAYERS, NIXL_CONSUMER, NIXL_PRODUCER, Side

LEASE = 30.0
#: TP of the producer, of the consumer, KV heads; one head is a latent cache
PAIRS = [
    (1, 1, 1), (2, 2, 4), (1, 2, 4), (2, 1, 4), (2, 4, 4), (4, 2, 4), (4, 1, 4), (1, 4, 8),
    (1, 2, 1), (2, 1, 1), (4, 2, 1), (2, 2, 1),
    (4, 2, 2), (2, 4, 2), (4, 1, 2), (1, 4, 2), (4, 4, 2), (8, 2, 4),
]  # fmt: skip


class Shape(NamedTuple):
    """A pair of engines. Blocks in tokens on one rank."""

    p: ParallelConfig
    d: ParallelConfig
    heads: int = 1
    p_block: int = BLOCK_SIZE
    d_block: int = BLOCK_SIZE
    groups: tuple[GroupView, ...] = (GroupView("full", LAYERS),)
    p_tokens_first: bool = False
    d_tokens_first: bool = False


ONE = ParallelConfig()
PCP = ParallelConfig(pcp=2, dcp=2)
WINDOW = (GroupView("full", LAYERS[:1]), GroupView("window", LAYERS[1:], 20))
SHAPES = {
    "pp 2 to 1": Shape(ParallelConfig(pp=2), ONE, 4),
    "pp 1 to 2": Shape(ONE, ParallelConfig(pp=2), 4),
    "pp 2 to 2": Shape(ParallelConfig(pp=2), ParallelConfig(pp=2)),
    "pp 2 tp 2 to tp 4": Shape(ParallelConfig(pp=2, tp=2), ParallelConfig(tp=4), 4),
    "pcp 2 dcp 2 to 1": Shape(PCP, ONE),
    "pcp 2 dcp 2 to tp 2": Shape(PCP, ParallelConfig(tp=2)),
    "pcp 2 dcp 2 to the same": Shape(PCP, PCP),
    "replicated pcp 2 tp 2 to tp 2": Shape(ParallelConfig(pcp=2, tp=2), ParallelConfig(tp=2), 4),
    "dcp 1 to 2": Shape(ONE, ParallelConfig(tp=2, dcp=2)),
    "dcp 2 to 1": Shape(ParallelConfig(tp=2, dcp=2), ONE),
    "dcp 2 to 4": Shape(ParallelConfig(tp=2, dcp=2), ParallelConfig(tp=4, dcp=4)),
    "tp 4 dcp 2 to tp 2": Shape(ParallelConfig(tp=4, dcp=2), ParallelConfig(tp=2)),
    "dcp 2 in turns of 8 to 1": Shape(ParallelConfig(tp=2, dcp=2, dcp_interleave=8), ONE),
    "blocks 16 to 32": Shape(ONE, ONE, 4, 16, 32),
    "blocks 32 to 16": Shape(ONE, ONE, 4, 32, 16),
    "blocks 16 to 32, tp 2 to 1": Shape(ParallelConfig(tp=2), ONE, 4, 16, 32),
    "blocks 32 to 16, pp 2 to tp 2": Shape(ParallelConfig(pp=2), ParallelConfig(tp=2), 2, 32, 16),
    "a window": Shape(ONE, ONE, 4, groups=WINDOW),
    "a window, tp 2 to 1, blocks 32 to 16": Shape(ParallelConfig(tp=2), ONE, 4, 32, 16, WINDOW),
    "a window, pp 2 to 1, blocks 32 to 16": Shape(ParallelConfig(pp=2), ONE, 4, 32, 16, WINDOW),
    "tokens first to heads first": Shape(ONE, ONE, 4, p_tokens_first=True),
    "heads first to tokens first": Shape(ONE, ONE, 4, d_tokens_first=True),
    "tokens first to heads first, tp 1 to 2": Shape(ONE, ParallelConfig(tp=2), 4, p_tokens_first=True),
    "heads first to tokens first, tp 2 to 1": Shape(ParallelConfig(tp=2), ONE, 4, d_tokens_first=True),
}


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
        with simulated(self, _Client):
            side = Side(name, transfer, clock=self.clock, make_transport=self.net.transport, **kwargs)
        self.sides.append(side)
        return side

    def pair(self, p_tp: int, d_tp: int, heads: int, **more: Any) -> tuple[Side, Side]:
        return self.engines(Shape(ParallelConfig(tp=p_tp), ParallelConfig(tp=d_tp), heads), **more)

    def engines(self, shape: Shape, **more: Any) -> tuple[Side, Side]:
        both: dict[str, Any] = {"heads": shape.heads, "groups": shape.groups} | more
        p = self.side(
            "P", NIXL_PRODUCER, parallel=shape.p, block_size=shape.p_block, tokens_first=shape.p_tokens_first, **both
        )
        d = self.side(
            "D", NIXL_CONSUMER, parallel=shape.d, block_size=shape.d_block, tokens_first=shape.d_tokens_first, **both
        )
        return p, d

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

    @pytest.mark.parametrize("name", SHAPES)
    @pytest.mark.parametrize("hit", [False, True])
    def test_every_shape_gets_its_tokens_of_its_layers_and_heads(self, fleet: Fleet, name: str, hit: bool) -> None:
        p, d = fleet.engines(SHAPES[name])
        n = 75  # no multiple of any block
        theirs, ours = [3, 9, 4, 5, 8][: -(-n // p.block_tokens)], [11, 2, 1, 12, 7][: -(-n // d.block_tokens)]
        hits = 1 if hit and len(ours) > 1 else 0
        d.write(list(range(32)), 99)
        before = [{name: cache.copy() for name, cache in caches.items()} for caches in d.caches]
        d.load("r", p.prefill("a", theirs, seed=7, n_tokens=n), ours, hits=hits, n_tokens=n)
        fleet.until(lambda: bool(d.received and p.sent))
        assert (d.failed, p.sent, p.aggregator.pending()) == ([], ["a"], [])
        assert d.holds(ours[hits:], 7, start=hits, n_tokens=n)
        others = [block for block in range(32) if block not in ours[hits:]]
        for rank in d.ranks:
            for layer, cache in d.caches[rank].items():
                assert (cache[others] == before[rank][layer][others]).all()
        assert p.stats.values.get("nixl_num_kv_expired_reqs", 0) == 0

    @pytest.mark.parametrize("name", SHAPES)
    def test_every_shape_tells_all_ranks_of_what_nobody_reads(self, fleet: Fleet, name: str) -> None:
        p, d = fleet.engines(SHAPES[name])
        view = RequestView("r", 16, 16, p.prefill("a", [3], seed=1))
        d.scheduler.on_new_request(view)
        d.scheduler.request_finished(view, ((),) * len(d.kv_cache.groups), FinishReason.ABORT)
        fleet.until(lambda: bool(p.sent))
        assert p.stats.values.get("nixl_num_kv_expired_reqs", 0) == 0

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

    def test_a_rank_waits_for_the_last_of_its_readers(self, fleet: Fleet) -> None:
        p, d = fleet.pair(1, 2, 4)
        d.load("r", p.prefill("a", [3, 4], seed=1), [1, 2])
        fleet.net.stop(agent(d, 1))
        for _ in range(5):
            fleet.until(lambda: True)
        assert [owed.ranks for owed in d.aggregator.pending()] == [(1,)] and p.sent == []
        fleet.net.cont(agent(d, 1))
        fleet.until(lambda: bool(p.sent and d.received))
        assert d.failed == [] and d.holds([1, 2], 1)

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
        other = fleet.side("Q", NIXL_PRODUCER, parallel=ParallelConfig(tp=2), heads=4)
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

    def test_several_ranks_that_never_answer_are_one_failure(self, fleet: Fleet) -> None:
        p, d = fleet.pair(4, 1, 4)
        fleet.silent = {(0, 1), (0, 2)}
        d.load("r", p.prefill("a", [3, 4], seed=2), [3, 4])
        fleet.until(lambda: len(fleet.asked) == 4, d)
        fleet.clock.advance(11.0)
        fleet.until(lambda: d.received == ["r"], d)
        fleet.silent = set()
        fleet.clock.advance(1.1)  # the first backoff
        d.load("again", p.prefill("b", [5, 6], seed=3), [5, 6])
        fleet.until(lambda: "again" in d.received)
        assert d.failed == ["r"] and d.holds([5, 6], 3)

    def test_a_rank_that_stops_keeps_the_blocks_in_quarantine_until_it_goes_on(self, fleet: Fleet) -> None:
        p, d = fleet.pair(2, 1, 4)
        d.load("warm", p.prefill("warm", [1], seed=1), [1])
        fleet.until(lambda: bool(d.received))
        d.load("r", p.prefill("a", [3, 4], seed=2), [3, 4])
        fleet.net.stop(agent(p, 1))
        fleet.until(lambda: True, d)
        fleet.clock.advance(61.0)
        fleet.until(lambda: half(d, 0)._reader._reads.quarantined_blocks() == 2, d)
        assert d.received == ["warm"]
        fleet.net.cont(agent(p, 1))
        fleet.until(lambda: "r" in d.received, d)
        assert d.failed == ["r"]

    def test_an_engine_with_a_lost_rank_is_greeted_anew_as_soon_as_its_last_read_ends(self, fleet: Fleet) -> None:
        p, d = fleet.pair(2, 1, 4)
        d.load("warm", p.prefill("warm", [1], seed=1), [1])
        fleet.until(lambda: bool(d.received))
        d.load("r", p.prefill("a", [3, 4], seed=2), [3, 4])
        contacts = half(d, 0)._contacts
        d.workers[0].bind_connector_metadata(d.scheduler.build_connector_meta(StepView(99)))
        d.workers[0].start_load_kv()
        contacts.drop((agent(p, 0),), "its connection failed")
        assert len(contacts._peers) == 1  # reads of both ranks are under way
        fleet.until(lambda: "r" in d.received)
        assert len(contacts._peers) == 0 and d.failed == []
        d.load("next", p.prefill("b", [5, 6], seed=3), [5, 6])
        fleet.until(lambda: "next" in d.received)
        assert d.failed == [] and d.holds([5, 6], 3)

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
        again = fleet.side("P", NIXL_PRODUCER, parallel=ParallelConfig(tp=2), heads=4)
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


class TestStock:
    """A peer that says nothing of its sizes: the reference's are believed, as far as its first rank agrees."""

    def stock(self, fleet: Fleet, p: Side) -> None:
        """Take ours out of what ``p`` publishes."""
        for payloads in fleet.directory.values():
            for place, raw in payloads.items():
                payload = msgspec.msgpack.decode(raw, type=HandshakePayload)
                agent = msgspec.msgpack.decode(payload.agent_metadata_bytes)
                del agent["kvconn"]
                bare = HandshakePayload(payload.compatibility_hash, msgspec.msgpack.encode(agent))
                payloads[place] = msgspec.msgpack.encode(bare)

    def test_its_sizes_are_the_references(self, fleet: Fleet) -> None:
        p, d = fleet.pair(4, 2, 4)
        self.stock(fleet, p)
        params = {**(p.prefill("a", [3, 4], seed=1) or {}), "kvconn": None}
        d.load("r", params, [1, 2])
        fleet.until(lambda: bool(d.received and p.sent))
        assert d.failed == [] and d.holds([1, 2], 1)
        assert d.stats.values["unfenced_reads"] == len(d.ranks)

    @pytest.mark.parametrize("tp_size", [1, 4, 16, 64])
    def test_sizes_that_its_first_rank_contradicts_cost_that_request_and_ask_nobody_else(
        self, fleet: Fleet, tp_size: int
    ) -> None:
        p, d = fleet.pair(2, 2, 4)
        self.stock(fleet, p)
        params = {**(p.prefill("a", [3, 4], seed=1) or {}), "kvconn": None}
        d.load("forged", {**params, "tp_size": tp_size}, [1, 2])
        fleet.until(lambda: bool(d.received), d)
        assert d.failed == ["forged"] and set(fleet.asked) == {(0, 0)}
        assert "plan" in d.reasons["forged"]
        d.load("good", params, [3, 4])
        fleet.until(lambda: "good" in d.received)
        assert d.failed == ["forged"] and d.holds([3, 4], 1)

    def test_stages_that_its_first_rank_contradicts_ask_nobody_else(self, fleet: Fleet) -> None:
        p, d = fleet.pair(1, 1, 1)
        self.stock(fleet, p)
        params = {**(p.prefill("a", [3, 4], seed=1) or {}), "kvconn": None}
        d.load("forged", {**params, "pp_size": 2}, [1, 2])
        fleet.until(lambda: bool(d.received), d)
        assert d.failed == ["forged"] and set(fleet.asked) == {(0, 0)}
        assert "pp_size" in d.reasons["forged"]


def test_only_the_window_is_held_and_read(fleet: Fleet) -> None:
    p, d = fleet.engines(SHAPES["a window"])
    params = p.prefill("a", [3, 4, 9, 5], seed=1)
    assert params is not None and params["remote_block_ids"] == [[3, 4, 9, 5], [9, 5]]
    d.load("r", params, [1, 2, 6, 7])
    fleet.until(lambda: bool(d.received and p.sent))
    assert d.failed == [] and d.stats.values["nixl_bytes_transferred"] == (4 + 2) * BLOCK_SIZE * 64 * 4
