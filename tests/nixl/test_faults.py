"""A producer that races, stops, or dies: nothing wrong is handed over, nothing stays held, the reader lives on."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from kvconn.transport.nixl import cma_usable
from tests.nixl.producer import Producer, races
from tests.support import NIXL_CONSUMER, Side, free_port, wait_until

TCP = {"UCX_TLS": "tcp"}
BLOCKS = list(range(48))


@pytest.fixture
def d() -> Iterator[Side]:
    extra = {"kv_connector_extra_config": {"kvconn": {"read": 2.0, "handshake": 5.0}}}
    side = Side("D", {**NIXL_CONSUMER, **extra}, num_blocks=64)
    yield side
    side.close()


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "kvconn.nixl")


def worker(side: Side) -> Any:
    connector: Any = side.workers[0]
    return connector.worker


def step_until(side: Side, done: Any) -> None:
    wait_until(lambda: side.step() is not None and bool(done()), what=repr(worker(side)))


@pytest.mark.parametrize(("transport", "count"), [("cma", 200), ("tcp", 80)])
def test_a_read_that_races_with_the_release_is_whole_or_refused(transport: str, count: int) -> None:
    if transport == "cma" and not cma_usable():
        pytest.skip("process_vm_readv is refused here, so that UCX can't use CMA")
    out = races(count, seed=7, env=TCP if transport == "tcp" else None)
    assert out["accepted but not whole"] == 0
    # the races happened: reads that a transport alone calls DONE came back overwritten, and others were in time
    assert out["refused and not whole"] > 0 and out["accepted"] > 0, out


def test_a_producer_stopped_in_mid_read_leaves_the_blocks_in_quarantine_until_it_goes_on(d: Side) -> None:
    with Producer(env=TCP, num_blocks=64) as p:
        warm = p.order("prefill", "warm", BLOCKS, 1)
        d.load("warm", warm, BLOCKS)
        step_until(d, lambda: d.received == ["warm"])
        assert d.failed == []
        params = p.order("prefill", "a", BLOCKS, 2)
        p.stop()
        d.load("r", params, BLOCKS)
        step_until(d, lambda: worker(d)._reads.quarantined(0.0))
        assert d.received == ["warm"]  # failed is known, released is not (C6)
        assert [p.id for p in d.aggregator.pending()] == ["r"]
        p.cont()
        step_until(d, lambda: "r" in d.received)
        assert d.failed == ["r"]
        assert len(worker(d)._reads) == 0 and d.aggregator.pending() == []


@pytest.mark.parametrize("stopped_first", [False, True])
def test_a_killed_producer_fails_the_request_and_the_next_one_is_served(d: Side, stopped_first: bool) -> None:
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
    with Producer(env=TCP, num_blocks=64) as another:
        d.load("next", another.order("prefill", "b", BLOCKS, 3), BLOCKS)
        step_until(d, lambda: "next" in d.received)
        assert d.failed == ["r"] and d.holds(BLOCKS, 3)
    assert len(worker(d)._reads) == 0 and d.aggregator.pending() == []


def test_a_read_that_never_ends_is_ended_by_a_new_agent(d: Side) -> None:
    w = worker(d)
    with Producer(env=TCP, num_blocks=64) as p:
        d.load("warm", p.order("prefill", "warm", BLOCKS, 1), BLOCKS)
        step_until(d, lambda: d.received == ["warm"])
        assert d.failed == []
        params = p.order("prefill", "a", BLOCKS, 2)
        p.stop()
        d.load("r", params, BLOCKS)
        step_until(d, lambda: w._reads.quarantined(0.0))
        name = w._transport.name
        w._settings = _with_age(w._settings, 0.2)
        step_until(d, lambda: "r" in d.received)
        assert d.failed == ["r"] and w._transport.name != name
        p.kill()
    with Producer(env=TCP, num_blocks=64) as another:
        d.load("next", another.order("prefill", "b", BLOCKS, 3), BLOCKS)
        step_until(d, lambda: "next" in d.received)
        assert d.failed == ["r"] and d.holds(BLOCKS, 3)
    assert d.stats.values["agent_recreations"] == 1


def _with_age(settings: Any, age: float) -> Any:
    import msgspec

    return msgspec.structs.replace(settings, kvconn=msgspec.structs.replace(settings.kvconn, quarantine_age=age))


def test_a_producer_that_restarts_under_its_old_name_and_port_is_served_again(d: Side) -> None:
    port = free_port()
    with Producer(env=TCP, num_blocks=64, port=port) as p:
        d.load("warm", p.order("prefill", "warm", BLOCKS, 1), BLOCKS)
        step_until(d, lambda: d.received == ["warm"])
    with Producer(env=TCP, num_blocks=64, port=port) as p:
        for n in range(3):  # the first may still meet the old connection and the old key; nothing wrong is handed over
            d.load(f"r{n}", p.order("prefill", f"a{n}", BLOCKS, 2), BLOCKS)
            step_until(d, lambda n=n: f"r{n}" in d.received)
        assert "r2" not in d.failed and d.holds(BLOCKS, 2)


def test_one_engine_under_two_addresses_stays_readable_when_one_of_them_is_forgotten(d: Side) -> None:
    with Producer(num_blocks=64) as p:
        d.load("a", p.order("prefill", "a", BLOCKS, 1), BLOCKS)
        step_until(d, lambda: d.received == ["a"])
        d.load("alias", {**p.order("prefill", "b", BLOCKS, 2), "remote_host": "localhost"}, BLOCKS)
        step_until(d, lambda: "alias" in d.received)
        assert d.failed == ["alias"]  # the seal names the address
        w = worker(d)
        (alias,) = [peer for peer in w._peers.ready() if peer.key[1] == "localhost"]
        w._drop(alias, "evicted")
        d.load("c", p.order("prefill", "c", BLOCKS, 3), BLOCKS)
        step_until(d, lambda: "c" in d.received)
        assert d.failed == ["alias"] and d.holds(BLOCKS, 3)
