"""A trace through an engine whose own cache is a tenth of the working set: no block is lost, invented or miscounted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path

import pytest

from kvconn.engine.blocks import block_hashes
from kvconn.engine.trace import TraceRequest, read_trace, to_requests
from tests.offload.local import MODEL, SIZE, LocalEngine, expected_tokens, offload
from tests.offload.textbook import PlainArc, PlainLru, simulate

REAL = Path(__file__).parents[3] / "shared" / "traces" / "conversation_trace.jsonl"
ROWS = 150


class Trace:
    """Requests, what they must answer, and sizes in blocks."""

    def __init__(self, path: Path) -> None:
        rows = read_trace(path)[:ROWS]
        self.requests = to_requests(rows, scale=32, block_size=SIZE, vocab_size=MODEL.vocab_size)
        self.expected = expected_tokens(self.requests)
        self.hashes = {one.id: block_hashes(one.prompt, SIZE) for one in self.requests}
        self.working_set = len({key for keys in self.hashes.values() for key in keys})
        longest = max(len(one.prompt) + one.output_length for one in self.requests)
        self.pool = max(self.working_set // 10, -(-longest // SIZE))

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


@pytest.mark.parametrize(("policy", "plain"), [("lru", PlainLru), ("arc", PlainArc)])
def test_one_at_a_time_hits_are_those_of_a_plain_simulation(
    trace: Trace, policy: str, plain: type[PlainLru | PlainArc]
) -> None:
    slots = trace.working_set // 2
    engine = LocalEngine(offload(slots, eviction_policy=policy), num_blocks=trace.pool)
    requests = [*trace.requests, *trace.again()]
    try:
        engine.run(requests)
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
    assert engine.count("offload_hit_blocks_host") == sum(found.values()) > 0
    assert engine.count("offload_tokens_loaded") == engine.scheduler.external_tokens


def test_after_a_restart_the_files_hit(trace: Trace, tmp_path: Path) -> None:
    roomy = {"saves_max": trace.working_set}
    first = LocalEngine(offload(trace.working_set + 8, root=tmp_path, kvconn=roomy), num_blocks=trace.pool)
    try:
        first.run(trace.requests)
    finally:
        first.close()
    assert first.count("offload_blocks_saved") == first.count("offload_blocks_stored") == trace.working_set
    patient = {"lookup": 60.0}  # the disk of a busy machine must not decide this test
    second = LocalEngine(offload(trace.working_set + 8, root=tmp_path, kvconn=patient), num_blocks=trace.pool)
    try:
        second.run(trace.requests)
    finally:
        second.close()
    assert trace.right(second, trace.requests)
    assert second.count("offload_blocks_stored") == trace.working_set - second.count("offload_blocks_fetched")
    wanted = {key for one in trace.requests for key in trace.hashes[one.id][: (len(one.prompt) - 1) // SIZE]}
    assert second.count("offload_hit_blocks_secondary") == second.count("offload_blocks_fetched") == len(wanted)


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
    saved, unsaved = engine.count("offload_blocks_saved"), engine.count("offload_saves_skipped")
    assert saved + unsaved + engine.count("offload_saves_failed") == stored
