"""LRU and ARC as their textbooks have them, over plain lists: slow, without pins, written apart from the product's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["PlainArc", "PlainLru", "simulate"]


class PlainLru:
    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.keys: list[bytes] = []

    def has(self, key: bytes) -> bool:
        return key in self.keys

    def use(self, key: bytes) -> None:
        """One access: a hit moves the key to the end, a miss brings it in."""
        if key in self.keys:
            self.keys.remove(key)
        elif len(self.keys) == self.capacity:
            self.keys.pop(0)
        self.keys.append(key)


class PlainArc:
    """Figure 4 of Megiddo and Modha, FAST 2003, case by case."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.p = 0.0
        self.t1: list[bytes] = []
        self.t2: list[bytes] = []
        self.b1: list[bytes] = []
        self.b2: list[bytes] = []

    def has(self, key: bytes) -> bool:
        return key in self.t1 or key in self.t2

    def use(self, key: bytes) -> None:
        c = self.capacity
        if self.has(key):  # case I
            (self.t1 if key in self.t1 else self.t2).remove(key)
            self.t2.append(key)
        elif key in self.b1:  # case II
            self.p = min(c, self.p + max(len(self.b2) / len(self.b1), 1))
            self.replace(key)
            self.b1.remove(key)
            self.t2.append(key)
        elif key in self.b2:  # case III
            self.p = max(0, self.p - max(len(self.b1) / len(self.b2), 1))
            self.replace(key)
            self.b2.remove(key)
            self.t2.append(key)
        else:  # case IV
            if len(self.t1) + len(self.b1) == c:
                if len(self.t1) < c:
                    self.b1.pop(0)
                    self.replace(key)
                else:
                    self.t1.pop(0)
            elif len(self.t1) + len(self.t2) + len(self.b1) + len(self.b2) >= c:
                if len(self.t1) + len(self.t2) + len(self.b1) + len(self.b2) == 2 * c:
                    self.b2.pop(0)
                self.replace(key)
            self.t1.append(key)

    def replace(self, key: bytes) -> None:
        if self.t1 and (len(self.t1) > self.p or (key in self.b2 and len(self.t1) == self.p)):
            self.b1.append(self.t1.pop(0))
        else:
            self.b2.append(self.t2.pop(0))


def simulate(policy: PlainLru | PlainArc, prompts: Iterable[tuple[str, Sequence[bytes], int, int]]) -> dict[str, int]:
    """Blocks each prompt finds in a tier under ``policy``.

    A prompt is (id, hashes of its full blocks, how many the engine had itself, how many may be asked for): blocks that
    are found behind the engine's own are loaded, then every block of the prompt that was not loaded is stored.
    """
    found = {}
    for id, hashes, local, beyond in prompts:
        end = local
        while end < beyond and policy.has(hashes[end]):
            end += 1
        found[id] = end - local
        for key in [*hashes[local:end], *hashes[:local], *hashes[end:]]:
            policy.use(key)
    return found
