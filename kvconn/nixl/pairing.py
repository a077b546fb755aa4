"""Pure: block ids, prefix hits and a plan -> the byte ranges of one read.

Rules
1. Blocks are cut into units, the longest runs of tokens that stay together on both sides; each unit that we lack is
   paired with the unit of theirs that has its tokens. Pairs are sorted by theirs, where every range costs
   (:mod:`~kvconn.transport.near`), and neighbours on both sides are one range: NIXL merges only what ascends together
   on both sides, and pays for every range.
2. Nothing is touched but units of the blocks to fill that hold one of the first ``tokens`` tokens.
3. A block to fill is filled: each of its units that begins below ``tokens`` is read, or nothing is. Engines find a
   block again for any prompt that begins with its tokens, also one that sees more of it than this prompt's window does.
4. Wrong numbers are a RequestError that names the field; nothing is read then.
Arrays are int64. A unit's index counts through all blocks of a region: block times units per block plus number there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from kvconn.base import NO_BLOCK, BlockIds
from kvconn.errors import RequestError
from kvconn.geometry import blocks_for
from kvconn.nixl.plan import Lane, Memory, Permute, Plan, Slots
from kvconn.transport.base import Descs, MemType

__all__ = ["Read", "pair_units", "permuted", "ranges", "reads", "to_runs"]

FIELD: Final = "kv_transfer_params.remote_block_ids"
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Read:
    """One read to post: ranges of shape (n, 2), address and bytes, and the memory on either side, of one kind each."""

    local: Descs
    remote: Descs
    local_mem: MemType = "DRAM"
    remote_mem: MemType = "DRAM"
    local_device: int = 0
    remote_device: int = 0

    @property
    def nbytes(self) -> int:
        return int(self.local[:, 1].sum())


def reads(
    plan: Plan, local: BlockIds, remote: BlockIds, hits: Sequence[int], *, tokens: int, held: int
) -> tuple[Read, ...]:
    """What to read of one source, one read per pair of memories; none where it is only told, or all is there.

    ``local[g]``: our blocks from number ``hits[g]`` of the prompt on, ``NO_BLOCK`` where there is none; ``remote[g]``:
    the producer's blocks, of a window its last ones, of state its slot. ``tokens``: how many of the prompt's first must
    stand afterwards; ``held``: how many the producer holds. Raises RequestError.
    """
    paired: dict[tuple[object, ...], tuple[Ints, Ints]] = {}
    found: dict[tuple[Memory, Memory], list[tuple[Descs, Descs]]] = {}
    for lane in plan.lanes:
        key = (lane.group, lane.remote_group, lane.unit, lane.ours, lane.theirs, lane.kind, lane.pool)
        if key not in paired:
            paired[key] = pair_units(lane, local, remote, hits[lane.group], tokens, held)
        if len(paired[key][0]):
            found.setdefault((lane.local, lane.remote), []).append(ranges(lane, *paired[key]))
    return tuple(
        Read(
            np.concatenate([one for one, _ in parts]), np.concatenate([other for _, other in parts]),
            mine.mem_type, theirs.mem_type, mine.device_id, theirs.device_id,
        )
        for (mine, theirs), parts in found.items()
    )  # fmt: skip


def permuted(plans: Sequence[Plan], local: BlockIds) -> list[tuple[Permute, Ints]]:
    """What to put in order when every read of a load is quiet, and in which of our kernel blocks."""
    todo: dict[Permute, Ints] = {}
    for plan in plans:
        kernel = {lane.group: lane.ours.kernel for lane in plan.lanes}
        for permute in plan.permutes:
            if permute not in todo:
                group = permute.region.group
                todo[permute] = _kernel_blocks(_present(local[group]), kernel[group])
    return [(permute, blocks) for permute, blocks in todo.items() if len(blocks)]


def pair_units(lane: Lane, local: BlockIds, remote: BlockIds, hit: int, tokens: int, held: int) -> tuple[Ints, Ints]:
    """Indices of our units to fill, and of the units of theirs that fill them, ascending. Raises RequestError."""
    if lane.remote_group >= len(remote):
        raise RequestError(FIELD, f"at least {lane.remote_group + 1} cache groups", len(remote))
    field = f"{FIELD}[{lane.remote_group}]"
    theirs = np.array(remote[lane.remote_group], np.int64)
    mine = np.array(local[lane.group], np.int64)
    if lane.kind == "state":
        at = mine[mine != NO_BLOCK][-1:]
        there = theirs[-1:] if len(at) else theirs[:0]
        if len(at) > len(there):
            raise RequestError(field, "the slot of the state", 0)
    else:
        at, there = _attention(lane, mine, theirs, field, hit, tokens, held)
    highest = int(there.max()) // (lane.theirs.logical // lane.unit) if len(there) else 0
    if highest >= lane.pool:
        raise RequestError(field, f"block ids below the peer's {lane.pool}", highest)
    order = np.argsort(there, kind="stable")
    return at[order], there[order]


def _attention(lane: Lane, mine: Ints, theirs: Ints, field: str, hit: int, tokens: int, held: int) -> tuple[Ints, Ints]:
    """Pairs by the tokens that units hold."""
    per_block = lane.ours.logical // lane.unit
    within = np.arange(len(mine) * per_block, dtype=np.int64)  # units from the first block to fill on
    index = (within + hit * per_block) * lane.unit  # of a unit's first token among this rank's
    first = _prompt(lane.ours, index)
    wanted = (np.repeat(mine, per_block) >= 0) & (first < tokens)
    other = index
    if lane.ours.share != lane.theirs.share:
        other = _index(lane.theirs, first)
        wanted &= other >= 0
    each = lane.theirs.logical // lane.unit
    skipped, copies = 0, 0
    if lane.window is not None:
        skipped, copies = max(0, blocks_for(held, lane.theirs.prompt) - len(theirs)), _copies(theirs)
    unit = other // lane.unit - skipped * each
    there = (unit >= copies * each) & (unit < len(theirs) * each)
    lost = wanted & ~there
    if lost.any():
        need = int((unit[lost].max() * lane.unit) // lane.theirs.logical) + 1
        raise RequestError(field, f"at least {max(need, len(theirs) + 1)} blocks", len(theirs))
    return _units(mine, within[wanted], per_block), _units(theirs, unit[wanted], each)


def _copies(blocks: Ints) -> int:
    """How often the first block is named before it stands for itself (:func:`~kvconn.nixl.blocks.blocks_held`)."""
    return max(0, int(np.cumprod(blocks == blocks[:1]).sum()) - 1)


def _prompt(slots: Slots, index: Ints) -> Ints:
    """Positions in the prompt of a rank's tokens."""
    share = slots.share
    if share.dcp == 1:
        return index
    turn, within = np.divmod(index, share.interleave)
    return (turn * share.dcp + share.rank) * share.interleave + within


