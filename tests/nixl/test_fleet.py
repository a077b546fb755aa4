"""Twenty producers and twenty consumers, requests between all pairs; ``python -m bench scale`` does it with 200."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from kvconn.nixl.peers import Peer
from tests.nixl.fleet import Fleet

SIZE = 20
#: what grows with the peers that are known, or is memory of a fixed size
OF_A_SIZE = {
    "Peers._peers": "peers",
    "LoopbackTransport._links": "peers",
    "KVOutputAggregator._sent": "bounded memory",
}


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    one = Fleet(SIZE)
    yield one
    one.close()


def test_requests_between_all_pairs_leave_tables_that_are_small_all_along_and_empty_at_the_end(fleet: Fleet) -> None:
    for turn in range(SIZE):
        fleet.round(turn)
    assert fleet.requests == SIZE * SIZE
    assert fleet.peers() == SIZE
    assert fleet.over(4, OF_A_SIZE) == {}
    fleet.sound()


def test_a_producer_that_comes_back_costs_its_readers_one_handshake(fleet: Fleet) -> None:
    fleet.round(0)
    fleet.restart(0)
    fleet.round(0)
    fleet.round(SIZE - 1)  # the next consumer meets the new one
    assert fleet.peers() == 3  # the dead one stays until engine_ttl or until something is asked of it
    fleet.sound()


def test_forgetting_many_peers_looks_at_those_that_stay_once(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    for turn in range(SIZE):
        fleet.round(turn)
    d = fleet.consumers[0]
    contacts = d.workers[0].worker._contacts  # type: ignore[attr-defined]
    fleet.net.clock.advance(3601)
    for peer in contacts._peers.ready()[::2]:
        peer.used(fleet.net.clock())
    looks = Counter[str]()
    agents = Peer.agents.fget
    monkeypatch.setattr(Peer, "agents", property(lambda peer: looks.update([peer.name]) or agents(peer)))
    d.step()
    assert len(contacts._peers) == SIZE // 2
    assert max(looks.values()) == 1
    assert len(d.workers[0].worker._agent.transport._links) == SIZE // 2  # type: ignore[attr-defined]
