"""The host tier of one rank: one page-aligned buffer of equal slots.

Rules
1. It knows addresses. What lies in which slot is the scheduler half's to know (:mod:`kvconn.offload.index`).
2. Memory is given to the process as it is written, not at the start.
3. One thread copies out at a time, into one buffer, which the next call writes again.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence

__all__ = ["HostTier"]


class HostTier:
    """``slots`` slots of ``slot_bytes`` each."""

    def __init__(self, slots: int, slot_bytes: int) -> None:
        self.slots = slots
        self.slot_bytes = slot_bytes
        self._memory = mmap.mmap(-1, slots * slot_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        anchor = ctypes.c_char.from_buffer(self._memory)
        self._base = ctypes.addressof(anchor)
        self._copies = bytearray()
        del anchor  # it would keep the mapping from being closed

    def address(self, slot: int) -> int:
        """Where ``slot`` begins."""
        assert 0 <= slot < self.slots, f"slot {slot} of {self.slots}"
        return self._base + slot * self.slot_bytes

    def read_all(self, slots: Sequence[int], length: int) -> memoryview:
        """A copy of the first ``length`` bytes of each of ``slots``, one behind another (rule 3)."""
        size = len(slots) * length
        if len(self._copies) < size:
            self._copies = bytearray(size)
        copies = memoryview(self._copies)
        for k, slot in enumerate(slots):
            at = slot * self.slot_bytes
            copies[k * length : (k + 1) * length] = self._memory[at : at + length]
        return copies[:size]

    def write(self, slot: int, data: bytes) -> None:
        """Fill a slot from its start."""
        self._memory[slot * self.slot_bytes : slot * self.slot_bytes + len(data)] = data

    def close(self) -> None:
        """Unmap the buffer. Nobody may be using it. Idempotent."""
        self._memory.close()

    def __repr__(self) -> str:
        return f"HostTier(slots={self.slots} of {self.slot_bytes} bytes)"
