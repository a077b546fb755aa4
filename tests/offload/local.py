"""A whole engine in this process, one rank, and plain yardsticks: for tests that must see inside or inject faults."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, cast

from kvconn.aggregator import KVOutputAggregator
from kvconn.base import ConnectorRole, Direction, RequestView
from kvconn.config import parse_kv_transfer_config
from kvconn.engine.config import EngineConfig, ModelSpec, kv_cache_view
from kvconn.engine.request import EngineRequest, Finished
from kvconn.engine.scheduler import Scheduler
from kvconn.engine.trace import TraceRequest
from kvconn.engine.worker import Worker, connector_config
from kvconn.factory import get_connector_class
from kvconn.metrics import Stats
from kvconn.offload.connector import OffloadingConnector
from kvconn.offload.events import BlockRemoved, BlockStored
from kvconn.offload.tiers.segments import key_of, read_entries

MODEL = ModelSpec(mode="content-addressed", n_layers=2, latent=6, rope=2)
SIZE = 16
#: as the engine's loop pauses
EMPTY_STEP_PAUSE = 1e-3
BLOCK_BYTES = SIZE * MODEL.row * 8 * MODEL.n_layers


def offload(
    blocks: int = 64, *, root: Path | None = None, max_bytes: int = 1 << 30, policy: str = "recompute", **extra: Any
) -> dict[str, Any]:
    """A kv_transfer_config with room for ``blocks`` blocks in host memory, and a file tier in ``root``."""
    kvconn = extra.pop("kvconn", {})
    settings: dict[str, Any] = {"cpu_bytes_to_use": blocks * BLOCK_BYTES, "kvconn": kvconn, **extra}
    if root is not None:
        settings["spec_name"] = "TieringOffloadingSpec"
        settings["secondary_tiers"] = [{"type": "fs", "root_dir": str(root), "max_bytes": max_bytes}]
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": settings,
    }


class LocalEngine:
    """Scheduler, both halves of a connector and a worker, stepped by hand."""

    def __init__(self, transfer: dict[str, Any] | None, *, num_blocks: int = 32, **sizes: Any) -> None:
        self.config = EngineConfig(
            name="L", kv_transfer_config=transfer, num_blocks=num_blocks, block_size=SIZE, model=MODEL, **sizes
        )
        parsed = parse_kv_transfer_config(transfer) if transfer is not None else None
        self.worker = Worker(self.config, parsed, "engine", 0)
        self.connector: OffloadingConnector | None = None
        if parsed is not None:
            cls: Any = get_connector_class(parsed)
            half = cls(
                connector_config(self.config, parsed, "engine", None),
                ConnectorRole.SCHEDULER,
                kv_cache_view(self.config),
            )
            self.connector = cast(OffloadingConnector, half)
            half.get_num_new_matched_tokens = self._matched(half.get_num_new_matched_tokens)
        policy = parsed.kv_load_failure_policy if parsed is not None else "fail"
        self.aggregator = KVOutputAggregator(1)
        self.scheduler = Scheduler(self.config, self.connector, self._expect, policy)
        #: (local tokens, offered tokens) of every admission's last question
        self.matches: dict[str, tuple[int, int]] = {}
        self.tokens: dict[str, tuple[int, ...]] = {}
        self.errors: dict[str, str | None] = {}
        self.events: list[BlockStored | BlockRemoved] = []
        self.totals = Stats()

    def _expect(self, direction: Direction, id: str, now: float) -> None:
        self.aggregator.expect(direction, id, now)

    def _matched(self, real: Any) -> Any:
        def match(request: RequestView, local: int) -> tuple[int | None, bool]:
            answer: tuple[int | None, bool] = real(request, local)
            if answer[0] is not None:
                self.matches[request.id] = (local, answer[0])
            return answer

        return match

    @property
    def worker_half(self) -> OffloadingConnector:
        half = self.worker._connector
        assert isinstance(half, OffloadingConnector)
        return half

    def add(self, request: TraceRequest | EngineRequest) -> None:
        if isinstance(request, TraceRequest):
            request = EngineRequest(request.id, request.prompt, request.output_length)
        self.scheduler.add(request, time.perf_counter())

    def step(self) -> bool:
        """As :class:`kvconn.engine.core.EngineCore` does. True when tokens were computed."""
        step = self.scheduler.schedule(time.perf_counter())
        metadata = self.connector.build_connector_meta(step.view) if self.connector is not None else None
        output = self.worker.step(step, metadata)
        joined = self.aggregator.aggregate([output])
        part = joined.kv_connector_output if self.connector is not None else None
        for event in self.scheduler.update(step, joined.tokens, part, time.perf_counter()):
            if isinstance(event, Finished):
                self.tokens[event.id] = event.tokens
                self.errors[event.id] = event.error
        if self.connector is not None and part is not None:
            self.events += self.connector.take_events()
            for stats in (part.kv_connector_stats, self.connector.get_kv_connector_stats()):
                self.totals = self.totals if stats is None else self.totals.aggregate(stats)
        return bool(step.requests)

    def run(self, requests: Iterable[TraceRequest], *, concurrency: int = 1, seconds: float = 100.0) -> None:
        """All of them, ``concurrency`` in flight; then until nothing is under way."""
        todo, deadline = list(reversed(list(requests))), time.monotonic() + seconds
        while todo or self.scheduler.has_work():
            while todo and len(self.scheduler.requests) < concurrency:
                self.add(todo.pop())
            if not self.step():
                time.sleep(EMPTY_STEP_PAUSE)  # or copying threads would fight this one for the interpreter
            assert time.monotonic() < deadline, f"{self.scheduler!r} {self.connector!r}"

    def count(self, name: str) -> int:
        return int(self.totals.values.get(name, 0))

    def close(self) -> None:
        self.worker.close()
        if self.connector is not None:
            self.connector.shutdown()


def keys_in(root: Path) -> set[bytes]:
    """Keys of all blocks in the files below a file tier's ``root_dir``."""
    keys = set()
    for path in root.rglob("*.kv"):
        with path.open("rb") as file:
            namespace, share = path.relative_to(root).parts[:2]
            places = read_entries(file.fileno(), key_of(namespace, share))
        assert places is not None, f"{path} is torn"
        keys.update(place.key for place in places)
    return keys


def expected_tokens(requests: Sequence[TraceRequest]) -> dict[str, tuple[int, ...]]:
    """What an engine without a connector and with room for everything says."""
    longest = max(len(one.prompt) + one.output_length for one in requests)
    engine = LocalEngine(None, num_blocks=-(-longest // SIZE) + 1)
    try:
        engine.run(requests)
    finally:
        engine.close()
    return engine.tokens
