"""Pure: the cells that two blocks have in common -> pieces that are one range of bytes on both sides.

Rules
1. Cells are joined as far as both sides keep them together, so that a read has as few ranges as the two layouts allow.
2. What a piece is decides nothing about which blocks it is read of.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import Final

import msgspec

from kvconn.base import Cells
from kvconn.geometry import Region

__all__ = ["Strip", "cut", "halves", "joined", "landing", "layout_name", "plain", "unit_of"]


class Strip(msgspec.Struct, frozen=True):
    """One piece of ``length`` bytes per unit of ``unit`` tokens at each of ``offsets`` (ours, theirs) in a block.

    The next unit of the block is ``local_step`` and ``remote_step`` bytes on.
    """

    unit: int
    length: int
    local_step: int
    remote_step: int
    offsets: tuple[tuple[int, int], ...]


def plain(length: int, heads: int, tokens: int, tokens_first: bool = False) -> Cells | None:
    """Cells with nothing between, one part; None where ``length`` is no multiple."""
    size, odd = divmod(length, heads * tokens)
    if odd or not size:
        return None
    if tokens_first:
        return Cells(heads, tokens, size, size, heads * size)
    return Cells(heads, tokens, size, tokens * size, size)


def halves(cells: Cells) -> Cells | None:
    """The same bytes with K and V told apart: a row of both is two cells."""
    if cells.parts > 1 or cells.part or cells.size % 2:
        return None
    return msgspec.structs.replace(cells, size=cells.size // 2, parts=2, part_stride=cells.size // 2)


def joined(cells: Cells) -> Cells:
    """The same bytes with K and V as one row, where they are."""
    if cells.parts == 1 or cells.part_stride != cells.size:
        return cells
    return msgspec.structs.replace(cells, size=cells.size * cells.parts, parts=1, part_stride=0)


def layout_name(regions: Iterable[Region]) -> str:
    """The ``kv_cache_layout`` of regions, for a peer that does not read cells. Where none says it: ``kvconn``, which
    such a peer refuses."""
    names = set()
    for region in regions:
        cells = joined(region.cells) if region.cells is not None else None
        if cells is None or cells == plain(region.length, cells.heads, cells.tokens):
            names.add("LBHNC")
        elif cells == plain(region.length, cells.heads, cells.tokens, tokens_first=True):
            names.add("LBNHC")
        else:
            names.add("kvconn")
    return names.pop() if len(names) == 1 else "kvconn"


def cut(parts: int, heads: int, unit: int, mine: Cells, theirs: Cells) -> Strip:
    """The first ``parts`` x ``heads`` x ``unit`` cells of either block, as strips; both have cells of one size.

    Where the tokens of a unit are not together on both sides the unit becomes one token.
    """
    chunk: Final = mine.size
    sizes = {"part": parts, "head": heads, "token": unit}
    steps = {
        "part": (mine.part_stride, theirs.part_stride),
        "head": (mine.head_stride, theirs.head_stride),
        "token": (mine.token_stride, theirs.token_stride),
    }
    left = [name for name, n in sizes.items() if n > 1]
    length = chunk
    while (name := next((name for name in left if steps[name] == (length, length)), None)) is not None:
        length *= sizes[name]
        left.remove(name)
    if "token" in left:
        return cut(parts, heads, 1, mine, theirs)
    offsets = [
        (sum(i * steps[name][0] for name, i in at), sum(i * steps[name][1] for name, i in at))
        for at in itertools.product(*([(name, i) for i in range(sizes[name])] for name in left))
    ]
    return Strip(unit, length, unit * mine.token_stride, unit * theirs.token_stride, tuple(offsets))


def landing(
    length: int, first: int, heads: int, mine: Cells, theirs: Cells
) -> tuple[Cells, int, tuple[int, ...]] | None:
    """Where ``heads`` of theirs, from number ``first`` of ours on, can land as they are, to be put in order afterwards.

    The cells at which they land, the offset of the first, and the shape ``(outer, rows, columns, bytes)`` in which the
    whole block then lies, whose rows and columns are to be exchanged. None where our block has gaps or nothing is won.
    """
    mine, theirs = joined(mine), joined(theirs)
    if length != mine.parts * mine.heads * mine.tokens * mine.size or mine.size != theirs.size:
        return None
    row = mine.tokens * mine.size
    tokens_first = mine.token_stride > mine.head_stride
    native = plain(mine.heads * row, mine.heads, mine.tokens, tokens_first)
    if native is None or (native.head_stride, native.token_stride) != (mine.head_stride, mine.token_stride):
        return None
    if tokens_first and theirs.token_stride == theirs.size:
        as_they_are = msgspec.structs.replace(mine, head_stride=row, token_stride=mine.size)
        return as_they_are, first * row, (mine.parts, mine.heads, mine.tokens, mine.size)
    if not tokens_first and theirs.head_stride == theirs.size and theirs.token_stride == heads * theirs.size:
        as_they_are = msgspec.structs.replace(mine, head_stride=mine.size, token_stride=heads * mine.size)
        return as_they_are, first * row, (mine.parts * mine.heads // heads, mine.tokens, heads, mine.size)
    return None


def unit_of(ours: tuple[int, int, int], theirs: tuple[int, int, int]) -> int:
    """Tokens that stay together in the blocks of both sides, each (tokens of a block, DCP ranks, interleave)."""
    if ours[1:] == theirs[1:]:
        return math.gcd(ours[0], theirs[0])
    turns = [interleave for _, dcp, interleave in (ours, theirs) if dcp > 1]
    return math.gcd(ours[0], theirs[0], *turns)
