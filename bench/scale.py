"""Scale: what a peer, a handshake, a heartbeat cost here, what that makes of 1,000 x 1,000, and 200 x 200 simulated.

No vLLM is needed. A rank is one worker of an engine; of TP engines every rank that is read is one peer of its readers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

from bench.measure import Series, Table, cpu, number
from kvconn.base import GroupView, KVCacheView, LayerView
from kvconn.config import LIMITS, ConnectorConfig, ModelView, ParallelConfig, parse_kv_transfer_config
from kvconn.engine.ports import free_ports
from kvconn.geometry import Place, regions_of
from kvconn.nixl.fence import FenceWords, fresh_key
from kvconn.nixl.handshake import FIRST, Greeting, Ours, describe, rank_cache
from kvconn.nixl.leases import SendLeases
from kvconn.nixl.peers import Peer, Source
from kvconn.nixl.sideclient import HandshakeClient
from kvconn.nixl.sideserver import HandshakeServer
from kvconn.nixl.wire import Heartbeat, WireCodec, encode_heartbeats, parse_notification
from kvconn.params import PeerKey, fresh_transfer_id
from kvconn.trust import Trust

__all__ = ["run"]

ENGINES = 1000
SIMULATED = 200
LAYERS, BLOCKS = 60, 100_000
AGENTS = 24
ASKS = 500
MICRO = 1e6
DEADLINE = 300.0
BLOB = bytes(3000)  # of an agent with 61 regions


def run(rounds: int = 9) -> Iterator[Table]:
    agents = {threads: _agents(threads) for threads in (4, 0)}
    yield _of_agents(agents)
    unit = _units(rounds)
    yield _of_units(unit)
    yield _arithmetic(agents, unit)
    yield _simulated(SIMULATED)


# --- NIXL's part --------------------------------------------------------------------------------------------------


def _agents(threads: int) -> dict[str, dict[str, float]]:
    done = subprocess.run(
        [sys.executable, "-m", "bench.scale_agents", str(AGENTS), str(threads)],
        capture_output=True, timeout=DEADLINE, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stderr.decode()[-2000:])
    answer: dict[str, dict[str, float]] = json.loads(done.stdout.decode().splitlines()[-1])
    return answer


def _of_agents(agents: dict[int, dict[str, dict[str, float]]]) -> Table:
    table = Table(
        f"Scale: what NIXL takes, {LAYERS} regions (mean of {AGENTS} peers)",
        ("", "num_threads 4 (default)", "num_threads 0"),
    )
    for title, part, key in (
        ("an agent: ms", "agent", "ms"),
        ("an agent: KiB", "agent", "KiB"),
        ("an agent: open files", "agent", "files"),
        ("reader, first producer: ms of the agent's lock", "reads many", "first load"),
        ("reader, each further producer: ms of the lock", "reads many", "load"),
        ("reader, per producer: KiB", "reads many", "KiB"),
        ("reader, per producer: open files", "reads many", "files"),
        ("producer, per reader: ms of the lock", "is read by many", "over 1 ms"),
        ("producer, per reader: KiB", "is read by many", "KiB"),
        ("producer, per reader: open files", "is read by many", "files"),
    ):
        table.add(title, *(float(agents[threads][part][key]) for threads in (4, 0)))
    return table


# --- ours ---------------------------------------------------------------------------------------------------------


def _config(role: str, engine: str) -> ConnectorConfig:
    transfer = parse_kv_transfer_config({"kv_connector": "NixlConnector", "kv_role": role})
    model = ModelView("m", "bfloat16", LAYERS, 1, 576, 16)
    return ConnectorConfig(transfer, engine, ParallelConfig(), model, rank=0)


def _shape() -> tuple[KVCacheView, tuple[Any, ...]]:
    names = tuple(f"model.layers.{i}.self_attn.attn" for i in range(LAYERS))
    cache = KVCacheView(BLOCKS, 16, (GroupView("full", names),), LAYERS * 4096)
    views = [LayerView(n, (i + 1) << 40, 4096, 4096, BLOCKS) for i, n in enumerate(names)]
    return cache, regions_of(views)


def _payload() -> bytes:
    """What a producer of this shape answers."""
    cache, regions = _shape()
    codec = WireCodec()
    one = describe(_config("kv_producer", "P"), cache, regions, codec, BLOB, FenceWords(64))
    return codec.with_seal_key(one.payload, fresh_key())


def _ours() -> Ours:
    cache, regions = _shape()
    config = _config("kv_consumer", "D")
    return Ours(config, rank_cache(config, cache, regions), Place(0, 0), WireCodec())


def _greet(ours: Ours, payload: bytes, key: PeerKey) -> Greeting:
    greeting = Greeting(ours, key)
    greeting.answered(FIRST, payload)
    return greeting


def _units(rounds: int) -> dict[str, float | Series]:
    payload, ours = _payload(), _ours()
    key = PeerKey("P", "127.0.0.1", 1, 1, 1, 1)
    out: dict[str, float | Series] = {"answer: bytes": float(len(payload))}
    out["reader: us to check and plan an answer"] = _series(rounds, lambda: _greet(ours, payload, key), 20)
    out["reader: bytes of Python per peer"] = _kept(lambda: _known(ours, payload, key))
    out |= _channel(rounds, payload)
    ids = [fresh_transfer_id() for _ in range(256)]
    for n in (1, 256):
        message = encode_heartbeats(ids[:n])
        out[f"heartbeat of {n}: bytes"] = float(len(message))
        leases = SendLeases(LIMITS.lease)
        for index, one in enumerate(ids[:n]):
            leases.track(str(index), index + 1, one, 1.0)
        out[f"reader: us to write a heartbeat of {n}"] = _series(rounds, lambda n=n: encode_heartbeats(ids[:n]), 200)
        out[f"producer: us to hear a heartbeat of {n}"] = _series(
            rounds, lambda m=message, one=leases: _hear(one, m), 200
        )
    return out


def _series(rounds: int, work: Callable[[], object], times: int) -> Series:
    work()
    return Series(tuple(cpu(work, times) * MICRO for _ in range(rounds)))


def _known(ours: Ours, payload: bytes, key: PeerKey) -> Peer:
    peer = Peer(key)
    peer.ready(tuple(Source("agent", offer.plan) for offer in _greet(ours, payload, key).offers), 0.0)
    return peer


def _kept(make: Callable[[], object], times: int = 50) -> float:
    make()
    tracemalloc.start()
    kept = [make() for _ in range(times)]
    size = tracemalloc.get_traced_memory()[0] / len(kept)
    tracemalloc.stop()
    return size


def _hear(leases: SendLeases, message: bytes) -> None:
    parsed = parse_notification(message)
    assert isinstance(parsed, Heartbeat)
    leases.heartbeat(parsed.transfer_ids, 2.0)


def _channel(rounds: int, payload: bytes) -> dict[str, float | Series]:
    """A real server asked by a real client, in one process: the processor's part of both, and answers a second."""
    port = free_ports(1)[0]
    server = HandshakeServer("127.0.0.1", port, {(0, 0): payload}, Trust(rate=1_000_000))
    client = HandshakeClient(30.0)
    key = PeerKey("P", "127.0.0.1", port, 1, 1, 1)
    spent, took, files = [], [], 0
    for _ in range(min(rounds, 5)):
        start, began = time.process_time(), time.perf_counter()
        for _ in range(ASKS):
            client.start(key)
        got: list[Any] = []
        while len(got) < ASKS:
            got += client.results()
            files = max(files, len(os.listdir("/proc/self/fd")))
            time.sleep(1e-3)
        if any(one.payload is None for one in got):
            raise RuntimeError(next(one.why for one in got if one.payload is None))
        spent.append((time.process_time() - start) / ASKS * MICRO)
        took.append(ASKS / (time.perf_counter() - began))
    client.close()
    server.close()
    return {
        "handshake: us of both sides' processors": Series(tuple(spent)),
        "handshakes a second, both sides on this machine": Series(tuple(took)),
        "open files of both sides, 128 asked at once": float(files),
    }


