"""A small decoder-only transformer with paged KV, latent or grouped-query, in float64, weights from a seed.

Rules
1. Every process with the same :class:`~kvconn.engine.config.ModelSpec` has the same weights.
2. Greedy. The smallest difference between the two best logits is kept: above ``margin_floor`` equal tokens mean equal
   KV up to rounding, whatever the topology.
3. A layer's cache is one tensor ``[num_blocks, kv heads, block_size, channels]`` (:mod:`kvconn.engine.attention`).
4. Under replicated PCP each rank computes its part of the prefill tokens, the rows are gathered, and every rank's cache
   ends up with the same bytes. So decode tokens are computed apart from prefill tokens, of which ranks have different
   numbers: a matrix product's rounding depends on its shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from kvconn.engine.attention import make_attention, norm
from kvconn.engine.config import EngineConfig
from kvconn.engine.scheduler import Scheduled

__all__ = ["Model", "Ranks", "Transformer", "empty_caches", "split"]

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


def empty_caches(config: EngineConfig) -> list[torch.Tensor]:
    """One rank's pool, a tensor per layer."""
    model = config.model
    shape = config.num_blocks, model.cache_heads, config.block_size, model.channels
    return [page_aligned(*shape) for _ in range(model.n_layers)]


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
        self.caches = empty_caches(config)
        self._attention = make_attention(config.model)
        self._init_weights()

    def _init_weights(self) -> None:
        spec = self._spec
        generator = torch.Generator().manual_seed(spec.seed)

        def draw(*shape: int) -> torch.Tensor:
            fan_in = shape[-2] if len(shape) > 1 else shape[-1]
            return torch.randn(*shape, generator=generator, dtype=torch.float64) / math.sqrt(fan_in)

        self._embed = torch.randn(spec.vocab_size, spec.d_model, generator=generator, dtype=torch.float64)
        self._layers = [
            self._attention.draw(draw)
            | {"ff_in": draw(spec.d_model, spec.d_ff), "ff_out": draw(spec.d_ff, spec.d_model)}
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
            normed = [norm(lane.x) for lane in lanes]
            rows = [self._attention.rows(n, weights, lane.positions) for n, lane in zip(normed, lanes, strict=True)]
            self._store(index, slots[0], self._ranks.gather_rows(rows[0], counts))
            self._store(index, slots[1], rows[1])
            for n, lane in zip(normed, lanes, strict=True):
                if lane.parts:
                    x = lane.x + self._attention.attend(n, weights, lane.positions, self._contexts(index, lane.parts))
                    lane.x = x + torch.nn.functional.silu(norm(x) @ weights["ff_in"]) @ weights["ff_out"]
            after(index)
        return self._sample(batch, lanes[0].parts + lanes[1].parts, torch.cat([lane.x for lane in lanes]))

    def _lane(self, parts: list[_Part]) -> _Lane:
        positions = [p for part in parts for p in range(part.first, part.first + part.n)]
        tokens = [t for part in parts for t in part.tokens]
        return _Lane(
            parts, torch.tensor(positions, dtype=torch.long), self._embed[torch.tensor(tokens, dtype=torch.long)]
        )

    def _slots(self, scheduled: Sequence[Scheduled]) -> tuple[torch.Tensor, torch.Tensor]:
        """Where these requests' new tokens are cached: block, and row in it."""
        positions = [(s.blocks, p) for s in scheduled for p in range(s.start, s.start + s.n)]
        blocks = [blocks[position // self._size] for blocks, position in positions]
        rows = [position % self._size for _, position in positions]
        return torch.tensor(blocks, dtype=torch.long), torch.tensor(rows, dtype=torch.long)

    def _store(self, layer: int, slots: tuple[torch.Tensor, torch.Tensor], rows: torch.Tensor) -> None:
        if len(rows):
            self.caches[layer][slots[0], :, slots[1]] = rows

    def _contexts(self, layer: int, parts: Sequence[_Part]) -> Iterator[tuple[int, torch.Tensor]]:
        for part in parts:
            n_tokens = part.first + part.n
            blocks = list(part.scheduled.blocks[: -(-n_tokens // self._size)])
            yield part.n, self.caches[layer][blocks].transpose(1, 2).flatten(0, 1)[:n_tokens]

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
        logits = norm(hidden) @ self._head
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


def make_model(config: EngineConfig, ranks: Ranks) -> Model:
    """The model that ``config.model.mode`` names."""
    if config.model.mode == "transformer":
        return Transformer(config, ranks)
    from kvconn.engine.content import ContentAddressed

    return ContentAddressed(config)
