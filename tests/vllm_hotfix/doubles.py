"""Small classes with vLLM's method names: one set that has the faults, and ways to have fewer or others."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvconn.vllm.hotfix import Targets


@dataclass
class Results:
    finished_sending: set[str] = field(default_factory=set)
    finished_recving: set[str] = field(default_factory=set)


@dataclass
class Output:
    finished_sending: set[str] | None = None
    finished_recving: set[str] | None = None
    expected_finished_count: int = 0


class Metadata:
    def __init__(self) -> None:
        self.reqs_to_send: dict[str, float] = {}
        self.reqs_in_batch: set[str] = set()


class PullWorker:
    def start_load_kv(self, metadata: Metadata) -> None:
        if self.pcp_rank > 0 and not self.pcp_dcp_sharded:  # type: ignore[attr-defined]
            self._replicated_pcp_done_sending.update(metadata.reqs_to_send)  # type: ignore[attr-defined]

    def get_transfer_results(self) -> Results:
        held: set[str] = self._replicated_pcp_done_sending  # type: ignore[attr-defined]
        done = set(held)
        held.clear()
        return Results(done)


class PushWorker(PullWorker):
    """Records nothing."""

    def start_load_kv(self, metadata: Metadata) -> None:
        pass


class Connector:
    """Drops what a replicated rank reports."""

    connector_worker: Any
    kv_transfer_config: Any

    def get_finished_count(self) -> int | None:
        return None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Results:
        results: Results = self.connector_worker.get_transfer_results()
        if self.connector_worker.pcp_rank > 0 and not self.connector_worker.pcp_dcp_sharded:
            results.finished_sending.clear()
        return results


class Aggregator:
    """Counts reports."""

    def __init__(self, expected_finished_count: int) -> None:
        self.expected = expected_finished_count
        self.left: dict[tuple[str, str], int] = {}

    def aggregate(self, outputs: list[Any], output_rank: int = 0) -> Any:
        if not outputs[output_rank]:
            return None
        done: dict[str, set[str]] = {"finished_sending": set(), "finished_recving": set()}
        for output in outputs:
            for name, ids in done.items():
                ids |= {id for id in getattr(output.kv_connector_output, name) or () if self._counted(name, id)}
        outputs[output_rank].kv_connector_output = Output(
            done["finished_sending"] or None, done["finished_recving"] or None
        )
        return outputs[output_rank]

    def _counted(self, name: str, id: str) -> bool:
        left = self.left.pop((name, id), self.expected) - 1
        if left:
            self.left[name, id] = left
        return not left


def faulty(**changed: Any) -> Targets:
    """Fresh classes with all three faults, so that a test may patch them; ``changed`` replaces some."""
    connector = _copy(Connector)
    given: dict[str, Any] = {
        "version": "0.32.0",
        "pull_connector": type("PullConnector", (connector,), {}),
        "pull_worker": _copy(PullWorker),
        "push_connector": type("PushConnector", (connector,), {}),
        "push_worker": _copy(PushWorker),
        "nixl_metadata": Metadata,
        "aggregator": _copy(Aggregator),
        "output": Output,
    }
    return Targets(**{**given, **changed})


def _copy(cls: type) -> type:
    body = {name: value for name, value in vars(cls).items() if name not in ("__dict__", "__weakref__")}
    return type(cls.__name__, cls.__bases__, body)


def methods(targets: Targets) -> dict[str, Any]:
    """Every method a repair may touch, to see whether it did."""
    return {
        "pull": targets.pull_connector.get_transfer_results,  # type: ignore[attr-defined]
        "push": targets.push_connector.get_transfer_results,  # type: ignore[attr-defined]
        "record": targets.push_worker.start_load_kv,  # type: ignore[attr-defined]
        "aggregate": targets.aggregator.aggregate,  # type: ignore[attr-defined]
    }
