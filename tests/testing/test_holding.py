"""The sibling that holds: it keeps the contract it exists to exercise."""

from __future__ import annotations

from typing import Any

import pytest

from kvconn.base import StepView
from kvconn.errors import ConfigError
from kvconn.testing.holding import HoldingConnector
from tests.multi.fakes import holding
from tests.support import Side


def halves(side: Side) -> tuple[HoldingConnector, list[HoldingConnector]]:
    scheduler = side.scheduler
    assert isinstance(scheduler, HoldingConnector)
    workers = [worker for worker in side.workers if isinstance(worker, HoldingConnector)]
    return scheduler, workers


@pytest.mark.parametrize("facts", [True, False])
@pytest.mark.parametrize("poll", ["get_finished", "get_transfer_results"])
def test_it_holds_on_every_rank_until_told(poll: str, facts: bool) -> None:
    side = Side("p", holding(facts=facts), pcp=8, poll=poll)
    scheduler, workers = halves(side)
    side.prefill("a", [1], 1)
    side.prefill("b", [2], 2)
    for _ in range(5):
        side.step()
    assert side.sent == [] and all(worker.held == {"a", "b"} for worker in workers)
    for worker in workers[1:]:
        worker.release("a")
    side.step()
    assert [result[0] for result in side.rank_results] == [set(), *[{"a"}] * 7]
    assert side.sent == []
    workers[0].release("a")
    side.step()
    assert side.sent == ["a"]
    scheduler.release()
    side.step()
    assert side.sent == ["a", "b"] and not scheduler.held


@pytest.mark.parametrize("polls", [0, 2])
def test_it_lets_go_after_so_many_polls(polls: int) -> None:
    side = Side("p", holding(polls=polls), pcp=2)
    side.prefill("a", [1], 1)
    for _ in range(polls):
        side.step()
        assert side.sent == []
    side.step()
    side.step()
    assert side.sent == ["a"]


def test_a_repeated_announcement_changes_nothing() -> None:
    side = Side("p", holding(polls=0))
    side.prefill("a", [1], 1)
    meta = side.scheduler.build_connector_meta(StepView(1))
    for _ in range(3):
        side.finish_step([side.rank_step(0, meta)])
    assert side.sent == ["a"] and halves(side)[1][0].held == set()


def test_a_release_of_something_else_changes_nothing() -> None:
    side = Side("p", holding())
    scheduler, (worker,) = halves(side)
    side.prefill("a", [1], 1)
    side.step()
    scheduler.release("b")
    worker.release("b")
    side.step()
    assert side.sent == [] and worker.held == {"a"}


def test_it_explains_itself_and_reads_well() -> None:
    side = Side("p", holding(), pcp=2)
    side.prefill("a", [1], 1)
    scheduler, workers = halves(side)
    assert scheduler.explain(0.0) == ["send of a (life 1) owed by HoldingConnector ranks 0,1"]
    assert repr(scheduler) == "HoldingConnector(scheduler held=1)"
    assert repr(workers[0]) == "HoldingConnector(worker held=0)"


@pytest.mark.parametrize("extra", [{"pols": 1}, {"polls": "x"}])
def test_wrong_settings_are_named(extra: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"kv_connector_extra_config\.pol"):
        Side("p", holding(**extra))
