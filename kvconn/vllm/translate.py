"""vLLM's objects to kvconn's views, and back. Nothing is decided here but what cannot be translated.

Rules
1. What the neutral code cannot do is refused at start-up, all of it in one ConfigError that says what and why.
2. A view holds no vLLM object that outlives the call, except behind what fetches tokens, hashes and a step's requests.
3. Ranks are numbered as in :class:`kvconn.config.ParallelConfig`: pp-major, then pcp, then tp; so are vLLM's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import msgspec
import torch
from vllm import envs
from vllm.distributed.parallel_state import get_pcp_group, get_pp_group, get_tp_group
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec, iter_layer_specs
from vllm.v1.request import RequestStatus

from kvconn.base import (
    NO_BLOCK,
    BlockIds,
    CacheKind,
    FinishReason,
    GroupView,
    KVBlocks,
    KVCacheView,
    LayerView,
    RequestView,
    StepRequest,
    StepView,
)
from kvconn.config import ConnectorConfig, KVTransferConfig, ModelView, ParallelConfig, parse_kv_transfer_config
from kvconn.errors import ConfigError
from kvconn.geometry import blocks_for

__all__ = [
    "TRANSFER_FIELDS",
    "VllmRequestView",
    "block_ids",
    "cache_view",
    "connector_config",
    "finish_reason",
    "kv_blocks",
    "layer_views",
    "request_view",
    "step_view",
    "transfer_config",
]

#: vLLM's dataclass has more fields in some versions; these are the ones that have a meaning here.
TRANSFER_FIELDS = (
    "kv_connector",
    "kv_role",
    "engine_id",
    "kv_connector_module_path",
    "kv_connector_extra_config",
    "kv_buffer_device",
    "kv_load_failure_policy",
    "enable_permute_local_kv",
)
#: the id of vLLM's null block: the first one of its pool
NULL_BLOCK = 0
_REASONS = {
    RequestStatus.FINISHED_STOPPED: FinishReason.STOP,
    RequestStatus.FINISHED_LENGTH_CAPPED: FinishReason.LENGTH,
    RequestStatus.FINISHED_ABORTED: FinishReason.ABORT,
}


# --- start-up -----------------------------------------------------------------------------------------------------


def transfer_config(vllm_config: Any) -> KVTransferConfig:
    """The ``kv_transfer_config`` without what vLLM fills in itself. Raises ConfigError."""
    theirs = vllm_config.kv_transfer_config
    given = {name: getattr(theirs, name) for name in TRANSFER_FIELDS if getattr(theirs, name, None) is not None}
    if given.get("enable_permute_local_kv"):
        raise ConfigError("kv_transfer_config.enable_permute_local_kv: blocks are read as they lie; take it out")
    return parse_kv_transfer_config(given)


def connector_config(vllm_config: Any, worker: bool) -> ConnectorConfig:
    """What a half is constructed from; ``worker``: in a worker process, whose rank counts. Raises ConfigError."""
    parallel = vllm_config.parallel_config
    transfer = transfer_config(vllm_config)
    sizes = ParallelConfig(
        tp=parallel.tensor_parallel_size,
        pp=parallel.pipeline_parallel_size,
        pcp=parallel.prefill_context_parallel_size,
        dcp=parallel.decode_context_parallel_size,
        dcp_interleave=getattr(parallel, "cp_kv_cache_interleave_size", 1),
        dp_rank=parallel.data_parallel_index,
    )
    model = vllm_config.model_config
    return ConnectorConfig(
        kv_transfer=transfer,
        engine_id=vllm_config.kv_transfer_config.engine_id,
        parallel=sizes,
        model=ModelView(
            name=model.model,
            dtype=str(model.dtype),
            num_layers=model.get_total_num_hidden_layers(),
            num_kv_heads=1 if model.use_mla else model.get_total_num_kv_heads(),
            head_size=model.get_head_size(),
            block_size=vllm_config.cache_config.block_size,
            packing="latent" if model.use_mla else "kv",
        ),
        rank=_rank(sizes) if worker else None,
        host=envs.VLLM_NIXL_SIDE_CHANNEL_HOST,
        port=envs.VLLM_NIXL_SIDE_CHANNEL_PORT + parallel.data_parallel_index,
    )


def _rank(sizes: ParallelConfig) -> int:
    """Groups of one are not asked: they may not exist."""
    pp = get_pp_group().rank_in_group if sizes.pp > 1 else 0
    pcp = get_pcp_group().rank_in_group if sizes.pcp > 1 else 0
    tp = get_tp_group().rank_in_group if sizes.tp > 1 else 0
    return (int(pp) * sizes.pcp + int(pcp)) * sizes.tp + int(tp)


def cache_view(kv_cache_config: Any) -> KVCacheView:
    """The pool. Raises ConfigError for cache groups that the neutral code has no rules for."""
    groups = kv_cache_config.kv_cache_groups
    if not groups:
        raise ConfigError("model: expected layers with a KV cache, this one has none: take kv_transfer_config out")
    problems = [problem for group in groups for problem in _untranslatable(group)]
    sizes = sorted({group.kv_cache_spec.block_size for group in groups})
    if len(sizes) > 1:
        problems.append(
            f"model: expected one block size for all cache groups, got {sizes} tokens; "
            "--disable-hybrid-kv-cache-manager makes one group of full and sliding-window attention"
        )
    if problems:
        raise ConfigError(problems)
    return KVCacheView(
        num_blocks=kv_cache_config.num_blocks,
        block_size=sizes[0],
        groups=tuple(_group(group) for group in groups),
        block_bytes=_block_bytes(kv_cache_config),
    )


def _untranslatable(group: Any) -> list[str]:
    """What of one cache group the neutral code has no rules for."""
    problems = []
    specs = list(iter_layer_specs(group.kv_cache_spec))
    for spec in specs:
        if type(spec) not in (FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec):
            problems.append(
                "model: expected layers of full attention, sliding windows or MLA, got "
                f"{type(spec).__name__} ({group.layer_names[0]}): use vLLM's own NixlConnector for this model"
            )
            break
    kept = sorted({getattr(spec, "extra_retained_tokens", 0) for spec in specs} - {0})
    if kept:
        problems.append(f"speculative_config: expected windows that keep no extra tokens, got {kept[-1]}: take it out")
    if len({_window(spec) for spec in specs}) > 1:
        problems.append(f"model: expected one window per cache group, got several ({group.layer_names[0]})")
    if getattr(group, "host_resident", False) or not getattr(group, "enable_kv_transfer", True):
        problems.append("model: KV that lives in a host pool is not transferred")
    return problems


def _window(spec: Any) -> int | None:
    """Full attention that the hybrid manager made of windows, where that is off, counts as full."""
    return int(spec.sliding_window) if isinstance(spec, SlidingWindowSpec) else None


def _group(group: Any) -> GroupView:
    window, layers = _window(next(iter(iter_layer_specs(group.kv_cache_spec)))), tuple(group.layer_names)
    if window is None:
        return GroupView("full", layers)
    # vLLM's own consumer takes so many of the last blocks, null ones included, and ends when there are fewer
    return GroupView("window", layers, window, blocks_for(window, group.kv_cache_spec.block_size) + 1)


def _block_bytes(kv_cache_config: Any) -> int:
    """One block with the layers of all groups that it may belong to: groups lie over each other in one pool."""
    sizes = [int(tensor.size) for tensor in kv_cache_config.kv_cache_tensors]
    size = sum(sizes) if len(kv_cache_config.kv_cache_groups) == 1 else max(sizes, default=0)
    return size // int(kv_cache_config.num_blocks)


def layer_views(kv_caches: Mapping[str, torch.Tensor], view: KVCacheView) -> dict[str, LayerView]:
    """One view per cache tensor. Layers of several groups may have one tensor between them: then a block is the group's
    whose id it is. Raises ConfigError for tensors whose blocks are not one piece each."""
    problems: list[str] = []
    views: dict[str, LayerView] = {}
    num_blocks = view.num_blocks
    for name, group in ((name, group) for group, one in enumerate(view.groups) for name in one.layers):
        cache = kv_caches.get(name)
        if cache is None:
            continue  # it shares another layer's cache
        if cache.dim() < 2 or cache.shape[0] != num_blocks:
            problems.append(
                f"layer {name}: expected {num_blocks} blocks, the tensor is {tuple(cache.shape)}; a kernel block size "
                "other than --block-size is not supported"
            )
        elif not cache[0].is_contiguous():
            problems.append(
                f"layer {name}: a block of it is not one piece of memory; VLLM_KV_CACHE_LAYOUT must be LBHNC or BLHNC"
            )
        else:
            views[name] = _layer(name, cache, num_blocks, group, view.groups[group].kind)
    if problems:
        raise ConfigError(problems)
    return views


def _layer(name: str, cache: torch.Tensor, num_blocks: int, group: int, kind: CacheKind) -> LayerView:
    cuda = cache.device.type != "cpu"
    return LayerView(
        name,
        cache.data_ptr(),
        cache.stride(0) * cache.element_size(),
        cache[0].nbytes,
        num_blocks,
        group,
        kind,
        mem_type="VRAM" if cuda else "DRAM",
        device_id=max(cache.get_device(), 0) if cuda else 0,
    )


# --- requests and steps -------------------------------------------------------------------------------------------


class VllmRequestView(RequestView):
    """A view that remembers vLLM's own request, for vLLM's own connectors below our MultiConnector."""

    __slots__ = ("source",)
    source: Any


def request_view(request: Any, cache: KVCacheView | None = None) -> VllmRequestView:
    """A request; its tokens and block hashes are fetched when asked for. ``cache``: of a model with windows."""
    view = VllmRequestView(
        request.request_id,
        request.num_prompt_tokens,
        request.num_tokens,
        request.kv_transfer_params if cache is None else named(request.kv_transfer_params, cache),
        lambda: request.all_token_ids,
        lambda: request.block_hashes,
        lambda n_tokens: _beside(request, n_tokens),
    )
    view.source = request
    return view


def named(params: Any, cache: KVCacheView) -> Any:
    """What a request was handed, without the null blocks that vLLM's own producer names before those of a window."""
    groups = params.get("remote_block_ids") if isinstance(params, Mapping) else None
    if not isinstance(groups, list) or len(groups) != len(cache.groups):
        return params
    pairs = zip(cache.groups, groups, strict=True)
    return {**params, "remote_block_ids": [_named(ids) if one.kind == "window" else ids for one, ids in pairs]}


