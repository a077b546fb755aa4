"""What benches between processes share: processes that stand while it is not their turn, and a read that is timed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from multiprocessing.process import BaseProcess

from kvconn.transport.base import Descs, HandleState
from kvconn.transport.nixl import NixlTransport

__all__ = ["Processes", "timed_read"]

_DEADLINE = 60.0


class Processes:
    """Started here; :meth:`stop` and :meth:`go` are SIGSTOP and SIGCONT to all."""

    def __init__(self, processes: Sequence[BaseProcess]) -> None:
        self._processes = processes
        for process in processes:
            process.start()

    def stop(self) -> None:
        self._signal(signal.SIGSTOP)

    def go(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, which: signal.Signals) -> None:
        for process in self._processes:
            os.kill(process.pid or 0, which)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join(_DEADLINE)


def timed_read(agent: NixlTransport, peer: str, local: Descs, remote: Descs) -> float:
    """Seconds from the post to the end, looking all the while."""
    start = time.perf_counter()
    handle = agent.post_read(peer, local, remote)
    while agent.poll(handle) is HandleState.PENDING:
        pass
    spent = time.perf_counter() - start
    agent.release(handle)
    return spent
