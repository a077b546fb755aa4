"""Requests' lives across two real engines over NIXL: whatever becomes of a request, its tokens are one engine's, and
what was held for it on either side comes back without waiting for a lease's end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kvconn.base import FinishReason
from kvconn.engine.client import EngineProcess, EngineRequest
from tests.engine.driving import unique_tokens
from tests.engine.pairs import SECONDS, Starter, ends, fresh_stats, prefilled, starting
from tests.support import COMPOSITIONS, NIXL_CONSUMER, multi, offload_hold, wait_until

#: longer than any test: nothing here may end by it
LEASE = {"kv_connector_extra_config": {"kv_lease_duration": 300.0}}
PRODUCER = {"kv_connector": "NixlConnector", "kv_role": "kv_producer"} | LEASE
CONSUMERS = {
    "alone": NIXL_CONSUMER,
    "in Multi": multi(NIXL_CONSUMER, offload_hold(), role="kv_consumer"),
    "nested": multi(multi(NIXL_CONSUMER, offload_hold(), role="kv_consumer"), offload_hold(), role="kv_consumer"),
}
MATRIX = pytest.mark.parametrize("composition", COMPOSITIONS)


@pytest.fixture
def start() -> Iterator[Starter]:
    with starting() as starter:
        yield starter


def both_are_empty(*engines: EngineProcess) -> None:
    """Nothing is held, nothing was given up by a lease, nothing was counted wrong."""
    for engine in engines:
        assert engine.drain(SECONDS), engine.stats()
        stats = engine.stats()
        assert stats.kv_blocks_used == stats.pending_release == 0, stats
        assert stats.connector.get("nixl_num_kv_expired_reqs", 0) == 0
        assert stats.connector.get("stale_reads", 0) == 0


def alone(start: Starter, *requests: EngineRequest, **sizes: Any) -> dict[str, tuple[int, ...]]:
    """What one engine says to these prompts."""
    engine = start("M", **sizes)
    for request in requests:
        engine.submit(request)
    return {id: end.tokens for id, end in ends(engine, *(r.id for r in requests)).items()}


@MATRIX
def test_chunked_prompts_in_small_unequal_pools_with_hits_on_both_sides(start: Starter, composition: str) -> None:
    """P computes in chunks of 16 tokens, D has another pool, another order of blocks, and prefix hits of its own."""
    p = start("P", transfer=with_lease(COMPOSITIONS[composition]), num_blocks=24, max_num_batched_tokens=16)
    d = start("D", transfer=CONSUMERS[composition], num_blocks=40)
    shared = unique_tokens("shared", 30)
    prompts = {f"r{n}": (*shared[: 10 * n], *unique_tokens(f"r{n}", 21)) for n in range(4)}
    for id, prompt in prompts.items():  # one after the other: later ones hit what earlier ones left on either side
        d.submit(EngineRequest(id, prompt, 5, prefilled(p, id, prompt)))
        prompts[id] = prompt
    told = ends(d, *prompts)
    expected = alone(start, *(EngineRequest(id, prompt, 5) for id, prompt in prompts.items()))
    assert {id: end.tokens for id, end in told.items()} == expected
    both_are_empty(p, d)
    assert p.stats().prefix_hit_tokens > 0


@MATRIX
def test_an_id_that_comes_back_at_once_is_another_life(start: Starter, composition: str) -> None:
    p = start("P", transfer=with_lease(COMPOSITIONS[composition]))
    d = start("D", transfer=CONSUMERS[composition])
    for life in range(4):
        prompt = unique_tokens(f"life {life}", 20 + life)
        wait_until(lambda: p.drain(1.0), SECONDS, "the life before is over on P")
        d.submit(EngineRequest("again", prompt, 4, prefilled(p, "again", prompt)))
        tokens = ends(d, "again")["again"].tokens
        assert tokens == alone(start, EngineRequest("again", prompt, 4))["again"]
        assert d.drain(SECONDS)
    both_are_empty(p, d)


def test_what_is_preempted_after_its_kv_came_is_computed_here_and_right(start: Starter) -> None:
    p, d = start("P", transfer=PRODUCER), start("D", transfer=NIXL_CONSUMER, num_blocks=9)
    prompts = {id: unique_tokens(id, 24) for id in "ab"}
    handed = {id: prefilled(p, id, prompt) for id, prompt in prompts.items()}
    for id, prompt in prompts.items():
        d.submit(EngineRequest(id, prompt, 40, handed[id]))
    told = ends(d, *prompts)
    expected = alone(start, *(EngineRequest(id, prompt, 40) for id, prompt in prompts.items()))
    assert {id: end.tokens for id, end in told.items()} == expected
    both_are_empty(p, d)
    assert d.stats().prefill_tokens > 2, "nobody was preempted: only the last token of each was computed"


@pytest.mark.parametrize("composition", CONSUMERS)
def test_a_prompt_that_is_here_already_reads_nothing_and_its_producer_is_told(start: Starter, composition: str) -> None:
    p, d = start("P", transfer=PRODUCER), start("D", transfer=CONSUMERS[composition])
    prompt = unique_tokens("a", 25)
    d.submit(EngineRequest("warm", prompt, 1))
    ends(d, "warm")
    d.submit(EngineRequest("a", prompt[:25], 1, prefilled(p, "a", prompt[:24])))
    ends(d, "a")
    both_are_empty(p, d)
    assert d.stats().external_tokens == 0 and d.stats().connector.get("nixl_num_transfers", 0) == 0


@pytest.mark.parametrize("composition", CONSUMERS)
def test_a_request_that_is_refused_before_admission_frees_its_producers_blocks(
    start: Starter, composition: str
) -> None:
    p, d = start("P", transfer=PRODUCER), start("D", transfer=CONSUMERS[composition], num_blocks=4)
    prompt = unique_tokens("a", 20)
    d.submit(EngineRequest("a", prompt, 1000, prefilled(p, "a", prompt)))
    end = ends(d, "a")["a"]
    assert end.reason is FinishReason.ERROR and end.error is not None and "refused" in end.error
    both_are_empty(p, d)


@pytest.mark.parametrize("composition", CONSUMERS)
def test_a_request_that_is_aborted_while_it_waits_frees_its_producers_blocks(start: Starter, composition: str) -> None:
    p, d = start("P", transfer=PRODUCER), start("D", transfer=CONSUMERS[composition], num_blocks=4096, max_num_seqs=1)
    prompt = unique_tokens("a", 40)
    handed = prefilled(p, "a", prompt)
    d.submit(EngineRequest("first", unique_tokens("first", 8), 30_000))  # until it is aborted
    wait_until(lambda: d.stats().running == 1, SECONDS, "the first runs")
    d.submit(EngineRequest("a", prompt, 4, handed))
    d.abort("a")
    d.abort("first")
    assert {end.reason for end in ends(d, "a", "first").values()} == {FinishReason.ABORT}
    both_are_empty(p, d)


@MATRIX
def test_a_request_that_is_aborted_on_its_producer_holds_nothing(start: Starter, composition: str) -> None:
    p = start("P", transfer=with_lease(COMPOSITIONS[composition]), pcp=2, max_num_batched_tokens=8)
    p.submit(EngineRequest("a", unique_tokens("a", 400), 1, {"do_remote_decode": True}))
    wait_until(lambda: p.stats().steps >= 1, SECONDS, "a runs, or has run")
    p.abort("a")
    end = ends(p, "a")["a"]
    assert end.reason in (FinishReason.ABORT, FinishReason.LENGTH)
    if end.reason is FinishReason.ABORT:
        assert end.kv_transfer_params is None
        both_are_empty(p)


@pytest.mark.parametrize("shape", ["alone", "in Multi"])
def test_two_engines_that_serve_and_read_at_the_same_time(start: Starter, shape: str) -> None:
    both = {"kv_connector": "NixlConnector", "kv_role": "kv_both"} | LEASE
    transfer = both if shape == "alone" else multi(both, offload_hold(), role="kv_both")
    a, b = start("A", transfer=transfer), start("B", transfer=transfer)
    prompts = {f"{way}{n}": unique_tokens(f"{way}{n}", 17 + 5 * n) for way in ("ab", "ba") for n in range(4)}
    ways = {"ab": (a, b), "ba": (b, a)}
    params = {id: prefilled(ways[id[:2]][0], f"p-{id}", prompt) for id, prompt in prompts.items()}
    for id, prompt in prompts.items():  # after all of it: who waits for one end throws others away
        ways[id[:2]][1].submit(EngineRequest(f"d-{id}", prompt, 5, params[id]))
    told = {
        id: end.tokens
        for one, way in ((b, "ab"), (a, "ba"))
        for id, end in ends(one, *(f"d-{id}" for id in prompts if id.startswith(way))).items()
    }
    expected = alone(start, *(EngineRequest(f"d-{id}", prompt, 5) for id, prompt in prompts.items()))
    assert {id: tokens for id, tokens in told.items() if id.startswith("d-")} == expected
    both_are_empty(a, b)
    for one in (a, b):
        assert one.stats().connector["nixl_num_transfers"] == 4


def test_two_engines_that_read_the_same_request_hold_it_until_the_second_is_done(start: Starter) -> None:
    p = start("P", transfer=PRODUCER)
    readers = [start(f"D{n}", transfer=NIXL_CONSUMER) for n in range(2)]
    prompt = unique_tokens("a", 30)
    p.submit(EngineRequest("a", prompt, 1, {"do_remote_decode": True, "kvconn": {"readers": 2}}))
    params = ends(p, "a")["a"].kv_transfer_params
    expected = alone(start, EngineRequest("a", prompt, 4))["a"]
    for n, d in enumerate(readers):
        assert fresh_stats(p).pending_release == 1
        d.submit(EngineRequest("a", prompt, 4, params))
        assert ends(d, "a")["a"].tokens == expected
        if n == 0:
            assert not p.drain(0.2)
    both_are_empty(p, *readers)


def with_lease(transfer: dict[str, Any]) -> dict[str, Any]:
    """The same composition whose NIXL children hold for :data:`LEASE`."""
    extra = transfer.get("kv_connector_extra_config", {})
    if transfer["kv_connector"] == "NixlConnector":
        return transfer | LEASE
    if "connectors" in extra:
        return transfer | {"kv_connector_extra_config": {"connectors": [with_lease(c) for c in extra["connectors"]]}}
    return transfer
