"""A load is started where vLLM starts it: a synchronous one before the forward that reads it, others after it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from kvconn.base import (
    ConnectorMetadata,
    ConnectorRole,
    KVBlocks,
    KVCacheView,
    KVConnector,
    LayerView,
    RequestView,
    StepView,
    TransferResults,
)
from kvconn.config import ConnectorConfig, parse_kv_transfer_config
from kvconn.engine.config import EngineConfig, ModelSpec, kv_cache_view
from kvconn.engine.request import EngineRequest, Finished
from kvconn.engine.scheduler import Scheduler, Step
from kvconn.engine.worker import Worker, connector_config
from tests.engine.driving import unique_tokens

pytestmark = pytest.mark.usefixtures("one_thread")

CONFIG = EngineConfig(
    name="W", model=ModelSpec(mode="content-addressed", n_layers=2), num_blocks=16, block_size=4
)  # fmt: skip
PROMPT = unique_tokens("w", 11)


@dataclass(frozen=True)
class Blocks(ConnectorMetadata):
    """Blocks to fill in this step."""

    ids: tuple[int, ...] = ()


class Shelf(KVConnector):
    """Brings what ``shelf`` has of a prompt's first blocks, synchronously or not, and writes down its calls."""

    #: layer name -> the bytes of the prompt's blocks, in order
    shelf: ClassVar[dict[str, list[bytes]]] = {}
    asynchronous: ClassVar[bool] = False

    def __init__(self, config: ConnectorConfig, role: ConnectorRole, kv_cache: KVCacheView) -> None:
        self.role = role
        self.calls: list[str] = []
        self.layers: dict[str, LayerView] = {}
        self._wanted: tuple[int, ...] = ()
        self._loaded: set[str] = set()

    def get_num_new_matched_tokens(self, request: RequestView, num_computed_tokens: int) -> tuple[int, bool]:
        n = 4 * len(next(iter(self.shelf.values()), ()))
        return (n if num_computed_tokens == 0 else 0), self.asynchronous

    def update_state_after_alloc(self, request: RequestView, blocks: KVBlocks, num_external_tokens: int) -> None:
        if num_external_tokens:
            self._wanted = blocks.ids[0][: num_external_tokens // 4]

    def build_connector_meta(self, step: StepView) -> Blocks:
        wanted, self._wanted = self._wanted, ()
        return Blocks(wanted)

    def register_kv_caches(self, layers: Mapping[str, LayerView]) -> None:
        self.layers = dict(layers)

    def handle_preemptions(self, metadata: ConnectorMetadata) -> None:
        assert self._metadata is None
        self.calls.append("preemptions")

    def bind_connector_metadata(self, metadata: ConnectorMetadata) -> None:
        super().bind_connector_metadata(metadata)
        self.calls.append("bind")

    def start_load_kv(self, context: object = None, **kwargs: object) -> None:
        self.calls.append("load")
        assert isinstance(self._metadata, Blocks)
        for index, block in enumerate(self._metadata.ids):
            self._loaded.add("w")
            for name, layer in self.layers.items():
                ctypes.memmove(layer.address + block * layer.stride, self.shelf[name][index], layer.length)

    def wait_for_layer_load(self, layer_name: str) -> None:
        self.calls.append(f"before {layer_name}")

    def save_kv_layer(self, layer_name: str, **kwargs: object) -> None:
        self.calls.append(f"after {layer_name}")

    def wait_for_save(self) -> None:
        self.calls.append("save")

    def get_transfer_results(self, finished_req_ids: set[str]) -> TransferResults:
        assert self._metadata is not None
        self.calls.append(f"poll {sorted(finished_req_ids)}")
        loaded, self._loaded = self._loaded, set()
        return TransferResults(finished_recving=frozenset(loaded if self.asynchronous else ()))

    def get_kv_connector_stats(self) -> None:
        self.calls.append("stats")

    def build_connector_worker_meta(self) -> None:
        self.calls.append("meta")

    def clear_connector_metadata(self) -> None:
        super().clear_connector_metadata()
        self.calls.append("clear")


class Engine:
    """One worker and one scheduler, in this process; closed when its test ends."""

    made: ClassVar[list[Engine]] = []

    def __init__(self) -> None:
        self.made.append(self)
        raw: dict[str, Any] = {
            "kv_connector": "Shelf",
            "kv_role": "kv_both",
            "kv_connector_module_path": "tests.engine.test_load_order",
        }
        transfer = parse_kv_transfer_config(raw)
        self.worker = Worker(CONFIG, transfer, "engine", 0)
        half = self.worker._connector
        assert isinstance(half, Shelf)
        self.half = half
        self.connector = Shelf(
            connector_config(CONFIG, transfer, "engine", None), ConnectorRole.SCHEDULER, kv_cache_view(CONFIG)
        )
        self.scheduler = Scheduler(CONFIG, self.connector, lambda direction, id, now: None, "fail")
        self.tokens: tuple[int, ...] | None = None
        self.table: list[int] = []

    def step(self) -> tuple[Step, list[str]]:
        """One step and the calls that the worker half got in it."""
        step = self.scheduler.schedule(0.0)
        self.half.calls.clear()
        output = self.worker.step(step, self.connector.build_connector_meta(step.view))
        for event in self.scheduler.update(step, output.tokens, output.kv_connector_output, 0.0):
            if isinstance(event, Finished):
                self.tokens = event.tokens
        self.table = next((list(s.blocks) for s in step.requests), self.table)
        return step, list(self.half.calls)

    def generate(self) -> list[list[str]]:
        """The prompt's tokens, and the calls of every step."""
        self.scheduler.add(EngineRequest("w", PROMPT, 3), 0.0)
        calls: list[list[str]] = []
        for _ in range(20):
            if not self.scheduler.has_work():
                return calls
            calls.append(self.step()[1])
        raise AssertionError("not done in 20 steps")

    def read(self, block: int) -> dict[str, bytes]:
        return {n: ctypes.string_at(v.address + block * v.stride, v.length) for n, v in self.half.layers.items()}


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    while Engine.made:
        Engine.made.pop().worker.close()


BEGIN = ["preemptions", "bind"]
FORWARD = ["before layers.0.kv", "after layers.0.kv", "before layers.1.kv", "after layers.1.kv"]


def ending(finished: list[str]) -> list[str]:
    return ["save", f"poll {finished}", "stats", "meta", "clear"]


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> tuple[int, ...]:
    """Fills the shelf with the first two blocks of the prompt's KV. Returns the tokens it leads to."""
    monkeypatch.setattr(Shelf, "shelf", {})
    plain = Engine()
    plain.generate()
    assert plain.tokens is not None and len(plain.tokens) == 3
    first, second = (plain.read(block) for block in plain.table[:2])
    monkeypatch.setattr(Shelf, "shelf", {name: [first[name], second[name]] for name in first})
    return plain.tokens


def test_a_synchronous_load_is_there_before_the_forward_that_reads_it(computed: tuple[int, ...]) -> None:
    engine = Engine()
    first, *decodes, _ = engine.generate()
    assert engine.tokens == computed
    assert first == [*BEGIN, "load", *FORWARD, *ending([])]
    assert decodes == [[*BEGIN, *FORWARD, "load", *ending([])]] * 2, "only the step that loads is turned round"
    assert engine.scheduler.external_tokens == 8


def test_an_asynchronous_load_starts_after_the_forward_and_is_read_by_a_later_one(
    computed: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Shelf, "asynchronous", True)
    engine = Engine()
    parked, first, *_ = engine.generate()
    assert engine.tokens == computed
    assert parked == [*BEGIN, "load", *ending([])]
    assert first == [*BEGIN, *FORWARD, "load", *ending([])]
