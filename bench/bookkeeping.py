"""What a step costs when nothing moves, and what a request costs when it ends: microseconds of CPU, bytes of memory.

The agents are still ones (``bench.still``), so that the bytes and NIXL's own time are left out on both sides.
"""

from __future__ import annotations

import copy
import gc
import pickle
import time
import tracemalloc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator as StockAggregator
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from bench.halves import KINDS, NOTHING, Halves, Kind
from bench.measure import Series, Table, alternate, cpu, number
from bench.still import StillAgent, still_agents
from kvconn.aggregator import KVOutputAggregator
from kvconn.base import WorkerFacts
from kvconn.vllm.facade import VllmWorkerFacts
from kvconn.vllm.multi import VllmMultiFacts

__all__ = ["run"]

PENDING = (0, 100, 1000, 10_000)
WORLDS = (1, 8, 64, 1024)
#: a minute of lease and of patience would end what is measured here
LONG = {"kv_lease_duration": 100_000}
OURS = {"kvconn": {"progress": "poll", "read": 1e5, "waiting_max": 100_000}}
ENDED = 16
MICRO = 1e6


def extra(kind: Kind) -> dict[str, Any]:
    return {**LONG, **(OURS if kind == "ours" else {})}


def run(rounds: int = 9) -> Iterator[Table]:
    with still_agents():
        yield steps(rounds)
        yield memory()
        yield ends(rounds)
        yield multi_steps(rounds)
        yield ends(rounds, multi=True)
        yield aggregator(rounds)


# --- steps in which nothing happens -------------------------------------------------------------------------------


def steps(rounds: int) -> Table:
    table = Table(
        "Bookkeeping: one step of both halves, nothing happening (us of CPU)",
        ("requests", "ours", "stock", "ours/stock", "more than with none: ours", "stock"),
    )
    none: dict[str, dict[Kind, float]] = {}
    for n in PENDING:
        halves = {kind: pending(kind, n) for kind in KINDS}
        for index, state in enumerate(("pinned on P", "loading on D")):
            got = alternate({kind: _idle(pair[index]) for kind, pair in halves.items()}, rounds)
            base = none.setdefault(state, {kind: got[kind].median for kind in KINDS})
            more = [number(max(0.0, got[kind].median - base[kind])) for kind in KINDS] if n else ["", ""]
            table.add(f"{n:,} {state}", got["ours"], got["stock"], got["ours"].over(got["stock"]), *more)
        for pair in halves.values():
            for one in pair:
                one.close()
    return table


def _idle(halves: Halves) -> Any:
    return lambda: cpu(halves.step, 50) * MICRO


def multi_steps(rounds: int) -> Table:
    table = Table(
        "Bookkeeping: the same below a MultiConnector, beside a native child (us of CPU)",
        ("requests", "ours", "stock", "ours/stock"),
    )
    for n in PENDING:
        halves = {kind: pinned(kind, n, multi=True)[0] for kind in KINDS}
        got = alternate({kind: _idle(one) for kind, one in halves.items()}, rounds)
        table.add(f"{n:,} pinned on P", got["ours"], got["stock"], got["ours"].over(got["stock"]))
        for one in halves.values():
            one.close()
    return table


def pinned(kind: Kind, n: int, multi: bool = False) -> tuple[Halves, list[dict[str, Any]]]:
    """P with ``n`` requests pinned, and what its clients were told."""
    p = Halves(kind, "kv_producer", blocks=n + 64, extra=extra(kind), multi=multi)
    params = [p.prefill(f"r{i}", [i]) for i in range(n)]
    for _ in range(5):  # a native child has had its say
        p.step()
    return p, params


def pending(kind: Kind, n: int) -> tuple[Halves, Halves]:
    """P with ``n`` requests pinned, and D whose reads of them are under way for ever."""
    p, params = pinned(kind, n)
    d = Halves(kind, "kv_consumer", blocks=n + 64, extra=extra(kind))
    if n:
        _meet(d, params[0])
    for i in range(1, n):
        d.load(f"d{i}", [i], params[i])
    for _ in range(3):
        d.step()
    p.step()
    return p, d


