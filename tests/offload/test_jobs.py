"""Store jobs: each ends once, never while its copy runs, and nothing waits for ever."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from kvconn.offload.jobs import Copy, Ended, StoreJob, StoreJobs


def copies(count: int) -> list[Copy]:
    return [Copy(bytes([k]), (k,), 0) for k in range(count)]


def ends(jobs: StoreJobs) -> list[tuple[str, int, int]]:
    return [(e.id, len(e.written), len(e.unwritten)) for e in jobs.take_ended()]


def test_nothing_to_copy_ends_at_once() -> None:
    jobs = StoreJobs(1, 8)
    jobs.add("a", 1, [], 5.0)
    assert jobs.start() == []
    assert ends(jobs) == [("a", 0, 0)] and ends(jobs) == []


def test_a_job_ends_when_its_copy_returned() -> None:
    jobs = StoreJobs(1, 8)
    jobs.add("a", 1, copies(3), 5.0)
    jobs.add("b", 2, copies(1), 5.0)
    assert [job.id for job in jobs.start()] == ["a"]
    assert jobs.start() == [] and ends(jobs) == []
    jobs.returned(1, 3)
    assert ends(jobs) == [("a", 3, 0)]
    assert [job.id for job in jobs.start()] == ["b"]


def test_a_waiting_job_is_given_up_at_its_deadline_a_running_one_told_to_stop() -> None:
    jobs = StoreJobs(1, 8)
    jobs.add("running", 1, copies(3), 5.0)
    jobs.add("waiting", 2, copies(2), 5.0)
    (running,) = jobs.start()
    jobs.expire(4.9)
    assert not running.stop and ends(jobs) == []
    jobs.expire(5.0)
    assert running.stop and ends(jobs) == [("waiting", 0, 2)]
    jobs.expire(99.0)
    assert ends(jobs) == [], "a copy runs: its request is held"
    jobs.returned(1, 1)
    assert ends(jobs) == [("running", 1, 2)] and len(jobs) == 0


def test_what_waits_is_bounded_in_blocks() -> None:
    jobs = StoreJobs(1, 4)
    jobs.add("a", 1, copies(3), 5.0)
    assert jobs.room() == 1
    jobs.add("b", 2, copies(2), 5.0)
    assert ends(jobs) == [("b", 0, 2)]
    jobs.start()
    assert jobs.room() == 4


def test_repr_is_one_readable_line() -> None:
    jobs = StoreJobs(1, 8)
    jobs.add("a", 1, copies(1), 5.0)
    jobs.add("b", 2, copies(1), 5.0)
    jobs.start()
    assert repr(jobs) == "StoreJobs(waiting=1 running=1)"


class JobsMachine(RuleBasedStateMachine):
    """Every job ends exactly once, with every block accounted for, and none while its copy runs."""

    def __init__(self) -> None:
        super().__init__()
        self.jobs = StoreJobs(2, 10)
        self.now = 0.0
        self.n = 0
        self.added: dict[int, int] = {}
        self.deadline: dict[int, float] = {}
        self.running: dict[int, StoreJob] = {}

    @rule(count=st.integers(0, 5), patience=st.floats(0.1, 3.0))
    def add(self, count: int, patience: float) -> None:
        self.n += 1
        self.added[self.n] = count
        self.deadline[self.n] = self.now + patience
        self.jobs.add(str(self.n), self.n, copies(count), self.now + patience)
        self.check()

    @rule()
    def start(self) -> None:
        for job in self.jobs.start():
            self.running[job.n] = job
        assert len(self.running) <= 2

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def copy_returns(self, data: st.DataObject) -> None:
        n = data.draw(st.sampled_from(sorted(self.running)))
        job = self.running.pop(n)
        self.jobs.returned(n, data.draw(st.integers(0, len(job.copies))) if job.stop else len(job.copies))
        self.check()

    @rule(passed=st.floats(0.0, 2.0))
    def time_passes(self, passed: float) -> None:
        self.now += passed
        self.jobs.expire(self.now)
        self.check()
        assert all(job.stop == (job.deadline <= self.now) for job in self.running.values())
        assert all(n in self.running for n in self.added if self.deadline[n] <= self.now)

    def check(self) -> None:
        for ended in self.jobs.take_ended():
            self.account(ended)

    def account(self, ended: Ended) -> None:
        assert ended.n not in self.running
        assert len(ended.written) + len(ended.unwritten) == self.added.pop(ended.n)

    def teardown(self) -> None:
        self.jobs.stop()
        for job in self.running.values():
            assert job.stop
        for n in list(self.running):
            del self.running[n]
            self.jobs.returned(n, 0)
        self.check()
        assert not self.added and len(self.jobs) == 0 and self.jobs.room() == 10


def test_every_job_ends_once() -> None:
    run_state_machine_as_test(JobsMachine, settings=settings(max_examples=80, deadline=None, derandomize=True))
