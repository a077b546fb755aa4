"""A trace through an engine whose own cache is a tenth of the working set: no block is lost, invented or miscounted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from kvconn.engine.blocks import block_hashes
from kvconn.engine.client import EngineProcess, EngineRequest
from kvconn.engine.trace import TraceRequest, read_trace, to_requests
from kvconn.offload.metadata import OffloadStep
from tests.engine.pairs import SECONDS, Starter, ends, starting
from tests.offload.local import MODEL, SIZE, LocalEngine, expected_tokens, offload
from tests.offload.textbook import PlainArc, PlainLru, simulate
from tests.support import wait_until

REAL = Path(__file__).parents[3] / "shared" / "traces" / "conversation_trace.jsonl"
ROWS = 150
RESTARTED = 50


class Trace:
    """Requests, what they must answer, and sizes in blocks."""

    def __init__(self, path: Path) -> None:
        rows = read_trace(path)[:ROWS]
        self.requests = to_requests(rows, scale=32, block_size=SIZE, vocab_size=MODEL.vocab_size)
        self.expected = expected_tokens(self.requests)
        self.hashes = {one.id: block_hashes(one.prompt, SIZE) for one in self.requests}
        self.working_set = len({key for keys in self.hashes.values() for key in keys})
        longest = max(len(one.prompt) + one.output_length for one in self.requests)
        #: blocks of the smallest pool that runs every request, and of one that is a tenth of the working set
        self.smallest = -(-longest // SIZE)
        self.pool = max(self.working_set // 10, self.smallest)

    def again(self) -> list[TraceRequest]:
        """The same requests under other ids."""
        return [TraceRequest(f"{one.id} again", one.prompt, one.output_length) for one in self.requests]

    def right(self, engine: LocalEngine, requests: Sequence[TraceRequest]) -> bool:
        return all(engine.tokens[one.id] == self.expected[one.id.removesuffix(" again")] for one in requests)


@pytest.fixture(scope="module", params=["shipped", "real"])
def trace(request: pytest.FixtureRequest) -> Iterator[Trace]:
    if request.param == "shipped":
        with resources.as_file(resources.files("kvconn.data").joinpath("trace-small.jsonl")) as path:
            yield Trace(path)
    elif REAL.exists():
        yield Trace(REAL)
    else:
        pytest.skip("the public trace is not here")


@pytest.fixture
def start() -> Iterator[Starter]:
    with starting() as starter:
        yield starter


@pytest.mark.parametrize(("share", "forgets"), [(10, True), (2, False)])
@pytest.mark.parametrize(("policy", "plain"), [("lru", PlainLru), ("arc", PlainArc)])
def test_one_at_a_time_hits_are_those_of_a_plain_simulation(
    trace: Trace, policy: str, plain: type[PlainLru | PlainArc], share: int, forgets: bool, mocker: Any
) -> None:
    """The trace twice, host memory for a share of its blocks. The engine's own pool is as small as it can be, and what
    it caches of a prompt can be forgotten before the next one, so that the tier is asked for everything.

    A step fills one block, which is stored before the next step: textbooks know no blocks that are in use.
    """
    slots = trace.working_set // share
    engine = LocalEngine(offload(slots, eviction_policy=policy), num_blocks=trace.smallest, max_num_batched_tokens=SIZE)
    requests = [*trace.requests, *trace.again()]
    stores_end_with_their_step(engine, mocker)
    try:
        for one in requests:
            engine.run([one])
            if forgets:
                engine.scheduler.tables.groups[0].pool.reset()
    finally:
        engine.close()
    assert trace.right(engine, requests)
    assert engine.count("kv_offload_stores_skipped") == 0
    asked = []
    for one in requests:
        hashes = trace.hashes[one.id.removesuffix(" again")]
        local, _ = engine.matches[one.id]
        asked.append((one.id, hashes, local // SIZE, (len(one.prompt) - 1) // SIZE))
    found = simulate(plain(slots), asked)
    assert {id: offered // SIZE for id, (_, offered) in engine.matches.items()} == found
    assert engine.count("offload_hit_blocks_host") == sum(found.values())
    assert sum(found.values()) > 0 or not forgets, "else the engine's own cache may have had all that so few slots can"
    print(f"{sum(found.values())} hits of {engine.count('offload_blocks_asked')} blocks asked for")
    assert engine.count("offload_tokens_loaded") == engine.scheduler.external_tokens


def test_after_a_restart_the_files_hit(trace: Trace, tmp_path: Path, start: Starter) -> None:
    """Two engines in processes of their own, the second one started when the first is gone."""
    requests = trace.requests[:RESTARTED]
    stored = {key for one in requests for key in trace.hashes[one.id]}
    roomy = {"saves_max": trace.working_set}
    first = start(**process(offload(trace.working_set + 8, root=tmp_path, kvconn=roomy), trace))
    assert replayed(first, requests) == {one.id: trace.expected[one.id] for one in requests}
    wait_until(lambda: counter(first, "offload_blocks_saved") == len(stored), 60, "everything is in files")
    first.shutdown()
    patient = {"lookup": 60.0}  # the disk of a busy machine must not decide this test
    second = start(**process(offload(trace.working_set + 8, root=tmp_path, kvconn=patient), trace))
    assert replayed(second, requests) == {one.id: trace.expected[one.id] for one in requests}
    assert second.drain(SECONDS)
    wanted = {key for one in requests for key in trace.hashes[one.id][: (len(one.prompt) - 1) // SIZE]}
    hits, fetched = (counter(second, f"offload_{name}") for name in ("hit_blocks_secondary", "blocks_fetched"))
    assert hits == fetched == len(wanted) > 0
    assert counter(second, "offload_blocks_stored") == len(stored) - len(wanted)


def stores_end_with_their_step(engine: LocalEngine, mocker: Any) -> None:
    worker = engine.worker_half.worker
    real = worker.start_stores

    def start_stores(now: float) -> None:
        numbers = tuple(store.n for store in worker._staged_stores)
        real(now)
        worker.flush(OffloadStep(flush=numbers))

    mocker.patch.object(worker, "start_stores", start_stores)


def process(transfer: dict[str, Any], trace: Trace) -> dict[str, Any]:
    return {"transfer": transfer, "num_blocks": trace.pool, "block_size": SIZE, "model": MODEL}


def replayed(engine: EngineProcess, requests: Sequence[TraceRequest]) -> dict[str, tuple[int, ...]]:
    """All of them, one at a time: tokens by id."""
    tokens = {}
    for one in requests:
        engine.submit(EngineRequest(one.id, one.prompt, one.output_length))
        tokens[one.id] = ends(engine, one.id)[one.id].tokens
    return tokens


def counter(engine: EngineProcess, name: str) -> int:
    return int(engine.stats().connector.get(name, 0))


def test_sixteen_at_a_time_tokens_are_equal_and_skips_are_counted(trace: Trace, tmp_path: Path) -> None:
    """Two stores at a time and few slots: most of what is computed cannot be stored."""
    crowded = {"stores_max": 2, "saves_max": 2}
    engine = LocalEngine(
        offload(trace.pool, root=tmp_path, kvconn=crowded), num_blocks=trace.pool, max_num_batched_tokens=128
    )
    requests = [*trace.requests, *trace.again()]
    try:
        engine.run(requests, concurrency=16)
    finally:
        engine.close()
    assert trace.right(engine, requests) and set(engine.errors.values()) == {None}
    stored, skipped = engine.count("offload_blocks_stored"), engine.count("kv_offload_stores_skipped")
    assert stored > 0 and skipped > 0
    print(f"{stored} blocks stored, {skipped} skipped")
    saved, unsaved = engine.count("offload_blocks_saved"), engine.count("offload_saves_skipped")
    assert saved + unsaved + engine.count("offload_saves_failed") == stored