def _named(ids: Any) -> Any:
    if not isinstance(ids, list):
        return ids
    return ids[next((i for i, id in enumerate(ids) if id != NULL_BLOCK), len(ids)) :]


def lost(params: Any, cache: KVCacheView, tokens: int) -> bool:
    """Has vLLM's own producer let go of what the token behind the first ``tokens`` sees? It does when the block where
    that window begins has nothing else that is seen later. Ours hands nothing over then."""
    groups, held = params.get("remote_block_ids"), params.get("remote_num_tokens")
    if "kvconn" in params or not isinstance(groups, list) or type(held) is not int:
        return False
    last = blocks_for(held, cache.block_size)
    return any(
        isinstance(ids, list) and len(ids) < last - max(0, tokens + 1 - one.window) // cache.block_size
        for one, ids in zip(cache.groups, groups, strict=False)
        if one.window is not None
    )


def _beside(request: Any, n_tokens: int) -> bytes:
    """What decides the KV of the first ``n_tokens`` tokens besides them, by names that both engines have.

    The cache salt is none of it: it keeps users' prefixes apart, and changes no KV.
    """
    adapter = request.lora_request.lora_name if request.lora_request else None
    inputs = [
        (one.identifier, one.mm_position.offset, one.mm_position.length)
        for one in request.mm_features
        if one.mm_position.offset < n_tokens
    ]
    embeds = request.prompt_embeds
    raw = None if embeds is None else embeds[:n_tokens].contiguous().view(torch.uint8).numpy().tobytes()
    if adapter is None and not inputs and raw is None:
        return b""
    return msgspec.msgpack.encode((adapter, inputs, None if raw is None else hashlib.sha256(raw).digest()))


