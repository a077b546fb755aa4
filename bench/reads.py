"""One request's KV between two processes: ours, stock, raw NIXL on contiguous memory, memcpy; fresh and used pools."""

from __future__ import annotations

import ctypes
import itertools
import time
from collections.abc import Callable, Iterator

import numpy as np

from bench.halves import KINDS, Halves, Kind
from bench.measure import Table, alternate, number
from bench.pools import STATES, State, ids, mean_run
from bench.producer import Producer, caches, regions
from kvconn.transport.base import HandleState
from kvconn.transport.nixl import NixlTransport

__all__ = ["run"]

KIB = 1024
#: bytes of a block of a layer, layers, blocks of the request
SHAPES = ((4 * KIB, 16, 512), (8 * KIB, 16, 256), (16 * KIB, 16, 256), (64 * KIB, 8, 128), (2048 * KIB, 4, 16))
#: the pool, in requests of this size
POOL = 4
DEADLINE = 60.0


def run(rounds: int = 9) -> Iterator[Table]:
    for block_bytes, layers, count in SHAPES:
        what = f"{block_bytes // KIB} KiB x {layers} layers x {count} blocks"
        table = Table(
            f"Bytes: one request of {what} between two processes over CMA (ratios of time)",
            ("pools", "mean run", "ours GB/s", "stock/ours", "ours/raw", "ours/memcpy"),
        )
        gathers = Table(
            f"Bytes: {what}, gather on P, one read per layer, scatter on D",
            ("pools", "gathered/ours", "gather GB/s", "scatter GB/s"),
        )
        with Pair(block_bytes, layers, count) as pair:
            for state in STATES:
                pair.row(state, rounds, table, gathers)
        yield table
        yield gathers


class Pair:
    """P in its process; here D once per kind, and a raw agent, over the same memory."""

    def __init__(self, block_bytes: int, layers: int, count: int) -> None:
        self.block_bytes, self.layers, self.count = block_bytes, layers, count
        self.pool = max(POOL * count, 1024 if block_bytes < 256 * KIB else 0)
        self.producer = Producer(layers, self.pool, block_bytes)
        self.tensors = caches(layers, self.pool, block_bytes, 0)
        self.raw = NixlTransport("pump")
        self.raw.register(regions(self.tensors))
        self.peer = self.raw.add_peer(self.producer.blob)
        self.halves = {kind: Halves(kind, "kv_consumer", layers=layers, blocks=self.pool, block_bytes=block_bytes,
                                    caches=self.tensors) for kind in KINDS}  # fmt: skip
        self.next = itertools.count()
        self.nbytes = block_bytes * layers * count
        self.source, self.target = np.ones(self.nbytes, np.uint8), np.zeros(self.nbytes, np.uint8)

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_: object) -> None:
        for one in self.halves.values():
            one.close()
        self.raw.close()
        self.producer.close()

    def row(self, state: State, rounds: int, table: Table, gathers: Table) -> None:
        remote, local = ids(self.pool, self.count, state, 1), ids(self.pool, self.count, state, 2)
        subjects: dict[str, Callable[[], float]] = {kind: self._connector(kind, local, remote) for kind in KINDS}
        subjects |= {"raw": self._contiguous, "memcpy": self._memcpy}
        subjects |= {"gather": lambda: self.producer.gather(remote), "scatter": lambda: self._scatter(local)}
        for warm in subjects.values():
            warm()
        got = alternate(subjects, rounds)
        ours = got["ours"]
        table.add(state, number(mean_run(local, remote)), ours.per(self.nbytes / 1e9), got["stock"].over(ours),
                  ours.over(got["raw"]), ours.over(got["memcpy"]))  # fmt: skip
        staged = tuple(map(sum, zip(got["gather"].values, got["raw"].values, got["scatter"].values, strict=True)))
        gathers.add(state, type(ours)(staged).over(ours), got["gather"].per(self.nbytes / 1e9),
                    got["scatter"].per(self.nbytes / 1e9))  # fmt: skip

    def _connector(self, kind: Kind, local: list[int], remote: list[int]) -> Callable[[], float]:
        def measure() -> float:
            id = f"{kind}{next(self.next)}"
            params = self.producer.prefill(kind, id, remote)
            d = self.halves[kind]
            for one in self.tensors.values():
                one[local[-1]] = 0
            d.load(id, local, params)
            start = time.perf_counter()
            while True:
                done = d.step()
                if done.finished_recving or time.perf_counter() > start + DEADLINE:
                    break
            spent = time.perf_counter() - start
            if not done.finished_recving or done.failed_recving:
                raise RuntimeError(f"{id}: {done}")
            if any(int(one[local[-1], 0, 0, 0]) != 7 for one in self.tensors.values()):
                raise RuntimeError(f"{id}: the bytes did not come")
            return spent

        return measure

    def _contiguous(self) -> float:
        size = self.block_bytes * self.count
        local = np.array([[one.data_ptr(), size] for one in self.tensors.values()], np.int64)
        remote = np.array([[base, size] for base in self.producer.bases], np.int64)
        start = time.perf_counter()
        handle = self.raw.post_read(self.peer, local, remote)
        while self.raw.poll(handle) is HandleState.PENDING:
            pass
        spent = time.perf_counter() - start
        self.raw.release(handle)
        return spent

    def _memcpy(self) -> float:
        start = time.perf_counter()
        ctypes.memmove(self.target.ctypes.data, self.source.ctypes.data, self.nbytes)
        return time.perf_counter() - start

    def _scatter(self, local: list[int]) -> float:
        index = np.array(local)
        views = [one.numpy().reshape(self.pool, -1).view(np.uint64) for one in self.tensors.values()]
        staged = self.source.view(np.uint64).reshape(self.layers, self.count, -1)
        start = time.perf_counter()
        for view, one in zip(views, staged, strict=True):
            view[index] = one
        return time.perf_counter() - start
