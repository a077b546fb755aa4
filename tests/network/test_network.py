"""Two hosts, real tcp between them, and what a network does: it stops, comes back, slows down, delays and loses."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from tests.network.hosts import ENV, Hosts, why_not
from tests.nixl.producer import Producer as Child
from tests.support import wait_until
from tests.told import exactly

BLOCKS = list(range(48))
SECONDS = 60.0
EXPIRED = "rank 0: a was not read within its lease"
#: more may be in quarantine than one request has
LIMITS = {"read": 20.0, "handshake": 20.0, "quarantine_max": 64}
#: once there was a first contact
SHORT = {"read": 2.0, "handshake": 2.0}


@pytest.fixture(scope="module")
def possible() -> None:
    if reason := why_not():
        pytest.skip(reason)


@pytest.fixture
def hosts(possible: None) -> Iterator[Hosts]:
    with Hosts() as made:
        yield made


@pytest.fixture
def pair(hosts: Hosts) -> Iterator[tuple[Child, Child]]:
    """A producer on host a and a consumer on host b that has read of it once."""
    child = partial(Child, env=ENV, pause=0.001, num_blocks=64)
    with (
        child(prefix=hosts.prefix("a"), host=hosts.addresses["a"]) as p,
        child(reads=True, name="D", prefix=hosts.prefix("b"), host=hosts.addresses["b"], kvconn=LIMITS) as d,
    ):
        assert read(p, d, "warm", 1) == ""
        p.order("lease", 3.0)
        d.order("limits", SHORT)
        yield p, d


def begin(p: Child, d: Child, id: str, seed: int) -> None:
    d.order("load", id, p.order("prefill", id, BLOCKS, seed), BLOCKS)


def read(p: Child, d: Child, id: str, seed: int) -> str:
    """A request to its end. Returns why it failed; "" when it came whole."""
    begin(p, d, id, seed)
    return outcome(d, id, seed)


def outcome(d: Child, id: str, seed: int) -> str:
    wait_until(lambda: id in d.order("results")[0], SECONDS, f"{id} ends")
    _, failed, reasons = d.order("results")
    if id in failed:
        return str(reasons[id])
    assert d.order("holds", BLOCKS, seed)
    return ""


def served_again(p: Child, d: Child, seed: int) -> None:
    """The next ones fail or come whole, and soon one comes."""
    ids: list[str] = []

    def one() -> bool:
        ids.append(f"again{seed}.{len(ids)}")
        return read(p, d, ids[-1], seed) == ""

    wait_until(one, SECONDS, "it is served again")


def nothing_left(p: Child, d: Child, *ids: str) -> None:
    wait_until(lambda: set(ids) <= set(p.order("sent")), SECONDS, "the producer frees")
    wait_until(lambda: p.order("left") == [] == d.order("left"), SECONDS, "nothing is held")


def test_tcp_between_two_hosts(pair: tuple[Child, Child]) -> None:
    p, d = pair
    assert read(p, d, "a", 2) == ""
    nothing_left(p, d, "warm", "a")


def test_a_link_down_for_five_seconds_in_a_read(hosts: Hosts, pair: tuple[Child, Child]) -> None:
    """Longer than the read's deadline and P's lease. What comes afterwards goes nowhere but into blocks still held."""
    p, d = pair
    params: Any = p.order("prefill", "a", BLOCKS, 2, 3)
    hosts.link(up=False)
    d.order("load", "a", params, BLOCKS)
    down_for(5.0, d, "a")
    hosts.link(up=True)
    wait_until(lambda: "a" in d.order("results")[0], SECONDS, "its blocks come back")
    assert d.order("results")[1] == ["a"]
    exactly(d.order("told"), ("load of a failed: peer P@10.77.0.1:", ", read: not done after 2 s"))
    exactly(p.order("told"), EXPIRED)
    served_again(p, d, 4)
    nothing_left(p, d, "warm", "a")


def down_for(seconds: float, d: Child, id: str) -> None:
    """The cable is out that long; the failure is known meanwhile, the blocks are still the read's (C6)."""
    end = time.monotonic() + seconds
    wait_until(lambda: any("in quarantine" in line for line in d.order("left")), SECONDS, "quarantine")
    assert id not in d.order("results")[0]
    while time.monotonic() < end:
        time.sleep(0.05)


