"""Content-addressed mode: KV is a hash of what it must be, tokens are a hash of the KV that is read.

Rules
1. A head's row of the cache is drawn from a hash of (all tokens up to its own, layer, head): any other prefix,
   position, layer or head gives other bytes.
2. The next token is a hash of every byte of the request's context as it lies in the cache, each weighted by its place:
   a wrong, stale or torn block changes it. Text alone can't show that, because a model forgives.
3. Places are global (layer, token, head), so every topology gives the same tokens and D's bytes must be P's.
4. A state is hashed on from what it was, token by token: a wrong, stale or torn one is never right again.
Arithmetic is modulo 2**64; rows are stored bit for bit in the float64 cache.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from kvconn.engine.config import EngineConfig
from kvconn.engine.model import LayerHook, empty_caches
from kvconn.engine.portion import Portion, holds, seen, slots
from kvconn.engine.ranks import Ranks
from kvconn.engine.scheduler import Scheduled

__all__ = ["ContentAddressed", "prefix_hashes"]

U64 = npt.NDArray[np.uint64]
_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def _mix(x: U64) -> U64:
    """splitmix64's finalizer (Steele, Lea and Flood 2014), elementwise."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def prefix_hashes(tokens: Sequence[int], before: int = _GOLDEN) -> list[int]:
    """For each token a hash of it and all before it, starting from the hash ``before``."""
    hashes = []
    for token in tokens:
        before = (before ^ (token + 1)) * 0xD6E8FEB86659FD93 & _MASK
        before ^= before >> 32
        hashes.append(before)
    return hashes


