"""What one engine of the reference engine is made of.

Rules
1. Everything an engine needs to start, in frozen Structs; nothing is read from the environment later.
2. What cannot work is a ConfigError before a process starts, every problem at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

import msgspec

from kvconn.base import CacheKind, GroupView, KVCacheView
from kvconn.config import LIMITS, KVTransferConfig, ModelView, ParallelConfig, parse_kv_transfer_config
from kvconn.errors import ConfigError
from kvconn.geometry import Share, Side, is_replicated, place_of

__all__ = [
    "TAPS",
    "EngineConfig",
    "ModelSpec",
    "cache_groups",
    "check",
    "kv_cache_view",
    "layer_names",
    "model_view",
    "share_of_rank",
]


#: tokens that a layer with a state convolves
TAPS: Final = 4


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The model: sizes in elements, weights from ``seed``.

    ``mode`` ``transformer``: a small decoder in float64. ``content-addressed``: KV is a hash of what it must be, tokens
    a hash of the KV read.
    """

    mode: Literal["transformer", "content-addressed"] = "transformer"
    #: what a token keeps: one latent row (MLA), or a key and a value per KV head (GQA)
    kv: Literal["latent", "gqa"] = "latent"
    seed: int = 0
    n_layers: int = 4
    d_model: int = 64
    n_heads: int = 4
    head_dim: int = 16
    #: of ``kv='gqa'``; divides n_heads
    n_kv_heads: int = 2
    #: of ``kv='latent'``: compressed K and V, then the shared positional part
    latent: int = 48
    rope: int = 16
    #: Layers take turns: one sees everything, then, unless 0, one sees this many tokens, its own among them,
    window: int = 0
    #: and, unless 0, one keeps a recurrent state with so many rows per head, and nothing of single tokens
    state: int = 0
    d_ff: int = 128
    vocab_size: int = 512
    #: smallest difference between the two best logits that a run may see; below it equal KV need not mean equal tokens
    margin_floor: float = 1e-6

    @property
    def cache_heads(self) -> int:
        """KV heads in the cache of one layer."""
        return 1 if self.kv == "latent" else self.n_kv_heads

    @property
    def channels(self) -> int:
        """Elements that one head keeps of one token."""
        return self.latent + self.rope if self.kv == "latent" else 2 * self.head_dim

    @property
    def convolved(self) -> int:
        """Elements of a head that a layer with a state convolves: a value, a key and a query."""
        return self.head_dim + 2 * self.state

    @property
    def state_sizes(self) -> tuple[int, int]:
        """Elements of the two parts of one head's state: the last inputs of the convolution, and what came of all."""
        return (TAPS - 1) * self.convolved, self.state * self.head_dim

    @property
    def row(self) -> int:
        """Elements of one token's KV in one layer."""
        return self.cache_heads * self.channels


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One engine. On each rank ``num_blocks`` of ``block_size`` tokens; ``env`` is set in the engine's processes only.

    ``stall_after``: seconds a release or a receive may be pending before the engine names it.
    """

    name: str
    parallel: ParallelConfig = ParallelConfig()
    kv_transfer_config: dict[str, Any] | None = None
    num_blocks: int = 256
    block_size: int = 16
    max_num_batched_tokens: int = 512
    max_num_seqs: int = 16
    model: ModelSpec = ModelSpec()
    host: str = "127.0.0.1"
    port: int = 5600
    env: dict[str, str] = {}
    stall_after: float = LIMITS.stall_after
    #: seconds one worker may take for one step, and to start
    step_timeout: float = LIMITS.step
    start_timeout: float = LIMITS.start
    #: seconds an engine that got SIGTERM waits for what runs on it and for readers of what it holds
    drain: float = LIMITS.drain
    #: the file the ranks meet at; the executor names it
    store: str = ""

    @property
    def block_tokens(self) -> int:
        """Tokens that one block id stands for: ``block_size`` on each of the ranks that share it."""
        return self.block_size * self.parallel.dcp


def check(config: EngineConfig) -> KVTransferConfig | None:
    """Raise ConfigError with every problem; return the parsed transfer configuration."""
    problems = [
        f"{name}: expected at least {low}, got {value}"
        for name, value, low in (
            ("num_blocks", config.num_blocks, 2),
            ("block_size", config.block_size, 1),
            ("max_num_batched_tokens", config.max_num_batched_tokens, 1),
            ("max_num_seqs", config.max_num_seqs, 1),
            ("model.window", config.model.window, 0),
            ("model.state", config.model.state, 0),
            ("parallel.tp", config.parallel.tp, 1),
            ("parallel.pp", config.parallel.pp, 1),
            ("parallel.pcp", config.parallel.pcp, 1),
            ("parallel.dcp", config.parallel.dcp, 1),
            ("parallel.dcp_interleave", config.parallel.dcp_interleave, 1),
        )
        if value < low
    ]
    parallel = config.parallel
    if min(parallel.tp, parallel.pp, parallel.pcp, parallel.dcp, parallel.dcp_interleave) >= 1:
        problems += _sizes(config)
    transfer: KVTransferConfig | None = None
    if config.kv_transfer_config is not None:
        try:
            transfer = parse_kv_transfer_config(config.kv_transfer_config)
        except ConfigError as err:
            problems += err.problems
    if transfer is not None and is_replicated(parallel):
        problems += _consumers(config.kv_transfer_config or {}, parallel.pcp)
    if problems:
        raise ConfigError([f"engine {config.name}: {problem}" for problem in problems])
    return transfer


def _sizes(config: EngineConfig) -> list[str]:
    """What of the model can't be divided as ``config.parallel`` asks."""
    model, parallel = config.model, config.parallel
    problems = []
    if model.kv == "gqa" and (model.n_kv_heads < 1 or model.n_heads % model.n_kv_heads):
        problems.append(f"model.n_kv_heads: expected a divisor of n_heads {model.n_heads}, got {model.n_kv_heads}")
    elif model.n_heads % parallel.tp or (model.cache_heads % parallel.tp and parallel.tp % model.cache_heads):
        heads = f"{model.n_heads} query heads" + (f" and {model.n_kv_heads} KV heads" if model.kv == "gqa" else "")
        problems.append(f"parallel.tp: expected a size that {heads} can be divided by, got {parallel.tp}")
    elif model.d_ff % parallel.tp:
        problems.append(f"parallel.tp: expected a divisor of d_ff {model.d_ff}, got {parallel.tp}")
    kinds, got = len(cache_groups(model)), f"window {model.window} and state {model.state} with {model.n_layers}"
    if kinds > model.n_layers:
        problems.append(f"model.n_layers: expected a layer of each of the {kinds} kinds, got {got}")
    if parallel.pp > model.n_layers:
        problems.append(f"parallel.pp: expected at most one stage per layer, {model.n_layers}, got {parallel.pp}")
    return problems + _shards(config)


