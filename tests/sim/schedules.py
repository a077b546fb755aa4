"""Schedules: a shape and a list of actions. Run, drawn, made short.

Rules
1. An action is (name, pick, how), two numbers below 8; every schedule is meaningful, and the same every time.
2. :func:`run` raises AssertionError with the letter of what was violated (see ``world``).
"""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

from tests.sim.shapes import LIKELY, TREES, Shape
from tests.sim.world import World

Action = tuple[str, int, int]

#: what may happen, as often as it stands here
ACTIONS: tuple[str, ...] = tuple(
    name
    for name, weight in (
        ("step_p", 5), ("step_d", 5), ("submit", 4), ("hand", 3), ("rush", 6), ("meet", 3), ("arrive", 4),
        ("arrive_all", 3), ("wait", 3), ("half_step", 3), ("abort", 3), ("submit_local", 2), ("expire", 1),
        ("expire_heard", 2), ("fate", 2), ("break_read", 2), ("stop", 1), ("cont", 2), ("kill", 1),
        ("mute_handshakes", 1), ("withhold", 1), ("repeat", 2), ("let_go", 1),
    )
    for _ in range(weight)
)  # fmt: skip
NAMES = tuple(dict.fromkeys(ACTIONS))


def do(world: World, action: Action) -> None:
    name, pick, how = action
    world.counts["actions"] += 1
    getattr(world, name)(pick, how)
    world.check()


def run(shape: Shape, actions: Sequence[Action], tables: bool = True) -> Counter[str]:
    """One schedule to its end. ``tables``: is what is left at the end a violation too?"""
    world = World(shape)
    try:
        for action in actions:
            do(world, action)
        if tables:
            world.finish()
        return world.counts
    finally:
        world.close()


def drawn(seed: int, index: int, steps: int = 50) -> tuple[Shape, list[Action]]:
    """The schedule number ``index`` of ``seed``."""
    rng = random.Random(seed * 1_000_003 + index)
    trees = tuple(TREES)
    shape = Shape(
        pcp=rng.randint(1, 4),
        producer=rng.choice(trees),
        consumer=rng.choice(trees),
        consumers=rng.randint(1, 2),
        recompute=rng.random() < 0.5,
        harsh=rng.random() < 0.7,
        both=rng.random() < 0.25,
        chunk=rng.choice((3, 8, 64)),
    )
    actions = [(rng.choice(ACTIONS), rng.randrange(8), rng.randrange(8)) for _ in range(rng.randint(5, steps))]
    return with_sizes(shape, rng), actions


def with_sizes(shape: Shape, rng: random.Random) -> Shape:
    """Most engines have one rank beside their replicas."""
    heads = rng.choice((1, 2))
    p, d = (rng.choice(LIKELY[heads]) for _ in "pd")
    return replace(shape, heads=heads, p=p, d=d)


def shorter(shape: Shape, actions: list[Action]) -> list[Action]:
    """The same violation from fewer actions."""
    letter = _letter(shape, actions)
    size = max(1, len(actions) // 2)
    while size:
        at = 0
        while at < len(actions):
            fewer = actions[:at] + actions[at + size :]
            if _letter(shape, fewer) == letter:
                actions = fewer
            else:
                at += size
        size //= 2
    return actions


def _letter(shape: Shape, actions: list[Action]) -> str | None:
    try:
        run(shape, actions)
    except AssertionError as err:
        return str(err)[:3]
    except Exception as err:  # noqa: BLE001 - whatever the halves raise is a violation too
        return type(err).__name__
    return None


@contextmanager
def quiet() -> Iterator[None]:
    """Nothing is logged, and no poll waits for a fence word: nothing moves meanwhile."""
    logs = [logging.getLogger(name) for name in ("kvconn.nixl", "kvconn.multi")]
    before = [log.level for log in logs]
    for log in logs:
        log.setLevel(logging.CRITICAL + 1)
    try:
        with patch("kvconn.nixl.reader.SPIN", 0.0):
            yield
    finally:
        for log, level in zip(logs, before, strict=True):
            log.setLevel(level)
