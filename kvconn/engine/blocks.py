"""The block pool: who holds which block, which blocks hold known content, which go next.

Rules
1. A block is free when nobody references it; a free block keeps its content, and can be found by its hash, until it
   is given out again.
2. Free blocks are given out from the head of one queue. A request's blocks return to its tail in reverse, so that of
   one prompt the end is forgotten first. (vLLM's order.)
3. A block's hash covers its tokens and its predecessor's hash: equal hashes mean equal prefixes.
No I/O, no clock.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence

__all__ = ["BlockPool", "block_hashes"]


def block_hashes(tokens: Sequence[int], block_size: int, known: Sequence[bytes] = ()) -> list[bytes]:
    """One hash per full block of ``tokens``; ``known`` are the first ones, computed before."""
    hashes = list(known)
    parent = hashes[-1] if hashes else b""
    for start in range(len(hashes) * block_size, len(tokens) - block_size + 1, block_size):
        digest = hashlib.sha256(parent)
        digest.update(b"".join(t.to_bytes(8, "little") for t in tokens[start : start + block_size]))
        parent = digest.digest()
        hashes.append(parent)
    return hashes


class BlockPool:
    """``num_blocks`` blocks with reference counts and a prefix cache."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free: OrderedDict[int, None] = OrderedDict((block, None) for block in range(num_blocks))
        self._references = [0] * num_blocks
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def find(self, hashes: Iterable[bytes]) -> list[int]:
        """The longest run of cached blocks for these hashes, in order. Takes no reference."""
        found: list[int] = []
        for one in hashes:
            block = self._block_of.get(one)
            if block is None:
                break
            found.append(block)
        return found

    def free_among(self, blocks: Iterable[int]) -> int:
        """How many of these would leave the free queue if they were taken."""
        return sum(1 for block in blocks if self._references[block] == 0)

    def take(self, blocks: Iterable[int]) -> None:
        """Reference cached blocks."""
        for block in blocks:
            if self._references[block] == 0:
                del self._free[block]
            self._references[block] += 1

    def allocate(self, count: int) -> list[int] | None:
        """``count`` blocks from the head of the queue, their old content forgotten; None, and no change, if too few."""
        if count > len(self._free):
            return None
        taken = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            self._forget(block)
            self._references[block] = 1
            taken.append(block)
        return taken

    def give_back(self, blocks: Sequence[int]) -> None:
        """Drop one reference of each of a request's blocks, in the order of its table."""
        for block in reversed(blocks):
            assert self._references[block] > 0, f"block {block} is free already"
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free[block] = None

    def cache(self, block: int, content: bytes) -> None:
        """This block now holds ``content``, wholly. The first block of a content stays the one that is found."""
        if block in self._hash_of or content in self._block_of:
            return
        self._hash_of[block] = content
        self._block_of[content] = block

    def reset(self) -> None:
        """Forget all content."""
        self._hash_of.clear()
        self._block_of.clear()

    def _forget(self, block: int) -> None:
        content = self._hash_of.pop(block, None)
        if content is not None:
            del self._block_of[content]

    def __repr__(self) -> str:
        return f"BlockPool(used={self.num_used}/{self.num_blocks} cached={len(self._block_of)})"
