"""Block ids that vLLM handed out, recorded, so that measurements need no vLLM to read blocks where vLLM has them.

    python -m bench.recorded          # with vLLM: records anew

Recorded by driving vLLM's KVCacheManager as its scheduler does: prompts of their own, each admitted whole, a chunk of
tokens per step, with prefix caching on, and freed when they end. A pool of :data:`POOL` blocks; one request of
:data:`COUNT` blocks out of it, twice for every state (P's and D's).
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, cast

from bench.pools import LARGE, REQUESTS, SMALL, STATES, State

__all__ = ["COUNT", "POOL", "recorded"]

FILE = Path(__file__).with_name("recorded.json")
POOL, COUNT, BLOCK_SIZE = 2048, 256, 16
#: tokens of one step
CHUNK = 2048
SEEDS = (1, 2)


def recorded(state: State) -> tuple[list[int], list[int]]:
    """P's and D's ids of one request of COUNT blocks, of pools of POOL blocks in that state."""
    one, other = cast("dict[str, list[list[int]]]", json.loads(FILE.read_text())["ids"])[state]
    return one, other


class Pool:
    """vLLM's manager of one pool, and the requests that have blocks of it."""

    def __init__(self, seed: int) -> None:
        import torch
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

        init_none_hash(sha256)
        spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=8, dtype=torch.float32)
        config = KVCacheConfig(POOL, [], [KVCacheGroupSpec(["layer"], spec)])
        self.manager = KVCacheManager(config, POOL * BLOCK_SIZE, BLOCK_SIZE, BLOCK_SIZE)
        self.random = random.Random(seed)
        self._hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
        self._running: list[Any] = []
        self._count = 0

    @property
    def free(self) -> int:
        return int(self.manager.block_pool.get_num_free_blocks())

    def admit(self, blocks: int) -> list[int]:
        """The ids of a new request that fills ``blocks``, computed chunk by chunk."""
        from vllm import SamplingParams
        from vllm.v1.request import Request

        self._count += 1
        tokens = [self.random.randrange(1 << 20) for _ in range(blocks * BLOCK_SIZE)]
        request = Request(str(self._count), tokens, SamplingParams(max_tokens=1), None, block_hasher=self._hasher)
        while request.num_computed_tokens < len(tokens):
            chunk = min(CHUNK, len(tokens) - request.num_computed_tokens)
            assert self.manager.allocate_slots(request, chunk) is not None
            request.num_computed_tokens += chunk
        self._running.append(request)
        return list(self.manager.get_block_ids(request.request_id)[0])

    def end(self, index: int) -> None:
        self.manager.free(self._running.pop(index))

    def churn(self, state: State) -> None:
        """Bring the pool, which is fresh, into ``state``: the workload of :mod:`bench.pools`."""
        if state == "recycled once":
            while (size := min(self.random.randint(SMALL, LARGE), self.free)) > 0:
                self.admit(size)
        elif state == "churned":
            for _ in range(REQUESTS):
                size = self.random.randint(SMALL, LARGE)
                while self.free < size:
                    self.end(self.random.randrange(len(self._running)))
                self.admit(size)
        while self._running:
            self.end(0 if state == "recycled once" else self.random.randrange(len(self._running)))


def record() -> dict[str, Any]:
    import vllm

    def one(state: State, seed: int) -> list[int]:
        pool = Pool(seed)
        pool.churn(state)
        return pool.admit(COUNT)

    ids = {state: [one(state, seed) for seed in SEEDS] for state in STATES}
    return {"vllm": vllm.__version__, "pool": POOL, "count": COUNT, "block_size": BLOCK_SIZE, "ids": ids}


if __name__ == "__main__":
    FILE.write_text(json.dumps(record()) + "\n")
    from bench.pools import mean_run

    for state in STATES:
        one, other = recorded(state)
        print(f"{state}: mean run of P {mean_run(one, one):.1f}, of both {mean_run(one, other):.2f}")
