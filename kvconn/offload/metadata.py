"""What the scheduler half ships to the worker halves with each step, and what they answer. Frozen and picklable.

Rules
1. A *job* moves one block between two places on every rank: store (cache to host slot), fetch (secondary tier to host
   slot); or some blocks: save (host slots to the secondary tiers). It is a life of the scheduler half's own ledger, by
   name and number; every rank answers it once, with a fact below the path JOBS.
2. A *load* (host slots to the cache) and a *hold* are lives of a request, and answered like every connector's.
3. Numbers ascend within jobs and within lives, so that metadata that is bound twice changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from kvconn.base import BlockIds, ConnectorMetadata
from kvconn.ledger import Child

__all__ = ["GONE", "JOBS", "Fetch", "Hold", "Load", "OffloadMetadata", "OffloadStep", "Save", "Store"]

#: paths of facts about jobs, and about blocks that a secondary tier gave up; no child of a connector has these.
JOBS: Child = (-2,)
GONE: Child = (-3,)


class Store(msgspec.Struct, frozen=True):
    """Copy block ``blocks[g]`` of each group to ``slot``, before a later step may overwrite it."""

    name: str
    n: int
    blocks: tuple[int, ...]
    slot: int


class Save(msgspec.Struct, frozen=True):
    """Write ``slots[k]`` to the secondary tiers as ``keys[k]``."""

    name: str
    n: int
    keys: tuple[bytes, ...]
    slots: tuple[int, ...]


class Fetch(msgspec.Struct, frozen=True):
    """Read ``key`` from a secondary tier into ``slot``."""

    name: str
    n: int
    key: bytes
    slot: int


class Load(msgspec.Struct, frozen=True):
    """A receive life: copy ``slots[k]`` to block ``blocks[g][k]``. ``lost``: it cannot be done, report the failure."""

    id: str
    n: int
    slots: tuple[int, ...] = ()
    blocks: BlockIds = ()
    lost: bool = False


class Hold(msgspec.Struct, frozen=True):
    """A send life: report it when the store jobs ``stores`` are over on this rank."""

    id: str
    n: int
    stores: tuple[int, ...] = ()


class OffloadStep(msgspec.Struct, frozen=True):
    """One step. ``flush``: store jobs of earlier steps whose blocks this step may overwrite."""

    flush: tuple[int, ...] = ()
    stores: tuple[Store, ...] = ()
    saves: tuple[Save, ...] = ()
    fetches: tuple[Fetch, ...] = ()
    loads: tuple[Load, ...] = ()
    holds: tuple[Hold, ...] = ()


@dataclass(frozen=True)
class OffloadMetadata(ConnectorMetadata):
    """The engine's envelope around one :class:`OffloadStep`."""

    step: OffloadStep