def finish_reason(request: Any) -> FinishReason:
    """Only STOP and LENGTH leave KV for others."""
    return _REASONS.get(request.status, FinishReason.ERROR)


def kv_blocks(blocks: Any, view: KVCacheView, local_tokens: int) -> KVBlocks:
    """vLLM's blocks of one request, of whose tokens ``local_tokens`` were prefix hits.

    Of full attention the blocks of a hit have a hash. Of a window most, or all, are gone or skipped: the hit is told.
    """
    hits = local_tokens // view.block_size
    return KVBlocks(
        tuple(tuple(NO_BLOCK if block.is_null else block.block_id for block in group) for group in blocks.blocks),
        tuple(
            _leading_hashed(ids) if group.kind == "full" else min(hits, len(ids))
            for group, ids in zip(view.groups, blocks.blocks, strict=True)
        ),
    )


def _leading_hashed(group: Sequence[Any]) -> int:
    for index, block in enumerate(group):
        if block.block_hash is None or block.is_null:
            return index
    return len(group)


def block_ids(ids: Sequence[Sequence[int]], view: KVCacheView | None = None) -> BlockIds:
    """Ids as vLLM lists them. With ``view``: in a window, which vLLM pads with its null block, that is no block."""
    if view is None or all(group.kind == "full" for group in view.groups):
        return tuple(tuple(group) for group in ids)
    return tuple(tuple(NO_BLOCK if block == NULL_BLOCK else block for block in group) for group in ids)


def step_view(output: Any, seq: int) -> StepView:
    """One step, as the scheduler decided it."""
    shares = _Shares(output) if output.num_scheduled_tokens else ()
    return StepView(seq, shares, tuple(output.preempted_req_ids or ()), tuple(output.finished_req_ids))


class _Shares(Collection[StepRequest]):
    """A step's requests, translated when somebody asks: in most steps nobody does, and there may be hundreds."""

    def __init__(self, output: Any) -> None:
        self._output = output

    @cached_property
    def _made(self) -> list[StepRequest]:
        output, cached = self._output, self._output.scheduled_cached_reqs
        made = [_share(output, new.req_id, new.num_computed_tokens, new.block_ids) for new in output.scheduled_new_reqs]
        made += [
            _share(output, *one)
            for one in zip(cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True)
        ]
        return made

    def __len__(self) -> int:
        return len(self._made)

    def __bool__(self) -> bool:
        return True  # none are made for a step without

    def __iter__(self) -> Iterator[StepRequest]:
        return iter(self._made)

    def __contains__(self, one: object) -> bool:
        return one in self._made


def _share(output: Any, id: str, start: int, new_blocks: Sequence[Sequence[int]] | None) -> StepRequest:
    return StepRequest(id, start, output.num_scheduled_tokens.get(id, 0), block_ids(new_blocks or ()))
