"""One request's KV between two processes: ours, stock, raw NIXL on contiguous memory, memcpy; fresh and used pools."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from typing import cast

import numpy as np

from bench import recorded
from bench.halves import KINDS, Kind, Layout
from bench.measure import Series, Table, number, tls
from bench.pools import STATES, ids, mean_run
from bench.producer import Engines, Spent

__all__ = ["run"]

KIB = 1024
#: bytes of a block of a layer, layers, blocks of the request, how caches lie
SHAPES: tuple[tuple[int, int, int, Layout], ...] = (
    (4 * KIB, 16, 512, "LBHNC"),
    (8 * KIB, 16, 256, "LBHNC"),
    (16 * KIB, 16, 256, "LBHNC"),
    (64 * KIB, 8, 128, "LBHNC"),
    (2048 * KIB, 4, 16, "LBHNC"),
    (4 * KIB, 16, 512, "BLHNC"),
    (8 * KIB, 16, 256, "BLHNC"),
)
#: the pool, in requests of this size; and its blocks at least, where they are small: as many as vLLM's recorded one
POOL, LEAST = 4, 2048
SUBJECTS = (*KINDS, "raw")
PHASES = ("pairing", "reads", "word")


def run(rounds: int = 9) -> Iterator[Table]:
    for block_bytes, layers, count, layout in SHAPES:
        what = f"{block_bytes // KIB} KiB x {layers} layers x {count} blocks"
        if layout != "LBHNC":
            what += f", {layout}"
        table = Table(
            f"Bytes: one request of {what} between two processes, UCX_TLS={tls()} (ratios of time)",
            ("pools", "mean run", "ours GB/s", "stock GB/s", "stock/ours", "raw GB/s", "ours/raw", "ours/memcpy"),
        )
        phases = Table(f"Bytes: {what}, where the time went, us", ("pools", "whose", *PHASES, "the rest", "all"))
        pool = max(POOL * count, LEAST if block_bytes <= 16 * KIB else 0)
        engines = {kind: Engines(kind, layers, pool, block_bytes, layout) for kind in KINDS}
        try:
            for name, remote, local in _pools(pool, count):
                _row(engines, block_bytes * layers, name, remote, local, rounds, table, phases)
        finally:
            for one in engines.values():
                one.close()
        yield table
        yield phases


def _pools(pool: int, count: int) -> Iterator[tuple[str, list[int], list[int]]]:
    """P's and D's block ids: as the reference engine's pool hands them out, and as vLLM's did when it was recorded."""
    for state in STATES:
        yield state, ids(pool, count, state, 1), ids(pool, count, state, 2)
    if (pool, count) == (recorded.POOL, recorded.COUNT):
        for state in STATES[1:]:
            yield f"vLLM's, {state}", *recorded.recorded(state)


def _row(
    engines: dict[Kind, Engines], width: int, name: str, remote: list[int], local: list[int], rounds: int,
    table: Table, phases: Table,
) -> None:  # fmt: skip
    """``width``: bytes of a block in all layers."""
    count = len(local)
    memcpy = _Memcpy(width * count)
    spent: dict[str, list[Spent]] = {subject: [] for subject in SUBJECTS}
    copied: list[float] = []
    for turn in range(-1, rounds):  # the first is for first contacts and pages
        for subject in SUBJECTS[turn % 3 :] + SUBJECTS[: turn % 3]:
            raw = subject == "raw"
            spent[subject].append(
                engines["ours"].read_raw(count) if raw else engines[cast(Kind, subject)].read(remote, local)
            )
        copied.append(memcpy())
    took = {kind: Series(tuple(one["all"] for one in all[1:])) for kind, all in spent.items()}
    ours, size = took["ours"], width * count / 1e9
    table.add(name, number(mean_run(local, remote)), ours.per(size), took["stock"].per(size), took["stock"].over(ours),
              took["raw"].per(size), ours.over(took["raw"]), ours.over(Series(tuple(copied[1:]))))  # fmt: skip
    for kind in KINDS:
        parts = [Series(tuple(one.get(phase, 0.0) * 1e6 for one in spent[kind][1:])) for phase in PHASES]
        rest = Series(
            tuple((one["all"] - sum(one.get(phase, 0.0) for phase in PHASES)) * 1e6 for one in spent[kind][1:])
        )
        phases.add(name, kind, *parts, rest, Series(tuple(one["all"] * 1e6 for one in spent[kind][1:])))


class _Memcpy:
    """The limit: as many bytes from here to there, in one process."""

    def __init__(self, nbytes: int) -> None:
        self._source, self._target = np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8)

    def __call__(self) -> float:
        start = time.perf_counter()
        ctypes.memmove(self._target.ctypes.data, self._source.ctypes.data, self._source.nbytes)
        return time.perf_counter() - start
