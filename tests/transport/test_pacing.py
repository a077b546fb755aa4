"""How the pump waits: decided by what its rounds found, time as an argument; and a pump that waits on real files."""

from __future__ import annotations

import errno
import os
import select
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from kvconn.transport import pacing
from kvconn.transport.pacing import Hearing, Pacer, Round, Wait
from kvconn.transport.pump import Pump, _Ears, event_sets

INTERVAL = 200e-6
#: longer than a test may take
FOREVER = 1e6
DEADLINE = 20.0


class Driver:
    """A pacer whose rounds take no time and whose waits take what it says."""

    def __init__(self, listening: bool) -> None:
        self.pacer = Pacer(INTERVAL, listening)
        self.now = 100.0

    def round(self, found: Round = Round.NOTHING, ready: bool = False, posted: int = 0) -> Wait:
        if found is Round.FOUND:
            self.pacer.moved(self.now)
        wait = self.pacer.next(found, ready, posted, self.now)
        self.now += wait.seconds or 1e-5
        return wait

    def rest(self) -> Wait:
        """Nothing happens for a second."""
        for _ in range(10_000):
            wait = self.round()
        return wait


@pytest.mark.parametrize(("listening", "longest"), [(True, pacing.IDLE_LISTENING), (False, pacing.IDLE)])
def test_nothing_moves_and_waits_grow_to_a_bound(listening: bool, longest: float) -> None:
    driver = Driver(listening)
    waits = [driver.round() for _ in range(200)]
    assert waits[0] == Wait(INTERVAL, listening)
    assert [w.seconds for w in waits] == sorted(w.seconds for w in waits)
    assert waits[-1] == Wait(longest, listening)


def test_it_yields_after_something_moved_and_then_waits_as_before() -> None:
    driver = Driver(listening=True)
    driver.rest()
    began = driver.now
    wait = driver.round(Round.FOUND, ready=True)
    while not wait.seconds:
        wait = driver.round()
    assert began + pacing.ACTIVE_FOR <= driver.now < began + pacing.ACTIVE_FOR + 2 * INTERVAL
    assert wait.seconds == INTERVAL


def test_while_reads_are_posted_it_waits_the_interval() -> None:
    driver = Driver(listening=True)
    driver.rest()
    assert {driver.round(posted=3) for _ in range(1000)} == {Wait(INTERVAL, True)}


def test_it_keeps_out_of_a_callers_way_and_does_not_listen_to_what_it_could_not_look_at() -> None:
    driver = Driver(listening=True)
    assert driver.round(Round.BUSY, ready=True) == Wait(pacing.STAND_BACK, False)
    assert driver.round(Round.TROUBLE, ready=True) == Wait(pacing.TROUBLE, False)


def test_what_comes_unannounced_ends_the_listening() -> None:
    driver = Driver(listening=True)
    for _ in range(pacing.UNTRUE):
        assert driver.rest() == Wait(pacing.IDLE_LISTENING, True)
        driver.round(Round.FOUND, ready=False)
    assert not driver.pacer.listening
    assert driver.rest() == Wait(pacing.IDLE, False)


def test_what_was_announced_in_between_keeps_it() -> None:
    driver = Driver(listening=True)
    for _ in range(10):
        for ready in (False,) * (pacing.UNTRUE - 1) + (True,):
            driver.rest()
            driver.round(Round.FOUND, ready)
    assert driver.pacer.listening


def test_what_comes_right_after_a_short_wait_proves_nothing() -> None:
    driver = Driver(listening=True)
    for _ in range(10 * pacing.UNTRUE):
        driver.round(posted=1)
        driver.round(Round.FOUND, ready=False, posted=1)
    assert driver.pacer.listening


def test_with_no_set_that_is_heard_it_waits_as_one_that_does_not_listen() -> None:
    driver = Driver(listening=True)
    driver.rest()
    for _ in range(3):
        wait = driver.pacer.next(Round.NOTHING, False, 0, driver.now, heard=False)
    assert wait.seconds == pacing.IDLE


def test_a_set_that_stays_ready_is_not_listened_to_for_longer_and_longer() -> None:
    hearing, now, silences = Hearing(), 0.0, []
    for _ in range(10):
        looks = 0
        while hearing.looked(True, now):
            looks += 1
        assert looks in (pacing.VAIN - 1, pacing.VAIN)
        began = now
        while not hearing.looked(True, now):
            now += 0.25
        silences.append(now - began)
    assert silences[:3] == [pacing.DEAF, 2 * pacing.DEAF, 4 * pacing.DEAF]
    assert silences[-1] == pacing.DEAF_MOST


def test_a_set_that_rests_now_and_then_is_listened_to() -> None:
    hearing = Hearing()
    assert all(hearing.looked(bool(n % pacing.VAIN), 0.0) for n in range(10 * pacing.VAIN))


# -- a pump


