"""A producer that races, stops, or dies: nothing wrong is handed over, nothing stays held, the reader lives on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from kvconn.base import StepView
from kvconn.errors import TransportError
from kvconn.multi.connector import MultiConnector
from kvconn.transport.ucx import cma_usable
from tests.nixl.producer import Producer, limit, races
from tests.support import NIXL_CONSUMER, NIXL_PRODUCER, Side, free_port, multi, offload_hold, wait_until
from tests.told import Told, exactly

pytestmark = pytest.mark.usefixtures("told")

TCP = {"UCX_TLS": "tcp"}
BLOCKS = list(range(48))
NIXL_BOTH = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}


@pytest.fixture
def d() -> Iterator[Side]:
    extra = {"kv_connector_extra_config": {"kvconn": {"read": 15.0, "handshake": 15.0, "quarantine_max": 64}}}
    side = Side("D", {**NIXL_CONSUMER, **extra}, num_blocks=64)
    yield side
    side.close()


#: what a producer says of a request that nobody read; what a reader says of one whose producer has let go
EXPIRED = "rank 0: a was not read within its lease"
STALE = ("load of r failed: peer P@", ", fence: it let go of these blocks before they were read")
#: a reader of a connection that failed: the load, and that the peer could not be told
LOST = [("load of r failed: peer P@", ", read: "), ("cannot notify P@", "the connection to the peer failed")]


def worker(side: Side) -> Any:
    connector: Any = side.workers[0]
    return connector.children[0].worker if isinstance(connector, MultiConnector) else connector.worker


def step_until(side: Side, done: Any) -> None:
    wait_until(lambda: side.step() is not None and bool(done()), what=repr(worker(side)))


@pytest.mark.parametrize(("transport", "count"), [("cma", 200), ("batched", 200), ("tcp", 80)])
def test_a_read_that_races_with_the_release_is_whole_or_refused(told: Told, transport: str, count: int) -> None:
    if transport != "tcp" and not cma_usable():
        pytest.skip("process_vm_readv is refused here, so that UCX can't use CMA")
    out = races(count, seed=7, env=TCP if transport == "tcp" else None, scattered=transport == "batched")
    assert out["accepted but not whole"] == 0
    # the races happened: reads that a transport alone calls DONE came back overwritten, and others were in time
    assert out["refused and not whole"] > 0 and out["accepted"] > 0, out
    exactly(told.take(), *[("load of d", ", fence: it let go")] * out["refused"])


def test_a_producer_stopped_in_mid_read_leaves_the_blocks_in_quarantine_until_it_goes_on(d: Side, told: Told) -> None:
    with Producer(env=TCP, num_blocks=64) as p:
        warm = p.order("prefill", "warm", BLOCKS, 1)
        d.load("warm", warm, BLOCKS)
        step_until(d, lambda: d.received == ["warm"])
        assert d.failed == []
        limit(worker(d), read=0.5)
        params = p.order("prefill", "a", BLOCKS, 2)
        p.stop()
        d.load("r", params, BLOCKS)
        step_until(d, lambda: worker(d)._reader._reads.quarantined(0.0))
        assert d.received == ["warm"]  # failed is known, released is not (C6)
        assert [p.id for p in d.aggregator.pending()] == ["r"]
        p.cont()
        step_until(d, lambda: "r" in d.received)
        assert d.failed == ["r"]
        told.exactly(("load of r failed: peer P@", ", read: not done after 0.5 s"))
        step_until(d, lambda: "a" in p.order("sent"))
        assert p.order("left") == p.order("told") == []
        assert len(worker(d)._reader._reads) == 0 and d.aggregator.pending() == []


@pytest.mark.parametrize("transport", ["cma", "tcp"])
def test_a_lease_that_ends_in_mid_read_is_noticed_by_the_reader(d: Side, told: Told, transport: str) -> None:
    """D posted its read and is slow; P's lease ends and its blocks are another prompt's by the time D looks."""
    if transport == "cma" and not cma_usable():
        pytest.skip("process_vm_readv is refused here, so that UCX can't use CMA")
    with Producer(lease=0.3, env=TCP if transport == "tcp" else None, num_blocks=64) as p:
        d.load("warm", p.order("prefill", "warm", BLOCKS, 1), BLOCKS)
        step_until(d, lambda: d.received == ["warm"])
        wait_until(lambda: "warm" in p.order("sent"))
        p.order("told"), told.take()  # a first contact may take longer than this lease
        expired = p.order("stats").get("nixl_num_kv_expired_reqs", 0)
        d.load("r", p.order("prefill", "a", BLOCKS, 2, 3), BLOCKS)
        d.workers[0].bind_connector_metadata(d.scheduler.build_connector_meta(StepView(d.seq)))
        d.workers[0].start_load_kv()  # the read is posted; D's poll comes late
        assert worker(d)._reader._reads.to_poll()
        wait_until(lambda: "a" in p.order("sent"), what="the lease's end")
        assert p.order("stats")["nixl_num_kv_expired_reqs"] == expired + 1
        step_until(d, lambda: "r" in d.received)
        exactly(p.order("told"), EXPIRED)
        assert p.order("left") == d.aggregator.pending() == []
    assert d.failed[-1] == "r" and "fence" in d.reasons["r"]
    told.exactly(STALE)


def test_blocks_that_were_given_to_another_prompt_are_not_taken_for_the_old_one(d: Side, told: Told) -> None:
    """Nothing a transport says gives it away: the read succeeds, with another prompt's bytes."""
    with Producer(lease=0.2, num_blocks=64) as p:
        params = p.order("prefill", "a", BLOCKS, 2, 3)
        wait_until(lambda: "a" in p.order("sent"), what="the lease's end")
        d.load("r", params, BLOCKS)
        step_until(d, lambda: "r" in d.received)
        exactly(p.order("told"), EXPIRED)
    told.exactly(STALE)
    assert d.failed == ["r"] and d.stats.values["stale_reads"] == 1
    assert d.holds(BLOCKS, 3)  # what was read, and not handed over


