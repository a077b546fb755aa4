"""Attention over parts of a context and over a window of it, against softmax written out."""

from __future__ import annotations

import math

import pytest
import torch

from kvconn.config import ParallelConfig
from kvconn.engine.attention import Attention, attend, make_attention, merge
from kvconn.engine.config import ModelSpec
from kvconn.engine.portion import Portion, held
from kvconn.geometry import TokenShare

KINDS = {kv: ModelSpec(kv=kv, n_heads=4, n_kv_heads=2) for kv in ("latent", "gqa")}  # type: ignore[arg-type]
N = 13


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> tuple[Attention, torch.Tensor, torch.Tensor]:
    """A kind, the queries of the last 6 of 13 tokens, and the cached rows of all."""
    spec = KINDS[request.param]
    generator = torch.Generator().manual_seed(3)
    width = spec.channels if spec.kv == "latent" else spec.head_dim
    heads = spec.cache_heads

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    attention = make_attention(spec, Portion.of(spec, ParallelConfig(), 0))
    return attention, draw(6, heads, spec.n_heads // heads, width), draw(N, heads, spec.channels)


def written_out(kind: Attention, queries: torch.Tensor, rows: torch.Tensor, window: int | None) -> torch.Tensor:
    keys, values = kind.keys_values(rows)
    answers = []
    for index, query in enumerate(queries):
        position = N - len(queries) + index
        seen = slice(0 if window is None else max(0, position - window + 1), position + 1)
        heads = []
        for head in range(rows.shape[1]):
            scores = query[head] @ keys[seen, head].T * kind.scale
            heads.append(scores.softmax(dim=-1) @ values[seen, head])
        answers.append(torch.stack(heads))
    return torch.stack(answers)


@pytest.mark.parametrize("window", [None, 1, 3, 50])
def test_a_token_sees_what_is_before_it_as_far_as_the_window(
    kind: tuple[Attention, torch.Tensor, torch.Tensor], window: int | None
) -> None:
    attention, queries, rows = kind
    positions = torch.arange(N - 6, N)
    got, weights = attend(attention, queries, positions, [(6, rows, torch.arange(N))], window)
    torch.testing.assert_close(got, written_out(attention, queries, rows, window), rtol=0, atol=1e-13)
    assert weights.shape == got.shape[:3]


@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize(("dcp", "interleave"), [(2, 1), (3, 4), (4, 16)])
def test_answers_to_parts_merge_to_the_answer_to_all(
    kind: tuple[Attention, torch.Tensor, torch.Tensor], dcp: int, interleave: int, window: int | None
) -> None:
    """Parts of which a token sees nothing, and parts that are empty (interleave 16), weigh nothing."""
    attention, queries, rows = kind
    parts = []
    for rank in range(dcp):
        here = held(TokenShare(dcp, rank, interleave), N)
        parts.append(attend(attention, queries, torch.arange(N - 6, N), [(6, rows[here], here)], window))
    assert any(math.isinf(float(weights.min())) for _, weights in parts) == (dcp > 2)
    merged = merge([answers for answers, _ in parts], [weights for _, weights in parts])
    torch.testing.assert_close(merged, written_out(attention, queries, rows, window), rtol=0, atol=1e-13)
