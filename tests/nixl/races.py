"""Read-after-release races by one command: ``python -m tests.nixl.races --count 10000``. Exit 1 if one was accepted."""

from __future__ import annotations

import argparse
import sys
import time

from tests.nixl.producer import races


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--lease", type=float, default=0.004, help="seconds")
    args = parser.parse_args()
    began = time.monotonic()
    out = races(args.count, args.seed, args.lease)
    print(f"{args.count} races in {time.monotonic() - began:.0f} s: " + ", ".join(f"{v} {k}" for k, v in out.items()))
    return 1 if out["accepted but not whole"] else 0


if __name__ == "__main__":
    sys.exit(main())
