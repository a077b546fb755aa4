"""Our OffloadingConnector in real engines on the CPU platform: stored, prompted again, loaded, the same tokens.

Before a prompt comes again the engine's prefix cache is reset and its blocks are overwritten, so that right tokens can
only come from what was loaded; the counters and the digest of the KV say the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.conftest import PATIENT, Fleet
from tests.vllm.engines import BLOCK, BLOCK_BYTES, PRODUCER, Engine, ours
from tests.vllm.prompts import prompt

#: block hashes that another process computes too
SEED = {"PYTHONHASHSEED": "0"}
MULTIS = pytest.mark.parametrize("module", ["kvconn.vllm", None], ids=["our Multi", "stock Multi"])


def offload(**extra: Any) -> dict[str, Any]:
    return {
        "kv_connector": "OffloadingConnector",
        "kv_connector_module_path": "kvconn.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"cpu_bytes_to_use": 64 << 20, **extra},
    }


def on_disk(where: Path) -> dict[str, Any]:
    """Host memory of sixteen blocks, and files; patience with a busy machine's disk."""
    tier = {"type": "fs", "root_dir": str(where), "max_bytes": 1 << 30}
    return offload(
        spec_name="TieringOffloadingSpec",
        cpu_bytes_to_use=16 * BLOCK_BYTES,
        secondary_tiers=[tier],
        kvconn={"lookup": 60.0},
    )


def multi(role: str, module: str | None, *children: dict[str, Any]) -> dict[str, Any]:
    config = {
        "kv_connector": "MultiConnector",
        "kv_role": role,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": list(children)},
    }
    return config if module is None else {**config, "kv_connector_module_path": module}


def count(engine: Engine, name: str) -> float:
    return engine.metrics().get(name, 0.0)


def loaded(engine: Engine) -> float:
    """Blocks that workers copied back."""
    return count(engine, "vllm:kv_offload_load_blocks_total")


def forget(engine: Engine) -> None:
    """The prefix cache, and every byte of the KV cache."""
    engine.idle()
    assert engine.ask("reset")
    engine.ask("overwrite")


def again(engine: Engine, tokens: list[int], expected: list[int], **more: Any) -> dict[str, Any]:
    """The prompt, forgotten, once more: the same tokens out of every full block loaded."""
    full = (len(tokens) - 1) // BLOCK
    first = engine.one(tokens, len(expected), id=f"first-{len(tokens)}", **more)
    there = engine.ask("digest", id=first["id"], count=full)
    forget(engine)
    assert engine.ask("digest", id=first["id"], count=full) != there
    before = loaded(engine)
    second = engine.one(tokens, len(expected), id=f"second-{len(tokens)}", **more)
    assert engine.ask("digest", id=second["id"], count=full) == there
    assert first["tokens"] == second["tokens"] == expected
    assert loaded(engine) == before + full and second["cached"] == full * BLOCK
    return second


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("disk")


@pytest.fixture(scope="module")
def before(fleet: Fleet, disk: Path) -> Iterator[Engine]:
    """An engine that stores in files too."""
    engine = fleet.engine("offload-before", on_disk(disk), env=SEED)
    yield engine
    engine.close()


def test_a_prompt_that_comes_again_is_loaded(before: Engine, alone: Engine) -> None:
    for length in (2 * BLOCK + 1, 200, 300):  # the last is more than max_num_batched_tokens
        tokens = prompt(length, 20_000 + length)
        again(before.ready(), tokens, alone.ready().one(tokens)["tokens"])
    assert count(before, "kvconn_offload_loads_lost_total") == 0
    state = before.idle()
    assert state["free"] == state["total"] - 1 and not state["owed"]


