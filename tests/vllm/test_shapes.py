"""Models and block sizes other than the usual ones, between real engines: tokens, and nothing held."""

from __future__ import annotations

import pytest

from tests.vllm import pcp
from tests.vllm.conftest import PATIENT, Fleet
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


def test_blocks_of_another_size_are_no_answer_where_the_kernel_lays_them_out(
    own_fleet: Fleet, producer: Engine
) -> None:
    """Byte for byte the KV of 32 tokens is no half of a block of 64 there: tokens would be wrong."""
    assert BLOCK == 32  # the CPU kernel for grouped queries wants a multiple of it
    d = own_fleet.engine("large", ours("kv_consumer", kv_connector_extra_config=PATIENT), block_size=64)
    tokens = prompt(100, 50_000)
    params = producer.ready().one(tokens, 1, params=PRODUCER)["params"]
    assert d.ready().one(tokens, 6, params=params)["reason"] == "error"
    assert "block size: ours 64, theirs 32 (the CPU_ATTN kernel" in d.said()
    assert d.idle()["free"] == d.state()["total"] - 1


@pytest.mark.parametrize(("of_p", "of_d"), [(16, 32), (32, 16)])
def test_mla(own_fleet: Fleet, of_p: int, of_d: int) -> None:
    sound = {"compilation_config": pcp.ARGUMENTS["compilation_config"]}
    p = own_fleet.engine("mla-P", ours("kv_producer"), "mla", **sound, block_size=of_p)
    d = own_fleet.engine(
        "mla-D", ours("kv_consumer", kv_connector_extra_config=PATIENT), "mla", **sound, block_size=of_d
    )
    hand_over(p, d, 52_000)


class Strided(Engine):
    main = "tests.vllm.strided"


@pytest.mark.parametrize(("of_p", "of_d"), [("BLHNC", "BLHNC"), ("BLHNC", "LBHNC"), ("LBHNC", "BLHNC")])
def test_pools_that_are_block_first(own_fleet: Fleet, of_p: str, of_d: str) -> None:
    """All layers of a block are neighbours on one side or on both."""
    sound = {"compilation_config": pcp.ARGUMENTS["compilation_config"]}
    p, d = (
        own_fleet.engine(
            f"{layout}-{role}",
            ours(role, kv_connector_extra_config=PATIENT),
            "mla",
            Strided,
            **sound,
            block_size=pcp.BLOCK,
            env={"VLLM_KV_CACHE_LAYOUT": layout},
        )
        for role, layout in (("kv_producer", of_p), ("kv_consumer", of_d))
    )
    hand_over(p, d, 54_000)
    for engine, layout in ((p, of_p), (d, of_d)):
        apart = engine.ask("value", expression="child._caches()[0].stride(0) / child._caches()[0][0].numel()")
        assert apart == ("2.0" if layout == "BLHNC" else "1.0"), "blocks are as far apart as the layout says"
    told = d.metrics()
    parts, nbytes = told["vllm:nixl_num_descriptors_sum"], told["vllm:nixl_bytes_transferred_sum"]
    block = float(d.ask("value", expression="sum(cache[0].nbytes for cache in child._caches())"))
    assert (nbytes / parts >= block) is (of_p == of_d == "BLHNC"), "a block of both layers is one part, or it is two"
