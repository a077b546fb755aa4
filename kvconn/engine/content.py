"""Content-addressed mode: KV is a hash of what it must be, tokens are a hash of the KV that is read.

Rules
1. A head's row of the cache is drawn from a hash of (all tokens up to its own, layer, head): any other prefix,
   position, layer or head gives other bytes.
2. The next token is a hash of every byte of the request's context as it lies in the cache, each weighted by its place:
   a wrong, stale or torn block changes it. Text alone can't show that, because a model forgives.
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
    """One rank. Every rank computes every row, so there is nothing to gather."""

    def __init__(self, config: EngineConfig) -> None:
        self._spec = config.model
        self._size = config.block_size
        self.min_margin = math.inf
        self.caches = empty_caches(config)
        self._bytes: list[U64] = [cache.view(torch.int64).numpy().view(np.uint64) for cache in self.caches]
        self._columns = np.arange(1, self._spec.channels + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
        self._heads = _mix(np.arange(self._spec.cache_heads, dtype=np.uint64))
        #: request id -> hashes of all its token prefixes so far
        self._prefixes: dict[str, list[int]] = {}

    def forward(self, batch: Sequence[Scheduled], before: LayerHook, after: LayerHook) -> dict[str, int]:
        """Write the new rows, then read whole contexts."""
        for scheduled in batch:
            self._extend(scheduled)
        for layer in range(self._spec.n_layers):
            before(layer)
            for s in batch:
                places = range(s.start, s.start + s.n)
                blocks, rows = [s.blocks[p // self._size] for p in places], [p % self._size for p in places]
                self._bytes[layer][blocks, :, rows] = self._rows(self._prefixes[s.id][s.start : s.start + s.n], layer)
            after(layer)
        return {s.id: self._read(s) for s in batch if s.sample}

    def forget(self, ids: Sequence[str]) -> None:
        """These requests ended."""
        for id in ids:
            self._prefixes.pop(id, None)

    def _extend(self, s: Scheduled) -> None:
        known = self._prefixes.get(s.id, []) if s.token_start else []
        fresh = s.tokens[len(known) - s.token_start :]
        self._prefixes[s.id] = known + prefix_hashes(fresh, known[-1] if known else _GOLDEN)

    def _rows(self, prefixes: Sequence[int], layer: int) -> U64:
        """``[tokens, heads, channels]``."""
        seeds = np.array(prefixes, dtype=np.uint64) ^ np.uint64((layer + 1) * 0xA24BAED4963EE407 & _MASK)
        return _mix(_mix(seeds[:, None] + self._heads)[..., None] + self._columns)

    def _context(self, s: Scheduled, layer: int, n_tokens: int) -> U64:
        blocks = list(s.blocks[: -(-n_tokens // self._size)])
        heads, channels = self._spec.cache_heads, self._spec.channels
        context: U64 = self._bytes[layer][blocks].swapaxes(1, 2).reshape(-1, heads, channels)[:n_tokens]
        return context

    def _read(self, s: Scheduled) -> int:
        """A hash of every byte of the context, each by its place."""
        n_tokens = s.start + s.n
        total = 0
        for layer in range(self._spec.n_layers):
            context = self._context(s, layer, n_tokens)
            places = np.arange(layer << 32, (layer << 32) + context.size, dtype=np.uint64).reshape(context.shape)
            total += int(_mix(context ^ _mix(places)).sum(dtype=np.uint64))
        return int(_mix(np.array([total & _MASK], dtype=np.uint64))[0] % np.uint64(self._spec.vocab_size))

    def first_wrong(self, s: Scheduled, tokens: Sequence[int]) -> tuple[int, int, int] | None:
        """(layer, block id, position) of the first row of ``s``'s context that is not what ``tokens`` say, or None."""
        expected = prefix_hashes(tokens)
        for layer in range(self._spec.n_layers):
            bad = np.flatnonzero((self._context(s, layer, len(tokens)) != self._rows(expected, layer)).any(axis=(1, 2)))
            if bad.size:
                position = int(bad[0])
                return layer, s.blocks[position // self._size], position
        return None
