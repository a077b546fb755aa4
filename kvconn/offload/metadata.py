"""What the scheduler half ships to the worker halves with each step. Frozen and picklable."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from kvconn.base import BlockIds, ConnectorMetadata

__all__ = ["OffloadMetadata", "OffloadStep", "StoreSpec"]


class StoreSpec(msgspec.Struct, frozen=True):
    """The announcement of a held request (C1): ``blocks[g][k]`` holds the content named ``keys[k]``."""

    id: str
    n: int
    keys: tuple[bytes, ...] = ()
    blocks: BlockIds = ()


class OffloadStep(msgspec.Struct, frozen=True):
    """Requests held since the last step, by ascending n."""

    stores: tuple[StoreSpec, ...] = ()


@dataclass(frozen=True)
class OffloadMetadata(ConnectorMetadata):
    """The engine's envelope around one :class:`OffloadStep`."""

    step: OffloadStep
