"""A first request between engines in processes of their own, and what others' requests meet meanwhile.

Each time two producers and a consumer are forked from a process that has imported everything and made no agent. The
consumer reads from the first producer, its first request; then it goes on with it, one request after the other, and is
handed one of the second producer beside them. Over tcp: ``UCX_TLS=tcp make bench ARGS=contact``.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import bench.contact_halves
from bench.halves import KINDS, Halves, Kind
from bench.latency import BLOCK, DEADLINE, EMPTY_STEP, LAYERS, POOL, produce
from bench.measure import Series, Table, tls
from bench.producer import caches

__all__ = ["pairs"]

#: requests of a producer that is known: before another is met, and from then on; and a rest between two of them
BEFORE, BESIDE, REST = 20, 20, 2e-3
FIRST, KNOWN, OTHERS = (
    "a pair's first request",
    "of a known producer, the longest of 20",
    "the same while another is met",
)
STEP, NEW = "the longest step of D meanwhile", "the other's first request"


def pairs(rounds: int) -> Iterator[Table]:
    command = [sys.executable, "-m", "bench.contact_pairs", str(rounds)]
    done = subprocess.run(command, capture_output=True, timeout=DEADLINE * 2 * rounds, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr.decode()[-2000:])
    found: dict[Kind, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    told_lines = (line for line in done.stdout.decode().splitlines() if line.startswith("["))  # NIXL prints too
    for kind, told in map(json.loads, told_lines):
        found[kind].append(told)
    table = Table(
        f"First contact, processes of their own: 1 block, {LAYERS} layers, ms (UCX_TLS={tls()})", ("", *KINDS)
    )
    for what in (FIRST, NEW, KNOWN, OTHERS, STEP):
        table.add(what, *(Series(tuple(one[what] for one in found[kind])) for kind in KINDS))
    yield table


def _rounds(rounds: int) -> None:
    import kvconn.transport.nixl  # noqa: F401

    bench.contact_halves.base_worker.NixlWrapper  # noqa: B018 - NIXL is loaded when it is asked for
    for turn in range(rounds):
        for kind in KINDS if turn % 2 else KINDS[::-1]:
            print(json.dumps([kind, _met(kind)]), flush=True)


def _met(kind: Kind) -> dict[str, float]:
    ends = [multiprocessing.Pipe() for _ in range(3)]
    children = [_forked(produce, kind, theirs) for _, theirs in ends[:2]]
    children.append(_forked(_consumer, kind, ends[0][0], ends[1][0], ends[2][1]))
    try:
        if not ends[2][0].poll(2 * DEADLINE):
            raise RuntimeError("D did not answer in time")
        answer: dict[str, float] = ends[2][0].recv()
    finally:
        for child in children:
            os.kill(child, 9)
            os.waitpid(child, 0)
    return answer


def _forked(work: Callable[..., None], *args: Any) -> int:
    child = os.fork()
    if not child:
        try:
            work(*args)
        finally:  # nothing of the parent's is run down here
            traceback.print_exc()
            os._exit(1)
    return child


def _consumer(kind: Kind, known: Connection, other: Connection, driver: Connection) -> None:
    tensors = caches(LAYERS, POOL, BLOCK, 0)
    d = _Consumer(Halves(kind, "kv_consumer", layers=LAYERS, blocks=POOL, block_bytes=BLOCK, caches=tensors))
    known.recv(), other.recv()  # they are there
    time.sleep(0.1)  # and idle
    out = {FIRST: d.take(d.ask(known, 1))}
    out[KNOWN] = max(d.one_more(known) for _ in range(BEFORE))
    d.longest = 0.0
    new = d.ask(other, 2)
    out[OTHERS] = max(d.one_more(known) for _ in range(BESIDE))
    out[NEW] = d.take(new)
    out[STEP] = d.longest * 1e3
    driver.send(out)
    time.sleep(DEADLINE)


class _Consumer:
    """Steps as vLLM's core does, a millisecond after a step without tokens."""

    def __init__(self, halves: Halves) -> None:
        self._halves = halves
        self._ids = (f"request-{n}" for n in itertools.count())
        #: request -> milliseconds that it took
        self._took: dict[str, float] = {}
        self._began: dict[str, float] = {}
        self.longest = 0.0

    def ask(self, producer: Connection, block: int) -> str:
        """A request of this producer's; its id."""
        id = next(self._ids)
        producer.send((id, [block]))
        self._began[id], params = producer.recv()
        self._halves.load(id, [block], params)
        return id

    def take(self, id: str) -> float:
        """Step until it has come; milliseconds that it took from its producer's end."""
        deadline = time.perf_counter() + DEADLINE
        while id not in self._took:
            began = time.perf_counter()
            done = self._halves.step()
            now = time.perf_counter()
            self.longest = max(self.longest, now - began)
            if done.failed_recving or now > deadline:
                raise RuntimeError(f"{id}: no report")
            for one in done.finished_recving or ():
                self._took[one] = (now - self._began.pop(one)) * 1e3
            time.sleep(EMPTY_STEP)
        return self._took.pop(id)

    def one_more(self, producer: Connection) -> float:
        spent = self.take(self.ask(producer, 1))
        time.sleep(REST)
        return spent


if __name__ == "__main__":
    from bench.__main__ import ENVIRONMENT

    os.environ.update(ENVIRONMENT)
    _rounds(int(sys.argv[1]))
    os._exit(0)
