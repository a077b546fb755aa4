"""Below vLLM's own scheduler and aggregator, with 2 and 8 PCP ranks: each request is freed once, when it was read."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.vllm.engines import PRODUCER, free_port, ours
from tests.vllm.prompts import prompt

if find_spec("vllm") is not None:
    from vllm.v1.outputs import KVConnectorOutput

    from tests.vllm.halves import BLOCK, Halves
elif TYPE_CHECKING:
    from tests.vllm.halves import BLOCK, Halves

SIBLING = {
    "kv_connector": "HoldingSibling",
    "kv_connector_module_path": "tests.vllm.siblings",
    "kv_role": "kv_producer",
}
Build = Callable[..., "Halves"]


def multi(module: str | None) -> dict[str, Any]:
    children = {"connectors": [ours("kv_producer"), SIBLING]}
    config = {"kv_connector": "MultiConnector", "kv_role": "kv_producer", "kv_connector_extra_config": children}
    return config if module is None else {**config, "kv_connector_module_path": module}


COMPOSITIONS = {"alone": ours("kv_producer"), "stock Multi": multi(None), "our Multi": multi("kvconn.vllm")}


@pytest.fixture
def build(models: Callable[[str], Path]) -> Iterator[Build]:
    made: list[Halves] = []

    def build(transfer: dict[str, Any], **more: Any) -> Halves:
        made.append(Halves(models("mla"), transfer, free_port(), **more))
        return made[-1]

    yield build
    for one in made:
        one.close()


class Unruly:
    """Repeats rank 0's answer one and three steps later, and holds the last rank's back for some steps."""

    def __init__(self, ranks: int, late: int = 4) -> None:
        self._last = ranks - 1
        self._late = late
        self._queue: dict[tuple[int, int], list[Any]] = {}
        self.repeated = 0

    def __call__(self, step: int, rank: int, output: KVConnectorOutput) -> KVConnectorOutput:
        said = (output.finished_sending, output.kv_connector_worker_meta)
        if said[0] or said[1] is not None:
            if rank == 0:
                self._queue.setdefault((step + 1, 0), []).append(said)
                self._queue.setdefault((step + 3, 0), []).append(said)
            elif rank == self._last:
                output.finished_sending, output.kv_connector_worker_meta = set(), None
                self._queue.setdefault((step + self._late, rank), []).append(said)
        for sent, meta in self._queue.pop((step, rank), ()):
            output.finished_sending = set(output.finished_sending or ()) | set(sent or ())
            if meta is not None:
                mine = output.kv_connector_worker_meta
                output.kv_connector_worker_meta = meta if mine is None else mine.aggregate(meta)
            self.repeated += bool(sent)
        return output


def run(engine: Halves, until: Callable[[], bool], beside: Halves | None = None, timeout: float = 30) -> None:
    """Step until it is so; the condition is looked at after every step."""
    deadline = time.monotonic() + timeout
    while not until():
        assert time.monotonic() < deadline, (engine.held, engine.scheduler.connector)
        engine.step()
        if beside is not None:
            beside.step()


@pytest.mark.parametrize("unruly", [False, True], ids=["orderly", "duplicates and late reports"])
@pytest.mark.parametrize("in_flight", [1, 2], ids=["one step", "two steps in flight"])
@pytest.mark.parametrize("pcp", [2, 8])
@pytest.mark.parametrize("name", COMPOSITIONS)
def test_each_request_is_freed_once_when_it_was_read(
    name: str, pcp: int, in_flight: int, unruly: bool, build: Build
) -> None:
    if unruly and name == "stock Multi":
        pytest.skip("stock MultiConnector counts a repeated report below us, where nobody can know better")
    tamper = Unruly(pcp) if unruly else None
    p = build(COMPOSITIONS[name], pcp=pcp, in_flight=in_flight, tamper=tamper)
    d = build(ours("kv_consumer"))
    at_first = p.free
    for k in range(3):
        tokens = prompt(5 * BLOCK + 3, 8000 + k)
        p.add(f"p{k}", tokens, dict(PRODUCER))
        run(p, lambda k=k: f"p{k}" in p.finished)
        params = p.finished[f"p{k}"].kv_transfer_params
        for _ in range(12):  # every rank but the one that is read has had its say by now, the sibling too
            p.step()
        assert p.held == {f"p{k}"} and p.free < at_first
        there = [p.rows(block) for block in params["remote_block_ids"][0][:5]]
        d.add(f"d{k}", tokens, params)
        run(d, lambda k=k: f"d{k}" in d.finished, beside=p)
        assert there == [[t * 10 + i for i in (0, 1) for t in tokens[b * BLOCK : (b + 1) * BLOCK]] for b in range(5)]
        run(p, lambda: not p.held, beside=d)
        assert p.free == at_first
    assert sorted(p.emitted) == ["p0", "p1", "p2"]
    for _ in range(8):  # what is still repeated changes nothing
        p.step()
    assert sorted(p.emitted) == ["p0", "p1", "p2"]
    assert not unruly or (isinstance(tamper, Unruly) and tamper.repeated)


def test_an_abort_before_the_end_holds_nothing(build: Build) -> None:
    from vllm.v1.request import RequestStatus

    p = build(ours("kv_producer"), pcp=2)
    at_first = p.free
    p.add("gone", prompt(5 * BLOCK, 8100), dict(PRODUCER), max_tokens=9)
    p.step()
    p.scheduler.finish_requests("gone", RequestStatus.FINISHED_ABORTED)
    p.step()
    assert not p.held and p.free == at_first
