"""Jobs of one rank: each ends once, attached ones never while they run, and nothing waits for ever."""

from __future__ import annotations

import threading

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from kvconn.errors import ConfigError
from kvconn.offload.jobs import Ended, JobTable
from kvconn.offload.runner import Runner

A, B = (1, 0), (2, 0)


def table(limit: int = 8, *, attached: bool = True) -> JobTable[str]:
    return JobTable(limit, attached=attached)


def test_a_job_ends_when_its_thread_returned() -> None:
    jobs = table()
    jobs.add(A, "a", 5.0)
    jobs.add(B, "b", 5.0)
    assert jobs.take(0) == (A, "a") and jobs.take_ended() == []
    jobs.returned(A, True)
    assert jobs.take_ended() == [Ended(A, True)] and jobs.take_ended() == []
    assert jobs.take(0) == (B, "b") and jobs.take(0) is None


def test_at_its_deadline_a_waiting_job_ends_and_a_running_attached_one_only_when_it_returned() -> None:
    jobs = table()
    jobs.add(A, "a", 5.0)
    jobs.add(B, "b", 5.0)
    jobs.take(0)
    jobs.expire(4.9)
    assert jobs.take_ended() == []
    jobs.expire(5.0)
    assert jobs.take_ended() == [Ended(B, False)]
    jobs.expire(99.0)
    assert jobs.take_ended() == [] and len(jobs) == 1
    jobs.returned(A, True)
    assert jobs.take_ended() == [Ended(A, False)], "in vain: its time was over"


def test_a_detached_job_ends_at_its_deadline_and_its_late_thread_may_touch_nothing() -> None:
    jobs = table(attached=False)
    jobs.add(A, "a", 5.0)
    jobs.take(0)
    assert jobs.stands(A)
    jobs.expire(5.0)
    assert jobs.take_ended() == [Ended(A, False)]
    assert not jobs.stands(A) and not jobs.land(A)
    jobs.returned(A, True)
    assert jobs.take_ended() == [] and len(jobs) == 0


def test_a_detached_job_that_landed_is_attached() -> None:
    jobs = table(attached=False)
    jobs.add(A, "a", 5.0)
    jobs.take(0)
    assert jobs.land(A)
    jobs.expire(5.0)
    assert jobs.take_ended() == []
    jobs.returned(A, True)
    assert jobs.take_ended() == [Ended(A, False)]


def test_what_waits_can_be_claimed_what_runs_can_be_waited_for() -> None:
    jobs = table()
    jobs.add(A, "a", 5.0)
    jobs.add(B, "b", 5.0)
    assert jobs.claim(A) == "a" and jobs.claim(A) is None
    assert not jobs.wait(A, 0.0)
    jobs.returned(A, True)
    assert jobs.take_ended() == [Ended(A, False)], "given up by the one who waited"
    assert jobs.wait(A, 0.0) and jobs.wait(B, 0.0), "neither runs"


def test_waiting_ends_with_the_copy() -> None:
    jobs = table()
    jobs.add(A, "a", 5.0)
    jobs.take(0)
    threading.Timer(0.01, jobs.returned, (A, True)).start()
    assert jobs.wait(A, 20.0)
    assert jobs.take_ended() == [Ended(A, True)]


def test_what_waits_is_bounded() -> None:
    jobs = table(1)
    jobs.add(A, "a", 5.0)
    jobs.add(B, "b", 5.0)
    assert jobs.take_ended() == [Ended(B, False)]


def test_a_closed_table_gives_up_and_gives_out_nothing() -> None:
    jobs = table(attached=False)
    jobs.add(A, "a", 5.0)
    jobs.take(0)
    jobs.add(B, "b", 5.0)
    jobs.close()
    assert sorted(jobs.take_ended(), key=lambda ended: ended.number) == [Ended(A, False), Ended(B, False)]
    jobs.add(A, "a", 5.0)
    assert jobs.take(0) is None and jobs.take_ended() == [Ended(A, False)]


@pytest.mark.parametrize("fault", [OSError("disk"), ValueError("a bug")])
def test_a_thread_answers_whatever_happens_to_it(fault: Exception) -> None:
    jobs, done = table(), threading.Event()

    def do(number: tuple[int, int], work: str) -> bool:
        if work == "bad":
            raise fault
        done.set()
        return True

    runner = Runner("test-jobs", 1, jobs, do)
    jobs.add(A, "bad", 5.0)
    jobs.add(B, "good", 5.0)
    assert done.wait(20) and runner.close(20)
    assert jobs.take_ended() == [Ended(A, False), Ended(B, True)]


