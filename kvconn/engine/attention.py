"""The two kinds of attention of the reference model, and what each keeps per token: pure functions of tensors.

Rules
1. A layer's cache is one tensor ``[num_blocks, heads, block_size, channels]``: a block holds each KV head's rows
   together, so that some heads of a block are one range of bytes. Latent KV has one head, which all query heads share.
2. ``rows`` gives what is cached of new tokens, ``[n, heads, channels]``; ``attend`` reads nothing but cached rows.
3. What is cached of a token depends on its position and hidden state alone, never on who computed it.
4. Attention to a part of the context is an answer and its weight; ``merge`` makes one answer of the parts'.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import torch

from kvconn.engine.config import ModelSpec
from kvconn.engine.portion import Portion

__all__ = [
    "Attention",
    "Context",
    "Draw",
    "GroupedQuery",
    "Latent",
    "Weights",
    "attend",
    "make_attention",
    "merge",
    "norm",
    "piece",
]

Weights = dict[str, torch.Tensor]
Draw = Callable[..., torch.Tensor]
#: of one request, in the order of the tokens: how many of them are its, the cached rows that are here of the context up
#: to the last of them, ``[context, kv heads, channels]``, and these rows' positions
Context = tuple[int, torch.Tensor, torch.Tensor]
_LOWEST = torch.finfo(torch.float64).min


class Attention(Protocol):
    """One kind, on one rank. ``normed`` is ``[n, d_model]``, ``positions`` ``[n]``; queries are ``[n, kv heads, query
    heads of each, width]``, and what attention gives has the same shape but for the width."""

    scale: float

    def draw(self, draw: Draw) -> Weights:
        """The whole layer's weights."""
        ...

    def part(self, weights: Weights) -> Weights:
        """This rank's heads of them."""
        ...

    def rows(self, normed: torch.Tensor, weights: Weights, positions: torch.Tensor) -> torch.Tensor: ...

    def queries(self, normed: torch.Tensor, weights: Weights, positions: torch.Tensor) -> torch.Tensor: ...

    def keys_values(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]: ...

    def output(self, answers: torch.Tensor, weights: Weights) -> torch.Tensor:
        """This rank's heads' share of ``[n, d_model]``."""
        ...


