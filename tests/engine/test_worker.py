"""One rank, in this process: a connector's worker half is called in vLLM's order, also around an empty step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch

from kvconn.base import (
    ConnectorMetadata,
    ConnectorRole,
    KVCacheView,
    KVConnector,
    LayerView,
    StepView,
    TransferResults,
    WorkerFacts,
)
from kvconn.config import ConnectorConfig, parse_kv_transfer_config
from kvconn.engine.config import EngineConfig, ModelSpec
from kvconn.engine.scheduler import Scheduled, Step
from kvconn.engine.worker import Worker

CALLS: list[tuple[Any, ...]] = []


class NotingConnector(KVConnector):
    """A worker half that writes down its calls in :data:`CALLS`."""

    def __init__(self, config: ConnectorConfig, role: ConnectorRole, kv_cache: KVCacheView) -> None:
        CALLS.append(("init", role, config.rank))

    def build_connector_meta(self, step: StepView) -> ConnectorMetadata:
        raise AssertionError("a worker half builds no metadata")

    def register_kv_caches(self, layers: Mapping[str, LayerView]) -> None:
        CALLS.append(("register", dict(layers)))

    def handle_preemptions(self, metadata: ConnectorMetadata) -> None:
        CALLS.append(("preemptions",))

    def bind_connector_metadata(self, metadata: ConnectorMetadata) -> None:
        CALLS.append(("bind",))

    def wait_for_layer_load(self, layer_name: str) -> None:
        CALLS.append(("wait layer", layer_name))

    def save_kv_layer(self, layer_name: str, **kwargs: object) -> None:
        CALLS.append(("save layer", layer_name))

    def start_load_kv(self, context: object = None, **kwargs: object) -> None:
        CALLS.append(("start load",))

    def wait_for_save(self) -> None:
        CALLS.append(("wait save",))

    def get_transfer_results(self, finished_req_ids: set[str]) -> TransferResults:
        CALLS.append(("poll", finished_req_ids))
        return TransferResults(frozenset({"s"}), frozenset({"r", "f"}), frozenset({"f"}))

    def get_kv_connector_stats(self) -> str:
        CALLS.append(("stats",))
        return "stats"

    def build_connector_worker_meta(self) -> WorkerFacts:
        CALLS.append(("facts",))
        return WorkerFacts()

    def clear_connector_metadata(self) -> None:
        CALLS.append(("clear",))

    def shutdown(self) -> None:
        CALLS.append(("shutdown",))


AFTER = [("start load",), ("wait save",), ("poll", {"ended"}), ("stats",), ("facts",), ("clear",)]


@pytest.fixture
def worker() -> Iterator[Worker]:
    threads = torch.get_num_threads()
    CALLS.clear()
    transfer = parse_kv_transfer_config(
        {"kv_connector": "NotingConnector", "kv_connector_module_path": __name__, "kv_role": "kv_both"}
    )
    model = ModelSpec(mode="content-addressed", n_layers=2)
    made = Worker(EngineConfig(name="w", num_blocks=4, block_size=8, model=model), transfer, "engine", 0)
    yield made
    made.close()
    torch.set_num_threads(threads)


def test_the_cache_is_registered_as_it_lies_in_memory(worker: Worker) -> None:
    init, (name, layers) = CALLS
    assert init == ("init", ConnectorRole.WORKER, 0) and name == "register"
    cache = worker._model.caches[1]
    assert list(layers) == ["layers.0.kv", "layers.1.kv"]
    assert layers["layers.1.kv"] == LayerView("layers.1.kv", cache.data_ptr(), 8 * 64 * 8, 8 * 64 * 8, 4)


def test_a_step_calls_the_connector_in_vllms_order(worker: Worker) -> None:
    CALLS.clear()
    share = Scheduled("a", 0, 3, 0, (1, 2, 3), ((0,),), sample=True, decode=False)
    output = worker.step(Step((share,), StepView(1, finished=("ended",))), ConnectorMetadata())
    forward = [(call, f"layers.{layer}.kv") for layer in range(2) for call in ("wait layer", "save layer")]
    assert [("preemptions",), ("bind",), *forward, *AFTER] == CALLS
    assert output.tokens.keys() == {"a"}
    part = output.kv_connector_output
    assert part is not None
    assert (part.finished_sending, part.finished_recving, part.failed_recving) == ({"s"}, {"r", "f"}, {"f"})
    assert (part.kv_connector_stats, part.kv_connector_worker_meta) == ("stats", WorkerFacts())


def test_an_empty_step_is_the_same_without_the_forward(worker: Worker) -> None:
    CALLS.clear()
    output = worker.step(Step((), StepView(1, finished=("ended",))), ConnectorMetadata())
    assert [("preemptions",), ("bind",), *AFTER] == CALLS
    assert output.tokens == {} and output.kv_connector_output is not None


def test_an_id_may_be_back_in_the_step_that_ends_it(worker: Worker) -> None:
    """Aborted and submitted again between two steps: the new life's tokens are its own."""

    def token(id: str, start: int, tokens: tuple[int, ...], *ended: str) -> int:
        requests = (Scheduled(id, start, len(tokens), start, tokens, ((0, 1),), True, start > 0),)
        return worker.step(Step(requests, StepView(1, (), (), ended), True), ConnectorMetadata()).tokens[id]

    token("a", 0, (9, 9, 9))
    first = token("a", 0, (1, 2, 3), "a")
    assert (first, token("a", 3, (first,))) == ((other := token("b", 0, (1, 2, 3))), token("b", 3, (other,)))


def test_close_shuts_the_connector_down(worker: Worker) -> None:
    worker.close()
    assert CALLS[-1] == ("shutdown",)
