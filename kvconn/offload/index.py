"""What lies in which slot of the host tier, for all ranks of an engine alike.

Rules
1. The scheduler half decides and the ranks obey: slot ``s`` of every rank holds its share of the same block.
2. A slot is free, being written, or stored. It is stored when every rank has written its share, and free again only
   when no rank writes or reads it any more.
3. What is being written, pinned, or offered in this step is in use: it is never evicted.
4. The order of eviction is the policy's (:mod:`kvconn.offload.policy`).
No I/O, no clock.
"""

from __future__ import annotations

from collections import Counter

import msgspec

from kvconn.offload.policy import Policy

__all__ = ["HostIndex", "Room"]


class Room(msgspec.Struct, frozen=True):
    """A slot to write; ``evicted`` lay in it before."""

    slot: int
    evicted: bytes | None = None


class HostIndex:
    """Keys and slots; ``policy.capacity`` slots."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._free = list(range(policy.capacity - 1, -1, -1))
        self._slot: dict[bytes, int] = {}
        #: being written; True: forget it as soon as that is over
        self._writing: dict[bytes, bool] = {}
        self._pins: Counter[bytes] = Counter()
        self._offered: set[bytes] = set()
        self.evictions = 0

    # -- asking --------------------------------------------------------------------------------------------------

    def stored(self, key: bytes) -> bool:
        """It can be loaded."""
        return key in self._slot and key not in self._writing

    def writing(self, key: bytes) -> bool:
        """It will be stored, or lost, before long."""
        return key in self._writing

    def slot(self, key: bytes) -> int | None:
        """Where a stored key lies."""
        return self._slot[key] if self.stored(key) else None

    # -- using ---------------------------------------------------------------------------------------------------

    def touch(self, key: bytes) -> None:
        """A known key is used again."""
        self._policy.touch(key)

    def offer(self, key: bytes) -> None:
        """It was promised to somebody: it stays until :meth:`withdraw`."""
        self._offered.add(key)

    def withdraw(self) -> None:
        """The step is planned; what was promised is pinned by now, or was not wanted."""
        self._offered.clear()

    def pin(self, key: bytes) -> None:
        """A rank reads it."""
        self._pins[key] += 1

    def unpin(self, key: bytes) -> None:
        """One reader less."""
        self._pins[key] -= 1
        if self._pins[key] <= 0:
            del self._pins[key]

    # -- writing -------------------------------------------------------------------------------------------------

    def reserve(self, key: bytes) -> Room | None:
        """A slot for a key that is not known. None, and no change, when everything is in use."""
        assert key not in self._slot, "reserve of a known block"
        admission = self._policy.admit(key, self._in_use)
        if admission is None:
            return None
        if admission.victim is not None:
            self._free.append(self._slot.pop(admission.victim))
            self.evictions += 1
        slot = self._free.pop()
        self._slot[key] = slot
        self._writing[key] = False
        return Room(slot, admission.victim)

    def commit(self, key: bytes) -> bool:
        """Every rank wrote its share. False: it was to be forgotten, and is."""
        if self._writing.pop(key):
            self._forget(key)
            return False
        return True

    def abandon(self, key: bytes) -> None:
        """Some rank did not write its share, and no rank is writing."""
        del self._writing[key]
        self._forget(key)

    def reset(self) -> tuple[list[bytes], bool]:
        """Forget everything stored; what is being written is forgotten when that ends. Returns what was forgotten,
        and whether nothing is left that somebody reads."""
        self._offered.clear()
        for key in self._writing:
            self._writing[key] = True
        gone = [key for key in self._slot if not self._in_use(key)]
        for key in gone:
            self._forget(key)
        return gone, not any(self.stored(key) for key in self._slot)

    def _forget(self, key: bytes) -> None:
        self._policy.remove(key)
        self._free.append(self._slot.pop(key))

    def _in_use(self, key: bytes) -> bool:
        return key in self._writing or key in self._pins or key in self._offered

    def __len__(self) -> int:
        return len(self._slot) - len(self._writing)

    def __repr__(self) -> str:
        return (
            f"HostIndex(slots={self._policy.capacity} stored={len(self)} writing={len(self._writing)} "
            f"pinned={len(self._pins)} evicted={self.evictions})"
        )
