"""The loopback is as unkind as the facts say (docs/design.md, section 2), and conforms as NIXL does."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvconn.errors import TransportError
from kvconn.testing import FaultPolicy, FaultTransport, ManualClock, check_transport
from kvconn.testing.checks import PAGE, TransportPair
from kvconn.transport.base import HandleState, MemoryRegion, Transport
from kvconn.transport.loopback import LoopbackNet

DONE, ERR, PENDING = HandleState.DONE, HandleState.ERR, HandleState.PENDING


class World(TransportPair):
    """A net with a reader and a peer on it."""

    def __init__(
        self, wrap: Callable[[Transport], Transport] = lambda t: t, progress: Any = "pump", **net: Any
    ) -> None:
        self.net = LoopbackNet(**net)
        reader, peer = (wrap(self.net.transport(name, progress=progress)) for name in ("reader", "peer"))
        super().__init__(reader, peer, self.net.run, 2.0)

    def landed(self) -> int:
        return int(np.count_nonzero(self.ours))

    def state(self, handle: int) -> HandleState:
        return self.reader.poll(handle)

    def flights(self) -> int:
        return len(self.net.arrivals())


@pytest.fixture
def world() -> Iterator[World]:
    one = World(cuts=4)
    yield one
    one.close()


def test_it_conforms() -> None:
    seeds = itertools.count()
    check_transport(lambda: World(seed=next(seeds)))
    check_transport(lambda: World(seed=next(seeds), progress="poll"))
    check_transport(lambda: World(wrap=lambda t: FaultTransport(t, FaultPolicy()), seed=next(seeds)))


@pytest.mark.parametrize("progress", ["pump", "poll"])
def test_nixl_in_one_process_conforms_to_the_same_checks(progress: Any) -> None:
    from kvconn.transport.nixl import NixlTransport

    check_transport(lambda: TransportPair(NixlTransport(progress), NixlTransport(progress), drive=lambda: None))


class Sloppy(FaultTransport):
    """Says DONE before it is so."""

    def poll(self, handle: int) -> HandleState:
        self.inner.poll(handle)
        return DONE


def test_the_checks_catch_a_done_that_is_early() -> None:
    with pytest.raises(AssertionError, match="bytes: other bytes"):
        check_transport(lambda: World(wrap=lambda t: Sloppy(t, FaultPolicy())))


# --- movement


def test_nothing_moves_unless_stepped_and_a_part_at_a_time(world: World) -> None:
    handle = world.post((0, 0, 100), (PAGE, PAGE, 100))
    parts = world.flights()
    assert parts >= 2 and world.landed() == 0
    seen = []
    while world.state(handle) is PENDING:
        assert world.net.step()
        seen.append(world.landed())
    assert len(seen) == parts and sorted(set(seen)) == seen and seen[-1] == 200
    assert not world.net.step() and world.net.run() == 0


def order(seed: int) -> list[str]:
    world = World(seed=seed)
    for index in range(4):
        world.post((index * PAGE, 0, PAGE))
        world.reader.notify("peer", b"%d" % index)
    out = []
    while arrivals := world.net.arrivals():
        world.net.step()
        out.append((set(arrivals) - set(world.net.arrivals()) or {"one of many"}).pop())
    world.close()
    return out


def test_the_order_is_the_seeds() -> None:
    assert order(1) == order(1)
    assert len({tuple(order(seed)) for seed in range(5)}) == 5


def test_the_order_can_be_chosen(world: World) -> None:
    first, second = world.post((0, 0, 8)), world.post((8, 8, 8))
    while world.state(second) is PENDING:
        assert world.net.step(choice=-1)
    assert world.state(first) is PENDING
    assert world.net.run(limit=1) == 1


def test_a_word_may_be_torn() -> None:
    world = World(torn=1.0)
    handle = world.post((0, 0, 8))
    world.net.step()
    assert world.landed() == 4 and world.state(handle) is PENDING
    world.net.step()
    assert world.landed() == 8 and world.state(handle) is DONE
    world.close()


def test_without_tearing_a_word_lands_at_once() -> None:
    world = World(torn=0.0)
    world.post((0, 0, 8))
    world.net.step()
    assert world.landed() == 8
    world.close()


def test_bytes_are_those_of_the_moment_of_landing(world: World) -> None:
    world.post((0, 0, 8))
    world.theirs[:8] = 9
    world.net.run()
    assert bytes(world.ours[:8]) == b"\x09" * 8


# --- F1


def test_f1_forgetting_a_handle_and_a_peer_stops_nothing(world: World) -> None:
    handle = world.post((0, 0, 100), (PAGE, PAGE, 100))
    assert world.net.fail_part(handle) and world.state(handle) is ERR
    world.reader.release(handle)
    world.reader.remove_peer("peer")
    assert world.net.under_way() == [handle] and world.landed() == 0
    assert world.net.may_write(world.ours.ctypes.data, 2 * PAGE) == [handle]
    world.net.run()
    assert world.landed() >= 100 and world.net.may_write(world.ours.ctypes.data, 2 * PAGE) == []


def test_what_is_pending_may_not_be_released_nor_its_peer_removed(world: World) -> None:
    handle = world.post((0, 0, 8))
    with pytest.raises(TransportError, match="still on their way"):
        world.reader.release(handle)
    with pytest.raises(TransportError, match="not known to be quiet"):
        world.reader.remove_peer("peer")


def test_f1_a_stopped_peer_makes_reads_wait_and_then_they_land(world: World) -> None:
    world.net.stop("peer")
    handle = world.post((0, 0, 100))
    assert world.net.run() == 0 and world.state(handle) is PENDING and not world.reader.peer_gone("peer")
    assert world.net.may_write(world.ours.ctypes.data + 99, 1) == [handle]
    assert world.net.may_write(world.ours.ctypes.data + 100, 1) == []
    world.net.cont("peer")
    world.net.run()
    assert world.state(handle) is DONE and world.landed() == 100


@pytest.mark.parametrize("stopped", [False, True])
def test_f1_a_dead_peer_writes_nothing_and_its_reads_are_err(world: World, stopped: bool) -> None:
    handle = world.post((0, 0, 100), (PAGE, PAGE, 100))
    world.net.step()
    if stopped:
        world.net.stop("peer")
    landed = world.landed()
    world.net.kill("peer")
    assert world.state(handle) is PENDING and not world.reader.peer_gone("peer")  # nobody told us yet
    world.net.run()
    assert world.state(handle) is ERR and world.reader.peer_gone("peer") and "lost" in world.reader.reason(handle)
    assert world.landed() == landed
    with pytest.raises(TransportError, match="failed"):
        world.reader.notify("peer", b"x")


def test_a_dead_peer_of_whom_nothing_is_asked_is_not_known_to_be_gone(world: World) -> None:
    world.net.kill("peer")
    world.net.run()
    assert not world.reader.peer_gone("peer")
    world.reader.notify("peer", b"x")  # goes nowhere
    handle = world.post((0, 0, 8))
    world.net.run()
    assert world.state(handle) is ERR and world.reader.peer_gone("peer")


def test_f1_after_our_own_end_nothing_lands(world: World) -> None:
    handle = world.post((0, 0, 100))
    world.peer.post_read("reader", *(np.array([[m.ctypes.data, 8]], np.int64) for m in (world.theirs, world.ours)))
    world.reader.close()
    world.net.run()
    assert world.landed() == 0 and world.reader.poll(handle) is ERR
    assert world.peer.peer_gone("reader")
    with pytest.raises(TransportError, match="is closed"):
        world.post((0, 0, 8))


# --- F2


def test_f2_without_progress_everything_waits_for_polls() -> None:
    world = World(progress="poll", torn=0.0)
    world.post((0, 0, 8))
    world.reader.notify("peer", b"hello")
    assert world.net.run() == 0
    world.reader.notifications()
    assert world.net.run() == 0  # the passive side has not polled
    heard = world.peer.notifications()
    assert world.net.run() == 1  # one event a poll
    for _ in range(4):
        world.reader.notifications()
        heard += world.peer.notifications()
        world.net.run()
    assert heard == [("reader", b"hello")] and world.landed() == 8
    world.close()


# --- F4


def test_what_is_under_way_can_be_asked_for_by_either_end(world: World) -> None:
    handle = world.post((0, 128, 32))
    there, here = world.theirs.ctypes.data, world.ours.ctypes.data
    assert world.net.reading("peer", there + 128, 1) == [handle]
    assert world.net.reading("peer", there + 160, 1) == world.net.reading("reader", there, 1) == []
    places = world.net.writes("reader")
    assert sum(length for _, length in places) == 32 and min(places)[0] == here
    assert world.net.writes("peer") == []
    world.net.run()
    assert world.net.reading("peer", there + 128, 32) == world.net.writes("reader") == []


def test_healed_everybody_continues_and_no_ordered_fault_waits(world: World) -> None:
    world.net.stop("peer")
    world.net.raise_on_post("reader", 0)
    world.net.fates.append(())
    world.net.heal()
    handle = world.post((0, 0, 8))
    world.reader.notify("peer", b"x")
    world.net.run()
    assert world.state(handle) is DONE and world.peer.notifications() == [("reader", b"x")]


def test_f4_err_while_other_parts_still_run(world: World) -> None:
    handle = world.post((0, 0, 100), (PAGE, PAGE, 100))
    assert world.net.fail_part(handle)
    assert world.state(handle) is ERR and not world.reader.peer_gone("peer") and world.landed() == 0
    world.net.run()
    assert world.landed() >= 100 and world.state(handle) is ERR
    assert not world.net.fail_part(handle)


@pytest.mark.parametrize("parts", [1, 2])
def test_f4_a_post_that_raises_may_have_posted(world: World, parts: int) -> None:
    world.net.raise_on_post("reader", parts)
    with pytest.raises(TransportError) as caught:
        world.post((0, 0, 100), (PAGE, PAGE, 100), (2 * PAGE, 0, 100))
    handle = caught.value.handle
    assert handle is not None and world.state(handle) is ERR and world.flights() == parts
    world.net.run()
    assert world.landed() > 0 and world.state(handle) is ERR
    assert world.state(world.post((0, 0, 8))) is PENDING  # the next one is good


def test_a_post_that_raises_without_a_handle_has_posted_nothing(world: World) -> None:
    world.net.raise_on_post("reader", 0)
    with pytest.raises(TransportError) as caught:
        world.post((0, 0, 100))
    assert caught.value.handle is None and world.flights() == 0


def test_f4_a_failed_connection_counts_as_gone_with_the_peer_alive(world: World) -> None:
    handle = world.post((0, 0, 100))
    world.net.cut("reader", "peer")
    world.net.run()
    assert world.state(handle) is ERR and world.reader.peer_gone("peer") and world.landed() == 0
    world.reader.release(handle)
    world.reader.remove_peer("peer")
    world.reader.add_peer(world.peer.metadata())
    assert not world.reader.peer_gone("peer")
    assert world.ended(world.post((0, 0, 8))) is DONE


def test_nothing_is_posted_on_a_connection_that_failed_before_we_heard_of_it(world: World) -> None:
    world.net.cut("reader", "peer")
    handle = world.post((0, 0, 100))
    assert world.state(handle) is PENDING and world.net.under_way() == []
    world.net.run()
    assert world.state(handle) is ERR and world.landed() == 0


# --- bounds


def test_reading_what_nobody_registered_is_err_and_lands_nothing(world: World) -> None:
    handle = world.post((0, 1 << 16, 8))
    world.net.run()
    assert world.state(handle) is ERR and "registered no memory" in world.reader.reason(handle)
    assert world.landed() == 0


def test_a_local_place_that_is_not_ours_is_refused(world: World) -> None:
    with pytest.raises(TransportError, match="not registered"):
        world.post(((1 << 16) - 4, 0, 8))
    with pytest.raises(TransportError, match="DRAM"):
        world.reader.register([MemoryRegion(1 << 20, 8, "VRAM")])
    assert world.flights() == 0


# --- notifications


def test_notifications_are_lost_repeated_late_and_out_of_order() -> None:
    clock = ManualClock()
    world = World(clock=clock)
    world.net.fates.extend([(), (0.0, 0.0), (5.0,)])
    for message in (b"lost", b"twice", b"late", b"plain"):
        world.reader.notify("peer", message)
    while world.net.step(choice=-1):
        pass
    assert [m for _, m in world.peer.notifications()] == [b"plain", b"twice", b"twice"]
    clock.advance(4.9)
    assert world.net.run() == 0
    clock.advance(0.1)
    world.net.run()
    assert world.peer.notifications() == [("reader", b"late")]
    world.close()


def test_odds_of_fates() -> None:
    clock = ManualClock()
    world = World(clock=clock, loss=0.3, duplication=0.3, delay=2.0)
    for index in range(200):
        world.reader.notify("peer", b"%d" % index)
    world.net.run()
    early = world.peer.notifications()
    clock.advance(2.0)
    world.net.run()
    got = [m for _, m in early + world.peer.notifications()]
    assert len(early) < 10 and 100 < len(set(got)) < 180 and len(got) > len(set(got)) + 20
    world.close()


def test_what_the_dead_sent_may_still_arrive(world: World) -> None:
    world.peer.notify("reader", b"last words")
    world.net.kill("peer")
    world.net.run()
    assert world.reader.notifications() == [("peer", b"last words")]


# --- the fault transport and the clock


def test_faults_of_the_decorator() -> None:
    policy = FaultPolicy(
        fail_posts=frozenset({0}),
        never_finish=frozenset({1}),
        drop=frozenset({0}),
        duplicate=frozenset({1}),
        delay={2: 1},
    )
    world = World(wrap=lambda t: FaultTransport(t, policy) if t.name == "reader" else t)
    with pytest.raises(TransportError, match="as ordered") as caught:
        world.post((0, 0, 8))
    assert caught.value.handle is None
    endless, good = world.post((0, 0, 8)), world.post((8, 8, 8))
    for message in (b"a", b"b", b"c", b"d"):
        world.reader.notify("peer", message)
    while world.net.step(choice=0):
        pass
    assert world.state(endless) is PENDING and world.state(good) is DONE and world.landed() == 16
    with pytest.raises(TransportError, match="never finishes"):
        world.reader.release(endless)
    world.reader.release(good)
    assert [m for _, m in world.peer.notifications()] == [b"b", b"b", b"d", b"c"]
    assert repr(world.reader).endswith("posts=3 endless=1 held=0)")
    world.close()


def test_the_clock_stands_until_told() -> None:
    clock = ManualClock(5.0)
    assert clock() == clock() == 5.0
    assert clock.advance(1.5) == clock() == 6.5
    with pytest.raises(ValueError, match="back"):
        clock.advance(-1.0)
    assert repr(clock) == "ManualClock(6.5)"


def test_reprs_are_one_readable_line(world: World) -> None:
    world.post((0, 0, 8))
    assert repr(world.reader) == (
        "<LoopbackTransport reader progress=pump regions=1 peers=1 reads=1 held notifications=0 queued>"
    )
    world.net.stop("peer")
    assert repr(world.net).startswith("<LoopbackNet agents=2 stopped=1 under way=")
    assert repr(world.net).endswith("of which 0 may arrive>")


def test_public_names_of_testing() -> None:
    import kvconn.testing

    assert all(getattr(kvconn.testing, name) and name in dir(kvconn.testing) for name in kvconn.testing.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = kvconn.testing.Nothing
