"""The host tier: blocks by content hash in one page-aligned buffer.

Rules
1. A slot is free, being written (reserved), or stored. What is being written is pinned: it is never evicted and not
   yet readable.
2. Stored slots are evicted least recently used first, and only to make room for a reservation.
3. One thread calls the methods; other threads write into reserved slots by address and call nothing.
"""

from __future__ import annotations

import ctypes
import mmap
from collections import OrderedDict

from kvconn.errors import ConfigError

__all__ = ["HostTier"]


class HostTier:
    """``capacity`` bytes for blocks of ``block_bytes`` each. Raises ConfigError when not even one fits."""

    def __init__(self, capacity: int, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        self.slots = capacity // block_bytes
        if self.slots < 1:
            raise ConfigError(
                f"cpu_bytes_to_use: expected at least one block of {block_bytes} bytes (all layers), got {capacity}"
            )
        self._memory = mmap.mmap(-1, self.slots * block_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        anchor = ctypes.c_char.from_buffer(self._memory)
        self._base = ctypes.addressof(anchor)
        del anchor  # it would keep the mapping from being closed
        self._free = list(range(self.slots - 1, -1, -1))
        self._writing: dict[bytes, int] = {}
        self._stored: OrderedDict[bytes, int] = OrderedDict()
        #: stored blocks given up for newer ones.
        self.evicted = 0

    def touch(self, key: bytes) -> bool:
        """True when ``key`` is stored or being written; a stored one becomes the most recently used."""
        if key in self._stored:
            self._stored.move_to_end(key)
            return True
        return key in self._writing

    def reserve(self, key: bytes) -> int | None:
        """The address of a slot to write ``key`` into, or None when every slot is being written."""
        assert key not in self._stored and key not in self._writing, "reserve of a known block"
        if self._free:
            slot = self._free.pop()
        elif self._stored:
            _, slot = self._stored.popitem(last=False)
            self.evicted += 1
        else:
            return None
        self._writing[key] = slot
        return self._base + slot * self.block_bytes

    def commit(self, key: bytes) -> None:
        """``key`` is written: it is readable and may be evicted."""
        self._stored[key] = self._writing.pop(key)

    def abandon(self, key: bytes) -> None:
        """``key`` will not be written, and nobody is writing it."""
        self._free.append(self._writing.pop(key))

    def read(self, key: bytes) -> bytes | None:
        """A copy of a stored block's bytes, regions in wire order; None when it is not stored."""
        slot = self._stored.get(key)
        return None if slot is None else self._memory[slot * self.block_bytes : (slot + 1) * self.block_bytes]

    def close(self) -> None:
        """Unmap the buffer. Nobody may be writing. Idempotent."""
        self._memory.close()
        self._stored.clear()
        self._writing.clear()

    def __len__(self) -> int:
        return len(self._stored)

    def __repr__(self) -> str:
        return (
            f"HostTier(slots={self.slots} stored={len(self._stored)} writing={len(self._writing)} "
            f"evicted={self.evicted})"
        )
