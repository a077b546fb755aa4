"""Receive lives of a worker: failed is a result, quiet is a release, and each life settles once (C6, C7)."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from kvconn.nixl.transfers import Reads, Settled
from kvconn.params import PeerKey

P = PeerKey("P", "h", 1)
Q = PeerKey("Q", "h", 2)


def reading(*handles: int, id: str = "r", n: int = 1, peer: PeerKey = P, deadline: float = 60.0) -> Reads:
    """One life with these handles posted and nothing more to post."""
    reads = Reads()
    reads.begin(id, n, peer, deadline)
    for handle in handles:
        reads.posted(id, handle, peer.engine)
    reads.posted_all(id)
    return reads


class TestSuccess:
    def test_a_life_settles_when_its_last_handle_is_done(self) -> None:
        reads = reading(1, 2)
        assert reads.settle() == []
        reads.done(1)
        assert reads.settle() == []
        reads.done(2)
        assert reads.settle() == [Settled("r", 1, None)]
        assert (reads.settle(), len(reads), reads.to_poll()) == ([], 0, [])

    def test_a_life_with_nothing_to_read_settles_at_once(self) -> None:
        assert reading().settle() == [Settled("r", 1, None)]

    def test_a_life_that_may_still_post_does_not_settle(self) -> None:
        reads = Reads()
        reads.begin("r", 1, P, 60.0)
        assert reads.settle() == []
        reads.posted("r", 1, "P")
        reads.done(1)
        assert reads.settle() == []
        reads.posted_all("r")
        assert reads.settle() == [Settled("r", 1, None)]

    def test_lives_settle_each_on_its_own(self) -> None:
        reads = reading(1, id="a")
        reads.begin("b", 2, P, 60.0)
        reads.posted("b", 2, "P")
        reads.posted_all("b")
        reads.done(2)
        assert reads.settle() == [Settled("b", 2, None)]
        assert (reads.life("a"), reads.life("b"), reads.ids()) == (1, 0, ["a"])

    def test_a_handle_nobody_knows_changes_nothing(self) -> None:
        reads = reading(1)
        reads.done(99)
        assert (reads.settle(), reads.to_poll()) == ([], [1])


class TestFailedIsNotQuiet:
    def test_a_failed_life_is_held_until_every_handle_is_quiet(self) -> None:
        reads = reading(1, 2)
        assert reads.fail("r", "late", now=5.0)
        assert reads.settle() == []
        reads.done(1)
        assert reads.settle() == []
        reads.done(2)
        assert reads.settle() == [Settled("r", 1, "late")]

    def test_an_error_with_a_live_peer_is_not_quiet(self) -> None:
        reads = reading(1, 2)
        assert reads.error(1) == "r"
        reads.fail("r", "ERR", now=5.0)
        reads.done(2)
        assert reads.settle() == []
        assert (reads.errors(), reads.to_poll()) == ([1], [])

    def test_an_error_is_quiet_once_its_peer_is_gone_and_only_its_peer(self) -> None:
        reads = reading(1)
        reads.error(1)
        reads.fail("r", "ERR", now=5.0)
        assert reads.agent_gone("Q") == []
        assert reads.settle() == []
        assert reads.agent_gone("P") == [1]
        assert reads.settle() == [Settled("r", 1, "ERR")]
        assert (reads.errors(), reads.agent_gone("P")) == ([], [])

    def test_a_gone_peer_does_not_quiet_what_is_still_in_progress(self) -> None:
        reads = reading(1, 2)
        reads.error(1)
        reads.fail("r", "ERR", now=5.0)
        assert reads.agent_gone("P") == [1]
        assert (reads.settle(), reads.to_poll()) == ([], [2])
        reads.error(2)
        assert reads.agent_gone("P") == [2]
        assert len(reads.settle()) == 1

    def test_after_our_agent_is_destroyed_everything_is_quiet(self) -> None:
        reads = reading(1, 2)
        reads.error(1)
        reads.fail("r", "agent", now=5.0)
        reads.agent_destroyed()
        assert reads.settle() == [Settled("r", 1, "agent")]
        assert (reads.to_poll(), reads.errors()) == ([], [])

    def test_a_handle_posted_after_the_failure_holds_the_life_too(self) -> None:
        reads = Reads()
        reads.begin("r", 1, P, 60.0)
        reads.fail("r", "the post raised", now=5.0)
        reads.posted("r", 9, "P")
        assert reads.settle() == []
        reads.done(9)
        assert reads.settle() == [Settled("r", 1, "the post raised")]

    def test_a_life_that_fails_before_anything_is_posted_settles_failed(self) -> None:
        reads = Reads()
        reads.begin("r", 1, P, 60.0)
        assert reads.fail("r", "handshake", now=5.0)
        assert reads.settle() == [Settled("r", 1, "handshake")]

    def test_the_first_reason_stands(self) -> None:
        reads = reading(1)
        assert reads.fail("r", "first", now=5.0)
        assert not reads.fail("r", "second", now=6.0)
        assert not reads.fail("unknown", "why", now=6.0)
        reads.done(1)
        assert reads.settle() == [Settled("r", 1, "first")]
        assert not reads.fail("r", "late", now=7.0)


class TestTurns:
    def test_a_poll_looks_at_so_many_handles_and_comes_to_each_in_turn(self) -> None:
        reads = reading(1, 2, 3, 4, 5)
        assert [reads.to_poll(2) for _ in range(3)] == [[1, 2], [3, 4], [5, 1]]
        assert sorted(reads.to_poll()) == [1, 2, 3, 4, 5]

    def test_what_is_quiet_or_in_error_has_no_turn(self) -> None:
        reads = reading(1, 2, 3)
        reads.done(1)
        reads.error(2)
        assert (reads.to_poll(), reads.to_poll()) == ([3], [3])


class TestDeadlines:
    def test_a_life_is_overdue_from_its_deadline_until_it_failed(self) -> None:
        reads = reading(1, deadline=60.0)
        assert reads.settle() == [] == reads.overdue(59.9)
        assert reads.overdue(60.0) == ["r"]
        reads.fail("r", "late", now=60.0)
        assert reads.overdue(61.0) == []

    def test_what_came_in_time_is_not_overdue_however_late_it_is_seen(self) -> None:
        """C11: an engine that stood still for a minute finds its reads done."""
        reads = reading(1, deadline=60.0)
        reads.settle()
        reads.done(1)
        reads.posted("r", 2, "agent")  # its fence word
        assert reads.overdue(90.0) == []
        reads.settle()
        reads.done(2)
        reads.posted_all("r")
        assert reads.overdue(90.0) == [] and [over.failed for over in reads.settle()] == [None]

    def test_a_life_of_which_nothing_comes_any_more_is_overdue(self) -> None:
        reads = reading(1, 2, deadline=60.0)
        reads.done(1)
        assert (reads.overdue(61.0), reads.settle(), reads.overdue(61.0)) == ([], [], ["r"])

    def test_a_life_that_waits_for_its_handshake_is_overdue_too(self) -> None:
        reads = Reads()
        reads.begin("r", 1, P, 60.0)
        assert reads.overdue(60.0) == ["r"]

    def test_quarantine_names_the_life_its_age_and_the_reason(self) -> None:
        reads = reading(1)
        assert reads.quarantined(10.0) == []
        reads.fail("r", "late", now=60.0)
        assert reads.quarantined(72.5) == [("r", 12.5, "late")]
        reads.done(1)
        reads.settle()
        assert reads.quarantined(80.0) == []

    def test_repr_is_one_line(self) -> None:
        reads = reading(1, 2)
        reads.fail("r", "late", now=1.0)
        assert repr(reads) == "Reads(open=1 handles=2 quarantined=1)"


# --- the model ----------------------------------------------------------------------------------------------------


class ReadsAgainstAModel(RuleBasedStateMachine):
    """A life settles exactly once, never while a handle of it may still write, and with its first failure."""

    reads_class: ClassVar[type[Reads]] = Reads

    def __init__(self) -> None:
        super().__init__()
        self.reads = self.reads_class()
        self.next = 0
        self.lives: dict[str, dict[str, Any]] = {}
        self.handles: dict[int, tuple[str, str, str]] = {}  # not quiet: id, agent, "proc" or "err"
        self.settled: set[str] = set()

    def some(self, data: st.DataObject, what: Any) -> Any:
        return data.draw(st.sampled_from(sorted(what)))

    @rule()
    def begin(self) -> None:
        self.next += 1
        self.reads.begin(f"r{self.next}", self.next, P, 60.0)
        self.lives[f"r{self.next}"] = {"posting": True, "failed": None}

    @precondition(lambda self: any(life["posting"] for life in self.lives.values()))
    @rule(data=st.data(), last=st.booleans(), agent=st.sampled_from("PQ"))
    def post(self, data: st.DataObject, last: bool, agent: str) -> None:
        id = self.some(data, [id for id, life in self.lives.items() if life["posting"]])
        self.next += 1
        self.reads.posted(id, self.next, agent)
        self.handles[self.next] = (id, agent, "proc")
        if last:
            self.reads.posted_all(id)
            self.lives[id]["posting"] = False

    @precondition(lambda self: self.lives)
    @rule(data=st.data(), why=st.sampled_from(["late", "ERR"]))
    def fail(self, data: st.DataObject, why: str) -> None:
        id = self.some(data, self.lives)
        assert self.reads.fail(id, why, 1.0) is (self.lives[id]["failed"] is None)
        self.lives[id]["failed"] = self.lives[id]["failed"] or why
        self.lives[id]["posting"] = False

    @precondition(lambda self: any(state == "proc" for *_, state in self.handles.values()))
    @rule(data=st.data(), error=st.booleans())
    def handle_ends(self, data: st.DataObject, error: bool) -> None:
        handle = self.some(data, [h for h, (*_, state) in self.handles.items() if state == "proc"])
        id, agent, _ = self.handles[handle]
        if not error:
            self.reads.done(handle)
            del self.handles[handle]
            return
        assert self.reads.error(handle) == id
        self.handles[handle] = (id, agent, "err")
        self.reads.fail(id, "ERR", 1.0)
        self.lives[id].update(failed=self.lives[id]["failed"] or "ERR", posting=False)

    @rule(agent=st.sampled_from("PQ"))
    def agent_gone(self, agent: str) -> None:
        gone = [h for h, (_, of, state) in self.handles.items() if (of, state) == (agent, "err")]
        assert sorted(self.reads.agent_gone(agent)) == sorted(gone)
        for handle in gone:
            del self.handles[handle]

    @rule()
    def settle(self) -> None:
        busy = {id for id, *_ in self.handles.values()}
        over = {id for id, life in self.lives.items() if id not in busy and not life["posting"]}
        settled = self.reads.settle()
        assert {s.id for s in settled} == over
        for one in settled:
            assert one.id not in self.settled, "settled twice"
            assert (one.n, one.failed) == (int(one.id[1:]), self.lives.pop(one.id)["failed"])
            self.settled.add(one.id)

    @invariant()
    def handles_are_the_models(self) -> None:
        assert sorted(self.reads.to_poll()) == sorted(h for h, (*_, s) in self.handles.items() if s == "proc")
        assert sorted(self.reads.errors()) == sorted(h for h, (*_, s) in self.handles.items() if s == "err")
        assert len(self.reads) == len(self.lives)

    def teardown(self) -> None:
        for id in list(self.lives):
            self.reads.fail(id, "end", 1.0)
            self.lives[id].update(failed=self.lives[id]["failed"] or "end", posting=False)
        self.reads.agent_destroyed()
        self.handles.clear()
        self.settle()
        assert repr(self.reads) == "Reads(open=0 handles=0 quarantined=0)"


MODEL = settings(
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=100,
    stateful_step_count=40,
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)


def test_reads_behave_as_the_naive_model() -> None:
    run_state_machine_as_test(ReadsAgainstAModel, settings=MODEL)


class ErrorIsQuiet(Reads):
    """Mutant: takes ERR for the end of writing, as stock does (against F4)."""

    def error(self, handle: int) -> str:
        id = super().error(handle)
        self._quiet(handle)
        return id


class FailureReleases(Reads):
    """Mutant: gives blocks back as soon as the result is known (against F1 and C6)."""

    def settle(self) -> list[Settled]:
        for read in self._open.values():
            for handle in list(read.handles) if read.failed is not None else ():
                self._quiet(handle)
        return super().settle()


@pytest.mark.parametrize("mutant", [ErrorIsQuiet, FailureReleases])
def test_the_model_catches(mutant: type[Reads]) -> None:
    machine = type(f"Reads_{mutant.__name__}", (ReadsAgainstAModel,), {"reads_class": mutant})
    with pytest.raises(AssertionError):
        run_state_machine_as_test(machine, settings=settings(MODEL, phases=(Phase.generate,), max_examples=1000))
