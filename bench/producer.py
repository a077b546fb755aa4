"""P and D of one kind, each in a process of its own, as two engines on one host are.

Both are stopped (SIGSTOP) while it is not their turn: stock's agents spin, and would take a core each from the others.
P steps once a millisecond, D as fast as it can; both wait for orders otherwise.
Raw NIXL has agents of its own in the processes of our connectors: how fast memory is read depends on the pages that
a process was given, by a third between one pair and the next.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from bench.halves import BLOCK_SIZE, Halves, Kind, Layout, layer_names
from bench.turns import Processes, timed_read
from kvconn.nixl import reader
from kvconn.transport.base import MemoryRegion
from kvconn.transport.nixl import NixlTransport

__all__ = ["Engines", "Spent", "caches", "regions"]

DEADLINE = 120.0
#: seconds by phase; "all" is from D's first step to its report
Spent = dict[str, float]


class Engines:
    """The driver's end."""

    def __init__(self, kind: Kind, layers: int, blocks: int, block_bytes: int, layout: Layout) -> None:
        self.kind: Kind = kind
        self._started = 0
        context = multiprocessing.get_context("spawn")
        made = []
        self._pipes: list[Connection] = []
        for serve in (_produce, _consume):
            ours, theirs = context.Pipe()
            made.append(
                context.Process(target=serve, args=(theirs, kind, layers, blocks, block_bytes, layout), daemon=True)
            )
            self._pipes.append(ours)
        self._processes = Processes(made)
        blob_and_bases = self._answer(0)
        self._order(1, blob_and_bases)
        self.stop()

    def read(self, remote: list[int], local: list[int]) -> Spent:
        """One request: held by P in blocks ``remote``, read by D into ``local``."""
        self._started += 1
        id = f"{self.kind}{self._started}"
        self._processes.go()
        params = self._order(0, (id, remote))
        spent: Spent = self._order(1, (id, local, params))
        self.stop()
        return spent

    def read_raw(self, blocks: int) -> Spent:
        """As many bytes, from the first block on, by one bare agent from the other."""
        self._processes.go()
        spent: Spent = self._order(1, blocks)
        self.stop()
        return spent

    def stop(self) -> None:
        self._processes.stop()

    def close(self) -> None:
        self._processes.close()

    def _order(self, end: int, order: object) -> Any:
        self._pipes[end].send(order)
        return self._answer(end)

    def _answer(self, end: int) -> Any:
        pipe = self._pipes[end]
        if not pipe.poll(DEADLINE):
            raise RuntimeError(f"{self.kind}: no answer within {DEADLINE:g} s")
        return pipe.recv()


def caches(layers: int, blocks: int, block_bytes: int, fill: int, layout: Layout = "LBHNC") -> dict[str, torch.Tensor]:
    """Cache tensors whose pages are there: one for each layer, or one of all layers, block by block."""
    shape = (1, BLOCK_SIZE, block_bytes // BLOCK_SIZE)
    names = layer_names(layers)
    if layout == "LBHNC":
        return {name: torch.full((blocks, *shape), fill, dtype=torch.uint8) for name in names}
    pool = torch.full((blocks, layers, *shape), fill, dtype=torch.uint8)
    return {name: pool[:, layer] for layer, name in enumerate(names)}


def regions(tensors: dict[str, torch.Tensor]) -> list[MemoryRegion]:
    """The memory behind these caches, piece by piece."""
    pieces = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors.values()}
    return [MemoryRegion(base, nbytes) for base, nbytes in pieces.items()]


def _agent(tensors: dict[str, torch.Tensor]) -> NixlTransport:
    raw = NixlTransport("pump", batch=False)
    raw.register(regions(tensors))
    return raw


# -- P


def _produce(pipe: Connection, kind: Kind, layers: int, blocks: int, block_bytes: int, layout: Layout) -> None:
    tensors = caches(layers, blocks, block_bytes, 7, layout)
    raw = _agent(tensors) if kind == "ours" else None
    p = _halves("kv_producer", kind, tensors, block_bytes, layout)
    pipe.send((raw.metadata(), [one.address for one in regions(tensors)]) if raw is not None else None)
    while True:
        if pipe.poll(0.001):
            params = p.prefill(*pipe.recv())
            p.step()
            pipe.send(params)
        p.step()


# -- D


def _consume(pipe: Connection, kind: Kind, layers: int, blocks: int, block_bytes: int, layout: Layout) -> None:
    tensors = caches(layers, blocks, block_bytes, 0, layout)
    told = pipe.recv()
    read_raw = _raw(tensors, block_bytes * layers, *told) if told is not None else None
    read = _connector(kind, _halves("kv_consumer", kind, tensors, block_bytes, layout))
    pipe.send(None)
    while True:
        order = pipe.recv()
        if read_raw is not None and isinstance(order, int):
            pipe.send(read_raw(order))
            continue
        id, local, params = order
        for one in tensors.values():
            one[local[0]] = one[local[-1]] = 0
        spent = read(id, local, params)
        if any(bool((one[local, 0, -1, -1] != 7).any()) for one in tensors.values()):
            raise RuntimeError(f"{id}: the bytes did not come")
        pipe.send(spent)


Read = Callable[[str, list[int], Any], Spent]


def _raw(tensors: dict[str, torch.Tensor], width: int, blob: bytes, bases: list[int]) -> Callable[[int], Spent]:
    """``width``: bytes of a block in all layers."""
    agent = _agent(tensors)
    peer = agent.add_peer(blob)

    def read(blocks: int) -> Spent:
        size = width * blocks // len(bases)
        ours = np.array([[one.address, size] for one in regions(tensors)], np.int64)
        theirs = np.array([[base, size] for base in bases], np.int64)
        return {"all": timed_read(agent, peer, ours, theirs)}

    return read


def _halves(role: str, kind: Kind, tensors: dict[str, torch.Tensor], block_bytes: int, layout: Layout) -> Halves:
    blocks = len(next(iter(tensors.values())))
    return Halves(
        kind, role, layers=len(tensors), blocks=blocks, block_bytes=block_bytes, caches=tensors, layout=layout
    )


def _connector(kind: Kind, d: Halves) -> Read:
    watch = _Watch()
    if kind == "ours":
        watch.over("pairing", reader, "reads")
        watch.over("reads", d.worker.inner.worker._agent.transport, "post_read")
    else:
        watch.over("pairing", d.worker.connector_worker.nixl_wrapper, "make_prepped_xfer")
        watch.over("reads", d.worker.connector_worker.nixl_wrapper, "transfer")

    def read(id: str, local: list[int], params: Any) -> Spent:
        d.load(id, local, params)
        watch.spent.clear()
        start = time.perf_counter()
        while not (done := d.step()).finished_recving and time.perf_counter() < start + DEADLINE:
            pass
        watch.spent["all"] = time.perf_counter() - start
        if not done.finished_recving or done.failed_recving:
            raise RuntimeError(f"{id}: {done}")
        return dict(watch.spent)

    return read


class _Watch:
    """Seconds inside of calls."""

    def __init__(self) -> None:
        self.spent: Spent = {}

    def over(self, phase: str, owner: Any, name: str) -> None:
        """From now on calls of ``owner.name`` count as this phase; a read of a word as "word"."""
        call = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            answer = call(*args, **kwargs)
            word = name == "post_read" and len(args[1]) == 1 and args[1][0, 1] == 8
            key = "word" if word else phase
            self.spent[key] = self.spent.get(key, 0.0) + time.perf_counter() - start
            return answer

        setattr(owner, name, timed)
