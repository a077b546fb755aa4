"""Prefill and decode in processes of their own over real NIXL, with a sibling that loads on either side.

Engines are content-addressed: a token is a hash of every byte of KV that it was made from, so that equal tokens mean
equal bytes. Prompts of different names share nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from kvconn.engine.client import EngineProcess, EngineRequest
from kvconn.engine.config import kv_cache_view
from tests.engine.driving import unique_tokens
from tests.engine.pairs import SECONDS, Starter, ends, prefilled, starting
from tests.support import NIXL_CONSUMER, NIXL_PRODUCER, multi, wait_until

SIZE = 8
POOL = 16


@pytest.fixture
def start() -> Iterator[Starter]:
    with starting() as starter:
        yield starter


def offload(**extra: Any) -> dict[str, Any]:
    """Room for everything, and patience: a busy machine must not decide what is found."""
    settings = {"cpu_bytes_to_use": 1 << 22, "kvconn": {"lookup": 60.0}} | extra
    return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": settings}


def producer(start: Starter, *, pcp: int = 1, **sizes: Any) -> EngineProcess:
    transfer = multi(NIXL_PRODUCER, offload()) | {"kv_load_failure_policy": "recompute"}
    return start("P", pcp=pcp, transfer=transfer, **sizes)


def consumer(start: Starter, *, extra: dict[str, Any] | None = None, **sizes: Any) -> EngineProcess:
    transfer = multi(offload(**(extra or {})), NIXL_CONSUMER, role="kv_consumer")
    return start("D", transfer=transfer | {"kv_load_failure_policy": "recompute"}, **sizes)


def alone(start: Starter, requests: Sequence[tuple[str, tuple[int, ...], int]]) -> dict[str, tuple[int, ...]]:
    """What one engine with room for everything says."""
    engine = start("M", num_blocks=256)
    for id, prompt, n in requests:
        engine.submit(EngineRequest(id, prompt, n))
    return {id: end.tokens for id, end in ends(engine, *(id for id, _, _ in requests)).items()}


def decoded(decode: EngineProcess, id: str, prompt: tuple[int, ...], n: int, params: dict[str, Any]) -> tuple[int, ...]:
    decode.submit(EngineRequest(id, prompt, n, params))
    end = ends(decode, id)[id]
    assert end.error is None
    return end.tokens


def forget(engine: EngineProcess, name: str) -> None:
    """Fill the engine's whole pool with another prompt: nothing is left in its own cache."""
    engine.submit(EngineRequest(name, unique_tokens(name, POOL * SIZE), 1))
    assert ends(engine, name)[name].error is None


def idle(engine: EngineProcess) -> None:
    """No block is held and nothing is under way; the newest counters are told then."""
    assert engine.drain(SECONDS), engine.stats()


def count(engine: EngineProcess, name: str) -> int:
    return int(engine.stats().connector.get(name, 0))


@pytest.mark.parametrize("pcp", [1, 2])
def test_prefix_hits_on_p_skip_prefill(start: Starter, pcp: int) -> None:
    """Every rank of P loads from its own copy; what D reads of it is exact."""
    prompt = unique_tokens("a", 61)
    expected = alone(start, [("a", prompt, 6)])["a"]
    p, d = producer(start, pcp=pcp, num_blocks=POOL), start("D", transfer=NIXL_CONSUMER)
    assert decoded(d, "a", prompt, 6, prefilled(p, "a", prompt)) == expected
    idle(p)
    forget(p, "f")
    idle(p)
    before = p.stats()
    again = prefilled(p, "b", prompt[:45])
    assert decoded(d, "b", prompt[:45], 1, again) == alone(start, [("b", prompt[:45], 1)])["b"]
    for engine in (p, d):
        idle(engine)
    assert p.stats().external_tokens == count(p, "offload_tokens_loaded") == 40
    assert p.stats().prefill_tokens - before.prefill_tokens == 5
    assert count(p, "kv_offload_load_blocks") == 5 * pcp


