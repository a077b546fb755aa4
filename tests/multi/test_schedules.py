"""The whole policy under random schedules: ranges, both directions, quorums, aborts, duplicates, ids that come back.

Rules
1. The gates, the tables, the row of ranges and the aggregator are the real ones; children are said to report by rules.
2. The model knows of each life which (child, rank) owe a word, and that a child with a quorum needs any so many ranks.
3. What must hold after every step: the engine is told exactly the lives that are complete and were not told before, a
   request with both lives open at the later one, failures with their load. At the end every table is empty.
4. Ranks remember one ended id: what is remembered may decide about counters, never about a completion.
5. Each mutant breaks one line of the rules and must be caught.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from kvconn.aggregator import KVOutputAggregator
from kvconn.base import Direction, Fact, KVConnectorOutput, TransferResults, WorkerFacts
from kvconn.multi.policy import ClaimTable, EngineGate, MultiStep, RankGate
from kvconn.multi.ranges import Ask, Match, choose

CHILDREN = 3
BLOCK = 16
TOTAL = 8 * BLOCK
IDS = st.sampled_from(["a", "b"])
OFFERS = st.sampled_from([None, 0, 0, BLOCK, 2 * BLOCK, BLOCK + 4])
PICK = st.integers(0, 99)


@dataclass
class Life:
    """One life in the model. ``words``: the (child, rank) that reported; ``failed``: those that failed before;
    ``announced``: ranks know of it."""

    claimers: frozenset[int]
    quorum: dict[int, int]
    words: set[tuple[int, int]] = field(default_factory=set)
    failed: set[tuple[int, int]] = field(default_factory=set)
    announced: bool = False

    def owed(self, world: int) -> list[tuple[int, int]]:
        return [(c, r) for c in sorted(self.claimers) for r in range(world) if (c, r) not in self.words]

    def complete(self, world: int) -> bool:
        return all(
            sum(1 for one, _ in self.words if one == child) >= self.quorum.get(child, world) for child in self.claimers
        )


@dataclass
class Request:
    """``stage``: new, running or finished; ``stepped``: the ranks know of it."""

    stepped: bool = False
    finished: bool = False
    lives: dict[Direction, Life] = field(default_factory=dict)


class Machine(RuleBasedStateMachine):
    """One engine of ranks over three children, any of which may have a quorum."""

    rank: type[RankGate] = RankGate
    gate_class: type[EngineGate] = EngineGate

    @initialize(world=st.integers(1, 3), quorum=st.dictionaries(st.integers(0, CHILDREN - 1), PICK, max_size=2))
    def begin(self, world: int, quorum: dict[int, int]) -> None:
        self.world = world
        self.quorum = {child: 1 + pick % world for child, pick in quorum.items()}
        self.ranks = [self.rank(rank, 1) for rank in range(world)]
        self.gate = self.gate_class(CHILDREN, range(world), self.quorum)
        self.aggregator = KVOutputAggregator(world)
        self.requests: dict[str, Request] = {}
        self.metas: list[MultiStep] = []
        self.ended: list[str] = []
        #: (child, rank, id) of sends emitted without a word of that child, which may come at any time.
        self.late: set[tuple[int, int, str]] = set()
        self.past: set[tuple[Direction, int, int, str]] = set()

    # -- the engine

    @rule(id=IDS)
    def arrive(self, id: str) -> None:
        if id not in self.requests:
            self.requests[id] = Request()
            self.gate.arrived(id)

    @rule(id=IDS, offers=st.tuples(OFFERS, OFFERS, OFFERS), kinds=st.tuples(*[st.booleans()] * 3), cut=PICK)
    def admit(self, id: str, offers: tuple[int | None, ...], kinds: tuple[bool, ...], cut: int) -> None:
        """Ask the children and allocate, often less than they offer."""
        request = self.requests.get(id)
        if request is None or request.finished or request.lives or self.gate.loading(id):
            return
        match = choose([self._offer(*one) for one in zip(offers, kinds, strict=True)], 0, BLOCK, TOTAL)
        self._check(match, offers)
        if match.delayed or not match.tokens:
            return
        parts = match.cut(match.tokens if cut < 50 else 1 + cut % match.tokens)
        if match.asynchronous:
            claimers = [part.child for part in parts if part.asynchronous]
            self.gate.open(id, "recv", claimers)
            self.aggregator.expect("recv", id)
            request.lives["recv"] = Life(frozenset(claimers), {})

    def _offer(self, tokens: int | None, asynchronous: bool) -> Ask:
        return lambda before: (tokens, asynchronous)

    def _check(self, match: Match, offers: tuple[int | None, ...]) -> None:
        """Ranges follow one another from 0, each as long as offered, each but the last of whole blocks."""
        end = 0
        for part in match.ranges:
            assert part.start == end and end % BLOCK == 0 and part.n == offers[part.child]
            end = part.stop
        assert not (match.delayed and match.ranges)

    @rule(id=IDS, claimers=st.frozensets(st.integers(0, CHILDREN - 1)))
    def finish(self, id: str, claimers: frozenset[int]) -> None:
        """The request ends, well or by an abort in the middle of its load."""
        request = self.requests.get(id)
        if request is None or request.finished or not request.stepped:
            return
        request.finished = True
        self.ended.append(id)
        if claimers:
            self.gate.open(id, "send", claimers)
            self.aggregator.expect("send", id)
            request.lives["send"] = Life(claimers, self.quorum)
        elif not request.lives:
            del self.requests[id]

    # -- the children

    @rule(id=IDS, direction=st.sampled_from(["send", "recv"]), pick=PICK, failed=st.booleans())
    def report(self, id: str, direction: Direction, pick: int, failed: bool) -> None:
        """A word that is owed. Of a send it may come before the announcement; a load is announced to all children in
        the step that begins it. A failure may come long before its release, or with it."""
        life = self.requests[id].lives.get(direction) if id in self.requests and self.requests[id].stepped else None
        owed = life.owed(self.world) if life is not None else []
        if life is None or not owed or (direction == "recv" and not life.announced):
            return
        one = owed[pick % len(owed)]
        if direction == "recv" and failed:
            life.failed.add(one)
            self._say(id, direction, *one, failed=True)
        elif direction == "send" and (*one, id) in self.late:  # a rank's words come in order: this is the older one
            self.late.discard((*one, id))
            self._say(id, direction, *one)
        else:
            life.words.add(one)
            self._say(id, direction, *one)

    @rule(id=IDS, direction=st.sampled_from(["send", "recv"]), pick=PICK)
    def duplicate(self, id: str, direction: Direction, pick: int) -> None:
        """A second word within a life, or of a send that ended and whose id did not come back."""
        life = self.requests[id].lives.get(direction) if id in self.requests else None
        said = sorted(life.words) if life is not None else []
        if id not in self.requests:
            said = sorted((child, rank) for way, child, rank, one in self.past if (way, one) == (direction, id))
        if said:
            self._say(id, direction, *said[pick % len(said)])

    @rule(pick=PICK)
    def late_word(self, pick: int) -> None:
        """Of a rank whose word a quorum did not need, whatever became of the id since."""
        if self.late:
            child, rank, id = sorted(self.late)[pick % len(self.late)]
            self.late.discard((child, rank, id))
            self._say(id, "send", child, rank)

    @rule(id=IDS, child=st.integers(0, CHILDREN - 1), rank=PICK)
    def stranger(self, id: str, child: int, rank: int) -> None:
        """A child that has no part in an open life."""
        for direction, life in (self.requests[id].lives if id in self.requests else {}).items():
            if child not in life.claimers:
                self._say(id, direction, child, rank % self.world)

    def _say(self, id: str, direction: Direction, child: int, rank: int, failed: bool = False) -> None:
        ids = frozenset({id})
        name = "failed_recving" if failed else "finished_sending" if direction == "send" else "finished_recving"
        self.ranks[rank].reports(child, msgspec.structs.replace(TransferResults(), **{name: ids}))

    # -- a step

    @rule(repeat=st.booleans())
    def step(self, repeat: bool) -> None:
        meta = self.gate.step()
        self.metas = [*self.metas[-2:], meta]
        ended, self.ended = self.ended, []
        for request in self.requests.values():
            request.stepped = True
            for life in request.lives.values():
                life.announced = True
        outputs = [self._rank_step(gate, self.metas if repeat else [meta], ended) for gate in self.ranks]
        part = self.aggregator.aggregate(outputs).kv_connector_output
        for child, share in enumerate(self.gate.take(part.kv_connector_worker_meta.facts)):
            self.gate.passed(child, share.sent, share.received, share.failed)
        emit = self.gate.emit(part.finished_sending or (), part.finished_recving or (), part.failed_recving or ())
        sent, received, failed, either = self._due()
        assert (emit.sent - either, emit.received - either, emit.failed - either) == (sent, received, failed)
        assert either <= emit.sent ^ emit.received

    def _rank_step(self, gate: RankGate, metas: list[MultiStep], ended: list[str]) -> Any:
        for meta in metas:
            gate.bind(meta)
        gate.ended(ended)
        results = gate.take()
        facts = WorkerFacts(tuple(gate.take_facts()))
        part = KVConnectorOutput(
            set(results.finished_sending),
            set(results.finished_recving),
            set(results.failed_recving),
            kv_connector_worker_meta=facts,
        )
        return SimpleNamespace(kv_connector_output=part)

    def _due(self) -> tuple[set[str], set[str], set[str], set[str]]:
        """What the model lets go now: sent, received, failed of these, and in either direction. It forgets them."""
        out: dict[Direction, set[str]] = {"send": set(), "recv": set()}
        failed: set[str] = set()
        either: set[str] = set()
        for id, request in list(self.requests.items()):
            complete = [way for way, life in request.lives.items() if life.complete(self.world)]
            for way in complete:
                life = request.lives.pop(way)
                self._remember(id, way, life)
                if len(complete) == 2:  # in one step: neither is the later
                    either.add(id)
                elif not request.lives:
                    out[way].add(id)
                    failed |= {id} if life.failed and way == "recv" else set()
            if request.finished and not request.lives:
                del self.requests[id]
        return out["send"], out["recv"], failed, either

    def _remember(self, id: str, way: Direction, life: Life) -> None:
        self.past -= {one for one in self.past if (one[0], one[3]) == (way, id)}
        self.past |= {(way, child, rank, id) for child, rank in life.words}
        if way == "send":
            self.late |= {(child, rank, id) for child, rank in life.owed(self.world)}

    def teardown(self) -> None:
        """Whatever is owed is said; then every id has left and every table is empty."""
        if not hasattr(self, "world"):
            return
        self.step(repeat=False)
        for id in list(self.requests):
            self.finish(id, frozenset({0, 1}))
        for id, request in self.requests.items():
            for way, life in request.lives.items():
                for child, rank in life.owed(self.world):
                    if way == "send" and (child, rank, id) in self.late:
                        self.late.discard((child, rank, id))
                        self._say(id, way, child, rank)
                    life.words.add((child, rank))
                    self._say(id, way, child, rank)
        self.step(repeat=True)
        self.step(repeat=False)
        assert not self.requests
        assert len(self.gate.ledger) == 0 and not self.gate._held and not self.gate.unshipped
        for gate in self.ranks:
            assert not gate._sends._open and not gate._loads._open


QUICK = settings(
    max_examples=250,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
#: fixed schedules: what Hypothesis draws depends on what else the test process has imported, and a rare mutant must be
#: found every time
WALKS = 3000


def walk(machine: type[Machine], seed: int) -> None:
    """One schedule. Raises AssertionError where the model is contradicted."""
    rng = random.Random(seed)
    world = rng.randint(1, 3)
    one = machine()
    one.begin(world, {child: rng.randrange(100) for child in rng.sample(range(CHILDREN), rng.randint(0, 2))})
    ids = "ab"[: rng.randint(1, 2)]

    def way() -> Direction:
        return "send" if rng.random() < 0.5 else "recv"

    def offers() -> tuple[int | None, ...]:
        return tuple(rng.choice((None, 0, 0, BLOCK, 2 * BLOCK, BLOCK + 4)) for _ in range(CHILDREN))

    actions: list[Callable[[str], None]] = [
        one.arrive,
        lambda id: one.admit(id, offers(), tuple(rng.random() < 0.5 for _ in range(CHILDREN)), rng.randrange(100)),
        lambda id: one.finish(id, frozenset(rng.sample(range(CHILDREN), rng.randint(0, CHILDREN)))),
        lambda id: one.report(id, way(), rng.randrange(100), rng.random() < 0.5),
        lambda id: one.duplicate(id, way(), rng.randrange(100)),
        lambda id: one.late_word(rng.randrange(100)),
        lambda id: one.stranger(id, rng.randrange(CHILDREN), rng.randrange(100)),
        lambda id: one.step(rng.random() < 0.3),
    ]
    weights = (2, 1, 2, 6, 3, 2, 1, 4)
    for _ in range(160):
        rng.choices(actions, weights)[0](rng.choice(ids))
    one.teardown()


def test_every_life_is_emitted_once_and_only_when_nobody_is_owed() -> None:
    run_state_machine_as_test(Machine, settings=QUICK)


# --- mutants ------------------------------------------------------------------------------------------------------


class Counting(ClaimTable):
    """Any report is a word of any child that owes one."""

    def report(self, id: str, child: int, settled: bool = True) -> None:
        claim = self._open.get(id)
        if claim is not None and claim.owed and child not in claim.owed | claim.spare:
            child = min(claim.owed)
        super().report(id, child, settled)


class IgnoringOne(EngineGate):
    """The last claimer's word is not waited for."""

    def open(self, id: str, direction: Direction, claimers: Any, now: float | None = None) -> None:
        super().open(id, direction, sorted(claimers)[:1] if len(set(claimers)) > 1 else claimers, now)


