"""The fence and the seal: bytes are handed over only when they were proved to have been held (C8)."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvconn.base import FinishReason, RequestView, StepRequest
from kvconn.geometry import Place
from kvconn.nixl.checks import Checks, Verdict
from kvconn.nixl.fence import Fence, FenceSlots, FenceWords, Numbers, fresh_key, prompt_digest, seal, seal_fits
from kvconn.params import KvconnRef, RemoteRef
from tests.support import BLOCK_SIZE, COMPOSITIONS, NIXL_CONSUMER, NIXL_PRODUCER, Side, wait_until


class TestNumbers:
    def test_each_is_out_once_and_those_that_came_back_go_first(self) -> None:
        numbers = Numbers(3)
        assert [numbers.take(), numbers.take()] == [0, 1]
        numbers.give([0])
        assert sorted(numbers) == [0, 2] and len(numbers) == 2
        assert [numbers.take(), numbers.take()] == [0, 2]
        assert not list(numbers) and len(numbers) == 0

    def test_a_large_pool_costs_no_more_than_a_small_one(self) -> None:
        tracemalloc.start()
        try:
            kept = [FenceSlots(1 << 24), Checks(1 << 24), FenceWords(1 << 24)]
            assert tracemalloc.get_traced_memory()[0] < 1 << 14, kept
        finally:
            tracemalloc.stop()


class TestSlots:
    def test_a_request_keeps_its_slot_and_word_however_often_it_is_asked(self) -> None:
        slots = FenceSlots(4)
        assert slots.open("a") == slots.open("a") == slots.get("a")
        assert len(slots) == 1

    def test_of_a_reference_that_is_out_the_slot_is_kept_and_the_word_is_not(self) -> None:
        slots = FenceSlots(2)
        slots.open("a"), slots.open("b")
        slots.handed_out("a")
        assert slots.get("a") is None and "a" in slots
        assert slots.slots() == [0, 1] and slots.ids() == ["a", "b"]
        assert slots.close("a") == 0 and "a" not in slots

    def test_words_are_nonzero_and_new_at_every_life(self) -> None:
        slots = FenceSlots(1)
        words = set()
        for _ in range(50):
            fence = slots.open("a")
            assert fence is not None and 0 < fence.word < 1 << 64
            words.add(fence.word)
            slots.close("a")
            slots.step(), slots.step()
        assert len(words) == 50

    def test_a_slot_is_free_again_one_step_after_it_was_closed_and_not_before(self) -> None:
        slots = FenceSlots(1)
        slots.open("a")
        assert slots.close("a") == 0
        assert slots.open("b") is None
        slots.step()
        assert slots.open("b") is None  # the step that tells the workers
        slots.step()
        assert slots.open("b") is not None

    def test_no_free_slot_is_no_fence(self) -> None:
        slots = FenceSlots(2)
        assert [slots.open(id) is None for id in "abc"] == [False, False, True]
        assert slots.close("c") is None


class TestWords:
    def test_a_word_stands_until_it_is_taken_down(self) -> None:
        words = FenceWords(8)
        words.write(Fence(3, (1 << 64) - 1))
        assert [words.read(slot) for slot in (2, 3, 4)] == [0, (1 << 64) - 1, 0]
        words.zero(3)
        assert words.read(3) == 0
        words.write(Fence(1, 5)), words.write(Fence(2, 6))
        words.zero_all()
        assert repr(words) == "FenceWords(size=8 standing=0)"

    def test_it_is_page_aligned_and_a_slot_is_eight_bytes(self) -> None:
        words = FenceWords(3)
        assert words.address % 4096 == 0 and words.slot_address(2) == words.address + 16


AT = Place(0, 0)


class TestChecks:
    def test_equal_is_held_and_different_is_read_once_more(self) -> None:
        words = {0: 41}
        checks = Checks(1)
        assert checks.begin("r", Fence(7, 42), [AT]) and checks.judge("r", words.__getitem__) is Verdict.AGAIN
        assert checks.targets("r") == [(AT, 7, 0)]
        assert checks.judge("r", words.__getitem__) is Verdict.AGAIN
        checks.targets("r")
        assert checks.judge("r", words.__getitem__) is Verdict.STALE
        words[0] = 42
        assert checks.judge("r", words.__getitem__) is Verdict.HELD

    def test_every_source_that_is_read_has_a_word_and_only_those_that_differ_are_read_again(self) -> None:
        places = [Place(0, 0), Place(0, 1), Place(1, 1)]
        words = {0: 42, 1: 41, 2: 42}
        checks = Checks(3)
        assert checks.begin("r", Fence(7, 42), places)
        assert checks.targets("r") == [(place, 7, scratch) for scratch, place in enumerate(places)]
        assert checks.judge("r", words.__getitem__) is Verdict.AGAIN
        assert checks.targets("r") == [(places[1], 7, 1)]
        assert checks.judge("r", words.__getitem__) is Verdict.STALE

    def test_a_life_gets_scratch_for_all_its_sources_or_none(self) -> None:
        checks = Checks(2)
        assert not checks.begin("a", Fence(1, 1), [AT] * 3)
        assert checks.begin("b", Fence(1, 1), [AT] * 2) and len(checks) == 1

    def test_a_scratch_word_is_one_lifes_until_it_ends(self) -> None:
        checks = Checks(1)
        assert checks.begin("a", Fence(1, 1), [AT]) and not checks.begin("b", Fence(2, 2), [AT])
        checks.end("a"), checks.end("a")
        assert checks.begin("b", Fence(2, 2), [AT]) and not checks.begin("c", Fence(3, 3), [AT])


REF = RemoteRef("P", "t", "127.0.0.1", 5600, ((1, 2, 3),), 48)


def digest(tokens: list[int], n: int, beside: bytes = b"") -> bytes:
    return prompt_digest(RequestView("r", len(tokens), len(tokens), None, lambda: tokens, beside=lambda _: beside), n)


PROMPT = digest([1, 2, 3], 3)


class TestSeal:
    def test_only_what_was_sealed_fits(self) -> None:
        key, fence = fresh_key(), Fence(4, 99)
        good = KvconnRef(4, 99, seal(key, REF, fence, PROMPT))
        assert seal_fits(key, replaced(kvconn=good), PROMPT)
        assert not seal_fits(key, replaced(kvconn=good), digest([1, 2, 4], 3))
        assert not seal_fits(key, replaced(kvconn=good), digest([1, 2, 3], 3, b"with a picture"))
        assert not seal_fits(fresh_key(), replaced(kvconn=good), PROMPT)
        for change in (
            {"block_ids": ((1, 2, 4),)},
            {"block_ids": ((3, 2, 1),)},
            {"transfer_id": "u"},
            {"num_tokens": 47},
            {"host": "127.0.0.2"},
            {"port": 5601},
            {"kvconn": KvconnRef(5, 99, good.seal)},
            {"kvconn": KvconnRef(4, 98, good.seal)},
            {"kvconn": KvconnRef(4, 99, "x" * 64)},
            {"kvconn": KvconnRef(4, 99, "é")},
            {"kvconn": None},
        ):
            assert not seal_fits(key, replaced(**{"kvconn": good, **change}), PROMPT), change


def replaced(**changes: Any) -> RemoteRef:
    import msgspec

    return msgspec.structs.replace(REF, **changes)


# --- on real agents -----------------------------------------------------------------------------------------------


@pytest.fixture
def sides() -> Iterator[Callable[..., Side]]:
    made: list[Side] = []

    def make(*args: Any, **kwargs: Any) -> Side:
        made.append(Side(*args, **kwargs))
        return made[-1]

    yield make
    for side in made:
        side.close()


def finish(p: Side, d: Side, done: Callable[[], bool]) -> None:
    wait_until(lambda: bool((d.step(), p.step()) and done()), what=f"{p.scheduler!r} {d.scheduler!r}")


def nixl(side: Side) -> Any:
    """The NIXL worker half of rank 0, alone or as the first child of however many Multis."""
    connector: Any = side.workers[0]
    while hasattr(connector, "children"):
        connector = connector.children[0]
    return connector.worker


@pytest.mark.parametrize("composition", COMPOSITIONS)
def test_the_word_stands_from_the_first_scheduled_step_until_the_report(
    sides: Callable[..., Side], composition: str
) -> None:
    p, d = sides("P", COMPOSITIONS[composition], pcp=2), sides("D", NIXL_CONSUMER)
    fence = nixl(p)._fence
    params = p.prefill("a", [1, 2], seed=1)
    assert params is not None
    ours = params["kvconn"]
    assert f"{fence.read(ours['slot']):016x}" == ours["word"]
    d.load("r", params, [3, 4])
    finish(p, d, lambda: bool(p.sent))
    assert fence.read(ours["slot"]) == 0 and repr(fence).endswith("standing=0)")


def test_the_word_comes_down_in_the_very_poll_that_reports(sides: Callable[..., Side]) -> None:
    p, d = sides("P", NIXL_PRODUCER), sides("D", NIXL_CONSUMER)
    params = p.prefill("a", [1, 2], seed=1)
    assert params is not None
    p.step()
    d.load("r", params, [3, 4])
    wait_until(lambda: d.step() is not None and bool(d.received))
    fence, slot = nixl(p)._fence, params["kvconn"]["slot"]

    def reported() -> bool:
        standing = fence.read(slot)
        p.step()
        assert bool(p.sent) == (fence.read(slot) == 0)
        assert p.sent or standing
        return bool(p.sent)

    wait_until(reported)


@pytest.mark.parametrize("reason", [FinishReason.ABORT, FinishReason.ERROR])
def test_an_abort_takes_the_word_down_with_the_next_step(sides: Callable[..., Side], reason: FinishReason) -> None:
    p = sides("P", NIXL_PRODUCER)
    view = RequestView("a", 32, 33, {"do_remote_decode": True})
    p.scheduler.on_new_request(view)
    p.step(requests=(StepRequest("a", 0, 32),))
    assert repr(nixl(p)._fence).endswith("standing=1)")
    assert p.scheduler.request_finished(view, ((1, 2),), reason) == (False, None)
    p.step()
    assert repr(nixl(p)._fence).endswith("standing=0)")
    assert "fences=0" in repr(p.scheduler)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("composition", COMPOSITIONS)
def test_blocks_that_were_given_to_somebody_else_are_never_handed_over(
    sides: Callable[..., Side], composition: str
) -> None:
    clock = Clock()
    p, d = sides("P", COMPOSITIONS[composition], clock=clock), sides("D", NIXL_CONSUMER)
    params = p.prefill("a", [1, 2], seed=1)
    p.step()
    clock.now += 31.0
    wait_until(lambda: p.step() is not None and p.sent == ["a"])  # the lease ended unread
    p.prefill("b", [1, 2], seed=2)  # somebody else's prompt in the same blocks
    d.load("r", params, [3, 4])
    finish(p, d, lambda: bool(d.received))
    assert d.failed == ["r"]
    assert d.holds([3, 4], seed=2)  # the read itself had succeeded, with the wrong prompt's bytes
    assert d.stats.values["stale_reads"] == 1
    assert d.aggregator.pending() == []


def forged(params: dict[str, Any], **changes: Any) -> dict[str, Any]:
    ours = {**params["kvconn"], **changes.pop("kvconn", {})}
    return {**params, **changes, "kvconn": ours}


FORGERIES: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "ids of another prompt": lambda p: forged(p, remote_block_ids=[[5, 6]]),
    "ids in another order": lambda p: forged(p, remote_block_ids=[p["remote_block_ids"][0][::-1]]),
    "another transfer id": lambda p: forged(p, remote_request_id="x" * 22),
    "another slot": lambda p: forged(p, kvconn={"slot": p["kvconn"]["slot"] + 1}),
    "another word": lambda p: forged(p, kvconn={"word": f"{int(p['kvconn']['word'], 16) ^ 1 or 1:016x}"}),
    "no seal": lambda p: forged(p, kvconn={"seal": None}),
    "no fence at all": lambda p: {k: v for k, v in p.items() if k != "kvconn"},
}


@pytest.mark.parametrize("what", FORGERIES)
def test_a_reference_the_client_changed_reads_nothing(sides: Callable[..., Side], what: str) -> None:
    p, d = sides("P", NIXL_PRODUCER), sides("D", NIXL_CONSUMER)
    params = p.prefill("a", [1, 2], seed=1)
    assert params is not None
    p.prefill("other", [5, 6], seed=9)
    p.step()
    d.load("bad", FORGERIES[what](params), [3, 4])
    finish(p, d, lambda: bool(d.failed))
    assert not any(cache[[3, 4]].any() for cache in d.caches[0].values())
    d.load("good", p.prefill("b", [7, 8], seed=3), [3, 4])
    finish(p, d, lambda: "good" in d.received)
    assert d.failed == ["bad"] and d.holds([3, 4], seed=3)


def test_a_good_reference_with_another_prompt_reads_nothing(sides: Callable[..., Side]) -> None:
    p, d = sides("P", NIXL_PRODUCER), sides("D", NIXL_CONSUMER)
    params = p.prefill("a", [1, 2], seed=1)
    p.step()
    d.load("bad", params, [3, 4], tokens=tuple(range(2 * BLOCK_SIZE)))
    finish(p, d, lambda: bool(d.failed))
    assert not any(cache[[3, 4]].any() for cache in d.caches[0].values())


def without_fence(side: Side) -> None:
    """Serve as a stock producer does: no fence, no key."""
    import msgspec

    from kvconn.nixl.wire import AgentMetadata, HandshakePayload

    half: Any = side.scheduler
    handshake: Any = side.workers[0].get_handshake_metadata()
    payload = msgspec.msgpack.decode(handshake.payload, type=HandshakePayload)
    inner = msgspec.msgpack.decode(payload.agent_metadata_bytes, type=AgentMetadata)
    stock = msgspec.structs.replace(
        payload,
        agent_metadata_bytes=msgspec.msgpack.encode(msgspec.structs.replace(inner, kvconn=None)),
        kvconn=None,
    )
    half.scheduler._server.replace({(0, 0): msgspec.msgpack.encode(stock)})


@pytest.mark.parametrize(("policy", "failed"), [("allow", []), ("refuse", ["r"])])
def test_a_peer_without_fences_is_read_or_refused_by_policy(
    sides: Callable[..., Side], policy: str, failed: list[str]
) -> None:
    extra = {"kv_connector_extra_config": {"kvconn": {"unfenced": policy}}}
    p, d = sides("P", NIXL_PRODUCER), sides("D", {**NIXL_CONSUMER, **extra})
    without_fence(p)
    params = p.prefill("a", [1, 2], seed=1)
    assert params is not None
    p.step()
    d.load("r", {k: v for k, v in params.items() if k != "kvconn"}, [3, 4])
    finish(p, d, lambda: bool(d.received and p.sent))
    assert d.failed == failed
    assert failed or d.holds([3, 4], seed=1)


@pytest.mark.parametrize("readers", [2, 3])
def test_with_several_readers_the_word_stands_until_the_last(sides: Callable[..., Side], readers: int) -> None:
    p = sides("P", NIXL_PRODUCER, pcp=2)
    params = p.prefill("a", [1, 2], seed=1, kvconn={"readers": readers})
    p.step()
    for index in range(readers):
        assert p.sent == []
        d = sides(f"D{index}", NIXL_CONSUMER)
        d.load("r", params, [3, 4])
        finish(p, d, lambda d=d: bool(d.received))  # type: ignore[misc]
        assert d.failed == [] and d.holds([3, 4], seed=1)
    wait_until(lambda: p.step() is not None and p.sent == ["a"])


@pytest.mark.parametrize("readers", [0, -1, "2", 1.5, True, 10**9, None])
def test_a_wrong_count_of_readers_holds_nothing(sides: Callable[..., Side], readers: Any) -> None:
    p = sides("P", NIXL_PRODUCER)
    assert p.prefill("a", [1, 2], seed=1, kvconn={"readers": readers}) is None
    p.step()
    assert repr(nixl(p)._fence).endswith("standing=0)") and p.aggregator.pending() == []


def test_without_a_scheduled_step_nothing_is_held(sides: Callable[..., Side]) -> None:
    p = sides("P", NIXL_PRODUCER)
    view = RequestView("a", BLOCK_SIZE, BLOCK_SIZE + 1, {"do_remote_decode": True})
    p.scheduler.on_new_request(view)
    assert p.scheduler.request_finished(view, ((1,),), FinishReason.LENGTH) == (False, None)


def test_shutdown_takes_every_word_down(sides: Callable[..., Side]) -> None:
    p = sides("P", NIXL_PRODUCER)
    p.prefill("a", [1, 2], seed=1)
    fence = nixl(p)._fence
    p.close()
    assert repr(fence).endswith("standing=0)")
