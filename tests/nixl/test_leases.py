"""Sends of a serving worker: each ends exactly once, by its readers or by its lease (C1, C3)."""

from __future__ import annotations

from fractions import Fraction
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from kvconn.nixl.leases import Ended, SendLeases

LEASE = 30.0


def leases(**kwargs: Any) -> SendLeases:
    return SendLeases(LEASE, **kwargs)


class TestReaders:
    def test_one_reader_ends_a_send(self) -> None:
        held = leases()
        assert held.track("r", 7, "t", deadline=30.0) is None
        assert held.notified("t", "agent", 1, now=1.0) == Ended("r", 7, "t", expired=False)
        assert len(held) == 0

    @pytest.mark.parametrize("n", [2, 3, 7])
    def test_a_reader_of_n_ranks_is_done_when_all_n_distinct_agents_are(self, n: int) -> None:
        held = leases()
        held.track("r", 1, "t", 30.0)
        for rank in range(n - 1):
            assert held.notified("t", f"agent{rank}", n, 1.0) is None
        assert held.notified("t", f"agent{n - 1}", n, 1.0) is not None

    def test_an_agent_that_repeats_itself_does_not_stand_in_for_another(self) -> None:
        held = leases()
        held.track("r", 1, "t", 30.0)
        for _ in range(5):
            assert held.notified("t", "agent", 2, 1.0) is None
        assert (len(held), held.ignored) == (1, 4)

    def test_an_agent_that_contradicts_itself_is_ignored(self) -> None:
        held = leases()
        held.track("r", 1, "t", 30.0)
        assert held.notified("t", "agent", 4, 1.0) is None
        assert held.notified("t", "agent", 1, 1.0) is None
        assert held.ignored == 1

    def test_as_many_engines_as_were_asked_for_have_to_be_done(self) -> None:
        held = leases()
        held.track("r", 1, "t", 30.0, readers=2)
        assert held.notified("t", "D1", 1, 1.0) is None  # an engine of one rank
        assert held.notified("t", "D2-0", 2, 1.0) is None  # an engine of two
        assert held.notified("t", "D2-1", 2, 1.0) is not None

    def test_thirds_add_up_exactly(self) -> None:
        held = leases()
        held.track("r", 1, "t", 30.0, readers=3)
        ended = [held.notified("t", f"a{i}", 49, 1.0) for i in range(147)]
        assert [e is not None for e in ended] == [False] * 146 + [True]

    def test_sends_end_each_on_its_own(self) -> None:
        held = leases()
        for id in "ab":
            held.track(id, 1, f"t-{id}", 30.0)
        ended = held.notified("t-b", "agent", 1, 1.0)
        assert ended is not None
        assert (ended.id, len(held)) == ("b", 1)

    def test_tracking_a_held_transfer_again_changes_nothing(self) -> None:
        held = leases()
        held.track("r", 1, "t", 30.0)
        assert held.track("r", 1, "t", 90.0, readers=5) is None
        assert held.ignored == 1
        assert [e.expired for e in held.expire(30.0)] == [True]


class TestEarlyAndLate:
    def test_a_notification_before_the_announcement_counts_when_it_comes(self) -> None:
        held = leases()
        assert held.notified("t", "agent", 1, now=0.0) is None
        assert held.track("r", 7, "t", 30.0) == Ended("r", 7, "t", expired=False)
        assert (len(held), held.expire(1000.0)) == (0, [])

    def test_early_and_later_readers_add_up(self) -> None:
        held = leases()
        held.notified("t", "a0", 2, 0.0)
        assert held.track("r", 1, "t", 30.0) is None
        assert held.notified("t", "a0", 2, 1.0) is None
        assert held.notified("t", "a1", 2, 1.0) is not None

    def test_early_notifications_wait_one_lease_and_no_longer(self) -> None:
        held = leases()
        held.notified("t", "agent", 1, now=10.0)
        held.expire(10.0 + LEASE - 0.1)
        assert "early=1" in repr(held)
        held.expire(10.0 + LEASE)
        assert (repr(held), held.track("r", 1, "t", 99.0)) == ("SendLeases(held=0 early=0 ignored=1)", None)

    def test_a_completed_transfers_second_notification_changes_nothing_and_is_forgotten_after_a_lease(self) -> None:
        held = leases()
        held.track("r", 1, "t", 30.0)
        assert held.notified("t", "agent", 1, 1.0) is not None
        assert held.notified("t", "agent", 1, 2.0) is None
        assert held.notified("t", "other", 1, 3.0) is None
        assert held.expire(2.0 + LEASE) == []
        assert repr(held) == "SendLeases(held=0 early=0 ignored=1)"

    def test_early_notifications_are_bounded_oldest_first(self) -> None:
        held = leases(early_max=3)
        for index in range(5):
            held.notified(f"t{index}", "agent", 1, now=float(index))
        assert repr(held) == "SendLeases(held=0 early=3 ignored=2)"
        assert [held.track("r", 1, f"t{i}", 99.0) is not None for i in range(5)] == [False, False, True, True, True]

    def test_agents_of_one_early_transfer_are_bounded(self) -> None:
        held = leases(early_max=3)
        for index in range(10):
            held.notified("t", f"agent{index}", 100, 0.0)
        assert held.ignored == 7


