"""TP, PP and DCP change where things are computed and kept, and nothing else: tokens and KV are one rank's."""

from __future__ import annotations

import pytest
import torch

from kvconn.config import ParallelConfig
from kvconn.engine.config import EngineConfig, ModelSpec, check
from kvconn.engine.content import ContentAddressed
from kvconn.engine.portion import Members, Portion, held, slots
from kvconn.engine.scheduler import Scheduled
from kvconn.errors import ConfigError
from kvconn.geometry import HeadShare, TokenShare
from tests.engine.driving import unique_tokens
from tests.engine.threads import Threaded
from tests.engine.wrong import first_wrong

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES = {"n_layers": 3, "d_model": 32, "n_heads": 4, "d_ff": 64}
LATENT = ModelSpec(**SIZES)
GROUPED = ModelSpec(kv="gqa", n_kv_heads=2, **SIZES)
CONTENT = ModelSpec(mode="content-addressed", **SIZES)
CONTENT_HEADS = ModelSpec(mode="content-addressed", kv="gqa", n_kv_heads=2, **SIZES)
WINDOW = ModelSpec(window=11, **SIZES)
WINDOW_HEADS = ModelSpec(kv="gqa", n_kv_heads=2, window=11, **SIZES)
#: one layer of each kind: everything, a window, a state
STATE = ModelSpec(window=11, state=8, **SIZES)
STATE_HEADS = ModelSpec(kv="gqa", n_kv_heads=2, state=8, **SIZES)
CONTENT_STATE = ModelSpec(mode="content-addressed", state=8, **SIZES)
CONTENT_STATE_HEADS = ModelSpec(mode="content-addressed", kv="gqa", n_kv_heads=2, window=11, state=8, **SIZES)
CONTENT_WINDOW = ModelSpec(mode="content-addressed", kv="gqa", n_kv_heads=2, window=11, **SIZES)
MODELS = {
    "latent": LATENT,
    "gqa": GROUPED,
    "content": CONTENT,
    "content-gqa": CONTENT_HEADS,
    "window": WINDOW,
    "window-gqa": WINDOW_HEADS,
    "content-window": CONTENT_WINDOW,
    "state": STATE,
    "state-gqa": STATE_HEADS,
    "content-state": CONTENT_STATE,
    "content-state-gqa": CONTENT_STATE_HEADS,
}

ANY_KV = {
    "tp2": ParallelConfig(tp=2),
    "tp4": ParallelConfig(tp=4),  # gqa: two copies of each KV head
    "pp2": ParallelConfig(pp=2),
    "pp3 tp2": ParallelConfig(pp=3, tp=2),
    "pcp2 tp2": ParallelConfig(pcp=2, tp=2),
    "pp2 pcp3": ParallelConfig(pp=2, pcp=3),
}
SHARED_TOKENS = {
    "tp2 dcp2": ParallelConfig(tp=2, dcp=2),
    "tp4 dcp2": ParallelConfig(tp=4, dcp=2),
    "tp4 dcp4 whole blocks": ParallelConfig(tp=4, dcp=4, dcp_interleave=8),
    "pp2 tp2 dcp2 runs of 2": ParallelConfig(pp=2, tp=2, dcp=2, dcp_interleave=2),
    "pcp2 dcp2": ParallelConfig(pcp=2, dcp=2),
    "pcp3 dcp3 whole blocks": ParallelConfig(pcp=3, dcp=3, dcp_interleave=8),
    "pp2 pcp2 dcp2": ParallelConfig(pp=2, pcp=2, dcp=2, dcp_interleave=4),
}
WINDOWS = "pp3 tp2", "pcp2 tp2"
PAIRS = (
    [(model, name) for model in ("latent", "gqa", "content", "content-gqa") for name in ANY_KV]
    + [(model, name) for model in ("window-gqa", "content-window") for name in WINDOWS]
    + [(model, name) for model in ("state", "content-state") for name in ("tp2", "pp3 tp2", "pp2 pcp3")]
    + [(model, name) for model in ("state-gqa", "content-state-gqa") for name in ("tp4", "pp2", "pcp2 tp2")]
    + [(model, name) for model in ("latent", "content") for name in SHARED_TOKENS]
    + [("window", "tp2 dcp2"), ("window", "pp2 pcp2 dcp2")]
)
#: prompts of one token leave ranks idle; 16 tokens a step cut prompts into chunks beside decoding requests
LENGTHS = {"a": 1, "b": 13, "c": 37, "d": 16, "e": 50}
N_NEW = 6


