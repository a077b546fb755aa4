"""What an agent costs while nothing moves, and what its way to rest costs those who read from it.

Two processes for each agent and transport, the others stopped; P does nothing but be there. CPU time of P's process, so
that what else runs here makes a spinning thread look cheaper, never ours dearer. D does not spin on a read either: it
asks, and yields.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import numpy as np

from bench.measure import Series, Table, percentiles
from bench.turns import Processes
from kvconn.config import ParallelConfig
from kvconn.engine.client import EngineProcess, EngineRequest
from kvconn.engine.config import EngineConfig, ModelSpec
from kvconn.engine.ports import free_ports
from kvconn.transport import nixl
from kvconn.transport.base import HandleState, MemoryRegion
from kvconn.transport.nixl import NixlTransport

__all__ = ["run"]

#: agents: progress, and whether its pump may wait on UCX's sockets
AGENTS: Final = {
    "pump that listens (ours)": ("pump", True),
    "pump that sleeps": ("pump", False),
    "NIXL's progress thread (stock)": ("nixl", True),
}
TLS: Final = ("", "tcp")
SMALL, LARGE = 8, 64 << 20
SECONDS, REST, SMALLS = 1.0, 0.02, 20
DEADLINE = 60.0


def run(rounds: int = 9) -> Iterator[Table]:
    table = Table(
        "An idle agent: percent of a core, and reads from it: 8 bytes after 20 ms of rest, and 64 MiB",
        ("UCX_TLS", "agent", "% of a core", "first read ms", "8 bytes p50 ms", "p95 ms", "GB/s"),
    )
    for tls in TLS:
        pairs = {name: Pair(tls, *how) for name, how in AGENTS.items()}
        got: dict[str, list[tuple[float, list[float], float]]] = {name: [] for name in pairs}
        try:
            for _ in range(min(rounds, 5)):
                for name, pair in pairs.items():
                    got[name].append(pair.turn())
        finally:
            for pair in pairs.values():
                pair.close()
        for name, turns in got.items():
            half, most = percentiles([one for _, small, _ in turns for one in small])
            rates = Series(tuple(LARGE / 1e9 / large for _, _, large in turns))
            idle = Series(tuple(share for share, _, _ in turns))
            table.add(tls or "default", name, idle, pairs[name].first * 1e3, half * 1e3, most * 1e3, rates)
    yield table
    yield _engines(min(rounds, 5))


def _engines(rounds: int) -> Table:
    """The reference engine, all its processes together."""
    table = Table("An idle engine (reference), percent of a core, all its processes", ("engine", "nothing", "pinned"))
    for tp in (1, 2):
        engine = EngineProcess(
            EngineConfig(
                name="P", parallel=ParallelConfig(tp=tp), port=free_ports(1)[0],
                kv_transfer_config={"kv_connector": "NixlConnector", "kv_role": "kv_producer"},
                model=ModelSpec(mode="content-addressed", kv="gqa"),
            )
        )  # fmt: skip
        engine.start()
        try:
            free = [_cpu(engine) for _ in range(rounds)]
            for n in range(8):
                engine.submit(EngineRequest(f"r{n}", tuple(range(n, 100 + n)), 1, {"do_remote_decode": True}))
            while engine.stats().pending_release < 8:
                engine.poll(0.1)
            pinned = [_cpu(engine) for _ in range(rounds)]
        finally:
            engine.shutdown()
        table.add(f"P tp {tp}", Series(tuple(free)), Series(tuple(pinned)))
    return table


def _cpu(engine: EngineProcess) -> float:
    """Percent of a core over two seconds, beginning one after whatever came before."""
    time.sleep(SECONDS)
    before, began = _ticks(engine), time.perf_counter()
    time.sleep(2 * SECONDS)
    return (_ticks(engine) - before) / (time.perf_counter() - began) * 100


def _ticks(engine: EngineProcess) -> float:
    """CPU seconds of an engine's processes so far."""
    total = 0
    for pid in (engine.pid, *engine.worker_pids):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")


class Pair:
    """P and D; stopped between turns."""

    def __init__(self, tls: str, progress: str, listens: bool) -> None:
        context = multiprocessing.get_context("spawn")
        self._p, p_end = context.Pipe()
        self._d, d_end = context.Pipe()
        self._processes = Processes([
            context.Process(target=_producer, args=(p_end, tls, progress, listens), daemon=True),
            context.Process(target=_consumer, args=(d_end, tls, progress, listens), daemon=True),
        ])  # fmt: skip
        self._d.send(answer(self._p))
        #: seconds of the first read, connecting included
        self.first: float = answer(self._d)
        self._processes.stop()

    def turn(self) -> tuple[float, list[float], float]:
        """Percent of a core idle; seconds of small reads and of a large one."""
        self._processes.go()
        self._p.send(None)
        share = answer(self._p)
        self._d.send(None)
        small, large = answer(self._d)
        self._processes.stop()
        return share, small, large

    def close(self) -> None:
        self._processes.close()


def answer(pipe: Connection) -> Any:
    if not pipe.poll(DEADLINE):
        raise RuntimeError("a child did not answer in time")
    return pipe.recv()


# -- in the children


def _agent(tls: str, progress: Any, listens: bool) -> tuple[NixlTransport, Any]:
    if tls:
        os.environ["UCX_TLS"] = tls
    if progress == "nixl":
        os.environ["UCX_TCP_TX_SEG_SIZE"] = "8k"  # UCX's default, and stock's
    if not listens:
        nixl.event_sets = frozenset
    agent = NixlTransport(progress)
    memory = np.ones(LARGE, np.uint8)
    agent.register([MemoryRegion(memory.ctypes.data, LARGE)])
    return agent, memory


def _producer(pipe: Connection, *how: Any) -> None:
    agent, memory = _agent(*how)
    pipe.send((agent.metadata(), memory.ctypes.data))
    while True:
        pipe.recv()
        start, began = time.process_time(), time.perf_counter()
        time.sleep(SECONDS)
        pipe.send((time.process_time() - start) / (time.perf_counter() - began) * 100)


def _consumer(pipe: Connection, *how: Any) -> None:
    agent, memory = _agent(*how)
    blob, base = pipe.recv()
    peer = agent.add_peer(blob)

    def read(size: int) -> float:
        local, remote = np.array([[memory.ctypes.data, size]]), np.array([[base, size]])
        start = time.perf_counter()
        handle = agent.post_read(peer, local, remote)
        while agent.poll(handle) is HandleState.PENDING:
            time.sleep(0)
        spent = time.perf_counter() - start
        agent.release(handle)
        return spent

    time.sleep(0.5)  # P has settled
    pipe.send(read(SMALL))
    while True:
        pipe.recv()
        small = [_rested(lambda: read(SMALL)) for _ in range(SMALLS)]
        pipe.send((small, read(LARGE)))


def _rested(read: Callable[[], float]) -> float:
    time.sleep(REST)
    return read()
