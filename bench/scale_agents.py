"""What a peer costs a NIXL agent: one agent in a process of its own, many in another; the one reads them, they read it.

``python -m bench.scale_agents MANY THREADS`` prints one line of JSON. 60 regions each, as 60 layers of their own.
"""

from __future__ import annotations

import base64
import json
import os
import select
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from kvconn.transport.base import HandleState, MemoryRegion
from kvconn.transport.nixl import NixlTransport

REGIONS, REGION_BYTES = 60, 65536
DEADLINE = 60.0


class One:
    """An agent over memory of its own, which moves only while somebody asks it."""

    def __init__(self, threads: int) -> None:
        self.memory = np.zeros((REGIONS, REGION_BYTES), np.uint8)
        self.agent = NixlTransport("poll", num_threads=threads)
        self.agent.register([MemoryRegion(row.ctypes.data, row.nbytes) for row in self.memory])

    @property
    def card(self) -> list[Any]:
        return [base64.b64encode(self.agent.metadata()).decode(), self.memory.ctypes.data]

    def read(self, card: list[Any]) -> dict[str, float]:
        """Meet that agent and read 8 bytes of it; milliseconds."""
        start = time.perf_counter()
        peer = self.agent.add_peer(base64.b64decode(card[0]))
        loaded = time.perf_counter()
        handle = self.agent.post_read(peer, *(np.array([[a, 8]]) for a in (self.memory.ctypes.data, card[1])))
        longest = 0.0
        while self.agent.poll(handle) is HandleState.PENDING:
            began = time.perf_counter()
            self.agent.notifications()
            longest = max(longest, time.perf_counter() - began)
            if began > loaded + DEADLINE:
                raise RuntimeError("a read of 8 bytes did not end")
        self.agent.release(handle)
        return {"load": (loaded - start) * 1e3, "wire": (time.perf_counter() - loaded) * 1e3, "longest": longest * 1e3}


def state() -> dict[str, float]:
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {"KiB": float(fields["VmRSS"].split()[0]), "files": len(os.listdir("/proc/self/fd"))}


def _say(what: object) -> None:
    print(json.dumps(what), flush=True)


def _many(count: int, threads: int) -> None:
    """All of them progress until a card comes in; then they read its agent, one after the other."""
    agents = [One(threads) for _ in range(count)]
    _say([one.card for one in agents])
    while True:
        if select.select([sys.stdin], [], [], 0)[0]:
            line = sys.stdin.readline()
            if not line:
                return
            _say([one.read(json.loads(line)) for one in agents])
        for one in agents:
            one.agent.notifications()


def _one(count: int, threads: int) -> None:
    _say(
        {
            "reads many": _reads_many(count, threads),
            "is read by many": _is_read(count, threads),
            "agent": _agent(threads),
        }
    )


def _start(count: int, threads: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "bench.scale_agents", "many", str(count), str(threads)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _agent(threads: int) -> dict[str, float]:
    """What an agent costs without peers, the second of a process."""
    before, start = state(), time.perf_counter()
    one = One(threads)
    seconds = time.perf_counter() - start
    grown = {key: value - before[key] for key, value in state().items()}
    return {**grown, "ms": seconds * 1e3, "blob": len(base64.b64decode(one.card[0]))}


def _per(before: dict[str, float], after: dict[str, float], count: int) -> dict[str, float]:
    return {key: (after[key] - before[key]) / count for key in before}


def _reads_many(count: int, threads: int) -> dict[str, float]:
    """A reader's costs per producer; of the times the median after the first."""
    with _start(count, threads) as many:
        assert many.stdout is not None
        cards = json.loads(many.stdout.readline())
        one = One(threads)
        first = one.read(cards[0])
        before = state()
        times = [one.read(card) for card in cards[1:]]
        after = state()
        many.kill()
    medians = {key: statistics.median(each[key] for each in times) for key in first}
    return {**_per(before, after, count - 1), **medians, "first load": first["load"], "first wire": first["wire"]}


def _is_read(count: int, threads: int) -> dict[str, float]:
    """A producer's costs per reader."""
    with _start(count, threads) as many:
        assert many.stdin is not None and many.stdout is not None
        json.loads(many.stdout.readline())
        one = One(threads)
        many.stdin.write(json.dumps(one.card) + "\n")
        many.stdin.flush()
        before, slow = state(), []
        while not select.select([many.stdout], [], [], 0)[0]:
            began = time.perf_counter()
            one.agent.notifications()
            slow.append(time.perf_counter() - began)
        after = state()
        many.kill()
    slow.sort()
    return {
        **_per(before, after, count),
        "longest": slow[-1] * 1e3,
        "over 1 ms": sum(s for s in slow if s > 1e-3) * 1e3 / count,
    }


if __name__ == "__main__":
    os.environ.update(NIXL_LOG_LEVEL="ERROR", UCX_LOG_LEVEL="error")
    if sys.argv[1] == "many":
        _many(int(sys.argv[2]), int(sys.argv[3]))
    else:
        _one(int(sys.argv[1]), int(sys.argv[2]))
    sys.stdout.flush()
    os._exit(0)