@pytest.fixture(scope="module")
def alone() -> dict[str, tuple[Threaded, dict[str, tuple[int, ...]]]]:
    """Each model on one rank, and its tokens."""
    engines = {name: Threaded(model) for name, model in MODELS.items()}
    return {name: (engine, engine.generate(LENGTHS, N_NEW)) for name, engine in engines.items()}


@pytest.mark.parametrize(("model", "topology"), PAIRS, ids=[" ".join(pair) for pair in PAIRS])
def test_tokens_and_kv_are_those_of_one_rank(
    alone: dict[str, tuple[Threaded, dict[str, tuple[int, ...]]]], model: str, topology: str
) -> None:
    one, tokens = alone[model]
    engine = Threaded(MODELS[model], (ANY_KV | SHARED_TOKENS)[topology])
    assert engine.generate(LENGTHS, N_NEW) == tokens
    assert engine.mixed > 3
    n = LENGTHS["e"] + N_NEW - 1
    if "content" in model:
        assert torch.equal(engine.kv("e", n).view(torch.int64), one.kv("e", n).view(torch.int64))
    else:
        torch.testing.assert_close(engine.kv("e", n), one.kv("e", n), rtol=0, atol=1e-10)
        assert min(engine.min_margin, one.min_margin) > MODELS[model].margin_floor, "equal tokens must mean equal KV"


class TestPortions:
    def test_stages_hold_all_layers_once_and_tp_ranks_all_heads(self) -> None:
        parallel = ParallelConfig(pp=2, tp=2)
        spec = ModelSpec(kv="gqa", n_heads=8, n_kv_heads=4, n_layers=3)
        portions = [Portion.of(spec, parallel, rank) for rank in range(4)]
        assert [(p.first_layer, p.n_layers) for p in portions] == [(0, 2), (0, 2), (2, 1), (2, 1)]
        assert [(p.first_head, p.n_heads) for p in portions] == [(0, 4), (4, 4)] * 2
        assert [p.kv for p in portions] == [HeadShare(0, 2), HeadShare(2, 2)] * 2
        assert [(p.first_stage, p.last_stage) for p in portions] == [(True, False)] * 2 + [(False, True)] * 2

    def test_fewer_kv_heads_than_ranks_are_copied_to_neighbours(self) -> None:
        spec = ModelSpec(kv="gqa", n_heads=8, n_kv_heads=2)
        portions = [Portion.of(spec, ParallelConfig(tp=4), rank) for rank in range(4)]
        assert [(p.kv.first, p.kv.count) for p in portions] == [(0, 1), (0, 1), (1, 1), (1, 1)]

    @pytest.mark.parametrize(
        ("share", "positions", "places"),
        [
            (TokenShare(2, 0, 1), [0, 2, 4, 6, 8, 10], [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1)]),
            (TokenShare(2, 1, 2), [2, 3, 6, 7, 10, 11], [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1)]),
            (TokenShare(3, 2, 4), [8, 9, 10, 11], [(0, 0), (0, 1), (0, 2), (0, 3)]),
        ],
    )
    def test_tokens_are_dealt_in_turns_and_lie_in_order(
        self, share: TokenShare, positions: list[int], places: list[tuple[int, int]]
    ) -> None:
        here = held(share, 12)
        assert here.tolist() == positions
        index, row = slots(share, here, 4)
        assert list(zip(index.tolist(), row.tolist(), strict=True)) == places

    def test_who_works_with_whom(self) -> None:
        parallel = ParallelConfig(pp=2, pcp=2, tp=2)
        assert Members.of(parallel, 5) == Members(
            tp=(4, 5), pcp=(5, 7), stages=(1, 5), shards=(5,), holders=(0, 1, 4, 5)
        )
        assert Members.of(ParallelConfig(tp=4, dcp=2), 3).shards == (2, 3)
        sharded = Members.of(ParallelConfig(pp=2, pcp=2, dcp=2), 1)
        assert (sharded.shards, sharded.holders) == ((0, 1), (0, 1, 2, 3))


