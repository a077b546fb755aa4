"""An engine described in JSON -> what its ranks would say of themselves, so that a pair can be planned before it runs.

Rules
1. A description is an operator's: what is wrong with it is a ConfigError with the path of the key, all at once.
2. Addresses are made up; everything else is what an engine of that shape has.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

import msgspec

from kvconn.base import Cells, GroupView
from kvconn.config import Count, ParallelConfig, parse_struct
from kvconn.errors import ConfigError
from kvconn.geometry import Place, RankCache, Region, Share, Side
from kvconn.nixl.blocks import reach
from kvconn.nixl.wire import AgentMetadata, KvconnAgent

__all__ = ["ITEM_SIZES", "Shape", "ShapeGroup", "cache_of", "metadata_of", "parse_shape"]

#: bytes of one number
ITEM_SIZES: Final = {
    **dict.fromkeys(("fp8", "fp8_e4m3", "fp8_e5m2", "int8", "uint8"), 1),
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "float64": 8,
}
#: made-up addresses of tensors are this far apart
APART: Final = 1 << 44
MAX_LAYERS: Final = 4096
Small = Annotated[int, msgspec.Meta(ge=1, le=MAX_LAYERS)]


class ShapeGroup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A cache group. ``window`` in tokens; ``state_bytes``: of the tensors of one layer, per rank."""

    layers: tuple[Annotated[int, msgspec.Meta(ge=0, lt=MAX_LAYERS)], ...]
    kind: Literal["full", "window", "state"] = "full"
    window: Count | None = None
    state_bytes: tuple[Count, ...] = ()


class Shape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One engine. ``head_size`` in elements of ``dtype``, of K alone (of a latent row: all of it); sizes in tokens.

    ``kv``: K and V of a token in one row, or in tensors of their own. ``layout`` in vLLM's letters. ``groups``: where
    not all layers are full attention in one group. ``names``: a layer's, with its number for ``{}``.
    """

    layers: Small
    kv_heads: Small
    head_size: Count
    dtype: str = "bfloat16"
    packing: Literal["kv", "latent"] = "kv"
    tp: Small = 1
    pp: Small = 1
    pcp: Small = 1
    dcp: Small = 1
    dcp_interleave: Small = 1
    block_size: Small = 16
    kernel_block_size: Small | None = None
    num_blocks: Annotated[int, msgspec.Meta(ge=1, le=1 << 24)] = 4096
    layout: Literal["LBHNC", "LBNHC", "BLHNC", "BLNHC", "BHLNC"] = "LBHNC"
    kv: Literal["together", "apart"] = "together"
    memory: Literal["DRAM", "VRAM"] = "VRAM"
    groups: tuple[ShapeGroup, ...] = ()
    names: str = "layers.{}"

    @property
    def heads(self) -> int:
        """KV heads as the cache has them: a latent row counts as one."""
        return 1 if self.packing == "latent" else self.kv_heads

    @property
    def side(self) -> Side:
        parallel = ParallelConfig(self.tp, self.pp, self.pcp, self.dcp, dcp_interleave=self.dcp_interleave)
        return Side.of(parallel, self.heads)

    @property
    def kernel(self) -> int:
        """Kernel blocks of a block."""
        return self.block_size // (self.kernel_block_size or self.block_size)

    @property
    def every_group(self) -> tuple[ShapeGroup, ...]:
        return self.groups or (ShapeGroup(tuple(range(self.layers))),)

    def stage(self, layer: int) -> int:
        """Contiguous, nearly equal stages."""
        return layer * self.pp // self.layers


def parse_shape(raw: str | bytes | Mapping[str, Any], path: str) -> Shape:
    """A description. Raises ConfigError with every problem found."""
    if isinstance(raw, str | bytes):
        try:
            raw = msgspec.json.decode(raw)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as err:
            raise ConfigError(f"{path}: not JSON: {err}") from None
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{path}: expected an object, got {type(raw).__name__}")
    shape = parse_struct(Shape, raw, path)
    problems = [f"{path}.{problem}" for problem in _problems(shape)]
    if problems:
        raise ConfigError(problems)
    return shape


def _problems(shape: Shape) -> list[str]:
    block, layers = shape.block_size, range(shape.layers)
    in_groups = sorted(layer for group in shape.every_group for layer in group.layers)
    checks = (
        (shape.dtype in ITEM_SIZES, f"dtype: expected one of {', '.join(ITEM_SIZES)}, got {shape.dtype!r}"),
        (not block % (shape.kernel_block_size or 1), f"kernel_block_size: expected a divisor of block_size {block}"),
        (
            shape.pcp == 1 or shape.dcp == 1 or (shape.tp == 1 and shape.dcp == shape.pcp),
            f"dcp: with pcp {shape.pcp} expected 1, or with tp 1 that too, got {shape.dcp}",
        ),
        (
            shape.dcp == 1 or not block % shape.dcp_interleave,
            f"dcp_interleave: expected a divisor of block_size {block}",
        ),
        (shape.pp <= shape.layers, f"pp: expected at most one stage per layer, {shape.layers}, got {shape.pp}"),
        (shape.layout != "BHLNC" or shape.kv == "together", "kv: expected 'together' with layout BHLNC"),
        ("{}" in shape.names, f"names: expected {{}} where a layer's number goes, got {shape.names!r}"),
        (
            Share.of(shape.side, 0) is not None,
            f"tp: expected to divide {shape.heads} KV heads or be a multiple, and dcp to divide the ranks per head",
        ),
        (in_groups == list(layers), f"groups: expected each of layers 0..{shape.layers - 1} in one group"),
    )
    problems = [said for fine, said in checks if not fine]
    for index, group in enumerate(shape.groups):
        if (group.kind == "window") != (group.window is not None):
            problems.append(f"groups[{index}].window: expected with kind 'window' and only there")
        if (group.kind == "state") != bool(group.state_bytes):
            problems.append(f"groups[{index}].state_bytes: expected with kind 'state' and only there")
    return problems


def cache_of(shape: Shape, place: Place) -> RankCache:
    """What the rank at ``place`` registers; ``place`` is one of the shape's."""
    share = Share.of(shape.side, place.tp)
    heads = share.heads.count if share is not None else 1
    regions: list[Region] = []
    mine = [
        (group, layer, number)
        for number, group in enumerate(shape.every_group)
        for layer in group.layers
        if shape.stage(layer) == place.pp
    ]
    attention = [layer for group, layer, _ in mine if group.kind != "state"]
    for group, layer, number in sorted(mine, key=lambda one: one[1]):
        name = shape.names.format(layer)
        if group.kind == "state":
            for tensor, size in enumerate(group.state_bytes):
                base = APART * (1 + layer) + (tensor << 40)
                regions.append(Region(name, base, size, size, shape.num_blocks, number, shape.memory))
        else:
            regions += _attention(shape, name, layer, number, heads, attention)
    groups = tuple(
        GroupView(group.kind, tuple(shape.names.format(i) for i in group.layers), group.window)
        for group in shape.every_group
    )
    return RankCache(tuple(regions), shape.block_size, groups, shape.kernel, shape.dtype)


