"""Faults one by one, in an order that the test decides: each is seen to happen, then all is as if it had not.

Real halves over the simulated network, which is as unkind as F1 to F4 and F7. The same faults at random, together,
are in ``tests/sim``; over real agents and processes in ``test_faults.py``, ``test_restarts.py`` and ``kvconn chaos``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kvconn.base import FinishReason, RequestView, StepView
from kvconn.config import ParallelConfig
from kvconn.testing import ManualClock
from tests.nixl.pairs import LEASE, Net
from tests.support import NIXL_CONSUMER, Side
from tests.told import Told

pytestmark = pytest.mark.usefixtures("told")

THEIRS, OURS = [3, 4, 9, 5], [11, 12, 1, 2]


@pytest.fixture
def net() -> Iterator[Net]:
    made = Net()
    yield made
    made.close()


#: P: nobody read it, or nobody could say that it was read
EXPIRED = "rank 0: a was not read within its lease"
NEW_AGENT = ("quarantine is 61.0 s old", "making a new NIXL agent")


def serve(net: Net, p: Side, d: Side, id: str, seed: int) -> None:
    """One request that goes well."""
    net.load(d, id, p.prefill(id, THEIRS, seed), OURS)
    net.run(lambda: id in d.received and id in p.sent)
    assert id not in d.failed and d.holds(OURS, seed)


def announce(side: Side) -> None:
    """This engine's step up to its poll, which comes late."""
    side.seq += 1
    side.workers[0].bind_connector_metadata(side.scheduler.build_connector_meta(StepView(side.seq)))
    side.workers[0].start_load_kv()


def lines(side: Side, net: Net) -> str:
    return "; ".join(line for half in (side.scheduler, *side.workers) for line in half.explain(net.clock()))


STAGES = ("queued", "in handshake", "in read", "after read", "in the completing step")


@pytest.mark.parametrize("stage", STAGES)
def test_an_abort_on_d_at_any_stage_frees_both_sides_once(net: Net, stage: str) -> None:
    p, d = net.producer(), net.consumer()
    if stage != "in handshake":
        serve(net, p, d, "before", 1)
    params = p.prefill("a", THEIRS, 2)
    p.step()
    if stage == "queued":
        view = RequestView("a", 64, 64, params)
        net.loaded["a"] = d, view, []
        d.scheduler.on_new_request(view)
        assert "a waits to be admitted" in lines(d, net)
    else:
        net.load(d, "a", params, OURS)
        if stage == "in handshake":
            announce(d)
            assert "handshake" in lines(d, net)
        elif stage == "in read":
            announce(d)
            assert net.net.under_way() != []
        elif stage == "after read":
            net.run(lambda: "a" in d.received)
    if stage == "in the completing step":
        outputs: list[Any] = []
        while not (outputs and outputs[-1].kv_connector_output.finished_recving):
            net.net.run()
            outputs = [d.rank_step(0, d.scheduler.build_connector_meta(StepView(d.seq)))]
        net.end("a", FinishReason.ABORT)
        d.finish_step(outputs)
    else:
        net.end("a", FinishReason.ABORT)
    net.run(lambda: "a" in p.sent)
    assert p.sent.count("a") == 1
    net.run(lambda: stage == "queued" or "a" in d.received)
    assert d.received.count("a") == (0 if stage == "queued" else 1)
    assert "nixl_num_kv_expired_reqs" not in p.stats.values  # released by a word, not by time
    net.sound()
    serve(net, p, d, "after", 3)
    net.sound()


@pytest.mark.parametrize("parts", [0, 1, 3])
def test_a_transfer_that_raises_fails_its_request_and_its_blocks_come_back_when_nothing_lands(
    net: Net, told: Told, parts: int
) -> None:
    """``parts`` of it were posted before it raised (F4)."""
    p, d = net.producer(), net.consumer()
    serve(net, p, d, "before", 1)
    name = d.workers[0].worker._agent.transport.name  # type: ignore[attr-defined]
    net.net.raise_on_post(name, parts)
    net.load(d, "a", p.prefill("a", THEIRS, 2), OURS)
    p.step()
    announce(d)
    assert bool(net.net.under_way()) is (parts > 0)
    d.step()
    if parts:
        assert "a" not in d.received and "in quarantine" in lines(d, net)
        net.clock.advance(61.0)  # the peer lives and parts may still land: only a new agent ends that
    net.run(lambda: "a" in d.received and "a" in p.sent)
    assert d.failed == ["a"] and "read" in d.reasons["a"]
    failed = ("load of a failed: peer P@", ", read: ", "the post failed, as ordered")
    told.exactly(failed, *([EXPIRED, NEW_AGENT] if parts else []))
    serve(net, p, d, "after", 3)
    net.sound()


