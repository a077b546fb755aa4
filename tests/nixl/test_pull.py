"""The path, on real NIXL agents: announce, read, notify, report, free - for one rank and for eight."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvconn.base import FinishReason, KVConnector, RequestView, StepView
from kvconn.errors import ConfigError
from kvconn.nixl.connector import NixlConnector
from tests.nixl.producer import limit
from tests.support import (
    BLOCK_SIZE,
    COMPOSITIONS,
    NIXL_CONSUMER,
    NIXL_PRODUCER,
    Side,
    free_port,
    wait_until,
)
from tests.told import Told, listening

POLLS = ("get_finished", "get_transfer_results")


class Clock:
    """A clock a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def told() -> Iterator[Told]:
    """What goes well, and what ends before it begins, is worth no line."""
    with listening() as made:
        yield made
        made.exactly()


@pytest.fixture
def sides() -> Iterator[Callable[..., Side]]:
    made: list[Side] = []

    def make(*args: Any, **kwargs: Any) -> Side:
        made.append(Side(*args, **kwargs))
        return made[-1]

    yield make
    for side in made:
        side.close()


def transfer(p: Side, d: Side, id: str, done: Callable[[], bool]) -> None:
    """Step both engines until ``done``."""

    def both() -> bool:
        d.step()
        p.step()
        return done()

    wait_until(both, what=f"{id}: p={p.scheduler!r} d={d.scheduler!r}")


@pytest.mark.parametrize("composition", COMPOSITIONS)
@pytest.mark.parametrize("pcp", [1, 2, 8])
def test_blocks_arrive_whole_and_the_producer_frees_once_after_the_read(
    sides: Callable[..., Side], composition: str, pcp: int
) -> None:
    p = sides("P", COMPOSITIONS[composition], pcp=pcp)
    d = sides("D", NIXL_CONSUMER)
    params = p.prefill("a", [3, 4, 9, 5], seed=7)
    assert params is not None
    p.step()
    assert p.sent == []  # everybody but the serving rank has spoken, nobody has read
    d.load("a-on-d", params, [11, 12, 1, 2])
    transfer(p, d, "a", lambda: bool(d.received and p.sent))
    assert d.holds([11, 12, 1, 2], seed=7)
    assert (d.received, d.failed, p.sent) == (["a-on-d"], [], ["a"])
    for _ in range(3):
        p.step(), d.step()
    assert (d.received, p.sent) == (["a-on-d"], ["a"])
    assert p.aggregator.pending() == [] and d.aggregator.pending() == []
    assert p.scheduler.explain(0.0) == [] and d.scheduler.explain(0.0) == []


@pytest.mark.parametrize("poll", POLLS)
@pytest.mark.parametrize("pcp", [2, 8])
def test_replicated_ranks_report_at_the_announcement_and_only_once(
    sides: Callable[..., Side], poll: str, pcp: int
) -> None:
    p = sides("P", NIXL_PRODUCER, pcp=pcp, poll=poll)
    p.prefill("a", [1], seed=1)
    meta = p.scheduler.build_connector_meta(StepView(1))
    p.finish_step([p.rank_step(rank, meta) for rank in range(pcp)])
    assert [r[0] for r in p.rank_results] == [set()] + [{"a"}] * (pcp - 1)
    assert [(o.id, o.ranks) for o in p.aggregator.pending()] == [("a", (0,))]
    p.finish_step([p.rank_step(rank, meta) for rank in range(pcp)])  # the metadata repeats the id
    assert [r[:2] for r in p.rank_results] == [(set(), set())] * pcp
    assert p.sent == []


def test_only_the_canonical_replica_publishes_itself(sides: Callable[..., Side]) -> None:
    p = sides("P", NIXL_PRODUCER, pcp=8)
    assert p.published == 1
    assert p.workers[0].get_handshake_metadata() is not None
    assert [w.get_handshake_metadata() for w in p.workers[1:]] == [None] * 7


@pytest.mark.parametrize("composition", COMPOSITIONS)
def test_expiry_on_rank_0_alone_completes_the_world(sides: Callable[..., Side], told: Told, composition: str) -> None:
    clock = Clock()
    p = sides("P", COMPOSITIONS[composition], pcp=8, clock=clock)
    p.prefill("a", [1, 2], seed=1)
    p.step()
    clock.now += 29.0
    wait_until(lambda: p.step() is not None and len(p.aggregator.pending()) == 1)
    assert p.sent == []
    clock.now += 2.0
    wait_until(lambda: p.step() is not None and bool(p.sent))
    assert p.sent == ["a"]
    told.exactly("rank 0: a was not read within its lease")  # of eight, the one that serves


def test_heartbeats_of_a_waiting_consumer_keep_the_lease(sides: Callable[..., Side]) -> None:
    p_clock, d_clock = Clock(), Clock()
    p = sides("P", NIXL_PRODUCER, clock=p_clock)
    d = sides("D", NIXL_CONSUMER, clock=d_clock)
    params = p.prefill("a", [1, 2], seed=1)
    p.step()
    d.scheduler.on_new_request(RequestView("r", 2 * BLOCK_SIZE, 2 * BLOCK_SIZE, params))
    p_clock.now += 29.0
    leases = p.workers[0].worker._leases  # type: ignore[attr-defined]
    before = next(iter(leases._held.values())).deadline

    def heard() -> bool:
        if not d.workers[0].worker._agent.busy:  # type: ignore[attr-defined]
            d_clock.now += 6.0  # a heartbeat is due at every step; nothing is overdue
        d.step(), p.step()
        return bool(next(iter(leases._held.values())).deadline > before)

    wait_until(heard)
    p_clock.now += 19.0  # past the first deadline, within two thirds of the lease since the heartbeat
    p.step()
    assert p.sent == []