def test_a_request_on_d_is_served_partly_from_its_tier_and_partly_from_p(start: Starter) -> None:
    prompt = unique_tokens("a", 61)
    expected = alone(start, [("short", prompt[:25], 3), ("long", prompt, 6)])
    p, d = producer(start), consumer(start, num_blocks=POOL)
    assert decoded(d, "short", prompt[:25], 3, prefilled(p, "short", prompt[:25])) == expected["short"]
    wait_until(lambda: count(d, "offload_blocks_stored") == 3, SECONDS, "what came from P is kept here too")
    idle(d)
    forget(d, "f")
    idle(d)
    read = count(d, "nixl_bytes_transferred")
    assert decoded(d, "long", prompt, 6, prefilled(p, "long", prompt)) == expected["long"]
    for engine in (p, d):
        idle(engine)
    assert count(d, "offload_tokens_loaded") == 3 * SIZE
    assert count(d, "nixl_bytes_transferred") - read == 5 * kv_cache_view(d.config).block_bytes
    assert d.stats().external_tokens == 25 + 61, "of the second prompt, three blocks from here and the rest from P"


def test_what_d_has_wholly_is_not_read_from_p_and_p_is_told(start: Starter) -> None:
    """But for the last token, which a full block of D's tier cannot give: 41 tokens are five blocks and one."""
    prompt = unique_tokens("a", 48)
    expected = alone(start, [("a", prompt[:41], 4)])["a"]
    p, d = producer(start), consumer(start, num_blocks=POOL)
    assert len(decoded(d, "whole", prompt, 1, prefilled(p, "whole", prompt))) == 1
    idle(d)
    forget(d, "f")
    idle(d)
    read = count(d, "nixl_bytes_transferred")
    assert decoded(d, "a", prompt[:41], 4, prefilled(p, "a", prompt[:41])) == expected
    for engine in (p, d):
        idle(engine)
    assert count(d, "offload_tokens_loaded") == 40
    assert count(d, "nixl_bytes_transferred") - read == kv_cache_view(d.config).block_bytes
    assert count(p, "nixl_num_kv_expired_reqs") == 0


def test_generated_blocks_are_found_by_the_next_turn(start: Starter) -> None:
    """With ``offload_prompt_only`` false a conversation's next prompt finds the answer before it as well."""
    prompt = unique_tokens("a", 21)
    p, d = producer(start), consumer(start, extra={"offload_prompt_only": False}, num_blocks=POOL)
    answer = decoded(d, "one", prompt, 20, prefilled(p, "one", prompt))
    assert answer == alone(start, [("one", prompt, 20)])["one"]
    idle(d)
    forget(d, "f")
    idle(d)
    turn = (*prompt, *answer, *unique_tokens("b", 20))
    assert decoded(d, "two", turn, 6, prefilled(p, "two", turn)) == alone(start, [("two", turn, 6)])["two"]
    idle(d)
    assert count(d, "offload_tokens_loaded") == (21 + 20 - 1) // SIZE * SIZE, (
        "two prompt blocks and three of the answer"
    )


@pytest.mark.parametrize("pcp", [1, 2])
def test_preempted_requests_come_back_from_the_tier_and_chunks_are_exact(start: Starter, pcp: int) -> None:
    """Prompts share nothing and are asked once, so that what D loads from its tier is what a preempted request had."""
    requests = [(f"r{n}", unique_tokens(f"r{n}", 20 + 3 * n), 40) for n in range(8)]
    expected = alone(start, requests)
    sizes = {"num_blocks": 20, "max_num_batched_tokens": 16}
    p = producer(start, pcp=pcp, **sizes)
    d = consumer(start, extra={"offload_prompt_only": False}, **sizes)
    for id, prompt, n in requests:
        d.submit(EngineRequest(id, prompt, n, prefilled(p, id, prompt)))
    told = ends(d, *expected)
    assert {id: end.tokens for id, end in told.items()} == expected
    for engine in (p, d):
        idle(engine)
    assert count(d, "offload_tokens_loaded") > 0 and count(p, "nixl_num_kv_expired_reqs") == 0
