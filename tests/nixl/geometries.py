"""A model of KV memory by token position, independent of the planner: where does each cell of a prompt lie on a side?

A cell is what one layer keeps of one token for one head in one part (K or V). Everything here is loops over cells,
after vLLM's rules in words: block tables, virtual blocks of DCP, kernel blocks, layouts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from kvconn.base import CacheKind, Cells, GroupView
from kvconn.config import ParallelConfig
from kvconn.geometry import Place, RankCache, Region, Side
from kvconn.nixl.blocks import reach
from kvconn.nixl.fence import WORD
from kvconn.nixl.pairing import Read
from kvconn.nixl.plan import Permute
from kvconn.nixl.wire import AgentMetadata, KvconnAgent

#: bytes of one part of one head of one token
PART = 8
#: bytes of the two tensors of a layer that keeps state (its slots have no tokens)
STATE = (40, 24)
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Group:
    """Layers with one block table."""

    layers: tuple[int, ...]
    kind: CacheKind = "full"
    window: int | None = None


@dataclass(frozen=True)
class Engine:
    """Everything that may differ between two sides, for one model."""

    heads: int = 1
    tp: int = 1
    pp: int = 1
    dcp: int = 1
    interleave: int = 1
    block: int = 4
    kernel: int = 1
    #: heads or tokens outermost in a block
    first: Literal["heads", "tokens"] = "heads"
    #: one part (latent), K and V in one row, in two halves of a block, in two tensors
    kv: Literal["latent", "row", "block", "apart"] = "row"
    #: a pool per layer, one block with all layers, or with heads outside of layers
    pool: Literal["layers", "blocks", "heads"] = "layers"
    blocks: int = 12
    gap: int = 0
    groups: tuple[Group, ...] = (Group((0, 1)),)
    #: say it in cells, or in kv_cache_layout alone as a stock peer does
    cells: bool = True
    mem_type: str = "DRAM"
    #: what the ranks are called: those that share tokens are of a sharded PCP, or all are there so many times
    pcp: Literal["none", "sharded"] = "none"
    replicas: int = 1

    @property
    def layers(self) -> int:
        return sum(len(group.layers) for group in self.groups)

    @property
    def side(self) -> Side:
        return Side(self.heads, self.tp, self.pp, self.dcp, self.interleave)

    @property
    def parallel(self) -> ParallelConfig:
        """As an operator says it."""
        tp, pcp = (1, self.tp) if self.pcp == "sharded" else (self.tp, self.replicas)
        return ParallelConfig(tp=tp, pp=self.pp, pcp=pcp, dcp=self.dcp, dcp_interleave=self.interleave)

    @property
    def views(self) -> tuple[GroupView, ...]:
        return tuple(GroupView(g.kind, tuple(f"layers.{i}" for i in g.layers), g.window) for g in self.groups)

    @property
    def parts(self) -> int:
        return 1 if self.kv == "latent" else 2

    @property
    def span(self) -> int:
        """Tokens of a prompt that one block id stands for."""
        return self.block * self.dcp

    def stage(self, layer: int) -> int:
        """Contiguous, nearly equal stages."""
        return layer * self.pp // self.layers

    def places(self) -> Iterator[Place]:
        return (Place(pp, tp) for pp in range(self.pp) for tp in range(self.tp))

    def heads_of(self, tp: int) -> range:
        """Neighbouring ranks hold copies where there are fewer heads than ranks."""
        if self.heads >= self.tp:
            each = self.heads // self.tp
            return range(tp * each, (tp + 1) * each)
        head = tp * self.heads // self.tp
        return range(head, head + 1)

    def slot(self, tp: int, token: int) -> tuple[int, int] | None:
        """Number of the logical block in the request's list and the offset there, if rank ``tp`` has the token."""
        number, virtual = divmod(token, self.span)
        turn, within = divmod(virtual, self.interleave)
        if turn % self.dcp != tp % self.dcp:
            return None
        return number, turn // self.dcp * self.interleave + within


def name(layer: int, part: int, head: int, token: int) -> int:
    """What a cell holds: no two of a model are equal, and none is zero."""
    return (((layer * 2 + part) * 64 + head) * 1024 + token + 1) * 0x9E3779B97F4A7C15 % (1 << 64) | 1


