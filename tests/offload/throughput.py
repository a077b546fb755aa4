"""What offloading costs, by one command: ``python -m tests.offload.throughput``.

One engine per kind, all started, one working at a time: in every round each kind serves the same requests, in an order
that turns from round to round. A kind's ratio is its tokens per second over those of ``off`` in the same round; printed
are the median over the rounds and the spread, and beside them the same ratio of tokens per second of processor time,
all threads counted, which a busy machine disturbs less. Prompts differ from round to round, so that no round finds what
an earlier one stored.

Kinds: ``off``, no connector; ``again``, the same in a second engine, whose distance from 1 is what this machine does to
two equal engines; ``host``, host memory for everything; ``tiering``, files too; ``slow``, files on a disk on
which every call takes ``--disk-ms``.
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
from tests.offload.faulty import Slow, faulty

SIZE = 16
MODEL = ModelSpec()
KINDS = ("off", "again", "host", "tiering", "slow")
BYTES = 1 << 28


def transfer_of(kind: str, root: Path, disk_ms: float) -> dict[str, Any] | None:
    settings: dict[str, Any] = {"cpu_bytes_to_use": BYTES}
    if kind in ("off", "again"):
        return None
    if kind != "host":
        slow = faulty(Slow, root, seconds=disk_ms / 1e3)
        files = {"type": "fs", "root_dir": str(root), "max_bytes": BYTES}
        settings |= {
            "spec_name": "TieringOffloadingSpec",
            "secondary_tiers": [slow if kind == "slow" else files],
            "kvconn": {"store": 1.0} if kind == "slow" else {},
        }
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": settings,
    }


def salted(requests: Sequence[TraceRequest], round_: int, fresh: bool) -> list[EngineRequest]:
    """The round's prompts: the trace's under another mapping of tokens, or, ``fresh``, ones that share nothing."""
    draw = random.Random(f"round {round_}")
    mapping = draw.sample(range(MODEL.vocab_size), MODEL.vocab_size)
    made = []
    for one in requests:
        prompt = draw.choices(mapping, k=len(one.prompt)) if fresh else [mapping[token] for token in one.prompt]
        made.append(EngineRequest(f"{round_}-{one.id}", tuple(prompt), one.output_length))
    return made


class Speed(NamedTuple):
    """Tokens per second, and per second of processor time."""

    wall: float
    processor: float


def processor_seconds(engine: EngineProcess) -> float:
    """Of the engine's process and its workers, since they started (proc(5), fields 14 and 15)."""
    total = 0
    for pid in (engine.pid, *engine.worker_pids):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")


def turn(engine: EngineProcess, requests: Sequence[EngineRequest], concurrency: int) -> Speed:
    """Serve them all, and let what is stored reach its tier, which is part of the cost."""
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
    """Nothing is under way."""
    assert engine.drain(60.0), engine.stats()
    before = -1.0
    while (now := engine.stats().connector.get("offload_blocks_saved", 0.0)) != before:
        before = now
        engine.poll(0.3)


def measure(kinds: Sequence[str], args: argparse.Namespace, root: Path) -> dict[str, list[Speed]]:
    """Every kind's, by round."""
    if args.trace is not None:
        rows = read_trace(args.trace)
    else:
        with shipped_trace() as path:
            rows = read_trace(path)
    requests = to_requests(rows[: args.requests], scale=32, block_size=SIZE, vocab_size=MODEL.vocab_size)
    blocks = decode_blocks(requests, args.concurrency, SIZE)
    made = []
    for kind in kinds:
        folder = root / kind
        folder.mkdir()
        transfer = transfer_of(kind, folder, args.disk_ms)
        made.append(EngineConfig(name=kind, kv_transfer_config=transfer, num_blocks=blocks, model=MODEL))
    speeds: dict[str, list[Speed]] = {kind: [] for kind in kinds}
    with engines(*made) as started:
        both = dict(zip(kinds, started, strict=True))
        for round_ in range(-1, args.rounds):  # the first one warms up
            order = kinds if round_ % 2 else tuple(reversed(kinds))
            for kind in order:
                speed = turn(both[kind], salted(requests, round_, args.fresh), args.concurrency)
                if round_ >= 0:
                    speeds[kind].append(speed)
        for kind, engine in both.items():
            print(f"{kind}: {_told(engine)}", file=sys.stderr)
    return speeds


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
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--disk-ms", type=float, default=50.0)
    parser.add_argument("--fresh", action="store_true", help="prompts that share nothing: all cost, no benefit")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    args = parser.parse_args()
    kinds = ("off", *(kind for kind in args.kinds if kind != "off"))
    with tempfile.TemporaryDirectory() as folder:
        speeds = measure(kinds, args, Path(folder))
    print(f"{args.rounds} rounds of {args.requests} requests, {args.concurrency} in flight, {os.cpu_count()} cores")
    for kind in kinds:
        wall = [own.wall / off.wall for own, off in zip(speeds[kind], speeds["off"], strict=True)]
        processor = [own.processor / off.processor for own, off in zip(speeds[kind], speeds["off"], strict=True)]
        speed = statistics.median(one.wall for one in speeds[kind])
        print(f"{kind:8} {speed:7.0f} tokens/s   ratio {_spread(wall)}   of processor time {_spread(processor)}")
    return 0


def _spread(values: Sequence[float]) -> str:
    """Median, and the quartiles around it."""
    first, middle, third = statistics.quantiles(values, n=4)
    return f"{middle:.3f} ({first:.3f} to {third:.3f})"


if __name__ == "__main__":
    sys.exit(main())
