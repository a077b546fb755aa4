"""Both halves of a NixlConnector, ours or stock's, called as vLLM calls them, with everything else of vLLM left out.

Needs the environment with vLLM. Both are made by vLLM's own factory from the same configuration and handed the same
objects; ``kind`` is the only difference.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal
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
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock, get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MLAAttentionSpec
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from kvconn.engine.ports import free_ports
from kvconn.vllm import translate
from tests.vllm_hotfix.rig import MODEL

__all__ = ["BLOCK_SIZE", "KINDS", "NOTHING", "Halves", "Kind", "Layout"]

Kind = Literal["ours", "stock"]
#: vLLM's names for how caches lie: layers outermost, or blocks
Layout = Literal["LBHNC", "BLHNC"]
KINDS: tuple[Kind, ...] = ("ours", "stock")
BLOCK_SIZE = 16  # tokens
CONTEXT = SimpleNamespace(attn_metadata=None, no_compile_layers={}, virtual_engine=0)
Transfer = Mapping[str, Any]
#: an empty step, as vLLM's scheduler makes one; made once, so that its making is not measured
NOTHING = SchedulerOutput.make_empty()


@cache
def _model() -> str:
    """A directory with a ``config.json`` of an MLA model; both connectors ask for its geometry, nobody for weights."""
    home = Path(tempfile.gettempdir()) / "kvconn-bench-model"  # the same for all processes: peers compare the name
    home.mkdir(exist_ok=True)
    (home / "config.json").write_text(json.dumps(MODEL))
    init_none_hash(sha256)
    # of a process group of one only the rank is asked for
    base_worker.get_tensor_model_parallel_rank = lambda: 0
    base_worker.get_tensor_model_parallel_world_size = lambda: 1
    base_worker.get_pcp_group = translate.get_pcp_group = lambda: SimpleNamespace(rank_in_group=0)
    return str(home)


class Halves:
    """One engine's two halves over ``layers`` caches of ``blocks`` blocks of ``block_bytes`` bytes.

    ``caches`` are tensors of another's making, by layer name; without them this process allocates some. ``world`` ranks
    are expected to report; the worker half here is rank 0. ``multi``: below a MultiConnector, beside a native child
    that holds every finished request for some steps. ``layout``: of ``caches``.
    """

    block_size = BLOCK_SIZE

    def __init__(
        self,
        kind: Kind,
        role: str,
        *,
        layers: int = 2,
        blocks: int = 64,
        block_bytes: int = 4096,
        caches: Mapping[str, torch.Tensor] | None = None,
        extra: Transfer | None = None,
        world: int = 1,
        multi: bool = False,
        layout: Layout = "LBHNC",
    ) -> None:
        self.kind, self.port = kind, free_ports(1)[0]
        self.names = layer_names(layers)
        row = block_bytes // BLOCK_SIZE
        transfer = _transfer(kind, role, extra, multi)
        self.config = _config(transfer, blocks, world, layout=layout)
        spec = MLAAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=row, dtype=torch.uint8)
        self.cache = KVCacheConfig(blocks, [], [KVCacheGroupSpec(list(self.names), spec)])
        self.tensors = caches or {n: torch.zeros(blocks, 1, BLOCK_SIZE, row, dtype=torch.uint8) for n in self.names}
        affinity = os.sched_getaffinity(0)
        with self._as_current():
            self.scheduler = KVConnectorFactory.create_connector(self.config, KVConnectorRole.SCHEDULER, self.cache)
            start = time.perf_counter()
            self.worker = KVConnectorFactory.create_connector(self.config, KVConnectorRole.WORKER, self.cache)
            self.worker.register_kv_caches(dict(self.tensors))
            #: what the worker half took to be made and to register its caches
            self.seconds = time.perf_counter() - start
        os.sched_setaffinity(0, affinity)  # stock binds its process to the last core
        metadata = self.worker.get_handshake_metadata()
        if metadata is not None:
            with self._as_current():
                self.scheduler.set_xfer_handshake_metadata_pp_aware({(0, 0): metadata})

    @contextmanager
    def _as_current(self) -> Iterator[None]:
        address = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(self.port)}
        with set_current_vllm_config(self.config), patch.dict(os.environ, address):
            yield

    # -- a request's way

    def prefill(self, id: str, blocks: Sequence[int]) -> dict[str, Any]:
        """P schedules a prompt that fills ``blocks``, ends it, and returns its params; held from the next step on."""
        params = {"do_remote_decode": True, "do_remote_prefill": False}
        request = _request(id, len(blocks), params, self.block_size)
        self.scheduler.on_new_request(request)
        self.scheduler.get_num_new_matched_tokens(request, 0)
        self.scheduler.update_state_after_alloc(request, _allocated(blocks), 0)
        output = SchedulerOutput.make_empty()
        output.scheduled_new_reqs = [NewRequestData.from_request(request, (list(blocks),))]
        output.num_scheduled_tokens = {id: request.num_prompt_tokens}
        self.step(output)
        request.append_output_token_ids(7)
        request.num_computed_tokens = request.num_prompt_tokens
        request.status = RequestStatus.FINISHED_LENGTH_CAPPED
        held, given = self.scheduler.request_finished_all_groups(request, (list(blocks),))
        assert held and given is not None
        return dict(given)

    def arrive(self, id: str, blocks: int, params: Transfer) -> Request:
        """D is handed a request."""
        request = _request(id, blocks, dict(params), self.block_size)
        self.scheduler.on_new_request(request)
        return request

    def load(self, id: str, blocks: Sequence[int], params: Transfer) -> Request:
        """D admits a request into ``blocks``; its read is posted with the next step."""
        request = self.arrive(id, len(blocks), params)
        self.admit(request, blocks)
        return request

    def admit(self, request: Request, blocks: Sequence[int]) -> None:
        """D gives a request that arrived its blocks."""
        external, _ = self.scheduler.get_num_new_matched_tokens(request, 0)
        self.scheduler.update_state_after_alloc(request, _allocated(blocks), external)

    # -- a step

    def step(self, output: SchedulerOutput | None = None) -> KVConnectorOutput:
        """Both halves' part of one step, an empty one if nothing is said, in the order of vLLM's model runner."""
        output = output or NOTHING
        metadata = self.scheduler.build_connector_meta(output)
        done = self.work(metadata, output.finished_req_ids)
        self.scheduler.update_connector_output(done)
        return done

    def work(self, metadata: Any, finished: set[str]) -> KVConnectorOutput:
        """The worker half's part."""
        worker = self.worker
        worker.handle_preemptions(metadata)
        worker.bind_connector_metadata(metadata)
        worker.start_load_kv(CONTEXT)
        worker.wait_for_save()
        results = worker.get_transfer_results(finished)
        done = KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            invalid_block_ids=worker.get_block_ids_with_load_errors(),
            kv_connector_stats=worker.get_kv_connector_stats(),
            kv_connector_worker_meta=worker.build_connector_worker_meta(),
        )
        worker.clear_connector_metadata()
        return done

    def close(self) -> None:
        self.worker.shutdown()
        self.scheduler.shutdown()


