"""The facade: configuration, forwarding, loads, params, handshake, stats, shutdown, the stall table."""

from __future__ import annotations

import inspect
import pickle
from typing import Any

import pytest

from kvconn.base import (
    ConnectorRole,
    FinishReason,
    KVBlocks,
    KVConnector,
    KVConnectorOutput,
    LayerView,
    RequestView,
    StepView,
    TransferResults,
    WorkerFacts,
)
from kvconn.config import ConnectorConfig, KVTransferConfig, ModelView, ParallelConfig, parse_kv_transfer_config
from kvconn.errors import ConfigError, ContractError
from kvconn.metrics import Stats
from kvconn.multi.connector import MultiConnector, MultiHandshake
from kvconn.multi.policy import Claim
from tests.multi.fakes import FakeChild, Published, fake, holding
from tests.support import LAYERS, Side, multi

VIEW = Side("view", holding()).kv_cache


def make(*children: dict[str, Any], role: ConnectorRole = ConnectorRole.SCHEDULER, pcp: int = 1) -> MultiConnector:
    return MultiConnector(config(*children, pcp=pcp), role, VIEW, clock=lambda: 10.0)


def config(*children: dict[str, Any], pcp: int = 1, **extra: Any) -> ConnectorConfig:
    transfer = parse_kv_transfer_config(multi(*children, role="kv_both") | extra)
    return ConnectorConfig(transfer, "engine", ParallelConfig(pcp=pcp), ModelView("m", "uint8", 2, 1, 64, 16), rank=0)


def kids(connector: MultiConnector) -> list[FakeChild]:
    assert all(isinstance(child, FakeChild) for child in connector.children)
    return connector.children  # type: ignore[return-value]


def find_fakes(connector: KVConnector) -> list[FakeChild]:
    """The fake children below ``connector``, in order."""
    if isinstance(connector, FakeChild):
        return [connector]
    return [one for child in getattr(connector, "children", ()) for one in find_fakes(child)]


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


@pytest.mark.parametrize("deep", [0, 1, 11])
def test_a_nested_childs_own_problem_has_the_outer_path_before_it(deep: int) -> None:
    """Also when both have the same index, or one that begins with it."""
    hold = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    inner = multi(*[fake()] * deep, hold | {"kv_connector_extra_config": {"hold": 1}}, role="kv_both")
    with pytest.raises(ConfigError) as caught:
        make(fake(), inner)
    at = "kv_connector_extra_config.connectors"
    assert caught.value.problems == (
        f"kv_transfer_config.{at}[1].{at}[{deep}].kv_connector_extra_config.hold: unknown key",
    )


def test_all_problems_of_one_child_come_at_once() -> None:
    child = {
        "kv_connector": "NixlConector",
        "kv_role": "kv_consumer",
        "kv_load_failure_policy": "recompute",
        "kvconn": {"quorum": 3},
    }
    with pytest.raises(ConfigError) as caught:
        MultiConnector(config(child, kv_role="kv_producer", pcp=2), ConnectorRole.WORKER, VIEW)
    at = "kv_transfer_config.kv_connector_extra_config.connectors[0]"
    assert [problem.split(" ")[0] for problem in caught.value.problems] == [
        f"{at}.kv_load_failure_policy:",
        f"{at}.kv_role:",
        f"{at}.kvconn.quorum:",
        f"{at}.kv_connector:",
    ]
    assert "expected 1..2, the engine's workers, got 3" in caught.value.problems[2]


@pytest.mark.parametrize(
    ("kvconn", "problem"),
    [
        ({"kvconn": {"quorum": 0}}, r"kvconn\.quorum: Expected `int` >= 1"),
        ({"kvconn": {"quorum": True}}, r"kvconn\.quorum: "),
        ({"kvconn": {"qorum": 1}}, r"kvconn\.qorum: unknown key \(did you mean 'quorum'\?\)"),
        ({"kvcon": {"quorum": 1}}, r"kvcon: unknown key \(did you mean 'kvconn'\?\)"),
    ],
)
def test_a_wrong_quorum_is_named(kvconn: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=rf"connectors\[0\]\.{problem}"):
        make(fake() | kvconn)


def test_wrong_keys_do_not_hide_a_wrong_name() -> None:
    with pytest.raises(ConfigError) as caught:
        make({"kv_connector": "NixlConector", "kv_rol": "kv_both"})
    assert [problem.split(".")[-1].split(":")[0] for problem in caught.value.problems] == [
        "kv_rol",
        "kv_role",
        "kv_connector",
    ]


