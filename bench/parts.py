"""Parts of a read between two processes: many by one system call (kvconn) or one by one (UCX), by size and number."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection

import numpy as np
import torch

from bench.measure import Table, alternate, number
from bench.turns import timed_read
from kvconn.transport.base import Descs, MemoryRegion
from kvconn.transport.nixl import NixlTransport

__all__ = ["run"]

KIB = 1024
MEMORY = 256 << 20
SIZES = (1, 4, 8, 16, 64, 128, 256, 1024)
NUMBERS = (4, 16, 64, 1024, 8192)


def run(rounds: int = 9) -> Iterator[Table]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,), daemon=True)
    process.start()
    blob, base = ours.recv()
    memory = torch.full((MEMORY,), 1, dtype=torch.uint8)
    table = Table(
        "Parts: of this size, anywhere in 256 MiB, read between two processes over CMA",
        ("KiB", "parts", "batched GB/s", "us a part", "UCX GB/s", "us a part", "UCX/batched"),
    )
    agents = {"batched": NixlTransport("pump"), "UCX": NixlTransport("pump", batch=False)}
    peers = {name: _meet(agent, memory, blob) for name, agent in agents.items()}
    for kib in SIZES:
        for count in NUMBERS:
            if 2 * kib * KIB * count > MEMORY:
                continue
            local, remote = _places(memory.data_ptr(), base, kib * KIB, count)
            subjects = {name: _reads(agents[name], peers[name], local, remote) for name in agents}
            for warm in subjects.values():
                warm()
            got = alternate(subjects, rounds)
            row = [cell for name in agents for cell in (got[name].per(kib * KIB * count / 1e9),
                                                        number(got[name].median * 1e6 / count))]  # fmt: skip
            table.add(str(kib), str(count), *row, got["UCX"].over(got["batched"]))
    process.kill()
    process.join()
    yield table


def _serve(pipe: Connection) -> None:
    memory = torch.full((MEMORY,), 7, dtype=torch.uint8)
    agent = NixlTransport("pump")
    agent.register([MemoryRegion(memory.data_ptr(), MEMORY)])
    pipe.send((agent.metadata(), memory.data_ptr()))
    pipe.recv()


def _meet(agent: NixlTransport, memory: torch.Tensor, blob: bytes) -> str:
    agent.register([MemoryRegion(memory.data_ptr(), MEMORY)])
    return agent.add_peer(blob)


def _places(here: int, there: int, size: int, count: int) -> tuple[Descs, Descs]:
    """Theirs ascending, ours in any order; no two are neighbours."""
    rng = np.random.default_rng(1)
    slots = MEMORY // size // 2
    ours, theirs = rng.permutation(slots)[:count], np.sort(rng.choice(slots, count, replace=False))
    lengths = np.full(count, size, np.int64)
    return np.stack([here + ours * 2 * size, lengths], axis=1), np.stack([there + theirs * 2 * size, lengths], axis=1)


def _reads(agent: NixlTransport, peer: str, local: Descs, remote: Descs) -> Callable[[], float]:
    return lambda: timed_read(agent, peer, local, remote)