def layer_names(layers: int) -> tuple[str, ...]:
    return tuple(f"model.layers.{index}.self_attn.attn" for index in range(layers))


def _transfer(kind: Kind, role: str, extra: Transfer | None, multi: bool) -> dict[str, Any]:
    ours = {"kv_connector_module_path": "kvconn.vllm"} if kind == "ours" else {}
    one = {"kv_connector": "NixlConnector", "kv_role": role, "kv_connector_extra_config": dict(extra or {}), **ours}
    if not multi:
        return one
    native = {"kv_connector": "HoldingSibling", "kv_connector_module_path": "tests.vllm.siblings", "kv_role": role}
    children = {"connectors": [one, native]}
    return {"kv_connector": "MultiConnector", "kv_role": role, "kv_connector_extra_config": children, **ours}


def _config(
    transfer: Transfer,
    blocks: int,
    world: int,
    *,
    model: str | None = None,
    block_size: int = BLOCK_SIZE,
    layout: Layout = "LBHNC",
) -> VllmConfig:
    cache = CacheConfig(block_size=block_size, enable_prefix_caching=True)
    cache.kv_cache_layout = layout
    config = VllmConfig(
        model_config=ModelConfig(
            model=model or _model(), dtype="float32", max_model_len=4096, enforce_eager=True, skip_tokenizer_init=True
        ),
        cache_config=cache,
        device_config=DeviceConfig("cpu"),
        kv_transfer_config=KVTransferConfig(**transfer),
        scheduler_config=SchedulerConfig(
            max_num_seqs=8, max_num_batched_tokens=4096, max_model_len=4096, is_encoder_decoder=False
        ),
    )
    cache.num_gpu_blocks, cache.block_size = blocks, block_size
    config.parallel_config.prefill_context_parallel_size = world  # refused by vLLM's check where there is no GPU
    config.parallel_config.world_size = world
    return config


def _request(id: str, blocks: int, params: dict[str, Any], block_size: int) -> Request:
    sampling = SamplingParams(max_tokens=1, ignore_eos=True, extra_args={"kv_transfer_params": params})
    sampling.update_from_generation_config({}, 1)
    return Request(
        request_id=id,
        prompt_token_ids=[5] * (blocks * block_size),
        sampling_params=sampling,
        pooling_params=None,
        block_hasher=get_request_block_hasher(block_size, sha256),
    )


def _allocated(blocks: Sequence[int]) -> KVCacheBlocks:
    return KVCacheBlocks(([KVCacheBlock(block) for block in blocks],))