@pytest.mark.parametrize(
    ("model", "parallel"), [(CONTENT_HEADS, ParallelConfig(tp=4)), (CONTENT, ParallelConfig(tp=4, dcp=2))]
)
@pytest.mark.parametrize("rank", range(4))
def test_a_wrong_byte_on_any_rank_changes_the_token_copies_included(
    model: ModelSpec, parallel: ParallelConfig, rank: int
) -> None:
    tokens = []
    for flip in (False, True):
        engine = Threaded(model, parallel, num_blocks=8, max_num_batched_tokens=64)
        engine.generate({"x": 24}, 1)
        if flip:
            engine.models[rank].caches[1][engine.tables["x"][0][0], 0, 3].view(torch.uint8)[5] ^= 4
        tokens.append(engine.generate({"x": 24}, 2)["x"])
        hits = engine.scheduler.prefix_hit_tokens
        assert hits, "the second run reads what the first one wrote"
    assert tokens[0] != tokens[1]


def test_a_rank_names_the_first_wrong_row_of_its_own() -> None:
    engine = Threaded(CONTENT, ParallelConfig(pp=3, tp=2, dcp=2), max_num_batched_tokens=64)
    engine.generate({"x": 40}, 1)
    share = Scheduled("x", 0, 40, 0, (), engine.tables["x"], sample=False, decode=False)
    tokens = unique_tokens("x", 40)
    for rank, model in enumerate(engine.models):
        assert isinstance(model, ContentAddressed)
        assert first_wrong(model, share, tokens) is None
        model.caches[0][share.blocks[1], 0, 2] = 0.0
        layer, position = rank // 2, 16 + 2 * 2 + rank % 2
        assert first_wrong(model, share, tokens) == (layer, share.blocks[1], position)


@pytest.mark.parametrize(
    ("model", "parallel", "problems"),
    [
        (LATENT, ParallelConfig(tp=3), ["parallel.tp: expected a size that 4 query heads can be divided by, got 3"]),
        (
            ModelSpec(kv="gqa", n_heads=12, n_kv_heads=3, d_ff=64),
            ParallelConfig(tp=2),
            ["parallel.tp: expected a size that 12 query heads and 3 KV heads can be divided by, got 2"],
        ),
        (ModelSpec(n_heads=6, d_ff=64), ParallelConfig(tp=3), ["parallel.tp: expected a divisor of d_ff 64, got 3"]),
        (LATENT, ParallelConfig(pp=4), ["parallel.pp: expected at most one stage per layer, 3, got 4"]),
        (
            GROUPED,
            ParallelConfig(tp=2, dcp=2),
            ["parallel.dcp: only a latent cache is shared by tokens, got 2 with kv 'gqa'"],
        ),
        (
            ModelSpec(state=8, **SIZES),
            ParallelConfig(tp=2, dcp=2),
            ["parallel.dcp: a state is not shared by tokens, got 2 with model.state"],
        ),
        (
            ModelSpec(state=8, window=4, n_layers=2),
            ParallelConfig(),
            ["model.n_layers: expected a layer of each of the 3 kinds, got window 4 and state 8 with 2"],
        ),
        (LATENT, ParallelConfig(tp=4, dcp=3), ["parallel.dcp: expected a divisor of tp 4, got 3"]),
        (
            LATENT,
            ParallelConfig(pcp=4, dcp=2),
            ["parallel.dcp: with pcp 4 expected tp 1 and dcp 1 or 4, got dcp 2 with tp 1"],
        ),
        (
            LATENT,
            ParallelConfig(pcp=2, tp=2, dcp=2),
            ["parallel.dcp: with pcp 2 expected tp 1 and dcp 1 or 2, got dcp 2 with tp 2"],
        ),
        (
            LATENT,
            ParallelConfig(tp=2, dcp=2, dcp_interleave=3),
            ["parallel.dcp_interleave: expected a divisor of block_size 16, got 3"],
        ),
        (
            LATENT,
            ParallelConfig(tp=0, pp=0, dcp=-1),
            [f"parallel.{name}: expected at least 1, got {got}" for name, got in (("tp", 0), ("pp", 0), ("dcp", -1))],
        ),
    ],
)
def test_sizes_that_cannot_be_are_refused_by_field(
    model: ModelSpec, parallel: ParallelConfig, problems: list[str]
) -> None:
    with pytest.raises(ConfigError) as refused:
        check(EngineConfig(name="E", model=model, parallel=parallel))
    assert list(refused.value.problems) == [f"engine E: {problem}" for problem in problems]