def _of_units(unit: dict[str, float | Series]) -> Table:
    table = Table(f"Scale: what ours takes, {LAYERS} regions (CPU)", ("", "here"))
    for title, value in unit.items():
        table.add(title, value)
    return table


# --- a thousand by a thousand -------------------------------------------------------------------------------------


def _value(one: float | Series) -> float:
    return one.median if isinstance(one, Series) else one


def _arithmetic(agents: dict[int, dict[str, dict[str, float]]], unit: dict[str, float | Series]) -> Table:
    """Every pair has met and has something under way: the worst case. One rank each."""
    table = Table(f"Scale: {ENGINES:,} P x {ENGINES:,} D, every pair, one rank each", ("of one rank", "4 threads", "0"))
    plan = _value(unit["reader: us to check and plan an answer"]) / 1e6
    ask = _value(unit["handshake: us of both sides' processors"]) / 1e6
    python = _value(unit["reader: bytes of Python per peer"]) / 2**20
    beat = _value(unit["producer: us to hear a heartbeat of 1"]) / 1e6
    every = LIMITS.lease / 6

    def both(title: str, of: Callable[[dict[str, dict[str, float]]], float]) -> None:
        table.add(title, *(number(of(agents[threads])) for threads in (4, 0)))

    both("reader: open files", lambda a: a["agent"]["files"] + ENGINES * a["reads many"]["files"])
    both("reader: MiB", lambda a: (a["agent"]["KiB"] + ENGINES * a["reads many"]["KiB"]) / 1024 + ENGINES * python)
    both("reader: s to meet all", lambda a: ENGINES * (plan + ask + a["reads many"]["load"] / 1e3))
    both("of which on the step thread", lambda a: ENGINES * plan)
    both("producer: open files", lambda a: a["agent"]["files"] + ENGINES * a["is read by many"]["files"])
    both("producer: MiB", lambda a: (a["agent"]["KiB"] + ENGINES * a["is read by many"]["KiB"]) / 1024)
    both(
        "producer: s of its agent's lock until all have met it",
        lambda a: ENGINES * a["is read by many"]["over 1 ms"] / 1e3,
    )
    both("producer: heartbeats a second", lambda a: ENGINES / every)
    both("producer: % of a core for them, NIXL's part left out", lambda a: ENGINES / every * beat * 100)
    return table


# --- simulated ----------------------------------------------------------------------------------------------------


def _simulated(size: int) -> Table:
    from tests.nixl.fleet import Fleet

    table = Table(f"Scale: {size} P x {size} D simulated, a request between every pair, in one process", ("", ""))
    start = time.perf_counter()
    fleet = Fleet(size)
    table.add("s to make the engines", time.perf_counter() - start)
    start, spent = time.perf_counter(), time.thread_time()
    for turn in range(size):
        fleet.round(turn)
    table.add("s for the requests", time.perf_counter() - start)
    table.add("requests, all whole", f"{fleet.requests:,}")
    table.add(
        "us of the processor a request, all engines and the network",
        (time.thread_time() - spent) / fleet.requests * MICRO,
    )
    table.add("peers of a consumer", fleet.peers())
    largest = sorted(fleet.most.items(), key=lambda item: -item[1])[:6]
    table.add("largest tables", ", ".join(f"{name} {n:,}" for name, n in largest))
    fleet.sound()
    table.add("tables that hold something a lease later", "none")
    fleet.close()
    return table
