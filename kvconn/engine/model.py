"""A small decoder-only transformer with paged KV, latent or grouped-query, in float64, weights from a seed.

Rules
1. Every process with the same :class:`~kvconn.engine.config.ModelSpec` draws the same weights and keeps its part of
   them (:mod:`kvconn.engine.portion`).
2. Greedy. The smallest difference between the two best logits is kept: above ``margin_floor`` equal tokens mean equal
   KV up to rounding, whatever the topology.
3. A layer's cache is one tensor ``[num_blocks, kv heads, block_size, channels]`` (:mod:`kvconn.engine.attention`) of
   this rank's layers, KV heads and tokens.
4. TP ranks add what their heads, and their columns of the feed-forward, contribute. A stage passes its hidden states on
   to the same ranks of the next one; the last stage samples.
5. Under PCP each rank computes its part of the prefill tokens and the new rows are gathered. So decode tokens are
   computed apart from prefill tokens, of which ranks have different numbers: a matrix product's rounding depends on its
   shape. Replicas' caches end up with the same bytes.
6. Under DCP each rank attends with the queries of its whole group to the tokens it keeps, and the answers are merged.
7. A layer with a state (:mod:`kvconn.engine.recurrent`) has slots ``[num_blocks, numbers]`` in the place of its cache.
   All PCP ranks let all tokens join it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from kvconn.base import GroupView
from kvconn.engine.attention import Context, attend, make_attention, merge, norm, piece
from kvconn.engine.config import EngineConfig, cache_groups
from kvconn.engine.portion import Portion, holds, seen, slots, split
from kvconn.engine.ranks import Ranks, gather_rows
from kvconn.engine.recurrent import Recurrent
from kvconn.engine.scheduler import Scheduled

__all__ = ["Model", "Transformer", "empty_caches", "make_model"]

LayerHook = Callable[[int], None]
Weights = dict[str, torch.Tensor]
_PAGE = 4096


class Model(Protocol):
    """What a worker runs. Layer hooks are told a layer's number among this rank's own."""

    caches: list[torch.Tensor]
    min_margin: float

    def forward(self, batch: Sequence[Scheduled], before: LayerHook, after: LayerHook) -> dict[str, int]: ...


def page_aligned(*shape: int) -> torch.Tensor:
    """Zeros in float64 that share no page with anything else: what is registered with a transport is cache alone."""
    length = math.prod(shape) * 8
    raw = torch.zeros(-(-length // _PAGE) * _PAGE + _PAGE, dtype=torch.uint8)
    start = -raw.data_ptr() % _PAGE
    return raw[start : start + length].view(torch.float64).view(shape)


def empty_caches(config: EngineConfig, portion: Portion) -> list[torch.Tensor]:
    """One rank's pool, a tensor per layer of its."""
    attention = config.num_blocks, portion.kv.count, config.block_size, config.model.channels
    state = config.num_blocks, portion.n_heads * sum(config.model.state_sizes)
    return [page_aligned(*(state if keeps else attention)) for keeps in portion.keeps_state]


class _Part:
    """Tokens of one request that are computed: positions, and their rows in the flat batch."""

    def __init__(self, scheduled: Scheduled, first: int, n: int) -> None:
        offset = first - scheduled.token_start
        self.scheduled = scheduled
        self.first = first
        self.n = n
        self.tokens = scheduled.tokens[offset : offset + n]

    @property
    def samples(self) -> bool:
        s = self.scheduled
        return s.sample and self.first + self.n == s.start + s.n


class _Slots(NamedTuple):
    """Which of a lane's rows are kept here, and where: block, and row in it."""

    kept: torch.Tensor
    blocks: torch.Tensor
    rows: torch.Tensor


@dataclass
class _Lane:
    """Tokens that are multiplied together. ``whole`` are those of all PCP ranks, ``parts`` this rank's, ``counts`` how
    many each PCP rank has; None when each has all. ``x`` are the hidden states of ``parts`` so far."""

    whole: list[_Part]
    parts: list[_Part]
    counts: list[int] | None
    here: slice
    all_positions: torch.Tensor
    x: torch.Tensor
    #: by cache group, of those whose blocks hold tokens
    slots: dict[int, _Slots]

    @property
    def positions(self) -> torch.Tensor:
        return self.all_positions[self.here]