def _meet(d: Halves, params: dict[str, Any]) -> None:
    """The first read, which shakes hands; the rest find a peer."""
    d.load("d0", [0], params)
    deadline = time.monotonic() + 20
    posted = StillAgent.posted
    while StillAgent.posted == posted:
        d.step()
        time.sleep(1e-3)
        if time.monotonic() > deadline:
            raise RuntimeError("no handshake within 20 s")


def memory(n: int = 1000) -> Table:
    """Allocated by Python, of both halves, while ``n`` requests wait; not what clients and engines keep of them."""
    table = Table(
        f"Bookkeeping: memory of one pending request (bytes, mean of {n:,}, its own vLLM request left out)",
        ("request", "ours", "stock"),
    )
    sizes = {kind: _sizes(kind, n) for kind in KINDS}
    for index, state in enumerate(("pinned on P", "loading on D")):
        table.add(state, *(f"{sizes[kind][index]:,.0f}" for kind in KINDS))
    return table


def _sizes(kind: Kind, n: int) -> tuple[float, float]:
    d = Halves(kind, "kv_consumer", blocks=n + 64, extra=extra(kind))
    other, params = pinned(kind, n)
    _meet(d, params[0])
    waiting = [d.arrive(f"d{i}", 1, params[i]) for i in range(1, n)]
    taken = _freelists()
    p = Halves(kind, "kv_producer", blocks=n + 64, extra=extra(kind))
    tracemalloc.start()
    sizes = [_held()]
    for i in range(n):
        p.prefill(f"r{i}", [i])
    p.step()
    sizes.append(_held())
    for i, request in enumerate(waiting, 1):
        d.admit(request, [i])
    d.step()
    sizes.append(_held())
    tracemalloc.stop()
    del taken
    for one in (other, p, d):
        one.close()
    return (sizes[1] - sizes[0]) / n, (sizes[2] - sizes[1]) / len(waiting)


def _freelists() -> list[Any]:
    """Empties what msgspec keeps of dead objects, up to 2,000 of a size: what comes from there is not counted."""
    kinds = [
        msgspec.defstruct("S", list("abcdefghijkl"[:size]), gc=gc) for size in range(1, 13) for gc in (True, False)
    ]
    return [kind(*range(len(kind.__struct_fields__))) for kind in kinds for _ in range(2001)]


def _held() -> int:
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


# --- requests that end --------------------------------------------------------------------------------------------


def ends(rounds: int, multi: bool = False) -> Table:
    where = ", below a MultiConnector" if multi else ""
    table = Table(
        f"Bookkeeping: what the driver does when a sent request ends, 1,000 others pinned{where} (us of CPU)",
        ("ranks", "ours", "stock", "ours/stock"),
    )
    for world in WORLDS:
        engines = {kind: Engine(kind, world, multi) for kind in KINDS}
        few = rounds if world < 1024 else 3
        got = alternate({kind: engine.end_some for kind, engine in engines.items()}, few)
        table.add(f"{world:,}", got["ours"], got["stock"], got["ours"].over(got["stock"]))
        for engine in engines.values():
            engine.halves.close()
    return table