def test_prompts_that_share_a_stem_load_the_stem(before: Engine, alone: Engine) -> None:
    """One burst, several loads under way at once, each followed by a forward of its own."""
    stem = prompt(4 * BLOCK, 21_000)
    before.ready().one(stem, 1)
    forget(before)
    prompts = [stem + prompt(n, 21_001 + n) for n in (5, BLOCK, 90)]
    was = loaded(before)
    answers = before.generate(*({"prompt": one, "max_tokens": 6} for one in prompts))
    assert [answer["tokens"] for answer in answers] == [alone.ready().one(one, 6)["tokens"] for one in prompts]
    assert loaded(before) >= was + 4
    assert not before.idle()["owed"]


def test_a_new_engine_loads_what_another_left_in_files(
    before: Engine, own_fleet: Fleet, disk: Path, alone: Engine
) -> None:
    prompts = [prompt(length, 22_000 + length) for length in (100, 300)]
    expected = [before.ready().one(one)["tokens"] for one in prompts]
    assert expected == [alone.ready().one(one)["tokens"] for one in prompts]
    blocks = sum((len(one) - 1) // BLOCK for one in prompts)
    before.idle()
    after = own_fleet.engine("offload-after", on_disk(disk), env=SEED).ready()
    for one, tokens in zip(prompts, expected, strict=True):
        answer = after.one(one)
        assert answer["tokens"] == tokens and answer["cached"] == (len(one) - 1) // BLOCK * BLOCK
    after.idle()
    assert count(after, "kvconn_offload_blocks_fetched_total") == loaded(after) == blocks


# --- below both MultiConnectors, and on both sides of a hand-over ---------------------------------------------------


@MULTIS
def test_a_producer_loads_what_it_stored_and_is_read(
    module: str | None, own_fleet: Fleet, consumer: Engine, alone: Engine
) -> None:
    p = own_fleet.engine("offload-P", multi("kv_producer", module, ours("kv_producer"), offload())).ready()
    tokens = prompt(200, 23_000)
    expected = alone.ready().one(tokens)["tokens"]
    again(p, tokens, expected)
    forget(p)
    before = loaded(p)
    first = p.one(tokens, 1, params=PRODUCER)
    assert loaded(p) == before + 6  # of the 200 tokens, 192 in full blocks
    assert consumer.ready().ask("reset")
    answer = consumer.one(tokens, params=first["params"], id=f"offload-{module}")
    assert answer["tokens"] == expected
    assert consumer.ask("digest", id=answer["id"], count=6) == p.ask("digest", id=first["id"], count=6)
    state = p.idle()
    assert state["free"] == state["total"] - 1 and not state["owed"]


#: blocks loaded and blocks read from the producer: four full ones, the same again, 70 tokens more, the same again.
#: Offloading has whole blocks, and leaves the engine at least one token to compute. A request is loaded by several
#: children below ours, by one below stock.
SHARED = {"kvconn.vllm": [(0, 4), (3, 1), (4, 3), (6, 1)], None: [(0, 4), (3, 0), (4, 0), (6, 0)]}


@MULTIS
def test_a_consumer_stores_what_it_read_and_loads_it(
    module: str | None, own_fleet: Fleet, producer: Engine, alone: Engine
) -> None:
    """What it has is not read from the producer, who lets go all the same."""
    nixl = ours("kv_consumer", kv_connector_extra_config=PATIENT)
    d = own_fleet.engine("offload-D", multi("kv_consumer", module, offload(), nixl)).ready()
    stem = prompt(4 * BLOCK, 24_000)
    longer = stem + prompt(70, 24_001)
    moved = []
    for tokens in (stem, stem, longer, longer):
        first = producer.ready().one(tokens, 1, params=PRODUCER)
        before, read = loaded(d), count(d, "vllm:nixl_bytes_transferred_sum")
        answer = d.one(tokens, params=first["params"])
        assert answer["tokens"] == alone.ready().one(tokens)["tokens"]
        producer.freed(first["id"])
        forget(d)
        moved.append((loaded(d) - before, (count(d, "vllm:nixl_bytes_transferred_sum") - read) / BLOCK_BYTES))
    assert moved == SHARED[module]
    state = d.idle()
    assert state["free"] == state["total"] - 1 and not state["owed"]
