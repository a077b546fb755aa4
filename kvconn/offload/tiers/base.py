"""What a secondary tier is: slower, larger, and it may outlive the engine.

Contract of an implementation
1. Constructor: ``Tier(settings, identity, block_bytes)``; ``settings`` is the tier's own part of the configuration.
   An instance with ``identity.share`` set belongs to a worker half and reads and writes that share; one without
   belongs to the scheduler half and only answers :meth:`SecondaryTier.present`. Raise ConfigError for wrong settings.
2. :meth:`~SecondaryTier.write` stores the bytes or says False; :meth:`~SecondaryTier.read` returns exactly the bytes
   that were written for this key, namespace and share, or None. Wrong bytes are worse than none: check them.
3. Methods may block for as long as the medium does. They run on threads of their own, are given up at a deadline, and
   may be called from several threads at once. They may raise OSError; everything else is logged as a bug.
4. Blocks are written up to :attr:`~SecondaryTier.batch` at a time, in one job: those are stored, or not stored, as
   one. A tier for which fewer calls are cheaper says more than 1 and overrides :meth:`~SecondaryTier.write_all`.
5. Keys are the engine's block hashes: at most 64 bytes, any bytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from kvconn.offload.keys import Identity

__all__ = ["MAX_KEY", "SecondaryTier"]

MAX_KEY = 64


class SecondaryTier(ABC):
    """One tier below host memory. ``name`` appears in KV events and counters."""

    name: str = "secondary"
    batch: int = 1

    @abstractmethod
    def __init__(self, settings: Mapping[str, Any], identity: Identity, block_bytes: int) -> None: ...

    @abstractmethod
    def present(self, keys: Sequence[bytes]) -> list[bool]:
        """Which keys every share of the engine seems to be there for. A hint: reading decides."""

    @abstractmethod
    def write(self, key: bytes, data: bytes) -> bool:
        """Store this rank's share of a block. True: it is there, now or already."""

    def write_all(self, keys: Sequence[bytes], data: memoryview) -> list[bool]:
        """:meth:`write` for at most ``batch`` blocks of one length, one behind another in ``data``, which is not valid
        after the call."""
        size = len(data) // len(keys)
        return [self.write(key, bytes(data[k * size : (k + 1) * size])) for k, key in enumerate(keys)]

    @abstractmethod
    def read(self, key: bytes) -> bytes | None:
        """This rank's share of a block, proved to be what was written; None: a miss."""

    def take_removed(self) -> list[bytes]:
        """Keys given up since the last call, for KV events. Must not block."""
        return []

    def close(self) -> None:
        """Stop. Idempotent."""
