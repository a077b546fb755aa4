"""Engines that come back: at the same address, as another or as themselves, with another shape; readers that die."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from kvconn.nixl.wire import WireCodec
from tests.nixl.producer import Producer as Child
from tests.support import NIXL_CONSUMER, NIXL_PRODUCER, Side, free_port, wait_until
from tests.told import Told, exactly

pytestmark = pytest.mark.usefixtures("told")

TCP = {"UCX_TLS": "tcp"}
BLOCKS = list(range(48))
Producer = partial(Child, env=TCP, pause=0.001, num_blocks=64)


@pytest.fixture
def d() -> Iterator[Side]:
    extra = {"kv_connector_extra_config": {"kvconn": {"read": 15.0, "handshake": 15.0}}}
    side = Side("D", {**NIXL_CONSUMER, **extra}, num_blocks=64)
    yield side
    side.close()


def load(d: Side, id: str, params: Any) -> bool:
    """Read it to its end. True: it came, and is right."""
    d.load(id, params, BLOCKS)
    wait_until(lambda: d.step() is not None and id in d.received, what=repr(d.workers[0]))
    return id not in d.failed


def each_failure_once(d: Side, told: Told) -> None:
    """One line for every load that failed, which names the peer; one for each connection that was found lost, and each
    handshake that failed."""
    lines = told.take()
    loads = [line for line in lines if "load of" in line]
    exactly(loads, *[(f"load of {id} failed: ", "P@127.0.0.1:") for id in d.failed])
    others = [line for line in lines if line not in loads]
    assert all(
        "cannot notify P@127.0.0.1:" in line or "handshake failed, none again for " in line for line in others
    ), others
    assert len(others) <= 3 and len(set(others)) == len(others), others


def until_served(d: Side, p: Child, seed: int) -> int:
    """Load until it goes well; what came is compared each time. Returns how many failed before."""
    failed = 0

    def one() -> bool:
        nonlocal failed
        id = f"s{seed}.{len(d.received)}"
        good = load(d, id, p.order("prefill", id, BLOCKS, seed))
        assert not good or d.holds(BLOCKS, seed)
        failed += not good
        return good

    wait_until(one, what="the peer serves")
    return failed


@pytest.mark.parametrize(("name", "killed"), [("P", "after the read"), ("another", "before the read")])
def test_a_producer_back_at_its_address_is_read_and_references_of_the_old_one_are_not(
    d: Side, told: Told, name: str, killed: str
) -> None:
    port = free_port()
    with Producer(port=port) as p:
        assert load(d, "warm", p.order("prefill", "warm", BLOCKS, 1))
        old = p.order("prefill", "a", BLOCKS, 2)
        if killed == "after the read":
            assert load(d, "a", old)
    with Producer(port=port, name=name) as p:
        # its blocks are another prompt's now, at the same places
        p.order("prefill", "b", BLOCKS, 3)
        assert not load(d, "old", old)
        assert d.reasons["old"].startswith(f"peer P@127.0.0.1:{port}") or "seal" in d.reasons["old"], d.reasons
        assert until_served(d, p, 4) <= 3
        assert not load(d, "old again", old)
    assert d.aggregator.pending() == []
    each_failure_once(d, told)


def test_a_producer_back_with_another_shape_is_refused_by_name_until_it_has_its_old_one(d: Side, told: Told) -> None:
    port = free_port()
    with Producer(port=port) as p:
        assert load(d, "warm", p.order("prefill", "warm", BLOCKS, 1))
    with Producer(port=port, heads=2) as p:
        for n in range(3):
            assert not load(d, f"r{n}", p.order("prefill", f"r{n}", BLOCKS, 2))
        assert "ours" in d.reasons["r2"] and "theirs" in d.reasons["r2"], d.reasons
    with Producer(port=port) as p:
        until_served(d, p, 3)
    assert d.aggregator.pending() == []
    each_failure_once(d, told)


class OtherVersion(WireCodec):
    """A peer of another version: its factors are not ours."""

    def factors(self, config: Any) -> dict[str, str]:
        return super().factors(config) | {"wire version": "2999"}


def test_a_peer_of_another_version_is_refused_by_name_and_others_are_read(d: Side, told: Told) -> None:
    other, p = Side("other", NIXL_PRODUCER, codec=OtherVersion()), Side("P", NIXL_PRODUCER)
    try:
        d.load("a", other.prefill("a", [1, 2], 1), [1, 2])
        d.load("b", p.prefill("b", [1, 2], 2), [3, 4])
        wait_until(lambda: all(s.step() is not None for s in (d, other, p)) and len(d.received) == 2)
        assert d.failed == ["a"] and d.holds([3, 4], 2)
        assert "wire version" in d.reasons["a"] and "2999" in d.reasons["a"], d.reasons
        why = "peer other@", ", compatibility: wire version: ours 1, theirs 2999"
        told.exactly(("handshake failed, none again for 1 s: ", *why), ("load of a failed: ", *why))
    finally:
        other.close()
        p.close()


def test_a_reader_killed_with_its_reads_under_way_holds_nothing_of_the_producer_and_comes_back() -> None:
    with Producer() as p:
        for n in range(2):
            with Producer(reads=True, name="D") as reader:
                p.order("lease", 30.0)
                warm = p.order("prefill", f"w{n}", BLOCKS, n)
                reader.order("load", "w", warm, BLOCKS)
                wait_until(lambda reader=reader: reader.order("results")[0] == ["w"])  # type: ignore[misc]
                p.order("lease", 1.0)
                params = p.order("prefill", f"a{n}", BLOCKS, n)
                assert reader.order("load", "a", params, BLOCKS, False) > 0  # its read is posted, and then it dies
            wait_until(lambda n=n: {f"a{n}", f"w{n}"} <= set(p.order("sent")))  # type: ignore[misc]
        assert p.order("left") == []
        p.order("lease", 30.0)
        assert p.order("stats")["nixl_num_kv_expired_reqs"] == 2
        exactly(p.order("told"), *[f"rank 0: a{n} was not read within its lease" for n in range(2)])
        with Producer(reads=True, name="D") as reader:
            reader.order("load", "last", p.order("prefill", "last", BLOCKS, 9), BLOCKS)
            wait_until(lambda: reader.order("results")[0] == ["last"])
            assert reader.order("results")[1] == [] and reader.order("holds", BLOCKS, 9)
            wait_until(lambda: "last" in p.order("sent"))
        assert p.order("left") == []


def test_a_reader_stopped_past_the_lease_is_refused_what_it_reads_then() -> None:
    with (
        Producer() as p,
        Producer(reads=True, name="D") as reader,
    ):
        reader.order("load", "w", p.order("prefill", "w", BLOCKS, 1), BLOCKS)
        wait_until(lambda: reader.order("results")[0] == ["w"])
        p.order("lease", 1.0)
        params = p.order("prefill", "a", BLOCKS, 2, 3)  # overwritten with 3 at its release
        reader.stop()
        wait_until(lambda: "a" in p.order("sent"), what="the lease's end")
        reader.cont()
        reader.order("load", "a", params, BLOCKS)
        wait_until(lambda: "a" in reader.order("results")[0])
        _, failed, reasons = reader.order("results")
        assert failed == ["a"] and "fence" in reasons["a"], reasons
        assert reader.order("left") == p.order("left") == []
        exactly(reader.order("told"), ("load of a failed: peer P@", ", fence: it let go of these blocks"))
        exactly(p.order("told"), "rank 0: a was not read within its lease")
