"""What a block's bytes are, so that only the same bytes are ever taken for it.

Rules
1. A block is named by (namespace, share, content). *Content* is the engine's block hash, which covers the tokens of
   the block and of everything before it. *Namespace* covers what else decides the bytes: model, element type,
   geometry and how an engine's ranks divide them. *Share* is what one rank holds of the block.
2. Within one engine namespace and share are constant, so tables there are keyed by content alone. What outlives an
   engine, or is read by another one, carries all three: a block stored at tp=1 is not found at tp=2.
3. Replicated PCP ranks hold the same bytes and have the same share.
"""

from __future__ import annotations

import hashlib

import msgspec

from kvconn.config import ModelView, ParallelConfig
from kvconn.geometry import is_replicated, share_of

__all__ = ["Identity", "identity_of"]

#: raised whenever the meaning of stored bytes changes
VERSION = 1


class Identity(msgspec.Struct, frozen=True):
    """What this engine's blocks are, and which share of them a rank holds; ``shares`` are all ranks' shares, once each.

    ``share`` is None on a scheduler half.
    """

    namespace: str
    shares: tuple[str, ...]
    share: str | None = None


def identity_of(model: ModelView, parallel: ParallelConfig, block_size: int, rank: int | None) -> Identity:
    """The identity of an engine's blocks, seen from ``rank``."""
    shares = tuple(dict.fromkeys(share_of(parallel, one) for one in range(parallel.world)))
    divided = (parallel.tp, parallel.pp, 1 if is_replicated(parallel) else parallel.pcp, parallel.dcp)
    factors = (VERSION, msgspec.structs.astuple(model), block_size, divided)
    namespace = hashlib.sha256(msgspec.msgpack.encode(factors)).hexdigest()[:32]
    return Identity(namespace, shares, None if rank is None else share_of(parallel, rank))