class Latent:
    """Multi-head latent attention (DeepSeek-V2, 2024): a token keeps a compressed latent, from which keys and values
    are expanded, and a rotary part that all heads share. Queries are compressed instead, so that rows are the keys."""

    def __init__(self, spec: ModelSpec, portion: Portion) -> None:
        self._spec = spec
        self._portion = portion
        self.scale = 1 / math.sqrt(spec.head_dim + spec.rope)

    def draw(self, draw: Draw) -> Weights:
        spec = self._spec
        return {
            "q": draw(spec.d_model, spec.n_heads * (spec.head_dim + spec.rope)),
            "kv": draw(spec.d_model, spec.latent + spec.rope),
            "k_up": draw(spec.n_heads, spec.latent, spec.head_dim),
            "v_up": draw(spec.n_heads, spec.latent, spec.head_dim),
            "out": draw(spec.n_heads * spec.head_dim, spec.d_model),
        }

    def part(self, weights: Weights) -> Weights:
        portion, heads = self._portion, self._spec.n_heads
        here = slice(portion.first_head, portion.first_head + portion.n_heads)
        return {
            "q": piece(weights["q"], 1, heads, here),
            "kv": weights["kv"],
            "k_up": weights["k_up"][here],
            "v_up": weights["v_up"][here],
            "out": piece(weights["out"], 0, heads, here),
        }

    def rows(self, normed: torch.Tensor, weights: Weights, positions: torch.Tensor) -> torch.Tensor:
        latent, rotary = (normed @ weights["kv"]).split_with_sizes([self._spec.latent, self._spec.rope], dim=-1)
        return torch.cat([norm(latent), _rotate(rotary, positions)], dim=-1)[:, None]

    def queries(self, normed: torch.Tensor, weights: Weights, positions: torch.Tensor) -> torch.Tensor:
        spec = self._spec
        q = (normed @ weights["q"]).view(len(normed), self._portion.n_heads, spec.head_dim + spec.rope)
        plain, rotary = q.split_with_sizes([spec.head_dim, spec.rope], dim=-1)
        compressed = torch.einsum("nhd,hld->nhl", plain, weights["k_up"])
        return torch.cat([compressed, _rotate(rotary, positions[:, None])], dim=-1)[:, None]

    def keys_values(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return rows, rows[..., : self._spec.latent]

    def output(self, answers: torch.Tensor, weights: Weights) -> torch.Tensor:
        values = torch.einsum("nhl,hld->nhd", answers[:, 0], weights["v_up"])
        return values.flatten(1) @ weights["out"]


class GroupedQuery:
    """Grouped-query attention (Ainslie et al. 2023): ``n_heads / n_kv_heads`` query heads share a KV head, of which a
    token keeps the key and then the value."""

    def __init__(self, spec: ModelSpec, portion: Portion) -> None:
        self._spec = spec
        self._portion = portion
        self.scale = 1 / math.sqrt(spec.head_dim)

    def draw(self, draw: Draw) -> Weights:
        spec = self._spec
        return {
            "q": draw(spec.d_model, spec.n_heads * spec.head_dim),
            "k": draw(spec.d_model, spec.n_kv_heads * spec.head_dim),
            "v": draw(spec.d_model, spec.n_kv_heads * spec.head_dim),
            "out": draw(spec.n_heads * spec.head_dim, spec.d_model),
        }

    def part(self, weights: Weights) -> Weights:
        portion, spec = self._portion, self._spec
        here = slice(portion.first_head, portion.first_head + portion.n_heads)
        kv = slice(portion.kv.first, portion.kv.first + portion.kv.count)
        return {
            "q": piece(weights["q"], 1, spec.n_heads, here),
            "k": piece(weights["k"], 1, spec.n_kv_heads, kv),
            "v": piece(weights["v"], 1, spec.n_kv_heads, kv),
            "out": piece(weights["out"], 0, spec.n_heads, here),
        }

    def rows(self, normed: torch.Tensor, weights: Weights, positions: torch.Tensor) -> torch.Tensor:
        shape = len(normed), self._portion.kv.count, self._spec.head_dim
        keys = _rotate((normed @ weights["k"]).view(shape), positions[:, None])
        return torch.cat([keys, (normed @ weights["v"]).view(shape)], dim=-1)

    def queries(self, normed: torch.Tensor, weights: Weights, positions: torch.Tensor) -> torch.Tensor:
        portion, dim = self._portion, self._spec.head_dim
        q = _rotate((normed @ weights["q"]).view(len(normed), portion.n_heads, dim), positions[:, None])
        return q.view(len(normed), portion.kv.count, portion.n_heads // portion.kv.count, dim)

    def keys_values(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = rows.chunk(2, dim=-1)
        return keys, values

    def output(self, answers: torch.Tensor, weights: Weights) -> torch.Tensor:
        return answers.flatten(1) @ weights["out"]


def make_attention(spec: ModelSpec, portion: Portion) -> Attention:
    """The kind that ``spec.kv`` names."""
    return Latent(spec, portion) if spec.kv == "latent" else GroupedQuery(spec, portion)


def attend(
    kind: Attention, queries: torch.Tensor, positions: torch.Tensor, contexts: Iterable[Context], window: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Answers, and for each the log of the sum of its exponentiated scores: minus infinity where it sees nothing.

    A token sees the last ``window`` tokens, its own among them; None: all up to its own.
    """
    answers, weights = [], []
    for here, rows, held in _places(contexts):
        keys, values = kind.keys_values(rows)
        scores = torch.einsum("nkgw,ckw->nkgc", queries[here], keys) * kind.scale
        distance = positions[here][:, None] - held[None, :]
        hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
        scores = scores.masked_fill(hidden[:, None, None, :], -math.inf)
        weight = scores.logsumexp(dim=-1)
        shares = (scores - weight.clamp(min=_LOWEST)[..., None]).exp()
        answers.append(torch.einsum("nkgc,ckv->nkgv", shares, values))
        weights.append(weight)
    return torch.cat(answers), torch.cat(weights)


def merge(answers: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """The answer to the whole context from the answers to its parts (Dao et al. 2023, Flash-Decoding)."""
    shares = torch.stack(list(weights)).softmax(dim=0)
    return (torch.stack(list(answers)) * shares[..., None]).sum(dim=0)


def norm(x: torch.Tensor) -> torch.Tensor:
    """Root mean square norm over the last dimension, without weights."""
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + 1e-12)


def piece(weight: torch.Tensor, dim: int, pieces: int, here: slice) -> torch.Tensor:
    """The pieces ``here`` of the equal ``pieces`` that a matrix has along ``dim``."""
    parts = weight.chunk(pieces, dim=dim)[here]
    return torch.cat(parts, dim=dim)


def _places(contexts: Iterable[Context]) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    """Where each request's tokens stand among all, and its context."""
    cursor = 0
    for n, rows, held in contexts:
        yield slice(cursor, cursor + n), rows, held
        cursor += n


def _rotate(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotary position (Su et al. 2021), pairs (i, i + half)."""
    half = x.shape[-1] // 2
    frequency = 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = positions[..., None].to(torch.float64) * frequency
    cos, sin = angle.cos(), angle.sin()
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
