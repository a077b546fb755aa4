"""Pure: which part of the model one rank computes, and which part of every request's KV it keeps.

Rules
1. Stages hold contiguous layers, nearly equal numbers of them. A TP rank has some query heads and the KV heads that
   these need; a latent cache is one head, of which every TP rank has a copy.
2. With DCP the tokens of a block are dealt over the ranks of a group, ``interleave`` at a time, round after round. A
   block id then stands for ``block_size`` tokens on each of them.
3. Ranks with equal :attr:`Portion.cells` keep copies of KV. A state is divided as the query heads are.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch

from kvconn.config import ParallelConfig
from kvconn.engine.config import ModelSpec, cache_groups, share_of_rank
from kvconn.geometry import HeadShare, TokenShare, blocks_for, coordinates, is_replicated

__all__ = ["Members", "Portion", "held", "holds", "seen", "slots", "split"]


def split(n: int, parts: int) -> list[int]:
    """Sizes of ``parts`` contiguous, near-equal pieces of ``n``."""
    return [n // parts + (index < n % parts) for index in range(parts)]


def holds(share: TokenShare, positions: torch.Tensor) -> torch.Tensor:
    """Which of these positions are in the share: booleans of the same shape."""
    return positions // share.interleave % share.dcp == share.rank


def slots(share: TokenShare, positions: torch.Tensor, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Where positions of the share lie: index in the request's block table, and row in that block."""
    turn = share.interleave * share.dcp
    local = positions // turn * share.interleave + positions % share.interleave
    return local // block_size, local % block_size


def held(share: TokenShare, n_tokens: int, first: int = 0) -> torch.Tensor:
    """All positions from ``first`` up to ``n_tokens`` of the share, in the order in which they lie in the blocks."""
    every = torch.arange(first, n_tokens)
    return every[holds(share, every)]


def seen(
    share: TokenShare, table: Sequence[int], n_tokens: int, window: int | None, n_new: int, block_size: int
) -> tuple[list[int], torch.Tensor]:
    """Blocks with what the last ``n_new`` of ``n_tokens`` tokens can see, and the positions of the share in them."""
    size = block_size * share.dcp
    first = 0 if window is None else max(0, n_tokens - n_new + 1 - window) // size
    return list(table[first : blocks_for(n_tokens, size)]), held(share, n_tokens, first * size)


class Portion(msgspec.Struct, frozen=True):
    """One rank's: ``n_layers`` layers from ``first_layer`` on, ``n_heads`` query heads from ``first_head`` on."""

    first_stage: bool
    last_stage: bool
    first_layer: int
    n_layers: int
    first_head: int
    n_heads: int
    kv: HeadShare
    tokens: TokenShare
    #: by layer of this rank: its cache group, and how far it sees, in tokens; None: to the beginning
    groups: tuple[int, ...]
    windows: tuple[int | None, ...]
    #: and whether it keeps a state, of its query heads, in place of KV
    keeps_state: tuple[bool, ...]

    @classmethod
    def of(cls, model: ModelSpec, parallel: ParallelConfig, rank: int) -> Portion:
        """That of ``rank``; sizes were checked (:func:`kvconn.engine.config.check`)."""
        where = coordinates(parallel, rank)
        layers = split(model.n_layers, parallel.pp)
        n_heads = model.n_heads // parallel.tp
        share = share_of_rank(model, parallel, rank)
        assert share is not None, "heads and ranks were checked"
        first = sum(layers[: where.pp])
        kinds = cache_groups(model)
        groups = tuple(layer % len(kinds) for layer in range(first, first + layers[where.pp]))
        return cls(
            first_stage=where.pp == 0,
            last_stage=where.pp == parallel.pp - 1,
            first_layer=first,
            n_layers=layers[where.pp],
            first_head=where.tp * n_heads,
            n_heads=n_heads,
            kv=share.heads,
            tokens=share.tokens,
            groups=groups,
            windows=tuple(kinds[group].window for group in groups),
            keeps_state=tuple(kinds[group].kind == "state" for group in groups),
        )

    def state_bytes(self, model: ModelSpec) -> list[int]:
        """Of the two tensors of a layer's state here, one slot of each."""
        return [self.n_heads * numbers * 8 for numbers in model.state_sizes]  # float64

    @property
    def cells(self) -> tuple[int, int, int]:
        """First layer, first KV head, number among those that share tokens: what of the cache is here."""
        return self.first_layer, self.kv.first, self.tokens.rank


class Members(msgspec.Struct, frozen=True):
    """The ranks that one rank works with, each in order.

    ``tp`` share heads, ``pcp`` share a step's new tokens, ``stages`` hold the other layers, ``shards`` the other tokens
    of the same blocks; ``holders`` have, together, all KV of this rank's replica.
    """

    tp: tuple[int, ...]
    pcp: tuple[int, ...]
    stages: tuple[int, ...]
    shards: tuple[int, ...]
    holders: tuple[int, ...]

    @classmethod
    def of(cls, parallel: ParallelConfig, rank: int) -> Members:
        """As ranks are ordered: pp-major, then pcp, then tp. Raises ConfigError for a rank outside the world."""
        me = coordinates(parallel, rank)

        def at(pp: int, pcp: int, tp: int) -> int:
            return (pp * parallel.pcp + pcp) * parallel.tp + tp

        tp = tuple(at(me.pp, me.pcp, tp) for tp in range(parallel.tp))
        pcp = tuple(at(me.pp, pcp, me.tp) for pcp in range(parallel.pcp))
        stages = range(parallel.pp)
        mates = [me.pcp] if is_replicated(parallel) else range(parallel.pcp)
        first = me.tp - me.tp % parallel.dcp
        return cls(
            tp=tp,
            pcp=pcp,
            stages=tuple(at(pp, me.pcp, me.tp) for pp in stages),
            shards=pcp if parallel.pcp > 1 and parallel.dcp > 1 else tp[first : first + parallel.dcp],
            holders=tuple(at(pp, pcp, tp) for pp in stages for pcp in mates for tp in range(parallel.tp)),
        )
