"""The NIXL agent of one worker: made, introduced to peers, made anew, gone.

Rules
1. While there is none, ``transport`` is None: loads fail, and it is tried again (C7).
2. Destroying it is the only way to end what is posted (F1); whoever has something posted is told by the worker.
3. To load a peer's agent takes NIXL milliseconds and its lock. A transport that says so (``meets_slowly``) is
   introduced on a thread; while it is ``busy`` the step thread keeps away from it. One introduction at a time. Where
   no thread can be started the step thread introduces it.
4. An introduction that hangs is told and not ended (C7). Its call is in NIXL and has the agent's lock, so that the
   agent can be neither destroyed nor asked whether what it reads is quiet (C6). Another agent would be made on the step
   thread, by the same calls to the same kernel: what hung the one may hang the other, and with it the steps, which go
   on as it is. No peer causes it by being silent: loading an agent connects to nobody.
Time is an argument, in seconds of the worker's clock.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Sequence

from kvconn.config import LIMITS
from kvconn.errors import TransportError
from kvconn.transport import blame
from kvconn.transport.base import MemoryRegion, Transport

__all__ = ["Agent"]

log = logging.getLogger("kvconn.nixl")
#: seconds until a NIXL agent that could not be made is tried again
REOPEN = 1.0


class Agent:
    """``make`` makes one, again and again. ``rank``: whose, for the log."""

    def __init__(self, make: Callable[[], Transport], rank: int) -> None:
        self.transport: Transport | None = None
        self._make = make
        self._memory: tuple[MemoryRegion, ...] = ()
        self._rank = rank
        self._reopen_at: float | None = None
        self._meeting: _Meeting | None = None

    def open(self, memory: Sequence[MemoryRegion]) -> None:
        """The first one; it and all that follow register ``memory``. Raises TransportError."""
        self._memory = tuple(memory)
        self._open()

    def _open(self) -> None:
        try:
            self.transport = self._make()
            self.transport.register(self._memory)
        except (OSError, RuntimeError) as err:
            raise blame.without("a NIXL agent", err) from err

    def destroy(self) -> None:
        """Nothing of ours lands any more when this returns (F1). Idempotent."""
        if self._meeting is not None:
            self._meeting.wait()
            self._meeting = None
        if self.transport is not None:
            self.transport.close()
            self.transport = None

    # -- peers ---------------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """It is being introduced: whoever wants something of it now would wait."""
        return self._meeting is not None and not self._meeting.over

    @property
    def introduced(self) -> frozenset[str]:
        """Names that :meth:`met` will tell: loaded, and no peer has them yet."""
        return frozenset(self._meeting.names) if self._meeting is not None else frozenset()

    def meet(self, blobs: Sequence[bytes]) -> None:
        """Load these peers' agents; once it is not busy any more, :meth:`met` tells."""
        assert self.transport is not None and self._meeting is None
        self._meeting = _Meeting(self.transport, blobs)

    def met(self) -> tuple[list[str], TransportError | None]:
        """Of the last :meth:`meet` the names of the agents that are loaded, and why the others could not be."""
        meeting, self._meeting = self._meeting, None
        assert meeting is not None and meeting.over
        return meeting.names, meeting.error

    # -- made anew -----------------------------------------------------------------------------------------------

    def reopen(self, now: float) -> bool:
        """Make a new one; False when that failed, and it is tried again."""
        try:
            self._open()
        except TransportError as err:
            self.destroy()  # made, but without its memory: it holds threads and sockets
            self._reopen_at = now + REOPEN
            log.error("rank %d: no new NIXL agent, next try in %g s: %s", self._rank, REOPEN, err)
            return False
        self._reopen_at = None
        return True

    @property
    def next_due(self) -> float:
        """When it is tried again; infinity while there is one."""
        return math.inf if self._reopen_at is None else self._reopen_at

    def due(self, now: float) -> bool:
        """Is it time to try again?"""
        return now >= self.next_due


class _Meeting:
    """Loads agents: at once, or on a thread where that takes long."""

    def __init__(self, transport: Transport, blobs: Sequence[bytes]) -> None:
        self.names: list[str] = []
        self.error: TransportError | None = None
        self._transport = transport
        self._blobs = blobs
        self._thread: threading.Thread | None = None
        if not (transport.meets_slowly and self._start()):
            self._run()

    def _start(self) -> bool:
        thread = threading.Thread(target=self._run, name="kvconn-introduction", daemon=True)
        try:
            thread.start()
        except RuntimeError as err:
            log.warning("no thread to introduce a peer on (%s): steps wait for it", err)
            return False
        self._thread = thread
        return True

    @property
    def over(self) -> bool:
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> None:
        if self._thread is not None:
            self._thread.join(LIMITS.end_thread)

    def _run(self) -> None:
        try:
            for blob in self._blobs:
                self.names.append(self._transport.add_peer(blob))
        except TransportError as err:
            self.error = err
        except Exception as err:  # noqa: BLE001 - the top of a thread
            self.error = TransportError(f"add_peer: {err!r}; a fault of ours")