def test_a_thread_that_hangs_does_not_keep_the_end() -> None:
    jobs, inside, go = table(attached=False), threading.Event(), threading.Event()

    def do(number: tuple[int, int], work: str) -> bool:
        inside.set()
        return go.wait(20)

    runner = Runner("test-jobs", 1, jobs, do)
    jobs.add(A, "a", 5.0)
    assert inside.wait(20)
    assert not runner.close(0.0) and jobs.take_ended() == [Ended(A, False)]
    go.set()
    assert runner.close(20)


@pytest.mark.parametrize("may_start", [0, 1])
def test_fewer_threads_than_asked_for_are_enough_and_none_are_an_error(
    may_start: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, left = threading.Thread.start, iter([True] * may_start)

    def refuse(thread: threading.Thread) -> None:
        if not next(left, False):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    jobs = table()
    if not may_start:
        with pytest.raises(ConfigError, match="no thread test-jobs"):
            Runner("test-jobs", 2, jobs, lambda number, job: True)
        return
    runner = Runner("test-jobs", 2, jobs, lambda number, job: True)
    jobs.add(A, "a", 5.0)
    jobs.settle(A, 20)
    assert jobs.take_ended() == [Ended(A, True)]
    assert runner.close(20)


def test_repr_is_one_readable_line() -> None:
    jobs = table()
    jobs.add(A, "a", 1.0)
    assert repr(jobs) == "JobTable(waiting=1 running=0)"


class JobsMachine(RuleBasedStateMachine):
    """Any order of a table's events, two threads: every job ends once, and none while somebody may touch memory."""

    attached = True

    def __init__(self) -> None:
        super().__init__()
        self.jobs = table(5, attached=self.attached)
        self.now = 0.0
        self.n = 0
        #: jobs that have not ended, with their deadlines
        self.alive: dict[tuple[int, int], float] = {}
        self.threads: set[tuple[int, int]] = set()
        self.landed: set[tuple[int, int]] = set()

    @rule(patience=st.floats(0.1, 3.0))
    def add(self, patience: float) -> None:
        self.n += 1
        self.alive[self.n, 0] = self.now + patience
        self.jobs.add((self.n, 0), "", self.now + patience)
        self.check()

    @precondition(lambda self: len(self.threads) < 2)
    @rule()
    def take(self) -> None:
        taken = self.jobs.take(0)
        if taken is not None:
            assert taken[0] in self.alive
            self.threads.add(taken[0])

    @precondition(lambda self: self.threads)
    @rule(data=st.data())
    def land(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.threads)))
        if self.jobs.land(number):
            assert number in self.alive
            self.landed.add(number)

    @precondition(lambda self: self.threads)
    @rule(data=st.data(), fine=st.booleans())
    def thread_returns(self, data: st.DataObject, fine: bool) -> None:
        number = data.draw(st.sampled_from(sorted(self.threads)))
        self.threads.discard(number)
        self.landed.discard(number)
        self.jobs.returned(number, fine)
        self.check()

    @rule(passed=st.floats(0.0, 2.0))
    def time_passes(self, passed: float) -> None:
        self.now += passed
        self.jobs.expire(self.now)
        self.check()
        touching = self.threads if self.attached else self.landed
        assert all(number in touching for number, deadline in self.alive.items() if deadline <= self.now)

    def check(self) -> None:
        for ended in self.jobs.take_ended():
            assert ended.number not in (self.threads if self.attached else self.landed)
            deadline = self.alive.pop(ended.number)
            assert not (ended.fine and deadline < self.now and self.attached), "fine, but late"

    def teardown(self) -> None:
        self.jobs.close()
        for number in list(self.threads):
            self.thread_returns_at_the_end(number)
        self.check()
        assert not self.alive and len(self.jobs) == 0

    def thread_returns_at_the_end(self, number: tuple[int, int]) -> None:
        self.threads.discard(number)
        self.landed.discard(number)
        self.jobs.returned(number, True)


class DetachedMachine(JobsMachine):
    attached = False


def test_every_attached_job_ends_once() -> None:
    run_state_machine_as_test(JobsMachine, settings=settings(max_examples=80, deadline=None, derandomize=True))


def test_every_detached_job_ends_once() -> None:
    run_state_machine_as_test(DetachedMachine, settings=settings(max_examples=80, deadline=None, derandomize=True))
