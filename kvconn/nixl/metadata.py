"""What the scheduler half ships to the worker halves with each step.

Rules
1. Frozen, picklable, complete: a worker half decides nothing that needs more than this and its own state.
2. Lives are named by n, drawn by the scheduler half's ledger and growing; a spec whose n was bound before changes
   nothing (C1).
Times are seconds of the scheduler half's clock; ``now`` lets a worker rebase them to its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import msgspec

from kvconn.base import BlockIds, ConnectorMetadata, HandshakeMetadata
from kvconn.nixl.fence import Fence
from kvconn.params import PeerKey, RemoteRef

__all__ = ["RESTING", "SILENT", "LoadSpec", "NixlHandshake", "NixlMetadata", "NixlStep", "SendSpec"]


class SendSpec(msgspec.Struct, frozen=True):
    """The announcement of a delayed release (C1). ``slot``: its fence, to be zeroed before a rank reports."""

    id: str
    n: int
    transfer_id: str
    deadline: float
    readers: int = 1
    slot: int | None = None


class LoadSpec(msgspec.Struct, frozen=True):
    """Blocks to fill. ``local[g]`` are ours, ``hits[g]`` of the reference's first blocks we have already.

    ``tokens``: how many of the prompt's first stand in our blocks when it is done.
    ``refused``: the reference is wrong, this life fails with that reason and nothing is read.
    """

    id: str
    n: int
    ref: RemoteRef | None
    local: BlockIds = ()
    hits: tuple[int, ...] = ()
    tokens: int = 0
    refused: str | None = None
    #: seconds since the request came
    waited: float = 0.0
    #: what the prompt is, as the seal has it
    prompt: bytes = b""
    #: whether a heartbeat was sent for it since
    beating: bool = False


class NixlStep(msgspec.Struct, frozen=True):
    """One step.

    ``releases``: references nobody here will read; ``heartbeats``: transfer ids still wanted, by peer; ``fences``:
    words to write before this step's forward; ``lifted``: slots of requests that end without a reader.
    """

    now: float
    sends: tuple[SendSpec, ...] = ()
    loads: tuple[LoadSpec, ...] = ()
    releases: tuple[RemoteRef, ...] = ()
    heartbeats: tuple[tuple[PeerKey, tuple[str, ...]], ...] = ()
    fences: tuple[Fence, ...] = ()
    lifted: tuple[int, ...] = ()


@dataclass(frozen=True)
class NixlMetadata(ConnectorMetadata):
    """The engine's envelope around one :class:`NixlStep`; None when there is nothing to say.

    ``rests``: no token is computed in this step, and loads are open.
    """

    step: NixlStep | None
    rests: bool = False


#: what most steps ship
SILENT: Final = NixlMetadata(None)
RESTING: Final = NixlMetadata(None, rests=True)


@dataclass(frozen=True)
class NixlHandshake(HandshakeMetadata):
    """One serving worker's encoded side-channel payload."""

    payload: bytes