class TestLeases:
    def test_a_send_expires_at_its_deadline_and_once(self) -> None:
        held = leases()
        held.track("r", 7, "t", deadline=30.0)
        assert held.expire(29.9) == []
        assert held.expire(30.0) == [Ended("r", 7, "t", expired=True)]
        assert held.expire(1000.0) == []
        assert held.notified("t", "agent", 1, 31.0) is None

    def test_a_heartbeat_moves_the_deadline_to_two_thirds_of_a_lease_from_now(self) -> None:
        held = leases()
        held.track("r", 1, "t", 30.0)
        held.heartbeat(["t", "unknown"], now=25.0)
        assert held.expire(44.9) == []
        assert [e.id for e in held.expire(45.0)] == ["r"]

    def test_a_heartbeat_never_shortens(self) -> None:
        held = leases()
        held.track("r", 1, "t", 30.0)
        held.heartbeat(["t"], now=1.0)
        assert held.expire(29.9) == []
        assert len(held.expire(30.0)) == 1

    def test_a_heartbeat_for_a_send_that_is_not_announced_leaves_nothing(self) -> None:
        held = leases()
        held.heartbeat(["t"], now=0.0)
        assert repr(held) == "SendLeases(held=0 early=0 ignored=0)"

    def test_sends_expire_in_the_order_of_their_deadlines(self) -> None:
        held = leases()
        for id, deadline in (("c", 3.0), ("a", 1.0), ("b", 2.0), ("d", 50.0)):
            held.track(id, 1, f"t-{id}", deadline)
        assert [e.id for e in held.expire(10.0)] == ["a", "b", "c"]

    def test_repr_is_one_line(self) -> None:
        held = leases()
        held.track("r", 1, "t", 30.0)
        held.notified("x", "agent", 1, 0.0)
        assert repr(held) == "SendLeases(held=1 early=1 ignored=0)"


# --- the model ----------------------------------------------------------------------------------------------------

IDS = [f"t{i}" for i in range(6)]


