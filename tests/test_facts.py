"""What ranks say on their way to the engine: encoded, joined, and never lent to another rank."""

from __future__ import annotations

import json
import pickle

from kvconn.base import Fact, WorkerFacts
from kvconn.ledger import Outcome
from tests.test_ledger import fact, opened


def carried(facts: WorkerFacts) -> WorkerFacts:
    """As they come from a worker's process."""
    there: WorkerFacts = pickle.loads(pickle.dumps(facts))
    return there


def test_what_many_ranks_say_alike_is_one_fact_and_counts_for_each() -> None:
    ledger, n = opened(world=1024)
    joined = WorkerFacts()
    for rank in range(1023):
        joined = joined.aggregate(WorkerFacts((fact("r", n, rank),)))
    (word,) = joined.facts
    assert ledger.report(word) is Outcome.ADDED
    pending = ledger.get("r", "send")
    assert pending is not None and pending.owed == (((), (1023,)),)
    assert ledger.report(word) is Outcome.DUPLICATE and ledger.absorbed == {Outcome.DUPLICATE: 1023}
    assert ledger.report(fact("r", n, 1023)) is Outcome.COMPLETED


def test_words_that_were_joined_are_joined_again_without_lending_a_rank_anothers_word() -> None:
    a = WorkerFacts((Fact("x", "send", 1, 0, "done"), Fact("y", "send", 2, 0, "done")))
    b = WorkerFacts((Fact("x", "send", 1, 1, "done"),))
    c = WorkerFacts((Fact("q", "send", 9, 5, "done"),))
    joined = c.aggregate(a.aggregate(b))
    assert {fact.id: fact.ranks for fact in joined.facts} == {"q": 1 << 5, "x": 0b11, "y": 0b01}


def test_facts_from_another_process_are_what_they_were() -> None:
    why = Fact("y", "recv", 2, 7, "failed", (0, -1), "P is gone")
    half = json.loads('"\\ud800"')
    for facts in (
        (fact("r", 1, 7), why),
        (fact(half, 1, 7), why),
        (fact("r", 1, 7), fact("r", 1, 6)),
        (fact("r", 1, -1),),
        (),
    ):
        said = WorkerFacts(facts)
        assert carried(said) == said and tuple(carried(said).facts) == facts
        assert len(carried(said).facts) == len(facts) and bool(carried(said).facts) == bool(facts)


def test_ranks_of_other_processes_that_say_the_same_are_joined_and_the_others_with_them() -> None:
    every = [fact("r", 1, rank) for rank in range(6)]
    more = (every[5], fact("q", 2, 5))
    joined = carried(WorkerFacts((every[0],)))
    for facts in ((every[1],), (every[3],), more):
        joined = joined.aggregate(carried(WorkerFacts(facts)))
    assert {(f.id, f.ranks) for f in joined.facts} == {("r", 0b101011), ("q", 1 << 5)}
    joined = joined.aggregate(WorkerFacts((every[4],)))  # of this process
    assert {(f.id, f.ranks) for f in joined.facts} == {("r", 0b111011), ("q", 1 << 5)}
    assert {(f.id, f.ranks) for f in carried(joined).facts} == {(f.id, f.ranks) for f in joined.facts}


def test_a_rank_of_another_process_that_says_the_same_twice_is_counted() -> None:
    ledger, n = opened(world=3)
    said = carried(WorkerFacts((fact("r", n, 0),)))
    joined = said.aggregate(carried(WorkerFacts((fact("r", n, 1),)))).aggregate(said)
    assert [ledger.report(word) for word in joined.facts] == [Outcome.ADDED, Outcome.DUPLICATE]


def test_what_a_rank_says_twice_in_a_step_is_counted_and_not_joined() -> None:
    ledger, n = opened(world=3)
    said = WorkerFacts((fact("r", n, 0),)).aggregate(WorkerFacts((fact("r", n, 1), fact("r", n, 1))))
    assert [ledger.report(word) for word in said.facts] == [Outcome.ADDED, Outcome.DUPLICATE]
    assert ledger.absorbed == {Outcome.DUPLICATE: 1}


def test_a_rank_that_fails_in_the_step_in_which_another_is_quiet_is_heard_before_it_settles() -> None:
    ledger, n = opened(direction="recv", world=2)
    ledger.report(fact("r", n, 0, "recv", "failed"))
    late = (fact("r", n, 1, "recv", "failed"), fact("r", n, 1, "recv", "quiet"))
    said = WorkerFacts((fact("r", n, 0, "recv", "quiet"),)).aggregate(WorkerFacts(late))
    assert [ledger.report(word) for word in said.facts] == [Outcome.ADDED, Outcome.COMPLETED]
    assert not ledger.absorbed
