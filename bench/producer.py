"""P in a process of its own, so that reads cross processes (CMA) and both connectors find the same memory there."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from bench.halves import BLOCK_SIZE, KINDS, Halves, Kind, layer_names
from kvconn.transport.base import MemoryRegion
from kvconn.transport.nixl import NixlTransport

__all__ = ["Producer", "caches"]

DEADLINE = 180.0


def caches(layers: int, blocks: int, block_bytes: int, fill: int) -> dict[str, torch.Tensor]:
    """Cache tensors whose pages are there."""
    shape = (blocks, 1, BLOCK_SIZE, block_bytes // BLOCK_SIZE)
    return {name: torch.full(shape, fill, dtype=torch.uint8) for name in layer_names(layers)}


def regions(tensors: dict[str, torch.Tensor]) -> list[MemoryRegion]:
    return [MemoryRegion(one.data_ptr(), one.nbytes) for one in tensors.values()]


class Producer:
    """The driver's end."""

    def __init__(self, layers: int, blocks: int, block_bytes: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, child = context.Pipe()
        self._process = context.Process(target=_serve, args=(child, layers, blocks, block_bytes), daemon=True)
        self._process.start()
        self.blob, self.bases = self._answer()

    def prefill(self, kind: Kind, id: str, blocks: list[int]) -> dict[str, Any]:
        """A request of that connector's P, held for one reader."""
        self._pipe.send((kind, id, blocks))
        params: dict[str, Any] = self._answer()
        return params

    def gather(self, ids: list[int]) -> float:
        """Seconds to copy these blocks of every layer into one piece of memory there."""
        self._pipe.send(("gather", "", ids))
        return float(self._answer())

    def _answer(self) -> Any:
        if not self._pipe.poll(DEADLINE):
            raise RuntimeError(f"P did not answer within {DEADLINE:g} s")
        return self._pipe.recv()

    def close(self) -> None:
        self._process.kill()
        self._process.join(DEADLINE)


def _serve(pipe: Connection, layers: int, blocks: int, block_bytes: int) -> None:
    tensors = caches(layers, blocks, block_bytes, 7)
    raw = NixlTransport("pump")
    raw.register(regions(tensors))
    halves = {kind: Halves(kind, "kv_producer", blocks=blocks, block_bytes=block_bytes, caches=tensors,
                           layers=layers) for kind in KINDS}  # fmt: skip
    pipe.send((raw.metadata(), [one.data_ptr() for one in tensors.values()]))
    while True:
        if pipe.poll(0.001):
            kind, id, wanted = pipe.recv()
            pipe.send(_gather(tensors, wanted) if kind == "gather" else _prefill(halves[kind], id, wanted))
        for one in halves.values():
            one.step()


def _prefill(halves: Halves, id: str, blocks: list[int]) -> dict[str, Any]:
    params = halves.prefill(id, blocks)
    halves.step()
    return params


def _gather(tensors: dict[str, torch.Tensor], ids: list[int]) -> float:
    import time

    index = np.array(ids)
    views = [one.numpy().reshape(one.shape[0], -1).view(np.uint64) for one in tensors.values()]
    out = np.zeros((len(views), len(ids), views[0].shape[1]), np.uint64)
    start = time.perf_counter()
    for view, target in zip(views, out, strict=True):
        np.take(view, index, axis=0, out=target, mode="clip")
    return time.perf_counter() - start