def test_prefix_hits_are_not_read_again(sides: Callable[..., Side]) -> None:
    p, d = sides("P", NIXL_PRODUCER), sides("D", NIXL_CONSUMER)
    params = p.prefill("a", [3, 4, 5, 6], seed=2)
    p.step()
    d.load("r", params, [8, 9, 10, 11], hits=2)
    transfer(p, d, "r", lambda: bool(d.received and p.sent))
    assert d.holds([10, 11], seed=2, start=2)
    assert not any(cache[[8, 9]].any() for cache in d.caches[0].values())


def test_full_local_hit_reads_nothing_and_lets_the_producer_go(sides: Callable[..., Side]) -> None:
    p, d = sides("P", NIXL_PRODUCER), sides("D", NIXL_CONSUMER)
    params = p.prefill("a", [3, 4], seed=2)
    p.step()
    d.load("r", params, [8, 9], hits=2)
    transfer(p, d, "r", lambda: bool(p.sent))
    assert d.received == []


@pytest.mark.parametrize("reason", [FinishReason.ABORT, FinishReason.ERROR])
def test_a_request_that_ends_before_admission_lets_the_producer_go(
    sides: Callable[..., Side], reason: FinishReason
) -> None:
    p, d = sides("P", NIXL_PRODUCER), sides("D", NIXL_CONSUMER)
    params = p.prefill("a", [3, 4], seed=2)
    p.step()
    view = RequestView("r", 2 * BLOCK_SIZE, 2 * BLOCK_SIZE, params)
    d.scheduler.on_new_request(view)
    assert d.scheduler.request_finished(view, ((),), reason) == (False, None)
    transfer(p, d, "r", lambda: bool(p.sent))


def test_an_aborted_producer_request_holds_nothing(sides: Callable[..., Side]) -> None:
    p = sides("P", NIXL_PRODUCER, pcp=2)
    view = RequestView("a", 32, 33, {"do_remote_decode": True})
    assert p.scheduler.request_finished(view, ((1, 2),), FinishReason.ABORT) == (False, None)
    p.step()
    assert p.aggregator.pending() == []


BAD = {
    "nothing but the flag": lambda p: {"do_remote_prefill": True},
    "block ids of the wrong type": lambda p: {**p, "remote_block_ids": [["1", "2"]]},
    "too few block ids": lambda p: {**p, "remote_block_ids": [p["remote_block_ids"][0][:1]]},
    "block ids out of range": lambda p: {**p, "remote_block_ids": [[10_000, 10_001]]},
    "another engine's id": lambda p: {**p, "remote_engine_id": "nobody"},
    "a port nobody listens on": lambda p: {**p, "remote_port": free_port()},
}


@pytest.mark.parametrize("what", BAD)
def test_a_wrong_reference_fails_that_request_only(sides: Callable[..., Side], told: Told, what: str) -> None:
    p, d = sides("P", NIXL_PRODUCER), sides("D", NIXL_CONSUMER)
    reads: Any = d.workers[0]
    if what == "a port nobody listens on":
        limit(reads.worker, handshake=0.3)
    params = p.prefill("a", [3, 4], seed=2)
    p.step()
    d.load("bad", BAD[what](params), [8, 9])
    transfer(p, d, "bad", lambda: bool(d.failed))
    assert (d.received, d.failed) == (["bad"], ["bad"])
    limit(reads.worker, handshake=10.0)
    good = p.prefill("b", [5, 6], seed=3)
    d.load("good", good, [10, 11])
    transfer(p, d, "good", lambda: "good" in d.received and "b" in p.sent)
    assert d.failed == ["bad"] and d.holds([10, 11], seed=3)
    handshake = ("none again for 1 s: peer ", ", handshake: ")
    told.exactly(("bad", d.reasons["bad"].partition(" (the load")[0]), *[handshake] * ("handshake" in d.reasons["bad"]))


def test_lives_of_one_id_follow_each_other(sides: Callable[..., Side]) -> None:
    p, d = sides("P", NIXL_PRODUCER, pcp=2), sides("D", NIXL_CONSUMER)
    for life in range(1, 4):
        params = p.prefill("same", [life, life + 1], seed=life)
        view = d.load("same", params, [life + 10, life + 11])
        transfer(p, d, "same", lambda life=life: len(d.received) == len(p.sent) == life)  # type: ignore[misc]
        assert d.holds([life + 10, life + 11], seed=life)
        d.scheduler.request_finished(view, ((life + 10, life + 11),), FinishReason.STOP)


def test_a_consumer_with_replicated_pcp_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="kv_role: with replicated PCP 2 only kv_producer works"):
        Side("D", NIXL_CONSUMER, pcp=2)


def test_reprs_are_one_readable_line(sides: Callable[..., Side]) -> None:
    p = sides("P", NIXL_PRODUCER, pcp=2)
    texts = [repr(c) for c in (p.scheduler, *p.workers)]
    assert all("\n" not in t and len(t) < 300 for t in texts)
    assert texts[2].startswith("NixlConnector(NixlWorker(RankRole(1/2 replicates)")


def test_the_halves_are_kept_apart(sides: Callable[..., Side]) -> None:
    p = sides("P", NIXL_PRODUCER)
    worker: KVConnector = p.workers[0]
    assert isinstance(worker, NixlConnector)
    with pytest.raises(ConfigError, match="scheduler method was called on a worker"):
        worker.build_connector_meta(StepView(1))
