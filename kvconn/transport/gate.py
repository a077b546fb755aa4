"""Who is in a NIXL agent: one at a time, callers before the pump."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from kvconn.errors import TransportError

__all__ = ["Gate"]


class Gate:
    """The lock around the agent. Callers queue for their turn; the pump comes in only while nobody has or wants it.

    A plain lock would let a spinning pump take it again before the caller it woke has run.
    """

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._agent = threading.Lock()

    def __enter__(self) -> None:
        self._turn.acquire()
        self._agent.acquire()

    def __exit__(self, *_: object) -> None:
        self._agent.release()
        self._turn.release()

    @contextlib.contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """Come in to end the agent; raises TransportError when a call into it has not returned by then (C7)."""
        with contextlib.ExitStack() as held:
            for lock in (self._turn, self._agent):
                if not lock.acquire(timeout=seconds):
                    raise TransportError(
                        f"a call into NIXL has not returned for {seconds:g} s, so its agent lives on and reads may "
                        "still land. A fault of NIXL or what is below it: end this process before reusing the memory"
                    )
                held.callback(lock.release)
            yield

    def try_enter(self) -> bool:
        """The pump's way in; leave by :meth:`leave`."""
        return not self._turn.locked() and self._agent.acquire(blocking=False)

    def leave(self) -> None:
        self._agent.release()
