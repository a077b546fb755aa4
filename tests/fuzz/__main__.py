"""``python -m tests.fuzz --cases N --seed S``: hostile input for everything that reads any, and what became of it.

Rules
1. A case is its target, the seed and its number; a failure prints them, and ``--target T --only K`` runs it alone.
2. Nothing but a parser's own error may come out, no thread of ours may end or raise, and memory is flat: resident
   memory after the first fifth and at the end, each with garbage collected, differ by less than 32 MiB. Else exit 1.
"""

from __future__ import annotations

import argparse
import gc
import logging
import random
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from tests.fuzz.engines import Engines
from tests.fuzz.live import Live
from tests.fuzz.parsers import PARSERS

__all__ = ["fuzz"]

#: shares of the targets that take milliseconds a case
ENGINES, LIVE = 5, 5
FLAT = 32 << 20
Case = Callable[[random.Random], bool]


def fuzz(cases: int, seed: int, target: str | None = None, only: int | None = None) -> tuple[Counter[str], list[str]]:
    """Counts by target, and what is wrong. Deterministic but for the kernel's sockets."""
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    early = 0
    with ExitStack() as stack, _ended_threads(wrong):
        targets = _targets(stack, target)
        for number, name in _plan(cases, targets, target, only):
            try:
                taken = targets[name][1](random.Random(f"{seed} {name} {number}"))
            except Exception:  # noqa: BLE001 - whatever comes out is what we look for
                wrong.append(f"--seed {seed} --target {name} --only {number}\n{traceback.format_exc()}")
                break
            counts[f"{name}: {'taken' if taken else 'refused'}"] += 1
            if number == cases // 5:
                early = _resident()
            if number % 20_000 == 0 and sys.stderr.isatty():
                print(f"\r{number:,}", end="", file=sys.stderr)
        counts["resident memory after a fifth, KiB"] = early >> 10
        late = _resident()
        counts["resident memory at the end, KiB"] = late >> 10
        if early and late - early > FLAT:
            wrong.append(f"memory grew from {early >> 10} to {late >> 10} KiB")
    return counts, wrong


@contextmanager
def _ended_threads(wrong: list[str]) -> Iterator[None]:
    """Threads that an exception ended are wrong."""
    before = threading.excepthook
    threading.excepthook = lambda args: wrong.append(f"thread {args.thread}: {args.exc_value!r}")
    try:
        yield
    finally:
        threading.excepthook = before


def _targets(stack: ExitStack, target: str | None) -> dict[str, tuple[int, Case]]:
    found: dict[str, tuple[int, Case]] = {one.__name__: (share * 10, one) for one, share in PARSERS.items()}
    if target in (None, "engines"):
        found["engines"] = ENGINES, stack.enter_context(closing(Engines())).one
    if target in (None, "live"):
        found["live"] = LIVE, stack.enter_context(closing(Live())).one
    return found


def _plan(
    cases: int, targets: dict[str, tuple[int, Case]], target: str | None, only: int | None
) -> Iterator[tuple[int, str]]:
    """Targets in turn, each as often as its share says."""
    turn = [name for name, (share, _) in targets.items() for _ in range(share)]
    random.Random(0).shuffle(turn)
    for number in range(cases) if only is None else (only,):
        yield number, target or turn[number % len(turn)]


def _resident() -> int:
    """Bytes."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="hostile input for everything that reads")
    parser.add_argument("--cases", type=int, default=100_000, help="how many (default 100000)")
    parser.add_argument("--seed", type=int, default=0, help="another seed, other cases (default 0)")
    parser.add_argument("--target", help="one target alone")
    parser.add_argument("--only", type=int, help="one case of it alone")
    told = parser.parse_args()
    logging.disable(logging.CRITICAL)  # thousands of refusals, each said
    began = time.monotonic()
    counts, wrong = fuzz(told.cases, told.seed, told.target, told.only)
    print(f"{told.cases:,} cases of seed {told.seed} in {time.monotonic() - began:.0f} s")
    for name, count in sorted(counts.items()):
        print(f"  {name:<44}{count:>12,}")
    print("\n".join(wrong) or "0 escaped, 0 threads ended, memory flat")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