def test_after_the_producer_forgot_its_cache_readers_fail_and_blocks_stay_held_until_their_lives_end(
    told: Told,
) -> None:
    p, d = Side("P", NIXL_PRODUCER), Side("D", NIXL_CONSUMER)
    try:
        blocks = [3, 4]
        params = p.prefill("a", blocks, 1)
        p.step()
        assert p.scheduler.reset_cache() is True
        p.step()
        d.load("r", params, blocks)
        wait_until(lambda: p.step() is not None and d.step() is not None and "r" in d.received)
        assert d.failed == ["r"]
        told.exactly(STALE)
        wait_until(lambda: p.step() is not None and p.sent == ["a"])
        again = p.prefill("b", blocks, 2)  # and what comes after is served as ever
        d.load("s", again, blocks)
        wait_until(lambda: p.step() is not None and d.step() is not None and "s" in d.received)
        assert d.failed == ["r"] and d.holds(blocks, 2)
    finally:
        d.close()
        p.close()


@pytest.mark.parametrize("stopped_first", [False, True])
def test_a_killed_producer_fails_the_request_and_the_next_one_is_served(
    d: Side, told: Told, stopped_first: bool
) -> None:
    with Producer(env=TCP, num_blocks=64) as p:
        d.load("warm", p.order("prefill", "warm", BLOCKS, 1), BLOCKS)
        step_until(d, lambda: d.received == ["warm"])
        assert d.failed == []
        params = p.order("prefill", "a", BLOCKS, 2)
        if stopped_first:  # the read is under way when the producer dies
            p.stop()
            d.load("r", params, BLOCKS)
            d.step()
            p.kill()
        else:
            p.kill()
            d.load("r", params, BLOCKS)
        step_until(d, lambda: "r" in d.received)
        assert d.failed == ["r"]
    told.exactly(*LOST)
    with Producer(env=TCP, num_blocks=64) as another:
        d.load("next", another.order("prefill", "b", BLOCKS, 3), BLOCKS)
        step_until(d, lambda: "next" in d.received)
        assert d.failed == ["r"] and d.holds(BLOCKS, 3)
    assert len(worker(d)._reader._reads) == 0 and d.aggregator.pending() == []


