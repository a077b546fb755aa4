"""What an agent costs while nothing moves: ours as an engine has it, and NIXL's default as stock has it.

CPU time of the process, so that what else runs here makes a spinning thread look cheaper, never ours dearer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from bench.measure import Table, alternate
from kvconn.transport.nixl import NixlTransport

__all__ = ["run"]

SECONDS = 1.0


def run(rounds: int = 9) -> Iterator[Table]:
    subjects = {
        "ours (pump)": lambda: _idle(lambda: NixlTransport("pump")),
        "NIXL's progress thread (stock)": lambda: _idle(lambda: NixlTransport("nixl")),
    }
    got = alternate(subjects, min(rounds, 5))
    table = Table("An idle agent, percent of a core", ("agent", "% of a core"))
    for name, one in got.items():
        table.add(name, one)
    yield table


def _idle(make: Callable[[], NixlTransport]) -> float:
    transport = make()
    try:
        time.sleep(0.3)  # it settles
        start, began = time.process_time(), time.perf_counter()
        time.sleep(SECONDS)
        return (time.process_time() - start) / (time.perf_counter() - began) * 100
    finally:
        transport.close()