@pytest.mark.parametrize("ours", ["kv_producer", "kv_consumer", "kv_both"])
def test_a_childs_role_is_not_the_opposite_of_its_multis(ours: str) -> None:
    for role in ("kv_producer", "kv_consumer", "kv_both"):
        child = config(fake() | {"kv_role": role}, kv_role=ours)
        if {ours, role} == {"kv_producer", "kv_consumer"}:
            with pytest.raises(ConfigError, match=rf"connectors\[0\]\.kv_role: expected {ours} or kv_both"):
                MultiConnector(child, ConnectorRole.WORKER, VIEW)
        else:
            MultiConnector(child, ConnectorRole.WORKER, VIEW)


def test_a_child_never_sees_the_quorum_beside_it() -> None:
    (child,) = kids(make(fake(count=1) | {"kvconn": {"quorum": 1}}))
    assert type(child.config.kv_transfer) is KVTransferConfig
    assert child.told == {"count": 1}


@pytest.mark.parametrize("depth", ["beside", "nested"])
def test_a_quorum_completes_a_child_whose_other_ranks_are_silent(depth: str) -> None:
    few = fake(count=2) | {"kvconn": {"quorum": 2}}
    shape = (few, holding(polls=0)) if depth == "beside" else (multi(few, role="kv_both"), holding(polls=0))
    side = Side("p", multi(*shape, role="kv_both"), pcp=4)
    (half,), rest = find_fakes(side.workers[2]), [find_fakes(worker)[0] for worker in side.workers]
    side.prefill("a", [1], 1)
    side.step()
    for _ in range(2):  # one rank's two words are one
        half.say(sent="a")
        side.step()
    assert side.sent == []
    rest[3].say(sent="a")
    side.step()
    assert side.sent == ["a"]
    assert side.scheduler.has_pending_push_work()
    side.step()
    assert not side.scheduler.has_pending_push_work()
    for late in rest:
        late.say(sent="a")
    side.step()
    assert side.sent == ["a"]
    assert repr(side.workers[0]).endswith("RankGate(send(open=0 early=0) recv(open=0 early=0)))")
    side.close()


def test_stats_that_are_none_of_ours_are_named(mocker: Any) -> None:
    connector = make(fake(), fake())
    mocker.patch.object(kids(connector)[1], "get_kv_connector_stats", return_value={"x": 1})
    with pytest.raises(ContractError, match=r"FakeChild\[1\]\.get_kv_connector_stats\(\): .* got dict"):
        connector.get_kv_connector_stats()


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


@pytest.mark.parametrize("role", ConnectorRole)
@pytest.mark.parametrize("method", OVERRIDDEN)
def test_every_method_reaches_every_child(method: str, role: ConnectorRole, mocker: Any) -> None:
    connector = make(fake(), fake(), role=role)
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


def test_answers_are_joined_through_a_nested_one(mocker: Any) -> None:
    connector = make(fake(), multi(fake(), fake(params={"p": 2}), role="kv_both"))
    first, second, third = find_fakes(connector)
    mocker.patch.object(third, "has_pending_push_work", return_value=True)
    for child, event in ((first, "e1"), (second, "e2"), (third, "e3")):
        mocker.patch.object(child, "take_events", return_value=[event])
        mocker.patch.object(child, "get_kv_connector_stats", return_value=Stats({"x": 1}))
    mocker.patch.object(first, "reset_cache", return_value=True)
    mocker.patch.object(third, "reset_cache", return_value=False)
    mocker.patch.object(second, "get_block_ids_with_load_errors", return_value={4})
    assert connector.has_pending_push_work() is True
    assert list(connector.take_events()) == ["e1", "e2", "e3"]
    assert connector.get_block_ids_with_load_errors() == {4}
    assert connector.get_kv_connector_stats() == Stats({"x": 3})
    assert connector.reset_cache() is False
    assert connector.request_finished(request(), ((1,),), FinishReason.STOP) == (True, {"p": 2})


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


def test_publishing_children_are_handed_back_their_own_metadata() -> None:
    worker = make(fake(publish="x"), fake(), fake(publish="y"), role=ConnectorRole.WORKER)
    published = worker.get_handshake_metadata()
    assert published == MultiHandshake({0: Published("x"), 2: Published("y")})
    assert pickle.loads(pickle.dumps(published)) == published
    scheduler = make(fake(), fake(), fake())
    scheduler.set_handshake_metadata({(0, 0): published, (1, 0): MultiHandshake({2: Published("z")})})
    assert [child.calls for child in kids(scheduler)] == [
        [("handshake", {(0, 0): Published("x")})],
        [("handshake", {})],
        [("handshake", {(0, 0): Published("y"), (1, 0): Published("z")})],
    ]
    assert make(fake(), role=ConnectorRole.WORKER).get_handshake_metadata() is None


