"""One file of the file tier, a *segment*: the blocks that were saved together, and the proof of each.

Layout: MAGIC, the number of blocks, a digest; one entry per block (key, length, sums); the blocks, one behind another.

Rules
1. The digest is of the entries, and keyed by whose they are (namespace and share): entries that were torn, changed, or
   are of another share prove nothing. A file that is not exactly as long as its entries say is no segment.
2. Each block has two sums over its bytes, of 32 and 64 bits, so that one is read without the others. They are quick and
   find accidents; they do not keep out anybody who may write there.
3. A segment never changes. It is removed whole.
"""

from __future__ import annotations

import hashlib
import os
import struct
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvconn.offload.tiers.base import MAX_KEY

__all__ = ["BLOCKS_MAX", "Place", "key_of", "length_of", "pack", "read_block", "read_entries"]

MAGIC = b"kvconn3\n"
DIGEST = 16
HEAD = struct.Struct(f"<{len(MAGIC)}sI{DIGEST}s")
ENTRY = struct.Struct(f"<B{MAX_KEY}sI12s")
SUMS = struct.Struct("<IQ")
BLOCKS_MAX = 64


class Place(NamedTuple):
    """Where in a segment a block lies, and what its bytes sum up to."""

    key: bytes
    at: int
    length: int
    sums: bytes


def key_of(namespace: str, share: str) -> bytes:
    """Whose a segment is: what keys its digest."""
    return hashlib.blake2b(f"{len(namespace)}:{namespace}{share}".encode(), digest_size=32).digest()


def length_of(blocks: int, data: int) -> int:
    """Bytes of a segment of so many blocks that have so many bytes together."""
    return HEAD.size + blocks * ENTRY.size + data


def pack(owner: bytes, blocks: Sequence[tuple[bytes, bytes]]) -> tuple[bytes, list[Place]]:
    """What stands before the blocks' bytes, and where each of them will lie."""
    sums = [_sums(data) for _, data in blocks]
    entries = b"".join(
        ENTRY.pack(len(key), key, len(data), sum_) for (key, data), sum_ in zip(blocks, sums, strict=True)
    )
    places, at = [], length_of(len(blocks), 0)
    for (key, data), sum_ in zip(blocks, sums, strict=True):
        places.append(Place(key, at, len(data), sum_))
        at += len(data)
    return HEAD.pack(MAGIC, len(blocks), _digest(owner, entries)) + entries, places


def read_entries(fd: int, owner: bytes) -> list[Place] | None:
    """The blocks of an open file; None: it is no whole segment of this owner (rule 1)."""
    start = _read(fd, length_of(BLOCKS_MAX, 0), 0)
    if len(start) < HEAD.size:
        return None
    magic, count, digest = HEAD.unpack_from(start)
    end = length_of(min(count, BLOCKS_MAX + 1), 0)
    entries = start[HEAD.size : end]
    if magic != MAGIC or len(start) < end or count > BLOCKS_MAX or digest != _digest(owner, entries):
        return None
    places, at = [], end
    for size, key, length, sums in ENTRY.iter_unpack(entries):
        places.append(Place(key[:size], at, length, sums))
        at += length
    return places if os.fstat(fd).st_size == at else None


def read_block(fd: int, place: Place) -> bytes | None:
    """A block out of an open segment; None: those are not the bytes that were written."""
    data = _read(fd, place.length, place.at)
    return data if len(data) == place.length and _sums(data) == place.sums else None


def _read(fd: int, length: int, at: int) -> bytes:
    """So many bytes, or fewer where the file ends."""
    data = os.pread(fd, length, at)
    while len(data) < length and (more := os.pread(fd, length - len(data), at + len(data))):
        data += more
    return data


def _digest(owner: bytes, entries: bytes) -> bytes:
    return hashlib.blake2b(entries, digest_size=DIGEST, key=owner).digest()


def _sums(data: bytes) -> bytes:
    words = np.frombuffer(data, np.dtype("<u8"), len(data) // 8)
    return SUMS.pack(zlib.crc32(data), int(np.add.reduce(words)))
