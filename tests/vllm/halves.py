"""vLLM's own Scheduler and KVOutputAggregator around our connector halves on real NIXL agents; the forward is made up.

One process holds both engines and all their workers. Parallel sizes are set after vLLM's configuration was checked,
since its check refuses prefill context parallelism without a GPU; of the process groups only our rank is asked for.
"""

from __future__ import annotations

import copy
import os
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from vllm import SamplingParams
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MLAAttentionSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

BLOCK = 16
BLOCKS = 64
ROW = 576
LAYERS = ("model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn")
#: what may happen to one rank's answer before vLLM sees it: (step, rank, answer) -> answers to join, now
Tamper = Callable[[int, int, KVConnectorOutput], KVConnectorOutput]


class Halves:
    """One engine without a model. ``in_flight``: steps that are scheduled before the first one's answer is taken."""

    def __init__(
        self,
        model: Path,
        transfer: dict[str, Any],
        port: int,
        pcp: int = 1,
        in_flight: int = 1,
        tamper: Tamper | None = None,
    ) -> None:
        init_none_hash(sha256)
        self.pcp, self.in_flight = pcp, in_flight
        self.tamper: Tamper = tamper or (lambda step, rank, output: output)
        self.port = port
        self.steps = 0
        self.flying: deque[tuple[Any, list[ModelRunnerOutput]]] = deque()
        self.finished: dict[str, Any] = {}
        self.emitted: list[str] = []
        self.config = self._config(model, transfer)
        self.spec = MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=ROW, dtype=torch.float32)
        self.cache = KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(list(LAYERS), self.spec)])
        self.kv = [{name: torch.zeros(BLOCKS, 1, BLOCK, ROW) for name in LAYERS} for _ in range(pcp)]
        with self._as_current():
            self._start()

    def _config(self, model: Path, transfer: dict[str, Any]) -> VllmConfig:
        cache = CacheConfig(block_size=BLOCK, enable_prefix_caching=True)
        cache.kv_cache_layout = "LBHNC"
        config = VllmConfig(
            model_config=ModelConfig(
                model=str(model), dtype="float32", max_model_len=512, enforce_eager=True, skip_tokenizer_init=True
            ),
            cache_config=cache,
            device_config=DeviceConfig("cpu"),
            kv_transfer_config=KVTransferConfig(**copy.deepcopy(transfer)),
            scheduler_config=SchedulerConfig(
                max_num_seqs=8, max_num_batched_tokens=512, max_model_len=512, is_encoder_decoder=False
            ),
        )
        cache.num_gpu_blocks, cache.block_size = BLOCKS, BLOCK
        config.parallel_config.prefill_context_parallel_size = self.pcp
        config.parallel_config.world_size = self.pcp
        return config

    @contextmanager
    def _as_current(self) -> Iterator[None]:
        variables = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(self.port)}
        with set_current_vllm_config(self.config), patch.dict(os.environ, variables):
            yield

    def _start(self) -> None:
        self.scheduler = Scheduler(
            vllm_config=self.config,
            kv_cache_config=self.cache,
            log_stats=True,
            structured_output_manager=StructuredOutputManager(self.config),
            block_size=BLOCK,
        )
        self.workers: list[Any] = []
        published: dict[tuple[int, int], Any] = {}
        for rank in range(self.pcp):
            group = SimpleNamespace(rank_in_group=rank)
            with patch("kvconn.vllm.translate.get_pcp_group", lambda group=group: group):
                worker = KVConnectorFactory.create_connector(self.config, KVConnectorRole.WORKER, self.cache)
            worker.register_kv_caches(self.kv[rank])
            self.workers.append(worker)
            metadata = worker.get_handshake_metadata()
            if metadata is not None:
                published[0, 0] = metadata  # as vLLM keys it: by (pp, tp)
        connector = self.scheduler.get_kv_connector()
        if published:
            connector.set_xfer_handshake_metadata_pp_aware(published)
        self.aggregator = KVOutputAggregator.from_connector(connector, self.config.parallel_config.world_size)

    @property
    def free(self) -> int:
        count: int = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        return count

    @property
    def held(self) -> set[str]:
        return set(self.scheduler.requests)

    def add(self, id: str, tokens: list[int], params: dict[str, Any], max_tokens: int = 1) -> None:
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, extra_args={"kv_transfer_params": params})
        sampling.update_from_generation_config({}, 1)
        self.scheduler.add_request(
            Request(
                request_id=id,
                prompt_token_ids=tokens,
                sampling_params=sampling,
                pooling_params=None,
                block_hasher=get_request_block_hasher(BLOCK, sha256),
            )
        )

    def step(self) -> None:
        """Schedule one step, run it on every rank, take the oldest answer that is due."""
        with self._as_current():
            self.steps += 1
            scheduled = self.scheduler.schedule()
            self.flying.append((scheduled, [self._work(rank, scheduled) for rank in range(self.pcp)]))
            while len(self.flying) >= self.in_flight:
                self._take()

    def _take(self) -> None:
        scheduled, outputs = self.flying.popleft()
        output = self.aggregator.aggregate(outputs)
        for batch in self.scheduler.update_from_output(scheduled, output).values():
            for one in batch.outputs:
                if one.finish_reason is not None:
                    self.finished[one.request_id] = one
        self.emitted += sorted(output.kv_connector_output.finished_sending or ())

    def _work(self, rank: int, scheduled: Any) -> ModelRunnerOutput:
        """What vLLM's model runner does around the forward, in its order."""
        worker, metadata = self.workers[rank], scheduled.kv_connector_metadata
        worker.handle_preemptions(metadata)
        worker.bind_connector_metadata(metadata)
        for new in scheduled.scheduled_new_reqs:  # a "forward": every replica writes the same
            self._write(rank, new.block_ids[0], new.prompt_token_ids, new.num_computed_tokens)
        worker.start_load_kv(SimpleNamespace(attn_metadata=None, no_compile_layers={}))
        worker.wait_for_save()
        results = worker.get_transfer_results(scheduled.finished_req_ids)
        output = KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            invalid_block_ids=worker.get_block_ids_with_load_errors(),
            kv_connector_stats=worker.get_kv_connector_stats(),
            kv_connector_worker_meta=worker.build_connector_worker_meta(),
        )
        worker.clear_connector_metadata()
        ids = list(scheduled.num_scheduled_tokens)
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={id: index for index, id in enumerate(ids)},
            sampled_token_ids=[[7] for _ in ids],
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=None,
            kv_connector_output=self.tamper(self.steps, rank, output),
        )

    def _write(self, rank: int, blocks: list[int], tokens: list[int], start: int) -> None:
        for position in range(start, len(tokens)):
            for index, name in enumerate(LAYERS):
                row = self.kv[rank][name][blocks[position // BLOCK], 0, position % BLOCK]
                row.fill_(tokens[position] * 10 + index)

    def rows(self, block: int) -> list[float]:
        """First number of every row of a block, on rank 0, layer by layer."""
        return [value for name in LAYERS for value in self.kv[0][name][block, 0, :, 0].tolist()]

    def close(self) -> None:
        for worker in self.workers:
            worker.shutdown()
        self.scheduler.connector.shutdown()
