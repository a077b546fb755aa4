"""A first contact is on nobody else's path: while a peer's agents are being loaded, steps end and nothing is judged.

Loading is held open by the test, as long as it likes: whoever waited for it would wait for ever.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import zmq

from kvconn.config import LIMITS, ParallelConfig
from kvconn.errors import TransportError
from kvconn.geometry import Place
from kvconn.nixl.agent import _Meeting
from kvconn.nixl.handshake import Greeting, Offer
from kvconn.nixl.sideclient import MAX_PENDING, HandshakeClient, HandshakeResult
from kvconn.nixl.sideserver import HandshakeServer
from kvconn.params import PeerKey
from kvconn.testing import LoopbackNet
from kvconn.transport.loopback import LoopbackTransport
from kvconn.trust import Trust
from tests.nixl.pairs import Net
from tests.support import Side, free_port, wait_until
from tests.told import listening

BLOCKS = [3, 4]


class _Slow(LoopbackTransport):
    """Loads a peer when the test says so, and refuses whatever else is asked meanwhile: that would have waited."""

    meets_slowly = True

    def __init__(self, net: LoopbackNet, name: str) -> None:
        super().__init__(net, name, "pump")
        self.may_load = threading.Event()
        self.may_load.set()
        self.loading = threading.Event()
        self.fails = False
        self.begun = 0

    def add_peer(self, blob: bytes) -> str:
        self.begun += 1
        self.loading.set()
        try:
            assert self.may_load.wait(60)
            if self.fails:
                raise TransportError("add_peer: fails, as ordered")
            return super().add_peer(blob)
        finally:
            self.loading.clear()

    def _open(self, what: str) -> None:
        own = threading.current_thread().name == "kvconn-introduction"
        assert own or not self.loading.is_set(), f"{what}: the step thread would wait for the introduction"
        super()._open(what)

    def poll(self, handle: int) -> Any:
        self._open("poll")
        return super().poll(handle)

    def notifications(self) -> list[tuple[str, bytes]]:
        self._open("notifications")
        return super().notifications()


class Pair:
    """Two producers and one slow consumer that knows the first already."""

    def __init__(self, heads: int = 1) -> None:
        self.net = Net()
        self.p, self.q = (self.net.producer(name, heads=heads) for name in "PQ")
        self.d = self.net.consumer("D", heads=heads, make_transport=self._make)
        self.load("warm", self.p)
        self.until(lambda: "warm" in self.d.received)

    def _make(self) -> _Slow:
        self.agent = _Slow(self.net.net, f"slow-{len(self.net.net.agents)}")
        self.net.net.agents[self.agent.name] = self.agent
        return self.agent

    def load(self, id: str, p: Side) -> None:
        params = p.prefill(id, BLOCKS, seed=len(id))
        assert params is not None
        self.net.load(self.d, id, params, BLOCKS)

    def until(self, condition: Any) -> None:
        def one() -> bool:
            self.net.net.run()
            for side in self.net.sides:
                side.step()
            return bool(condition())

        wait_until(one)

    def begin_to_load(self, id: str, p: Side) -> None:
        """A request of a peer that is not known yet: now its agents are being loaded."""
        self.agent.may_load.clear()
        self.load(id, p)
        self.until(self.agent.loading.is_set)


@pytest.fixture
def pair() -> Iterator[Pair]:
    one = Pair()
    yield one
    one.agent.may_load.set()
    one.net.close()


def test_steps_end_while_a_peer_is_being_loaded_and_others_requests_go_on_after_it(pair: Pair) -> None:
    pair.begin_to_load("new", pair.q)
    pair.load("old", pair.p)  # of a peer that is known: its read could be posted, but not now
    aborted = pair.p.prefill("aborted", [7], seed=9)
    pair.net.load(pair.d, "aborted", aborted, [7])
    pair.net.end("aborted")
    for _ in range(5):
        pair.net.net.run()
        pair.d.step()  # would raise if it asked anything of the agent
    assert not {"new", "old"} & set(pair.d.received)
    pair.agent.may_load.set()
    pair.until(lambda: {"new", "old"} <= set(pair.d.received))
    assert pair.d.failed == []
    pair.net.sound()


def test_a_deadline_that_passes_while_our_agent_is_busy_is_judged_after_what_came_in_time(pair: Pair) -> None:
    pair.load("old", pair.p)
    pair.until(lambda: pair.d.workers[0].worker._reader._posted)  # type: ignore[attr-defined]
    pair.begin_to_load("new", pair.q)
    pair.net.net.run()  # all of it has come
    pair.net.clock.advance(61)
    for _ in range(3):
        pair.d.step()
    assert pair.d.failed == []
    pair.agent.may_load.set()
    pair.until(lambda: "old" in pair.d.received)
    assert "old" not in pair.d.failed


def test_many_answers_at_once_are_one_introduction_after_another_with_steps_between(pair: Pair) -> None:
    others = [pair.net.producer(f"P{i}") for i in range(5)]
    pair.agent.may_load.clear()
    for i, p in enumerate(others):
        pair.load(f"r{i}", p)
    pair.until(pair.agent.loading.is_set)
    for _ in range(3):
        pair.d.step()
    assert pair.agent.begun == 2  # the first peer's, and one of the five
    pair.agent.may_load.set()
    pair.until(lambda: len(pair.d.received) == 6)
    assert pair.agent.begun == 6
    pair.net.sound()


def test_answers_of_several_peers_are_looked_at_a_peer_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(heads=2)
    try:
        others = [pair.net.producer(f"P{i}", heads=2, parallel=ParallelConfig(tp=2)) for i in range(4)]
        heard: list[tuple[str, int]] = []
        answered = Greeting.answered

        def count(greeting: Greeting, place: Place, frame: bytes) -> list[Place]:
            heard.append((greeting._name, pair.d.seq))
            return answered(greeting, place, frame)

        monkeypatch.setattr(Greeting, "answered", count)
        for i, p in enumerate(others):
            pair.load(f"r{i}", p)
        pair.until(lambda: len(pair.d.received) == 5)
        assert pair.d.failed == [] and len(heard) == 8
        peers_of_a_step = {step: {name for name, of in heard if of == step} for _, step in heard}
        assert {len(names) for names in peers_of_a_step.values()} == {1}
        pair.net.sound()
    finally:
        pair.net.close()


def test_an_agent_that_was_just_introduced_outlives_another_address_of_its_engine(pair: Pair) -> None:
    contacts, agent = pair.d.workers[0].worker._contacts, pair.d.workers[0].worker._agent  # type: ignore[attr-defined]
    (known,) = contacts._peers.ready()
    elsewhere = PeerKey(known.key.engine, "another", 9, 1, 1, 1)
    got: list[Any] = []
    contacts._peers.want(elsewhere, lambda peer, why, now: got.append((peer, why)), 0.0)
    blob = pair.p.workers[0].worker._agent.transport.metadata()  # type: ignore[attr-defined]
    contacts._next = contacts._peers.get(elsewhere), [Offer(blob, known.sources[0].plan)]
    contacts.meet(0.0)
    wait_until(lambda: not agent.busy)
    contacts.drop(known.agents, "it could not be notified")  # before the poll that hears of the introduction
    contacts.met(1.0)
    assert got == [(contacts._peers.get(elsewhere), "")]
    pair.agent.notify(got[0][0].sources[0].agent, b"it is there")  # raises when it is not


def test_a_peer_that_cannot_be_loaded_fails_its_requests_alone(pair: Pair) -> None:
    pair.agent.fails = True
    pair.begin_to_load("new", pair.q)
    pair.load("old", pair.p)
    pair.agent.may_load.set()
    pair.until(lambda: {"new", "old"} <= set(pair.d.received))
    assert pair.d.failed == ["new"]
    assert "as ordered" in pair.d.reasons["new"]
    pair.net.sound()


def test_a_worker_that_ends_waits_for_the_introduction(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    pair.begin_to_load("new", pair.q)
    pair.net.sides.remove(pair.d)
    asked, wait = threading.Event(), _Meeting.wait
    waited: list[tuple[bool, bool]] = []

    def waits(meeting: _Meeting) -> None:
        asked.set()
        wait(meeting)
        waited.append((meeting.over, pair.agent._closed))

    monkeypatch.setattr(_Meeting, "wait", waits)
    ending = threading.Thread(target=pair.d.close)
    ending.start()
    assert asked.wait(20)
    assert not pair.agent._closed
    pair.agent.may_load.set()
    ending.join(20)
    assert waited == [(True, False)]
    assert not ending.is_alive() and pair.agent._closed


def test_an_introduction_past_its_deadline_is_said_once_counted_and_explained(pair: Pair) -> None:
    pair.begin_to_load("new", pair.q)
    worker: Any = pair.d.workers[0].worker  # type: ignore[attr-defined]
    with listening() as told:
        pair.d.step()
        assert told.take() == [] and not _introductions(worker, pair)
        pair.net.clock.advance(LIMITS.handshake)
        for _ in range(3):
            pair.d.step()
        told.exactly(("NIXL has not loaded the agents of Q@", "within 10 s"))
    assert pair.d.stats.values["introductions_overdue"] == 1
    assert len(_introductions(worker, pair)) == 1
    pair.agent.may_load.set()
    pair.until(lambda: "new" in pair.d.received)
    assert pair.d.failed == [] and not _introductions(worker, pair)


def test_a_done_that_comes_while_the_agent_is_made_anew_is_not_lost(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker: Any = pair.p.workers[0].worker  # type: ignore[attr-defined]
    pair.until(lambda: worker._leases.explain(0.0) == [])
    pair.load("read", pair.p)
    pair.until(lambda: worker._leases.explain(0.0) != [])
    pair.net.sides.remove(pair.p)
    pair.until(lambda: "read" in pair.d.received)
    pair.net.sides.append(pair.p)
    now = pair.net.clock()
    why = iter(["a test wants it"])

    def over(now: float) -> str | None:
        pair.net.net.run()  # it comes after this poll has asked for notifications
        return next(why, None)

    monkeypatch.setattr(worker._reader, "over_quarantine", over)
    worker._next_due = now  # as after a step
    assert worker.poll(now).finished_sending == frozenset()
    assert worker.meter.take().values["agent_recreations"] == 1
    assert worker.poll(now).finished_sending == {"read"}


def _introductions(worker: Any, pair: Pair) -> list[str]:
    return [line for line in worker.explain(pair.net.clock()) if line.startswith("introduction of Q@")]


def test_three_thousand_peers_asked_at_once_all_answer() -> None:
    port = free_port()
    server = HandshakeServer("127.0.0.1", port, {(0, 0): b"me"}, Trust(rate=100_000))
    client = HandshakeClient(100.0)
    assert client._context.get(zmq.MAX_SOCKETS) > 8 * MAX_PENDING  # three each, and those that libzmq still closes
    try:
        asks = {client.start(PeerKey("P", "127.0.0.1", port, 1, 1, 1)) for _ in range(3000)}
        got: list[HandshakeResult] = []
        wait_until(lambda: got.extend(client.results()) or len(got) == len(asks), 100.0)  # type: ignore[func-returns-value]
        assert {one.ask for one in got} == asks
        assert {one.why for one in got} == {""}
    finally:
        client.close()
        server.close()
