"""The repairs on the classes of the vLLM that is installed here (0.30 to 0.33)."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest

from kvconn.vllm import interface
from kvconn.vllm._hotfix_probes import Probed, probe_aggregator, probe_replicated_rank
from kvconn.vllm.hotfix import KNOWN, Targets, load_targets, repair
from tests.vllm_hotfix.doubles import methods

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own imports are not clean


@pytest.fixture(scope="module")
def loaded() -> Targets:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = load_targets()
    if not KNOWN.match(found.version):
        pytest.skip(f"vllm {found.version} is installed; the hotfix is for 0.30 to 0.33")
    return found


@pytest.fixture
def targets(loaded: Targets) -> Iterator[Targets]:
    """Stock again before and after."""
    touched = [
        (owner, name, vars(owner)[name])
        for cls, name in (
            (loaded.pull_connector, "get_transfer_results"),
            (loaded.push_worker, "start_load_kv"),
            (loaded.aggregator, "aggregate"),
        )
        for owner in [next(base for base in cls.__mro__ if name in vars(base))]
    ]
    yield loaded
    for owner, name, stock in touched:
        setattr(owner, name, stock)


def probes(t: Targets) -> list[Probed]:
    return [
        probe_replicated_rank(t.pull_connector, t.pull_worker, t.nixl_metadata),
        probe_replicated_rank(t.push_connector, t.push_worker, t.nixl_metadata),
        probe_aggregator(t.aggregator, t.output),
    ]


def test_the_faults_are_there_and_the_repairs_end_them(targets: Targets) -> None:
    before = probes(targets)
    assert [p.faulty for p in before] == [True, True, True]
    assert [p.seen for p in before[:2]] == ["recorded by the worker, dropped on the way out", "never recorded"]
    assert [o.state for o in repair(targets)] == ["repaired"] * 3
    assert [p.faulty for p in probes(targets)] == [False, False, False]


def test_once_is_enough(targets: Targets) -> None:
    repair(targets)
    once = methods(targets)
    assert [o.state for o in repair(targets)] == ["already"] * 3
    assert methods(targets) == once


def test_everybody_has_the_repaired_aggregator(targets: Targets) -> None:
    """vLLM imports the class by name in several places; the method is replaced in the class itself."""
    for module in ("vllm.v1.executor.abstract", "vllm.v1.executor.multiproc_executor"):
        assert import_module(module).KVOutputAggregator is targets.aggregator


def test_a_fixed_vllm_is_left_alone(targets: Targets) -> None:
    """Subclasses of vLLM's own that do it right, as a fixed release would."""

    class Facade(targets.pull_connector):  # type: ignore[misc, name-defined]
        def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
            return self.connector_worker.get_transfer_results()

    class PushFacade(targets.push_connector):  # type: ignore[misc, name-defined]
        def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
            return self.connector_worker.get_transfer_results()

    class PushWorker(targets.push_worker):  # type: ignore[misc, name-defined]
        def start_load_kv(self, metadata: Any) -> None:
            super().start_load_kv(metadata)
            if self.pcp_rank > 0 and not self.pcp_dcp_sharded:
                self._replicated_pcp_done_sending.update(metadata.reqs_to_send)

    fixed = Targets(
        version=targets.version, pull_connector=Facade, pull_worker=targets.pull_worker, push_connector=PushFacade,
        push_worker=PushWorker, nixl_metadata=targets.nixl_metadata, aggregator=targets.aggregator,
        output=targets.output,
    )  # fmt: skip
    before = methods(fixed)
    assert [o.state for o in repair(fixed)[:2]] == ["healthy"] * 2
    assert {**methods(fixed), "aggregate": None} == {**before, "aggregate": None}


def joined(aggregator: Any, output: type, *reports: set[str]) -> set[str]:
    """What the world's reports of one step complete, in vLLM's own worker output."""
    outputs = [_worker_output(output(finished_sending=ids or None)) for ids in reports]
    return aggregator.aggregate(outputs, 0).kv_connector_output.finished_sending or set()


def _worker_output(part: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kind = import_module("vllm.v1.outputs").ModelRunnerOutput
    return kind(req_ids=[], req_id_to_index={}, kv_connector_output=part)


def test_eight_ranks_of_which_one_stutters(targets: Targets) -> None:
    nobody: list[set[str]] = [set()] * 6
    stock = targets.aggregator(8)
    assert [joined(stock, targets.output, set(), {"r"}, *nobody) for _ in range(8)][-1] == {"r"}, "one rank, freed"
    repair(targets)
    counter = targets.aggregator(8)
    assert [joined(counter, targets.output, set(), {"r"}, *nobody) for _ in range(8)] == [set()] * 8
    assert joined(counter, targets.output, set(), *[{"r"}] * 7) == set()
    assert joined(counter, targets.output, {"r"}, *[set()] * 7) == {"r"}
    assert joined(counter, targets.output, *[{"r"}] * 8) == set()
    assert counter._send_remaining_count == {}


def test_the_description_is_what_python_sees(loaded: Targets) -> None:
    """The interface as extracted from the wheel's sources against the classes that are installed."""
    described = interface.load(_release(loaded)).classes
    for name in (interface.BASE, interface.HYBRID):
        live = getattr(import_module(described[name].module), name)
        seen = {key: method for key, (owner, method) in interface.describe(live).methods.items() if owner == name}
        for key, method in described[name].methods.items():
            assert (seen[key].kind, seen[key].abstract) == (method.kind, method.abstract), key
            assert [(p.name, p.kind, p.required) for p in seen[key].parameters] == [
                (p.name, p.kind, p.required) for p in method.parameters
            ], key
        public = {key for key, m in seen.items() if not key.startswith("_") and m.kind != "attribute"}
        assert public <= set(described[name].methods)


def test_the_fields_that_cross_are_what_python_sees(loaded: Targets) -> None:
    described = interface.load(_release(loaded)).classes
    for name, cls in described.items():
        live = getattr(import_module(cls.module), name)
        if dataclasses.is_dataclass(live) and name != "KVTransferConfig":
            assert [f.name for f in dataclasses.fields(live)] == [f.name for f in cls.fields], name


def test_the_installed_connectors_fit(loaded: Targets) -> None:
    release = _release(loaded)
    for name, cls in interface.load(release).connectors.items():
        if name != "NixlBaseConnector":  # abstract
            live = getattr(import_module(cls.module), name)
            assert interface.fits(live, release) == [], name


def _release(loaded: Targets) -> str:
    return loaded.version.split("+")[0]
