"""Which blocks of which cache group a request has.

Rules
1. Each group has a pool, and a table per request; a token's block has the same index in all tables. The first group is
   full: a table of it begins with the prompt and has no holes. A group of state has one slot per request instead.
2. A window group keeps a block only while a token to come can see into it. Where a block was given back, or was never
   needed, the table says ``NO_BLOCK``.
3. All groups get what they need, or none gets anything.
4. A state is that of all tokens so far: there is none of a prompt's beginning to be found again. So with a group of
   state nothing is a prefix hit.
No I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvconn.base import NO_BLOCK, BlockIds, GroupView
from kvconn.engine.blocks import BlockPool
from kvconn.engine.request import Request
from kvconn.geometry import blocks_for

__all__ = ["Tables"]


class _Group:
    """A pool. ``window`` in tokens, None: every token sees all before it. ``state``: a slot per request."""

    def __init__(self, pool: BlockPool, view: GroupView, block_tokens: int) -> None:
        self.pool = pool
        self.window = view.window
        self.state = view.kind == "state"
        self._size = block_tokens

    def length(self, n_tokens: int) -> int:
        """Of a table that reaches up to so many tokens."""
        return min(1, n_tokens) if self.state else blocks_for(n_tokens, self._size)

    def first(self, n_computed: int) -> int:
        """The first block that a token at position ``n_computed`` or later can see into."""
        return 0 if self.window is None else max(0, n_computed - self.window + 1) // self._size


class Tables:
    """The tables of all requests. ``num_blocks`` in each group's pool, of ``block_tokens`` tokens."""

    def __init__(self, num_blocks: int, block_tokens: int, groups: Sequence[GroupView]) -> None:
        self._size = block_tokens
        self.groups = [_Group(BlockPool(num_blocks), group, block_tokens) for group in groups]

    @property
    def num_used(self) -> int:
        return sum(group.pool.num_used for group in self.groups)

    @property
    def num_blocks(self) -> int:
        return sum(group.pool.num_blocks for group in self.groups)

    def hits(self, request: Request) -> list[list[int]]:
        """The longest prefix that is cached in every group, as tables; at least one token is left to compute."""
        if any(group.state for group in self.groups):
            return [[] for _ in self.groups]
        hashes = request.hashes()[: (request.n_total - 1) // self._size]
        n = len(self.groups[0].pool.find(hashes))
        while True:
            firsts = [group.first(n * self._size) for group in self.groups]
            found = [g.pool.find(hashes[first:n]) for g, first in zip(self.groups, firsts, strict=True)]
            if all(first + len(blocks) == n for first, blocks in zip(firsts, found, strict=True)):
                return [[NO_BLOCK] * first + blocks for first, blocks in zip(firsts, found, strict=True)]
            n -= 1

    def admit(self, request: Request, hits: list[list[int]], n_tokens: int) -> bool:
        """Give ``request`` these hits and blocks up to ``n_tokens`` tokens, which it will have. False: no room."""
        computed = min(n_tokens, request.n_total - 1)  # the last token is computed in any case
        kept, fresh = [], []
        for group, table in zip(self.groups, hits, strict=True):
            end = group.length(n_tokens)
            first = min(group.first(computed), end)
            kept.append([NO_BLOCK] * min(first, len(table)) + table[first:])
            fresh.append(end - max(first, len(table)))
        needed = zip(self.groups, kept, fresh, strict=True)
        if any(n + group.pool.free_among(present(table)) > group.pool.num_free for group, table, n in needed):
            return False
        for group, table, n in zip(self.groups, kept, fresh, strict=True):
            group.pool.take(present(table))
            end = group.length(n_tokens)
            table.extend([NO_BLOCK] * (end - n - len(table)) + _allocate(group.pool, n))
        request.tables = kept
        return True

    def grow(self, request: Request, n_tokens: int) -> BlockIds | None:
        """Blocks for ``n_tokens`` tokens; the new ones by group, or None when there are too few.

        What no token to come can see is given back first.
        """
        for group, table in zip(self.groups, request.tables, strict=True):
            gone = range(min(group.first(request.n_computed), len(table)))
            group.pool.give_back(present(table[index] for index in gone))
            for index in gone:
                table[index] = NO_BLOCK
        pairs = list(zip(self.groups, request.tables, strict=True))
        more = [max(0, group.length(n_tokens) - len(table)) for group, table in pairs]
        if any(group.pool.num_free < n for group, n in zip(self.groups, more, strict=True)):
            return None
        new = [_allocate(group.pool, n) for group, n in zip(self.groups, more, strict=True)]
        for table, blocks in zip(request.tables, new, strict=True):
            table.extend(blocks)
        return tuple(map(tuple, new))

    def cache(self, request: Request, first: int, end: int) -> None:
        """The blocks from index ``first`` up to ``end`` are full."""
        for index in range(first, end):
            for group, table in zip(self.groups, request.tables, strict=True):
                if not group.state and table[index] != NO_BLOCK:
                    group.pool.cache(table[index], request.hashes()[index])

    def give_back(self, request: Request) -> None:
        """The request has no blocks any more."""
        for group, table in zip(self.groups, request.tables, strict=True):
            group.pool.give_back(present(table))
            table.clear()

    def __repr__(self) -> str:
        return " ".join(repr(group.pool) for group in self.groups)


def present(table: Iterable[int]) -> list[int]:
    """The blocks of a table."""
    return [block for block in table if block != NO_BLOCK]


def _allocate(pool: BlockPool, count: int) -> list[int]:
    taken = pool.allocate(count)
    assert taken is not None, "free blocks were counted"
    return taken
