"""The generator of ``trace-small.jsonl``: conversations that share a system prompt and grow turn by turn.

Rules
1. Same seed, same bytes: only ``Random.random()`` is drawn from, and a test compares the shipped file with it.
2. The shape follows the published conversation trace (log-normal lengths, every prompt opens with the same block, later
   turns repeat the earlier conversation); no row of it is copied.

``python -m kvconn.data.make_trace > kvconn/data/trace-small.jsonl``
"""

from __future__ import annotations

import json
import math
import random
import sys

from kvconn.engine.trace import HASH_BLOCK

__all__ = ["SEED", "make_trace"]

SEED = 20260
ROWS = 96
SYSTEM_PROMPT = 700
CONTINUES = 0.45
MAX_INPUT = 24_000


class _Conversation:
    """A dialogue so far: its tokens and the ids of its full blocks."""

    def __init__(self, hash_ids: list[int]) -> None:
        self.length = SYSTEM_PROMPT
        self.full_ids = hash_ids


def make_trace(seed: int = SEED, rows: int = ROWS) -> str:
    """The trace as JSONL text."""
    rng = random.Random(seed)
    fresh_id = iter(range(1, 1 << 30))
    open_conversations: list[_Conversation] = []
    lines = []
    clock = 0.0
    for _ in range(rows):
        clock += -math.log(1.0 - rng.random()) * 330.0
        if open_conversations and rng.random() < CONTINUES:
            talk = open_conversations.pop(int(rng.random() * len(open_conversations)))
            asked = _log_normal(rng, 500, 0.9)
        else:
            talk = _Conversation([0])  # the full block of the shared system prompt
            asked = _log_normal(rng, 3800, 1.0)
        length = min(talk.length + asked, MAX_INPUT)
        answer = min(_log_normal(rng, 330, 0.7), 1600)
        count = math.ceil(length / HASH_BLOCK)
        hash_ids = (talk.full_ids + [next(fresh_id) for _ in range(count - len(talk.full_ids))])[:count]
        row = {"timestamp": int(clock), "input_length": length, "output_length": answer, "hash_ids": hash_ids}
        lines.append(json.dumps(row))
        talk.full_ids = hash_ids[: length // HASH_BLOCK]
        talk.length = length + answer
        if talk.length < MAX_INPUT:
            open_conversations.append(talk)
    return "\n".join(lines) + "\n"


def _log_normal(rng: random.Random, median: float, sigma: float) -> int:
    """Box and Muller's normal from two draws, so that only ``random()`` decides."""
    radius = math.sqrt(-2.0 * math.log(1.0 - rng.random()))
    normal = radius * math.cos(2.0 * math.pi * rng.random())
    return max(1, round(median * math.exp(sigma * normal)))


if __name__ == "__main__":
    sys.stdout.write(make_trace())
