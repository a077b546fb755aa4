"""The reference engine, P to D, one request at a time: where the time between P's last step and D's first token goes.

The engines are the real ones; a stamp is written at the beginning or end of a few of their methods, by id.
"""

from __future__ import annotations

import functools
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

from bench.measure import Table, percentiles
from kvconn.engine import client
from kvconn.engine.client import EngineProcess
from kvconn.engine.config import EngineConfig, ModelSpec
from kvconn.engine.ports import free_ports
from kvconn.engine.router import Router
from kvconn.engine.scheduler import Scheduler
from kvconn.engine.trace import TraceRequest
from kvconn.engine.worker import Worker
from kvconn.nixl.reader import Reader
from kvconn.nixl.scheduler import NixlScheduler

__all__ = ["run"]

#: stamp -> what came before it
STAGES: Final = {
    "P update": "P: the step's answer reaches the engine",
    "submitted": "params to the router, its answer to D",
    "D add": "D: the engine takes it",
    "D admitted": "D: blocks are given",
    "D start": "D: the worker begins the load, the peer is known",
    "D posted": "D: planned, reads posted",
    "D settled": "D: data quiet, fence checked, reported",
    "D told": "D: the scheduler hears of it",
    "D forward": "D: scheduled, the worker begins its forward",
    "D token": "D: the forward of the first token",
    "seen": "the token to the router",
}
FIRST = "P token"
WHERE = "KVCONN_BENCH_STAMPS"
BLOCK, PROMPT = 16, 256
REQUESTS = 12


def run(rounds: int = 9) -> Iterator[Table]:
    table = Table(
        f"The reference engine: P's last forward to D's first token, {PROMPT} tokens, ms",
        ("stage", "p50", "p95"),
    )
    stages: dict[str, list[float]] = {stage: [] for stage in STAGES}
    total: list[float] = []
    for stamps in _replay(min(rounds, 9) * REQUESTS):
        before = stamps[FIRST]
        for stage, times in stages.items():
            times.append(stamps[stage] - before)
            before = stamps[stage]
        total.append(before - stamps[FIRST])
    for stage, times in stages.items():
        table.add(STAGES[stage], *(one * 1e3 for one in percentiles(times)))
    table.add("all of it", *(one * 1e3 for one in percentiles(total)))
    yield table


def _replay(count: int) -> Iterator[dict[str, float]]:
    """Stamps of each request, without the first, which shakes hands."""
    prompts = [TraceRequest(f"r{n}", tuple((7 * n + k) % 500 for k in range(PROMPT)), 2) for n in range(count + 1)]
    real, client._engine_main = client._engine_main, _stamped_main
    try:
        with tempfile.TemporaryDirectory() as folder:
            engines = [_engine(role, folder) for role in ("P", "D")]
            try:
                for engine in engines:
                    engine.start()
                seen: dict[tuple[str, str], float] = {}
                _stamp_router(engines, seen)
                Router(*engines, prompts, concurrency=1, stall_limit=30, drain_limit=30).run()
            finally:
                for engine in engines:
                    engine.shutdown()
            seen |= _stamps(Path(folder))
    finally:
        client._engine_main = real
    for prompt in prompts[1:]:
        yield {stamp: seen[stamp, prompt.id] for stamp in (FIRST, *STAGES)}


def _engine(role: str, folder: str) -> EngineProcess:
    transfer = {"kv_connector": "NixlConnector", "kv_role": "kv_producer" if role == "P" else "kv_consumer"}
    return EngineProcess(
        EngineConfig(
            name=role, kv_transfer_config=transfer, block_size=BLOCK, num_blocks=4 * PROMPT // BLOCK,
            port=free_ports(1)[0], model=ModelSpec(mode="content-addressed", n_layers=4), env={WHERE: folder},
        )
    )  # fmt: skip


def _stamp_router(engines: list[EngineProcess], seen: dict[tuple[str, str], float]) -> None:
    decode: Any = engines[1]
    submit, poll = decode.submit, decode.poll

    def submitted(request: Any) -> None:
        seen["submitted", request.id] = time.perf_counter()
        submit(request)

    def polled(timeout: float) -> Any:
        events = poll(timeout)
        for event in events:
            seen.setdefault(("seen", event.id), time.perf_counter())
        return events

    decode.submit, decode.poll = submitted, polled


def _stamps(folder: Path) -> dict[tuple[str, str], float]:
    """The last of each, but of D's the first where a request computes more than one token there."""
    found: dict[tuple[str, str], float] = {}
    for line in (line for path in folder.iterdir() for line in path.read_text().splitlines()):
        stamp, id, at = line.split("\t")
        if stamp.startswith("P") or (stamp, id) not in found:
            found[stamp, id] = float(at)
    return found


# -- in the engines' processes


def _stamped_main(config: EngineConfig, pipe: Connection) -> None:
    """An engine whose methods write stamps. Workers are forked from it and do so too."""
    out = Path(config.env[WHERE])

    def stamp(what: str, ids: Iterable[str]) -> None:
        now = time.perf_counter()
        with (out / str(os.getpid())).open("a") as file:
            file.writelines(f"{config.name} {what}\t{id}\t{now!r}\n" for id in ids)

    _before(Worker, "_forward", lambda step: stamp("forward", [one.id for one in step.requests]))
    _after(Worker, "_forward", lambda got, step: stamp("token", [one.id for one in step.requests]))
    _before(Scheduler, "update", lambda step, *_: stamp("update", [one.id for one in step.requests]))
    _before(Scheduler, "add", lambda request, now: stamp("add", [request.id]))
    _before(Scheduler, "_received", lambda ids, *_: stamp("told", ids))
    _before(NixlScheduler, "allocated", lambda view, *_: stamp("admitted", [view.id]))
    _before(Reader, "_post", lambda load, *_: stamp("start", [load.id]))
    _after(Reader, "_post", lambda got, load, *_: stamp("posted", [load.id]))
    _after(Reader, "settle", lambda got: stamp("settled", got[0]) if got[0] else None)
    _REAL(config, pipe)


_REAL = client._engine_main


def _before(cls: type, name: str, tell: Callable[..., None]) -> None:
    method = getattr(cls, name)

    @functools.wraps(method)
    def wrapped(self: Any, *args: Any) -> Any:
        tell(*args)
        return method(self, *args)

    setattr(cls, name, wrapped)


def _after(cls: type, name: str, tell: Callable[..., None]) -> None:
    method = getattr(cls, name)

    @functools.wraps(method)
    def wrapped(self: Any, *args: Any) -> Any:
        got = method(self, *args)
        tell(got, *args)
        return got

    setattr(cls, name, wrapped)