def test_a_nested_childs_metadata_finds_its_way_back() -> None:
    shape = multi(fake(publish="x"), fake(publish="y"), role="kv_both")
    worker = make(fake(publish="w"), shape, role=ConnectorRole.WORKER)
    published = worker.get_handshake_metadata()
    scheduler = make(fake(), shape)
    scheduler.set_handshake_metadata({(0, 0): published} if published else {})
    inner = scheduler.children[1]
    assert isinstance(inner, MultiConnector)
    assert [child.calls for child in kids(inner)] == [
        [("handshake", {(0, 0): Published("x")})],
        [("handshake", {(0, 0): Published("y")})],
    ]


# --- loads and params ---------------------------------------------------------------------------------------------


def test_one_request_is_loaded_by_several_children_each_its_range() -> None:
    connector = make(fake(), fake(match=32), fake(match=16), fake())
    for _ in range(3):
        assert connector.get_num_new_matched_tokens(request(n=96), 16) == (48, True)
    asked = [[call[1:] for call in child.calls if call[0] == "match"] for child in kids(connector)]
    assert asked == [[("a", 16)] * 3, [("a", 16)] * 3, [("a", 48)] * 3, [("a", 64)] * 3]
    blocks = KVBlocks(((1, 2, 3, 4, 5, 6),), (1,))
    connector.update_state_after_alloc(request(n=96), blocks, 48)
    assert [child.calls[-1] for child in kids(connector)] == [
        ("alloc", 0, (1,)), ("alloc", 32, (1,)), ("alloc", 16, (3,)), ("alloc", 0, (1,)),
    ]  # fmt: skip
    assert connector._gate.step().loads == (Claim("a", 1, (1, 2)),) and not connector._matches


def test_fewer_allocated_tokens_are_fewer_for_the_last() -> None:
    connector = make(fake(match=32), fake(match=32))
    connector.get_num_new_matched_tokens(request(), 0)
    connector.update_state_after_alloc(request(), KVBlocks(((1, 2, 3),), (0,)), 32)
    assert [child.calls[-1][1] for child in kids(connector)] == [32, 0]
    assert connector._gate.step().loads == (Claim("a", 1, (0,)),)


def test_more_tokens_than_were_offered_are_a_contract_error() -> None:
    connector = make(fake(match=32))
    connector.get_num_new_matched_tokens(request(), 0)
    with pytest.raises(ContractError, match="48 external tokens allocated, but children offered 32"):
        connector.update_state_after_alloc(request(), KVBlocks(((1, 2, 3),), (0,)), 48)


def test_a_request_whose_blocks_are_still_owed_is_asked_again_later() -> None:
    connector = make(fake(match=16))
    connector.get_num_new_matched_tokens(request(), 0)
    connector.update_state_after_alloc(request(), KVBlocks(((1,),), (0,)), 16)
    connector.request_finished(request(), ((1,),), FinishReason.ABORT)
    assert connector.get_num_new_matched_tokens(request(), 0) == (None, False)


@pytest.mark.parametrize("shape", ["flat", "nested"])
def test_a_load_ends_once_when_all_its_ranges_are_quiet_and_failed_if_one_did(shape: str) -> None:
    second = fake(match=16) if shape == "flat" else multi(fake(match=16), role="kv_both")
    side = Side("d", multi(fake(match=16), second, role="kv_both"), make=_at_ten)
    side.load("a", None, [1, 2])
    side.step()
    first, last = find_fakes(side.workers[0])
    first.say(failed="a")
    last.say(received="a")
    side.step()
    assert side.received == []
    first.say(received="a")
    side.step()
    first.say(received="a")
    last.say(received="a")
    side.step()
    assert (side.received, side.failed) == (["a"], ["a"])
    side.close()


def test_a_synchronous_range_of_a_parked_request_is_waited_for_before_anything_is_reported(mocker: Any) -> None:
    side = Side("d", multi(fake(match=16, asynchronous=False), fake(match=16), role="kv_both"), make=_at_ten)
    first, last = find_fakes(side.workers[0])
    waits = [mocker.spy(child, "wait_for_layer_load") for child in (first, last)]
    side.load("a", None, [1, 2])
    side.step()
    assert [call.args for call in waits[0].call_args_list] == [(layer,) for layer in LAYERS]
    assert not waits[1].called
    side.step()
    assert waits[0].call_count == len(LAYERS)
    last.say(received="a")
    side.step()
    assert side.received == ["a"]
    side.close()


def test_a_row_cut_down_to_its_synchronous_range_is_received_at_once() -> None:
    """The engine parked the request for an asynchronous answer, and waits for a word on it."""
    side = Side("d", multi(fake(match=16, asynchronous=False), fake(match=16), role="kv_both"), make=_at_ten)
    side.scheduler.get_num_new_matched_tokens(request(), 0)
    side.aggregator.expect("recv", "a")
    side.scheduler.update_state_after_alloc(request(), KVBlocks(((1,),), (0,)), 16)
    side.step()
    side.step()
    assert (side.received, side.failed) == (["a"], [])
    side.close()


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
