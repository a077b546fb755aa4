"""The policy against a model: an id leaves once per life, when and only when every (claiming child, rank) reported."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from kvconn.aggregator import KVOutputAggregator
from kvconn.base import Fact, KVBlocks, KVConnectorOutput, TransferResults, WorkerFacts
from kvconn.multi.policy import (
    OWN,
    Claim,
    ClaimTable,
    EngineGate,
    MultiStep,
    RankGate,
    prefixed,
)
from kvconn.multi.ranges import Ask, Match, choose, merge_params

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

    rank: type[RankGate] = RankGate

    @initialize(world=st.integers(1, 4))
    def begin(self, world: int) -> None:
        self.world = world
        self.ranks = [self.rank(rank) for rank in range(world)]
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
            gate.bind(meta)
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
    QUICK, max_examples=2000, phases=[Phase.generate], report_multiple_bugs=False, print_blob=False, database=None
)


def test_an_id_leaves_once_per_life_and_only_when_all_reported() -> None:
    run_state_machine_as_test(PolicyMachine, settings=QUICK)


class _Counting(ClaimTable):
    """Takes any report for any owed one, as counters do."""

    def report(self, id: str, child: int, settled: bool = True) -> None:
        claim = self._open.get(id)
        if claim is not None and child not in claim.owed:
            child = min(claim.owed)
        super().report(id, child, settled)


class _Forgetful(ClaimTable):
    """Drops what comes before its announcement."""

    def _unclaimed(self, id: str, child: int, settled: bool) -> None:
        return


class _Reopening(RankGate):
    """Takes a repeated announcement for a new one."""

    def bind(self, step: MultiStep) -> None:
        self._newest = 0
        super().bind(step)


class _Amnesiac(ClaimTable):
    """Forgets what it reported and takes any early word, so that a late duplicate counts for the next life."""

    def _end(self, id: str) -> None:
        super()._end(id)
        self._done.clear()

    def arrived(self, id: str) -> None:
        return


def with_table(table: type[ClaimTable]) -> type[RankGate]:
    """A rank whose tables are of this class."""
    return type(table.__name__, (RankGate,), {"table": table})


MUTANTS = [with_table(_Counting), with_table(_Forgetful), _Reopening, with_table(_Amnesiac)]


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_model_tells_mutants_apart(mutant: type[RankGate]) -> None:
    machine = type(mutant.__name__, (PolicyMachine,), {"rank": mutant})
    with pytest.raises(AssertionError):
        run_state_machine_as_test(machine, settings=HUNT)


def test_two_words_of_one_child_are_not_the_word_of_another() -> None:
    table = ClaimTable("send", 0)
    table.announce(Claim("a", 1, (0, 1)))
    table.report("a", 0)
    table.report("a", 0)
    assert (table.take(), table.duplicates) == ([], 1)
    table.report("a", 1)
    assert table.take() == [("a", False)]
    assert [fact.child for fact in table.facts] == [(OWN, 0), (OWN, 1)]


def test_early_reports_are_bounded_and_the_loss_is_counted() -> None:
    table = ClaimTable("send", 0, early_max=2)
    for id in "abc":
        table.report(id, 0)
    assert table.dropped == 1
    table.announce(Claim("a", 1, (0,)))
    table.announce(Claim("c", 2, (0,)))
    assert table.take() == [("c", False)]


def test_a_report_older_than_its_request_is_not_about_it() -> None:
    """However little is remembered: a duplicate that nobody remembers cannot complete the id's next life."""
    table = ClaimTable("send", 0, memory=1)
    for n, id in enumerate("ab", 1):
        table.arrived(id)
        table.announce(Claim(id, n, (0,)))
        table.report(id, 0)
    table.report("a", 0)  # of a life that fell out of memory
    table.arrived("a")
    table.announce(Claim("a", 3, (0,)))
    assert table.take() == [("a", False), ("b", False)]
    assert (table.dropped, repr(table)) == (1, "send(open=1 early=0)")


def test_a_remembered_id_that_comes_back_is_heard_before_its_claim() -> None:
    """However much is remembered: the engine tells of every arrival, so that no early word is taken for an old one."""
    gate, rank = EngineGate(1, [0]), RankGate(0)
    for _ in range(2):
        gate.arrived("a")
        rank.bind(gate.step())
        rank.reports(0, TransferResults(frozenset({"a"})))
        gate.open("a", "send", [0])
        rank.bind(gate.step())
        assert rank.take().finished_sending == {"a"}
        shares = gate.take(rank.take_facts())
        gate.passed(0, shares[0].sent, (), ())
        assert gate.emit(["a"], (), ()).sent == {"a"}


def test_failed_is_a_result_and_received_the_release() -> None:
    table = ClaimTable("recv", 0)
    table.announce(Claim("a", 1, (0, 1)))
    table.report("a", 0, settled=False)
    table.report("a", 0, settled=False)
    table.report("a", 1)
    assert table.take() == []
    table.report("a", 0)
    assert table.take() == [("a", True)]
    assert [(f.state, f.child[1]) for f in table.facts] == [("failed", 0), ("done", 1), ("quiet", 0)]
    assert table.duplicates == 1


def test_an_early_failure_waits_for_its_claim() -> None:
    table = ClaimTable("recv", 0)
    for settled in (False, False, True, True, False):
        table.report("a", 0, settled)
    assert table.duplicates == 3
    table.announce(Claim("a", 1, (0,)))
    assert table.take() == [("a", True)]


# --- a quorum -----------------------------------------------------------------------------------------------------


