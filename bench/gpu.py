"""VRAM to VRAM between two processes through cuda_ipc. One line, and success, where there is no GPU."""

from __future__ import annotations

import torch

__all__ = ["main"]


def main() -> int:
    if not torch.cuda.is_available():
        print("bench-gpu: no GPU here, nothing measured")
        return 0
    from bench.vram import run

    for table in run():
        table.print()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
