"""``python -m tests.sim --examples N --seed S``: many schedules, and what they went through.

Ends with 1 at the first violation, with its schedule made short, as ``test_sim.FOUND`` wants it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from tests.sim.schedules import Action, drawn, quiet, run, shorter
from tests.sim.shapes import Shape


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description="schedules against the real halves")
    parser.add_argument("--examples", type=int, default=1000, help="schedules to run (default 1000)")
    parser.add_argument("--seed", type=int, default=0, help="another seed, other schedules (default 0)")
    parser.add_argument("--steps", type=int, default=60, help="actions in one at most (default 60)")
    told = parser.parse_args()
    counts: Counter[str] = Counter()
    began = time.monotonic()
    with quiet():
        for index in range(told.examples):
            shape, actions = drawn(told.seed, index, told.steps)
            try:
                counts += run(shape, actions)
            except Exception:  # noqa: BLE001 - whatever the halves raise is a violation too
                return violated(index, shape, actions)
            if sys.stderr.isatty() and index % 100 == 0:
                print(f"\r{index} schedules", end="", file=sys.stderr)
    print(f"{told.examples} schedules of seed {told.seed} in {time.monotonic() - began:.0f} s")
    for name, count in sorted(counts.items()):
        print(f"  {name:<60}{count:>12,}")
    print("0 violations")
    return 0


def violated(index: int, shape: Shape, actions: list[Action]) -> int:
    fewer = shorter(shape, actions)
    print(f"schedule {index}, made short from {len(actions)} actions to {len(fewer)}:\n{shape}\n{fewer}", flush=True)
    run(shape, fewer)  # raises
    return 1


if __name__ == "__main__":
    sys.exit(main())
