"""What offloading costs, by one command: ``python -m tests.offload.throughput``.

One engine per kind, one after the other. Each takes turns with its connector and without it (:mod:`.switched`); the
ratio of a turn is its tokens per second over the mean of those of the turns without around it. Printed are the median
over all turns and the quartiles, and beside them the same of tokens per second of processor time, all threads counted.

Why that is fair
1. It is one engine. Two engines of one configuration differ by up to a tenth for as long as they live (measured here),
   whatever they are asked to do.
2. A machine that becomes slower or faster meanwhile does so for both neighbours; a drift cancels in their mean.
3. Nobody else works: before each turn what the last one left behind is waited for, and what it wrote is synced,
   outside of the time.
4. No turn's prompts come back.
Whether it is fair is seen in ``again``, turns without a connector among turns without: it must be 1. What is left out
is the calls of an engine to a connector that answers at once: some 15 a step.

Files lie where ``TMPDIR`` says. On ext4 making one took 0.04 ms of processor time here, or 0.6 for minutes on end, it
seems after thousands were removed, as an earlier run does at its end.

Kinds: ``again``; ``host``, host memory for everything; ``tiering``, files too; ``slow``, files on a disk on which
every call takes ``--disk-ms``.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvconn.cli.job import engines, shipped_trace
from kvconn.engine.client import EngineProcess, EngineRequest, Finished
from kvconn.engine.config import EngineConfig, ModelSpec
from kvconn.engine.router import decode_blocks
from kvconn.engine.trace import TraceRequest, read_trace, to_requests
from tests.offload import switched
from tests.offload.faulty import Slow, faulty
from tests.offload.switched import OFF

SIZE = 16
MODEL = ModelSpec()
#: seconds of processor time per look at an engine that is idle
QUIET = 0.02
KINDS = ("again", "host", "tiering", "slow")
BYTES = 1 << 28


def transfer_of(kind: str, root: Path, disk_ms: float) -> dict[str, Any]:
    settings: dict[str, Any] = {"cpu_bytes_to_use": BYTES}
    if kind in ("tiering", "slow"):
        slow = faulty(Slow, root, seconds=disk_ms / 1e3)
        files = {"type": "fs", "root_dir": str(root), "max_bytes": BYTES}
        settings |= {
            "spec_name": "TieringOffloadingSpec",
            "secondary_tiers": [slow if kind == "slow" else files],
            "kvconn": {"store": 1.0} if kind == "slow" else {},
        }
    return {
        "kv_connector": "OffloadingConnector",
        "kv_connector_module_path": switched.__name__,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": settings,
    }


def salted(requests: Sequence[TraceRequest], name: str, fresh: bool) -> list[EngineRequest]:
    """A turn's prompts: the trace's under another mapping of tokens, or, ``fresh``, ones that share nothing."""
    draw = random.Random(name)
    mapping = draw.sample(range(MODEL.vocab_size), MODEL.vocab_size)
    made = []
    for one in requests:
        prompt = draw.choices(mapping, k=len(one.prompt)) if fresh else [mapping[token] for token in one.prompt]
        made.append(EngineRequest(f"{name}-{one.id}", tuple(prompt), one.output_length))
    return made


class Speed(NamedTuple):
    """Tokens per second, and per second of processor time."""

    wall: float
    processor: float


class Ratio(NamedTuple):
    """A turn's speed over the mean of its neighbours'; ``speed`` is its own."""

    wall: float
    processor: float
    speed: float

    @classmethod
    def of(cls, own: Speed, before: Speed, after: Speed) -> Ratio:
        mean = [(one + other) / 2 for one, other in zip(before, after, strict=True)]
        return cls(own.wall / mean[0], own.processor / mean[1], own.wall)


def processor_seconds(engine: EngineProcess) -> float:
    """Of all threads of the engine's process and its workers, since they started."""
    total = 0
    for pid in (engine.pid, *engine.worker_pids):
        for task in Path(f"/proc/{pid}/task").iterdir():
            total += int(task.joinpath("schedstat").read_text().split()[0])
    return total / 1e9