def test_of_two_reads_one_fails_and_the_other_writes_on_until_it_is_quiet(net: Net, told: Told) -> None:
    """D's one rank reads half of the heads from each of P's two; the first handle fails at once, the second later."""
    p, d = net.producer(parallel=ParallelConfig(tp=2), heads=2), net.consumer(heads=2)
    serve(net, p, d, "before", 1)
    net.load(d, "a", p.prefill("a", THEIRS, 2), OURS)
    p.step()
    announce(d)
    first, second = net.net.under_way()
    assert net.net.fail_part(first)
    d.step()
    assert "a" not in d.received and "in quarantine" in lines(d, net)  # failed is known, the blocks stay (C6)
    while first in net.net.under_way():
        net.net.step(0)
        d.step()
    assert net.net.fail_part(second) or second not in net.net.under_way()  # another poll
    d.step()
    assert "a" not in d.received
    net.clock.advance(61.0)
    net.run(lambda: "a" in d.received and "a" in p.sent)
    assert d.failed == ["a"] and d.received.count("a") == 1
    failed = ("load of a failed: peer P@", " pp 0 tp 0, read: a part of it failed")
    told.exactly(failed, NEW_AGENT, EXPIRED, EXPIRED.replace("rank 0", "rank 1"))  # one rank of P, and the other
    serve(net, p, d, "after", 3)
    net.sound()


@pytest.mark.parametrize("fate", ["lost", "twice", "late", "later than the lease"])
def test_what_becomes_of_a_notification_changes_when_blocks_come_back_and_nothing_else(
    net: Net, told: Told, fate: str
) -> None:
    p, d = net.producer(), net.consumer()
    serve(net, p, d, "before", 1)
    net.load(d, "a", p.prefill("a", THEIRS, 2), OURS)
    p.step()
    net.net.fates.extend(
        {"lost": [()], "twice": [(0.0, 0.0)], "late": [(5.0,)], "later than the lease": [(LEASE + 5,)]}[fate]
    )
    net.run(lambda: "a" in d.received)
    assert d.failed == [] and d.holds(OURS, 2)
    assert not net.net.fates, "the notification met its fate"
    if fate != "twice":
        assert "a" not in p.sent
        net.clock.advance({"late": 5.0}.get(fate, LEASE))
    net.run(lambda: "a" in p.sent)
    expired = p.stats.values.get("nixl_num_kv_expired_reqs", 0)
    assert expired == (1 if fate in ("lost", "later than the lease") else 0)
    told.exactly(*[EXPIRED] * int(expired))
    net.clock.advance(6.0)
    net.net.run()
    p.step()
    late = len(p.workers[0].worker._leases._early)  # type: ignore[attr-defined]
    assert late == (1 if fate in ("twice", "later than the lease") else 0)  # it came after its life, and waits in vain
    net.sound()
    assert p.sent == ["before", "a"]
    serve(net, p, d, "after", 3)


def test_malformed_notifications_are_counted_and_change_nothing(net: Net) -> None:
    p, d = net.producer(), net.consumer()
    serve(net, p, d, "before", 1)
    transport = d.workers[0].worker._agent.transport  # type: ignore[attr-defined]
    theirs = p.workers[0].worker._agent.transport.name  # type: ignore[attr-defined]
    bad = [b"", b"\xff\xfe", b"no colon", b"x" * 22 + b":0", b"x" * 22 + b":-1", b"HB:", b"x" * 100_000, b"::::"]
    params = p.prefill("a", THEIRS, 2)
    for message in bad:
        transport.notify(theirs, message)
    net.net.run()
    for _ in range(3):
        p.step()
    assert p.stats.values["notifications_malformed"] > 0 and "a" not in p.sent
    net.load(d, "a", params, OURS)
    net.run(lambda: "a" in d.received and "a" in p.sent)
    assert d.failed == [] and d.holds(OURS, 2)
    net.sound()


def test_a_peer_that_never_answers_fails_at_its_deadline_and_delays_nobody(net: Net, told: Told) -> None:
    dead, p, d = net.producer("dead"), net.producer(), net.consumer()
    to_dead = dead.prefill("x", THEIRS, 1)
    net.load(d, "x", to_dead, [20, 21, 22, 23])
    announce(d)
    d.workers[0].worker._contacts._client.silence()  # type: ignore[attr-defined]
    for n in range(3):
        serve(net, p, d, f"a{n}", 2 + n)
    assert "x" not in d.received and "handshake" in lines(d, net)
    net.clock.advance(10.0)
    net.run(lambda: "x" in d.received)
    assert d.failed == ["x"] and "no answer in time" in d.reasons["x"]
    net.sound()
    no_answer = "peer dead@", ", handshake: no answer in time"
    told.exactly(
        ("handshake failed, none again for 1 s: ", *no_answer),
        ("load of x failed: ", *no_answer),
        "x was not read within its lease",
    )
    assert dead.sent == ["x"] and dead.stats.values["nixl_num_kv_expired_reqs"] == 1


