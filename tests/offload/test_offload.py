"""OffloadingConnector with hold: real memory, real threads, the real aggregator."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from kvconn.base import FinishReason, RequestView, StepView
from kvconn.errors import ConfigError
from kvconn.metrics import Stats
from kvconn.offload import worker as offload_worker
from kvconn.offload.connector import OffloadingConnector
from kvconn.offload.tiers.host import HostTier
from tests.support import BLOCK_SIZE, LAYERS, ROW, Side, multi, offload_hold, pattern, wait_until

BLOCK_BYTES = len(LAYERS) * BLOCK_SIZE * ROW


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def sides() -> Iterator[list[Side]]:
    made: list[Side] = []
    yield made
    for side in made:
        side.close()


def make(sides: list[Side], *, blocks: int = 16, pcp: int = 1, **kwargs: Any) -> Side:
    sides.append(Side("p", offload_hold(blocks * BLOCK_BYTES), pcp=pcp, **kwargs))
    return sides[-1]


def tier(side: Side, rank: int = 0) -> HostTier:
    worker = side.workers[rank]
    assert isinstance(worker, OffloadingConnector) and worker.worker.tier is not None
    return worker.worker.tier


def until_sent(side: Side, *ids: str) -> Stats:
    total = Stats()

    def all_sent() -> bool:
        nonlocal total
        stats = side.step().kv_connector_stats
        total = total.aggregate(stats) if stats is not None else total
        return set(ids) <= set(side.sent)

    wait_until(all_sent, what=f"release of {ids}")
    return total


def stored(seed: int, block: int) -> bytes:
    """What the tier should hold of block ``block`` of a prompt: all layers, in wire order."""
    return b"".join(pattern(seed, layer, block + 1)[block].tobytes() for layer in range(len(LAYERS)))


@pytest.mark.parametrize("poll", ["get_finished", "get_transfer_results"])
def test_full_blocks_are_stored_and_the_request_is_released_once(sides: list[Side], poll: str) -> None:
    side = make(sides, poll=poll)
    assert side.prefill("a", [7, 3, 5], seed=1) is None
    assert side.scheduler.explain(0.0)
    stats = until_sent(side, "a")
    side.step()
    assert side.sent == ["a"]
    assert [tier(side).read(f"1:{block}".encode()) for block in range(3)] == [stored(1, block) for block in range(3)]
    assert stats == Stats({"offload_blocks_stored": 3, "offload_bytes_stored": 3 * BLOCK_BYTES})
    assert side.scheduler.explain(0.0) == []


def test_the_last_sampled_token_has_no_kv(sides: list[Side]) -> None:
    """n_total counts it: 32 tokens have KV of 31, which is one full block of 16."""
    side = make(sides)
    view = RequestView("a", 31, 32, None, block_hashes=lambda: [b"x", b"y"])
    assert side.scheduler.request_finished(view, ((1, 2),), FinishReason.LENGTH) == (True, None)
    until_sent(side, "a")
    assert tier(side).touch(b"x") and not tier(side).touch(b"y")


@pytest.mark.parametrize("reason", [FinishReason.ABORT, FinishReason.ERROR])
def test_after_an_abort_nothing_is_stored_but_the_hold_is_reported(sides: list[Side], reason: FinishReason) -> None:
    side = make(sides)
    view = RequestView("a", 32, 33, None, block_hashes=lambda: [b"x", b"y"])
    assert side.scheduler.request_finished(view, ((1, 2),), reason) == (True, None)
    side.step()
    assert side.sent == ["a"] and len(tier(side)) == 0


def test_known_blocks_are_not_copied_again(sides: list[Side]) -> None:
    side = make(sides)
    side.prefill("a", [1, 2], seed=1)
    until_sent(side, "a")
    side.prefill("b", [3, 4, 5], seed=1)
    stats = until_sent(side, "b")
    assert stats.values["offload_blocks_deduplicated"] == 2 and stats.values["offload_blocks_stored"] == 1
    side.prefill("c", [6, 7], seed=1)
    side.step()
    assert "c" in side.sent, "nothing to copy: reported at the poll of the announcing step"


@pytest.mark.parametrize("pcp", [2, 8])
def test_only_the_canonical_replica_stores_and_the_others_report_at_once(sides: list[Side], pcp: int) -> None:
    side = make(sides, pcp=pcp)
    assert [worker.worker.tier is not None for worker in side.workers] == [True] + [False] * (pcp - 1)  # type: ignore[attr-defined]
    side.prefill("a", [1, 2], seed=1)
    side.step()
    assert [result[0] for result in side.rank_results[1:]] == [{"a"}] * (pcp - 1)
    until_sent(side, "a")
    assert side.sent == ["a"] and len(tier(side)) == 2


def test_repeated_metadata_changes_nothing(sides: list[Side]) -> None:
    side = make(sides, pcp=2)
    side.prefill("a", [1], seed=1)
    meta = side.scheduler.build_connector_meta(StepView(1))
    reported: list[list[str]] = [[], []]
    for _ in range(50):
        side.finish_step([side.rank_step(rank, meta) for rank in range(2)])
        for rank, result in enumerate(side.rank_results):
            reported[rank] += result[0]
        time.sleep(0.001)
    assert reported == [["a"], ["a"]] and side.sent == ["a"]


def test_a_small_tier_evicts_and_stores_on(sides: list[Side]) -> None:
    side = make(sides, blocks=2)
    for seed in range(4):
        side.prefill(str(seed), [seed, seed + 4], seed=seed)
        until_sent(side, str(seed))
    assert tier(side).read(b"3:0") == stored(3, 0) and tier(side).evicted == 6


class SlowCopies:
    """Holds copying threads inside a block until let go."""

    def __init__(self, mocker: Any) -> None:
        self.inside = threading.Event()
        self.go = threading.Event()
        real = offload_worker.ctypes.memmove

        def memmove(*args: Any) -> None:
            self.inside.set()
            assert self.go.wait(20)
            real(*args)

        mocker.patch.object(offload_worker, "ctypes", mocker.Mock(memmove=memmove))


def test_at_the_deadline_nothing_is_reported_while_a_copy_runs(sides: list[Side], mocker: Any) -> None:
    slow, clock = SlowCopies(mocker), Clock()
    side = make(sides, clock=clock)
    for index in range(3):  # two threads: the third request's copy waits
        side.prefill(str(index), [index, index + 3], seed=index)
    side.step()
    assert slow.inside.wait(20)
    clock.now = 59.9
    side.step()
    assert side.sent == []
    clock.now = 60.0
    side.step()
    assert side.sent == ["2"], "never started: skipped"
    clock.now = 1000.0
    side.step()
    assert side.sent == ["2"]
    slow.go.set()
    stats = until_sent(side, "0", "1")
    assert stats.values["offload_blocks_stored"] == 2, "each stopped after the block it was at"
    assert stats.values["offload_blocks_skipped"] == 2
    assert tier(side).read(b"0:0") == stored(0, 0) and tier(side).read(b"0:1") is None


def test_blocks_beyond_the_queue_are_skipped(sides: list[Side], mocker: Any) -> None:
    mocker.patch.object(offload_worker, "MAX_WAITING", 2)
    side = make(sides)
    side.prefill("a", [1, 2, 3], seed=1)
    stats = until_sent(side, "a")
    assert (stats.values["offload_blocks_stored"], stats.values["offload_blocks_skipped"]) == (2, 1)


def test_a_copy_that_raises_is_skipped_and_answered(sides: list[Side], mocker: Any) -> None:
    mocker.patch.object(offload_worker, "ctypes", mocker.Mock(memmove=mocker.Mock(side_effect=OSError)))
    side = make(sides)
    side.prefill("a", [1, 2], seed=1)
    stats = until_sent(side, "a")
    assert stats.values == {"offload_blocks_skipped": 2} and len(tier(side)) == 0


def test_shutdown_joins_copying_threads(sides: list[Side], mocker: Any) -> None:
    slow = SlowCopies(mocker)
    side = make(sides)
    side.prefill("a", [1, 2, 3], seed=1)
    side.step()
    assert slow.inside.wait(20)
    threading.Timer(0.05, slow.go.set).start()
    side.workers[0].shutdown()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kvconn-offload")]
    side.workers[0].shutdown()


def test_as_a_child_it_holds_until_stored(sides: list[Side]) -> None:
    side = Side("p", multi(offload_hold(16 * BLOCK_BYTES), role="kv_both"), pcp=8)
    sides.append(side)
    for index in range(4):
        side.prefill(str(index), [index, index + 4], seed=index)
    until_sent(side, "0", "1", "2", "3")
    assert sorted(side.sent) == ["0", "1", "2", "3"]


def test_what_this_version_cannot_do_is_said_at_once() -> None:
    transfer = msgspec.json.decode(msgspec.json.encode(offload_hold(0)))
    transfer["kv_role"] = "kv_producer"
    transfer["kv_connector_extra_config"]["kvconn"]["hold"] = False
    with pytest.raises(ConfigError) as caught:
        Side("p", transfer)
    assert [problem.split(":")[0] for problem in caught.value.problems] == [
        "kv_transfer_config.kv_role",
        "kv_transfer_config.kv_connector_extra_config.kvconn.hold",
        "kv_transfer_config.kv_connector_extra_config.cpu_bytes_to_use",
    ]


def test_memory_smaller_than_a_block_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="cpu_bytes_to_use: expected at least one block of 2048 bytes"):
        Side("p", offload_hold(2047))


def test_repr_is_one_readable_line(sides: list[Side]) -> None:
    side = make(sides, pcp=2)
    assert [repr(half) for half in (side.scheduler, *side.workers)] == [
        "OffloadingConnector(OffloadScheduler(CompletionLedger(send=0 recv=0 absorbed=0) unannounced=0))",
        (
            "OffloadingConnector(OffloadWorker(RankRole(0/2 serves+reads) StoreJobs(waiting=0 running=0) "
            "HostTier(slots=16 stored=0 writing=0 evicted=0)))"
        ),
        "OffloadingConnector(OffloadWorker(RankRole(1/2 replicates+reads) StoreJobs(waiting=0 running=0) None))",
    ]
