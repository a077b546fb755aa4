"""The two kinds of attention of the reference model, and what each keeps per token: pure functions of tensors.

Rules
1. A layer's cache is one tensor ``[num_blocks, heads, block_size, channels]``: a block holds each KV head's rows
   together, so that some heads of a block are one range of bytes. Latent KV has one head, which all query heads share.
2. ``rows`` gives what is cached of new tokens, ``[n, heads, channels]``; ``attend`` reads nothing but cached rows.
3. What is cached of a token depends on its position and hidden state alone, never on who computed it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Protocol

import torch

from kvconn.engine.config import ModelSpec

__all__ = ["Attention", "GroupedQuery", "Latent", "make_attention", "norm"]

Weights = dict[str, torch.Tensor]
Draw = Callable[..., torch.Tensor]
#: per request, in the order of the tokens: how many of them are its, and its cached rows up to the last of them
Contexts = Iterable[tuple[int, torch.Tensor]]


class Attention(Protocol):
    """One kind. ``normed`` is ``[n, d_model]``, ``positions`` ``[n]``."""

    def draw(self, draw: Draw) -> Weights: ...

    def rows(self, normed: torch.Tensor, weights: Weights, positions: torch.Tensor) -> torch.Tensor: ...

    def attend(
        self, normed: torch.Tensor, weights: Weights, positions: torch.Tensor, contexts: Contexts
    ) -> torch.Tensor: ...


class Latent:
    """Multi-head latent attention (DeepSeek-V2, 2024): a token keeps a compressed latent, from which keys and values
    are expanded, and a rotary part that all heads share."""

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec

    def draw(self, draw: Draw) -> Weights:
        spec = self._spec
        return {
            "q": draw(spec.d_model, spec.n_heads * (spec.head_dim + spec.rope)),
            "kv": draw(spec.d_model, spec.latent + spec.rope),
            "k_up": draw(spec.n_heads, spec.latent, spec.head_dim),
            "v_up": draw(spec.n_heads, spec.latent, spec.head_dim),
            "out": draw(spec.n_heads * spec.head_dim, spec.d_model),
        }

    def rows(self, normed: torch.Tensor, weights: Weights, positions: torch.Tensor) -> torch.Tensor:
        latent, rotary = (normed @ weights["kv"]).split_with_sizes([self._spec.latent, self._spec.rope], dim=-1)
        return torch.cat([norm(latent), _rotate(rotary, positions)], dim=-1)[:, None]

    def attend(
        self, normed: torch.Tensor, weights: Weights, positions: torch.Tensor, contexts: Contexts
    ) -> torch.Tensor:
        spec = self._spec
        q = (normed @ weights["q"]).view(len(normed), spec.n_heads, spec.head_dim + spec.rope)
        plain, rotary = q.split_with_sizes([spec.head_dim, spec.rope], dim=-1)
        absorbed = torch.einsum("nhd,hld->nhl", plain, weights["k_up"])  # keys stay compressed
        rotary = _rotate(rotary, positions[:, None])
        out = torch.empty(len(normed), spec.n_heads, spec.latent, dtype=torch.float64)
        cursor = 0
        for n, context in contexts:
            here = slice(cursor, cursor + n)
            cursor += n
            latent, shared = context[:, 0].split_with_sizes([spec.latent, spec.rope], dim=-1)
            scores = torch.einsum("nhl,cl->nhc", absorbed[here], latent)
            scores = scores + torch.einsum("nhr,cr->nhc", rotary[here], shared)
            weighted = _causal(scores, positions[here], spec.head_dim + spec.rope)
            out[here] = torch.einsum("nhc,cl->nhl", weighted, latent)
        values = torch.einsum("nhl,hld->nhd", out, weights["v_up"])
        return values.reshape(len(normed), -1) @ weights["out"]


class GroupedQuery:
    """Grouped-query attention (Ainslie et al. 2023): ``n_heads / n_kv_heads`` query heads share a KV head, of which a
    token keeps the key and then the value."""

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec

    def draw(self, draw: Draw) -> Weights:
        spec = self._spec
        return {
            "q": draw(spec.d_model, spec.n_heads * spec.head_dim),
            "k": draw(spec.d_model, spec.n_kv_heads * spec.head_dim),
            "v": draw(spec.d_model, spec.n_kv_heads * spec.head_dim),
            "out": draw(spec.n_heads * spec.head_dim, spec.d_model),
        }

    def rows(self, normed: torch.Tensor, weights: Weights, positions: torch.Tensor) -> torch.Tensor:
        shape = len(normed), self._spec.n_kv_heads, self._spec.head_dim
        keys = _rotate((normed @ weights["k"]).view(shape), positions[:, None])
        return torch.cat([keys, (normed @ weights["v"]).view(shape)], dim=-1)

    def attend(
        self, normed: torch.Tensor, weights: Weights, positions: torch.Tensor, contexts: Contexts
    ) -> torch.Tensor:
        spec = self._spec
        q = _rotate((normed @ weights["q"]).view(len(normed), spec.n_heads, spec.head_dim), positions[:, None])
        q = q.view(len(normed), spec.n_kv_heads, spec.n_heads // spec.n_kv_heads, spec.head_dim)
        out = torch.empty_like(q)
        cursor = 0
        for n, context in contexts:
            here = slice(cursor, cursor + n)
            cursor += n
            keys, values = context.chunk(2, dim=-1)
            scores = torch.einsum("nkgd,ckd->nkgc", q[here], keys)
            weighted = _causal(scores.flatten(1, 2), positions[here], spec.head_dim).view(scores.shape)
            out[here] = torch.einsum("nkgc,ckd->nkgd", weighted, values)
        return out.reshape(len(normed), -1) @ weights["out"]


def make_attention(spec: ModelSpec) -> Attention:
    """The kind that ``spec.kv`` names."""
    return Latent(spec) if spec.kv == "latent" else GroupedQuery(spec)


def norm(x: torch.Tensor) -> torch.Tensor:
    """Root mean square norm over the last dimension, without weights."""
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + 1e-12)


def _causal(scores: torch.Tensor, positions: torch.Tensor, dim: int) -> torch.Tensor:
    """Softmax over the context, ``[n, heads, context]``, of what lies at or before each token's own position."""
    later = torch.arange(scores.shape[-1])[None, :] > positions[:, None]
    return (scores.masked_fill(later[:, None, :], -math.inf) / math.sqrt(dim)).softmax(dim=-1)


def _rotate(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotary position (Su et al. 2021), pairs (i, i + half)."""
    half = x.shape[-1] // 2
    frequency = 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = positions[..., None].to(torch.float64) * frequency
    cos, sin = angle.cos(), angle.sin()
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