class LeasesAgainstAModel(RuleBasedStateMachine):
    """Each send ends exactly once, for the reason a naive model gives; every table empties a lease after the end."""

    leases_class: ClassVar[type[SendLeases]] = SendLeases

    def __init__(self) -> None:
        super().__init__()
        self.held = self.leases_class(LEASE)
        self.now = 0.0
        self.sends: dict[str, tuple[int, float]] = {}  # open ones: readers asked for, deadline
        self.heard: dict[str, dict[str, int]] = {}
        self.early: dict[str, float] = {}
        self.ended: dict[str, bool] = {}

    def end(self, transfer_id: str, ended: Ended | None, expired: bool) -> None:
        assert ended == Ended(f"r-{transfer_id}", 1, transfer_id, expired)
        assert transfer_id not in self.ended, "ended twice"
        self.ended[transfer_id] = expired
        self.sends.pop(transfer_id, None)
        self.heard.pop(transfer_id, None)

    def done(self, transfer_id: str, readers: int) -> bool:
        return sum(Fraction(1, n) for n in self.heard.get(transfer_id, {}).values()) >= readers

    @precondition(lambda self: len(self.ended) + len(self.sends) < len(IDS))
    @rule(data=st.data(), readers=st.integers(1, 2), lease=st.integers(0, 40))
    def announce(self, data: st.DataObject, readers: int, lease: int) -> None:
        fresh = [t for t in IDS if t not in self.ended and t not in self.sends]
        transfer_id = data.draw(st.sampled_from(fresh))
        ended = self.held.track(f"r-{transfer_id}", 1, transfer_id, self.now + lease, readers)
        self.early.pop(transfer_id, None)
        if self.done(transfer_id, readers):
            self.end(transfer_id, ended, expired=False)
        else:
            assert ended is None
            self.sends[transfer_id] = (readers, self.now + lease)

    @rule(transfer_id=st.sampled_from(IDS), agent=st.sampled_from("abc"), n=st.integers(1, 3))
    def notify(self, transfer_id: str, agent: str, n: int) -> None:
        ended = self.held.notified(transfer_id, agent, n, self.now)
        if transfer_id not in self.sends:
            self.early.setdefault(transfer_id, self.now)
        self.heard.setdefault(transfer_id, {}).setdefault(agent, n)
        if transfer_id in self.sends and self.done(transfer_id, self.sends[transfer_id][0]):
            self.end(transfer_id, ended, expired=False)
        else:
            assert ended is None

    @rule(transfer_ids=st.sets(st.sampled_from(IDS)))
    def heartbeat(self, transfer_ids: set[str]) -> None:
        self.held.heartbeat(transfer_ids, self.now)
        for transfer_id in transfer_ids & self.sends.keys():
            readers, deadline = self.sends[transfer_id]
            self.sends[transfer_id] = (readers, max(deadline, self.now + LEASE * 2 / 3))

    @rule(seconds=st.integers(0, 25))
    def time_passes(self, seconds: int) -> None:
        self.now += seconds
        due = {t for t, (_, deadline) in self.sends.items() if deadline <= self.now}
        ended = self.held.expire(self.now)
        assert sorted(e.transfer_id for e in ended) == sorted(due)
        for one in ended:
            self.end(one.transfer_id, one, expired=True)
        for transfer_id in [t for t, since in self.early.items() if since + LEASE <= self.now]:
            del self.early[transfer_id]
            self.heard.pop(transfer_id, None)
        assert len(self.held) == len(self.sends)
        assert f"early={len(self.early)} " in repr(self.held)

    def teardown(self) -> None:
        for _ in range(6):
            self.time_passes(20)
        assert (self.sends, self.early) == ({}, {})
        assert len(self.held) == 0


MODEL = settings(
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=100,
    stateful_step_count=40,
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)


def test_leases_behave_as_the_naive_model() -> None:
    run_state_machine_as_test(LeasesAgainstAModel, settings=MODEL)


class CountsNotifications(SendLeases):
    """Mutant: counts notifications and not agents."""

    def notified(self, transfer_id: str, agent: str, n: int, now: float) -> Ended | None:
        send = self._held.get(transfer_id)
        return super().notified(transfer_id, agent if send is None else f"{agent}{len(send.heard)}", n, now)


class DeafToHeartbeats(SendLeases):
    """Mutant: a lease ends at its first deadline."""

    def heartbeat(self, transfer_ids: Any, now: float) -> None:
        pass


class ExtendsTooFar(SendLeases):
    """Mutant: a heartbeat buys a whole lease."""

    def heartbeat(self, transfer_ids: Any, now: float) -> None:
        super().heartbeat(transfer_ids, now + self._lease / 3)


class KeepsEarly(SendLeases):
    """Mutant: a notification nobody announces is kept for ever."""

    def expire(self, now: float) -> list[Ended]:
        early, self._early = self._early, type(self._early)()
        ended = super().expire(now)
        self._early = early
        return ended


@pytest.mark.parametrize("mutant", [CountsNotifications, DeafToHeartbeats, ExtendsTooFar, KeepsEarly])
def test_the_model_catches(mutant: type[SendLeases]) -> None:
    machine = type(f"Leases_{mutant.__name__}", (LeasesAgainstAModel,), {"leases_class": mutant})
    with pytest.raises(AssertionError):
        run_state_machine_as_test(machine, settings=settings(MODEL, phases=(Phase.generate,), max_examples=1000))
