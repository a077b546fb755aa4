"""Pure: my regions and a peer's -> which bytes to read of whom, or why that cannot work.

Rules
1. No value of a peer is trusted: whatever does not fit is an :class:`Incompatible` that names the field, ours, theirs
   and what to do. Nothing here raises.
2. A feature is data in the plan, never a branch in the worker. Heads, stages, DCP, block sizes and layouts all end in
   lanes: pieces of one length at fixed places in blocks, and how blocks of either side hold the prompt's tokens.
3. Regions are paired by the names of their layers. What one source lacks another stage may have: :func:`missing` says,
   when all sources of a peer are planned, what none has.
4. Where the two layouts would tear every token apart, bytes land as the peer has them and a :class:`Permute` puts the
   block in order when all sources are quiet.
State groups (kind ``state``) have no tokens: their one slot is read whole, between equal shares.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Final, cast

import msgspec

from kvconn.base import CacheKind, Cells
from kvconn.geometry import Place, RankCache, Region, TokenShare
from kvconn.nixl.blocks import reach
from kvconn.nixl.routes import WHOLE, Incompatible, Route
from kvconn.nixl.strips import Strip, cut, halves, joined, landing, plain, unit_of
from kvconn.nixl.wire import AgentMetadata, KvconnAgent
from kvconn.params import MAX_GROUPS
from kvconn.transport.base import MemType

__all__ = ["Lane", "Memory", "Permute", "Plan", "Slots", "make_plan", "missing"]

#: tokens of a block, and blocks of a kernel in a logical one: bounds for a peer's numbers
MAX_BLOCK_SIZE: Final = 1 << 16
MAX_KERNEL_BLOCKS: Final = 1 << 12
#: regions of one layer: K and V, or the tensors of its state
MAX_TENSORS: Final = 8
#: kv_cache_layout without cells: are tokens before heads in a block?
LAYOUTS: Final = {"LBHNC": False, "BLHNC": False, "LBNHC": True, "BLNHC": True}


class Memory(msgspec.Struct, frozen=True):
    """Where regions lie."""

    mem_type: MemType = "DRAM"
    device_id: int = 0


class Slots(msgspec.Struct, frozen=True):
    """How blocks of a side hold a rank's tokens: ``kernel`` blocks of ``block`` tokens are one logical block."""

    block: int
    kernel: int = 1
    share: TokenShare = TokenShare()

    @property
    def logical(self) -> int:
        """Tokens of one rank in a block that a scheduler knows by one id."""
        return self.block * self.kernel

    @property
    def prompt(self) -> int:
        """Tokens of the prompt in it, over all DCP ranks."""
        return self.logical * self.share.dcp


class Lane(msgspec.Struct, frozen=True):
    """Pieces that share one list of blocks: for every unit of ``unit`` tokens, ``length`` bytes at each of ``bases``.

    ``bases``: (ours, theirs), the address of a piece in block 0. Blocks are ``*_stride``, the units of a block
    ``*_step`` bytes apart. ``pool``: logical blocks of theirs.
    """

    group: int
    remote_group: int
    kind: CacheKind
    window: int | None
    ours: Slots
    theirs: Slots
    pool: int
    unit: int
    length: int
    local_stride: int
    local_step: int
    remote_stride: int
    remote_step: int
    local: Memory
    remote: Memory
    bases: tuple[tuple[int, int], ...] = ()


class Permute(msgspec.Struct, frozen=True):
    """Blocks of one of our regions that land as ``[outer, rows, columns, size]`` and must be ``[outer, columns, rows,
    size]``; ``size`` in bytes."""

    region: Region
    outer: int
    rows: int
    columns: int
    size: int


