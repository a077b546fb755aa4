"""Prefill and decode engines of different shapes, their processes and real NIXL: every token is one engine's alone.

The content-addressed model hashes each byte of KV that it reads into its next token, on every rank. The transformer is
there once, to see that attention reads what came.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

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
REAL = ModelSpec(n_layers=4, d_model=32, d_ff=64, n_heads=4, n_kv_heads=2, kv="gqa", window=11)
#: P gives blocks back while it computes a prompt
CHUNKS = {"max_num_batched_tokens": 16}
#: beginnings of one prompt, longest first: of the second D has a block already
LENGTHS = {"a": 45, "b": 19, "c": 3}
N_NEW = 4

#: model, producer, consumer, and how their engines differ otherwise
PAIRS: dict[str, tuple[ModelSpec, ParallelConfig, ParallelConfig, dict[str, Any], dict[str, Any]]] = {
    "tp 1 to 2": (HEADS, ParallelConfig(), ParallelConfig(tp=2), {}, {}),
    "tp 2 to 1": (HEADS, ParallelConfig(tp=2), ParallelConfig(), {}, {}),
    "tp 2 to 4, copies of heads": (COPIES, ParallelConfig(tp=2), ParallelConfig(tp=4), {}, {}),
    "latent, tp 2 to 1": (LATENT, ParallelConfig(tp=2), ParallelConfig(), {}, {}),
    "latent, tp 1 to 2": (LATENT, ParallelConfig(), ParallelConfig(tp=2), {}, {}),
    "pp 2 to 1": (HEADS, ParallelConfig(pp=2), ParallelConfig(), {}, {}),
    "pcp 2 dcp 2 to 1": (LATENT, ParallelConfig(pcp=2, dcp=2), ParallelConfig(), {}, {}),
    "dcp 1 to 2": (LATENT, ParallelConfig(), ParallelConfig(tp=2, dcp=2), {}, {}),
    "window, tp 1 to 2": (WINDOW, ParallelConfig(), ParallelConfig(tp=2), CHUNKS, {}),
    "window, pp 2 to 1, blocks 8 to 16": (WINDOW, ParallelConfig(pp=2), ParallelConfig(), CHUNKS, {"block_size": 16}),
    "transformer, tp 2 to pp 2": (REAL, ParallelConfig(tp=2), ParallelConfig(pp=2), {}, {}),
    "blocks 16 to 32": (HEADS, ParallelConfig(), ParallelConfig(), {"block_size": 16}, {"block_size": 32}),
    "blocks 32 to 16": (HEADS, ParallelConfig(), ParallelConfig(), {"block_size": 32}, {"block_size": 16}),
}


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
    assert stats.external_tokens >= LENGTHS["a"] + LENGTHS["c"]
    assert stats.connector.get("nixl_num_failed_transfers", 0) == 0
    assert p.stats().connector.get("nixl_num_kv_expired_reqs", 0) == 0
