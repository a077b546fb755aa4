"""Who is in a NIXL agent: one at a time, callers before the pump."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from kvconn.errors import TransportError

__all__ = ["Gate"]


class Gate:
    """The lock around the agent. Callers queue for their turn; the pump comes in only while nobody has or wants it.

    A plain lock would let a spinning pump take it again before the caller it woke has run. What every step does
    takes both locks itself, as ``__enter__`` does: that is half as dear.
    """

    def __init__(self) -> None:
        self.turn = threading.Lock()
        self.agent = threading.Lock()

    def __enter__(self) -> None:
        self.turn.acquire()
        self.agent.acquire()

    def __exit__(self, *_: object) -> None:
        self.agent.release()
        self.turn.release()

    @contextlib.contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """Come in to end the agent; raises TransportError when a call into it has not returned by then (C7)."""
        with contextlib.ExitStack() as held:
            for lock in (self.turn, self.agent):
                if not lock.acquire(timeout=seconds):
                    raise TransportError(
                        f"a call into NIXL has not returned for {seconds:g} s, so its agent lives on and reads may "
                        "still land. A fault of NIXL or what is below it: end this process before reusing the memory"
                    )
                held.callback(lock.release)
            yield

    def try_enter(self) -> bool:
        """The pump's way in; leave by :meth:`leave`."""
        return not self.turn.locked() and self.agent.acquire(blocking=False)

    def leave(self) -> None:
        self.agent.release()
