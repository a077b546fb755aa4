"""Models and block sizes other than the usual ones, between real engines: tokens, and nothing held."""

from __future__ import annotations

import pytest

from tests.vllm.conftest import QUICK, Fleet
from tests.vllm.engines import BLOCK, PRODUCER, Engine, ours
from tests.vllm.prompts import prompt

LENGTHS = (5, 100, 300)


def hand_over(p: Engine, d: Engine, seed: int) -> None:
    """The consumer computes each prompt alone first, forgets it, and then reads it."""
    p.ready(120), d.ready(120)
    for length in LENGTHS:
        tokens = prompt(length, seed + length)
        expected = d.one(tokens, 6)["tokens"]
        assert d.ask("reset")
        before = d.metrics().get("vllm:nixl_bytes_transferred_sum", 0.0)
        params = p.one(tokens, 1, params=PRODUCER)["params"]
        assert d.one(tokens, 6, params=params)["tokens"] == expected, d.tail()
        assert d.metrics()["vllm:nixl_bytes_transferred_sum"] > before
    for engine in (p, d):
        state = engine.idle()
        assert state["free"] == state["total"] - 1 and not state["owed"]


def test_blocks_of_another_size_on_either_side(own_fleet: Fleet, producer: Engine, consumer: Engine) -> None:
    assert BLOCK == 32
    small = own_fleet.engine("small", ours("kv_both", kv_connector_extra_config=QUICK), block_size=16)
    hand_over(producer, small, 50_000)
    hand_over(small, consumer, 51_000)


@pytest.mark.parametrize("model", ["mla", "window"])
def test_another_model(own_fleet: Fleet, model: str) -> None:
    p = own_fleet.engine(f"{model}-P", ours("kv_producer"), model)
    d = own_fleet.engine(f"{model}-D", ours("kv_consumer", kv_connector_extra_config=QUICK), model)
    hand_over(p, d, 52_000)
