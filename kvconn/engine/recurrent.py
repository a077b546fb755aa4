"""The layer of the reference model that keeps a state in place of KV (after Mamba-2, Dao and Gu 2024): pure functions.

Rules
1. A head convolves the last tokens' inputs; of each result, a value, a key and a query, the value joins the state
   under its key, what was there decays, and the query reads it.
2. A request's state on one rank is one slot ``[inputs of the convolution, what came of all tokens]`` of this rank's
   heads: the two tensors of vLLM's Mamba layers. It is the same size however long the prompt.
3. A token joins a state once, in order: nobody can take it back, or begin elsewhere than where the state stands.
"""

from __future__ import annotations

import math

import torch

from kvconn.engine.attention import Draw, Weights, norm, piece
from kvconn.engine.config import TAPS, ModelSpec
from kvconn.engine.portion import Portion

__all__ = ["Recurrent"]


class Recurrent:
    """One rank's heads of it. ``normed`` is ``[n, d_model]``."""

    def __init__(self, spec: ModelSpec, portion: Portion) -> None:
        self._spec = spec
        self._portion = portion

    def draw(self, draw: Draw) -> Weights:
        """The whole layer's weights."""
        spec = self._spec
        return {
            "in": draw(spec.d_model, spec.n_heads * spec.convolved),
            "decay": draw(spec.d_model, spec.n_heads),
            "gate": draw(spec.d_model, spec.n_heads * spec.head_dim),
            "taps": draw(spec.n_heads, TAPS, spec.convolved),
            "out": draw(spec.n_heads * spec.head_dim, spec.d_model),
        }

    def part(self, weights: Weights) -> Weights:
        """This rank's heads of them."""
        portion, heads = self._portion, self._spec.n_heads
        here = slice(portion.first_head, portion.first_head + portion.n_heads)
        parts = {name: piece(weights[name], 1, heads, here) for name in ("in", "decay", "gate")}
        return parts | {"taps": weights["taps"][here], "out": piece(weights["out"], 0, heads, here)}

    def rows(self, normed: torch.Tensor, weights: Weights) -> torch.Tensor:
        """What of new tokens joins the state: ``[n, heads, inputs and how much of the past stays]``."""
        inputs = (normed @ weights["in"]).view(len(normed), self._portion.n_heads, self._spec.convolved)
        return torch.cat([inputs, (normed @ weights["decay"]).sigmoid()[..., None]], dim=-1)

    def join(self, rows: torch.Tensor, weights: Weights, slot: torch.Tensor, fresh: bool) -> torch.Tensor:
        """Answers of one request's new tokens, ``[n, heads, head_dim]``. ``slot`` is theirs afterwards; ``fresh``:
        whatever is in it, they are the first."""
        spec, n, heads = self._spec, len(rows), self._portion.n_heads
        if fresh:
            slot.zero_()
        first, second = slot.split_with_sizes([heads * numbers for numbers in spec.state_sizes])
        inputs = torch.cat([first.view(TAPS - 1, heads, spec.convolved), rows[..., :-1]])
        mixed = torch.stack([inputs[k : k + n] * weights["taps"][:, k] for k in range(TAPS)]).sum(dim=0)
        sizes = [spec.head_dim, spec.state, spec.state]
        values, keys, queries = torch.nn.functional.silu(mixed).split_with_sizes(sizes, dim=-1)
        state, answers = second.view(heads, spec.state, spec.head_dim).clone(), []
        for token in range(n):
            state = state * rows[token, :, -1, None, None] + keys[token][:, :, None] * values[token][:, None, :]
            answers.append(torch.einsum("hs,hsv->hv", queries[token], state))
        slot.copy_(torch.cat([inputs[-(TAPS - 1) :].flatten(), state.flatten()]))
        return torch.stack(answers) / math.sqrt(spec.state)

    def output(self, answers: torch.Tensor, normed: torch.Tensor, weights: Weights) -> torch.Tensor:
        """This rank's heads' share of ``[n, d_model]``."""
        gates = torch.nn.functional.silu(normed @ weights["gate"]).view_as(answers)
        return (norm(answers) * gates).flatten(1) @ weights["out"]