def test_a_link_that_stays_down_is_given_up_on_both_sides_and_the_reader_lives_on(hosts: Hosts) -> None:
    """Quarantine is bounded by time: a new agent ends the read. Without a cable none can be made, so loads fail until
    there is one. P has a read of a destroyed agent to serve then, of which UCX may abort it (F6): another one comes."""
    child = partial(Child, env=ENV, pause=0.001, num_blocks=64)
    limits = {**LIMITS, "quarantine_age": 1.0}
    with (
        child(reads=True, name="D", prefix=hosts.prefix("b"), host=hosts.addresses["b"], kvconn=limits) as d,
        child(prefix=hosts.prefix("a"), host=hosts.addresses["a"]) as p,
    ):
        assert read(p, d, "warm", 1) == ""
        p.order("lease", 3.0)
        d.order("limits", SHORT)
        params = p.order("prefill", "a", BLOCKS, 2)
        hosts.link(up=False)
        d.order("load", "a", params, BLOCKS)
        assert "read: not done after 2 s" in outcome(d, "a", 2)  # its blocks are back, the cable is still out
        wait_until(lambda: "a" in p.order("sent"), SECONDS, "P's lease ends")
        assert p.order("left") == d.order("left") == []
        assert d.order("stats")["agent_recreations"] == 1
        said = [line for line in d.order("told") if "no new NIXL agent, next try in 1 s" not in line]
        exactly(
            said, ("load of a failed: peer P@", ", read: not done after 2 s"), ("quarantine is ", "a new NIXL agent")
        )
        exactly(p.order("told"), EXPIRED)
        assert read(p, d, "b", 3) != ""
        p.kill()
        hosts.link(up=True)
        with child(name="next", prefix=hosts.prefix("a"), host=hosts.addresses["a"]) as after:
            served_again(after, d, 4)
        wait_until(lambda: d.order("left") == [], SECONDS, "nothing is held")


def test_a_rate_of_two_megabits(hosts: Hosts, pair: tuple[Child, Child]) -> None:
    """96 KiB take longer than 0.3 s, and come."""
    p, d = pair
    p.order("lease", 30.0)
    d.order("limits", {"read": 20.0})
    hosts.rate("2mbit")
    began = time.monotonic()
    assert read(p, d, "slow", 2) == ""
    assert time.monotonic() - began > 0.2, "the rate was cut"
    hosts.rate("50kbit")  # they would take 15 s now, and have 2
    p.order("lease", 3.0)
    d.order("limits", SHORT)
    why = read_slowly(p, d, "too slow", 3)
    assert "read" in why or "fence" in why, why
    exactly(d.order("told"), ("load of too slow failed: peer P@", why[:40]))
    hosts.rate(None)
    served_again(p, d, 4)
    nothing_left(p, d, "warm", "slow", "too slow")


def read_slowly(p: Child, d: Child, id: str, seed: int) -> str:
    begin(p, d, id, seed)
    wait_until(lambda: any("in quarantine" in line for line in d.order("left")), SECONDS, "quarantine")
    return outcome(d, id, seed)


def test_a_network_that_delays_and_loses(possible: None) -> None:
    """10 ms each way, and of a hundred packets one is lost: everything comes, later."""
    with Hosts(delay=0.01, loss=0.01) as hosts:
        child = partial(Child, env=ENV, pause=0.001, num_blocks=64)
        limits = {"read": 20.0, "handshake": 20.0}
        with (
            child(prefix=hosts.prefix("a"), host=hosts.addresses["a"]) as p,
            child(reads=True, name="D", prefix=hosts.prefix("b"), host=hosts.addresses["b"], kvconn=limits) as d,
        ):
            for n in range(8):
                assert read(p, d, f"r{n}", n) == ""
            nothing_left(p, d, *(f"r{n}" for n in range(8)))
        carried, lost = hosts.unplug()
        assert carried > 500 and lost > 0
