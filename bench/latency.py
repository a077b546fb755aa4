"""From P's end of a request to D's report that its KV has come: ours and stock behind vLLM's interface, raw NIXL.

Each subject is a pair of processes; the others are stopped while it has its turn, because a progress thread of NIXL's
spins. Both engines step as vLLM's core does: at once when a request comes, then a millisecond after a step without
tokens. What raw NIXL needs for the same bytes is taken off. Over tcp: ``UCX_TLS=tcp make bench ARGS=latency``.
"""

from __future__ import annotations

import itertools
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any, Literal

import numpy as np

from bench.halves import Halves
from bench.measure import Table, percentiles, tls
from bench.producer import caches, regions
from bench.turns import Processes, timed_read
from kvconn.transport.nixl import NixlTransport

__all__ = ["produce", "run"]

Subject = Literal["ours", "stock", "raw"]
SUBJECTS: tuple[Subject, ...] = ("ours", "stock", "raw")
LAYERS, BLOCK, POOL = 16, 16 << 10, 256
#: blocks of a request
SIZES = (1, 64)
#: requests of one turn, and between two of them
TURN, REST = 10, 0.01
#: vLLM's core after a step without tokens (``EngineCoreProc._process_engine_step``)
EMPTY_STEP = 1e-3
DEADLINE = 60.0


def run(rounds: int = 9) -> Iterator[Table]:
    pairs = {subject: _Pair(subject) for subject in SUBJECTS}
    table = Table(
        f"Latency: P's end of a request to D's report, beyond raw NIXL's time, ms (UCX_TLS={tls()})",
        ("blocks x layers x bytes", "subject", "p50", "p95", "raw NIXL p50"),
    )
    first = Table("Latency: the same, each pair's first request, ms, one each", ("subject", "ms"))
    try:
        for subject, pair in pairs.items():
            first.add(subject, pair.turn(1, 1)[0] * 1e3)
        for blocks in SIZES:
            times: dict[Subject, list[float]] = {subject: [] for subject in SUBJECTS}
            for _ in range(rounds):
                for subject, pair in pairs.items():
                    times[subject] += pair.turn(TURN, blocks)
            raw = statistics.median(times["raw"])
            for subject in ("ours", "stock"):
                half, most = percentiles([one - raw for one in times[subject]])
                table.add(f"{blocks} x {LAYERS} x {BLOCK}", subject, half * 1e3, most * 1e3, raw * 1e3)
    finally:
        for pair in pairs.values():
            pair.close()
    yield first
    yield table


class _Pair:
    """P and D of one subject, each in a process of its own; stopped between turns."""

    def __init__(self, subject: Subject) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, driver = context.Pipe()
        p_end, d_end = context.Pipe()
        serve, read = (_raw_producer, _raw_consumer) if subject == "raw" else (produce, _consumer)
        self._processes = Processes([
            context.Process(target=serve, args=(subject, p_end), daemon=True),
            context.Process(target=read, args=(subject, d_end, driver), daemon=True),
        ])  # fmt: skip
        self._answer()
        self._processes.stop()

    def turn(self, requests: int, blocks: int) -> list[float]:
        """Seconds of each of so many requests."""
        self._processes.go()
        self._pipe.send((requests, blocks))
        times: list[float] = self._answer()
        self._processes.stop()
        return times

    def _answer(self) -> Any:
        if not self._pipe.poll(2 * DEADLINE):
            raise RuntimeError("D did not answer in time")
        return self._pipe.recv()

    def close(self) -> None:
        self._processes.close()


# -- in the children


def produce(subject: Subject, pipe: Connection) -> None:
    tensors = caches(LAYERS, POOL, BLOCK, 7)
    p = Halves(subject, "kv_producer", layers=LAYERS, blocks=POOL, block_bytes=BLOCK, caches=tensors)  # type: ignore[arg-type]
    pipe.send(None)
    held: set[str] = set()
    while True:
        if pipe.poll(EMPTY_STEP if held else None):
            id, wanted = pipe.recv()
            params = p.prefill(id, wanted)
            pipe.send((time.perf_counter(), params))
            held.add(id)
        held -= p.step().finished_sending or set()


def _consumer(subject: Subject, pipe: Connection, driver: Connection) -> None:
    tensors = caches(LAYERS, POOL, BLOCK, 0)
    d = Halves(subject, "kv_consumer", layers=LAYERS, blocks=POOL, block_bytes=BLOCK, caches=tensors)  # type: ignore[arg-type]
    ids = (f"request-{n}" for n in itertools.count())
    pipe.recv()  # P is there
    _turns(driver, lambda blocks: _load(d, pipe, next(ids), blocks))


def _load(d: Halves, pipe: Connection, id: str, blocks: list[int]) -> float:
    pipe.send((id, blocks))
    began, params = pipe.recv()
    d.load(id, blocks, params)
    while True:
        done = d.step()
        if done.finished_recving:
            break
        if time.perf_counter() > began + DEADLINE:
            raise RuntimeError(f"{id}: no report")
        time.sleep(EMPTY_STEP)
    spent = time.perf_counter() - began
    if done.failed_recving or any(int(one[blocks[-1], 0, 0, 0]) != 7 for one in d.tensors.values()):
        raise RuntimeError(f"{id}: the bytes did not come: {done}")
    return spent


def _turns(driver: Connection, one: Callable[[list[int]], float]) -> None:
    driver.send(None)
    while True:
        requests, blocks = driver.recv()
        times = []
        for _ in range(requests):
            times.append(one(list(range(1, 1 + blocks))))
            time.sleep(REST)
        driver.send(times)


def _raw_producer(_: Subject, pipe: Connection) -> None:
    tensors = caches(LAYERS, POOL, BLOCK, 7)
    agent = NixlTransport("nixl")
    agent.register(regions(tensors))
    pipe.send((agent.metadata(), [one.data_ptr() for one in tensors.values()]))
    pipe.recv()  # until it is killed


def _raw_consumer(_: Subject, pipe: Connection, driver: Connection) -> None:
    tensors = caches(LAYERS, POOL, BLOCK, 0)
    agent = NixlTransport("nixl")
    agent.register(regions(tensors))
    blob, bases = pipe.recv()
    peer = agent.add_peer(blob)

    def read(blocks: list[int]) -> float:
        size = BLOCK * len(blocks)
        local = np.array([[one.data_ptr() + BLOCK, size] for one in tensors.values()], np.int64)
        remote = np.array([[base + BLOCK, size] for base in bases], np.int64)
        return timed_read(agent, peer, local, remote)

    _turns(driver, read)
