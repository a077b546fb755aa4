"""Tensor parallelism in real engines: 1 to 2, 2 to 1 and 2 to 2 ranks give the single engine's tokens."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.vllm.conftest import PATIENT, Fleet
from tests.vllm.engines import BLOCK_BYTES, PRODUCER, Engine, ours
from tests.vllm.prompts import prompt

LENGTHS = (5, 100, 300)


@pytest.fixture(scope="module")
def producer_of_two(fleet: Fleet) -> Iterator[Engine]:
    engine = fleet.engine("tp2-P", ours("kv_producer"), tensor_parallel_size=2)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def consumer_of_two(fleet: Fleet) -> Iterator[Engine]:
    engine = fleet.engine("tp2-D", ours("kv_consumer", kv_connector_extra_config=PATIENT), tensor_parallel_size=2)
    yield engine
    engine.close()


def moved(d: Engine) -> float:
    """Bytes that its ranks read."""
    return d.metrics().get("vllm:nixl_bytes_transferred_sum", 0.0)


def hand_over(p: Engine, d: Engine, alone: Engine, seed: int) -> None:
    """Tokens, that KV moved, and that nothing is held on either side."""
    p.ready(), d.ready()
    before = moved(d)
    blocks = 0
    for length in LENGTHS:
        tokens = prompt(length, seed + length)
        first = p.one(tokens, 1, params=PRODUCER)
        blocks += len(first["params"]["remote_block_ids"][0])
        assert d.one(tokens, 6, params=first["params"])["tokens"] == alone.ready().one(tokens, 6)["tokens"], d.tail()
    assert moved(d) - before == blocks * BLOCK_BYTES  # every byte once, whoever read it
    nothing_held(p, d)


def nothing_held(*engines: Engine) -> None:
    for engine in engines:
        state = engine.idle()
        assert state["free"] == state["total"] - 1 and not state["owed"]


def test_one_to_two(producer: Engine, consumer_of_two: Engine, alone: Engine) -> None:
    hand_over(producer, consumer_of_two, alone, 40_000)


def test_two_to_one(producer_of_two: Engine, consumer: Engine, alone: Engine) -> None:
    hand_over(producer_of_two, consumer, alone, 41_000)


def test_two_to_two(producer_of_two: Engine, consumer_of_two: Engine, alone: Engine) -> None:
    hand_over(producer_of_two, consumer_of_two, alone, 42_000)
