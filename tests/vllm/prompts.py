"""Prompts as token ids, drawn from a seed."""

from __future__ import annotations

import random

from tests.vllm.engines import BLOCK


def prompt(length: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(3, 500) for _ in range(length)]


def twenty() -> list[list[int]]:
    """Short ones, over a block, over max_num_batched_tokens (256), repeated ones, ones that share prefixes."""
    lengths = [3, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 100, 200, 255, 256, 257, 300, 500]
    plain = [prompt(n, seed) for seed, n in enumerate(lengths)]
    repeated = [plain[5], plain[10], plain[2]]
    stem = prompt(3 * BLOCK, 99)
    sharing = [stem + prompt(n, 100 + n) for n in (1, 20, BLOCK, 200)]
    return [*plain, *repeated, *sharing, stem]
