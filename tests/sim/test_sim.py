"""The real halves under random schedules: sound without a fault of ours, and each known fault is found.

Rules
1. Hypothesis draws for the sound one, and makes a violation short; mutants are hunted with fixed draws. Both are the
   same every time.
2. What a schedule once found stands here as that schedule, and stays.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from tests.sim.engine import Engine
from tests.sim.mutants import MUTANTS, Mutant
from tests.sim.schedules import ACTIONS, Action, do, drawn, quiet, run
from tests.sim.shapes import LIKELY, TOPOLOGIES, TREES, Shape
from tests.sim.tables import left_over, tables
from tests.sim.world import World

pytestmark = pytest.mark.timeout(120)

RUN = settings(
    derandomize=True,
    deadline=None,
    database=None,
    max_examples=100,
    stateful_step_count=40,
    suppress_health_check=list(HealthCheck),
    report_multiple_bugs=False,
    print_blob=False,
)
#: schedules in which a mutant must be found, and nothing without one
BUDGET = 400
SMALL = st.integers(0, 7)
SHAPES = st.sampled_from(list(TOPOLOGIES)).flatmap(
    lambda heads: st.builds(
        Shape,
        heads=st.just(heads),
        p=st.sampled_from(LIKELY[heads]),
        d=st.sampled_from(LIKELY[heads]),
        pcp=st.integers(1, 4),
        producer=st.sampled_from(list(TREES)),
        consumer=st.sampled_from(list(TREES)),
        consumers=st.integers(1, 2),
        recompute=st.booleans(),
        harsh=st.booleans(),
        both=st.booleans(),
        chunk=st.sampled_from([64, 8, 3]),
    )
)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with quiet():
        yield


class Machine(RuleBasedStateMachine):
    """Any shape, and anything that may happen, in any order."""

    world: World | None = None
    bad = False

    @initialize(shape=SHAPES)
    def start(self, shape: Shape) -> None:
        self.world = World(shape)

    @rule(name=st.sampled_from(ACTIONS), pick=SMALL, how=SMALL)
    def act(self, name: str, pick: int, how: int) -> None:
        assert self.world is not None
        self.bad = True
        do(self.world, (name, pick, how))
        self.bad = False

    def teardown(self) -> None:
        if self.world is None:
            return
        try:
            if not self.bad:
                self.world.finish()
        finally:
            self.world.close()


def test_sound_under_every_schedule() -> None:
    run_state_machine_as_test(Machine, settings=RUN)


def test_the_schedules_that_mutants_are_hunted_with_find_nothing_without_one() -> None:
    counts: Counter[str] = Counter()
    for index in range(BUDGET):
        shape, actions = drawn(0, index)
        counts += run(shape, actions, tables=index % 16 == 0)
    for what in (
        "loads, accepted",
        "sends, read",
        "sends, expired",
        "counter stale_reads",
        "counter agent_recreations",
    ):
        assert counts[what] > 0, f"these schedules never come to: {what}; {counts}"


def first_violation(mutant: Mutant) -> str | None:
    with mutant.context():
        for index in range(BUDGET):
            shape, actions = drawn(0, index)
            try:
                run(replace(shape, **mutant.shape), actions, tables=mutant.tables)
            except AssertionError as err:
                return str(err)
    return None


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_found(name: str) -> None:
    found = first_violation(MUTANTS[name])
    assert found is not None, f"{name}: {BUDGET} schedules found nothing"
    assert found.startswith(MUTANTS[name].shows), found


# --- what was found

#: shape, schedule, and what must come of it
FOUND: dict[str, tuple[Shape, list[Action], str]] = {
    # the inner Multi emits the later direction only, and the outer one waited for the other for ever
    "abort while parked, below two Multis": (
        Shape(pcp=2, consumer="nested"),
        [("submit", 0, 0), ("step_p", 0, 0), ("meet", 0, 0), ("abort", 0, 1)],
        "receive and send owed together",
    ),
    # the aggregator took it for the first word of another load, and named the other rank as silent for ever
    "one of several ranks says twice what it received": (
        Shape(pcp=4, consumers=2, chunk=3, heads=2, p="tp 4", d="tp 2"),
        [("repeat", 4, 0), ("rush", 3, 4), ("repeat", 2, 7), ("rush", 0, 6)],
        "sends, read",
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_what_was_found_once_stays_found(name: str) -> None:
    shape, actions, what = FOUND[name]
    assert run(shape, actions)[what] == 1


# --- the tools themselves


def test_a_schedule_is_the_same_every_time() -> None:
    for index in range(5):
        assert run(*drawn(1, index)) == run(*drawn(1, index))


def test_a_silent_rank_is_named_and_then_heard() -> None:
    actions: list[Action] = [("submit", 3, 0), ("step_p", 0, 0), ("stop", 1, 0), ("step_p", 0, 0)]
    for producer in ("alone", "in Multi", "nested"):
        assert run(Shape(pcp=3, producer=producer), actions)["silent ranks named"] == 1


def test_every_table_is_looked_at() -> None:
    world = World(Shape(pcp=2, producer="nested"))
    try:
        names = {name for part in (world.p.connector, *world.p.workers) for _, name, _ in tables(part)}
        assert {"NixlWorker._slots", "SendLeases._heap", "ClaimTable._early", "EngineGate._held"} <= names
        assert {"CompletionLedger._open", "FenceSlots._of", "HoldingConnector._held"} <= names
        world.p.half._slots[7] = 7
        assert [line for rank in world.p.workers for line in left_over(rank)] == [
            "MultiConnector.children[0].children[0].worker._slots: {7: 7}"
        ]
    finally:
        world.close()


def test_an_engine_decodes_what_it_read() -> None:
    """The plain course of things, so that the rest means something."""
    assert Engine.__doc__
    assert plain(Shape(pcp=4, producer="nested")) == (1, 1, 0)


def plain(shape: Shape) -> tuple[int, int, int]:
    """One request: loads accepted, sends read, loads failed."""
    actions: list[Action] = [("submit", 6, 0), ("step_p", 0, 0), ("rush", 0, 0), ("step_p", 0, 0)]
    counts = run(shape, actions)
    return counts["loads, accepted"], counts["sends, read"], counts["loads, failed"]


@pytest.mark.parametrize(
    ("heads", "p", "d"), [(heads, p, d) for heads, sizes in TOPOLOGIES.items() for p in sizes for d in sizes]
)
def test_engines_of_any_two_sizes_read_one_another(heads: int, p: str, d: str) -> None:
    assert plain(Shape(heads=heads, p=p, d=d)) == (1, 1, 0)