class Engine:
    """A producer's driver: rank 0 is real, the others say what it says, under their own numbers."""

    def __init__(self, kind: Kind, world: int, multi: bool = False) -> None:
        self.halves = Halves(kind, "kv_producer", blocks=2000, extra=extra(kind), world=world, multi=multi)
        self.world = world
        self.agent = StillAgent.newest
        # a step in which a prompt is computed is one of all ranks too, or a native child is heard of rank 0 alone
        self.halves.step = lambda output=None: self._step(output)  # type: ignore[method-assign]
        self.aggregator = StockAggregator(world)
        self.next = 0
        for _ in range(1000):
            self._hold()
        for _ in range(5):
            self._step()

    def _hold(self) -> str:
        self.next += 1
        params = self.halves.prefill(f"r{self.next}", [self.next % 2000])
        return str(params["remote_request_id"])

    def end_some(self) -> float:
        """Microseconds of the driver per request, of all steps until ``ENDED`` more are held, read and given back."""
        names = [self._hold() for _ in range(ENDED)]
        spent, over = self._step()
        self.agent.notifications["reader"] = [f"{name}:1".encode() for name in names]
        for _ in range(20):
            if len(over) == ENDED:
                break
            more, ended = self._step()
            spent += more
            over |= ended
        else:
            raise RuntimeError(f"{self.halves.kind}: {len(over)} of {ENDED} requests ended in 20 steps")
        return spent / ENDED * MICRO

    def _step(self, output: Any = None) -> Any:
        """Seconds of the driver, and which requests ended."""
        start = time.thread_time()
        metadata = self.halves.scheduler.build_connector_meta(output or NOTHING)
        spent = time.thread_time() - start
        mine = self.halves.work(metadata, set())
        outputs = [SimpleNamespace(kv_connector_output=_as_rank(mine, rank)) for rank in range(self.world)]
        start = time.thread_time()
        part = self.aggregator.aggregate(outputs).kv_connector_output  # type: ignore[arg-type,union-attr]
        self.halves.scheduler.update_connector_output(part)
        return spent + time.thread_time() - start, set(part.finished_sending or ())


def _as_rank(part: Any, rank: int) -> Any:
    """What another rank says: the same, as itself."""
    other = copy.copy(part)
    meta = part.kv_connector_worker_meta
    if isinstance(meta, VllmWorkerFacts):
        other.kv_connector_worker_meta = VllmWorkerFacts(_facts(meta.inner, rank))
    elif isinstance(meta, VllmMultiFacts):
        other.kv_connector_worker_meta = VllmMultiFacts(_facts(meta.inner, rank))
    return other


def _facts(said: WorkerFacts, rank: int) -> WorkerFacts:
    own = WorkerFacts(tuple(msgspec.structs.replace(fact, rank=rank) for fact in said.facts))
    facts: WorkerFacts = pickle.loads(pickle.dumps(own))  # as they come from another process
    return facts


# --- the aggregators ----------------------------------------------------------------------------------------------


def aggregator(rounds: int) -> Table:
    table = Table(
        "Bookkeeping: the aggregator alone, 1,000 ids half reported (us of CPU)",
        ("ranks", "empty step: ours", "stock", "ours/stock", "an id ends: ours", "stock", "ours/stock"),
    )
    for world in WORLDS:
        both = {"ours": KVOutputAggregator(world), "stock": StockAggregator(world)}
        for one in both.values():
            half = {f"half{i}" for i in range(1000)}
            for rank in range(world // 2):
                one.aggregate([_output(half if r == rank else set()) for r in range(world)])
        idle = alternate({name: _empty_steps(one, world) for name, one in both.items()}, rounds)
        end = alternate({name: _ending(one, world) for name, one in both.items()}, rounds)
        row: list[Series] = []
        for got in (idle, end):
            row += [got["ours"], got["stock"], got["ours"].over(got["stock"])]
        table.add(f"{world:,}", *row)
    return table


def _output(sent: set[str]) -> Any:
    part = KVConnectorOutput(finished_sending=sent, finished_recving=set(), failed_recving=set())
    return ModelRunnerOutput(req_ids=[], req_id_to_index={}, kv_connector_output=part)


def _empty_steps(one: Any, world: int) -> Any:
    # both replace an output's part by the joined one, so that each call needs its own first output
    outputs = [_output(set()) for _ in range(world)]
    times = max(3, 2000 // world)

    def measure() -> float:
        firsts = [_output(set()) for _ in range(times)]
        start = time.thread_time()
        for first in firsts:
            outputs[0] = first
            one.aggregate(outputs)
        return (time.thread_time() - start) / times * MICRO

    return measure


def _ending(one: Any, world: int) -> Any:
    count = iter(range(10**9))

    def measure() -> float:
        ids = {f"x{next(count)}" for _ in range(ENDED)}
        outputs = [_output(set(ids)) for _ in range(world)]
        start = time.thread_time()
        joined = one.aggregate(outputs)
        spent = time.thread_time() - start
        assert joined.kv_connector_output.finished_sending == ids
        return spent / ENDED * MICRO

    return measure
