"""Counters that travel: a worker's numbers of one step, joined over ranks, children and time.

Rules
1. A :class:`Stats` is additive: ``a.aggregate(b)`` sums by name, so ranks, children and steps join in any order.
2. Names are stable: ``nixl_*`` and ``kv_offload_*`` are vLLM's without the prefix, the rest are ours.
3. A :class:`Meter` counts from any thread.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping

__all__ = ["Meter", "Stats"]


class Stats:
    """Additive counters by name. Picklable."""

    __slots__ = ("values",)

    def __init__(self, values: Mapping[str, float] | None = None) -> None:
        self.values: dict[str, float] = dict(values or {})

    def aggregate(self, other: Stats) -> Stats:
        """The sum of both, as a new object."""
        total = Counter(self.values)
        total.update(other.values)
        return Stats(total)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stats) and self.values == other.values

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return "Stats(" + " ".join(f"{k}={v:g}" for k, v in sorted(self.values.items())) + ")"


class Meter:
    """Counts until taken. One per connector half."""

    def __init__(self) -> None:
        self._values: Counter[str] = Counter()
        self._lock = threading.Lock()

    def add(self, name: str, amount: float = 1) -> None:
        """Add ``amount`` (of the unit in the name) to counter ``name``."""
        with self._lock:
            self._values[name] += amount  # type: ignore[assignment]

    def take(self) -> Stats | None:
        """What was counted since the last call, or None."""
        if not self._values:
            return None
        with self._lock:
            values, self._values = self._values, Counter()
        return Stats(values) if values else None