def turn(engine: EngineProcess, requests: Sequence[EngineRequest], concurrency: int) -> Speed:
    """Serve them all, and let what is stored reach its tier; the processor's part of that is part of the cost."""
    os.sync()
    todo, running = deque(requests), 0
    began, busy = time.perf_counter(), processor_seconds(engine)
    while todo or running:
        while todo and running < concurrency:
            engine.submit(todo.popleft())
            running += 1
        for event in engine.poll(0.05):
            if isinstance(event, Finished):
                assert event.error is None, event
                running -= 1
    seconds = time.perf_counter() - began
    _settle(engine)
    tokens = sum(len(one.prompt_tokens) + one.max_tokens for one in requests)
    return Speed(tokens / seconds, tokens / (processor_seconds(engine) - busy))


def _settle(engine: EngineProcess) -> None:
    """Nothing is under way: no job, and no thread that still works."""
    assert engine.drain(60.0), engine.stats()
    before = (-1.0, -1.0)
    while (now := (_saved(engine), processor_seconds(engine)))[0] != before[0] or now[1] > before[1] + QUIET:
        before = now
        engine.poll(0.2)


def _saved(engine: EngineProcess) -> float:
    return engine.stats().connector.get("offload_blocks_saved", 0.0)


def measure(kind: str, args: argparse.Namespace, root: Path) -> list[Ratio]:
    """One engine's ratios, turn by turn."""
    if args.trace is not None:
        rows = read_trace(args.trace)
    else:
        with shipped_trace() as path:
            rows = read_trace(path)
    requests = to_requests(rows[: args.requests], scale=32, block_size=SIZE, vocab_size=MODEL.vocab_size)
    blocks = decode_blocks(requests, args.concurrency, SIZE)
    transfer = transfer_of(kind, root, args.disk_ms)
    ratios: list[Ratio] = []
    with engines(EngineConfig(name=kind, kv_transfer_config=transfer, num_blocks=blocks, model=MODEL)) as (engine,):

        def serve(what: str) -> Speed:
            return turn(engine, salted(requests, what, args.fresh), args.concurrency)

        subject = OFF if kind == "again" else "on"
        serve(f"{subject}-warm"), serve(f"{OFF}-warm")
        before = serve(f"{OFF}-first")
        for round_ in range(args.rounds):
            own, after = serve(f"{subject}-{round_}-own"), serve(f"{OFF}-{round_}")
            ratios.append(Ratio.of(own, before, after))
            before = after
        print(f"{kind}: {_told(engine)}", file=sys.stderr)
    return ratios


def _told(engine: EngineProcess) -> str:
    names = ("offload_blocks_stored", "kv_offload_stores_skipped", "offload_tokens_loaded", "offload_blocks_saved")
    counters = engine.stats().connector
    return " ".join(
        f"{name.removeprefix('kv_').removeprefix('offload_')}={counters.get(name, 0):.0f}" for name in names
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, default=None, help="Mooncake's JSONL; default: the one that ships")
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=6, help="turns of each kind per start (default 6)")
    parser.add_argument("--starts", type=int, default=2, help="how often the engines are started (default 2)")
    parser.add_argument("--disk-ms", type=float, default=50.0)
    parser.add_argument("--fresh", action="store_true", help="prompts that share nothing: all cost, no benefit")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    args = parser.parse_args()
    ratios: dict[str, list[Ratio]] = {kind: [] for kind in args.kinds}
    with tempfile.TemporaryDirectory() as folder:  # removed at the end: making files was slow after that
        for _ in range(args.starts):
            for kind in args.kinds:
                ratios[kind] += measure(kind, args, Path(tempfile.mkdtemp(dir=folder)))
    print(
        f"{args.starts} starts, {args.rounds} rounds of {args.requests} requests, {args.concurrency} in flight, "
        f"{os.cpu_count()} cores"
    )
    for kind, all_ in ratios.items():
        wall, processor = _spread([one.wall for one in all_]), _spread([one.processor for one in all_])
        speed = statistics.median(one.speed for one in all_)
        print(f"{kind:8} {speed:7.0f} tokens/s   ratio {wall}   of processor time {processor}")
    return 0


def _spread(values: Sequence[float]) -> str:
    """Median, and the quartiles around it."""
    first, middle, third = statistics.quantiles(values, n=4)
    return f"{middle:.3f} ({first:.3f} to {third:.3f})"


if __name__ == "__main__":
    sys.exit(main())
