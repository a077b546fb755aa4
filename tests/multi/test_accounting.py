"""The accounting of issue 1's fault: ranks, polls and nesting, through the real aggregator."""

from __future__ import annotations

from typing import Any

import pytest

from kvconn.base import FinishReason, KVConnector, RequestView, StepView
from kvconn.metrics import Stats
from kvconn.multi.connector import MultiConnector
from kvconn.testing.holding import HoldingConnector
from tests.multi.fakes import FakeChild, fake, holding
from tests.support import Side, multi

POLLS = ["get_finished", "get_transfer_results"]
SHAPES: dict[str, dict[str, Any]] = {
    "only child": multi(fake(), role="kv_both"),
    "in Multi": multi(fake(), holding(polls=0), role="kv_both"),
    "bare sibling": multi(fake(), holding(polls=0, facts=False), role="kv_both"),
    "nested": multi(multi(fake(), role="kv_both"), holding(polls=0), role="kv_both"),
    "nested beside": multi(holding(polls=0), multi(holding(polls=0), fake(), role="kv_both"), role="kv_both"),
}


def find_fake(connector: KVConnector) -> FakeChild:
    """The one fake child below ``connector``."""
    if isinstance(connector, FakeChild):
        return connector
    assert isinstance(connector, MultiConnector)
    return next(find_fake(child) for child in connector.children if isinstance(child, FakeChild | MultiConnector))


def say(side: Side, rank: int, id: str) -> None:
    worker = side.workers[rank]
    if isinstance(worker, HoldingConnector):
        worker.release(id)
    else:
        find_fake(worker).say(sent=id)


def tables_are_empty(connector: KVConnector) -> bool:
    if isinstance(connector, MultiConnector):
        tables = (connector._rank._sends, connector._rank._loads)
        return (
            len(connector._gate.ledger) == 0
            and not connector._matches
            and not any(table._open or table._early for table in tables)
            and all(tables_are_empty(child) for child in connector.children)
        )
    return not getattr(connector, "held", None)


@pytest.mark.parametrize("pcp", [2, 8])
@pytest.mark.parametrize("poll", POLLS)
@pytest.mark.parametrize("shape", ["alone", *SHAPES])
def test_ranks_above_zero_first_leave_one_outstanding_and_rank_zero_completes(shape: str, poll: str, pcp: int) -> None:
    side = Side("p", SHAPES.get(shape, holding()), pcp=pcp, poll=poll)
    side.prefill("a", [1, 2], 1)
    side.step()
    for rank in range(1, pcp):
        say(side, rank, "a")
    side.step()
    assert [result[0] for result in side.rank_results] == [set(), *[{"a"}] * (pcp - 1)]
    assert side.sent == []
    side.step()
    assert [result[0] for result in side.rank_results] == [set()] * pcp
    assert side.sent == []
    say(side, 0, "a")
    side.step()
    assert side.sent == ["a"]
    side.step()
    assert side.sent == ["a"]
    assert all(tables_are_empty(connector) for connector in (side.scheduler, *side.workers))


@pytest.mark.parametrize("poll", POLLS)
@pytest.mark.parametrize("shape", SHAPES)
def test_metadata_that_repeats_an_id_changes_nothing(shape: str, poll: str) -> None:
    side = Side("p", SHAPES[shape], pcp=2, poll=poll)
    side.prefill("a", [1], 1)
    meta = side.scheduler.build_connector_meta(_step(1))
    for rank in range(2):
        say(side, rank, "a")
    first = [side.rank_step(rank, meta) for rank in range(2)]
    side.finish_step(first)
    assert [result[0] for result in side.rank_results] == [{"a"}, {"a"}]
    again = [side.rank_step(rank, meta) for rank in range(2)]
    side.finish_step(again)
    assert [result[0] for result in side.rank_results] == [set(), set()]
    assert side.sent == ["a"]
    assert all(tables_are_empty(connector) for connector in (side.scheduler, *side.workers))