class Plan(msgspec.Struct, frozen=True):
    """What one rank of ours reads of one rank of theirs. ``readers``: how many of our ranks tell that rank.

    ``has``: per region of ours a mask of what this source has, two bits per head; ``needs``: of
    all that we need. ``turn``: whose tokens it has, its DCP rank there; None where it is only told.
    """

    lanes: tuple[Lane, ...]
    readers: int = 1
    source: Place = Place(0, 0)
    permutes: tuple[Permute, ...] = ()
    has: tuple[int, ...] = ()
    needs: int = 0
    turn: int | None = None
    #: the peer's fence and the key its references are sealed with; None for a peer that has none
    fence: KvconnAgent | None = None
    seal_key: bytes = b""


def make_plan(ours: RankCache, theirs: AgentMetadata, route: Route = WHOLE) -> Plan | Incompatible:
    """What one rank of ours reads of the rank of theirs that ``route`` names."""
    problem = _impossible(ours, theirs, route)
    if problem is not None:
        return problem
    named = _by_layer(ours, theirs)
    if isinstance(named, Incompatible):
        return named
    if not route.count:
        return Plan((), route.readers, route.source, has=(0,) * len(ours.regions))
    tensors = Counter(region.name for region in ours.regions)
    seen: Counter[str] = Counter()
    lanes: dict[Lane, list[tuple[int, int]]] = {}
    permutes: list[Permute] = []
    has: list[int] = []
    for region in ours.regions:
        mask = 0
        indices = named.get(region.name, [])
        apart = tensors[region.name] > 1 or len(indices) > 1
        if _kind(ours, region) == "state" and indices and len(indices) != tensors[region.name]:
            counts = str(tensors[region.name]), str(len(indices))
            return Incompatible(f"tensors of {region.name}", *counts, "a state has the same on both sides")
        number, seen[region.name] = seen[region.name], seen[region.name] + 1
        for index in indices[number : number + 1] if _kind(ours, region) == "state" else indices:
            pair = _Pair(ours, theirs, route, region, index, apart)
            found = pair.planned()
            if isinstance(found, Incompatible):
                return found
            if pair.mask & mask:
                return Incompatible(
                    f"layer {region.name}", "once", "twice", "two regions of theirs have the same of it"
                )
            for lane, bases in found:
                lanes.setdefault(lane, []).extend(bases)
            permutes += pair.permutes
            mask |= pair.mask
        has.append(mask)
    needs = (1 << 2 * route.ours.heads.count) - 1
    return Plan(
        tuple(_whole(lanes)), route.readers, route.source, tuple(permutes), tuple(has), needs, route.theirs.tokens.rank
    )


def missing(ours: RankCache, plans: Sequence[Plan]) -> Incompatible | None:
    """What of ours none of a peer's sources has, when all of them are planned, or has twice, or would land differently.

    Under DCP each of them has its turns of the tokens, so that each must have every layer and head by itself.
    """
    reading = [plan for plan in plans if plan.turn is not None]
    turns = {plan.turn for plan in reading} or {None}
    needs = max((plan.needs for plan in reading), default=1)
    contradicts = "the ranks of a peer contradict each other"
    twice: Incompatible | None = None
    for index, region in enumerate(ours.regions):
        layer = f"layer {region.name}"
        for turn in turns:
            found = 0
            for has in (plan.has[index] for plan in reading if plan.turn == turn):
                twice = Incompatible(layer, "once", "of two ranks", contradicts) if found & has else twice
                found |= has
            if needs & ~found:
                whose = f"in no stage of DCP rank {turn}" if len(turns) > 1 else "in no stage"
                return Incompatible(layer, "needed", whose, "the models differ, or their stages")
        if len({_landing(plan, region) for plan in reading if plan.has[index]}) > 1:
            return Incompatible(f"layout of {region.name}", "one", "several", "all ranks of a peer must agree")
    return twice


def _landing(plan: Plan, region: Region) -> Permute | None:
    """How its part of this region of ours lands; None: in order."""
    return next((permute for permute in plan.permutes if permute.region == region), None)


