"""Who loads what of one request, and whose params its client gets. Pure.

Rules
1. A load is a row of ranges, each of one child, each beginning where the one before ends. Children are asked in order,
   each for what lies behind everything offered so far; a child that offers nothing leaves its place to the next. The
   row ends at the end of the request, at an offer that ends inside a block, and at a "not yet" after a match; a "not
   yet" before any match delays the request. Asking is idempotent: the last answer counts, nothing is held (C10).
2. The row is asynchronous when one of its ranges is: the request is parked, and its receive is a life over the
   asynchronous children that kept a range. A synchronous range in such a row has no forward that waits for it, so each
   rank waits for it itself in the step that announces it, before it reports anything of that step; it is in no claim.
   When the engine allocates less than was offered, the row is cut there. A range that fails fails the load, once, when
   all of them are quiet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from kvconn.base import KVBlocks

__all__ = ["Ask", "Match", "Range", "choose", "merge_params"]


class Range(msgspec.Struct, frozen=True):
    """Tokens ``start`` up to ``stop`` of a request are child ``child``'s to load."""

    child: int
    start: int
    stop: int
    asynchronous: bool

    @property
    def n(self) -> int:
        """Tokens."""
        return self.stop - self.start


class Match(msgspec.Struct, frozen=True):
    """Who loads what, beyond a local hit of ``start`` tokens (rules 1 and 2). ``delayed``: not yet, ask again."""

    start: int = 0
    ranges: tuple[Range, ...] = ()
    delayed: bool = False

    @property
    def tokens(self) -> int:
        return self.ranges[-1].stop - self.start if self.ranges else 0

    @property
    def asynchronous(self) -> bool:
        return any(one.asynchronous for one in self.ranges)

    @property
    def answer(self) -> tuple[int | None, bool]:
        """As ``get_num_new_matched_tokens`` returns it."""
        return (None, False) if self.delayed else (self.tokens, self.asynchronous)

    def cut(self, tokens: int) -> tuple[Range, ...]:
        """The ranges that are left when the engine allocated ``tokens`` of those offered."""
        end = self.start + tokens
        return tuple(msgspec.structs.replace(r, stop=min(r.stop, end)) for r in self.ranges if r.start < end)

    def blocks(self, blocks: KVBlocks, part: Range, block_size: int) -> KVBlocks:
        """``blocks`` as the child of ``part`` must see them: what lies before its range is there already."""
        before = (part.start - self.start) // block_size
        return KVBlocks(blocks.ids, tuple(hit + before for hit in blocks.hashed))


#: ``get_num_new_matched_tokens`` of one child about one request, given how many tokens are there already.
Ask = Callable[[int], tuple[int | None, bool]]


def choose(ask: Iterable[Ask], start: int, block_size: int, total: int) -> Match:
    """Ask children in order (rule 1). Tokens: ``start`` are a local hit, the request has ``total``."""
    ranges: list[Range] = []
    end = start
    for child, question in enumerate(ask):
        if ranges and (end % block_size or end >= total):
            break
        tokens, asynchronous = question(end)
        if tokens is None and not ranges:
            return Match(start, delayed=True)
        if tokens is None:
            break
        if tokens > 0:
            ranges.append(Range(child, end, end + tokens, asynchronous))
            end += tokens
    return Match(start, tuple(ranges))


def merge_params(returned: Sequence[Mapping[str, Any] | None]) -> tuple[dict[str, Any] | None, tuple[int, ...]]:
    """The client's params, and the children left out.

    A child that contradicts an earlier one is left out whole: half of its params beside another's would describe
    blocks that nobody holds.
    """
    merged: dict[str, Any] | None = None
    left_out: list[int] = []
    for child, params in enumerate(returned):
        if params is None:
            continue
        if merged is not None and any(key in merged and merged[key] != value for key, value in params.items()):
            left_out.append(child)
        else:
            merged = {**(merged or {}), **params}
    return merged, tuple(left_out)
