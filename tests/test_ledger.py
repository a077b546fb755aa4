"""C1 to C4 on the ledger of lives and on the gate in front of the scheduler: tables, a model, and mutants of both."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from kvconn.base import Direction, Fact, FactState
from kvconn.ledger import Child, CompletionGate, CompletionLedger, Emit, Outcome

NIXL: Child = (0,)
OFFLOAD: Child = (1,)


def fact(
    id: str, n: int, rank: int, direction: Direction = "send", state: FactState = "done", child: Child = ()
) -> Fact:
    return Fact(id, direction, n, rank, state, child)


def complete(ledger: CompletionLedger, id: str, direction: Direction) -> bool:
    life = ledger.get(id, direction)
    return life is not None and not life.owed


def opened(id: str = "r", direction: Direction = "send", world: int = 2, **kwargs: Any) -> tuple[CompletionLedger, int]:
    ledger = CompletionLedger()
    return ledger, ledger.open(id, direction, {(): range(world)}, **kwargs)


class TestIdentity:
    def test_every_rank_once_completes(self) -> None:
        ledger, n = opened(world=3)
        assert [ledger.report(fact("r", n, rank)) for rank in (2, 0, 1)] == [
            Outcome.ADDED,
            Outcome.ADDED,
            Outcome.COMPLETED,
        ]
        assert complete(ledger, "r", "send")

    def test_a_rank_that_repeats_itself_does_not_stand_in_for_another(self) -> None:
        ledger, n = opened(world=2)
        ledger.report(fact("r", n, 1))
        assert [ledger.report(fact("r", n, 1)) for _ in range(5)] == [Outcome.DUPLICATE] * 5
        assert not complete(ledger, "r", "send")
        assert ledger.absorbed == {Outcome.DUPLICATE: 5}

    def test_a_word_on_one_life_is_none_on_the_next(self) -> None:
        ledger, n = opened("a", world=2)
        later = ledger.open("b", "send", {(): range(2)})
        ledger.report(fact("b", later, 0))
        last = ledger.open("c", "send", {(): range(2)})
        ledger.report(fact("c", last, 1))
        owed = [life.owed for life in ledger.pending()]
        assert owed == [(((), (0, 1)),), (((), (1,)),), (((), (0,)),)]
        assert ledger.report(fact("a", n, 0)) is Outcome.ADDED

    def test_a_rank_outside_the_world_is_absorbed(self) -> None:
        ledger, n = opened(world=2)
        ledger.report(fact("r", n, 7))
        ledger.report(fact("r", n, -1))
        pending = ledger.get("r", "send")
        assert pending is not None
        assert pending.owed == (((), (0, 1)),)

    def test_a_child_that_never_claimed_is_a_stranger(self) -> None:
        ledger, n = opened()
        assert ledger.report(fact("r", n, 0, child=(4,))) is Outcome.STRANGER
        assert not complete(ledger, "r", "send")

    @pytest.mark.parametrize("world", [2, 8])
    def test_replicated_ranks_first_leave_exactly_rank_0_outstanding(self, world: int) -> None:
        ledger, n = opened(world=world)
        for rank in range(1, world):
            assert ledger.report(fact("r", n, rank)) is Outcome.ADDED
        (pending,) = ledger.pending()
        assert pending.owed == (((), (0,)),)
        assert ledger.report(fact("r", n, 0)) is Outcome.COMPLETED

    def test_each_child_needs_each_of_its_ranks(self) -> None:
        ledger = CompletionLedger()
        n = ledger.open("r", "send", {NIXL: range(2), OFFLOAD: range(2)})
        for child, rank in ((NIXL, 0), (NIXL, 1), (OFFLOAD, 0)):
            assert ledger.report(fact("r", n, rank, child=child)) is Outcome.ADDED
        (pending,) = ledger.pending()
        assert pending.owed == ((OFFLOAD, (1,)),)
        assert ledger.report(fact("r", n, 1, child=OFFLOAD)) is Outcome.COMPLETED

    def test_a_quorum_is_of_distinct_ranks_of_that_child_only(self) -> None:
        ledger = CompletionLedger()
        n = ledger.open("r", "send", {NIXL: range(4), OFFLOAD: range(2)}, quorum={NIXL: 2})
        ledger.report(fact("r", n, 3, child=NIXL))
        ledger.report(fact("r", n, 3, child=NIXL))
        ledger.report(fact("r", n, 0, child=OFFLOAD))
        ledger.report(fact("r", n, 1, child=OFFLOAD))
        assert not complete(ledger, "r", "send")
        assert ledger.report(fact("r", n, 1, child=NIXL)) is Outcome.COMPLETED
        assert ledger.report(fact("r", n, 2, child=NIXL)) is Outcome.ADDED  # it completed before

    def test_a_quorum_above_the_world_asks_for_the_world(self) -> None:
        ledger = CompletionLedger()
        n = ledger.open("r", "send", {(): range(2)}, quorum={(): 9})
        ledger.report(fact("r", n, 0))
        assert not complete(ledger, "r", "send")
        assert ledger.report(fact("r", n, 1)) is Outcome.COMPLETED


class TestLives:
    def test_each_life_has_its_own_n(self) -> None:
        ledger = CompletionLedger()
        ns = [
            ledger.open("a", "send", {(): [0]}),
            ledger.open("a", "recv", {(): [0]}),
            ledger.open("b", "send", {(): [0]}),
        ]
        assert ns == sorted(set(ns))
        assert min(ns) >= 1  # 0 means "none" to a worker

    def test_a_pair_that_is_open_cannot_be_opened_again(self) -> None:
        ledger, n = opened()
        with pytest.raises(ValueError, match=rf"life of r \(send\) is open already: {n}"):
            ledger.open("r", "send", {(): [0]})
        assert len(ledger) == 1

    def test_a_word_on_an_earlier_life_does_not_count_for_the_present_one(self) -> None:
        ledger, first = opened(world=1)
        ledger.report(fact("r", first, 0))
        assert ledger.pop_ready("r", "send", require_seen=False) is not None
        second = ledger.open("r", "send", {(): [0]})
        assert ledger.report(fact("r", first, 0)) is Outcome.UNKNOWN
        assert not complete(ledger, "r", "send")
        assert ledger.report(fact("r", second, 0)) is Outcome.COMPLETED

    def test_a_word_on_a_closed_or_unheard_of_life_is_absorbed_and_leaves_no_tombstone(self) -> None:
        ledger, n = opened()
        ledger.close("r", "send")
        for id in ("r", "never"):
            assert ledger.report(fact(id, n, 0)) is Outcome.UNKNOWN
        assert (len(ledger), ledger.pending(), ledger.absorbed[Outcome.UNKNOWN]) == (0, [], 2)

    def test_directions_are_apart(self) -> None:
        ledger = CompletionLedger()
        send = ledger.open("r", "send", {(): [0]})
        recv = ledger.open("r", "recv", {(): [0]})
        assert ledger.report(fact("r", send, 0, "recv")) is Outcome.UNKNOWN
        ledger.report(fact("r", recv, 0, "recv"))
        assert (complete(ledger, "r", "recv"), complete(ledger, "r", "send")) == (True, False)

    def test_pop_waits_for_completion_and_for_being_seen(self) -> None:
        ledger, n = opened(world=1)
        assert ledger.pop_ready("r", "send") is None
        ledger.report(fact("r", n, 0))
        assert ledger.pop_ready("r", "send") is None
        assert ledger.mark_seen("r", "send")
        closed = ledger.pop_ready("r", "send")
        assert closed is not None
        assert (closed.id, closed.direction, closed.n, closed.failed) == ("r", "send", n, False)
        assert ledger.pop_ready("r", "send") is None
        assert not ledger.mark_seen("r", "send")

    def test_close_gives_the_life_whatever_it_is_owed(self) -> None:
        ledger, n = opened()
        closed = ledger.close("r", "send")
        assert closed is not None
        assert closed.n == n
        assert ledger.close("r", "send") is None


class TestFailedIsNotQuiet:
    def test_a_failed_rank_is_owed_until_it_is_quiet(self) -> None:
        ledger, n = opened(direction="recv", world=2)
        ledger.report(fact("r", n, 0, "recv", "failed"))
        ledger.report(fact("r", n, 1, "recv", "done"))
        assert not complete(ledger, "r", "recv")
        assert ledger.report(fact("r", n, 0, "recv", "quiet")) is Outcome.COMPLETED
        closed = ledger.pop_ready("r", "recv", require_seen=False)
        assert closed is not None
        assert closed.failed

    def test_done_after_failed_is_not_quiet(self) -> None:
        ledger, n = opened(direction="recv", world=1)
        ledger.report(fact("r", n, 0, "recv", "failed"))
        assert ledger.report(fact("r", n, 0, "recv", "done")) is Outcome.DUPLICATE
        assert not complete(ledger, "r", "recv")

    def test_a_second_failed_is_a_duplicate(self) -> None:
        ledger, n = opened(direction="recv", world=1)
        assert ledger.report(fact("r", n, 0, "recv", "failed")) is Outcome.ADDED
        assert ledger.report(fact("r", n, 0, "recv", "failed")) is Outcome.DUPLICATE
        assert ledger.absorbed == {Outcome.DUPLICATE: 1}

    def test_failed_after_done_changes_nothing(self) -> None:
        ledger, n = opened(direction="recv", world=2)
        ledger.report(fact("r", n, 0, "recv", "done"))
        assert ledger.report(fact("r", n, 0, "recv", "failed")) is Outcome.DUPLICATE
        ledger.report(fact("r", n, 1, "recv", "done"))
        closed = ledger.pop_ready("r", "recv", require_seen=False)
        assert closed is not None
        assert not closed.failed


class TestNaming:
    def test_pending_names_ranks_per_child_and_age(self) -> None:
        ledger = CompletionLedger()
        n = ledger.open("req-1", "send", {NIXL: range(8), OFFLOAD: range(2), (2,): range(4)}, now=10.0)
        ledger.report(fact("req-1", n, 0, child=NIXL))
        ledger.report(fact("req-1", n, 1, child=OFFLOAD))
        ledger.report(fact("req-1", n, 1, child=(2,)))
        line = ledger.pending()[0].describe({NIXL: "NixlConnector", OFFLOAD: "OffloadingConnector"}, now=41.54)
        assert line == (
            "send of req-1 (life 1) owed by NixlConnector ranks 1..7, OffloadingConnector rank 0, "
            "(2,) ranks 0,2,3 for 31.5 s"
        )

    def test_a_life_that_only_waits_to_be_seen_is_owed_by_nobody(self) -> None:
        ledger, n = opened(world=1)
        ledger.report(fact("r", n, 0))
        assert ledger.pending()[0].describe({}) == f"send of r (life {n}) owed by nobody"

    def test_the_outermost_connector_without_a_name_is_called_connector(self) -> None:
        ledger, _ = opened(world=1)
        assert "owed by connector rank 0" in ledger.pending()[0].describe({})

    def test_overdue_lists_old_incomplete_lives_only(self) -> None:
        ledger = CompletionLedger()
        ledger.open("old", "send", {(): [0]}, now=0.0)
        ledger.open("young", "send", {(): [0]}, now=25.0)
        ledger.open("ageless", "send", {(): [0]})
        done = ledger.open("done", "send", {(): [0]}, now=0.0)
        ledger.report(fact("done", done, 0))
        assert [p.id for p in ledger.overdue(now=31.0, after=30.0)] == ["old"]
        assert ledger.overdue(now=30.0, after=30.0) == []

    def test_pending_is_oldest_first(self) -> None:
        ledger = CompletionLedger()
        for id in ("c", "a", "b"):
            ledger.open(id, "send", {(): [0]})
        assert [p.id for p in ledger.pending()] == ["c", "a", "b"]

    def test_repr_is_one_line(self) -> None:
        ledger, n = opened()
        ledger.open("q", "recv", {(): [0]})
        ledger.report(fact("r", n, 0))
        ledger.report(fact("r", n, 0))
        assert repr(ledger) == "CompletionLedger(send=1 recv=1 absorbed=1)"


class TestGate:
    def gate(self, world: int = 1, direction: Direction = "send") -> tuple[CompletionGate, int]:
        ledger, n = opened(world=world, direction=direction)
        return CompletionGate(ledger), n

    def test_an_id_no_fact_and_no_life_names_is_a_siblings_and_passes(self) -> None:
        gate, _ = self.gate()
        emit = gate.reports(["x"], ["y", "z"], ["z"], [])
        assert emit == Emit(frozenset("x"), frozenset("yz"), frozenset("z"))
        assert len(gate.ledger) == 1

    def test_an_id_of_ours_is_held_back_until_complete_then_emitted_without_being_seen_again(self) -> None:
        gate, n = self.gate(world=2)
        assert gate.reports(["r"], [], [], [fact("r", n, 0)]) == Emit()
        assert gate.reports([], [], [], [fact("r", n, 1)]) == Emit(sent=frozenset("r"))
        assert len(gate.ledger) == 0

    def test_a_complete_life_is_never_emitted_before_the_engines_sets_named_it(self) -> None:
        gate, n = self.gate()
        assert gate.reports([], [], [], [fact("r", n, 0)]) == Emit()
        assert gate.reports([], ["r"], [], []) == Emit(received=frozenset("r"))  # another direction: a sibling's
        assert gate.reports(["r"], [], [], []) == Emit(sent=frozenset("r"))

    def test_a_closed_life_named_again_is_removed_and_counted(self) -> None:
        gate, n = self.gate()
        assert gate.reports(["r"], [], [], [fact("r", n, 0)]).sent == {"r"}
        assert gate.reports(["r"], [], [], [fact("r", n, 0)]) == Emit()
        assert gate.late == 1

    def test_failed_is_withheld_until_quiet_and_emitted_with_received(self) -> None:
        gate, n = self.gate(direction="recv")
        assert gate.reports([], ["r"], ["r"], [fact("r", n, 0, "recv", "failed")]) == Emit()
        assert gate.reports([], [], [], [fact("r", n, 0, "recv", "quiet")]) == Emit(
            received=frozenset("r"), failed=frozenset("r")
        )

    def test_a_failure_that_is_quiet_at_once_is_emitted_at_once(self) -> None:
        gate, n = self.gate(direction="recv")
        facts = [fact("r", n, 0, "recv", "failed"), fact("r", n, 0, "recv", "quiet")]
        assert gate.reports([], ["r"], ["r"], facts) == Emit(received=frozenset("r"), failed=frozenset("r"))

    def test_a_siblings_failure_without_its_receive_waits_for_it(self) -> None:
        gate, _ = self.gate()
        assert gate.reports([], [], ["s"], []) == Emit()

    def test_one_step_may_close_a_life_and_say_it_twice(self) -> None:
        gate, n = self.gate()
        assert gate.reports(["r", "r"], [], [], [fact("r", n, 0), fact("r", n, 0)]).sent == {"r"}
        assert len(gate.ledger) == 0

    def test_the_sets_given_are_not_touched(self) -> None:
        gate, n = self.gate(world=2)
        sent, received, failed = {"r", "x"}, {"y"}, {"y"}
        gate.reports(sent, received, failed, [fact("r", n, 0)])
        assert (sent, received, failed) == ({"r", "x"}, {"y"}, {"y"})


# --- the model ----------------------------------------------------------------------------------------------------

RANKS = range(2)
CHILDREN: tuple[Child, ...] = ((), (1,))
PARTIES = [(child, rank) for child in CHILDREN for rank in RANKS]


class _ModelLife(msgspec.Struct):
    id: str
    direction: Direction
    owed: dict[tuple[Child, int], list[str]]
    seen: bool = False
    open: bool = True

    def settled(self, words: list[str]) -> bool:
        """A party is settled by ``quiet``, or by ``done`` if it did not fail before."""
        return "quiet" in words or ("done" in words and "failed" not in words[: words.index("done")])

    def first_settled(self, words: list[str]) -> int:
        return next((i for i in range(1, len(words) + 1) if self.settled(words[:i])), len(words))

    @property
    def complete(self) -> bool:
        return all(self.settled(words) for words in self.owed.values())

    @property
    def failed(self) -> bool:
        return any("failed" in words[: self.first_settled(words)] for words in self.owed.values())


class TestBothDirections:
    @pytest.mark.parametrize(("first", "second"), [("send", "recv"), ("recv", "send")])
    @pytest.mark.parametrize("together", [False, True])
    def test_a_request_that_owes_both_is_emitted_once_at_the_later(
        self, first: Direction, second: Direction, together: bool
    ) -> None:
        ledger = CompletionLedger()
        gate = CompletionGate(ledger)
        lives: dict[Direction, int] = {d: ledger.open("r", d, {(): [0]}) for d in ("send", "recv")}

        def step(*directions: Direction) -> int:
            facts = [Fact("r", d, lives[d], 0, "done") for d in directions]
            emit = gate.reports(["r"] if "send" in directions else [], ["r"] if "recv" in directions else [], [], facts)
            return len(emit.sent) + len(emit.received)

        assert (step(first, second) if together else step(first) * 10 + step(second)) == 1
        assert len(ledger) == 0


class GateAgainstAModel(RuleBasedStateMachine):
    """Emitted exactly once, only when every party reported and the sets named the id; nothing is originated."""

    ledger_class: ClassVar[type[CompletionLedger]] = CompletionLedger

    def __init__(self) -> None:
        super().__init__()
        self.gate = CompletionGate(self.ledger_class())
        self.lives: dict[int, _ModelLife] = {}
        self.facts: list[Fact] = []
        self.sets: dict[str, set[str]] = {"send": set(), "recv": set(), "failed": set()}
        self.ever_seen: set[tuple[str, str]] = set()

    def life_of(self, id: str, direction: str) -> _ModelLife | None:
        return next((x for x in self.lives.values() if x.open and (x.id, x.direction) == (id, direction)), None)

    @rule(
        id=st.sampled_from("ab"),
        direction=st.sampled_from(["send", "recv"]),
        parties=st.sets(st.sampled_from(PARTIES), min_size=1, max_size=3),
    )
    def open(self, id: str, direction: Direction, parties: set[tuple[Child, int]]) -> None:
        owed: dict[Child, list[int]] = {}
        for child, rank in parties:
            owed.setdefault(child, []).append(rank)
        if self.life_of(id, direction) is not None:
            with pytest.raises(ValueError, match="open already"):
                self.gate.ledger.open(id, direction, owed)
            return
        n = self.gate.ledger.open(id, direction, owed)
        assert n not in self.lives
        self.lives[n] = _ModelLife(id, direction, {party: [] for party in parties})

    @precondition(lambda self: self.lives)
    @rule(
        data=st.data(),
        state=st.sampled_from(["done", "done", "failed", "quiet"]),
        stale=st.booleans(),
        stranger=st.integers(0, 7),
    )
    def say(self, data: st.DataObject, state: FactState, stale: bool, stranger: int) -> None:
        lives = [n for n, life in self.lives.items() if stale or life.open] or list(self.lives)
        n = data.draw(st.sampled_from(lives))
        life = self.lives[n]
        party = data.draw(st.sampled_from(sorted(life.owed) if stranger else PARTIES))
        self.facts.append(Fact(life.id, life.direction, n, party[1], state, party[0]))

    @precondition(lambda self: any(life.open for life in self.lives.values()))
    @rule(data=st.data(), then_step=st.booleans())
    def see_ours(self, data: st.DataObject, then_step: bool) -> None:
        life = data.draw(st.sampled_from([life for life in self.lives.values() if life.open]))
        self.sets[life.direction].add(life.id)
        if then_step:
            self.step()

    @rule(id=st.sampled_from("absz"), direction=st.sampled_from(["send", "recv"]))
    def see(self, id: str, direction: str) -> None:
        self.sets[direction].add(id)

    @precondition(lambda self: self.lives)
    @rule(data=st.data(), state=st.sampled_from(["done", "quiet"]), missing=st.integers(0, 2))
    def almost_everybody_says(self, data: st.DataObject, state: FactState, missing: int) -> None:
        n = data.draw(st.sampled_from(list(self.lives)))
        life = self.lives[n]
        for child, rank in sorted(life.owed)[missing // 2 :]:
            self.facts.append(Fact(life.id, life.direction, n, rank, state, child))

    def come_back(self) -> list[int]:
        """Closed lives whose id is open again."""
        return [n for n, x in self.lives.items() if not x.open and self.life_of(x.id, x.direction) is not None]

    @precondition(lambda self: self.come_back())
    @rule(data=st.data())
    def late_words_on_an_earlier_life(self, data: st.DataObject) -> None:
        n = data.draw(st.sampled_from(self.come_back()))
        life = self.lives[n]
        self.facts += [Fact(life.id, life.direction, n, rank, "done", child) for child, rank in PARTIES]

    @rule(id=st.sampled_from("sz"))
    def sibling_fails(self, id: str) -> None:
        self.sets["recv"].add(id)
        self.sets["failed"].add(id)

    @rule()
    def step(self) -> None:
        facts, self.facts = self.facts, []
        sets, self.sets = self.sets, {"send": set(), "recv": set(), "failed": set()}
        self.ever_seen |= {(id, d) for d in ("send", "recv") for id in sets[d]}
        for f in facts:
            life = self.lives[f.n]
            if life.open and (f.child, f.rank) in life.owed:
                life.owed[f.child, f.rank].append(f.state)
        emit = self.gate.reports(sets["send"], sets["recv"], sets["failed"], facts)
        failed = set(sets["failed"])
        for direction, got in (("send", emit.sent), ("recv", emit.received)):
            expected, our_failed = self._expect(direction, sets[direction], facts)
            assert got == expected
            assert all((id, direction) in self.ever_seen for id in got), "originated"
            failed |= our_failed
        assert emit.failed == failed

    def _expect(self, direction: str, seen: set[str], facts: Iterable[Fact]) -> tuple[set[str], set[str]]:
        named = {f.id for f in facts if f.direction == direction}
        out: set[str] = set()
        for id in seen:
            life = self.life_of(id, direction)
            if life is not None:
                life.seen = True
            elif id not in named:
                out.add(id)
        ready = [x for x in self.lives.values() if x.direction == direction and x.open and x.seen and x.complete]
        for life in ready:
            life.open = False
        other = "recv" if direction == "send" else "send"
        ready = [x for x in ready if self.life_of(x.id, other) is None]  # both owed: only the later is emitted
        return out | {x.id for x in ready}, {x.id for x in ready if x.failed and direction == "recv"}

    @invariant()
    def open_lives_are_the_models(self) -> None:
        assert len(self.gate.ledger) == sum(x.open for x in self.lives.values())

    def teardown(self) -> None:
        """Everybody speaks at last: every table is empty."""
        for n, life in self.lives.items():
            if life.open:
                self.sets[life.direction].add(life.id)
                self.facts += [Fact(life.id, life.direction, n, rank, "quiet", child) for child, rank in life.owed]
        self.step()
        assert len(self.gate.ledger) == 0
        assert self.gate.ledger.pending() == []


#: without shrinking: a mutant has to be found, not explained.
MUTANT_PHASES = (Phase.generate,)
MODEL = settings(
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=150,
    stateful_step_count=50,
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)


def test_the_gate_behaves_as_the_naive_model() -> None:
    run_state_machine_as_test(GateAgainstAModel, settings=MODEL)


class CountsReports(CompletionLedger):
    """Mutant: completion is a number of reports, as in the engines this project is about (against C3)."""

    def report(self, fact: Fact, child: Child | None = None) -> Outcome:
        life = self._open[fact.direction].get(fact.id)
        if life is not None and life.n == fact.n and life.owed.get(fact.child):
            left = life.owed[fact.child] & life.owed[fact.child] - 1  # whoever said it
            life.owed = {**life.owed, fact.child: left}
            if not left:
                life.settled = (*life.settled, fact.child)
            return Outcome.COMPLETED if life.complete else Outcome.ADDED
        return super().report(fact, child)


class Originates(CompletionLedger):
    """Mutant: a complete life leaves although the engine's sets never named it."""

    def pop_ready(self, id: str, direction: Direction, *, require_seen: bool = True) -> Any:
        return super().pop_ready(id, direction, require_seen=False)


