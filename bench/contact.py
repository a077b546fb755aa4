"""First contact: what is prepared before the first byte, 60 layers x 100,000 blocks, address space without memory.

All ranks of P and rank 0 of D are in one process, a fresh one for each measurement: ours, stock's and raw NIXL's in
turns, forked from one that has imported everything and made no agent. A small pair of the same kind has met there
before, so that nobody pays for what is loaded once. NIXL's parts are timed where all three call it.
"""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
import time
import traceback
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

from bench.contact_pairs import pairs
from bench.measure import Series, Table, number

__all__ = ["of_pair", "run"]

LAYERS, BLOCKS, FEW = 60, 100_000, 64
PAIRS: Final = ((1, 1), (2, 1), (1, 2))
SUBJECTS: Final = ("ours", "stock", "raw")
DEADLINE = 200.0
PAUSE = 2e-4  # between two steps; stock shakes hands in Python beside them, and would wait for them
MAP_NORESERVE = 0x4000  # Linux
MARK = 7  # what P's blocks are full of
#: method of NIXL's agent -> what it is here
PARTS: Final = {
    "__init__": "agents made",
    "register_memory": "of it: memory registered by NIXL",
    "add_remote_agent": "P's metadata loaded by D",
    "prep_xfer_dlist": "of both: NIXL's lists of descriptors",
}
AGENTS, REGISTERED, LOADED, LISTS = PARTS.values()
START, REST, WIRE, SECOND = "caches registered", "first request, the rest", "wire-up and first read", "second request"
PREPARED = "preparation: caches registered and the rest"
STAGES: Final = (AGENTS, START, REGISTERED, LOADED, REST, LISTS, WIRE, PREPARED, SECOND)
KEPT, PEAK = "memory afterwards, MiB", "memory at its peak, MiB"
BEYOND, PEAK_BEYOND = "memory afterwards beyond raw NIXL's, MiB", "memory at its peak beyond raw NIXL's, MiB"
PYTHON = "Python's and numpy's afterwards, MiB"


def run(rounds: int = 9) -> Iterator[Table]:
    for pair in PAIRS:
        yield of_pair(pair, min(rounds, 3))
    yield from pairs(rounds)


def of_pair(pair: tuple[int, int], rounds: int) -> Table:
    command = [sys.executable, "-m", "bench.contact", *map(str, (*pair, rounds))]
    done = subprocess.run(command, capture_output=True, timeout=DEADLINE * 4 * rounds, check=False)
    if done.returncode:
        raise RuntimeError(f"TP {pair}: {done.stderr.decode()[-2000:]}")
    return tabled(pair, done.stdout.decode().splitlines())


def tabled(pair: tuple[int, int], lines: list[str]) -> Table:
    found: dict[str, list[dict[str, float]]] = {name: [] for name in SUBJECTS}
    for name, _, told in (line.partition(" ") for line in lines):
        if name in found:
            found[name].append(json.loads(told))
    for name in SUBJECTS:
        for each, bare in zip(found[name], found["raw"], strict=False):
            each[BEYOND], each[PEAK_BEYOND] = (each[what] - bare[what] for what in (KEPT, PEAK))
    table = Table(
        f"First contact, TP {pair[0]} to {pair[1]}: {LAYERS} layers x {BLOCKS:,} blocks, ms",
        ("", "ours", "stock", "raw NIXL", "stock/ours"),
    )
    for stage in (*STAGES, KEPT, BEYOND, PEAK, PEAK_BEYOND, PYTHON):
        traced = stage == PYTHON
        one = {name: Series(tuple(e[stage] for e in found[name] if traced == (PYTHON in e))) for name in SUBJECTS}
        clear = one["stock"].values and one["ours"].median
        ratio = f"{one['stock'].median / one['ours'].median:,.1f}" if clear else ""
        cells = (str(each) if len(each.values) > 2 else ", ".join(map(number, each.values)) for each in one.values())
        table.add(stage, *cells, ratio)
    return table


# --- the process that has imported everything, and its children ---------------------------------------------------


