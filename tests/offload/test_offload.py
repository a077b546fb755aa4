"""OffloadingConnector's halves: real memory, real threads, the real aggregator, no engine."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, cast

import msgspec
import pytest

from kvconn.base import FinishReason, KVBlocks, LayerView, RequestView, StepRequest, StepView
from kvconn.config import Limits, OffloadSettings, parse_extra
from kvconn.errors import ConfigError
from kvconn.metrics import Stats
from kvconn.offload import copier as copier_module
from kvconn.offload import worker as offload_worker
from kvconn.offload.connector import OffloadingConnector
from kvconn.offload.events import BlockRemoved, BlockStored
from kvconn.offload.scheduler import OffloadScheduler
from kvconn.offload.worker import OffloadWorker
from tests.support import BLOCK_SIZE, LAYERS, ROW, Side, blocks_of, multi, offload_hold, wait_until

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


def config(blocks: int = 16, *, hold: bool = False, **extra: Any) -> dict[str, Any]:
    transfer = offload_hold(blocks * BLOCK_BYTES)
    transfer["kv_connector_extra_config"] |= {**extra, "kvconn": {"hold": hold, **extra.get("kvconn", {})}}
    return transfer


def make(sides: list[Side], *, blocks: int = 16, pcp: int = 1, clock: Any = None, poll: str = "", **extra: Any) -> Side:
    options: dict[str, Any] = {"clock": clock} if clock is not None else {}
    sides.append(Side("p", config(blocks, **extra), pcp=pcp, poll=poll or "get_transfer_results", **options))
    return sides[-1]


def scheduler(side: Side) -> OffloadScheduler:
    return cast(OffloadingConnector, side.scheduler).scheduler


def worker(side: Side, rank: int = 0) -> OffloadWorker:
    return cast(OffloadingConnector, side.workers[rank]).worker


def view_of(id: str, seed: int, blocks: int, *, extra: int = 1) -> RequestView:
    """A prompt of ``blocks`` full blocks and ``extra`` tokens, whose content is ``seed``'s."""
    n = blocks * BLOCK_SIZE + extra
    hashes = tuple(f"{seed}:{index}".encode() for index in range(n // BLOCK_SIZE))
    return RequestView(id, n, n, None, lambda: tuple(range(n)), lambda: hashes)


def in_tier(side: Side, seed: int, block: int, rank: int = 0) -> bytes | None:
    """What a rank's tier has of block ``block`` of a prompt."""
    slot, tier = scheduler(side).index.slot(f"{seed}:{block}".encode()), worker(side, rank).tier
    return None if slot is None or tier is None else bytes(tier.read_all([slot], BLOCK_BYTES))


def stored(seed: int, block: int) -> bytes:
    """What the tier should hold of it: all layers, in wire order."""
    return b"".join(blocks_of(seed, layer, block + 1)[block].tobytes() for layer in range(len(LAYERS)))


def settled(side: Side) -> None:
    """Empty steps until no job is open."""

    def quiet() -> bool:
        side.step()
        return not side.scheduler.has_pending_push_work()

    wait_until(quiet, what="jobs settle")


def until_sent(side: Side, *ids: str) -> None:
    def all_sent() -> bool:
        side.step()
        return set(ids) <= set(side.sent)

    wait_until(all_sent, what=f"release of {ids}")


def admit(side: Side, view: RequestView, blocks: list[int], *, hits: int = 0) -> int:
    """Ask, and give blocks for what was offered. Returns the offered tokens."""
    side.scheduler.on_new_request(view)
    n, asynchronous = side.scheduler.get_num_new_matched_tokens(view, hits * BLOCK_SIZE)
    assert n is not None and asynchronous == (n > 0)
    if n:
        side.aggregator.expect("recv", view.id)
    side.scheduler.update_state_after_alloc(view, KVBlocks((tuple(blocks),), (hits,)), n)
    return n


def until_received(side: Side, id: str) -> None:
    def received() -> bool:
        side.step()
        return id in side.received

    wait_until(received, what=f"receive of {id}")


# --- storing and loading ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("poll", ["get_finished", "get_transfer_results"])
def test_what_was_stored_is_loaded_into_other_blocks(sides: list[Side], poll: str) -> None:
    side = make(sides, poll=poll)
    assert side.prefill("a", [7, 3, 5], seed=1) is None
    settled(side)
    assert side.sent == [], "nobody waits for a store"
    assert [in_tier(side, 1, block) for block in range(3)] == [stored(1, block) for block in range(3)]
    assert side.stats.values["offload_blocks_stored"] == 3
    assert side.stats.values["kv_offload_store_bytes"] == 3 * BLOCK_BYTES
    assert admit(side, view_of("b", 1, 3), [20, 21, 22, 23]) == 3 * BLOCK_SIZE
    until_received(side, "b")
    assert side.holds([20, 21, 22], seed=1) and side.failed == []
    assert side.stats.values["kv_offload_load_bytes"] == 3 * BLOCK_BYTES
    assert side.stats.values["offload_hit_blocks_host"] == 3
    for _ in range(3):
        side.step()
    assert side.received == ["b"] and side.scheduler.explain(0.0) == []


def test_only_what_lies_beyond_the_engines_own_hits_is_loaded(sides: list[Side]) -> None:
    side = make(sides)
    side.prefill("a", [7, 3, 5], seed=1)
    settled(side)
    side.write([20, 21, 22], seed=9)
    assert admit(side, view_of("b", 1, 3), [20, 21, 22, 23], hits=1) == 2 * BLOCK_SIZE
    until_received(side, "b")
    assert side.holds([21, 22], seed=1, start=1) and side.holds([20], seed=9)


@pytest.mark.parametrize(("extra", "offered"), [(1, 2), (0, 1)])
def test_one_token_is_left_to_compute(sides: list[Side], extra: int, offered: int) -> None:
    side = make(sides)
    side.prefill("a", [7, 3, 5], seed=1)
    settled(side)
    n, _ = side.scheduler.get_num_new_matched_tokens(view_of("b", 1, 2, extra=extra), 0)
    assert n == offered * BLOCK_SIZE


def test_asking_again_gives_the_same_answer_and_holds_nothing(sides: list[Side]) -> None:
    side = make(sides, blocks=3)
    side.prefill("a", [7, 3, 5], seed=1)
    settled(side)
    for _ in range(5):
        assert side.scheduler.get_num_new_matched_tokens(view_of("b", 1, 3), 0) == (3 * BLOCK_SIZE, True)
    side.step()
    side.prefill("c", [8, 9, 10], seed=2)
    settled(side)
    assert side.stats.values["offload_evictions"] == 3, "the offer did not outlive its step"
    assert side.scheduler.get_num_new_matched_tokens(view_of("b", 1, 3), 0) == (0, False)


def test_one_stored_block_serves_several_requests_at_once(sides: list[Side]) -> None:
    side = make(sides)
    side.prefill("a", [1, 2], seed=1)
    settled(side)
    for index, id in enumerate("bcd"):
        assert admit(side, view_of(id, 1, 2), [10 + 3 * index + k for k in range(3)]) == 2 * BLOCK_SIZE
    for id in "bcd":
        until_received(side, id)
    assert all(side.holds([10 + 3 * index, 11 + 3 * index], seed=1) for index in range(3))


def test_blocks_evicted_between_offer_and_allocation_fail_the_load_once_and_are_not_offered_again(
    sides: list[Side],
) -> None:
    side = make(sides, blocks=2)
    side.prefill("a", [1, 2], seed=1)
    settled(side)
    view = view_of("b", 1, 2)
    side.scheduler.on_new_request(view)
    assert side.scheduler.get_num_new_matched_tokens(view, 0)[0] == 2 * BLOCK_SIZE
    side.step()  # the offer is over
    side.prefill("c", [3, 4], seed=2)
    side.aggregator.expect("recv", "b")
    side.scheduler.update_state_after_alloc(view, KVBlocks(((5, 6, 7),), (0,)), 2 * BLOCK_SIZE)
    until_received(side, "b")
    assert side.failed == ["b"] and side.stats.values["offload_loads_lost"] == 1
    side.prefill("d", [1, 2], seed=1)
    settled(side)
    assert side.scheduler.get_num_new_matched_tokens(view, 0) == (0, False), "or it could fail for ever"


@pytest.mark.parametrize("pcp", [2, 8])
def test_every_replica_stores_its_own_copy_and_loads_from_it(sides: list[Side], pcp: int) -> None:
    side = make(sides, pcp=pcp)
    side.prefill("a", [1, 2], seed=1)
    settled(side)
    assert all(in_tier(side, 1, 1, rank) == stored(1, 1) for rank in range(pcp))
    assert admit(side, view_of("b", 1, 2), [10, 11, 12]) == 2 * BLOCK_SIZE
    until_received(side, "b")
    assert side.holds([10, 11], seed=1)


def test_a_block_is_offered_only_when_every_rank_stored_its_share(sides: list[Side], mocker: Any) -> None:
    clock = Clock()
    side = make(sides, pcp=2, clock=clock)
    slow = SlowCopies(mocker)
    side.prefill("a", [1], seed=1)
    assert slow.inside.wait(20)
    assert side.scheduler.get_num_new_matched_tokens(view_of("b", 1, 1), 0) == (None, True), "on its way"
    clock.now = 0.6
    assert side.scheduler.get_num_new_matched_tokens(view_of("b", 1, 1), 0) == (0, False), "patience has an end"
    slow.go.set()
    settled(side)
    assert side.scheduler.get_num_new_matched_tokens(view_of("c", 1, 1), 0) == (BLOCK_SIZE, True)


def test_one_rank_that_cannot_store_its_share_loses_the_block(sides: list[Side], mocker: Any) -> None:
    side = make(sides, pcp=2)
    mocker.patch.object(worker(side, 1), "_copy", side_effect=OSError)
    side.prefill("a", [1, 2], seed=1)
    settled(side)
    assert side.stats.values["kv_offload_stores_skipped"] == 2 and len(scheduler(side).index) == 0


def test_generated_blocks_are_stored_when_asked_for(sides: list[Side]) -> None:
    """Two prompt blocks and two that fill while decoding."""
    for prompt_only, expected in ((True, 2), (False, 4)):
        side = make(sides, offload_prompt_only=prompt_only)
        n = 2 * BLOCK_SIZE
        hashes = tuple(f"1:{index}".encode() for index in range(4))
        view = RequestView("a", n, n, None, block_hashes=lambda hashes=hashes: hashes)  # type: ignore[misc]
        side.scheduler.on_new_request(view)
        side.step(requests=(StepRequest("a", 0, n, ((1, 2),)),))
        for position in range(n, 4 * BLOCK_SIZE):
            new = ((3 + (position - n) // BLOCK_SIZE,),) if position % BLOCK_SIZE == 0 else ((),)
            side.step(requests=(StepRequest("a", position, 1, new),))
        settled(side)
        assert len(scheduler(side).index) == expected


def test_chunks_are_stored_as_they_are_computed_and_a_preempted_prompt_again(sides: list[Side]) -> None:
    side = make(sides)
    view = view_of("a", 1, 3)
    side.write([1, 2, 3], seed=1)
    side.scheduler.on_new_request(view)
    side.step(requests=(StepRequest("a", 0, 24, ((1, 2),)),))
    settled(side)
    assert [in_tier(side, 1, block) is not None for block in range(3)] == [True, False, False]
    side.seq += 1
    meta = side.scheduler.build_connector_meta(StepView(side.seq, preempted=("a",)))
    side.finish_step([side.rank_step(0, meta)])
    assert admit(side, view, [8, 9, 10, 11]) == BLOCK_SIZE
    until_received(side, "a")
    side.caches[0][LAYERS[0]][[9, 10]] = blocks_of(1, 0, 3)[1:]
    side.caches[0][LAYERS[1]][[9, 10]] = blocks_of(1, 1, 3)[1:]
    side.scheduler.update_state_after_alloc(view, KVBlocks(((8, 9, 10, 11),), (1,)), 0)
    side.step(requests=(StepRequest("a", BLOCK_SIZE, 33, ((8, 9, 10, 11),)),))
    settled(side)
    assert [in_tier(side, 1, block) for block in range(3)] == [stored(1, block) for block in range(3)]
    assert side.stats.values["offload_blocks_stored"] == 3


def test_known_blocks_are_not_copied_again(sides: list[Side]) -> None:
    side = make(sides)
    side.prefill("a", [1, 2], seed=1)
    settled(side)
    side.prefill("b", [3, 4, 5], seed=1)
    settled(side)
    assert side.stats.values["offload_blocks_deduplicated"] == 2 and side.stats.values["offload_blocks_stored"] == 3


def test_repeated_metadata_changes_nothing(sides: list[Side]) -> None:
    side = make(sides, pcp=2)
    side.prefill("a", [1], seed=1)
    settled(side)
    admit(side, view_of("b", 1, 1), [10, 11])
    meta = side.scheduler.build_connector_meta(StepView(99))
    reported: list[list[str]] = [[], []]

    def repeat() -> bool:
        side.finish_step([side.rank_step(rank, meta) for rank in range(2)])
        reported[:] = [[*old, *new[1]] for old, new in zip(reported, side.rank_results, strict=True)]
        return all(reported)

    wait_until(repeat, 20, "both ranks loaded")
    assert all(repeat() for _ in range(10)) and reported == [["b"], ["b"]] and side.received == ["b"]
    assert side.stats.values["kv_offload_load_blocks"] == 2


# --- stores and blocks that are given away ------------------------------------------------------------------------


class SlowCopies:
    """Holds copying threads inside a block until let go; copies of ``free`` (the step's own) pass."""

    def __init__(self, mocker: Any) -> None:
        self.inside = threading.Event()
        self.go = threading.Event()
        self.free = threading.get_ident()
        real = copier_module.ctypes.memmove

        def memmove(*args: Any) -> None:
            if threading.get_ident() != self.free:
                self.inside.set()
                assert self.go.wait(20)
            real(*args)

        mocker.patch.object(copier_module, "ctypes", mocker.Mock(memmove=memmove))


def overwrite(side: Side, blocks: list[int], seed: int) -> None:
    """A step that gives ``blocks`` to another request, which writes them, in an engine's order."""
    view = view_of(f"over{seed}", seed, len(blocks), extra=0)
    side.scheduler.on_new_request(view)
    side.scheduler.update_state_after_alloc(view, KVBlocks((tuple(blocks),), (0,)), 0)
    side.seq += 1
    share = StepRequest(view.id, 0, view.n_prompt, (tuple(blocks),))
    meta = side.scheduler.build_connector_meta(StepView(side.seq, (share,)))
    for one in side.workers:
        one.handle_preemptions(meta)
    side.write(blocks, seed)
    side.finish_step([side.rank_step(rank, meta) for rank in side.ranks])


def test_a_store_that_waits_is_finished_before_its_block_is_overwritten(sides: list[Side], mocker: Any) -> None:
    side = make(sides)
    slow = SlowCopies(mocker)
    side.prefill("a", [1, 2, 3], seed=1)
    assert slow.inside.wait(20), "block 1 is being copied, 2 and 3 wait"
    overwrite(side, [2, 3], seed=2)
    slow.go.set()
    settled(side)
    assert [in_tier(side, 1, block) for block in range(3)] == [stored(1, block) for block in range(3)]
    assert [in_tier(side, 2, block) for block in range(2)] == [stored(2, block) for block in range(2)]


def test_a_store_whose_block_is_overwritten_while_it_is_copied_is_lost_not_torn(sides: list[Side], mocker: Any) -> None:
    mocker.patch.object(offload_worker, "LIMITS", Limits(flush=0.0))
    side = make(sides)
    slow = SlowCopies(mocker)
    side.prefill("a", [1, 2], seed=1)
    assert slow.inside.wait(20)
    overwrite(side, [1], seed=2)
    slow.go.set()
    settled(side)
    assert in_tier(side, 1, 0) is None and in_tier(side, 1, 1) == stored(1, 1) and in_tier(side, 2, 0) == stored(2, 0)
    assert side.stats.values["offload_stores_torn"] > 0


def test_a_store_that_is_being_copied_is_waited_for(sides: list[Side], mocker: Any) -> None:
    mocker.patch.object(offload_worker, "LIMITS", Limits(flush=20.0))
    side = make(sides)
    slow = SlowCopies(mocker)
    side.prefill("a", [1], seed=1)
    assert slow.inside.wait(20)
    threading.Timer(0.02, slow.go.set).start()
    overwrite(side, [1], seed=2)
    settled(side)
    assert in_tier(side, 1, 0) == stored(1, 0) and in_tier(side, 2, 0) == stored(2, 0)


def test_stores_beyond_the_bound_are_skipped(sides: list[Side], mocker: Any) -> None:
    slow = SlowCopies(mocker)
    side = make(sides, kvconn={"stores_max": 2})
    side.prefill("a", [1, 2, 3], seed=1)
    slow.go.set()
    settled(side)
    assert side.stats.values["offload_blocks_stored"] == 2 and side.stats.values["kv_offload_stores_skipped"] == 1


def test_when_every_slot_is_being_written_a_store_is_skipped(sides: list[Side], mocker: Any) -> None:
    slow = SlowCopies(mocker)
    side = make(sides, blocks=2)
    side.prefill("a", [1, 2, 3], seed=1)
    slow.go.set()
    settled(side)
    assert side.stats.values["offload_blocks_stored"] == 2 and side.stats.values["kv_offload_stores_skipped"] == 1


def test_a_load_that_does_not_begin_in_time_fails_when_nothing_of_it_runs(sides: list[Side], mocker: Any) -> None:
    clock = Clock()
    side = make(sides, clock=clock)
    side.prefill("a", [1, 2], seed=1)
    settled(side)
    slow = SlowCopies(mocker)
    admit(side, view_of("b", 1, 2), [10, 11, 12])
    side.step()
    assert slow.inside.wait(20)
    clock.now = 1000.0
    side.step()
    assert side.received == [], "a copy runs: the blocks are not quiet (C6)"
    slow.go.set()
    until_received(side, "b")
    assert side.failed == ["b"]


def test_what_is_being_loaded_makes_no_room(sides: list[Side], mocker: Any) -> None:
    side = make(sides, blocks=2)
    side.prefill("a", [1, 2], seed=1)
    settled(side)
    slow = SlowCopies(mocker)
    admit(side, view_of("b", 1, 2), [10, 11, 12])
    side.step()
    assert slow.inside.wait(20)
    side.prefill("c", [3, 4], seed=2)
    assert side.stats.values["kv_offload_stores_skipped"] == 2
    slow.go.set()
    until_received(side, "b")
    assert side.holds([10, 11], seed=1) and side.failed == []


def test_shutdown_joins_copying_threads(sides: list[Side], mocker: Any) -> None:
    slow = SlowCopies(mocker)
    side = make(sides)
    side.prefill("a", [1, 2, 3], seed=1)
    assert slow.inside.wait(20)
    threading.Timer(0.05, slow.go.set).start()
    side.workers[0].shutdown()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kvconn-offload-0")]
    side.workers[0].shutdown()


# --- hold ---------------------------------------------------------------------------------------------------------


def test_hold_releases_a_request_once_when_its_blocks_are_stored(sides: list[Side], mocker: Any) -> None:
    slow = SlowCopies(mocker)
    side = make(sides, hold=True)
    side.prefill("a", [7, 3, 5], seed=1)
    assert slow.inside.wait(20)
    for _ in range(3):
        side.step()
    assert side.sent == [] and side.scheduler.explain(0.0)
    slow.go.set()
    until_sent(side, "a")
    settled(side)
    assert side.sent == ["a"] and in_tier(side, 1, 2) == stored(1, 2) and side.scheduler.explain(0.0) == []


@pytest.mark.parametrize("reason", [FinishReason.ABORT, FinishReason.ERROR])
def test_with_nothing_to_store_a_hold_is_reported_at_once(sides: list[Side], reason: FinishReason) -> None:
    side = make(sides, hold=True)
    assert side.scheduler.request_finished(view_of("a", 1, 2), ((1, 2),), reason) == (True, None)
    side.step()
    assert side.sent == ["a"] and len(scheduler(side).index) == 0


@pytest.mark.parametrize("pcp", [2, 8])
def test_with_hold_the_canonical_replica_stores_and_the_others_report_at_once(sides: list[Side], pcp: int) -> None:
    side = make(sides, pcp=pcp, hold=True)
    assert [worker(side, rank).tier is not None for rank in range(pcp)] == [True] + [False] * (pcp - 1)
    side.prefill("a", [1, 2], seed=1)
    side.step()
    assert [result[0] for result in side.rank_results[1:]] == [{"a"}] * (pcp - 1)
    until_sent(side, "a")
    settled(side)
    assert side.sent == ["a"] and in_tier(side, 1, 1) == stored(1, 1)
    assert side.scheduler.get_num_new_matched_tokens(view_of("b", 1, 2), 0) == (0, False), "the others have nothing"


def test_at_the_deadline_a_hold_is_reported_when_no_copy_of_its_blocks_runs(sides: list[Side], mocker: Any) -> None:
    slow, clock = SlowCopies(mocker), Clock()
    side = make(sides, clock=clock, hold=True)
    side.prefill("0", [1], seed=0)
    side.prefill("1", [2, 3], seed=1)
    side.step()
    assert slow.inside.wait(20)
    clock.now = 59.9
    side.step()
    assert side.sent == []
    clock.now = 60.0
    side.step()
    assert side.sent == ["1"], "never begun: skipped"
    clock.now = 1000.0
    side.step()
    assert side.sent == ["1"]
    slow.go.set()
    until_sent(side, "0")
    settled(side)
    assert side.stats.values["kv_offload_stores_skipped"] == 3


def test_as_a_child_it_holds_until_stored(sides: list[Side]) -> None:
    side = Side("p", multi(offload_hold(16 * BLOCK_BYTES), role="kv_both"), pcp=8)
    sides.append(side)
    for index in range(4):
        side.prefill(str(index), [index, index + 4], seed=index)
    until_sent(side, "0", "1", "2", "3")
    assert sorted(side.sent) == ["0", "1", "2", "3"]


# --- events, reset, configuration ---------------------------------------------------------------------------------


def test_events_name_what_is_stored_and_removed(sides: list[Side]) -> None:
    side = make(sides, blocks=2)
    for seed in (1, 2):
        view = view_of(f"r{seed}", seed, 1, extra=0)
        side.write([seed], seed)
        side.scheduler.on_new_request(view)
        side.step(requests=(StepRequest(view.id, 0, BLOCK_SIZE, ((seed,),)),))
        settled(side)
    view = view_of("r3", 1, 2, extra=0)
    side.scheduler.on_new_request(view)
    side.step(requests=(StepRequest("r3", 0, 2 * BLOCK_SIZE, ((3, 4),)),))
    settled(side)
    tokens = [tuple(range(16)), tuple(range(16, 32))]
    assert list(side.scheduler.take_events()) == [
        BlockStored((b"1:0",), None, tokens[0], BLOCK_SIZE, "host"),
        BlockStored((b"2:0",), None, tokens[0], BLOCK_SIZE, "host"),
        BlockRemoved((b"2:0",), "host"),
        BlockStored((b"1:1",), b"1:0", tokens[1], BLOCK_SIZE, "host"),
    ]
    assert list(side.scheduler.take_events()) == []


def test_a_block_whose_tokens_are_not_told_has_no_stored_event(sides: list[Side]) -> None:
    side = make(sides)
    side.prefill("a", [1], seed=1)
    settled(side)
    assert len(scheduler(side).index) == 1 and list(side.scheduler.take_events()) == []


def test_after_a_reset_nothing_of_before_is_offered(sides: list[Side], mocker: Any) -> None:
    side = make(sides)
    side.prefill("a", [1], seed=1)
    settled(side)
    slow = SlowCopies(mocker)
    side.prefill("b", [2], seed=2)
    assert slow.inside.wait(20)
    assert side.scheduler.reset_cache() is True
    slow.go.set()
    settled(side)
    assert side.scheduler.get_num_new_matched_tokens(view_of("c", 1, 1), 0) == (0, False)
    assert side.scheduler.get_num_new_matched_tokens(view_of("d", 2, 1), 0) == (0, False), "computed before the reset"


def test_wrong_settings_are_named_all_at_once() -> None:
    transfer = msgspec.json.decode(msgspec.json.encode(config(0, secondary_tiers=[{"type": "fs"}])))
    transfer["kv_role"] = "kv_producer"
    with pytest.raises(ConfigError) as caught:
        Side("p", transfer)
    assert [problem.split(":")[0] for problem in caught.value.problems] == [
        "kv_transfer_config.kv_role",
        "kv_transfer_config.kv_connector_extra_config.cpu_bytes_to_use",
        "kv_transfer_config.kv_connector_extra_config.secondary_tiers",
    ]


@pytest.mark.parametrize(
    ("extra", "problem"),
    [
        ({"eviction_policy": "lru2"}, r"eviction_policy: .*did you mean 'lru'"),
        ({"spec_name": "TieringOfloadingSpec"}, r"spec_name: .*did you mean 'TieringOffloadingSpec'"),
        ({"offload_promt_only": True}, r"offload_promt_only: unknown key \(did you mean 'offload_prompt_only'\?\)"),
        ({"spec_name": "TieringOffloadingSpec"}, r"secondary_tiers: expected at least one"),
    ],
)
def test_a_wrong_word_names_the_right_one(extra: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        Side("p", config(**extra))


def test_layers_larger_than_the_engine_said_are_a_config_error(sides: list[Side]) -> None:
    side = make(sides)
    said = msgspec.structs.replace(side.kv_cache, block_bytes=9)
    settings = parse_extra(OffloadSettings, side.config.kv_transfer)
    half = OffloadWorker(settings, worker(side).role, said)
    with pytest.raises(ConfigError, match=r"block_bytes: the engine said 9 bytes a block, .* rank 0 have 16"):
        half.register({"l": LayerView("l", 4096, 16, 16, 4)})


def test_memory_smaller_than_a_block_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="cpu_bytes_to_use: expected at least one block of 2048 bytes"):
        Side("p", offload_hold(2047))


def test_repr_is_one_readable_line(sides: list[Side]) -> None:
    side = make(sides, pcp=2, hold=True)
    moves = "stores=0 loads=0 saves=0 fetches=0"
    assert [repr(half) for half in (side.scheduler, *side.workers)] == [
        (
            "OffloadingConnector(OffloadScheduler(CompletionLedger(send=0 recv=0 absorbed=0) "
            "JobBook(store=0 save=0 fetch=0) HostIndex(slots=16 stored=0 writing=0 pinned=0 evicted=0)))"
        ),
        (f"OffloadingConnector(OffloadWorker(RankRole(0/2 serves+reads) {moves} HostTier(slots=16 of 2048 bytes)))"),
        f"OffloadingConnector(OffloadWorker(RankRole(1/2 replicates+reads) {moves} None))",
    ]
    assert side.stats == Stats()