class ContentAddressed:
    """One rank. It writes its own rows without asking anybody; what it reads is added to the others'."""

    def __init__(self, config: EngineConfig, ranks: Ranks) -> None:
        self._spec = config.model
        self._size = config.block_size
        self._ranks = ranks
        self._portion = Portion.of(config.model, config.parallel, ranks.rank)
        self._cells = [Portion.of(config.model, config.parallel, rank).cells for rank in ranks.members.holders]
        self.min_margin = math.inf
        self.caches = empty_caches(config, self._portion)
        self._bytes: list[U64] = [cache.view(torch.int64).numpy().view(np.uint64) for cache in self.caches]
        self._columns = np.arange(1, self._spec.channels + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
        #: layers with KV
        self._seeing = [layer for layer, keeps in enumerate(self._portion.keeps_state) if not keeps]
        kv = self._portion.kv
        self._heads = _mix(np.arange(kv.first, kv.first + kv.count, dtype=np.uint64))
        #: request id -> hashes of all its token prefixes so far
        self._prefixes: dict[str, list[int]] = {}

    def forward(self, batch: Sequence[Scheduled], before: LayerHook, after: LayerHook) -> dict[str, int]:
        """Write the new rows, then read whole contexts."""
        for scheduled in batch:
            self._extend(scheduled)
        for layer in range(self._portion.n_layers):
            before(layer)
            for s in batch:
                (self._join if self._portion.keeps_state[layer] else self._write)(s, layer)
            after(layer)
        return self._sample([s for s in batch if s.sample])

    def _write(self, s: Scheduled, layer: int) -> None:
        tokens = self._portion.tokens
        positions = torch.arange(s.start, s.start + s.n)
        positions = positions[holds(tokens, positions)]
        index, row = (part.numpy() for part in slots(tokens, positions, self._size))
        blocks = np.array(s.tables[self._portion.groups[layer]], dtype=np.int64)[index]
        prefixes = [self._prefixes[s.id][position] for position in positions.tolist()]
        self._bytes[layer][blocks, :, row] = self._rows(prefixes, layer)

    def _join(self, s: Scheduled, layer: int) -> None:
        slot = self._slot(s, layer)
        if s.start == 0:
            slot[:] = 0
        self._joined(slot, self._prefixes[s.id][s.start : s.start + s.n], layer)

    def _slot(self, s: Scheduled, layer: int) -> U64:
        slot: U64 = self._bytes[layer][s.tables[self._portion.groups[layer]][0]]
        return slot

    def _joined(self, slot: U64, prefixes: Sequence[int], layer: int) -> None:
        places = self._state_places(layer)
        for prefix in prefixes:
            slot[:] = _mix(slot ^ _mix(places ^ np.uint64(prefix)))

    def _state_places(self, layer: int) -> U64:
        """For every number of a slot its place among all of the model."""
        portion, sizes = self._portion, self._spec.state_sizes
        heads = np.arange(portion.first_head, portion.first_head + portion.n_heads, dtype=np.uint64)[:, None]
        parts = [
            heads * np.uint64(size) + np.arange(size, dtype=np.uint64) + np.uint64(part << 60)
            for part, size in enumerate(sizes, 1)
        ]
        places: U64 = np.concatenate([part.reshape(-1) for part in parts])
        return places + np.uint64(portion.first_layer + layer << 32)

    def forget(self, ids: Sequence[str]) -> None:
        """These requests ended."""
        for id in ids:
            self._prefixes.pop(id, None)

    def _extend(self, s: Scheduled) -> None:
        known = self._prefixes.get(s.id, []) if s.token_start else []
        fresh = s.tokens[len(known) - s.token_start :]
        self._prefixes[s.id] = known + prefix_hashes(fresh, known[-1] if known else _GOLDEN)

    def _rows(self, prefixes: Sequence[int], layer: int) -> U64:
        """``[tokens, heads, channels]``; ``layer`` is one of this rank's."""
        layer += self._portion.first_layer
        seeds = np.array(prefixes, dtype=np.uint64) ^ np.uint64((layer + 1) * 0xA24BAED4963EE407 & _MASK)
        return _mix(_mix(seeds[:, None] + self._heads)[..., None] + self._columns)

    def _context(self, s: Scheduled, layer: int) -> tuple[U64, torch.Tensor]:
        """The rows that ``s``'s last token sees here, and their positions."""
        portion, n_tokens = self._portion, s.start + s.n
        table, window = s.tables[portion.groups[layer]], portion.windows[layer]
        blocks, positions = seen(portion.tokens, table, n_tokens, window, 1, self._size)
        shape = -1, portion.kv.count, self._spec.channels
        context: U64 = self._bytes[layer][blocks].swapaxes(1, 2).reshape(shape)[: len(positions)]
        visible = positions >= (0 if window is None else n_tokens - window)
        return context[visible.numpy()], positions[visible]

    def _sample(self, batch: Sequence[Scheduled]) -> dict[str, int]:
        """The same on all ranks that hold a part. Copies count once; a copy that differs changes the token as well."""
        if not batch:
            return {}
        own = np.array([(self._read(s), self._remembered(s)) for s in batch], dtype=np.uint64)
        parts = self._ranks.holders.gather(torch.from_numpy(own.view(np.int64)))
        total: U64 = np.zeros(len(batch), dtype=np.uint64)
        first: dict[tuple[int, int, int], U64] = {}
        for cells, part in zip(self._cells, parts, strict=True):
            told, remembered = part.numpy().view(np.uint64).T
            total += remembered  # each rank has another part of a state
            total += (told ^ first[cells]) * np.uint64(_GOLDEN) if cells in first else told
            first.setdefault(cells, told)
        tokens: U64 = _mix(total) % np.uint64(self._spec.vocab_size)
        return {s.id: int(token) for s, token in zip(batch, tokens, strict=True)}

    def _read(self, s: Scheduled) -> int:
        """A hash of every byte that is seen here, each by its place among all."""
        portion, spec = self._portion, self._spec
        heads = np.arange(portion.kv.first, portion.kv.first + portion.kv.count, dtype=np.uint64)
        columns: U64 = np.arange(spec.channels, dtype=np.uint64)
        total = 0
        for layer in self._seeing:
            context, positions = self._context(s, layer)
            rows: U64 = positions.numpy().astype(np.uint64)[:, None] * np.uint64(spec.cache_heads) + heads
            places: U64 = rows[..., None] * np.uint64(spec.channels) + columns
            there: U64 = places + np.uint64(portion.first_layer + layer << 32)
            total += int(_mix(context ^ _mix(there)).sum(dtype=np.uint64))
        return total & _MASK

    def _remembered(self, s: Scheduled) -> int:
        """The same of every byte of the states that are here."""
        total = 0
        for layer in range(self._portion.n_layers):
            if self._portion.keeps_state[layer]:
                there = _mix(self._state_places(layer))
                total += int(_mix(self._slot(s, layer) ^ there).sum(dtype=np.uint64))
        return total & _MASK
