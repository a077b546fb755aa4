"""An engine's worker processes: started, told, asked, ended.

Rules
1. Workers are forked from the engine's own process before that has threads, so that torch is imported once.
2. Every answer has a deadline; a worker that is silent or gone is an EngineDeadError that names its rank: the first to
   fail, not those that then miss it in their collectives. A worker's ConfigError stays one. An engine that rests waits
   for :attr:`Executor.ends` too, so that a rank's end is noticed when it happens.
3. No worker outlives :meth:`Executor.close` or its engine.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import tempfile
import time
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import msgspec

from kvconn.base import ConnectorMetadata
from kvconn.config import LIMITS, KVTransferConfig
from kvconn.engine.config import EngineConfig
from kvconn.engine.scheduler import Step
from kvconn.engine.worker import WorkerOutput, worker_main
from kvconn.errors import ConfigError, EngineDeadError

__all__ = ["Executor"]


class Executor:
    """``config.parallel.world`` workers. Raises EngineDeadError or ConfigError when one cannot start."""

    def __init__(self, config: EngineConfig, transfer: KVTransferConfig | None, engine_id: str) -> None:
        self._config = config
        self._folder = tempfile.TemporaryDirectory(prefix=f"kvconn-engine-{os.getpid()}-")
        config = msgspec.structs.replace(config, store=os.path.join(self._folder.name, "store"))
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        try:
            for rank in range(config.parallel.world):
                self._start(config, transfer, engine_id, rank)
            self._collect(config.start_timeout, "start")
            self._folder.cleanup()  # they have met; an engine that is killed leaves nothing
        except BaseException:
            self.close()
            raise

    def _start(self, config: EngineConfig, transfer: KVTransferConfig | None, engine_id: str, rank: int) -> None:
        fork = multiprocessing.get_context("fork")
        ours, theirs = fork.Pipe()
        process = fork.Process(
            target=_worker,
            args=(config, transfer, engine_id, rank, theirs, [*self._pipes, ours]),
            name=f"kvconn-{config.name}-rank{rank}",
            daemon=True,
        )
        process.start()
        theirs.close()
        self._processes.append(process)
        self._pipes.append(ours)

    def step(self, step: Step, metadata: ConnectorMetadata | None) -> list[WorkerOutput]:
        """One step on every rank; answers by rank."""
        return self._all("step", step, metadata)

    def handshakes(self) -> list[Any]:
        """What every rank publishes, None where it publishes nothing."""
        return self._all("handshake")

    def digests(self, blocks: list[int]) -> list[str]:
        """Every rank's hash of these blocks' bytes."""
        return self._all("digest", blocks)

    def pids(self) -> list[int]:
        return [process.pid or 0 for process in self._processes]

    @property
    def ends(self) -> list[int]:
        """What becomes readable when a worker ends, by rank."""
        return [process.sentinel for process in self._processes]

    def check(self) -> None:
        """Raise EngineDeadError when a worker has ended."""
        for rank, process in enumerate(self._processes):
            if process.exitcode is not None:
                raise self._dead(rank, f"ended with {process.exitcode} while nothing was asked of it")

    def _all(self, order: str, *args: Any) -> list[Any]:
        for rank, pipe in enumerate(self._pipes):
            try:
                pipe.send((order, args))
            except OSError:
                raise self._gone(rank, order) from None
        return self._collect(self._config.step_timeout, order)

    def _collect(self, timeout: float, what: str) -> list[Any]:
        deadline = time.monotonic() + timeout
        answers: dict[int, Any] = {}
        while silent := [rank for rank in range(len(self._pipes)) if rank not in answers]:
            ready = wait([self._pipes[rank] for rank in silent], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise self._dead(",".join(map(str, silent)), f"did not answer {what!r} in time")
            heard = [rank for rank in silent if self._pipes[rank] in ready]
            for rank in sorted(heard, key=self._blame):
                answers[rank] = self._answer(rank, what)
        return [answers[rank] for rank in range(len(self._pipes))]

    def _answer(self, rank: int, what: str) -> Any:
        try:
            fine, value = self._pipes[rank].recv()
        except (EOFError, ConnectionResetError):
            raise self._gone(rank, what) from None
        if fine:
            return value
        if isinstance(value, tuple):
            raise ConfigError([f"engine {self._config.name}: {problem}" for problem in value])
        raise self._dead(rank, f"failed during {what!r}:\n{value}")

    def _blame(self, rank: int) -> int:
        """Whose word is taken first: those who were ended, those who then ended by themselves, those who live."""
        code = self._processes[rank].exitcode
        return 2 if code is None else int(code == 0)

    def _gone(self, rank: int, what: str) -> EngineDeadError:
        self._processes[rank].join(LIMITS.end_worker)
        return self._dead(rank, f"ended with {self._processes[rank].exitcode} during {what!r}")

    def _dead(self, rank: int | str, what: str) -> EngineDeadError:
        return EngineDeadError(f"engine {self._config.name}: rank {rank} {what}")

    def close(self) -> None:
        """End every worker: asked first, killed at the deadline. Idempotent."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(("stop", ()))
        deadline = time.monotonic() + LIMITS.end_worker
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []
        self._folder.cleanup()

    def __repr__(self) -> str:
        alive = sum(process.is_alive() for process in self._processes)
        return f"Executor({self._config.name} workers={alive}/{len(self._processes)})"


def _worker(
    config: EngineConfig,
    transfer: KVTransferConfig | None,
    engine_id: str,
    rank: int,
    pipe: Connection,
    others: list[Connection],
) -> None:
    """In the child: let go of the ends that are not ours, so that end of file means what it says."""
    for other in others:
        other.close()
    worker_main(config, transfer, engine_id, rank, pipe)
