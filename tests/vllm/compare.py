"""Ours against stock on the same prompts, alternating.

    python -m tests.vllm.compare [--alternations 5] [--prompts 20]

Each alternation starts a fresh producer and consumer of one kind, then of the other. Measured per kind: the time from
the producer's answer to the consumer's first token (median over prompts, milliseconds), and the CPU seconds of both
processes over the measured part. Printed: the ratio ours/stock, paired, with its 95% interval (Student's t on
logarithms).
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.vllm.engines import STOCK_PRODUCER, Engine, environment, ours, stock
from tests.vllm.prompts import prompt

#: two-sided 95% quantiles of Student's t, by degrees of freedom
T95 = {4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262, 11: 2.201, 14: 2.145, 19: 2.093}


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(kind: Any, model: Path, logs: Path, prompts: list[list[int]]) -> tuple[float, float]:
    """(milliseconds to the first token, CPU seconds) of one fresh pair."""
    p = Engine("P", logs / "P.log", model, kind("kv_producer"))
    d = Engine("D", logs / "D.log", model, kind("kv_consumer"))
    try:
        p.ready(), d.ready()
        for warm in (prompt(100, 1), prompt(300, 2)):
            d.one(warm, 1, params=p.one(warm, 1, params=STOCK_PRODUCER)["params"])
        before = cpu_seconds(p.process.pid) + cpu_seconds(d.process.pid)
        waits = []
        for one in prompts:
            params = p.one(one, 1, params=STOCK_PRODUCER)["params"]
            began = time.perf_counter()
            d.one(one, 1, params=params)
            waits.append(1000 * (time.perf_counter() - began))
        return statistics.median(waits), cpu_seconds(p.process.pid) + cpu_seconds(d.process.pid) - before
    finally:
        p.close()
        d.close()


def interval(pairs: list[tuple[float, float]]) -> tuple[float, float, float]:
    """Geometric mean of ours/stock, and its 95% interval."""
    logs = [math.log(mine / theirs) for mine, theirs in pairs]
    half = T95.get(len(logs) - 1, 2.0) * statistics.stdev(logs) / math.sqrt(len(logs))
    middle = statistics.mean(logs)
    return math.exp(middle), math.exp(middle - half), math.exp(middle + half)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--alternations", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=20)
    given = parser.parse_args()
    prompts = [prompt(40 + 23 * k, 10_000 + k) for k in range(given.prompts)]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        logs, model = Path(folder), Path(folder) / "llama"
        command = [sys.executable, "-m", "tests.vllm.models", "llama", str(model)]
        subprocess.run(command, check=True, env=environment(1, {}), capture_output=True)
        for k in range(given.alternations):
            both = {}
            for kind in (ours, stock) if k % 2 == 0 else (stock, ours):
                both[kind.__name__] = measure(kind, model, logs, prompts)
            rows.append((both["ours"], both["stock"]))
            (ours_ms, ours_cpu), (stock_ms, stock_cpu) = rows[-1]
            print(f"{k + 1}: first token {ours_ms:.1f} / {stock_ms:.1f} ms, CPU {ours_cpu:.2f} / {stock_cpu:.2f} s")
    for index, what in enumerate(("time to first token", "CPU seconds")):
        mean, low, high = interval([(mine[index], theirs[index]) for mine, theirs in rows])
        print(f"{what}, ours/stock: {mean:.2f} (95% {low:.2f} to {high:.2f})")


if __name__ == "__main__":
    main()
