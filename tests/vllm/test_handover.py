"""Prefill here, decode there: the tokens of a single engine, the producer's bytes, and nothing left held."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.vllm.conftest import Fleet
from tests.vllm.engines import BLOCK, PRODUCER, STOCK_PRODUCER, Engine, ours, stock
from tests.vllm.prompts import prompt, twenty


def hand_over(p: Engine, d: Engine, prompts: list[list[int]], asked: dict[str, object]) -> list[dict[str, object]]:
    """Each prompt through both engines; checks the bytes on the way."""
    answers = []
    for index, one in enumerate(prompts):
        first = p.one(one, 1, params=asked)
        params = first["params"]
        full = (len(one) - 1) // BLOCK
        there = p.ask("digest", blocks=params["remote_block_ids"][0], count=full)
        answer = d.one(one, params=params, id=f"h{p.process.pid}-{index}")
        assert answer["reason"] == "length"
        assert first["tokens"] == answer["tokens"][:1]
        assert d.ask("digest", id=answer["id"], count=full) == there
        answers.append(answer)
    return answers


def moved(d: Engine) -> float:
    return d.metrics().get("vllm:nixl_bytes_transferred_sum", 0.0)


def test_twenty_prompts_give_the_single_engines_tokens(producer: Engine, consumer: Engine, alone: Engine) -> None:
    for engine in (producer, consumer, alone):
        engine.ready()
    before, hits = moved(consumer), consumer.metrics().get("vllm:external_prefix_cache_hits_total", 0.0)
    prompts = twenty()
    answers = hand_over(producer, consumer, prompts, PRODUCER)
    expected = [alone.one(one)["tokens"] for one in prompts]
    assert [answer["tokens"] for answer in answers] == expected
    assert moved(consumer) > before
    assert consumer.metrics()["vllm:external_prefix_cache_hits_total"] > hits
    for engine in (producer, consumer):
        state = engine.idle()
        assert state["free"] == state["total"] - 1  # vLLM keeps one block to itself
        assert not state["owed"]


def test_a_burst_is_read_and_freed(producer: Engine, consumer: Engine, alone: Engine) -> None:
    prompts = [prompt(40 + 17 * k, 1000 + k) for k in range(16)]
    first = producer.ready().generate(*({"prompt": p, "max_tokens": 1, "params": PRODUCER} for p in prompts))
    answers = consumer.ready().generate(
        *({"prompt": p, "max_tokens": 6, "params": one["params"]} for p, one in zip(prompts, first, strict=True))
    )
    for one, answer in zip(prompts, answers, strict=True):
        assert answer["tokens"] == alone.ready().one(one, 6)["tokens"]
    assert producer.idle()["free"] == producer.state()["total"] - 1


def test_both_engines_as_kv_both(own_fleet: Fleet, alone: Engine) -> None:
    a, b = own_fleet.engine("A", ours("kv_both")), own_fleet.engine("B", ours("kv_both"))
    a.ready(), b.ready()
    prompts = [prompt(n, 50 + n) for n in (5, 70, 300)]
    expected = [alone.ready().one(one)["tokens"] for one in prompts]
    assert [x["tokens"] for x in hand_over(a, b, prompts, PRODUCER)] == expected
    for engine in (a, b):
        assert engine.ask("reset")
    assert [x["tokens"] for x in hand_over(b, a, prompts, PRODUCER)] == expected
    assert moved(a) > 0 and moved(b) > 0
    assert not a.idle()["owed"] and not b.idle()["owed"]


def test_with_the_fleets_key(own_fleet: Fleet, consumer: Engine, alone: Engine, tmp_path: Path) -> None:
    """Who has it reads; who has not fails, and learns why."""
    key = tmp_path / "fleet.key"
    key.touch(0o600)
    key.write_text("5f" * 32)
    extra = {"kvconn": {"key_file": str(key), "require_auth": True, "allow": ["127.0.0.0/8"]}}
    p = own_fleet.engine("key-P", ours("kv_producer", kv_connector_extra_config=extra))
    d = own_fleet.engine("key-D", ours("kv_consumer", kv_connector_extra_config=extra))
    p.ready(), d.ready()
    tokens = prompt(100, 60)
    (answer,) = hand_over(p, d, [tokens], PRODUCER)
    assert answer["tokens"] == alone.ready().one(tokens)["tokens"] and moved(d) > 0
    assert not p.idle()["owed"]
    params = p.one(tokens, 1, params=PRODUCER)["params"]
    assert consumer.ready().one(tokens, params=params)["reason"] == "error"
    assert "it wants the fleet's key" in consumer.said()


# --- rolling upgrade: one side ours, the other stock; the same checks, and what nothing can prove is counted -------


@pytest.fixture(scope="module")
def stock_d(fleet: Fleet) -> Iterator[Engine]:
    engine = fleet.engine("stock-D", stock("kv_consumer"))
    yield engine
    engine.close()  # its idle agent takes a core


@pytest.fixture(scope="module")
def stock_p(fleet: Fleet) -> Iterator[Engine]:
    engine = fleet.engine("stock-P", stock("kv_producer"))
    yield engine
    engine.close()  # its idle agent takes a core


def test_ours_is_read_by_both_kinds(
    producer: Engine, consumer: Engine, stock_d: Engine, stock_p: Engine, alone: Engine
) -> None:
    for offset, d in ((0, stock_d), (500, consumer)):
        prompts = [prompt(n, 200 + offset + n) for n in (5, 70, 300)]
        answers = hand_over(producer.ready(), d.ready(), prompts, STOCK_PRODUCER)
        assert [x["tokens"] for x in answers] == [alone.ready().one(one)["tokens"] for one in prompts]
        assert producer.idle()["free"] == producer.state()["total"] - 1
        assert moved(d) > 0


def test_stock_is_read_by_ours_and_counted(consumer: Engine, stock_p: Engine, alone: Engine) -> None:
    before = consumer.ready().metrics().get("kvconn_unfenced_reads_total", 0.0)
    prompts = [prompt(n, 900 + n) for n in (5, 70, 300)]
    answers = hand_over(stock_p.ready(), consumer, prompts, STOCK_PRODUCER)
    assert [x["tokens"] for x in answers] == [alone.ready().one(one)["tokens"] for one in prompts]
    assert stock_p.idle()["free"] == stock_p.state()["total"] - 1
    assert consumer.metrics()["kvconn_unfenced_reads_total"] == before + len(prompts)
    assert "has no fences" in consumer.said()
