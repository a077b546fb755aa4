"""Reads from another process's VRAM into ours: one piece, and pieces of a block each, against a copy on the device."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection

import numpy as np
import torch

from bench.measure import Table, alternate
from kvconn.transport.base import HandleState, MemoryRegion
from kvconn.transport.nixl import NixlTransport

__all__ = ["run"]

SIZE = 256 << 20
BLOCKS = (16 << 10, 64 << 10, 1 << 20)
DEADLINE = 120.0


def run(rounds: int = 9) -> Iterator[Table]:
    """Needs a GPU that both processes see."""
    context = multiprocessing.get_context("spawn")
    pipe, child = context.Pipe()
    process = context.Process(target=_serve, args=(child,), daemon=True)
    process.start()
    mine, transport = _registered(0)
    try:
        if not pipe.poll(DEADLINE):
            raise RuntimeError(f"the other process did not answer within {DEADLINE:g} s")
        blob, base = pipe.recv()
        yield _table(transport, transport.add_peer(blob), mine, base, rounds)
    finally:
        transport.close()
        process.kill()
        process.join(DEADLINE)


def _table(transport: NixlTransport, peer: str, mine: torch.Tensor, base: int, rounds: int) -> Table:
    other = torch.empty_like(mine)
    subjects: dict[str, Callable[[], float]] = {"device copy": lambda: _copy(other, mine)}
    for size in (SIZE, *BLOCKS):
        subjects[f"read, pieces of {size >> 10} KiB"] = _reading(transport, peer, mine, base, size)
    for warm in subjects.values():
        warm()
    if not bool((mine == 7).all()):
        raise RuntimeError("the bytes did not come")
    got = alternate(subjects, rounds)
    table = Table("VRAM to VRAM between two processes, 256 MiB", ("what", "GB/s", "time over a device copy"))
    for name, one in got.items():
        table.add(name, one.per(SIZE / 1e9), one.over(got["device copy"]))
    return table


def _registered(fill: int) -> tuple[torch.Tensor, NixlTransport]:
    memory = torch.full((SIZE,), fill, dtype=torch.uint8, device="cuda:0")
    torch.cuda.synchronize()
    transport = NixlTransport("pump")
    transport.register([MemoryRegion(memory.data_ptr(), SIZE, "VRAM", 0)])
    return memory, transport


def _serve(pipe: Connection) -> None:
    memory, transport = _registered(7)
    pipe.send((transport.metadata(), memory.data_ptr()))
    pipe.poll(None)
    transport.close()


def _copy(target: torch.Tensor, source: torch.Tensor) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    target.copy_(source)
    torch.cuda.synchronize()
    return time.perf_counter() - start


def _reading(transport: NixlTransport, peer: str, mine: torch.Tensor, base: int, size: int) -> Callable[[], float]:
    # shuffled on one side, or the transport would join the pieces
    order = np.arange(SIZE // size)
    shuffled = np.random.default_rng(1).permutation(order)
    lengths = np.full(len(order), size)
    local = np.stack([mine.data_ptr() + order * size, lengths], axis=1).astype(np.int64)
    remote = np.stack([base + shuffled * size, lengths], axis=1).astype(np.int64)

    def measure() -> float:
        start = time.perf_counter()
        handle = transport.post_read(
            peer, local, remote, local_mem="VRAM", remote_mem="VRAM", local_device=0, remote_device=0
        )
        while transport.poll(handle) is HandleState.PENDING:
            if time.perf_counter() > start + DEADLINE:
                raise RuntimeError(f"a read did not end within {DEADLINE:g} s")
        spent = time.perf_counter() - start
        if transport.poll(handle) is not HandleState.DONE:
            raise RuntimeError(f"a read failed: {transport.reason(handle)}")
        transport.release(handle)
        return spent

    return measure