def _attention(shape: Shape, name: str, layer: int, group: int, heads: int, layers: list[int]) -> list[Region]:
    """The tensors of one layer."""
    tokens, count = shape.block_size // shape.kernel, shape.num_blocks * shape.kernel
    rows = 2 if shape.packing == "kv" and shape.kv == "together" else 1  # K and V, or one of them, or a latent row
    size = shape.head_size * ITEM_SIZES[shape.dtype]
    tensors = 2 if shape.packing == "kv" and shape.kv == "apart" else 1
    row = size * rows
    length = heads * tokens * row
    number = layers.index(layer)
    regions: list[Region] = []
    for tensor in range(tensors):
        head, token = (tokens * row, row) if shape.layout[-3:] != "NHC" else (row, heads * row)
        base, stride, reach = APART * (1 + layer) + (tensor << 40), length, length
        if shape.layout == "BHLNC":
            head, stride = len(layers) * tokens * row, len(layers) * length
            base, reach = APART + number * tokens * row, (heads - 1) * head + tokens * row
        elif shape.layout.startswith("BL"):
            base, stride = APART + (number * tensors + tensor) * length, len(layers) * tensors * length
        cells = Cells(heads, tokens, size, head, token, rows, size if rows > 1 else 0, tensor)
        regions.append(Region(name, base, stride, reach, count, group, shape.memory, cells=cells))
    return regions


def metadata_of(shape: Shape, place: Place, engine_id: str = "P") -> AgentMetadata:
    """What the rank at ``place`` tells readers."""
    cache = cache_of(shape, place)
    regions, side = cache.regions, shape.side
    return AgentMetadata(
        engine_id=engine_id,
        agent_metadata=b"",
        kv_caches_base_addr=[r.base for r in regions],
        device_id=0,
        num_blocks=shape.num_blocks * shape.kernel,
        block_lens=[r.length for r in regions],
        block_strides=[r.stride for r in regions],
        kv_cache_layout=shape.layout,
        block_size=shape.block_size // shape.kernel,
        physical_blocks_per_logical_kv_block=shape.kernel,
        region_num_blocks=[r.count for r in regions],
        region_group_ids=[r.group for r in regions],
        region_names=[r.name for r in regions],
        region_mem_types=[r.mem_type for r in regions],
        dcp_size=shape.dcp,
        pcp_size=shape.pcp,
        kvconn=KvconnAgent(
            8, 1, side.tp, side.pp, side.interleave, shape.dtype, [r.cells for r in regions],
            [reach(cache.groups[r.group]) for r in regions],
        ),
    )  # fmt: skip