def _shards(config: EngineConfig) -> list[str]:
    parallel = config.parallel
    if parallel.dcp == 1:
        return []
    problems = []
    if config.model.state:
        problems.append(f"parallel.dcp: a state is not shared by tokens, got {parallel.dcp} with model.state")
    if config.model.kv != "latent":
        problems.append(f"parallel.dcp: only a latent cache is shared by tokens, got {parallel.dcp} with kv 'gqa'")
    if parallel.pcp == 1 and parallel.tp % parallel.dcp:
        problems.append(f"parallel.dcp: expected a divisor of tp {parallel.tp}, got {parallel.dcp}")
    if parallel.pcp > 1 and (parallel.tp, parallel.dcp) != (1, parallel.pcp):
        got = f"dcp {parallel.dcp} with tp {parallel.tp}"
        problems.append(f"parallel.dcp: with pcp {parallel.pcp} expected tp 1 and dcp 1 or {parallel.pcp}, got {got}")
    if config.block_size % parallel.dcp_interleave:
        run, size = parallel.dcp_interleave, config.block_size
        problems.append(f"parallel.dcp_interleave: expected a divisor of block_size {size}, got {run}")
    return problems


def _consumers(transfer: Mapping[str, Any], pcp: int, path: str = "kv_transfer_config") -> list[str]:
    """NIXL connectors anywhere in ``transfer`` that read: replicated ranks can't all be filled by one read."""
    problems = []
    if "Nixl" in str(transfer.get("kv_connector")) and transfer.get("kv_role") != "kv_producer":
        got = transfer.get("kv_role")
        problems.append(f"{path}.kv_role: with replicated PCP {pcp} only kv_producer works, got {got}")
    extra = transfer.get("kv_connector_extra_config")
    children = extra.get("connectors", ()) if isinstance(extra, Mapping) else ()
    for index, child in enumerate(children if isinstance(children, list | tuple) else ()):
        if isinstance(child, Mapping):
            problems += _consumers(child, pcp, f"{path}.kv_connector_extra_config.connectors[{index}]")
    return problems


def share_of_rank(model: ModelSpec, parallel: ParallelConfig, rank: int) -> Share | None:
    """What ``rank`` keeps of every layer of its stage; None where sizes don't divide."""
    side = Side.of(parallel, model.cache_heads)
    return Share.of(side, place_of(parallel, rank).tp)


def layer_names(model: ModelSpec) -> tuple[str, ...]:
    """Cache tensors, one per layer."""
    return tuple(f"layers.{index}.kv" for index in range(model.n_layers))


def cache_groups(model: ModelSpec) -> tuple[GroupView, ...]:
    """The layers that share a block table, by kind. Layer ``i`` is in group ``i`` modulo their number."""
    names = layer_names(model)
    kinds: list[CacheKind] = ["full"]
    kinds += ["window"] if model.window > 0 else []
    kinds += ["state"] if model.state > 0 else []
    return tuple(
        GroupView(kind, names[first :: len(kinds)], model.window if kind == "window" else None)
        for first, kind in enumerate(kinds)
    )


def kv_cache_view(config: EngineConfig) -> KVCacheView:
    """The pool, as connectors are told it."""
    model, parallel = config.model, config.parallel
    heads = max(1, model.cache_heads // parallel.tp)
    layers = -(-model.n_layers // parallel.pp)
    block_bytes = config.block_size * heads * model.channels * 8 * layers  # float64
    return KVCacheView(config.num_blocks, config.block_tokens, cache_groups(model), block_bytes)


def model_view(config: EngineConfig) -> ModelView:
    """The model, as connectors are told it."""
    model = config.model
    return ModelView(
        name=f"kvconn-reference-{model.mode}-{model.kv}-{model.seed}",
        dtype="float64",
        num_layers=model.n_layers,
        num_kv_heads=model.cache_heads,
        head_size=model.channels,
        block_size=config.block_size,
        packing="latent" if model.kv == "latent" else "kv",
    )
