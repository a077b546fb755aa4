"""Models with sliding windows between real engines: tokens, the bytes that travel, and nothing held.

``window``: every layer has one. ``mixed``: two cache groups of windows and one of full attention, in one pool.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest

from tests.vllm.conftest import PATIENT, Fleet
from tests.vllm.engines import BLOCK, BLOCK_BYTES, PRODUCER, STOCK_PRODUCER, Engine, ours, stock
from tests.vllm.models import LAYERS, WINDOW
from tests.vllm.prompts import prompt
from tests.vllm.test_tp import moved, nothing_held

#: within the window, at the edges of blocks and windows, several steps of prefill
LENGTHS = (5, 63, WINDOW, 95, 96, 97, 127, 300, 320, 500)
LAYER_BYTES = BLOCK_BYTES // 2

Pair = tuple[str, Engine, Engine]


@pytest.fixture(scope="module", params=["window", "mixed"])
def pair(request: pytest.FixtureRequest, fleet: Fleet) -> Iterator[Pair]:
    model = request.param
    p = fleet.engine(f"{model}-P", ours("kv_producer"), model)
    d = fleet.engine(f"{model}-D", ours("kv_consumer", kv_connector_extra_config=PATIENT), model)
    yield model, p.ready(), d.ready()
    p.close(), d.close()


def needed(model: str, length: int, hit: int = 0) -> int:
    """Bytes of the blocks that hold something which the last token of a prompt sees, behind ``hit`` tokens.

    Where of the first such block only its last token is seen, vLLM's producer has let go of it: nothing is handed over.
    """
    if length > WINDOW and (length - WINDOW) % BLOCK == BLOCK - 1:
        return 0
    last = -(-(length - 1) // BLOCK)  # the last token itself is computed again
    first = {"full_attention": 0, "sliding_attention": max(0, length - WINDOW) // BLOCK}
    return sum(max(0, last - max(first[kind], hit // BLOCK)) for kind in LAYERS[model]) * LAYER_BYTES


def local_hits(d: Engine) -> int:
    """Tokens that it found in its own prefix cache."""
    return int(d.metrics().get("vllm:prefix_cache_hits_total", 0.0))


def alone(d: Engine, prompts: list[list[int]]) -> list[list[int]]:
    """What the consumer makes of them by itself; it has forgotten them afterwards."""
    tokens = [answer["tokens"] for answer in d.generate(*({"prompt": one, "max_tokens": 40} for one in prompts))]
    assert d.ask("reset")
    return tokens


def test_only_the_window_travels(pair: Pair) -> None:
    """Forty tokens more: the window moves on from what was read to what was computed here."""
    model, p, d = pair
    prompts = [prompt(length, 60_000 + length) for length in LENGTHS]
    for one, expected in zip(prompts, alone(d, prompts), strict=True):
        before = moved(d)
        params = p.one(one, 1, params=PRODUCER)["params"]
        assert d.one(one, 40, params=params)["tokens"] == expected, (len(one), d.tail())
        assert moved(d) - before == needed(model, len(one)), len(one)
    nothing_held(p, d)


def test_behind_a_local_hit(pair: Pair) -> None:
    """What vLLM has of the prompt is not read again, in no group; how much that is, it says itself."""
    model, p, d = pair
    stem = prompt(300, 61_000)
    prompts = [stem, [*stem, *prompt(20, 61_001)], [*stem, *prompt(20, 61_001), *prompt(150, 61_002)]]
    for one, expected, least in zip(prompts, alone(d, prompts), (0, 288, 288), strict=True):
        before, found = moved(d), local_hits(d)
        params = p.one(one, 1, params=PRODUCER)["params"]
        assert d.one(one, 40, params=params)["tokens"] == expected, (len(one), d.tail())
        hit = local_hits(d) - found
        assert hit >= least and moved(d) - before == needed(model, len(one), hit), (len(one), hit)
    nothing_held(p, d)


def test_stock_reads_ours(pair: Pair, own_fleet: Fleet) -> None:
    """It ends where it is named fewer blocks than it counts on."""
    model, p, d = pair
    reader = own_fleet.engine(f"{model}-stock-D", stock("kv_consumer"), model)
    prompts = [prompt(length, 63_000 + length) for length in LENGTHS]
    expected = alone(d, prompts)
    reader.ready()
    for one, tokens in zip(prompts, expected, strict=True):
        params = p.one(one, 1, params=STOCK_PRODUCER)["params"]
        answer = reader.one(one, 40, **({"params": params} if params else {}))
        assert answer["tokens"] == tokens, (len(one), reader.tail())
    assert moved(reader) > 0
    nothing_held(p, reader)


def test_ours_reads_stock(pair: Pair, own_fleet: Fleet) -> None:
    """Stock names its null block where the window's first one is gone: then nothing is read."""
    model, _, d = pair
    source = own_fleet.engine(f"{model}-stock-P", stock("kv_producer"), model)
    prompts = [prompt(length, 64_000 + length) for length in LENGTHS]
    expected = alone(d, prompts)
    source.ready()
    for one, tokens in zip(prompts, expected, strict=True):
        before = moved(d)
        params = source.one(one, 1, params=STOCK_PRODUCER)["params"]
        assert d.one(one, 40, params=params)["tokens"] == tokens, (len(one), d.tail())
        assert moved(d) - before == needed(model, len(one)), len(one)
    nothing_held(source, d)


def test_a_burst_that_has_to_wait_for_blocks(pair: Pair) -> None:
    _, p, d = pair
    prompts = [prompt(40 + 31 * k, 62_000 + k) for k in range(16)]
    expected = alone(d, prompts)
    first = p.generate(*({"prompt": one, "max_tokens": 1, "params": PRODUCER} for one in prompts))
    answers = d.generate(
        *({"prompt": one, "max_tokens": 40, "params": told["params"]} for one, told in zip(prompts, first, strict=True))
    )
    assert [answer["tokens"] for answer in answers] == expected
    assert all(one != other for one, other in pairwise(expected))
    nothing_held(p, d)