def test_a_read_that_never_ends_is_ended_by_a_new_agent(d: Side, told: Told) -> None:
    w = worker(d)
    with Producer(env=TCP, num_blocks=64) as p:
        d.load("warm", p.order("prefill", "warm", BLOCKS, 1), BLOCKS)
        step_until(d, lambda: d.received == ["warm"])
        assert d.failed == []
        limit(w, read=0.5)
        params = p.order("prefill", "a", BLOCKS, 2)
        p.stop()
        d.load("r", params, BLOCKS)
        step_until(d, lambda: w._reader._reads.quarantined(0.0))
        name = w._agent.transport.name
        limit(w, read=15.0, quarantine_age=0.2)
        step_until(d, lambda: "r" in d.received)
        assert d.failed == ["r"] and w._agent.transport.name != name
        told.exactly(("load of r failed: peer P@", ", read: not done"), ("quarantine is ", "making a new NIXL agent"))
        p.kill()
    with Producer(env=TCP, num_blocks=64) as another:
        d.load("next", another.order("prefill", "b", BLOCKS, 3), BLOCKS)
        step_until(d, lambda: "next" in d.received)
        assert d.failed == ["r"] and d.holds(BLOCKS, 3)
    assert d.stats.values["agent_recreations"] == 1


@pytest.mark.parametrize("composition", ["alone", "in Multi"])
def test_more_blocks_than_may_be_in_quarantine_are_ended_by_a_new_agent_at_once(told: Told, composition: str) -> None:
    """And the rank serves as well: who reads from it finds the new agent."""
    limits = {"read": 15.0, "handshake": 15.0, "quarantine_max": 8}
    extra = {"kv_lease_duration": 3.0, "kvconn": limits}  # who can't tell us that it is done is waited for so long
    transfer = {**NIXL_BOTH, "kv_connector_extra_config": extra}
    if composition == "in Multi":
        transfer = multi(transfer, offload_hold(), role="kv_both")
    both = Side("B", transfer, num_blocks=64)
    d = Side("D", NIXL_CONSUMER, num_blocks=64)

    def serve(id: str, seed: int) -> None:
        d.load(id, both.prefill(f"of {id}", [50, 51], seed), [1, 2])
        wait_until(lambda: both.step() is not None and d.step() is not None and id in d.received)

    try:
        serve("before", 5)
        assert d.failed == [] and d.holds([1, 2], 5)
        with Producer(env=TCP, num_blocks=64) as p:
            both.load("warm", p.order("prefill", "warm", BLOCKS, 1), BLOCKS)
            step_until(both, lambda: both.received == ["warm"])
            assert both.failed == []
            limit(worker(both), read=0.5)
            name = worker(both)._agent.transport.name
            params = p.order("prefill", "a", BLOCKS, 2)
            p.stop()
            both.load("r", params, BLOCKS)
            step_until(both, lambda: "r" in both.received)
            assert both.failed == ["r"] and "not done after 0.5 s" in both.reasons["r"]
            assert worker(both)._agent.transport.name != name
        assert both.stats.values["agent_recreations"] == 1
        bound = ("48 blocks are in quarantine, at most 8 may be", "making a new NIXL agent")
        told.exactly(("load of r failed: peer P@", ", read: not done after 0.5 s"), bound)
        for n in range(4):  # the first may still meet the old agent; nothing wrong is handed over
            serve(f"after{n}", 6 + n)
            assert f"after{n}" in d.failed or d.holds([1, 2], 6 + n)
        assert "after3" not in d.failed
        wait_until(lambda: both.step() is not None and len(both.sent) == 5, what=repr(both.scheduler))
        expected: list[Any] = []
        for id in d.failed:  # each with its line, the lost connection with one, and what P hears from nobody
            expected += [(f"load of {id} failed: peer B@",), (f"of {id} was not read within its lease",)]
        said = told.take()
        # over CMA the old agent's memory may still be read, rightly; then only the notification fails
        untold = [line for line in said if "cannot notify B@" in line]
        assert bool(d.failed) <= len(untold) <= 1
        exactly(said, *expected, *untold)
    finally:
        d.close()
        both.close()


