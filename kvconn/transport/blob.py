"""The shape of NIXL's agent metadata (1.5), looked at before NIXL reads it. Pure.

Rules
1. NIXL reads lengths, counts and the memory type out of a blob and believes them; so each must fit what is there.
2. What UCX put in (addresses, keys of memory) is opaque here, and UCX believes it too: a blob whose shape is right can
   still end the process. Only a peer that is trusted helps against that (SECURITY.md).
3. Another release of NIXL may write another shape: our own agent's blob says whether this one is looked for.

The shape: ``nixlSerDes|``, then fields of a fixed name, a length (8 bytes, little endian), that many bytes, and a bar.
"""

from __future__ import annotations

from typing import Final

__all__ = ["agent_of", "damage"]

_MAGIC: Final = b"nixlSerDes|"
#: DRAM, VRAM, BLK, OBJ, FILE; NIXL indexes an array with it, unchecked (SIGSEGV)
MAX_MEM_TYPE: Final = 4
MAX_SECTIONS: Final = 64
MAX_NAME: Final = 512
#: address, length, device
_DESCRIPTOR: Final = 24


class _DamagedError(Exception):
    """What is wrong, and where."""


class _Reader:
    def __init__(self, blob: bytes) -> None:
        self._blob = blob
        self._at = 0

    def fixed(self, text: bytes) -> None:
        if not self._blob.startswith(text, self._at):
            raise _DamagedError(f"no {text.decode()!r} at byte {self._at}")
        self._at += len(text)

    def field(self, name: bytes, least: int, most: int) -> bytes:
        """The bytes of the field of this name; ``least`` to ``most`` of them."""
        self.fixed(name)
        start = self._at + 8
        size = int.from_bytes(self._blob[self._at : start], "little")
        if start > len(self._blob) or not least <= size <= most or size > len(self._blob) - start:
            raise _DamagedError(f"a field {name.decode()!r} of {size} bytes at byte {self._at}")
        self._at = start + size
        self.fixed(b"|")
        return self._blob[start : start + size]

    def number(self, name: bytes, size: int, most: int) -> int:
        found = int.from_bytes(self.field(name, size, size), "little")
        if found > most:
            raise _DamagedError(f"a field {name.decode()!r} of value {found}, at most {most} is expected")
        return found

    @property
    def left(self) -> int:
        return len(self._blob) - self._at


def agent_of(blob: bytes) -> str | None:
    """The name of the agent whose blob it is, whatever else is wrong with it; None where none stands in its place."""
    read = _Reader(blob)
    try:
        read.fixed(_MAGIC)
        return read.field(b"Agent", 1, MAX_NAME).decode()
    except (_DamagedError, UnicodeDecodeError):
        return None


def damage(blob: bytes) -> str | None:
    """What is wrong with the shape of this blob; None when nothing is."""
    read = _Reader(blob)
    try:
        _walk(read)
    except _DamagedError as err:
        return str(err)
    return f"{read.left} bytes behind its end" if read.left else None


def _walk(read: _Reader) -> None:
    read.fixed(_MAGIC)
    read.field(b"Agent", 1, MAX_NAME)
    for _ in range(read.number(b"Conns", 8, MAX_SECTIONS)):
        read.field(b"t", 1, MAX_NAME)
        read.field(b"c", 1, read.left)
    if read.field(b"", 1, MAX_NAME) != b"MemSection":
        raise _DamagedError("no section of memory")
    for _ in range(read.number(b"nixlSecElms", 8, MAX_SECTIONS)):
        read.field(b"bknd", 1, MAX_NAME)
        if read.field(b"nixlDList", 1, MAX_NAME) not in (b"nixlSDList", b"nixlBDList"):
            raise _DamagedError("a list of descriptors of no known kind")
        read.number(b"t", 4, MAX_MEM_TYPE)
        for _ in range(read.number(b"n", 8, read.left // _DESCRIPTOR)):
            read.field(b"", _DESCRIPTOR, read.left)
