"""Threads that run the jobs of a table.

Rules
1. A thread decides nothing: it takes a job, calls ``do``, hands back whether that went well.
2. Whatever ``do`` raises is logged and is a failed job: a thread of ours must answer, or somebody waits for ever.
3. Threads are daemons and are joined with a deadline: one that hangs in a disk's driver outlives nobody.
4. Fewer threads than asked for are enough. With none jobs would wait for ever, so that is an error.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from kvconn.errors import ConfigError
from kvconn.offload.jobs import JobTable, Number

__all__ = ["Runner"]

log = logging.getLogger("kvconn.offload")

J = TypeVar("J")
IDLE = 1.0


class Runner(Generic[J]):
    """``count`` threads named ``name`` over ``table``. Raises ConfigError if none can be started."""

    def __init__(self, name: str, count: int, table: JobTable[J], do: Callable[[Number, J], bool]) -> None:
        self._table = table
        self._do = do
        self._threads: list[threading.Thread] = []
        for i in range(count):
            thread = threading.Thread(target=self._loop, name=f"{name}-{i}", daemon=True)
            try:
                thread.start()
            except RuntimeError as err:
                if not self._threads:
                    raise ConfigError(f"offloading: no thread {name}: {err}; raise this process's limit") from err
                log.warning("offloading: %d of %d threads %s: %s", i, count, name, err)
                break
            self._threads.append(thread)

    def _loop(self) -> None:
        while not self._table.closed:
            taken = self._table.take(IDLE)
            if taken is not None:
                self.run(*taken)

    def run(self, number: Number, job: J) -> None:
        """Run one job in this thread."""
        fine = False
        try:
            fine = self._do(number, job)
        except Exception:  # rule 2
            log.exception("offloading: job %s failed", number)
        finally:
            self._table.returned(number, fine)

    def close(self, seconds: float) -> bool:
        """Stop the threads. False: one still hangs in its job."""
        self._table.close()
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)
