"""Twenty producers and twenty consumers, requests between all pairs; ``python -m bench scale`` does it with 200."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.nixl.fleet import Fleet

SIZE = 20
#: what grows with the peers that are known, or is memory of a fixed size
OF_A_SIZE = {
    "Peers._peers": "peers",
    "LoopbackTransport._links": "peers",
    "FenceSlots._free": "blocks",
    "Checks._free": "scratch words",
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