def _index(slots: Slots, position: Ints) -> Ints:
    """Indices among a rank's tokens of positions in the prompt; -1 for those of other ranks."""
    share = slots.share
    if share.dcp == 1:
        return position
    turn, within = np.divmod(position, share.interleave)
    return np.where(turn % share.dcp == share.rank, turn // share.dcp * share.interleave + within, -1)


def _units(blocks: Ints, unit: Ints, per_block: int) -> Ints:
    """Indices in the pool of units that are numbered through a list of logical blocks."""
    if per_block == 1:
        return blocks[unit]
    number, within = np.divmod(unit, per_block)
    return blocks[number] * per_block + within


def _present(blocks: Sequence[int]) -> Ints:
    ids = np.array(blocks, np.int64)
    return ids[ids >= 0]


def _kernel_blocks(ids: Ints, kernel: int) -> Ints:
    return (ids[:, None] * kernel + np.arange(kernel)).reshape(-1)


def to_runs(at: Ints, there: Ints, breaks: tuple[int, int] = (0, 0)) -> Ints:
    """Rows (ours, theirs, units): neighbours on both sides are joined, except where a multiple of ``breaks`` begins."""
    if not len(at):
        return np.empty((0, 3), np.int64)
    begins = np.ones(len(at), np.bool_)
    begins[1:] = (at[1:] != at[:-1] + 1) | (there[1:] != there[:-1] + 1)
    for units, every in zip((at, there), breaks, strict=True):
        if every:
            begins |= units % every == 0
    starts = begins.nonzero()[0]
    runs = np.empty((len(starts), 3), np.int64)
    runs[:, 0], runs[:, 1] = at[starts], there[starts]
    runs[:-1, 2], runs[-1, 2] = starts[1:] - starts[:-1], len(at) - starts[-1]
    return runs


def ranges(lane: Lane, at: Ints, other: Ints) -> tuple[Descs, Descs]:
    """Our and their byte ranges, each of shape (n, 2), of these units in every piece of the lane."""
    mine, theirs = lane.ours.block // lane.unit, lane.theirs.block // lane.unit  # units of a block
    whole = (
        _break(mine, lane.length, lane.local_step, lane.local_stride),
        _break(theirs, lane.length, lane.remote_step, lane.remote_stride),
    )
    runs = to_runs(at, other, whole)
    bases = np.array(lane.bases, np.int64)
    here = _offsets(runs[:, 0], mine, lane.local_stride, lane.local_step)
    there = _offsets(runs[:, 1], theirs, lane.remote_stride, lane.remote_step)
    lengths = runs[:, 2] * lane.length
    turned = len(bases) > 1 and bases[-1, 0] - bases[0, 0] < lane.local_stride  # pieces of one block: block by block
    return _rows(bases[:, 0], here, lengths, turned), _rows(bases[:, 1], there, lengths, turned)


def _offsets(units: Ints, per_block: int, stride: int, step: int) -> Ints:
    """Where these units begin, in bytes from block 0."""
    if per_block == 1:
        return units * stride
    return units // per_block * stride + units % per_block * step


def _rows(bases: Ints, offsets: Ints, lengths: Ints, turned: bool) -> Descs:
    """A range per base and offset, base by base; ``turned``: offset by offset."""
    rows = np.empty((len(bases), len(offsets), 2), np.int64)
    rows[:, :, 0] = bases[:, None] + offsets
    rows[:, :, 1] = lengths
    return (rows.swapaxes(0, 1) if turned else rows).reshape(-1, 2)


def _break(units: int, length: int, step: int, stride: int) -> int:
    """Where runs end: at every unit, at every block, or (0) nowhere, as far as bytes are neighbours."""
    if units > 1 and step != length:
        return 1
    return 0 if stride == units * length else units