class IgnoresLives(CompletionLedger):
    """Mutant: a late word on the last life counts for the present one (against C4)."""

    def report(self, fact: Fact, child: Child | None = None) -> Outcome:
        pending = self.get(fact.id, fact.direction)
        return super().report(fact if pending is None else msgspec.structs.replace(fact, n=pending.n), child)


class FreesWhatFailed(CompletionLedger):
    """Mutant: a failure gives the blocks back at once (against C6)."""

    def _fail(self, life: Any, child: Child, ranks: int, why: str) -> Outcome:
        outcome = super()._fail(life, child, ranks, why)
        life.owed = {**life.owed, child: life.owed[child] & ~ranks}
        if not life.owed[child] and child not in life.settled:
            life.settled = (*life.settled, child)
        return outcome


class KeepsClosedLives(CompletionLedger):
    """Mutant: nothing is ever forgotten."""

    def pop_ready(self, id: str, direction: Direction, *, require_seen: bool = True) -> Any:
        life = self._open[direction].get(id)
        closed = super().pop_ready(id, direction, require_seen=require_seen)
        if closed is not None and life is not None:
            self._open[direction][id] = life
        return closed


@pytest.mark.parametrize("mutant", [CountsReports, Originates, IgnoresLives, FreesWhatFailed, KeepsClosedLives])
def test_the_model_catches(mutant: type[CompletionLedger]) -> None:
    machine = type(f"Gate_{mutant.__name__}", (GateAgainstAModel,), {"ledger_class": mutant})
    with pytest.raises(AssertionError):
        run_state_machine_as_test(machine, settings=settings(MODEL, phases=MUTANT_PHASES, max_examples=2000))
