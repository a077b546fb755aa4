"""The collectives of one rank, on ``torch.distributed`` with gloo.

Rules
1. A group of one rank exchanges nothing, so that an engine of one rank needs no ``torch.distributed``.
2. All members of a group make the same calls in the same order with tensors of the same shapes. What holds nothing is
   not exchanged: all members see that alike.
3. Sums and gathered parts are bit for bit the same on all members.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from kvconn.config import ParallelConfig
from kvconn.engine.portion import Members

__all__ = ["Alone", "Group", "Ranks", "connect", "gather_rows"]


class Group(Protocol):
    """Some ranks; ``rank`` is this one's index among ``size``."""

    rank: int
    size: int

    def gather(self, values: torch.Tensor) -> list[torch.Tensor]:
        """Every member's tensor, in order."""
        ...

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over members, on every member. May use ``values`` for it."""
        ...

    def send(self, values: torch.Tensor, to: int) -> None:
        """Give a tensor to one member, who receives it."""
        ...

    def receive(self, values: torch.Tensor, source: int) -> torch.Tensor:
        """Fill ``values`` with what a member sends."""
        ...


class Alone:
    """A group of one."""

    rank = 0
    size = 1

    def gather(self, values: torch.Tensor) -> list[torch.Tensor]:
        return [values]

    def total(self, values: torch.Tensor) -> torch.Tensor:
        return values

    def send(self, values: torch.Tensor, to: int) -> None:
        raise AssertionError("there is nobody to send to")

    def receive(self, values: torch.Tensor, source: int) -> torch.Tensor:
        raise AssertionError("there is nobody to receive from")


class _Gloo:
    """Members by their ranks in the engine."""

    def __init__(self, members: tuple[int, ...], rank: int) -> None:
        self.rank = members.index(rank)
        self.size = len(members)
        self._members = members
        self._group = dist.new_group(list(members), backend="gloo", use_local_synchronization=True)

    def gather(self, values: torch.Tensor) -> list[torch.Tensor]:
        parts = [torch.empty_like(values) for _ in self._members]
        if values.numel():
            dist.all_gather(parts, values.contiguous(), group=self._group)
        return parts

    def total(self, values: torch.Tensor) -> torch.Tensor:
        if values.numel():
            dist.all_reduce(values, group=self._group)
        return values

    def send(self, values: torch.Tensor, to: int) -> None:
        if values.numel():
            dist.send(values.contiguous(), self._members[to], group=self._group)

    def receive(self, values: torch.Tensor, source: int) -> torch.Tensor:
        if values.numel():
            dist.recv(values, self._members[source], group=self._group)
        return values


class Ranks:
    """The groups that ``rank`` is in; ``join`` makes one of its members."""

    def __init__(self, parallel: ParallelConfig, rank: int, join: Callable[[tuple[int, ...]], Group]) -> None:
        members = Members.of(parallel, rank)
        self.rank = rank
        self.members = members
        made: dict[tuple[int, ...], Group] = {}
        for some in (members.tp, members.pcp, members.stages, members.shards, members.holders):
            if some not in made:
                made[some] = join(some) if len(some) > 1 else Alone()
        self.tp = made[members.tp]
        self.pcp = made[members.pcp]
        self.stages = made[members.stages]
        self.shards = made[members.shards]
        self.holders = made[members.holders]

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


def connect(parallel: ParallelConfig, rank: int, store: str, timeout: float) -> Ranks:
    """Meet the other ranks at the file ``store``. ``timeout``: seconds that one exchange may take."""
    if parallel.world > 1:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=parallel.world,
            timeout=timedelta(seconds=timeout),
        )
    return Ranks(parallel, rank, lambda members: _Gloo(members, rank))


def gather_rows(group: Group, rows: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """All members' rows in order; member r gives ``counts[r]``. Members with none join all the same."""
    if group.size == 1:
        return rows
    padded = rows.new_zeros(max(counts), *rows.shape[1:])
    padded[: len(rows)] = rows
    return torch.cat([part[:n] for part, n in zip(group.gather(padded), counts, strict=True)])
