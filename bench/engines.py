"""Real vLLM engines, P and D of ours and of stock's: the time to D's first token, and where it goes.

Four engines in processes of their own (``tests/vllm/engines.py``), in which a request is alone; the pair whose turn it
isn't is stopped, because stock's agents spin. After each request D is asked the same prompt once more, without
params: it has all but the last token then, so that this is what a first token costs without any transfer.
Over tcp: ``UCX_TLS=tcp make bench ARGS=engines``.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from bench.measure import Series, Table, percentiles, tls
from tests.vllm.engines import BLOCK, STOCK_PRODUCER, Engine, environment, ours, stock
from tests.vllm.prompts import prompt

__all__ = ["run"]

#: prompt tokens: whole blocks and one token, which D computes
SIZES: Final = (2 * BLOCK + 1, 30 * BLOCK + 1)
#: requests of one turn that count, after one that does not
TURN: Final = 12
#: stamp of D -> what came before it
STAGES: Final = {
    "asked": "P's last forward to its answer with the driver, and on to D",
    "added": "D: the engine has it",
    "admitted": "D: taken in, scheduled, blocks given",
    "posted": "D: the reads are posted",
    "reported": "D: the connector says that all is there",
    "forward": "D: vLLM hears of it, rests, schedules, begins the forward",
    "token": "D: the forward, the token",
    "told": "the token to the driver",
}
Times = dict[str, float]


class _Stamped(Engine):
    main = "bench.stamped"


def run(rounds: int = 9) -> Iterator[Table]:
    first = Table(
        f"vLLM: from P's answer to D's first token, ms (UCX_TLS={tls()}, {rounds} turns of {TURN} requests)",
        ("tokens", "connector", "p50 (of turns)", "p95", "nothing to load", "more than that", "of stock's"),
    )
    stages = Table("vLLM: where it goes, p50, ms", ("stage", *(f"{n} tokens: {k}" for n in SIZES for k in _KINDS)))
    with tempfile.TemporaryDirectory() as folder:
        pairs = _pairs(Path(folder))
        try:
            got = {n: _turns(pairs, n, rounds) for n in SIZES}
        finally:
            for pair in pairs.values():
                pair.close()
    for n, of in got.items():
        for kind in _KINDS:
            first.add(n, kind, *_row(of, kind))
    for stage, what in (*STAGES.items(), ("all", "all of it")):
        cells = [_stage(turns, stage) for of in got.values() for turns in of.values()]
        stages.add(what, *cells)
    yield first
    yield stages


_KINDS: Final = ("ours", "stock")


def _turns(pairs: dict[str, _Pair], length: int, rounds: int) -> dict[str, list[list[Times]]]:
    turns: dict[str, list[list[Times]]] = {kind: [] for kind in pairs}
    for _ in range(rounds):
        for kind, pair in pairs.items():
            turns[kind].append(pair.turn(length))
    return turns


def _row(of: dict[str, list[list[Times]]], kind: str) -> Iterator[object]:
    """Cells: median of the turns' medians, p95 of all, the same without a transfer, the difference."""
    taken = {k: _medians(turns, "taken") for k, turns in of.items()}
    bare = _medians(of[kind], "bare")
    yield taken[kind]
    yield percentiles([one["taken"] * 1e3 for turn in of[kind] for one in turn])[1]
    yield bare
    yield Series(tuple(a - b for a, b in zip(taken[kind].values, bare.values, strict=True)))
    yield taken[kind].over(taken["stock"])


def _medians(turns: list[list[Times]], what: str) -> Series:
    return Series(tuple(statistics.median(one[what] * 1e3 for one in turn) for turn in turns))


def _stage(turns: list[list[Times]], stage: str) -> float:
    return statistics.median(one[stage] for turn in turns for one in turn) * 1e3


def _pairs(folder: Path) -> dict[str, _Pair]:
    """Both, stopped."""
    model = folder / "llama"
    command = [sys.executable, "-m", "tests.vllm.models", "llama", str(model)]
    subprocess.run(command, check=True, env=environment(1, {}), capture_output=True)
    pairs: dict[str, _Pair] = {}
    try:
        for kind, how in (("ours", ours), ("stock", stock)):
            pairs[kind] = _Pair(kind, folder, model, how)
    except BaseException:
        for pair in pairs.values():
            pair.close()
        raise
    return pairs


class _Pair:
    """P and D of one kind; they have met, and are stopped between turns."""

    def __init__(self, kind: str, folder: Path, model: Path, how: Any) -> None:
        self._seed = 0
        self._engines = [
            _Stamped(f"{kind}-{role}", folder / f"{kind}-{role}.log", model, how(role))
            for role in ("kv_producer", "kv_consumer")
        ]
        try:
            for engine in self._engines:
                engine.ready()
                os.sched_setaffinity(engine.process.pid, range(os.cpu_count() or 1))  # stock binds to the last core
            self._one(SIZES[0])
        except BaseException:
            self.close()
            raise
        self._signal(signal.SIGSTOP)

    def turn(self, length: int) -> list[Times]:
        self._signal(signal.SIGCONT)
        self._one(length)
        times = [self._one(length) for _ in range(TURN)]
        self._engines[0].idle()
        self._signal(signal.SIGSTOP)
        return times

    def _one(self, length: int) -> Times:
        """One request: seconds from P's answer to D's first token, of its stages, and once more without a transfer."""
        p, d = self._engines
        self._seed += 1
        tokens = prompt(length, self._seed)
        params = p.one(tokens, 1, params=STOCK_PRODUCER)["params"]
        answered = time.perf_counter()
        loaded = d.one(tokens, 1, params=params)
        told = time.perf_counter()
        stamps = {**d.ask("stamps"), "asked": answered, "told": told}
        again = time.perf_counter()
        bare = d.one(tokens, 1)
        spent = time.perf_counter() - again
        if loaded["tokens"] != bare["tokens"]:
            raise RuntimeError(f"{d.name}: {loaded['tokens']} with what was loaded, then {bare['tokens']}")
        before = began = p.ask("stamps")["computed"]
        times = {"taken": told - answered, "bare": spent, "all": told - began}
        for stage in STAGES:
            times[stage], before = stamps[stage] - before, stamps[stage]
        return times

    def _signal(self, which: signal.Signals) -> None:
        for engine in self._engines:
            os.killpg(engine.process.pid, which)

    def close(self) -> None:
        for engine in self._engines:
            if engine.process.poll() is None:
                os.killpg(engine.process.pid, signal.SIGCONT)
            engine.close()