@pytest.mark.parametrize("shape", SHAPES)
def test_a_report_before_the_announcement_counts_when_it_comes(shape: str) -> None:
    side = Side("p", SHAPES[shape], pcp=2)
    side.scheduler.on_new_request(_view("a"))
    side.step()
    for rank in range(2):
        say(side, rank, "a")
    side.step()
    assert side.sent == [] and [result[0] for result in side.rank_results] == [set(), set()]
    assert side.scheduler.request_finished(_view("a"), ((1,),), FinishReason.STOP)[0]
    side.step(finished=("a",))
    assert side.sent == ["a"]
    assert all(tables_are_empty(connector) for connector in (side.scheduler, *side.workers))


@pytest.mark.parametrize("shape", SHAPES)
def test_duplicates_are_absorbed_and_counted(shape: str) -> None:
    side = Side("p", SHAPES[shape], pcp=2)
    side.prefill("a", [1], 1)
    say(side, 1, "a")
    side.step()
    say(side, 1, "a")
    part = side.step()
    assert side.sent == []
    assert part.kv_connector_stats == Stats({"duplicates_absorbed": 1})
    say(side, 0, "a")
    side.step()
    say(side, 0, "a")
    side.step()
    assert side.sent == ["a"]


def test_an_id_comes_back_and_a_late_duplicate_of_its_first_life_does_not_release_the_second() -> None:
    side = Side("p", SHAPES["in Multi"], pcp=2)
    for life in range(2):
        side.scheduler.on_new_request(_view("a"))
        side.step()
        side.prefill("a", [1], 1)
        side.step()
        for rank in range(2):
            assert side.sent == ["a"] * life
            say(side, rank, "a")
            side.step()
        assert side.sent == ["a"] * (life + 1)
        say(side, 0, "a")
        side.step()
    assert all(tables_are_empty(connector) for connector in (side.scheduler, *side.workers))


@pytest.mark.parametrize("facts", [True, False])
def test_one_childs_two_words_are_not_its_siblings(facts: bool) -> None:
    """What counting gets wrong: two reports on a rank, both the same child's."""
    side = Side("p", multi(fake(), holding(facts=facts), role="kv_both"), pcp=2)
    side.prefill("a", [1], 1)
    for rank in (0, 1, 0, 1):
        say(side, rank, "a")
        side.step()
    assert side.sent == []
    side.scheduler.children[1].release("a")  # type: ignore[attr-defined]
    side.step()
    assert side.sent == ["a"]


def test_a_childs_veto_holds_and_its_later_word_releases() -> None:
    side = Side("p", multi(fake(), holding(polls=0), role="kv_both"), pcp=2)
    half = find_fake(side.scheduler)
    half.vetoes = True
    side.prefill("a", [1], 1)
    for rank in range(2):
        say(side, rank, "a")
    side.step()
    assert side.sent == []
    assert any("held back by FakeChild" in line for line in side.scheduler.explain(0.0))
    half.vetoes = False
    side.step()
    assert side.sent == ["a"]


def test_only_claimers_are_waited_for() -> None:
    side = Side("p", multi(fake(claims=False), holding(polls=0), role="kv_both"), pcp=2)
    side.prefill("a", [1], 1)
    side.step()
    assert side.sent == ["a"]


def test_the_engines_sets_are_replaced_not_mutated() -> None:
    side = Side("p", SHAPES["in Multi"])
    side.prefill("a", [1], 1)
    meta = side.scheduler.build_connector_meta(_step(1))
    say(side, 0, "a")
    output = side.rank_step(0, meta).kv_connector_output
    assert output is not None
    shared = output.finished_sending
    side.scheduler.update_connector_output(output)
    assert output.finished_sending == {"a"} and output.finished_sending is not shared


def test_reports_found_while_the_output_rank_says_nothing_are_kept() -> None:
    side = Side("p", SHAPES["in Multi"], pcp=2)
    side.prefill("a", [1], 1)
    meta = side.scheduler.build_connector_meta(_step(1))
    for rank in range(2):
        say(side, rank, "a")
    outputs: list[Any] = [side.rank_step(rank, meta) for rank in range(2)]
    assert side.aggregator.aggregate([None, outputs[1]]) is None
    side.finish_step([outputs[0], type(outputs[0])(None)])
    assert side.sent == ["a"]


def _step(seq: int) -> StepView:
    return StepView(seq)


def _view(id: str) -> RequestView:
    return RequestView(id, 16, 16, None)