def _impossible(ours: RankCache, theirs: AgentMetadata, route: Route) -> Incompatible | None:
    """What cannot be, whatever the regions."""
    sharing = route.theirs.tokens
    said = theirs.kvconn.interleave if theirs.kvconn is not None else sharing.interleave
    dtype = theirs.kvconn.dtype if theirs.kvconn is not None else ""
    contradicts = "the peer contradicts the reference"
    if ours.dtype and dtype and ours.dtype != dtype:
        return Incompatible("kv dtype", ours.dtype, dtype, "must be the same on both sides")
    if theirs.dcp_size != sharing.dcp:
        return Incompatible("dcp size", str(sharing.dcp), str(theirs.dcp_size), contradicts)
    if sharing.dcp > 1 and said != sharing.interleave:
        return Incompatible("dcp interleave", str(sharing.interleave), str(said), contradicts)
    if not 0 < theirs.block_size <= MAX_BLOCK_SIZE:
        return Incompatible("block size", str(ours.block_size), str(theirs.block_size), f"1 to {MAX_BLOCK_SIZE}")
    kernel = theirs.physical_blocks_per_logical_kv_block
    if not 0 < kernel <= MAX_KERNEL_BLOCKS:
        return Incompatible(
            "kernel blocks per block", str(ours.kernel_blocks), str(kernel), f"1 to {MAX_KERNEL_BLOCKS}"
        )
    for share, size in ((route.ours.tokens, ours.block_size), (sharing, theirs.block_size * kernel)):
        if share.dcp > 1 and size % share.interleave:
            return Incompatible("dcp interleave", f"{ours.block_size} tokens", f"{size} tokens", "must divide a block")
    return None


def _by_layer(ours: RankCache, theirs: AgentMetadata) -> dict[str, list[int]] | Incompatible:
    """Their regions of each layer; those of a peer that names none are ours in order."""
    names = theirs.region_names
    if names is None:
        if len(theirs.kv_caches_base_addr) != len(ours.regions):
            counts = str(len(ours.regions)), str(len(theirs.kv_caches_base_addr))
            return Incompatible("regions", *counts, "a peer that does not name its layers must have all of ours")
        names = [region.name for region in ours.regions]
    named: dict[str, list[int]] = {}
    for index, name in enumerate(names):
        named.setdefault(name, []).append(index)
    for name, indices in named.items():
        if len(indices) > MAX_TENSORS:
            return Incompatible(
                f"tensors of {name}", f"at most {MAX_TENSORS}", str(len(indices)), "K and V, or a state's"
            )
    return named


def _kind(ours: RankCache, region: Region) -> CacheKind:
    return ours.groups[region.group].kind