class CountingQuorum(EngineGate):
    """A quorum of words, not of ranks."""

    def take(self, facts: Any) -> Any:
        spread: list[Fact] = []
        for fact in facts:
            owed = self.ledger.get(fact.id, fact.direction)
            free = [r for path, ranks in (owed.owed if owed else ()) for r in ranks if path == fact.child[1:]]
            spread.append(msgspec.structs.replace(fact, rank=free[0]) if free else fact)
        return super().take(spread + spread)


class FailureIsRelease(RankGate):
    """A failed receive is taken for a received one."""

    def reports(self, child: int, results: TransferResults) -> None:
        both = results.finished_recving | results.failed_recving
        super().reports(child, msgspec.structs.replace(results, finished_recving=both))


class Unclosed(RankGate):
    """Never hears that a life with a quorum closed."""

    def bind(self, step: MultiStep) -> None:
        super().bind(msgspec.structs.replace(step, closed=()))


class LateIsNews(ClaimTable):
    """A word that a quorum did not need counts for the id's next life."""

    def close(self, id: str, n: int) -> None:
        super().close(id, n)
        self._late.clear()


class Forgetful(ClaimTable):
    """What comes before its claim is dropped."""

    def _unclaimed(self, id: str, child: int, settled: bool) -> None:
        return