@dataclass
class Rank:
    """One rank's memory: an array of bytes that begins at address ``BASE``."""

    engine: Engine
    place: Place
    fill: int
    bytes: Bytes = field(init=False)
    written: npt.NDArray[np.int64] = field(init=False)
    regions: list[Region] = field(init=False)

    BASE = 1000

    def __post_init__(self) -> None:
        e = self.engine
        self.heads = e.heads_of(self.place.tp)
        self.group_of = {layer: g for g, group in enumerate(e.groups) for layer in group.layers}
        here = [layer for layer in range(e.layers) if e.stage(layer) == self.place.pp]
        self.mine = [layer for layer in here if e.groups[self.group_of[layer]].kind != "state"]
        self.states = [layer for layer in here if layer not in self.mine]
        self.regions, self._at = [], {}
        size = self._lay_out_states(self._lay_out())
        self.bytes = np.full(size, self.fill, np.uint8)
        self.written = np.zeros(size, np.int64)

    def _lay_out(self) -> int:
        """Regions, and where block 0 of each layer begins with its strides."""
        e = self.engine
        n, tokens = len(self.heads), e.block // e.kernel
        count = e.blocks * e.kernel
        head = e.parts * tokens * PART  # bytes of one head of a block of one layer
        layer = n * head
        if e.pool == "layers":
            bases = [i * (count * (layer + e.gap) + 16) for i in range(len(self.mine))]
            stride, head_step, end = layer + e.gap, head, len(self.mine) * (count * (layer + e.gap) + 16)
        else:
            stride = len(self.mine) * layer + e.gap
            step = layer if e.pool == "blocks" else head
            head_step = head if e.pool == "blocks" else len(self.mine) * head
            bases, end = [i * step for i in range(len(self.mine))], count * stride
        for base, which in zip(bases, self.mine, strict=True):
            self._one(which, base, stride, head_step, layer, count, tokens)
        return end

    def _lay_out_states(self, end: int) -> int:
        """Two tensors per layer of state, behind everything else."""
        for layer in self.states:
            for length in STATE:
                at, group = self.BASE + end, self.group_of[layer]
                self.regions.append(
                    Region(f"layers.{layer}", at, length, length, self.engine.blocks, group, self.engine.mem_type)
                )
                end += length * self.engine.blocks
        return end

    def slot(self, region: Region, block: int) -> slice:
        """The bytes of a slot of a tensor of state."""
        start = region.base - self.BASE + block * region.stride
        return slice(start, start + region.length)

    def state(self, region: Region) -> Bytes:
        """What a slot of this rank holds."""
        seed = sum(region.name.encode()) * 1000 + region.length * 10 + self.place.tp
        return np.random.default_rng(seed).integers(0, 256, region.length, np.uint8)

    def state_regions(self) -> list[Region]:
        return [region for region in self.regions if self.engine.groups[region.group].kind == "state"]

    def _one(self, layer: int, base: int, stride: int, head_step: int, length: int, count: int, tokens: int) -> None:
        e, n = self.engine, len(self.heads)
        row = PART * e.parts if e.kv == "row" else PART
        tensors = 2 if e.kv == "apart" else 1
        halves = 2 if e.kv == "block" else 1
        if e.pool == "heads":  # [heads, layers, tokens, row]
            head, token = head_step, row
        elif e.first == "heads":
            head, token = tokens * row, row
        else:
            head, token = row, n * row
        half = n * tokens * row
        for tensor in range(tensors):
            part_step = {"row": PART, "block": half}.get(e.kv, 0)
            reach = length if e.pool != "heads" else (n - 1) * head_step + tokens * row
            cells = Cells(
                n, tokens, PART if e.kv == "row" else row, head, token, 2 if e.kv in ("row", "block") else 1, part_step,
                tensor,
            )  # fmt: skip
            at = base + tensor * half * halves
            self.regions.append(
                Region(
                    f"layers.{layer}", self.BASE + at, stride, reach // tensors, count, self.group_of[layer],
                    e.mem_type, 0, cells if e.cells or e.first == "tokens" else None,
                )
            )  # fmt: skip
            for part in range(e.parts) if tensors == 1 else (tensor,):
                self._at[layer, part] = (at + (part * part_step if tensors == 1 else 0), stride, head, token)

    def cell(self, layer: int, part: int, head: int, block: int, offset: int) -> slice:
        """The bytes of a cell of a logical block; ``head`` of the model."""
        at, stride, head_step, token_step = self._at[layer, part]
        number, within = divmod(offset, self.engine.block // self.engine.kernel)
        start = at + (block * self.engine.kernel + number) * stride
        start += (head - self.heads[0]) * head_step + within * token_step
        return slice(start, start + PART)

    def block_bytes(self, layer: int, block: int) -> list[slice]:
        """All cells of a logical block of a layer."""
        return [
            self.cell(layer, part, head, block, offset)
            for part in range(self.engine.parts)
            for head in self.heads
            for offset in range(self.engine.block)
        ]

    def cache(self) -> RankCache:
        e = self.engine
        return RankCache(tuple(self.regions), e.block, e.views, e.kernel)

    def metadata(self, **changes: Any) -> AgentMetadata:
        e = self.engine
        count = e.blocks * e.kernel
        ours = KvconnAgent(
            WORD, 1, e.tp, e.pp, e.interleave, cells=[r.cells for r in self.regions] if e.cells else None,
            reach=[reach(e.views[r.group]) for r in self.regions] if e.cells else None,
        )  # fmt: skip
        fields: dict[str, Any] = {
            "engine_id": "P",
            "agent_metadata": b"",
            "kv_caches_base_addr": [r.base for r in self.regions],
            "device_id": 0,
            "num_blocks": count,
            "block_lens": [r.length for r in self.regions],
            "block_strides": [r.stride for r in self.regions],
            "kv_cache_layout": "LBHNC" if e.first == "heads" else "LBNHC",
            "block_size": e.block // e.kernel,
            "physical_blocks_per_logical_kv_block": e.kernel,
            "region_num_blocks": [r.count for r in self.regions],
            "region_group_ids": [r.group for r in self.regions],
            "region_names": [r.name for r in self.regions],
            "region_mem_types": [r.mem_type for r in self.regions],
            "dcp_size": e.dcp,
            "kvconn": ours,
        }
        return AgentMetadata(**{**fields, **changes})

    def write(self, tables: list[list[int]], tokens: int) -> None:
        """A prefill: every cell this rank holds of the first tokens. ``tables``: blocks per group, -1: none."""
        for layer, part, head, token in self.holds(tokens):
            number, offset = self.engine.slot(self.place.tp, token) or (0, 0)
            block = tables[self.group_of[layer]][number]
            if block >= 0:
                value = np.array([name(layer, part, head, token)], np.uint64).view(np.uint8)
                self.bytes[self.cell(layer, part, head, block, offset)] = value
        for region in self.state_regions():
            self.bytes[self.slot(region, tables[region.group][-1])] = self.state(region)

    def holds(self, tokens: int) -> Iterator[tuple[int, int, int, int]]:
        """(layer, part, head, token) of this rank's cells of a prompt."""
        for layer in self.mine:
            for token in range(tokens):
                if self.engine.slot(self.place.tp, token) is not None:
                    for part in range(self.engine.parts):
                        for head in self.heads:
                            yield layer, part, head, token

    def read(self, source: Rank, read: Read) -> None:
        """What a transport does."""
        for to, at, size in self.parts(source, read):
            self.bytes[to : to + size] = source.bytes[at : at + size]

    def parts(self, source: Rank, read: Read) -> list[tuple[int, int, int]]:
        """Offsets in ours and theirs and lengths, counted as written. Ranges outside of either are an error."""
        found = []
        for (address, size), (there, same) in zip(read.local.tolist(), read.remote.tolist(), strict=True):
            to, at = address - self.BASE, there - self.BASE
            assert size == same
            assert 0 <= to < to + size <= len(self.bytes)
            assert 0 <= at < at + size <= len(source.bytes)
            self.written[to : to + size] += 1
            found.append((to, at, size))
        return found

    def view(self, permute: Permute) -> Bytes:
        """A region as an array (blocks, bytes)."""
        region = permute.region
        return np.lib.stride_tricks.as_strided(
            self.bytes[region.base - self.BASE :], (region.count, region.length), (region.stride, 1)
        )


def ranks(engine: Engine, fill: int) -> dict[Place, Rank]:
    return {place: Rank(engine, place, fill) for place in engine.places()}


def other(engine: Engine, **changes: Any) -> Engine:
    return replace(engine, **changes)
