"""Prefill and decode engines of different shapes, their processes and real NIXL: every token is one engine's alone.

The content-addressed model hashes each byte of KV that it reads into its next token, on every rank. The transformer is
there once, to see that attention reads what came.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from kvconn.base import FinishReason
from kvconn.config import ParallelConfig
from kvconn.engine.client import EngineRequest
from kvconn.engine.config import ModelSpec
from tests.engine.driving import unique_tokens
from tests.engine.pairs import SECONDS, Starter, ends, prefilled, starting
from tests.engine.threads import Threaded
from tests.support import NIXL_CONSUMER, NIXL_PRODUCER

LATENT = ModelSpec(mode="content-addressed", n_layers=2, n_heads=4)
HEADS = msgspec.structs.replace(LATENT, kv="gqa", n_kv_heads=4)
COPIES = msgspec.structs.replace(LATENT, kv="gqa", n_kv_heads=2)
#: every second layer sees 11 tokens
WINDOW = msgspec.structs.replace(HEADS, n_layers=4, window=11)
#: a layer of each kind: everything, a window, a state
STATE = msgspec.structs.replace(LATENT, n_layers=3, window=11, state=4)
STATE_HEADS = msgspec.structs.replace(HEADS, state=4)
REAL_STATE = ModelSpec(n_layers=4, d_model=32, d_ff=64, n_heads=4, n_kv_heads=2, kv="gqa", state=8)
REAL = ModelSpec(n_layers=4, d_model=32, d_ff=64, n_heads=4, n_kv_heads=2, kv="gqa", window=11)
#: P gives blocks back while it computes a prompt
CHUNKS = {"max_num_batched_tokens": 16}
#: beginnings of one prompt, longest first: of the second D has a block already
LENGTHS = {"a": 45, "b": 19, "c": 3}
N_NEW = 4
LEASE = {"kv_connector_extra_config": {"kv_lease_duration": 1}}

#: model, producer, consumer, and how their engines differ otherwise
PAIRS: dict[str, tuple[ModelSpec, ParallelConfig, ParallelConfig, dict[str, Any], dict[str, Any]]] = {
    "tp 2 to 2": (HEADS, ParallelConfig(tp=2), ParallelConfig(tp=2), {}, {}),
    "tp 1 to 2": (HEADS, ParallelConfig(), ParallelConfig(tp=2), {}, {}),
    "tp 2 to 1": (HEADS, ParallelConfig(tp=2), ParallelConfig(), {}, {}),
    "tp 2 to 4, copies of heads": (COPIES, ParallelConfig(tp=2), ParallelConfig(tp=4), {}, {}),
    "latent, tp 2 to 1": (LATENT, ParallelConfig(tp=2), ParallelConfig(), {}, {}),
    "latent, tp 1 to 2": (LATENT, ParallelConfig(), ParallelConfig(tp=2), {}, {}),
    "pp 2 to 1": (HEADS, ParallelConfig(pp=2), ParallelConfig(), {}, {}),
    "pp 1 to 2": (HEADS, ParallelConfig(), ParallelConfig(pp=2), {}, {}),
    "pcp 2 to 1": (HEADS, ParallelConfig(pcp=2), ParallelConfig(), {}, {}),
    "pools of 20 and 40 blocks": (HEADS, ParallelConfig(), ParallelConfig(), {"num_blocks": 20}, {"num_blocks": 40}),
    "dcp 2 to 2, in turns of 1 and of 4": (
        LATENT, ParallelConfig(tp=2, dcp=2), ParallelConfig(tp=2, dcp=2, dcp_interleave=4), {}, {},
    ),
    "dcp 2 to 2": (LATENT, ParallelConfig(tp=2, dcp=2), ParallelConfig(tp=2, dcp=2), {}, {}),
    "pcp 2 dcp 2 to 1": (LATENT, ParallelConfig(pcp=2, dcp=2), ParallelConfig(), {}, {}),
    "dcp 1 to 2": (LATENT, ParallelConfig(), ParallelConfig(tp=2, dcp=2), {}, {}),
    "window, tp 1 to 2": (WINDOW, ParallelConfig(), ParallelConfig(tp=2), CHUNKS, {}),
    "window, pp 2 to 1, blocks 16 to 8": (
        WINDOW, ParallelConfig(pp=2), ParallelConfig(), CHUNKS | {"block_size": 16}, {},
    ),
    "transformer, tp 2 to pp 2": (REAL, ParallelConfig(tp=2), ParallelConfig(pp=2), {}, {}),
    "state": (STATE, ParallelConfig(), ParallelConfig(), CHUNKS, {}),
    "state, tp 2 to 2": (STATE_HEADS, ParallelConfig(tp=2), ParallelConfig(tp=2), CHUNKS, {}),
    "state, pp 2 to 1, blocks 16 to 8": (STATE, ParallelConfig(pp=2), ParallelConfig(), {"block_size": 16}, {}),
    "transformer with state, pcp 2 to 1": (REAL_STATE, ParallelConfig(pcp=2), ParallelConfig(), CHUNKS, {}),
    "blocks 16 to 32": (HEADS, ParallelConfig(), ParallelConfig(), {"block_size": 16}, {"block_size": 32}),
    "blocks 32 to 16": (HEADS, ParallelConfig(), ParallelConfig(), {"block_size": 32}, {"block_size": 16}),
}  # fmt: skip


@pytest.fixture
def start() -> Iterator[Starter]:
    with starting() as starter:
        yield starter


@pytest.mark.parametrize("pair", PAIRS)
def test_decode_continues_what_prefill_computed(start: Starter, pair: str) -> None:
    model, p_shape, d_shape, p_sizes, d_sizes = PAIRS[pair]
    alone = Threaded(model)
    expected = {id: alone.generate({"a": n}, N_NEW)["a"] for id, n in LENGTHS.items()}
    p = start("P", parallel=p_shape, transfer=NIXL_PRODUCER, model=model, **p_sizes)
    d = start("D", parallel=d_shape, transfer=NIXL_CONSUMER, model=model, **d_sizes)
    if model.mode == "transformer":
        assert alone.min_margin > model.margin_floor, "equal tokens must mean equal KV"
    tokens = {}
    for id, n in LENGTHS.items():
        prompt = unique_tokens("a", 64)[:n]
        d.submit(EngineRequest(id, prompt, N_NEW, prefilled(p, id, prompt)))
        tokens[id] = ends(d, id)[id].tokens
    assert tokens == expected
    for engine in (p, d):
        assert engine.drain(SECONDS), engine.stats()
        assert engine.stats().kv_blocks_used == engine.stats().pending_release == 0
    stats = d.stats()
    #: a state stands before the last token, and of a prefix there is none
    loaded = sum(LENGTHS.values()) - len(LENGTHS) if model.state else LENGTHS["a"] + LENGTHS["c"]
    assert stats.external_tokens >= loaded
    assert stats.connector.get("nixl_num_failed_transfers", 0) == 0
    assert p.stats().connector.get("nixl_num_kv_expired_reqs", 0) == 0


@pytest.mark.parametrize(("p_size", "d_size", "failed"), [(16, 4, 0), (4, 16, 1)])
def test_a_prompt_that_begins_as_one_that_was_loaded_finds_no_block_that_was_read_in_part(
    start: Starter, p_size: int, d_size: int, failed: int
) -> None:
    """Of 76 tokens P holds the last 32 and the rest of their blocks. The shorter prompt sees 64 and the 31 before."""
    model = msgspec.structs.replace(WINDOW, window=32)
    p = start("P", transfer=NIXL_PRODUCER, model=model, block_size=p_size, **CHUNKS)
    recompute = NIXL_CONSUMER | {"kv_load_failure_policy": "recompute"}
    d = start("D", transfer=recompute, model=model, block_size=d_size)
    prompts = {"a": unique_tokens("a", 76), "b": unique_tokens("a", 68)}
    params = {"a": prefilled(p, "a", prompts["a"]), "b": None}
    tokens = {}
    for id, prompt in prompts.items():
        d.submit(EngineRequest(id, prompt, N_NEW, params[id]))
        tokens[id] = ends(d, id)[id].tokens
    alone = Threaded(model)
    assert tokens == {id: alone.generate({"a": len(prompt)}, N_NEW)["a"] for id, prompt in prompts.items()}
    stats = d.stats()
    assert stats.connector.get("nixl_num_failed_transfers", 0) == failed
    assert stats.prefix_hit_tokens >= 64 * failed, "what was computed here is found again"
    assert d.drain(SECONDS)


@pytest.mark.parametrize(("p_tp", "d_tp"), [(1, 2), (2, 1)])
def test_a_state_at_unequal_tp_is_refused_by_field(start: Starter, p_tp: int, d_tp: int) -> None:
    """Nothing of such a peer is loaded, so nobody can tell it: its lease ends."""
    p = start("P", parallel=ParallelConfig(tp=p_tp), transfer=NIXL_PRODUCER | LEASE, model=STATE_HEADS)
    d = start("D", parallel=ParallelConfig(tp=d_tp), transfer=NIXL_CONSUMER, model=STATE_HEADS)
    prompt = unique_tokens("a", 20)
    d.submit(EngineRequest("a", prompt, N_NEW, prefilled(p, "a", prompt)))
    end = ends(d, "a")["a"]
    assert end.reason is FinishReason.ERROR and end.error is not None
    assert "share of layers.1.kv" in end.error and "state can't be cut" in end.error
    for engine in (d, p):
        assert engine.drain(SECONDS), engine.stats()


def test_a_state_that_nobody_holds_any_more_is_computed_again_by_policy(start: Starter) -> None:
    """P forgets before D reads: D recomputes, from no state at all."""
    p = start("P", transfer=NIXL_PRODUCER | LEASE, model=STATE)
    d = start("D", transfer=NIXL_CONSUMER | {"kv_load_failure_policy": "recompute"}, model=STATE)
    prompt = unique_tokens("a", 20)
    params = prefilled(p, "a", prompt)
    assert p.drain(SECONDS)  # the lease ended
    d.submit(EngineRequest("a", prompt, N_NEW, params))
    assert ends(d, "a")["a"].tokens == Threaded(STATE).generate({"a": 20}, N_NEW)["a"]
    assert d.stats().connector["nixl_num_failed_transfers"] == 1


def test_a_request_that_was_read_with_its_state_and_preempted_is_computed_from_its_beginning(start: Starter) -> None:
    p = start("P", transfer=NIXL_PRODUCER, model=STATE)
    d = start("D", transfer=NIXL_CONSUMER, model=STATE, num_blocks=12)
    prompts = {"a": unique_tokens("a", 45), "b": unique_tokens("b", 30)}
    references = {id: prefilled(p, id, prompt) for id, prompt in prompts.items()}
    for id, prompt in prompts.items():
        d.submit(EngineRequest(id, prompt, 24, references[id]))
    told = {id: end.tokens for id, end in ends(d, "a", "b").items()}
    assert told == Threaded(STATE).generate({id: len(prompt) for id, prompt in prompts.items()}, 24)
    assert d.drain(SECONDS) and p.drain(SECONDS)
    stats = d.stats()
    assert stats.external_tokens == 44 + 29
    assert stats.prefill_tokens > 2 + 29, "both had blocks for what was read, and one of them not for what came"