class OldWords(ClaimTable):
    """A word older than its request counts for it."""

    def arrived(self, id: str) -> None:
        self._done.pop(id, None)


def with_table(table: type[ClaimTable]) -> type[RankGate]:
    return type(table.__name__, (RankGate,), {"table": table})


MUTANTS: dict[str, dict[str, Any]] = {
    "counting instead of identity": {"rank": with_table(Counting)},
    "one claimer ignored": {"gate_class": IgnoringOne},
    "a quorum of words": {"gate_class": CountingQuorum},
    "failed is received": {"rank": FailureIsRelease},
    "a closed life stays": {"rank": Unclosed},
    "a late word is news": {"rank": with_table(LateIsNews)},
    "early words dropped": {"rank": with_table(Forgetful)},
    "old words count": {"rank": with_table(OldWords)},
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_model_catches(mutant: str) -> None:
    machine = type("Mutant", (Machine,), MUTANTS[mutant])
    assert any(_contradicts(machine, seed) for seed in range(WALKS)), f"not within {WALKS} schedules"


def test_the_schedules_that_mutants_are_hunted_with_find_nothing_without_one() -> None:
    assert not [seed for seed in range(WALKS // 3) if _contradicts(Machine, seed)]


def _contradicts(machine: type[Machine], seed: int) -> bool:
    try:
        walk(machine, seed)
    except AssertionError:
        return True
    return False
