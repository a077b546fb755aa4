"""Hidden ranks: the accounting before the fix, and that the stall it makes is named."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvconn.base import KVConnector, TransferResults
from kvconn.config import parse_kv_transfer_config
from kvconn.factory import get_connector_class
from kvconn.nixl.connector import NixlConnector
from kvconn.testing.contract import HiddenRanks, HiddenRanksNixlConnector, hidden_ranks
from kvconn.testing.holding import HoldingConnector
from tests.multi.fakes import holding
from tests.support import NIXL_CONSUMER, NIXL_PRODUCER, Side, multi, offload_hold, wait_until

HiddenHolding = hidden_ranks(HoldingConnector)
POLLS = ["get_finished", "get_transfer_results"]
HIDDEN = holding(polls=0) | {"kv_connector": "HiddenHolding", "kv_connector_module_path": __name__}


class OldPolls(HoldingConnector):
    """A connector with a second poll of its own, as upstream had one."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        results = HoldingConnector.get_transfer_results(self, finished_req_ids)
        return set(results.finished_sending), {"received"}


@pytest.mark.parametrize("cls", [HoldingConnector, OldPolls])
@pytest.mark.parametrize("poll", POLLS)
def test_ranks_above_zero_drop_their_sends_in_both_polls(poll: str, cls: type[KVConnector]) -> None:
    side = Side("p", holding(polls=0), pcp=8, poll=poll, make=hidden_ranks(cls))
    side.prefill("a", [1], 1)
    side.step()
    assert [result[0] for result in side.rank_results] == [{"a"}, *[set()] * 7]
    assert side.sent == []
    assert side.scheduler.get_finished_count() is None
    assert [owed.ranks for owed in side.aggregator.pending()] == [tuple(range(1, 8))]


def test_facts_of_sends_are_hidden_and_receives_are_not(mocker: Any) -> None:
    side = Side("p", holding(polls=0), pcp=2, make=HiddenHolding)
    side.prefill("a", [1], 1)
    side.step()
    assert side.scheduler.explain(0.0) == ["send of a (life 1) owed by HoldingConnector rank 1"]
    received = TransferResults(frozenset({"s"}), frozenset({"r"}), frozenset({"r"}))
    mocker.patch.object(HoldingConnector, "get_transfer_results", return_value=received)
    assert side.workers[1].get_transfer_results(set()) == TransferResults(
        frozenset(), frozenset({"r"}), frozenset({"r"})
    )


def test_without_replicas_nothing_is_hidden() -> None:
    side = Side("p", holding(polls=0), pcp=1, make=HiddenHolding)
    side.prefill("a", [1], 1)
    side.step()
    assert side.sent == ["a"]


@pytest.mark.parametrize("poll", POLLS)
def test_under_multi_the_stall_names_the_child_and_its_ranks(poll: str) -> None:
    side = Side("p", multi(HIDDEN, holding(polls=0), role="kv_both"), pcp=8, poll=poll)
    side.prefill("line-7", [1], 1)
    for _ in range(5):
        side.step()
    assert side.sent == []
    lines = side.scheduler.explain(1e9)
    assert lines[0].startswith("send of line-7 (life 1) owed by HiddenHolding ranks 1..7 for ")
    assert "HoldingConnector" not in lines[0]


def test_the_nixl_connector_with_hidden_ranks_is_found_by_name() -> None:
    config = parse_kv_transfer_config(
        {
            "kv_connector": "HiddenRanksNixlConnector",
            "kv_role": "kv_producer",
            "kv_connector_module_path": "kvconn.testing.contract",
        }
    )
    cls = get_connector_class(config)
    assert cls is HiddenRanksNixlConnector
    assert issubclass(cls, HiddenRanks) and issubclass(cls, NixlConnector)


@pytest.fixture
def sides() -> Iterator[Callable[..., Side]]:
    made: list[Side] = []

    def make(*args: Any, **kwargs: Any) -> Side:
        made.append(Side(*args, **kwargs))
        return made[-1]

    yield make
    for side in made:
        side.close()


HIDDEN_NIXL = NIXL_PRODUCER | {
    "kv_connector": "HiddenRanksNixlConnector",
    "kv_connector_module_path": "kvconn.testing.contract",
}


@pytest.mark.parametrize("poll", POLLS)
def test_the_fault_on_real_nixl_blocks_arrive_and_are_never_freed(sides: Callable[..., Side], poll: str) -> None:
    """The composition that stalled: what is read, stored and done stays held, and the stall says by whom."""
    p = sides("P", multi(HIDDEN_NIXL, offload_hold()), pcp=8, poll=poll)
    d = sides("D", NIXL_CONSUMER)
    d.load("on-d", p.prefill("line-1", [3, 4], seed=7), [11, 12])

    def told_by_rank_zero() -> bool:
        d.step(), p.step()
        lines = p.scheduler.explain(time.perf_counter())
        return bool(d.received) and lines[0].startswith(
            "send of line-1 (life 1) owed by HiddenRanksNixlConnector ranks 1..7"
        )

    wait_until(told_by_rank_zero)
    assert d.holds([11, 12], seed=7)
    for _ in range(20):
        p.step()
    assert p.sent == []
    (line, childs_own) = p.scheduler.explain(time.perf_counter())
    assert re.search(r"\bline-1\b.*HiddenRanksNixlConnector ranks 1\.\.7 for \d+\.\d s$", line)
    assert "OffloadingConnector" not in line
    assert childs_own.startswith("HiddenRanksNixlConnector: send of line-1 ")


@pytest.mark.parametrize("poll", POLLS)
def test_without_the_fault_a_nested_composition_is_freed_once(sides: Callable[..., Side], poll: str) -> None:
    p = sides("P", multi(multi(NIXL_PRODUCER), offload_hold()), pcp=8, poll=poll)
    d = sides("D", NIXL_CONSUMER)
    d.load("on-d", p.prefill("a", [3, 4], seed=7), [11, 12])

    def freed() -> bool:
        d.step(), p.step()
        return bool(d.received and p.sent)

    wait_until(freed)
    for _ in range(5):
        p.step()
    assert d.holds([11, 12], seed=7) and p.sent == ["a"]
    assert p.scheduler.explain(0.0) == []
