"""The state machine of a peer, and the table of peers."""

from __future__ import annotations

from typing import Any

import pytest

from kvconn.nixl.peers import Peer, PeerKey, Peers, PeerState, Source, Work
from kvconn.nixl.plan import Plan

KEY = PeerKey("P", "10.0.0.1", 5600)
PLAN = Plan((), 8)
SOURCE = Source("agent", PLAN)


class Recorder:
    """Work that remembers what became of it."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, bool, str, float]] = []

    def work(self, name: str) -> Work:
        def run(peer: Peer | None, why: str, now: float) -> None:
            self.calls.append((name, peer is not None, why, now))

        return run


@pytest.fixture
def ran() -> Recorder:
    return Recorder()


def key(index: int) -> PeerKey:
    return PeerKey(f"P{index}", "h", 1 + index)


def ready_peer(now: float = 0.0) -> Peer:
    peer = Peer(KEY)
    peer.want(lambda *_: None, now, 10)
    peer.ready((SOURCE,), now)
    return peer


class TestStates:
    def test_the_first_want_starts_one_handshake_and_all_wait_for_it(self, ran: Recorder) -> None:
        peer = Peer(KEY)
        assert peer.state is PeerState.UNKNOWN
        assert [peer.want(ran.work(name), 1.0, 10) for name in "abc"] == [True, False, False]
        assert (peer.state, ran.calls, peer.idle) == (PeerState.HANDSHAKING, [], False)
        peer.ready((SOURCE,), 2.0)
        assert ran.calls == [(name, True, "", 2.0) for name in "abc"]
        assert (peer.state, peer.sources, peer.idle) == (PeerState.READY, (SOURCE,), True)

    def test_work_for_a_ready_peer_runs_at_once(self, ran: Recorder) -> None:
        peer = ready_peer()
        assert not peer.want(ran.work("a"), 5.0, 10)
        assert (ran.calls, peer.last_used) == ([("a", True, "", 5.0)], 5.0)

    def test_a_failed_handshake_fails_exactly_what_waited(self, ran: Recorder) -> None:
        peer = Peer(KEY)
        peer.want(ran.work("a"), 1.0, 10)
        peer.failed("no answer", 2.0)
        assert ran.calls == [("a", False, "no answer", 2.0)]
        assert (peer.state, peer.idle) == (PeerState.INVALID, True)

    def test_an_invalid_peer_refuses_with_the_reason_until_its_backoff_is_over(self, ran: Recorder) -> None:
        peer = Peer(KEY)
        peer.want(ran.work("a"), 0.0, 10)
        peer.failed("no answer", 0.0)
        assert not peer.want(ran.work("b"), 0.99, 10)
        assert ran.calls[-1] == ("b", False, "no answer", 0.99)
        assert peer.want(ran.work("c"), 1.0, 10)
        assert peer.state is PeerState.HANDSHAKING
        assert len(ran.calls) == 2

    def test_the_backoff_doubles_up_to_a_minute_and_starts_again_after_success(self) -> None:
        peer, now, waits = Peer(KEY), 0.0, []
        for _ in range(8):
            assert peer.want(lambda *_: None, now, 10)
            peer.failed("down", now)
            wait = next(w for w in range(1, 100) if peer._retry_at <= now + w)
            waits.append(wait)
            assert not peer.want(lambda *_: None, now + wait - 0.01, 10)
            now += wait
        assert waits == [1, 2, 4, 8, 16, 32, 60, 60]
        assert peer.want(lambda *_: None, now, 10)
        peer.ready((SOURCE,), now)
        peer.failed("its agent was made anew", now)
        assert peer._retry_at == now + 1.0

    def test_waiting_is_bounded_and_the_refused_one_is_told_at_once(self, ran: Recorder) -> None:
        peer = Peer(KEY)
        for name in "ab":
            peer.want(ran.work(name), 1.0, 2)
        assert not peer.want(ran.work("c"), 1.0, 2)
        assert ran.calls == [("c", False, "2 requests wait for this peer's handshake already", 1.0)]
        peer.ready((SOURCE,), 2.0)
        assert [call[0] for call in ran.calls] == ["c", "a", "b"]

    def test_a_draining_peer_takes_no_new_work(self, ran: Recorder) -> None:
        peer = ready_peer()
        peer.drain("evicted")
        assert not peer.want(ran.work("a"), 1.0, 10)
        assert (ran.calls, peer.state) == ([("a", False, "evicted", 1.0)], PeerState.DRAINING)

    def test_work_that_wants_the_peer_again_is_not_lost(self, ran: Recorder) -> None:
        peer = Peer(KEY)

        def again(ready: Peer | None, why: str, now: float) -> None:
            ran.work("first")(ready, why, now)
            peer.want(ran.work("second"), now, 10)

        peer.want(again, 0.0, 10)
        peer.ready((SOURCE,), 1.0)
        assert [call[0] for call in ran.calls] == ["first", "second"]

    def test_repr_is_one_line(self, ran: Recorder) -> None:
        peer = Peer(KEY)
        peer.want(ran.work("a"), 0.0, 10)
        assert repr(peer) == "Peer(P@10.0.0.1:5600 handshaking posted=0 waiting=1)"


class TestTable:
    def test_peers_are_told_apart_by_engine_address_and_sizes(self, ran: Recorder) -> None:
        peers = Peers()
        changes: list[dict[str, Any]] = [
            {},
            {"engine": "Q"},
            {"host": "other"},
            {"port": 1},
            {"tp": 2},
            {"pp": 2},
            {"dcp": 2},
        ]
        keys = [KEY._replace(**change) for change in changes]
        assert all(peers.want(k, ran.work("w"), 0.0) for k in keys)
        assert not peers.want(KEY, ran.work("w"), 0.0)
        assert len(peers) == 7

    def test_one_peers_failure_is_not_anothers(self, ran: Recorder) -> None:
        peers = Peers()
        for index in range(2):
            peers.want(key(index), ran.work(f"w{index}"), 0.0)
        first, second = peers.get(key(0)), peers.get(key(1))
        assert first is not None
        assert second is not None
        first.failed("down", 1.0)
        assert [call[0] for call in ran.calls] == ["w0"]
        second.ready((SOURCE,), 1.0)
        assert (peers.ready(), repr(peers)) == ([second], "Peers(invalid=1 ready=1)")

    def table(self, n: int, peers_max: int = 100) -> Peers:
        """``n`` ready peers, the first the longest idle."""
        peers = Peers(peers_max)
        for index in range(n):
            peers.want(key(index), lambda *_: None, float(index))
            peer = peers.get(key(index))
            assert peer is not None
            peer.ready((Source(f"agent{index}", PLAN),), float(index))
        return peers

    def test_over_the_bound_the_longest_idle_go_and_take_no_new_work(self) -> None:
        peers = self.table(5, peers_max=3)
        evicted = peers.evict(now=10.0, ttl=1000.0)
        assert [peer.key for peer in evicted] == [key(0), key(1)]
        assert {peer.state for peer in evicted} == {PeerState.DRAINING}
        assert (len(peers), peers.get(key(0))) == (3, None)

    def test_idle_past_the_ttl_go_whatever_the_bound(self) -> None:
        peers = self.table(4)
        assert [peer.key for peer in peers.evict(now=11.5, ttl=10.0)] == [key(0), key(1)]
        assert peers.evict(now=11.5, ttl=10.0) == []

    def test_a_busy_peer_is_never_evicted_however_old_and_however_full_the_table(self, ran: Recorder) -> None:
        peers = self.table(3, peers_max=1)
        posted, other, waiting = (peers.get(key(i)) for i in range(3))
        assert posted is not None
        assert waiting is not None
        posted.posted = 1
        waiting.failed("down", 0.0)
        assert peers.want(key(2), ran.work("w"), 5.0)  # handshaking, with work that waits
        assert peers.evict(now=1e6, ttl=1.0) == [other]
        assert len(peers) == 2
        posted.posted = 0
        assert peers.evict(now=1e6, ttl=1.0) == [posted]
        assert peers.evict(now=1e6, ttl=1.0) == []

    def test_an_evicted_peer_starts_from_the_beginning(self, ran: Recorder) -> None:
        peers = self.table(1)
        peers.evict(now=1e6, ttl=1.0)
        assert peers.want(key(0), ran.work("w"), 1e6)

    def test_clear_hands_over_every_peer_so_that_what_waits_can_be_failed(self, ran: Recorder) -> None:
        peers = self.table(1)
        peers.want(key(7), ran.work("w"), 0.0)
        cleared = peers.clear()
        assert (len(cleared), len(peers)) == (2, 0)
        for peer in cleared:
            peer.failed("the agent was made anew", 1.0)
        assert ran.calls == [("w", False, "the agent was made anew", 1.0)]
