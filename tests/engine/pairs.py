"""Engines in their processes, for tests of pairs: start them, wait for ends, do what a router does between them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvconn.base import FinishReason
from kvconn.config import ParallelConfig
from kvconn.engine.client import EngineProcess, EngineRequest, EngineStats, Finished
from kvconn.engine.config import EngineConfig, ModelSpec
from tests.support import free_port, wait_until

SECONDS = 30.0
CONTENT = ModelSpec(mode="content-addressed", n_layers=2)


def alive(pid: int) -> bool:
    """True while the process runs; a zombie has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def assert_all_end(pids: Iterable[int]) -> None:
    pids = list(pids)
    wait_until(lambda: not any(map(alive, pids)), SECONDS, f"processes {pids} end")


class Starter:
    """Call it to start an engine."""

    def __init__(self) -> None:
        self._made: list[EngineProcess] = []
        self._pids: list[int] = []

    def __call__(
        self,
        name: str = "E",
        *,
        pcp: int = 1,
        parallel: ParallelConfig | None = None,
        transfer: dict[str, Any] | None = None,
        port: int | None = None,
        **sizes: Any,
    ) -> EngineProcess:
        sizes = dict[str, Any](num_blocks=64, block_size=8, model=CONTENT) | sizes
        parallel = parallel or ParallelConfig(pcp=pcp)
        config = EngineConfig(
            name=name, parallel=parallel, kv_transfer_config=transfer, port=port or free_port(), start_timeout=SECONDS,
            **sizes,
        )  # fmt: skip
        engine = EngineProcess(config)
        self._made.append(engine)
        engine.start()
        own = [engine.pid, *engine.worker_pids]
        self._pids.extend(own)
        assert len(own) == 1 + parallel.world and all(map(alive, own))
        return engine

    def end(self) -> None:
        for engine in self._made:
            engine.shutdown()
        assert_all_end(self._pids)


@contextmanager
def starting() -> Iterator[Starter]:
    """All engines started are shut down at the end, and none of their processes may be left."""
    starter = Starter()
    yield starter
    starter.end()


def ends(engine: EngineProcess, *ids: str) -> dict[str, Finished]:
    """Poll until all of ``ids`` have ended."""
    done: dict[str, Finished] = {}
    deadline = time.monotonic() + SECONDS
    while not done.keys() >= set(ids):
        assert time.monotonic() < deadline, f"only {sorted(done)} of {ids} ended; {engine.stats()}"
        done |= {event.id: event for event in engine.poll(0.2) if isinstance(event, Finished)}
    return done


def fresh_stats(engine: EngineProcess) -> EngineStats:
    """Statistics from after the last order; those sent on the way may be older."""
    engine.drain(0.0)  # asks, and does not wait for the answer

    def answered() -> bool:
        engine.stats()
        return engine._answered == engine._asked

    wait_until(answered, SECONDS, "the engine says how it is")
    return engine.stats()


def prefilled(engine: EngineProcess, id: str, prompt: tuple[int, ...]) -> dict[str, Any]:
    """Compute a prompt on the producer. Returns the params for a consumer."""
    engine.submit(EngineRequest(id, prompt, 1, {"do_remote_decode": True}))
    end = ends(engine, id)[id]
    assert end.reason is FinishReason.LENGTH and end.kv_transfer_params is not None
    return end.kv_transfer_params
