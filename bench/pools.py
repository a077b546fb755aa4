"""Block ids as a pool hands them out: fresh, after one round, after hundreds of requests.

The pool is the reference engine's, whose free queue has vLLM's order for blocks with known content.
"""

from __future__ import annotations

import random
from collections import deque
from typing import Literal

import numpy as np

from kvconn.engine.blocks import BlockPool

__all__ = ["STATES", "State", "ids", "mean_run"]

State = Literal["fresh", "recycled once", "churned"]
STATES: tuple[State, ...] = ("fresh", "recycled once", "churned")
#: requests that have come and gone in a churned pool, and the blocks each had
REQUESTS, SMALL, LARGE = 600, 10, 60


def ids(pool_size: int, count: int, state: State, seed: int) -> list[int]:
    """``count`` blocks for one request out of a pool of ``pool_size`` in that state."""
    pool = BlockPool(pool_size)
    rng = random.Random(seed)
    if state == "recycled once":
        held = []
        while (size := min(rng.randint(SMALL, LARGE), pool.num_free)) > 0:
            held.append(pool.allocate(size) or [])
        for one in held:
            pool.give_back(one)
    elif state == "churned":
        running: deque[list[int]] = deque()
        for _ in range(REQUESTS):
            size = rng.randint(SMALL, LARGE)
            while pool.num_free < size:
                pool.give_back(_any_of(running, rng))
            running.append(pool.allocate(size) or [])
        while running:
            pool.give_back(_any_of(running, rng))
    return pool.allocate(count) or []


def _any_of(running: deque[list[int]], rng: random.Random) -> list[int]:
    """Requests end in any order."""
    running.rotate(rng.randrange(len(running)))
    return running.popleft()


def mean_run(local: list[int], remote: list[int]) -> float:
    """Blocks that lie together on both sides, once the pairs are sorted."""
    pairs = np.array(sorted(zip(local, remote, strict=True)))
    return len(pairs) / (1 + int((np.diff(pairs, axis=0) != 1).any(axis=1).sum()))