def test_a_child_with_a_quorum_is_not_waited_for_and_speaks_until_the_life_closes() -> None:
    table = ClaimTable("send", 2)
    table.announce(Claim("a", 1, (0,), spare=(1,)))
    table.report("a", 0)
    assert table.take() == [("a", False)]
    assert repr(table) == "send(open=1 early=0)"
    table.report("a", 1)
    assert [fact.child for fact in table.facts] == [(OWN, 0), (OWN, 1)]
    assert repr(table) == "send(open=0 early=0)"


def test_a_quorum_is_of_distinct_ranks_and_of_sends_only() -> None:
    gate = EngineGate(2, range(3), {1: 2})

    def said(*facts: tuple[int, int]) -> set[str]:
        shares = gate.take([Fact("a", "send", 1, rank, "done", (OWN, child)) for rank, child in facts])
        for child, share in enumerate(shares):
            gate.passed(child, share.sent, (), ())
        return set(gate.emit(["a"] if not gate.unshipped else (), (), ()).sent)

    gate.open("a", "send", [0, 1])
    gate.open("a", "recv", [1])
    assert gate.step().sends == (Claim("a", 1, (0,), (1,)),)
    gate.ledger.close("a", "recv")
    del gate._held["a", "recv"]
    assert said((0, 0), (1, 0), (2, 0)) == set()
    assert said((0, 1), (0, 1)) == set()
    assert said((2, 1)) == {"a"}
    assert gate.unshipped and gate.step().closed == (("a", 1),) and not gate.unshipped


def test_the_word_that_a_quorum_did_not_need_is_absorbed_when_it_comes() -> None:
    table = ClaimTable("send", 0)
    table.announce(Claim("a", 1, (), spare=(0,)))
    table.close("a", 1)
    assert repr(table) == "send(open=0 early=0)"
    table.arrived("a")
    table.announce(Claim("a", 2, (), spare=(0,)))
    table.report("a", 0)  # of the first life
    assert (table.facts, table.duplicates) == ([], 1)
    table.report("a", 0)
    assert [fact.n for fact in table.facts] == [2]


def test_a_receive_waits_for_every_rank_of_a_child_with_a_quorum() -> None:
    gate = EngineGate(1, range(2), {0: 1})
    gate.open("a", "recv", [0])
    assert gate.step().loads == (Claim("a", 1, (0,)),)
    gate.take([Fact("a", "recv", 1, 0, "done", (OWN, 0))])
    assert gate.explain({0: "Child"}, 0.0) == ["recv of a (life 1) owed by Child rank 1"]


def test_an_early_report_of_a_request_nobody_claimed_leaves_with_it() -> None:
    gate = RankGate(0)
    gate.reports(0, TransferResults(frozenset({"a"})))
    gate.ended(["a"])
    assert repr(gate) == "RankGate(send(open=0 early=0) recv(open=0 early=0))"
    assert gate.take_counts() == (0, 1)
    assert gate.take_counts() == (0, 0)


Answer = tuple[int | None, bool]


def chain(*answers: Answer, start: int = 16, total: int = 160) -> tuple[Match, list[int]]:
    """What children with these answers are chosen for, in blocks of 16, and what each was asked."""
    asked: list[int] = []

    def answering(answer: Answer) -> Ask:
        return lambda tokens: (asked.append(tokens), answer)[1]

    return choose([answering(answer) for answer in answers], start, 16, total), asked


def spans(match: Match) -> list[tuple[int, int, int]]:
    return [(part.child, part.start, part.stop) for part in match.ranges]


def test_each_child_is_asked_for_what_lies_behind_the_earlier_ones() -> None:
    match, asked = chain((32, True), (0, True), (48, True), (8, True))
    assert asked == [16, 48, 48, 96]
    assert spans(match) == [(0, 16, 48), (2, 48, 96), (3, 96, 104)]
    assert match.answer == (88, True)


def test_an_offer_that_ends_inside_a_block_ends_the_row() -> None:
    match, asked = chain((0, True), (20, True), (16, True))
    assert (spans(match), asked) == ([(1, 16, 36)], [16, 16])


def test_nobody_is_asked_behind_the_end_of_the_request() -> None:
    match, asked = chain((48, True), (16, True), total=64)
    assert (spans(match), asked) == ([(0, 16, 64)], [16])


def test_not_yet_delays_before_a_match_and_ends_the_row_after_one() -> None:
    assert chain((0, False), (None, False), (16, True))[0].answer == (None, False)
    match, asked = chain((16, False), (None, False), (16, True))
    assert (match.answer, asked) == ((16, False), [16, 32])
    assert chain((0, False), (0, True))[0].answer == (0, False)


def test_a_row_is_asynchronous_when_one_range_is() -> None:
    assert chain((16, False), (16, False))[0].answer == (32, False)
    assert chain((16, False), (16, True))[0].answer == (32, True)
    assert chain((16, True), (16, False))[0].answer == (32, True)


@pytest.mark.parametrize(
    ("allocated", "left"),
    [
        (0, []),
        (16, [(0, 16, 32)]),
        (32, [(0, 16, 48)]),
        (40, [(0, 16, 48), (1, 48, 56)]),
        (64, [(0, 16, 48), (1, 48, 80)]),
    ],
)
def test_fewer_allocated_tokens_cut_the_row_from_behind(allocated: int, left: list[tuple[int, int, int]]) -> None:
    match, _ = chain((32, True), (32, True))
    assert [(part.child, part.start, part.stop) for part in match.cut(allocated)] == left


def test_a_child_sees_what_lies_before_its_range_as_there() -> None:
    match, _ = chain((32, True), (32, True))
    blocks = KVBlocks((tuple(range(5)), tuple(range(10, 15))), (1, 1))
    assert [match.blocks(blocks, part, 16).hashed for part in match.ranges] == [(1, 1), (3, 3)]
    assert {match.blocks(blocks, part, 16).ids for part in match.ranges} == {blocks.ids}


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