@pytest.mark.parametrize("epochs", [(5.0, 9e8), (9e8, 5.0)])
def test_monotonic_clocks_of_different_epochs_do_not_meet(net: Net, told: Told, epochs: tuple[float, float]) -> None:
    """Every half of every engine has its own: what crosses is rebased where it arrives."""
    clocks = [ManualClock(start) for start in (*epochs, *reversed(epochs))]
    p, d = net.producer(), net.consumer()
    halves: list[Any] = [p.scheduler, p.workers[0], d.scheduler, d.workers[0]]
    for half, clock in zip(halves, clocks, strict=True):
        half._clock = clock

    def wait(seconds: float) -> None:
        for clock in (*clocks, net.clock):
            clock.advance(seconds)

    serve(net, p, d, "a", 1)
    p.prefill("b", THEIRS, 2)
    p.step()
    wait(LEASE - 1)
    p.step()
    assert p.sent == ["a"], "its lease is not over"
    wait(2.0)
    net.run(lambda: "b" in p.sent)
    assert p.stats.values["nixl_num_kv_expired_reqs"] == 1
    told.exactly("rank 0: b was not read within its lease")
    net.sound()


def test_a_reference_that_came_after_its_lease_is_said_to_whatever_the_clocks_show(net: Net, told: Told) -> None:
    """P's clock is 500 s ahead; its answer to the handshake said so."""
    p, d = net.producer(clock=ManualClock(net.clock() + 500.0)), net.consumer()
    serve(net, p, d, "before", 1)
    (peer,) = d.workers[0].worker._contacts._peers.ready()  # type: ignore[attr-defined]
    for offset, late in ((500.0, True), (None, False), (560.0, True), (440.0, False)):
        peer.clock_offset = offset
        params = p.prefill("a", THEIRS, 2)
        p.step()
        for side in (p, d):
            side.workers[0]._clock.now += LEASE + 5  # type: ignore[attr-defined]
        p.step()
        told.exactly(EXPIRED)
        net.load(d, "r", params, OURS)
        net.run(lambda: "r" in d.received)
        net.end("r")
        said = "after its lease, unless somebody prolonged that"
        assert (said in d.reasons["r"]) is late, d.reasons
        if offset == 500.0:
            assert f"it came here 5.0 s {said}" in d.reasons["r"]
        told.exactly(("load of r failed: peer P@", ", fence: it let go of these blocks before they were read"))
        d.received.clear()
        net.net.run()  # that D is done, which P does not wait for any more
        p.step()
    net.sound()


@pytest.mark.parametrize("whose", ["P", "D"])
def test_a_clock_that_goes_back_delays_deadlines_and_breaks_nothing(net: Net, told: Told, whose: str) -> None:
    p, d = net.producer(clock=ManualClock(1000.0)), net.consumer(clock=ManualClock(1000.0))
    moved: Any = (p if whose == "P" else d).workers[0]
    serve(net, p, d, "before", 1)
    params = p.prefill("a", THEIRS, 2)
    p.step()
    net.load(d, "a", params, OURS)
    announce(d)
    moved._clock.now -= 500.0  # a machine's clock that was set, were it not monotonic
    net.run(lambda: "a" in d.received and "a" in p.sent)
    assert d.failed == [] and d.holds(OURS, 2)
    p.prefill("b", THEIRS, 3)
    p.step()
    for side in (p, d):
        side.workers[0]._clock.now += LEASE + 1  # type: ignore[attr-defined]
    net.run(lambda: "b" in p.sent)
    told.exactly("rank 0: b was not read within its lease")
    serve(net, p, d, "after", 4)
    moved._clock.now += 500.0
    net.sound()


def test_two_thousand_peers_are_read_and_the_table_stays_bounded(net: Net) -> None:
    """One D, 2,000 producers one after the other; at most 50 of them are known at once."""
    extra = {"kv_connector_extra_config": {"kvconn": {"peers_max": 50}}}
    d = net.side("D", {**NIXL_CONSUMER, **extra})
    worker: Any = d.workers[0]
    most = 0
    for n in range(2000):
        net.sides = [d]
        p = net.producer(f"P{n}", num_blocks=4, port=1 + n)
        net.load(d, f"r{n}", p.prefill(f"r{n}", [1], n), [n % 32])
        net.run(lambda n=n, p=p: bool(d.received) and d.received[-1] == f"r{n}" and bool(p.sent))  # type: ignore[misc]
        assert d.holds([n % 32], n)
        most = max(most, len(worker.worker._contacts._peers))
        net.end(f"r{n}")
        p.close()
    assert d.failed == [] and len(d.received) == 2000
    assert 50 <= most <= 51
    assert len(worker.worker._agent.transport._links) <= 51
    net.sides = [d]
    net.sound()
