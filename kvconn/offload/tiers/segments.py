"""One file of the file tier, a *segment*: the blocks that were saved together, and the proof of each.

Layout: MAGIC, the number of blocks, the length of each, a digest; one entry per block (key, sum); the blocks, one
behind another.

Rules
1. The digest is of the entries, and keyed by whose they are (namespace and share): entries that were torn, changed, or
   are of another share prove nothing. A file that is not exactly as long as its entries say is no segment.
2. Each block has a sum of its own, so that one is read without the others: of its words of 32 bits, each times a number
   of 64 bits that belongs to its place and that nobody chose. Whatever an accident changes, it is missed once in 2^33
   times at most. Sums do not keep out anybody who may write there.
3. A segment never changes. It is removed whole.
What is done to bytes is done in a few calls for all blocks: each lets go of the interpreter, and waiting for it again
costs the engine's step more than the sum of a block does.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from kvconn.offload.tiers.base import MAX_KEY

__all__ = ["BLOCKS_MAX", "Place", "key_of", "length_of", "pack", "read_block", "read_entries"]

MAGIC = b"kvconn3\n"
DIGEST = 16
HEAD = struct.Struct(f"<{len(MAGIC)}sII{DIGEST}s")
ENTRY = struct.Struct(f"<B{MAX_KEY}sQ")
BLOCKS_MAX = 64
WORD = np.dtype("<u4")


class Place(NamedTuple):
    """Where in a segment a block lies, and what its bytes sum up to."""

    key: bytes
    at: int
    length: int
    sum: int


def key_of(namespace: str, share: str) -> bytes:
    """Whose a segment is: what keys its digest."""
    return hashlib.blake2b(f"{len(namespace)}:{namespace}{share}".encode(), digest_size=32).digest()


def length_of(blocks: int, length: int) -> int:
    """Bytes of a segment of so many blocks of ``length`` bytes each."""
    return HEAD.size + blocks * (ENTRY.size + length)


def pack(owner: bytes, keys: Sequence[bytes], data: memoryview) -> tuple[bytes, list[Place]]:
    """What stands before ``data``, the blocks of ``keys`` one behind another, and where each of them will lie."""
    count, length = len(keys), len(data) // len(keys)
    sums = _sums(data, count)
    entries = b"".join(ENTRY.pack(len(key), key, sum_) for key, sum_ in zip(keys, sums, strict=True))
    head = HEAD.pack(MAGIC, count, length, _digest(owner, length, entries))
    return head + entries, _places(keys, length, sums)


def read_entries(fd: int, owner: bytes) -> list[Place] | None:
    """The blocks of an open file; None: it is no whole segment of this owner (rule 1)."""
    start = _read(fd, length_of(BLOCKS_MAX, 0), 0)
    if len(start) < HEAD.size:
        return None
    magic, count, length, digest = HEAD.unpack_from(start)
    if magic != MAGIC or not 1 <= count <= BLOCKS_MAX or length < 1:
        return None
    entries = start[HEAD.size : length_of(count, 0)]
    if len(entries) < count * ENTRY.size or digest != _digest(owner, length, entries):
        return None
    if os.fstat(fd).st_size != length_of(count, length):
        return None
    told = list(ENTRY.iter_unpack(entries))
    return _places([key[:size] for size, key, _ in told], length, [sum_ for _, _, sum_ in told])


def read_block(fd: int, place: Place) -> bytes | None:
    """A block out of an open segment; None: those are not the bytes that were written."""
    data = _read(fd, place.length, place.at)
    return data if len(data) == place.length and _sums(data, 1) == [place.sum] else None


def _places(keys: Sequence[bytes], length: int, sums: Sequence[int]) -> list[Place]:
    first = length_of(len(keys), 0)
    return [Place(key, first + k * length, length, sums[k]) for k, key in enumerate(keys)]


def _read(fd: int, length: int, at: int) -> bytes:
    """So many bytes, or fewer where the file ends."""
    data = os.pread(fd, length, at)
    while len(data) < length and (more := os.pread(fd, length - len(data), at + len(data))):
        data += more
    return data


def _digest(owner: bytes, length: int, entries: bytes) -> bytes:
    return hashlib.blake2b(length.to_bytes(4, "little") + entries, digest_size=DIGEST, key=owner).digest()


def _sums(data: bytes | memoryview, count: int) -> list[int]:
    """The sum of each of ``count`` blocks (rule 2)."""
    rows = np.frombuffer(data, np.uint8).reshape(count, -1)
    if rows.shape[1] % WORD.itemsize:
        rows = np.pad(rows, ((0, 0), (0, -rows.shape[1] % WORD.itemsize)))
    words = rows.view(WORD)
    sums: list[int] = np.einsum("ij,j->i", words, _weights(words.shape[1])).tolist()
    return sums


@lru_cache(maxsize=4)
def _weights(count: int) -> Any:
    """The first ``count`` of the numbers that words are multiplied with, the same everywhere."""
    return np.frombuffer(hashlib.shake_256(MAGIC).digest(8 * count), np.dtype("<u8"))