class Transformer:
    """One rank of the model."""

    def __init__(self, config: EngineConfig, ranks: Ranks) -> None:
        self._spec = config.model
        self._size = config.block_size
        self._ranks = ranks
        self._portion = Portion.of(config.model, config.parallel, ranks.rank)
        self.min_margin = math.inf
        self.caches = empty_caches(config, self._portion)
        self._groups = cache_groups(config.model)
        self._attention = make_attention(config.model, self._portion)
        self._recurrent = Recurrent(config.model, self._portion)
        self._init_weights()

    def _init_weights(self) -> None:
        spec, portion, tp = self._spec, self._portion, self._ranks.tp
        generator = torch.Generator().manual_seed(spec.seed)

        def draw(*shape: int) -> torch.Tensor:
            fan_in = shape[-2] if len(shape) > 1 else shape[-1]
            return torch.randn(*shape, generator=generator, dtype=torch.float64) / math.sqrt(fan_in)

        def layer(group: GroupView) -> Weights:
            mixes = self._recurrent if group.kind == "state" else self._attention
            mixing = mixes.part(mixes.draw(draw))
            wide, narrow = draw(spec.d_model, spec.d_ff), draw(spec.d_ff, spec.d_model)
            mine = slice(tp.rank, tp.rank + 1)
            return mixing | {"ff_in": piece(wide, 1, tp.size, mine), "ff_out": piece(narrow, 0, tp.size, mine)}

        self._embed = torch.randn(spec.vocab_size, spec.d_model, generator=generator, dtype=torch.float64)
        layers = [layer(self._groups[number % len(self._groups)]) for number in range(spec.n_layers)]
        self._layers = layers[portion.first_layer : portion.first_layer + portion.n_layers]
        self._head = draw(spec.d_model, spec.vocab_size) * 4.0

    @torch.inference_mode()
    def forward(self, batch: Sequence[Scheduled], before: LayerHook, after: LayerHook) -> dict[str, int]:
        """Compute the batch; on the last stage the next token of every request that samples, on the others nothing."""
        lanes = self._prefill([s for s in batch if not s.decode]), self._decode([s for s in batch if s.decode])
        if not self._portion.first_stage:
            self._receive(lanes)
        for index, weights in enumerate(self._layers):
            before(index)
            for lane in lanes:
                if lane.whole:
                    lane.x = self._layer(index, weights, lane)
            after(index)
        if self._portion.last_stage:
            return self._sample(batch, lanes)
        self._ranks.stages.send(torch.cat([lane.x for lane in lanes]), self._ranks.stages.rank + 1)
        return {}

    def _receive(self, lanes: tuple[_Lane, _Lane]) -> None:
        prefill, decode = lanes
        x = torch.cat([prefill.x, decode.x])
        x = self._ranks.stages.receive(x, self._ranks.stages.rank - 1)
        prefill.x, decode.x = x[: len(prefill.x)], x[len(prefill.x) :]

    # -- what is computed together -------------------------------------------------------------------------------

    def _prefill(self, batch: Sequence[Scheduled]) -> _Lane:
        pcp = self._ranks.pcp
        counts = split(sum(s.n for s in batch), pcp.size)
        skip = sum(counts[: pcp.rank])
        parts = _cut(batch, skip, counts[pcp.rank])
        return self._lane(batch, parts, counts, slice(skip, skip + counts[pcp.rank]))

    def _decode(self, batch: Sequence[Scheduled]) -> _Lane:
        return self._lane(batch, _whole(batch), None, slice(None))

    def _lane(self, batch: Sequence[Scheduled], parts: list[_Part], counts: list[int] | None, here: slice) -> _Lane:
        positions = [p for s in batch for p in range(s.start, s.start + s.n)]
        tokens = torch.tensor([t for part in parts for t in part.tokens], dtype=torch.long)
        everywhere = torch.tensor(positions, dtype=torch.long)
        slots_of = {
            number: self._slots(batch, number) for number, group in enumerate(self._groups) if group.kind != "state"
        }
        return _Lane(_whole(batch), parts, counts, here, everywhere, self._embed[tokens], slots_of)

    def _slots(self, batch: Sequence[Scheduled], group: int) -> _Slots:
        none = torch.empty(0, dtype=torch.long)
        kept, blocks, rows = [none], [none], [none]
        tokens, cursor = self._portion.tokens, 0
        for s in batch:
            positions = torch.arange(s.start, s.start + s.n)
            here = holds(tokens, positions).nonzero().flatten()
            index, row = slots(tokens, positions[here], self._size)
            kept.append(here + cursor)
            blocks.append(torch.tensor(s.tables[group], dtype=torch.long)[index])
            rows.append(row)
            cursor += s.n
        return _Slots(torch.cat(kept), torch.cat(blocks), torch.cat(rows))

    # -- a layer -------------------------------------------------------------------------------------------------

    def _layer(self, index: int, weights: Weights, lane: _Lane) -> torch.Tensor:
        tp = self._ranks.tp
        mix = self._remember if self._portion.keeps_state[index] else self._see
        mixed = mix(index, weights, lane, norm(lane.x))
        if mixed is None:
            return lane.x
        x = lane.x + tp.total(mixed)
        return x + tp.total(torch.nn.functional.silu(norm(x) @ weights["ff_in"]) @ weights["ff_out"])

    def _see(self, index: int, weights: Weights, lane: _Lane, normed: torch.Tensor) -> torch.Tensor | None:
        """Attention; None where this rank has nothing to compute."""
        attention = self._attention
        rows = self._all(lane, attention.rows(normed, weights, lane.positions))
        slots = lane.slots[self._portion.groups[index]]
        self.caches[index][slots.blocks, :, slots.rows] = rows[slots.kept]
        if not lane.parts and self._ranks.shards.size == 1:
            return None
        queries = attention.queries(normed, weights, lane.positions)
        return attention.output(self._attend(index, lane, queries), weights)

    def _remember(self, index: int, weights: Weights, lane: _Lane, normed: torch.Tensor) -> torch.Tensor | None:
        """A state; None where this rank has nothing to answer."""
        rows, answers, cursor = self._all(lane, self._recurrent.rows(normed, weights)), [], 0
        for part in lane.whole:
            slot = self.caches[index][part.scheduled.tables[self._portion.groups[index]][0]]
            fresh = part.first == 0
            answers.append(self._recurrent.join(rows[cursor : cursor + part.n], weights, slot, fresh))
            cursor += part.n
        return self._recurrent.output(torch.cat(answers)[lane.here], normed, weights) if lane.parts else None

    def _all(self, lane: _Lane, rows: torch.Tensor) -> torch.Tensor:
        """Rows of all PCP ranks' tokens."""
        return rows if lane.counts is None else gather_rows(self._ranks.pcp, rows, lane.counts)

    def _attend(self, index: int, lane: _Lane, queries: torch.Tensor) -> torch.Tensor:
        shards, window = self._ranks.shards, self._portion.windows[index]
        if shards.size == 1:
            return attend(self._attention, queries, lane.positions, self._contexts(index, lane.parts), window)[0]
        over_heads = self._ranks.pcp.size == 1  # the group shares heads; else it shares prefill tokens
        queries = torch.cat(shards.gather(queries), dim=2) if over_heads else self._all(lane, queries)
        contexts = self._contexts(index, lane.whole)
        answers, weights = attend(self._attention, queries, lane.all_positions, contexts, window)
        merged = merge(shards.gather(answers), shards.gather(weights))
        return merged.chunk(shards.size, dim=2)[shards.rank] if over_heads else merged[lane.here]

    def _contexts(self, layer: int, parts: Sequence[_Part]) -> Iterator[Context]:
        portion = self._portion
        group, window = portion.groups[layer], portion.windows[layer]
        for part in parts:
            table, n_tokens = part.scheduled.tables[group], part.first + part.n
            blocks, here = seen(portion.tokens, table, n_tokens, window, part.n, self._size)
            yield part.n, self.caches[layer][blocks].transpose(1, 2).flatten(0, 1)[: len(here)], here

    def _sample(self, batch: Sequence[Scheduled], lanes: tuple[_Lane, _Lane]) -> dict[str, int]:
        """Greedy tokens. A prefill's last hidden state is on one PCP rank; the others add zeros, which is exact."""
        sampling = [s for s in batch if s.sample]
        if not sampling:
            return {}
        hidden = torch.zeros(len(sampling), self._spec.d_model, dtype=torch.float64)
        where = {s.id: index for index, s in enumerate(sampling)}
        prefill, decode = lanes
        _last_states(prefill, where, hidden)
        if any(not s.decode for s in sampling):
            hidden = self._ranks.pcp.total(hidden)
        _last_states(decode, where, hidden)
        logits = norm(hidden) @ self._head
        best = logits.topk(2, dim=-1)
        self.min_margin = min(self.min_margin, float((best.values[:, 0] - best.values[:, 1]).min()))
        return {s.id: int(best.indices[index, 0]) for index, s in enumerate(sampling)}


def _last_states(lane: _Lane, where: dict[str, int], hidden: torch.Tensor) -> None:
    """Put the last hidden state of each request that samples into its row of ``hidden``."""
    cursor = 0
    for part in lane.parts:
        cursor += part.n
        if part.samples:
            hidden[where[part.scheduled.id]] = lane.x[cursor - 1]


def _whole(batch: Sequence[Scheduled]) -> list[_Part]:
    return [_Part(s, s.start, s.n) for s in batch]


def _cut(prefill: Sequence[Scheduled], skip: int, n: int) -> list[_Part]:
    """The parts of the flat prefill tokens ``[skip, skip + n)``."""
    parts: list[_Part] = []
    for scheduled in prefill:
        first, last = max(0, skip), min(scheduled.n, skip + n)
        if first < last:
            parts.append(_Part(scheduled, scheduled.start + first, last - first))
        skip -= scheduled.n
    return parts


def make_model(config: EngineConfig, ranks: Ranks) -> Model:
    """The model that ``config.model.mode`` names."""
    if config.model.mode == "transformer":
        return Transformer(config, ranks)
    from kvconn.engine.content import ContentAddressed

    return ContentAddressed(config, ranks)
