"""Which block makes room for another: LRU and ARC as pure policies over keys.

Rules
1. A policy knows keys and their order, nothing of bytes, slots or tiers. At most ``capacity`` keys are resident.
2. :meth:`admit` evicts only when every place is taken, and never a key that is in use; when all are in use nothing
   changes and the answer is None.
3. :meth:`remove` forgets a key without a trace: its block was lost, not displaced.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Literal

import msgspec

__all__ = ["Admission", "Arc", "Lru", "Policy", "make_policy"]

InUse = Callable[[bytes], bool]


class Admission(msgspec.Struct, frozen=True):
    """A key has a place; ``victim`` lost its own."""

    victim: bytes | None = None


class Policy(ABC):
    """Order of the resident keys."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity

    @abstractmethod
    def touch(self, key: bytes) -> None:
        """A resident key is used again."""

    @abstractmethod
    def admit(self, key: bytes, in_use: InUse) -> Admission | None:
        """Make a key that is not resident resident. None, and no change, when no place can be made."""

    @abstractmethod
    def remove(self, key: bytes) -> None:
        """Forget a resident key."""

    @abstractmethod
    def __contains__(self, key: object) -> bool: ...

    @abstractmethod
    def __len__(self) -> int: ...


class Lru(Policy):
    """The least recently used goes first."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._keys: OrderedDict[bytes, None] = OrderedDict()

    def touch(self, key: bytes) -> None:
        self._keys.move_to_end(key)

    def admit(self, key: bytes, in_use: InUse) -> Admission | None:
        victim = None
        if len(self._keys) >= self.capacity:
            victim = _first_free(self._keys, in_use)
            if victim is None:
                return None
            del self._keys[victim]
        self._keys[key] = None
        return Admission(victim)

    def remove(self, key: bytes) -> None:
        del self._keys[key]

    def __contains__(self, key: object) -> bool:
        return key in self._keys

    def __len__(self) -> int:
        return len(self._keys)

    def __repr__(self) -> str:
        return f"Lru({len(self._keys)}/{self.capacity})"


class Arc(Policy):
    """Adaptive replacement (Megiddo and Modha, FAST 2003): keys seen once and keys seen again share the places, and
    what was evicted too early moves the border between them.

    ``once`` and ``again`` are resident; ``gone_once`` and ``gone_again`` remember evicted keys, oldest first.
    ``border`` is how many places keys seen once should have.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._once: OrderedDict[bytes, None] = OrderedDict()
        self._again: OrderedDict[bytes, None] = OrderedDict()
        self._gone_once: OrderedDict[bytes, None] = OrderedDict()
        self._gone_again: OrderedDict[bytes, None] = OrderedDict()
        self.border = 0.0

    def touch(self, key: bytes) -> None:
        if key in self._again:
            self._again.move_to_end(key)
        else:
            del self._once[key]
            self._again[key] = None

    def admit(self, key: bytes, in_use: InUse) -> Admission | None:
        before, self.border = self.border, self._border_for(key)
        victim = None
        if len(self) >= self.capacity:
            victim = self._victim(key, in_use)
            if victim is None:
                self.border = before
                return None
            self._evict(victim)
        known = key in self._gone_once or key in self._gone_again
        self._gone_once.pop(key, None)
        self._gone_again.pop(key, None)
        (self._again if known else self._once)[key] = None
        self._trim()
        return Admission(victim)

    def _border_for(self, key: bytes) -> float:
        once, again = len(self._gone_once), len(self._gone_again)
        if key in self._gone_once:
            return min(float(self.capacity), self.border + max(again / once, 1.0))
        if key in self._gone_again:
            return max(0.0, self.border - max(once / again, 1.0))
        return self.border

    def _victim(self, key: bytes, in_use: InUse) -> bytes | None:
        """The oldest that is not in use, of the list that has more than its share; else of the other."""
        n = len(self._once)
        from_once = n > self.border or (key in self._gone_again and n > 0 and n == self.border)
        first, second = (self._once, self._again) if from_once else (self._again, self._once)
        found = _first_free(first, in_use)
        return found if found is not None else _first_free(second, in_use)

    def _evict(self, victim: bytes) -> None:
        if victim in self._once:
            del self._once[victim]
            self._gone_once[victim] = None
        else:
            del self._again[victim]
            self._gone_again[victim] = None

    def _trim(self) -> None:
        """Keys seen once, resident or not, are at most ``capacity``; all that is known, at most twice that."""
        while self._gone_once and len(self._once) + len(self._gone_once) > self.capacity:
            self._gone_once.popitem(last=False)
        while self._gone_again and len(self) + len(self._gone_once) + len(self._gone_again) > 2 * self.capacity:
            self._gone_again.popitem(last=False)

    def remove(self, key: bytes) -> None:
        if key in self._once:
            del self._once[key]
        else:
            del self._again[key]

    def __contains__(self, key: object) -> bool:
        return key in self._once or key in self._again

    def __len__(self) -> int:
        return len(self._once) + len(self._again)

    def __repr__(self) -> str:
        return f"Arc({len(self)}/{self.capacity} once={len(self._once)} border={self.border:.1f})"


def make_policy(name: Literal["lru", "arc"], capacity: int) -> Policy:
    """The policy an operator named."""
    return Lru(capacity) if name == "lru" else Arc(capacity)


def _first_free(keys: Iterable[bytes], in_use: InUse) -> bytes | None:
    return next((key for key in keys if not in_use(key)), None)
