"""Halves of a model with two KV heads: every rank of an engine with TP in one process, over another's address space.

Rank r is told that it is rank r while it is made, and nobody asks again. All ranks work in every step; the scheduler
half hears rank 0.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput

from bench import halves
from bench.halves import Halves, Kind, layer_names
from kvconn.engine.ports import free_ports
from kvconn.vllm import translate

__all__ = ["BLOCK_BYTES", "Engine"]

HEADS, HEAD_SIZE = 2, 32
BLOCK_SIZE = 32  # tokens; vLLM's attention on the CPU takes multiples of 32 only, and heads of 32 at least
BLOCK_BYTES = 2 * HEADS * HEAD_SIZE * BLOCK_SIZE * 4  # of a layer: K and V, float32
MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "float32", "vocab_size": 512,
    "hidden_size": HEADS * HEAD_SIZE, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS, "head_dim": HEAD_SIZE, "max_position_embeddings": 4096, "bos_token_id": 0,
    "eos_token_id": 1, "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False,
}  # fmt: skip


class Engine(Halves):
    """An engine of ``tp`` ranks, of which the first ``len(spaces)`` are here; a space is layers x blocks x bytes."""

    block_size = BLOCK_SIZE

    def __init__(self, kind: Kind, role: str, tp: int, spaces: Sequence[np.ndarray[Any, Any]]) -> None:
        halves._model()  # and what it tells vLLM of groups
        self.kind, self.port = kind, free_ports(1)[0]
        layers, blocks, length = spaces[0].shape
        self.names = layer_names(layers)
        self.config = halves._config(
            halves._transfer(kind, role, None, False), blocks, 1, model=_model(), block_size=BLOCK_SIZE
        )
        self.config.parallel_config.tensor_parallel_size = self.config.parallel_config.world_size = tp
        heads = HEADS // tp
        spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=heads, head_size=HEAD_SIZE, dtype=torch.float32)
        assert spec.page_size_bytes == length
        self.cache = KVCacheConfig(blocks, [], [KVCacheGroupSpec(list(self.names), spec)])
        shape = (blocks, heads, BLOCK_SIZE, 2 * HEAD_SIZE)
        ranks = [[torch.from_numpy(one).view(torch.float32).view(shape) for one in space] for space in spaces]
        affinity = os.sched_getaffinity(0)
        start = time.perf_counter()
        with self._as_current():
            self.scheduler = KVConnectorFactory.create_connector(self.config, KVConnectorRole.SCHEDULER, self.cache)
            self.workers = [self._made(rank, tp, caches) for rank, caches in enumerate(ranks)]
            published = {(0, rank): one.get_handshake_metadata() for rank, one in enumerate(self.workers)}
            if role == "kv_producer":
                self.scheduler.set_xfer_handshake_metadata_pp_aware(published)
        #: what all halves took to be made and to register their caches
        self.seconds = time.perf_counter() - start
        os.sched_setaffinity(0, affinity)  # stock binds its process to the last core
        self.worker = self.workers[0]

    def _made(self, rank: int, tp: int, caches: Sequence[torch.Tensor]) -> Any:
        base_worker.get_tensor_model_parallel_rank = lambda: rank
        base_worker.get_tensor_model_parallel_world_size = lambda: tp
        translate.get_tp_group = lambda: SimpleNamespace(rank_in_group=rank)
        worker = KVConnectorFactory.create_connector(self.config, KVConnectorRole.WORKER, self.cache)
        worker.register_kv_caches(dict(zip(self.names, caches, strict=True)))
        return worker

    def work(self, metadata: Any, finished: set[str]) -> KVConnectorOutput:
        for self.worker in reversed(self.workers):  # noqa: B020
            done = super().work(metadata, finished)
        # what rank 0 says; ours tells vLLM's scheduler only what all ranks have said, and some are not here
        self.received, self.failed = set(done.finished_recving or ()), set(done.failed_recving or ())
        return done

    def close(self) -> None:
        for worker in self.workers[1:]:
            worker.shutdown()
        super().close()


def _model() -> str:
    home = Path(tempfile.gettempdir()) / "kvconn-bench-model-kv"  # the same for all processes, as the other's
    home.mkdir(exist_ok=True)
    (home / "config.json").write_text(json.dumps(MODEL))
    return str(home)
