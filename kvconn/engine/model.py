"""A small decoder-only transformer with paged latent KV, in float64, weights from a seed.

Rules
1. Every process with the same :class:`~kvconn.engine.config.ModelSpec` has the same weights.
2. Greedy. The smallest difference between the two best logits is kept: above ``margin_floor`` equal tokens mean equal
   KV up to rounding, whatever the topology.
3. A layer's cache is one tensor ``[num_blocks, block_size, row]``: per token a compressed latent, from which keys and
   values are expanded, and a rotary part shared by all heads (as in multi-head latent attention).
4. Under replicated PCP each rank computes its part of the prefill tokens, the rows are gathered, and every rank's cache
   ends up with the same bytes. So decode tokens are computed apart from prefill tokens, of which ranks have different
   numbers: a matrix product's rounding depends on its shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from kvconn.engine.config import EngineConfig
from kvconn.engine.scheduler import Scheduled

__all__ = ["Model", "Ranks", "Transformer", "split"]

LayerHook = Callable[[int], None]
_PAGE = 4096


class Ranks(Protocol):
    """The collectives one worker takes part in."""

    rank: int
    world: int

    def gather_rows(self, rows: torch.Tensor, counts: Sequence[int]) -> torch.Tensor: ...

    def total(self, values: torch.Tensor) -> torch.Tensor: ...


class Model(Protocol):
    """What a worker runs."""

    caches: list[torch.Tensor]
    min_margin: float

    def forward(self, batch: Sequence[Scheduled], before: LayerHook, after: LayerHook) -> dict[str, int]: ...


def split(n: int, parts: int) -> list[int]:
    """Sizes of ``parts`` contiguous, near-equal pieces of ``n``."""
    return [n // parts + (index < n % parts) for index in range(parts)]


def page_aligned(*shape: int) -> torch.Tensor:
    """Zeros in float64 that share no page with anything else: what is registered with a transport is cache alone."""
    length = math.prod(shape) * 8
    raw = torch.zeros(-(-length // _PAGE) * _PAGE + _PAGE, dtype=torch.uint8)
    start = -raw.data_ptr() % _PAGE
    return raw[start : start + length].view(torch.float64).view(shape)


class _Part:
    """Tokens of one request that this rank computes: positions, and their rows in the flat batch."""

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


@dataclass
class _Lane:
    """Tokens that are multiplied together: their positions, and their hidden states so far."""

    parts: list[_Part]
    positions: torch.Tensor
    x: torch.Tensor


class Transformer:
    """One rank of the model."""

    def __init__(self, config: EngineConfig, ranks: Ranks) -> None:
        self._spec = config.model
        self._size = config.block_size
        self._ranks = ranks
        self.min_margin = math.inf
        self.caches = [
            page_aligned(config.num_blocks, config.block_size, self._spec.row) for _ in range(self._spec.n_layers)
        ]
        self._init_weights()

    def _init_weights(self) -> None:
        spec = self._spec
        generator = torch.Generator().manual_seed(spec.seed)

        def draw(*shape: int) -> torch.Tensor:
            fan_in = shape[-2] if len(shape) > 1 else shape[-1]
            return torch.randn(*shape, generator=generator, dtype=torch.float64) / math.sqrt(fan_in)

        heads, dim = spec.n_heads, spec.head_dim
        self._embed = torch.randn(spec.vocab_size, spec.d_model, generator=generator, dtype=torch.float64)
        self._layers = [
            {
                "q": draw(spec.d_model, heads * (dim + spec.rope)),
                "kv": draw(spec.d_model, spec.row),
                "k_up": draw(heads, spec.latent, dim),
                "v_up": draw(heads, spec.latent, dim),
                "out": draw(heads * dim, spec.d_model),
                "ff_in": draw(spec.d_model, spec.d_ff),
                "ff_out": draw(spec.d_ff, spec.d_model),
            }
            for _ in range(spec.n_layers)
        ]
        self._head = draw(spec.d_model, spec.vocab_size) * 4.0

    @torch.inference_mode()
    def forward(self, batch: Sequence[Scheduled], before: LayerHook, after: LayerHook) -> dict[str, int]:
        """Compute the batch; the next token of every request that samples, the same on every rank."""
        prefill = [s for s in batch if not s.decode]
        decode = [s for s in batch if s.decode]
        counts = split(sum(s.n for s in prefill), self._ranks.world)
        parts = _cut(prefill, sum(counts[: self._ranks.rank]), counts[self._ranks.rank])
        lanes = [self._lane(parts), self._lane([_Part(s, s.start, s.n) for s in decode])]
        slots = self._slots(prefill), self._slots(decode)
        for index, weights in enumerate(self._layers):
            before(index)
            normed = [_norm(lane.x) for lane in lanes]
            rows = [self._rows(n, weights, lane.positions) for n, lane in zip(normed, lanes, strict=True)]
            self._store(index, slots[0], self._ranks.gather_rows(rows[0], counts))
            self._store(index, slots[1], rows[1])
            for n, lane in zip(normed, lanes, strict=True):
                if lane.parts:
                    x = lane.x + self._attend(index, n, weights, lane.positions, lane.parts)
                    lane.x = x + torch.nn.functional.silu(_norm(x) @ weights["ff_in"]) @ weights["ff_out"]
            after(index)
        return self._sample(batch, lanes[0].parts + lanes[1].parts, torch.cat([lane.x for lane in lanes]))

    def _lane(self, parts: list[_Part]) -> _Lane:
        positions = [p for part in parts for p in range(part.first, part.first + part.n)]
        tokens = [t for part in parts for t in part.tokens]
        return _Lane(
            parts, torch.tensor(positions, dtype=torch.long), self._embed[torch.tensor(tokens, dtype=torch.long)]
        )

    def _slots(self, scheduled: Sequence[Scheduled]) -> torch.Tensor:
        """Flat cache rows of these requests' new tokens."""
        rows = [
            s.blocks[position // self._size] * self._size + position % self._size
            for s in scheduled
            for position in range(s.start, s.start + s.n)
        ]
        return torch.tensor(rows, dtype=torch.long)

    def _rows(self, normed: torch.Tensor, weights: dict[str, torch.Tensor], positions: torch.Tensor) -> torch.Tensor:
        latent, rotary = (normed @ weights["kv"]).split_with_sizes([self._spec.latent, self._spec.rope], dim=-1)
        return torch.cat([_norm(latent), _rotate(rotary, positions)], dim=-1)

    def _store(self, layer: int, slots: torch.Tensor, rows: torch.Tensor) -> None:
        if len(slots):
            self.caches[layer].view(-1, self._spec.row)[slots] = rows

    def _attend(
        self,
        layer: int,
        normed: torch.Tensor,
        weights: dict[str, torch.Tensor],
        positions: torch.Tensor,
        mine: Sequence[_Part],
    ) -> torch.Tensor:
        """Attention of this rank's tokens over their requests' cached rows, ``[n, d_model]``."""
        spec = self._spec
        q = (normed @ weights["q"]).view(len(normed), spec.n_heads, spec.head_dim + spec.rope)
        plain, rotary = q.split_with_sizes([spec.head_dim, spec.rope], dim=-1)
        absorbed = torch.einsum("nhd,hld->nhl", plain, weights["k_up"])  # keys stay compressed
        rotary = _rotate(rotary, positions[:, None])
        out = torch.empty(len(normed), spec.n_heads, spec.latent, dtype=torch.float64)
        cursor = 0
        for part in mine:
            here = slice(cursor, cursor + part.n)
            cursor += part.n
            context = self._context(layer, part.scheduled, part.first + part.n)
            latent, shared = context.split_with_sizes([spec.latent, spec.rope], dim=-1)
            scores = torch.einsum("nhl,cl->nhc", absorbed[here], latent)
            scores = scores + torch.einsum("nhr,cr->nhc", rotary[here], shared)
            hidden = torch.arange(len(context))[None, :] > positions[here, None]
            scores = scores.masked_fill(hidden[:, None, :], -math.inf) / math.sqrt(spec.head_dim + spec.rope)
            out[here] = torch.einsum("nhc,cl->nhl", scores.softmax(dim=-1), latent)
        values = torch.einsum("nhl,hld->nhd", out, weights["v_up"])
        return values.reshape(len(normed), spec.n_heads * spec.head_dim) @ weights["out"]

    def _context(self, layer: int, scheduled: Scheduled, n_tokens: int) -> torch.Tensor:
        blocks = list(scheduled.blocks[: -(-n_tokens // self._size)])
        return self.caches[layer][blocks].reshape(-1, self._spec.row)[:n_tokens]

    def _sample(self, batch: Sequence[Scheduled], mine: Sequence[_Part], x: torch.Tensor) -> dict[str, int]:
        """Greedy tokens. A prefill's last hidden state is on one rank; the others add zeros, which is exact."""
        sampling = [s for s in batch if s.sample]
        if not sampling:
            return {}
        hidden = torch.zeros(len(sampling), self._spec.d_model, dtype=torch.float64)
        where = {s.id: index for index, s in enumerate(sampling)}
        cursor = 0
        for part in mine:
            cursor += part.n
            if part.samples and not part.scheduled.decode:
                hidden[where[part.scheduled.id]] = x[cursor - 1]
        if any(not s.decode for s in sampling):
            hidden = self._ranks.total(hidden)
        cursor = 0
        for part in mine:
            cursor += part.n
            if part.samples and part.scheduled.decode:
                hidden[where[part.scheduled.id]] = x[cursor - 1]
        logits = _norm(hidden) @ self._head
        best = logits.topk(2, dim=-1)
        self.min_margin = min(self.min_margin, float((best.values[:, 0] - best.values[:, 1]).min()))
        return {s.id: int(best.indices[index, 0]) for index, s in enumerate(sampling)}


def _cut(prefill: Sequence[Scheduled], skip: int, n: int) -> list[_Part]:
    """The parts of the flat prefill tokens ``[skip, skip + n)``."""
    parts: list[_Part] = []
    for scheduled in prefill:
        first, last = max(0, skip), min(scheduled.n, skip + n)
        if first < last:
            parts.append(_Part(scheduled, scheduled.start + first, last - first))
        skip -= scheduled.n
    return parts


def _norm(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + 1e-12)


def _rotate(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotary position, pairs (i, i + half)."""
    half = x.shape[-1] // 2
    frequency = 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = positions[..., None].to(torch.float64) * frequency
    cos, sin = angle.cos(), angle.sin()
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def make_model(config: EngineConfig, ranks: Ranks) -> Model:
    """The model that ``config.model.mode`` names."""
    if config.model.mode == "transformer":
        return Transformer(config, ranks)
    from kvconn.engine.content import ContentAddressed

    return ContentAddressed(config)