def _rounds(pair: tuple[int, int], rounds: int) -> None:
    """Print each measurement when it is made. The last is for Python's memory: tracing it costs time."""
    import bench.contact_halves
    import kvconn.transport.nixl  # noqa: F401

    bench.contact_halves.base_worker.NixlWrapper  # noqa: B018 - NIXL is loaded when it is asked for
    for turn in range(rounds + 1):
        for name in SUBJECTS[turn % 3 :] + SUBJECTS[: turn % 3]:
            print(name, json.dumps(_forked(name, pair, trace=turn == rounds)), flush=True)


def _forked(name: str, pair: tuple[int, int], trace: bool) -> dict[str, float]:
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        failed = True
        try:
            os.write(writer, json.dumps(_child(name, pair, trace)).encode())
            failed = False
        finally:  # nothing of the parent's is run down here
            if failed:
                traceback.print_exc()
            os._exit(failed)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        said = pipe.read()
    if os.waitpid(child, 0)[1]:
        raise RuntimeError(f"{name} failed, see above")
    answer: dict[str, float] = json.loads(said)
    return answer


class Spent:
    """Milliseconds in NIXL by part, of every agent of this process, and when the first read was posted."""

    def __init__(self, name: str) -> None:
        import nixl._api

        from bench.contact_halves import base_worker
        from kvconn.transport.nixl import NixlTransport

        self.parts: Counter[str] = Counter()
        self.posted: float | None = None
        plain = nixl._api.nixl_agent
        methods: dict[str, Any] = {method: self._timed(getattr(plain, method), what) for method, what in PARTS.items()}
        if name == "ours":  # some reads never come to NIXL, and some that do carry no bytes
            NixlTransport.post_read = self._noted(NixlTransport.post_read)  # type: ignore[method-assign]
        else:
            methods["transfer"] = self._noted(plain.transfer)
        nixl._api.nixl_agent = base_worker.NixlWrapper = type("TimedAgent", (plain,), methods)

    def _timed(self, inner: Callable[..., Any], what: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            answer = inner(*args, **kwargs)
            self.parts[what] += (time.perf_counter() - start) * 1e3  # type: ignore[assignment]
            return answer

        return call

    def _noted(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.posted = self.posted or time.perf_counter()
            return inner(*args, **kwargs)

        return call


def _child(name: str, pair: tuple[int, int], trace: bool) -> dict[str, float]:
    subject = _Raw if name == "raw" else _Connectors
    spent = Spent(name)
    small = subject(name, pair, FEW)
    small.request("small", 5)
    small.close()
    spaces = _Spaces(pair, BLOCKS)
    spent.parts.clear()
    spent.posted = None
    Path("/proc/self/clear_refs").write_text("5")  # the peak is of what follows
    before = _memory()
    if trace:
        tracemalloc.start()
    one = subject(name, pair, BLOCKS, spaces)
    first = _timed(lambda: one.request("first", 5))
    assert spent.posted is not None
    out: dict[str, float] = {part: spent.parts[part] for part in PARTS.values()}
    out[START] = one.seconds * 1e3 - out[AGENTS]
    out[WIRE] = (first[1] - spent.posted) * 1e3
    out[REST] = (first[1] - first[0]) * 1e3 - out[WIRE] - out[LOADED]
    out[PREPARED] = out[START] + out[REST]
    second = _timed(lambda: one.request("second", 6))
    out[SECOND] = (second[1] - second[0]) * 1e3
    if trace:
        out[PYTHON] = tracemalloc.get_traced_memory()[0] / 2**20
    after = _memory()
    spaces.check()
    out[KEPT], out[PEAK] = (after[what] - before["VmRSS"] for what in ("VmRSS", "VmHWM"))
    return out


class _Spaces:
    """Caches of all ranks of P and of D's first, layers x blocks x bytes: pages exist once they are written."""

    def __init__(self, pair: tuple[int, int], blocks: int) -> None:
        self.p = [_address_space(pair[0], blocks) for _ in range(pair[0])]
        self.d = _address_space(pair[1], blocks)
        for space in self.p:
            space[:, 5:7] = MARK

    def check(self) -> None:
        if not (self.d[:, 5:7] == MARK).all():
            raise RuntimeError("the blocks did not come whole")


def _address_space(tp: int, blocks: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    from bench.contact_halves import BLOCK_BYTES

    length = BLOCK_BYTES // tp
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    return np.frombuffer(mmap.mmap(-1, LAYERS * blocks * length, flags=flags), np.uint8).reshape(LAYERS, blocks, length)


class _Connectors:
    """P with all its ranks, D with its first, ours or stock's."""

    def __init__(self, name: Any, pair: tuple[int, int], blocks: int, spaces: _Spaces | None = None) -> None:
        from bench.contact_halves import Engine

        self.spaces = spaces or _Spaces(pair, blocks)
        self.p = Engine(name, "kv_producer", pair[0], self.spaces.p)
        self.d = Engine(name, "kv_consumer", pair[1], [self.spaces.d])
        self.seconds = self.p.seconds + self.d.seconds

    def request(self, id: str, block: int) -> None:
        params = self.p.prefill(id, [block])
        self.p.step()
        self.d.load(f"d {id}", [block], params)

        def arrived() -> bool:
            self.d.step()
            if self.d.failed:
                raise RuntimeError(f"the load of {id} failed")
            return bool(self.d.received)

        _until(arrived, self.p.step)

    def close(self) -> None:
        self.d.close()
        self.p.close()


class _Raw:
    """Agents as stock makes them, one for each rank; a block of each layer is read from each of P's."""

    def __init__(self, name: Any, pair: tuple[int, int], blocks: int, spaces: _Spaces | None = None) -> None:
        import nixl._api as api

        self.spaces = spaces or _Spaces(pair, blocks)
        start = time.perf_counter()
        self.agents: list[Any] = []
        for rank, space in enumerate([*self.spaces.p, self.spaces.d]):
            agent = api.nixl_agent(f"{blocks} {rank}", api.nixl_agent_config(num_threads=4))
            agent.register_memory(np.array([[one.ctypes.data, one.nbytes, 0] for one in space]), "DRAM")
            self.agents.append(agent)
        self.seconds = time.perf_counter() - start
        self.peers: list[str] = []

    def request(self, id: str, block: int) -> None:
        *sources, d = self.agents
        self.peers = self.peers or [d.add_remote_agent(p.get_agent_metadata()).decode() for p in sources]
        ours, reads = self.spaces.d, []
        for rank, (peer, space) in enumerate(zip(self.peers, self.spaces.p, strict=True)):
            length = min(space.shape[2], ours.shape[2])
            descs = [
                np.array([[one[i, block].ctypes.data + shift, length, 0] for i in range(LAYERS)])
                for one, shift in ((ours, rank * length), (space, 0))
            ]
            reads.append(d.initialize_xfer("READ", *(d.get_xfer_descs(one, "DRAM") for one in descs), peer))
            d.transfer(reads[-1])
        _until(lambda: all(d.check_xfer_state(read) == "DONE" for read in reads))

    def close(self) -> None:
        self.agents.clear()


def _memory() -> dict[str, float]:
    """MiB of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return {line.split(":")[0]: float(line.split()[1]) / 1024 for line in lines if line.endswith("kB")}


def _timed(work: Callable[[], object]) -> tuple[float, float]:
    start = time.perf_counter()
    work()
    return start, time.perf_counter()


def _until(done: Callable[[], bool], between: Callable[[], object] = lambda: None) -> None:
    deadline = time.monotonic() + DEADLINE
    while not done():
        between()
        time.sleep(PAUSE)
        if time.monotonic() > deadline:
            raise RuntimeError("not done in time")


if __name__ == "__main__":
    from bench.__main__ import ENVIRONMENT

    os.environ.update(ENVIRONMENT)
    _rounds((int(sys.argv[1]), int(sys.argv[2])), int(sys.argv[3]))
    os._exit(0)
