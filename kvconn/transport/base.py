"""What a connector asks of the wire, and what it may not assume.

Rules
1. Posting is asynchronous; a handle is *quiet* only when :meth:`Transport.poll` said ``DONE``, or ``ERR`` while
   the peer is known to be gone (C6, F4). Releasing a handle is bookkeeping and proves nothing (F1).
2. :meth:`Transport.close` destroys the agent; only after it nothing posted can land any more (F1).
3. All methods may be called from one step thread; a pump thread of the transport may run beside it. The transport
   holds one lock around its native agent. Notifications are queued, bounded, and handed out by
   :meth:`Transport.notifications`.
4. Addresses and lengths travel as ``int64`` arrays of shape ``(n, 2)``: columns ``address`` and ``length`` in bytes.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

__all__ = ["Descs", "HandleState", "MemType", "MemoryRegion", "Progress", "Transport"]

MemType = Literal["DRAM", "VRAM"]
#: who drives progress: NIXL's own spinning thread, our sleeping pump, or only the caller's polls (F2).
Progress = Literal["nixl", "pump", "poll"]
#: ``int64`` array of shape ``(n, 2)``: address, length in bytes.
Descs = npt.NDArray[np.int64]


class HandleState(enum.Enum):
    """State of a posted transfer as the transport last saw it."""

    PENDING = "pending"
    DONE = "done"
    ERR = "err"


class MemoryRegion(msgspec.Struct, frozen=True):
    """A contiguous piece of local memory to register. ``address`` and ``length`` in bytes."""

    address: int
    length: int
    mem_type: MemType = "DRAM"
    device_id: int = 0


class Transport(ABC):
    """One agent: registered memory, known peers, posted reads, notifications."""

    #: this agent's own name, unguessable and fresh per process.
    name: str
    #: :meth:`add_peer` takes milliseconds, and may be called on another thread; whoever else calls waits meanwhile.
    meets_slowly: bool = False
    #: seconds that are well spent looking again and again for the end of what was just posted
    patience: float = 0.0

    @abstractmethod
    def register(self, regions: Sequence[MemoryRegion]) -> None:
        """Register local memory. Raises TransportError."""

    @abstractmethod
    def metadata(self) -> bytes:
        """The blob another agent needs for :meth:`add_peer`. Call after :meth:`register`."""

    @abstractmethod
    def add_peer(self, blob: bytes) -> str:
        """Load a peer's blob, return the agent name in it. Raises TransportError on a blob it cannot read."""

    @abstractmethod
    def remove_peer(self, peer: str) -> None:
        """Forget a peer. Forbidden while a read from it is posted and not quiet (C6)."""

    def peer_gone(self, peer: str) -> bool:
        """True only when the transport knows that this peer can write nothing more, so that ERR is quiet (C6)."""
        return False

    @abstractmethod
    def post_read(
        self,
        peer: str,
        local: Descs,
        remote: Descs,
        *,
        local_mem: MemType = "DRAM",
        remote_mem: MemType = "DRAM",
        local_device: int = 0,
        remote_device: int = 0,
    ) -> int:
        """Read ``remote[i]`` of ``peer`` into ``local[i]`` for every i; return a handle.

        Raises TransportError. If ``err.handle`` is set parts may be under way all the same (F4): the transport keeps
        that handle, in state ERR, and the caller treats it like any other handle in ERR. Otherwise nothing was posted.
        """

    @abstractmethod
    def poll(self, handle: int) -> HandleState:
        """Where this read stands. Never raises for a known handle: a transport failure is ``ERR``."""

    def over(self, handles: Iterable[int]) -> list[tuple[int, HandleState]]:
        """Those of these reads that are not PENDING any more: a poll of each, or one look at all if that is cheaper."""
        polled = ((handle, self.poll(handle)) for handle in handles)
        return [one for one in polled if one[1] is not HandleState.PENDING]

    def reason(self, handle: int) -> str:
        """Why this handle is ERR, for logs and error texts; empty when it is not, or nobody knows."""
        return ""

    @abstractmethod
    def release(self, handle: int) -> None:
        """Forget a quiet handle. Does not stop anything (F1)."""

    @abstractmethod
    def notify(self, peer: str, message: bytes) -> None:
        """Send a notification. Raises TransportError."""

    @abstractmethod
    def notifications(self) -> list[tuple[str, bytes]]:
        """Notifications received since the last call, as ``(agent name of the sender, bytes)``; after :meth:`close`
        those received before it."""

    @abstractmethod
    def close(self) -> None:
        """Destroy the agent and stop its threads. Idempotent. After it nothing lands in our memory."""