class Owner:
    """Counts rounds; ``looked`` is set by each."""

    posted = 0

    def __init__(self) -> None:
        self.looked = threading.Semaphore(0)

    def progress_once(self) -> Round:
        self.looked.release()
        return Round.NOTHING


def test_an_event_ends_the_wait() -> None:
    readable, writable = os.pipe()
    owner, events = Owner(), select.epoll()
    events.register(readable, select.EPOLLIN)
    pump = Pump(owner, FOREVER, [events.fileno()])
    try:
        assert owner.looked.acquire(timeout=DEADLINE)
        os.write(writable, b"x")
        assert owner.looked.acquire(timeout=DEADLINE)
    finally:
        pump.close()
        events.close()
        os.close(readable)
        os.close(writable)
    assert not pump._thread.is_alive()


def test_a_set_that_is_always_ready_does_not_make_it_spin() -> None:
    readable, writable = os.pipe()
    os.write(writable, b"x")
    owner, events = Owner(), select.epoll()
    events.register(readable, select.EPOLLIN)
    pump = Pump(owner, FOREVER, [events.fileno()])
    try:
        for _ in range(pacing.VAIN):
            assert owner.looked.acquire(timeout=DEADLINE)
        while pump._ears.heard:
            owner.looked.acquire(timeout=DEADLINE)
    finally:
        pump.close()
        events.close()
        os.close(readable)
        os.close(writable)


def test_a_post_and_the_end_end_the_wait() -> None:
    owner = Owner()
    pump = Pump(owner, FOREVER, [])
    assert owner.looked.acquire(timeout=DEADLINE)
    pump.moved()
    assert owner.looked.acquire(timeout=DEADLINE)
    pump.close()
    assert not pump._thread.is_alive()


def test_a_pump_ends_with_its_owner_and_leaves_no_file_open() -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    owner = Owner()
    pump = Pump(owner, INTERVAL, [])
    assert owner.looked.acquire(timeout=DEADLINE)
    del owner
    pump._thread.join(DEADLINE)
    pump.moved()  # nobody is there any more, and no other's file is written to
    pump.close()
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_event_sets_are_those_of_this_process() -> None:
    known = event_sets()
    events = select.epoll()
    fd = events.fileno()
    assert event_sets() - known <= {fd}  # none where there is a network card
    events.close()
    assert fd not in event_sets()


# -- where the system gives no more


@pytest.fixture
def events() -> Iterator[int]:
    """An event set that is always ready; afterwards no other file is open than before."""
    before = sorted(os.listdir("/proc/self/fd"))
    readable, writable = os.pipe()
    os.write(writable, b"x")
    with select.epoll() as made:
        made.register(readable, select.EPOLLIN)
        yield made.fileno()
    os.close(readable)
    os.close(writable)
    assert sorted(os.listdir("/proc/self/fd")) == before


def _refuse(*_: object, **__: object) -> Any:
    raise OSError(errno.EMFILE, "Too many open files")


def test_a_set_that_has_gone_or_is_another_file_now_is_left_out(events: int) -> None:
    readable, writable = os.pipe()
    ears = _Ears([1 << 20, writable, events])
    try:
        assert ears.any and len(ears._sets) == 1
        os.close(writable)
        assert os.read(readable, 1) == b""  # it saw it close
    finally:
        ears.close()
        os.close(readable)


@pytest.mark.parametrize("call", ["dup", "readlink"])
def test_where_not_all_sets_can_be_copied_none_is_waited_on(
    events: int, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, many = getattr(os, call), iter((True, False))
    monkeypatch.setattr(os, call, lambda what: one(what) if next(many) else _refuse())
    owner = Owner()
    pump = Pump(owner, FOREVER, [events, events])
    assert owner.looked.acquire(timeout=DEADLINE)
    assert not pump.pacer.listening and not pump._ears.heard and pump._ears._poll.poll(0) == []
    pump.close()
    assert not pump._thread.is_alive()


@pytest.mark.parametrize("what", ["os.eventfd", "threading.Thread.start"])
def test_a_pump_that_cannot_be_made_leaves_nothing_behind(
    events: int, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusal = RuntimeError("can't start new thread") if "Thread" in what else OSError(errno.EMFILE, "no more")

    def refuse(*_: object) -> Any:
        raise refusal

    monkeypatch.setattr(what, refuse)
    with pytest.raises(type(refusal)):
        Pump(Owner(), INTERVAL, [events])


def test_a_set_that_cannot_be_listened_to_again_does_not_end_the_pump(events: int) -> None:
    class Full:
        """An epoll that takes no more."""

        poll = staticmethod(lambda seconds: [])
        register = staticmethod(_refuse)

    ears = _Ears([events])
    try:
        while ears.heard:
            ears.tune(0.0)
        real, ears._poll = ears._poll, Full()  # type: ignore[assignment]
        ears.tune(FOREVER)
        assert not ears.heard
        ears._poll = real
        ears.tune(FOREVER)
        assert ears.heard
    finally:
        ears.close()