class _Pair:
    """One region of ours and one of theirs of the same layer; ``apart``: that layer has several on a side."""

    def __init__(
        self, ours: RankCache, theirs: AgentMetadata, route: Route, region: Region, index: int, apart: bool
    ) -> None:
        self.route = route
        self.region = region
        self.theirs = theirs
        self.index = index
        self.apart = apart
        self.group = ours.groups[region.group]
        self.slots = Slots(ours.block_size // ours.kernel_blocks, ours.kernel_blocks, route.ours.tokens)
        self.others = Slots(theirs.block_size, theirs.physical_blocks_per_logical_kv_block, route.theirs.tokens)
        self.mask = 0
        self.permutes: list[Permute] = []

    def planned(self) -> list[tuple[Lane, list[tuple[int, int]]]] | Incompatible:
        """A lane and its pieces; none where the two have no part of the layer in common."""
        place = self._kept() or self._place()
        if isinstance(place, Incompatible):
            return place
        if self.group.kind == "state":
            return self._state(*place)
        cells = self._cells()
        if isinstance(cells, Incompatible):
            return cells
        mine, other = cells
        part = max(mine.part, other.part)
        parts = min(mine.part + mine.parts, other.part + other.parts) - part
        if parts <= 0:
            return []
        self._cover(mine, part, parts)
        at = mine.at(part - mine.part, self.route.first - self.route.ours.heads.first, 0)
        there = other.at(part - other.part, self.route.first - self.route.theirs.heads.first, 0)
        unit = unit_of(*((s.block, s.share.dcp, s.share.interleave) for s in (self.slots, self.others)))
        strip = cut(parts, self.route.count, unit, mine, other)
        if strip.unit < unit and parts == mine.parts:
            strip, at = self._landed(strip, at, unit, mine, other)
        base = self.theirs.kv_caches_base_addr[self.index] + there
        return [self._lane(strip, self.region.base + at, base, *place)]

    def _cover(self, mine: Cells, part: int, parts: int) -> None:
        """Two bits per head: K and V, or both of what is not told apart."""
        bits = 3 if mine.parts == 1 else sum(1 << p - mine.part for p in range(part, part + parts))
        first = self.route.first - self.route.ours.heads.first
        self.mask = sum(bits << 2 * head for head in range(first, first + self.route.count))

    def _landed(self, strip: Strip, at: int, unit: int, mine: Cells, other: Cells) -> tuple[Strip, int]:
        """Rule 4, where it helps: the strip that lands as it is, and where."""
        first, count = self.route.first - self.route.ours.heads.first, self.route.count
        land = landing(self.region.length, first, count, mine, other)
        if land is None:
            return strip, at
        cells, offset, shape = land
        whole = cut(cells.parts, count, unit, cells, joined(other))
        if whole.unit < unit:
            return strip, at
        self.permutes.append(Permute(self.region, *shape))
        return whole, offset

    def _state(
        self, pool: int, remote_group: int, memory: Memory
    ) -> list[tuple[Lane, list[tuple[int, int]]]] | Incompatible:
        """One slot, read whole of the rank that has the same share."""
        if self.route.ours != self.route.theirs:
            return Incompatible(
                f"share of {self.region.name}", str(self.route.ours.heads), str(self.route.theirs.heads),
                "state can't be cut: TP and DCP sizes must be equal",
            )  # fmt: skip
        length = self.theirs.block_lens[self.index]
        if length != self.region.length:
            hint = "dtype or state sizes differ"
            return Incompatible(f"state of {self.region.name}", f"{self.region.length} B", f"{length} B", hint)
        self.mask = (1 << 2 * self.route.ours.heads.count) - 1
        strip = Strip(1, length, length, length, ((0, 0),))
        self.slots, self.others = Slots(1), Slots(1)
        base = self.theirs.kv_caches_base_addr[self.index]
        return [self._lane(strip, self.region.base, base, pool, remote_group, memory)]

    def _lane(
        self, strip: Strip, at: int, there: int, pool: int, remote_group: int, memory: Memory
    ) -> tuple[Lane, list[tuple[int, int]]]:
        region = self.region
        lane = Lane(
            region.group, remote_group, self.group.kind, self.group.window, self.slots, self.others, pool, strip.unit,
            strip.length, region.stride, strip.local_step, self.theirs.block_strides[self.index], strip.remote_step,
            Memory(cast(MemType, region.mem_type), region.device_id), memory,
        )  # fmt: skip
        return lane, [(at + mine, there + other) for mine, other in strip.offsets]

    def _kept(self) -> Incompatible | None:
        """Theirs must be kept as far back as ours see; a peer that does not say is believed until a prompt shows it.

        A window is kept from where one of their blocks begins. There one of ours must begin too: one that is filled in
        part is found again by a prompt that sees the rest of it.
        """
        said = self.theirs.kvconn.reach if self.theirs.kvconn is not None else None
        mine = reach(self.group)
        other = said[self.index] if said is not None else mine
        if mine != other and not (mine and (other is None or other > mine)):
            hint = "the models differ, or one keeps what the other gives back: set both to the same cache groups"
            return Incompatible(f"tokens kept of {self.region.name}", _reach(mine), _reach(other), hint)
        size, theirs = self.slots.prompt, self.others.prompt
        if mine and other is not None and theirs % size:
            hint = "of a window, blocks (times dcp) of who reads must divide those of who is read"
            return Incompatible(f"block size of {self.region.name}", f"{size} tokens", f"{theirs} tokens", hint)
        return None

    def _place(self) -> tuple[int, int, Memory] | Incompatible:
        """The size of their pool in logical blocks, their cache group and their memory."""
        theirs, index, name = self.theirs, self.index, self.region.name
        blocks = theirs.region_num_blocks[index] if theirs.region_num_blocks is not None else theirs.num_blocks
        if not 0 < blocks <= theirs.num_blocks:
            return Incompatible(f"blocks of {name}", str(theirs.num_blocks), str(blocks), "1 to the peer's pool")
        group = theirs.region_group_ids[index] if theirs.region_group_ids is not None else self.region.group
        if not 0 <= group < MAX_GROUPS:
            hint = "a layer that several groups share is not read"
            return Incompatible(f"cache group of {name}", str(self.region.group), str(group), hint)
        kind = theirs.region_mem_types[index] if theirs.region_mem_types is not None else self.region.mem_type
        if kind not in ("DRAM", "VRAM"):
            return Incompatible(f"memory of {name}", self.region.mem_type, kind, "DRAM or VRAM")
        if self.group.kind == "state":
            return blocks, group, Memory(cast(MemType, kind), theirs.device_id)
        return blocks // self.others.kernel, group, Memory(cast(MemType, kind), theirs.device_id)

    def _cells(self) -> tuple[Cells, Cells] | Incompatible:
        """Cells of both, of one size."""
        region, route = self.region, self.route
        length = self.theirs.block_lens[self.index]
        heads, others = route.ours.heads.count, route.theirs.heads.count
        mine = region.cells or plain(region.length, heads, self.slots.block)
        ours = self.theirs.kvconn
        said = ours.cells[self.index] if ours is not None and ours.cells else None
        layout = self.theirs.kv_cache_layout
        if said is None and layout not in LAYOUTS and others > 1:
            return Incompatible("kv cache layout", "LBHNC", layout, f"one of {', '.join(LAYOUTS)}")
        other = said or plain(length, others, self.others.block, LAYOUTS.get(layout, False))
        if other is not None and not (other.fit(length) and (other.heads, other.tokens) == (others, self.others.block)):
            expected = f"{others} heads x {self.others.block} tokens in {length} B"
            return Incompatible(
                f"cells of {region.name}", expected, str(other), "what the peer says contradicts itself"
            )
        if mine is not None and other is not None and mine.size != other.size:
            if mine.size == 2 * other.size and (self.apart or other.parts > 1):
                mine = halves(mine)
            elif other.size == 2 * mine.size and (self.apart or mine.parts > 1):
                other = halves(other)
        if mine is None or other is None or mine.size != other.size:
            return Incompatible(
                f"block length of {region.name}",
                _length(region.length, heads, self.slots.block),
                _length(length, others, self.others.block),
                "dtype, head size or kv heads differ",
            )
        return mine, other


def _reach(tokens: int | None) -> str:
    return "all" if tokens is None else f"the last {tokens}" if tokens else "none, a state"


def _length(length: int, heads: int, tokens: int) -> str:
    return f"{length} B for {heads} head{'s' if heads > 1 else ''} x {tokens} tokens"


def _whole(lanes: dict[Lane, list[tuple[int, int]]]) -> Iterable[Lane]:
    """Lanes with their pieces. Neighbours on both sides are one piece: so block-first pools, where layers are
    neighbours, are read in as few ranges as layer-first ones."""
    done: dict[Lane, list[tuple[int, int]]] = {}
    for lane, bases in lanes.items():
        bases.sort()
        ends = [i for i, (a, b) in enumerate(pairwise(bases), 1) if (b[0] - a[0], b[1] - a[1]) != (lane.length,) * 2]
        for first, end in pairwise([0, *ends, len(bases)]):
            longer = msgspec.structs.replace(lane, length=(end - first) * lane.length)
            done.setdefault(longer, []).append(bases[first])
    for lane, bases in done.items():
        yield msgspec.structs.replace(lane, bases=tuple(sorted(bases)))