def test_an_agent_that_can_not_be_made_anew_fails_loads_until_it_can(
    d: Side, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = worker(d)
    make = w._agent._make
    refused: list[tuple[str, ...]] = []

    def not_yet() -> Any:
        if len(refused) < 2 or "r" not in d.received:
            refused.append(again)
            raise TransportError("no memory")
        return make()

    again, why = ("no new NIXL agent, next try in 0.05 s: no memory",), "this rank has no NIXL agent"
    monkeypatch.setattr(w._agent, "_make", not_yet)
    monkeypatch.setattr("kvconn.nixl.agent.REOPEN", 0.05)
    w._recreate("a test wants it", time.perf_counter())
    with Producer(num_blocks=64) as p:
        d.load("r", p.order("prefill", "a", BLOCKS, 1), BLOCKS)
        step_until(d, lambda: "r" in d.received)
        assert d.failed == ["r"] and "no NIXL agent" in d.reasons["r"]
        step_until(d, lambda: w._agent.transport is not None)
    no_agent = [("handshake failed, none again for 1 s: peer P@", why), ("load of r failed: peer P@", why)]
    told.exactly("a test wants it: making a new NIXL agent", *refused, *no_agent)


def test_a_new_agent_that_can_not_register_its_memory_is_destroyed_before_the_next_try(
    d: Side, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = worker(d)
    make, closed = w._agent._make, []

    def without_memory() -> Any:
        transport = make()
        close = transport.close
        transport.register = lambda regions: _raise(TransportError("no memory"))
        transport.close = lambda: (closed.append(transport.name), close())
        return transport

    monkeypatch.setattr(w._agent, "_make", without_memory)
    w._recreate("a test wants it", time.perf_counter())
    assert w._agent.transport is None and len(closed) == 1
    told.exactly("a test wants it: making a new NIXL agent", "no new NIXL agent, next try in 1 s: no memory")


def _raise(err: Exception) -> Any:
    raise err


def test_a_producer_that_restarts_under_its_old_name_and_port_is_served_again(d: Side, told: Told) -> None:
    port = free_port()
    with Producer(env=TCP, num_blocks=64, port=port) as p:
        d.load("warm", p.order("prefill", "warm", BLOCKS, 1), BLOCKS)
        step_until(d, lambda: d.received == ["warm"])
    with Producer(env=TCP, num_blocks=64, port=port) as p:
        for n in range(3):  # the first may still meet the old connection and the old key; nothing wrong is handed over
            d.load(f"r{n}", p.order("prefill", f"a{n}", BLOCKS, 2), BLOCKS)
            step_until(d, lambda n=n: f"r{n}" in d.received)
        assert "r2" not in d.failed and d.holds(BLOCKS, 2)
    said = told.take()
    # a heartbeat may find the old connection broken before any read does; then the peer is met anew and no load fails
    lost = [line for line in said if "cannot notify P@" in line and "the connection to the peer failed" in line]
    assert bool(d.failed) <= len(lost) <= 1
    exactly(said, *[(f"load of {id} failed: ", "P@") for id in d.failed], *lost)


def test_one_engine_under_two_addresses_stays_readable_when_one_of_them_is_forgotten(d: Side, told: Told) -> None:
    with Producer(num_blocks=64) as p:
        d.load("a", p.order("prefill", "a", BLOCKS, 1), BLOCKS)
        step_until(d, lambda: d.received == ["a"])
        d.load("alias", {**p.order("prefill", "b", BLOCKS, 2), "remote_host": "localhost"}, BLOCKS)
        step_until(d, lambda: "alias" in d.received)
        assert d.failed == ["alias"]  # the seal names the address
        told.exactly(("load of alias failed: ", "P@localhost:", "its seal does not fit"))
        w = worker(d)
        (alias,) = [peer for peer in w._contacts._peers.ready() if peer.key[1] == "localhost"]
        w._contacts.drop([alias], "evicted")
        d.load("c", p.order("prefill", "c", BLOCKS, 3), BLOCKS)
        step_until(d, lambda: "c" in d.received)
        assert d.failed == ["alias"] and d.holds(BLOCKS, 3)
