"""The policy against a model: an id leaves once per life, when and only when every (claiming child, rank) reported."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from kvconn.aggregator import KVOutputAggregator
from kvconn.base import Fact, KVConnectorOutput, TransferResults, WorkerFacts
from kvconn.multi.policy import (
    OWN,
    Claim,
    ClaimTable,
    EngineGate,
    Match,
    MultiStep,
    RankGate,
    choose,
    merge_params,
    prefixed,
)

CHILDREN = 3
IDS = st.sampled_from(["a", "b"])
CHILD = st.integers(0, CHILDREN - 1)


class Life:
    """What the model knows of one life of one id."""

    def __init__(self, claimers: frozenset[int]) -> None:
        self.claimers = claimers
        self.reported: set[tuple[int, int]] = set()
        self.stepped = False
        self.opened = False

    def owed(self, world: int) -> list[tuple[int, int]]:
        return [(c, r) for c in sorted(self.claimers) for r in range(world) if (c, r) not in self.reported]


class PolicyMachine(RuleBasedStateMachine):
    """Ranks, the real aggregator, and the scheduler half's gate, in an engine's order."""

    table: type[ClaimTable] = ClaimTable

    @initialize(world=st.integers(1, 4))
    def begin(self, world: int) -> None:
        self.world = world
        self.ranks = [RankGate(rank) for rank in range(world)]
        for gate in self.ranks:
            gate._sends = self.table("send", gate._sends._rank, 4096)
        self.gate = EngineGate(CHILDREN, range(world))
        self.aggregator = KVOutputAggregator(world)
        self.lives: dict[str, Life] = {}
        self.last: dict[str, Life] = {}
        self.ended: list[str] = []
        self.metas: list[MultiStep] = []
        self.held: dict[int, set[str]] = {child: set() for child in range(CHILDREN)}

    @rule(id=IDS, claimers=st.frozensets(CHILD))
    def arrive(self, id: str, claimers: frozenset[int]) -> None:
        if id not in self.lives:
            self.lives[id] = Life(claimers)
            self.gate.arrived(id)

    @rule(id=IDS)
    def finish(self, id: str) -> None:
        life = self.lives.get(id)
        if life is None or not life.stepped or life.opened:
            return
        self.ended.append(id)
        if life.claimers:
            life.opened = True
            self.gate.open(id, "send", life.claimers)
            self.aggregator.expect("send", id)
        else:
            del self.lives[id]
            self.last.pop(id, None)

    @rule(id=IDS, pick=st.integers(0, 99))
    def report(self, id: str, pick: int) -> None:
        """A report that is owed, before its announcement or after."""
        life = self.lives.get(id)
        if life is None or not life.stepped or not life.owed(self.world):
            return
        owed = life.owed(self.world)
        child, rank = owed[pick % len(owed)]
        life.reported.add((child, rank))
        self._say(id, child, rank)

    @rule(id=IDS, pick=st.integers(0, 99))
    def duplicate(self, id: str, pick: int) -> None:
        """A second word, of an open life or of one that ended and did not come back."""
        life = self.lives.get(id) or self.last.get(id)
        if life is not None and life.reported:
            reported = sorted(life.reported)
            self._say(id, *reported[pick % len(reported)])

    @rule(id=IDS, child=CHILD, rank=st.integers(0, 3))
    def stranger(self, id: str, child: int, rank: int) -> None:
        """A child that does not claim this life."""
        life = self.lives.get(id)
        if life is not None and life.stepped and child not in life.claimers:
            self._say(id, child, rank % self.world)

    def _say(self, id: str, child: int, rank: int) -> None:
        self.ranks[rank].reports(child, TransferResults(frozenset({id})))

    @rule(repeat=st.booleans(), vetoing=st.frozensets(CHILD, max_size=1))
    def step(self, repeat: bool, vetoing: frozenset[int] = frozenset()) -> None:
        meta = self.gate.step()
        self.metas = [*self.metas[-3:], meta]
        ended, self.ended = self.ended, []
        for life in self.lives.values():
            life.stepped = True
        outputs = [self._rank_step(gate, self.metas if repeat else [meta], ended) for gate in self.ranks]
        part = self.aggregator.aggregate(outputs).kv_connector_output
        emitted = self._filter(part, vetoing)
        due = {id for id, life in self.lives.items() if life.opened and not life.owed(self.world)}
        blocked = {id for ids in self.held.values() for id in ids}
        assert emitted == due - blocked
        for id in emitted:
            self.last[id] = self.lives.pop(id)

    def _rank_step(self, gate: RankGate, metas: list[MultiStep], ended: list[str]) -> Any:
        for meta in metas:
            gate.bind(MultiStep(meta.sends, meta.loads, meta.again if meta is metas[-1] else ()))
        gate.ended(ended)
        results = gate.take()
        facts = WorkerFacts(tuple(gate.take_facts()))
        return SimpleNamespace(
            kv_connector_output=KVConnectorOutput(set(results.finished_sending), kv_connector_worker_meta=facts)
        )

    def _filter(self, part: KVConnectorOutput, vetoing: frozenset[int]) -> set[str]:
        for child, share in enumerate(self.gate.take(part.kv_connector_worker_meta.facts)):
            self.held[child] |= share.sent
            if child not in vetoing:
                self.gate.passed(child, self.held[child], (), ())
                self.held[child] = set()
        return set(self.gate.emit(part.finished_sending or (), (), ()).sent)

    def teardown(self) -> None:
        """Whatever is left is said; then every id has left and every table is empty."""
        if not hasattr(self, "world"):
            return
        self.step(repeat=False)
        for id in list(self.lives):
            self.finish(id)
        for id in list(self.lives):
            for child, rank in self.lives[id].owed(self.world):
                self.lives[id].reported.add((child, rank))
                self._say(id, child, rank)
        self.step(repeat=True)
        assert not self.lives
        assert len(self.gate.ledger) == 0 and not self.gate._held
        for gate in self.ranks:
            assert not gate._sends._open and not gate._sends._early


QUICK = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
HUNT = settings(
    QUICK, max_examples=400, phases=[Phase.generate], report_multiple_bugs=False, print_blob=False, database=None
)


def test_an_id_leaves_once_per_life_and_only_when_all_reported() -> None:
    run_state_machine_as_test(PolicyMachine, settings=QUICK)


class _Counting(ClaimTable):
    """Takes any report for any owed one, as counters do."""

    def report(self, id: str, child: int, failed: bool = False) -> None:
        claim = self._open.get(id)
        if claim is not None and child not in claim.owed:
            child = min(claim.owed)
        super().report(id, child, failed)


class _Forgetful(ClaimTable):
    """Drops what comes before its announcement."""

    def _unclaimed(self, id: str, child: int, failed: bool) -> None:
        return


class _Reopening(ClaimTable):
    """Takes a repeated announcement for a new one."""

    def announce(self, claim: Claim) -> None:
        self._newest = 0
        super().announce(claim)


class _Amnesiac(ClaimTable):
    """Forgets what it reported, so that a late duplicate counts for the next life."""

    def _complete(self, id: str, failed: bool) -> None:
        super()._complete(id, failed)
        self._done.clear()


@pytest.mark.parametrize("mutant", [_Counting, _Forgetful, _Reopening, _Amnesiac])
def test_the_model_tells_mutants_apart(mutant: type[ClaimTable]) -> None:
    machine = type(mutant.__name__, (PolicyMachine,), {"table": mutant})
    with pytest.raises(AssertionError):
        run_state_machine_as_test(machine, settings=HUNT)


def test_two_words_of_one_child_are_not_the_word_of_another() -> None:
    table = ClaimTable("send", 0, 8)
    table.announce(Claim("a", 1, (0, 1)))
    table.report("a", 0)
    table.report("a", 0)
    assert (table.take(), table.duplicates) == ([], 1)
    table.report("a", 1)
    assert table.take() == [("a", False)]
    assert [fact.child for fact in table.facts] == [(OWN, 0), (OWN, 1)]


def test_early_reports_are_bounded_and_the_loss_is_counted() -> None:
    table = ClaimTable("send", 0, 2)
    for id in "abc":
        table.report(id, 0)
    assert table.dropped == 1
    table.announce(Claim("a", 1, (0,)))
    table.announce(Claim("c", 2, (0,)))
    assert table.take() == [("c", False)]


def test_an_early_report_of_a_request_nobody_claimed_leaves_with_it() -> None:
    gate = RankGate(0)
    gate.reports(0, TransferResults(frozenset({"a"})))
    gate.ended(["a"])
    assert repr(gate) == "RankGate(send(open=0 early=0) recv(open=0 early=0))"
    assert gate.take_counts() == (0, 1)
    assert gate.take_counts() == (0, 0)


def test_first_match_loads_and_nobody_after_it_is_asked() -> None:
    def never() -> tuple[int | None, bool]:
        raise AssertionError("asked")

    assert choose([lambda: (0, False), lambda: (16, True), never]) == Match(1, 16, True)
    assert choose([lambda: (0, False), lambda: (None, False), never]).answer == (None, False)
    assert choose([lambda: (8, False), lambda: (None, False)]).answer == (8, False)
    assert choose([lambda: (0, False)]).answer == (0, False)


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        ([None, None], (None, ())),
        ([None, {"a": 1}], ({"a": 1}, ())),
        ([{"a": 1}, {"b": 2}], ({"a": 1, "b": 2}, ())),
        ([{"a": 1}, {"a": 1, "b": 2}], ({"a": 1, "b": 2}, ())),
        ([{"a": 1}, {"a": 2, "b": 2}, {"c": 3}], ({"a": 1, "c": 3}, (1,))),
    ],
)
def test_contradicting_params_are_left_out_whole(returned: Any, expected: Any) -> None:
    assert merge_params(returned) == expected


def test_own_facts_and_a_childs_facts_do_not_meet() -> None:
    """The child's life and ours have the same id, direction and n, and mean different things."""
    gate = EngineGate(2, [0])
    gate.open("a", "send", [1])
    assert gate.step().sends == (Claim("a", 1, (1,)),)
    shares = gate.take(prefixed(1, [Fact("a", "send", 1, 0, "done")]))
    assert shares[1].facts == (Fact("a", "send", 1, 0, "done"),) and not shares[1].sent
    shares = gate.take([Fact("a", "send", 1, 0, "done", (OWN, 1))])
    assert shares[1].sent == {"a"} and not shares[1].facts
    nested = prefixed(0, [Fact("a", "send", 1, 0, "done", (OWN, 1))])
    assert gate.take(nested)[0].facts == (Fact("a", "send", 1, 0, "done", (OWN, 1)),)


