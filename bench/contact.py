"""First contact: what is prepared before the first byte, 60 layers x 100,000 blocks, address space without memory.

Each measurement is a fresh process, ours, stock and raw NIXL in turns. P and D are both in it.
"""

from __future__ import annotations

import json
import mmap
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bench.measure import Series, Table

__all__ = ["run"]

LAYERS, BLOCKS, BLOCK_BYTES = 60, 100_000, 4096
DEADLINE = 300.0
MAP_NORESERVE = 0x4000  # Linux
STAGES = ("start of P", "start of D", "first request", "second request", "memory of P and D, MiB")
SUBJECTS = ("ours", "stock", "raw")


def run(rounds: int = 9) -> Iterator[Table]:
    found: dict[str, list[dict[str, float]]] = {name: [] for name in SUBJECTS}
    for turn in range(min(rounds, 3)):
        for name in SUBJECTS[turn % 3 :] + SUBJECTS[: turn % 3]:
            found[name].append(_in_child(name))
    table = Table(
        f"First contact: {LAYERS} layers x {BLOCKS:,} blocks (ms; raw: agents, metadata, wire-up and a read of 4 KiB)",
        ("stage", "ours", "stock", "raw NIXL", "stock/ours", "without raw NIXL's part: stock/ours"),
    )
    for stage in STAGES:
        one = {name: Series(tuple(each[stage] for each in found[name])) for name in SUBJECTS}
        own = {name: Series(tuple(max(v - one["raw"].median, 0.0) for v in one[name].values)) for name in SUBJECTS}
        clear = own["ours"].median > 0.05 * one["ours"].median
        net = f"{own['stock'].median / own['ours'].median:,.0f}" if clear else "ours is within raw's noise"
        table.add(stage, one["ours"], one["stock"], one["raw"], f"{one['stock'].median / one['ours'].median:.2f}", net)
    yield table


def _in_child(name: str) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-m", "bench.contact", name], capture_output=True, timeout=DEADLINE, check=False
    )
    lines = done.stdout.decode().splitlines()
    if done.returncode or not lines:
        raise RuntimeError(f"{name}: {done.stderr.decode()[-2000:]}")
    answer: dict[str, float] = json.loads(lines[-1])
    return answer


# --- the child ----------------------------------------------------------------------------------------------------


def _address_space() -> np.ndarray[Any, np.dtype[np.uint8]]:
    """One engine's caches: pages exist once they are written."""
    size = LAYERS * BLOCKS * BLOCK_BYTES
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    return np.frombuffer(mmap.mmap(-1, size, flags=flags), np.uint8).reshape(LAYERS, BLOCKS, BLOCK_BYTES)


def _resident() -> float:
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return float(fields["VmRSS"].split()[0]) / 1024


def _child(name: str) -> None:
    (_raw if name == "raw" else _connector)(name)


def _connector(name: Any) -> None:
    import torch

    from bench.halves import BLOCK_SIZE, Halves, _model, layer_names

    _model()
    from kvconn.transport.nixl import NixlTransport

    NixlTransport("pump").close()  # the libraries are loaded once, whoever is first
    shape = (BLOCKS, 1, BLOCK_SIZE, BLOCK_BYTES // BLOCK_SIZE)
    spaces = [_address_space() for _ in range(2)]
    caches = [
        {n: torch.from_numpy(one).view(shape) for n, one in zip(layer_names(LAYERS), space, strict=True)}
        for space in spaces
    ]
    before = _resident()
    made: list[Any] = []
    out: dict[str, float] = {}
    for stage, role, tensors in zip(STAGES, ("kv_producer", "kv_consumer"), caches, strict=False):
        made.append(Halves(name, role, layers=LAYERS, blocks=BLOCKS, block_bytes=BLOCK_BYTES, caches=tensors))
        out[stage] = made[-1].seconds * 1e3
    p, d = made
    for stage, block in (("first request", 5), ("second request", 6)):
        params = p.prefill(stage, [block])
        p.step()
        d.load(f"d {stage}", [block], params)
        out[stage] = _ms(lambda: _until(lambda: bool(d.step().finished_recving), p.step))
    out[STAGES[-1]] = _resident() - before
    print(json.dumps(out), flush=True)


def _raw(_: str) -> None:
    from kvconn.transport.base import HandleState, MemoryRegion
    from kvconn.transport.nixl import NixlTransport

    NixlTransport("pump").close()
    spaces = [_address_space() for _ in range(2)]
    before = _resident()
    agents: list[NixlTransport] = []
    out: dict[str, float] = {}

    def start(space: Any) -> None:
        agents.append(NixlTransport("pump"))
        agents[-1].register([MemoryRegion(layer.ctypes.data, layer.nbytes) for layer in space])

    for stage, space in zip(STAGES, spaces, strict=False):
        out[stage] = _ms(lambda space=space: start(space))  # type: ignore[misc]
    p, d = agents

    def read() -> None:
        peer = d.add_peer(p.metadata())
        descs = [np.array([[s[i, 5].ctypes.data, BLOCK_BYTES] for i in range(LAYERS)], np.int64) for s in spaces]
        handle = d.post_read(peer, descs[1], descs[0])
        _until(lambda: d.poll(handle) is not HandleState.PENDING)

    out["first request"], out["second request"] = _ms(read), _ms(read)
    out[STAGES[-1]] = _resident() - before
    print(json.dumps(out), flush=True)


def _ms(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return (time.perf_counter() - start) * 1e3


def _until(done: Callable[[], bool], between: Callable[[], object] = lambda: None) -> None:
    deadline = time.monotonic() + DEADLINE / 2
    while not done():
        between()
        if time.monotonic() > deadline:
            raise RuntimeError("not done in time")


if __name__ == "__main__":
    import os

    from bench.__main__ import ENVIRONMENT

    os.environ.update(ENVIRONMENT)
    _child(sys.argv[1])
    sys.stdout.flush()
    os._exit(0)
