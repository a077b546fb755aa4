"""Pure: block ids, prefix hits and a plan -> the byte ranges of one read.

Rules
1. Pairs are sorted by local block and neighbours that are neighbours on both sides are joined into runs: NIXL merges
   only what ascends together on both sides, and pays for every range.
2. Wrong numbers are a RequestError that names the field; nothing is read then.
Arrays are int64; a run is (local block, remote block, blocks); a range is (address, bytes).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvconn.base import BlockIds
from kvconn.errors import RequestError
from kvconn.nixl.plan import Plan, RegionPair
from kvconn.transport.base import MemType

__all__ = ["Read", "Runs", "pair_blocks", "ranges", "reads", "to_runs"]

#: shape (n, 3): first local block, first remote block, number of blocks.
Runs = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Read:
    """One read to post: ranges of shape (n, 2), address and bytes, and the memory on either side, of one kind each."""

    local: npt.NDArray[np.int64]
    remote: npt.NDArray[np.int64]
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
    """What to read of one source; nothing where it is only told, or everything is there.

    ``local[g]``: our blocks from number ``hits[g]`` on; ``remote[g]``: the producer's. ``tokens``: how many of the
    prompt's first must stand afterwards; ``held``: how many the producer holds. Raises RequestError.
    """
    mine, theirs = ranges(plan, pair_blocks(local, remote, hits, plan.remote_blocks))
    return (Read(mine, theirs),) if len(mine) else ()


def pair_blocks(local: BlockIds, remote: BlockIds, hits: Sequence[int], n_remote_blocks: int) -> list[Runs]:
    """Runs per cache group.

    ``local[g]`` are the blocks to fill; ``remote[g]`` the producer's whole list, whose first ``hits[g]`` blocks we
    have already and whose surplus tail nobody needs. ``n_remote_blocks`` is the peer's pool. Raises RequestError.
    """
    field = "kv_transfer_params.remote_block_ids"
    if len(local) != len(remote):
        raise RequestError(field, f"{len(local)} cache groups", len(remote))
    paired: list[Runs] = []
    for group, (mine, theirs, hit) in enumerate(zip(local, remote, hits, strict=True)):
        needed = theirs[hit : hit + len(mine)]
        if len(needed) < len(mine):
            raise RequestError(f"{field}[{group}]", f"at least {hit + len(mine)} blocks", len(theirs))
        if needed and max(needed) >= n_remote_blocks:
            raise RequestError(f"{field}[{group}]", f"block ids below the peer's {n_remote_blocks}", max(needed))
        paired.append(to_runs(np.array(mine, dtype=np.int64), np.array(needed, dtype=np.int64)))
    return paired


def to_runs(local: npt.NDArray[np.int64], remote: npt.NDArray[np.int64]) -> Runs:
    """Sort pairs by local block and join neighbours. Both arrays have shape (n,)."""
    if local.size == 0:
        return np.empty((0, 3), dtype=np.int64)
    order = np.argsort(local, kind="stable")
    local, remote = local[order], remote[order]
    starts = np.flatnonzero(np.r_[True, (np.diff(local) != 1) | (np.diff(remote) != 1)])
    lengths = np.diff(np.r_[starts, local.size])
    return np.stack([local[starts], remote[starts], lengths], axis=1)


def ranges(plan: Plan, runs: Sequence[Runs]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Local and remote byte ranges, each of shape (n, 2), for every region of the plan."""
    parts = [_region_ranges(pair, runs[pair.local.group]) for pair in plan.pairs if len(runs[pair.local.group])]
    if not parts:
        empty = np.empty((0, 2), dtype=np.int64)
        return empty, empty
    return np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts])


def _region_ranges(pair: RegionPair, runs: Runs) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    if not pair.dense:
        runs = _single(runs)
    length = runs[:, 2] * pair.local.length
    local = np.stack([pair.local.base + runs[:, 0] * pair.local.stride, length], axis=1)
    remote = np.stack([pair.remote_base + runs[:, 1] * pair.remote_stride, length], axis=1)
    return local, remote


def _single(runs: Runs) -> Runs:
    """The same pairs as runs of one block."""
    counts = runs[:, 2]
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    first = np.repeat(runs[:, :2], counts, axis=0) + within[:, None]
    return np.concatenate([first, np.ones((len(first), 1), dtype=np.int64)], axis=1)
