"""The facade: configuration, forwarding, loads, params, handshake, stats, shutdown, the stall table."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from kvconn.base import (
    ConnectorRole,
    FinishReason,
    HandshakeMetadata,
    KVBlocks,
    KVConnector,
    KVConnectorOutput,
    LayerView,
    RequestView,
    StepView,
    TransferResults,
    WorkerFacts,
)
from kvconn.config import ConnectorConfig, ModelView, ParallelConfig, parse_kv_transfer_config
from kvconn.errors import ConfigError, ContractError
from kvconn.metrics import Stats
from kvconn.multi.connector import MultiConnector, MultiHandshake
from tests.multi.fakes import FakeChild, fake, holding
from tests.support import Side, multi

VIEW = Side("view", holding()).kv_cache


def make(*children: dict[str, Any], role: ConnectorRole = ConnectorRole.SCHEDULER, pcp: int = 1) -> MultiConnector:
    return MultiConnector(config(*children, pcp=pcp), role, VIEW, clock=lambda: 10.0)


def config(*children: dict[str, Any], pcp: int = 1, **extra: Any) -> ConnectorConfig:
    transfer = parse_kv_transfer_config(multi(*children, role="kv_both") | extra)
    return ConnectorConfig(transfer, "engine", ParallelConfig(pcp=pcp), ModelView("m", "uint8", 2, 1, 64, 16), rank=0)


def kids(connector: MultiConnector) -> list[FakeChild]:
    assert all(isinstance(child, FakeChild) for child in connector.children)
    return connector.children  # type: ignore[return-value]


def request(id: str = "a", n: int = 64) -> RequestView:
    return RequestView(id, n, n, None)


# --- configuration ------------------------------------------------------------------------------------------------


def test_problems_of_all_children_come_at_once_with_their_paths() -> None:
    with pytest.raises(ConfigError) as caught:
        make(
            {"kv_connector": "NixlConector", "kv_role": "kv_both"},
            {"kv_connector": "NixlConnector", "kv_role": "kv_producr"},
            {
                "kv_connector": "OffloadingConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"cpu_byts_to_use": 1, "kvconn": {"holdd": True}},
            },
            fake(),
        )
    at = "kv_transfer_config.kv_connector_extra_config.connectors"
    problems = caught.value.problems
    assert [problem.split(":")[0] for problem in problems] == [
        f"{at}[0].kv_connector",
        f"{at}[1].kv_role",
        f"{at}[2].kv_connector_extra_config.cpu_byts_to_use",
        f"{at}[2].kv_connector_extra_config.kvconn.holdd",
    ]
    assert "did you mean 'kv_producer'" in problems[1]


def test_a_nested_child_names_its_whole_path() -> None:
    with pytest.raises(ConfigError) as caught:
        make(fake(), multi({"kv_connector": "Nope", "kv_role": "kv_both"}, role="kv_both"))
    at = "kv_transfer_config.kv_connector_extra_config.connectors[1].kv_connector_extra_config.connectors[0]"
    assert caught.value.problems[0].startswith(f"{at}.kv_connector: 'Nope'")


def test_no_children_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="at least one connector"):
        make()


@pytest.mark.parametrize("depth", ["alone", "nested"])
def test_a_child_that_narrows_the_count_is_refused_by_name(depth: str) -> None:
    child = fake(count=1)
    with pytest.raises(ConfigError, match=r"connectors\[1\].*FakeChild\.get_finished_count\(\).*got 1"):
        make(fake(), child if depth == "alone" else multi(holding(), child, role="kv_both"), pcp=8)


def test_children_inherit_the_engine_id_and_the_policy() -> None:
    connector = MultiConnector(
        config(fake(), fake() | {"engine_id": "its own"}, kv_load_failure_policy="recompute"),
        ConnectorRole.SCHEDULER,
        VIEW,
    )
    assert [child.config.engine_id for child in kids(connector)] == ["engine", "its own"]
    assert {child.config.kv_transfer.kv_load_failure_policy for child in kids(connector)} == {"recompute"}
    with pytest.raises(ConfigError, match=r"connectors\[0\]\.kv_load_failure_policy"):
        make(fake() | {"kv_load_failure_policy": "recompute"})


def test_built_children_are_shut_down_when_a_sibling_cannot_be() -> None:
    built: list[KVConnector] = []

    def building(cls: Any, *args: Any) -> KVConnector:
        built.append(cls(*args))
        return built[-1]

    with pytest.raises(ConfigError):
        MultiConnector(config(fake(), fake(count=1)), ConnectorRole.SCHEDULER, VIEW, make_child=building)
    assert [("shutdown", None) in child.calls for child in built if isinstance(child, FakeChild)] == [True, True]


# --- forwarding ---------------------------------------------------------------------------------------------------

DERIVED = {"get_finished"}


def test_every_method_of_the_interface_is_overridden() -> None:
    methods = {n for n, f in vars(KVConnector).items() if inspect.isfunction(f) and not n.startswith("_")}
    assert methods - DERIVED <= set(vars(MultiConnector))
    assert not methods & DERIVED & set(vars(MultiConnector))


METADATA_ARGS = ("bind_connector_metadata", "handle_preemptions")
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "on_new_request": (request(),),
    "get_num_new_matched_tokens": (request(), 0),
    "update_state_after_alloc": (request(), KVBlocks(((1,),), (0,)), 0),
    "build_connector_meta": (StepView(1),),
    "request_finished": (request(), ((1,),), FinishReason.STOP),
    "update_connector_output": (KVConnectorOutput(),),
    "set_handshake_metadata": ({},),
    "explain": (0.0,),
    "register_kv_caches": ({"l": LayerView("l", 0, 1, 1, 1)},),
    "start_load_kv": (None,),
    "wait_for_layer_load": ("l",),
    "save_kv_layer": ("l",),
    "get_transfer_results": (set(),),
}
OVERRIDDEN = sorted(
    n for n, f in vars(KVConnector).items() if inspect.isfunction(f) and not n.startswith("_") and n not in DERIVED
)


@pytest.mark.parametrize("method", OVERRIDDEN)
def test_every_method_reaches_every_child(method: str, mocker: Any) -> None:
    connector = make(fake(), fake())
    spies = [mocker.spy(child, method) for child in kids(connector)]
    arguments = ARGUMENTS.get(method, ())
    if method in METADATA_ARGS:
        arguments = (connector.build_connector_meta(StepView(1)),)
    if method == "get_finished_count":  # asked at start-up, answered for all
        assert connector.get_finished_count() is None
        return
    getattr(connector, method)(*arguments)
    assert [spy.call_count for spy in spies] == [1, 1]


def test_metadata_of_another_connector_is_a_contract_error() -> None:
    connector = make(fake(), role=ConnectorRole.WORKER)
    with pytest.raises(ContractError, match="expected its own scheduler half's metadata for 1 children"):
        connector.bind_connector_metadata(make(fake(), fake()).build_connector_meta(StepView(1)))


def test_answers_are_joined(mocker: Any) -> None:
    connector = make(fake(), fake(), fake())
    first, second, third = kids(connector)
    mocker.patch.object(second, "has_pending_push_work", return_value=True)
    mocker.patch.object(first, "take_events", return_value=["e1"])
    mocker.patch.object(third, "take_events", return_value=["e2"])
    mocker.patch.object(first, "get_block_ids_with_load_errors", return_value={1})
    mocker.patch.object(third, "get_block_ids_with_load_errors", return_value={2})
    mocker.patch.object(first, "get_kv_connector_stats", return_value=Stats({"x": 1}))
    mocker.patch.object(third, "get_kv_connector_stats", return_value=Stats({"x": 2, "y": 1}))
    assert connector.has_pending_push_work() is True
    assert list(connector.take_events()) == ["e1", "e2"]
    assert connector.get_block_ids_with_load_errors() == {1, 2}
    assert connector.get_kv_connector_stats() == Stats({"x": 3, "y": 1})
    assert connector.reset_cache() is None
    mocker.patch.object(first, "reset_cache", return_value=True)
    assert connector.reset_cache() is True
    mocker.patch.object(third, "reset_cache", return_value=False)
    assert connector.reset_cache() is False


def test_shutdown_reaches_every_child_even_when_one_raises() -> None:
    connector = make(fake(breaks=True), fake())
    with pytest.raises(RuntimeError, match="a child that breaks"):
        connector.shutdown()
    assert all(("shutdown", None) in child.calls for child in kids(connector))


def test_worker_metadata_that_is_no_facts_is_named(mocker: Any) -> None:
    connector = make(fake(), role=ConnectorRole.WORKER)
    mocker.patch.object(kids(connector)[0], "build_connector_worker_meta", return_value={"a": 1})
    with pytest.raises(ContractError, match=r"FakeChild\.build_connector_worker_meta\(\): .* got dict"):
        connector.build_connector_worker_meta()


def test_one_child_publishes_and_only_it_is_handed_the_metadata() -> None:
    worker = make(fake(), fake(publish=True), role=ConnectorRole.WORKER)
    published = worker.get_handshake_metadata()
    assert published == MultiHandshake(1, HandshakeMetadata())
    scheduler = make(fake(), fake())
    scheduler.set_handshake_metadata({(0, 0): published})
    assert [child.calls for child in kids(scheduler)] == [
        [("handshake", {})],
        [("handshake", {(0, 0): HandshakeMetadata()})],
    ]
    both = make(fake(publish=True), fake(publish=True), role=ConnectorRole.WORKER)
    with pytest.raises(ConfigError, match=r"got FakeChild\[0\] and FakeChild\[1\]"):
        both.get_handshake_metadata()
    assert make(fake(), role=ConnectorRole.WORKER).get_handshake_metadata() is None


# --- loads and params ---------------------------------------------------------------------------------------------


def test_the_first_child_that_can_load_loads_and_the_rest_load_nothing() -> None:
    connector = make(fake(), fake(match=32), fake(match=48))
    for _ in range(3):
        assert connector.get_num_new_matched_tokens(request(), 0) == (32, True)
    connector.update_state_after_alloc(request(), KVBlocks(((1, 2),), (0,)), 32)
    asked = [[c for c in child.calls if c[0] == "match"] for child in kids(connector)]
    assert [len(calls) for calls in asked] == [3, 3, 0]
    assert [child.calls[-1] for child in kids(connector)] == [("alloc", 0), ("alloc", 32), ("alloc", 0)]
    assert len(connector._gate.ledger) == 1 and not connector._matches


def test_a_synchronous_load_opens_no_life() -> None:
    connector = make(fake(match=32, asynchronous=False))
    assert connector.get_num_new_matched_tokens(request(), 0) == (32, False)
    connector.update_state_after_alloc(request(), KVBlocks(((1, 2),), (0,)), 32)
    assert len(connector._gate.ledger) == 0


def test_not_yet_delays_only_before_a_match() -> None:
    assert make(fake(match=None), fake(match=8)).get_num_new_matched_tokens(request(), 0) == (None, False)
    assert make(fake(match=8), fake(match=None)).get_num_new_matched_tokens(request(), 0) == (8, True)


def test_the_last_answer_stands(mocker: Any) -> None:
    connector = make(fake(match=8), fake(match=16))
    connector.get_num_new_matched_tokens(request(), 0)
    kids(connector)[0].told["match"] = 0
    assert connector.get_num_new_matched_tokens(request(), 0) == (16, True)
    connector.update_state_after_alloc(request(), KVBlocks(((1,),), (0,)), 16)
    assert [child.calls[-1][1] for child in kids(connector)] == [0, 16]


def test_tokens_that_nobody_offered_are_a_contract_error() -> None:
    with pytest.raises(ContractError, match="no child offered any"):
        make(fake()).update_state_after_alloc(request(), KVBlocks(((1,),), (0,)), 16)


def test_every_child_is_asked_at_the_end_and_the_claimers_are_remembered() -> None:
    connector = make(fake(claims=False, params={"p": 1}), fake(), fake(params={"p": 2}))
    assert connector.request_finished(request(), ((1,),), FinishReason.STOP) == (True, {"p": 1})
    assert all(("finished", "a") in child.calls for child in kids(connector))
    meta = connector.build_connector_meta(StepView(1))
    assert meta.step.sends[0].children == (1, 2)  # type: ignore[attr-defined]
    assert connector.get_kv_connector_stats() == Stats({"params_conflicts": 1})


def test_nobody_claims() -> None:
    connector = make(fake(claims=False))
    assert connector.request_finished(request(), ((1,),), FinishReason.STOP) == (False, None)
    assert len(connector._gate.ledger) == 0


# --- receives -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("failing", [False, True])
def test_a_receive_is_the_loading_childs_word_once(failing: bool) -> None:
    side = Side("d", multi(fake(match=16), fake(), role="kv_both"))
    side.load("a", None, [1, 2])
    side.step()
    loader, other = kids(side.workers[0])  # type: ignore[arg-type]
    other.say(received="a")
    side.step()
    assert side.received == []
    loader.say(received="a", failed="a" if failing else "")
    side.step()
    loader.say(received="a")
    side.step()
    assert side.received == ["a"] and side.failed == (["a"] if failing else [])
    halves = kids(side.scheduler)  # type: ignore[arg-type]
    assert ("output", (set(), {"a"}, {"a"} if failing else set())) in halves[0].calls
    assert not [call for call in halves[1].calls if call[0] == "output"]


# --- what people read ---------------------------------------------------------------------------------------------


def test_repr_is_one_readable_line() -> None:
    scheduler = make(fake(), holding())
    assert repr(scheduler) == (
        "MultiConnector([FakeChild, HoldingConnector] EngineGate(open=0 CompletionLedger(send=0 recv=0 absorbed=0)))"
    )
    worker = make(fake(), holding(), role=ConnectorRole.WORKER)
    assert repr(worker) == (
        "MultiConnector([FakeChild, HoldingConnector] RankGate(send(open=0 early=0) recv(open=0 early=0)))"
    )


def test_explain_names_request_child_ranks_and_age() -> None:
    side = Side("p", multi(fake(), holding(), role="kv_both"), pcp=4, make=_at_ten)
    side.prefill("a", [1], 1)
    side.step()
    for worker in side.workers:
        worker.children[1].release()  # type: ignore[attr-defined]
    side.workers[0].children[0].say(sent="a")  # type: ignore[attr-defined]
    side.step()
    lines = side.scheduler.explain(22.5)
    assert lines == ["send of a (life 1) owed by FakeChild ranks 1..3 for 12.5 s"]
    side.close()


def test_explain_prefixes_the_childrens_own_lines() -> None:
    side = Side("p", multi(fake(), holding(), role="kv_both"), pcp=2, make=_at_ten)
    side.prefill("a", [1], 1)
    assert side.scheduler.explain(10.0) == [
        "send of a (life 1) owed by FakeChild ranks 0,1, HoldingConnector ranks 0,1 for 0.0 s",
        "HoldingConnector: send of a (life 1) owed by HoldingConnector ranks 0,1",
    ]
    side.close()


def _at_ten(*args: Any) -> MultiConnector:
    return MultiConnector(*args, clock=lambda: 10.0)


def test_results_and_facts_go_up_together() -> None:
    side = Side("p", multi(fake(), role="kv_both"))
    side.prefill("a", [1], 1)
    worker = side.workers[0]
    worker.bind_connector_metadata(side.scheduler.build_connector_meta(StepView(1)))
    worker.children[0].say(sent="a")  # type: ignore[attr-defined]
    assert worker.get_transfer_results(set()) == TransferResults(frozenset({"a"}))
    facts = worker.build_connector_worker_meta()
    assert isinstance(facts, WorkerFacts) and [(f.id, f.child) for f in facts.facts] == [("a", (-1, 0))]
    assert worker.get_transfer_results(set()) == TransferResults()
    assert worker.build_connector_worker_meta() is None