def test_only_a_childs_given_ids_can_be_let_through() -> None:
    gate = EngineGate(1, [0, 1])
    gate.open("a", "send", [0])
    gate.take([Fact("a", "send", 1, 0, "done", (OWN, 0))])
    gate.passed(0, ["a"], (), ())
    assert not gate.emit(["a"], (), ()).sent
    shares = gate.take([Fact("a", "send", 1, 1, "done", (OWN, 0))])
    gate.passed(0, shares[0].sent, (), ())
    assert gate.emit((), (), ()).sent == {"a"}


def test_unnamed_ids_pass_and_named_closed_lives_do_not() -> None:
    gate = EngineGate(1, [0])
    gate.take([Fact("old", "send", 7, 0, "done", (OWN, 0))])
    emit = gate.emit(["old", "sibling"], ["r"], ["r"])
    assert (emit.sent, emit.received, emit.failed) == ({"sibling"}, {"r"}, {"r"})
    assert gate.take_absorbed() == 2


@pytest.mark.parametrize("first", ["send", "recv"])
def test_a_request_that_owes_both_directions_is_released_by_the_later(first: str) -> None:
    gate = EngineGate(2, [0])
    gate.open("a", "recv", [0])
    gate.open("a", "send", [1])
    facts = {"recv": Fact("a", "recv", 1, 0, "done", (OWN, 0)), "send": Fact("a", "send", 2, 0, "done", (OWN, 1))}
    second = "send" if first == "recv" else "recv"
    emitted = []
    for direction in (first, second):
        shares = gate.take([facts[direction]])
        for child, share in enumerate(shares):
            gate.passed(child, share.sent, share.received, ())
        emit = gate.emit(["a"] if direction == "send" else (), ["a"] if direction == "recv" else (), ())
        emitted.append((set(emit.sent), set(emit.received)))
    assert emitted[0] == (set(), set())
    assert emitted[1] == (({"a"}, set()) if second == "send" else (set(), {"a"}))


@pytest.mark.parametrize("later", ["send", "recv"])
def test_a_child_that_owed_both_directions_lets_the_request_through_once(later: str) -> None:
    """A nested Multi emits the later of the two only; the outer one waited for the other for ever."""
    gate = EngineGate(1, [0])
    gate.open("a", "recv", [0])
    gate.open("a", "send", [0])
    first = gate.take([Fact("a", "recv", 1, 0, "done", (OWN, 0)), Fact("a", "send", 2, 0, "done", (OWN, 0))])
    assert (first[0].sent, first[0].received) == ({"a"}, {"a"})
    gate.passed(0, {"a"} if later == "send" else (), {"a"} if later == "recv" else (), ())
    emit = gate.emit(["a"], ["a"], ())
    assert len(emit.sent) + len(emit.received) == 1
    assert not gate._held and len(gate.ledger) == 0
