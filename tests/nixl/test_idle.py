"""A step in which nothing happens asks nobody but the transport, and whatever falls due by itself is still done."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kvconn.nixl.metadata import SILENT
from tests.nixl.pairs import LEASE, Net
from tests.support import Side


@pytest.fixture
def net() -> Iterator[Net]:
    one = Net()
    yield one
    one.close()


def worker(side: Side) -> Any:
    half: Any = side.workers[0]
    return half.worker


def full_polls(side: Side) -> list[float]:
    """When this side's worker looked at more than notifications, from now on."""
    seen: list[float] = []
    reader = worker(side)._reader
    drain = reader.drain
    reader.drain = lambda now: (seen.append(now), drain(now))
    return seen


def pinned(net: Net) -> tuple[Side, Any]:
    p = net.producer()
    params = p.prefill("a", [1, 2], seed=1)
    for _ in range(3):
        p.step()
    return p, params


def test_pinned_requests_are_not_looked_at_until_the_first_lease_ends(net: Net) -> None:
    p, _ = pinned(net)
    seen = full_polls(p)
    for _ in range(20):
        net.clock.advance(1.0)
        p.step()
    assert (seen, p.sent) == ([], [])
    net.clock.advance(LEASE - 20)
    p.step()
    assert (len(seen), p.sent) == (1, ["a"])
    net.sound()


def test_a_heartbeat_moves_the_lease_and_the_poll_that_looks_for_its_end(net: Net) -> None:
    p, params = pinned(net)
    d = net.consumer()
    worker(d)._reader.start = lambda now: None  # admitted, and never read
    net.load(d, "b", params, [5, 6])
    for _ in range(int(LEASE) + 10):
        net.clock.advance(1.0)
        d.step(), net.net.run(), p.step()
    assert p.sent == []


def test_a_step_with_nothing_to_say_ships_one_and_the_same_metadata(net: Net) -> None:
    p, _ = pinned(net)
    metas: list[Any] = []
    build = p.scheduler.build_connector_meta
    p.scheduler.build_connector_meta = lambda step: metas.append(build(step)) or metas[-1]  # type: ignore[method-assign,func-returns-value]
    for _ in range(3):
        p.step()
    assert all(meta is SILENT for meta in metas)


def test_an_idle_reader_looks_for_peers_to_forget_now_and_then(net: Net) -> None:
    p, params = pinned(net)
    d = net.consumer()
    net.load(d, "b", params, [5, 6])
    net.run(lambda: d.received == ["b"] and p.sent == ["a"])
    for _ in range(3):
        d.step()
    seen = full_polls(d)
    for _ in range(25):
        net.clock.advance(1.0)
        d.step()
    assert 2 <= len(seen) <= 8  # every EVICT_EVERY seconds, and when heartbeats would be due
    net.sound()


def test_an_early_notification_is_forgotten_a_lease_later_although_nothing_else_happens(net: Net) -> None:
    p, _ = pinned(net)
    leases = worker(p)._leases
    leases.notified("nobody's", "agent", 1, net.clock())
    worker(p)._next_due = worker(p)._when_due()
    net.clock.advance(LEASE)
    p.step()
    assert "early=0" in repr(leases)


def test_what_a_step_binds_is_polled_for_at_once(net: Net) -> None:
    p, _ = pinned(net)
    seen = full_polls(p)
    p.prefill("c", [3], seed=2)
    p.step()
    assert seen
