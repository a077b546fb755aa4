"""Whole engines of :mod:`tests.nixl.geometries`: a scheduler half, a worker half per rank with that rank's memory, the
real aggregator. What the worker halves do with their transport is written down."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from kvconn.aggregator import KVOutputAggregator
from kvconn.base import ConnectorRole, FinishReason, KVBlocks, KVCacheView, LayerView, RequestView, StepRequest
from kvconn.config import ConnectorConfig, ModelView, parse_kv_transfer_config
from kvconn.geometry import place_of
from kvconn.metrics import Stats
from kvconn.nixl.connector import NixlConnector
from kvconn.nixl.fence import WORD
from kvconn.nixl.wire import Done, parse_notification
from kvconn.transport.base import Transport
from tests.nixl.geometries import PART, Engine, Rank
from tests.nixl.test_token_positions import Load
from tests.sim.tables import left_over
from tests.support import Side, free_port

__all__ = ["Noted", "Whole"]


class Noted:
    """A transport; what it was asked for, in order: ("read", handle, peer, address there, bytes) and ("quiet", handle);
    and what it was told: (sender, message)."""

    def __init__(self, inner: Transport) -> None:
        self._inner = inner
        self.asked: list[tuple[Any, ...]] = []
        self.told: list[tuple[str, bytes]] = []
        self.memory: Rank | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def post_read(self, peer: str, local: Any, remote: Any, **kwargs: Any) -> int:
        handle = self._inner.post_read(peer, local, remote, **kwargs)
        self.asked.append(("read", handle, peer, int(remote[0][0]), int(local[:, 1].sum())))
        assert self.memory is not None
        first, size = self.memory.bytes.ctypes.data, len(self.memory.bytes)
        for address, length in local.tolist():
            if first <= address < first + size:
                assert address + length <= first + size
                self.memory.written[address - first : address - first + length] += 1
        return handle

    def release(self, handle: int) -> None:
        self.asked.append(("quiet", handle))
        self._inner.release(handle)

    def notifications(self) -> list[tuple[str, bytes]]:
        came = self._inner.notifications()
        self.told += came
        return came


class Whole(Side):
    """One engine. ``tables``: a request's blocks by cache group."""

    def __init__(
        self,
        name: str,
        engine: Engine,
        transfer: dict[str, Any],
        fill: int,
        clock: Callable[[], float],
        make_transport: Callable[[], Transport],
    ) -> None:
        self.name, self.poll, self.engine = name, "get_transfer_results", engine
        parallel = engine.parallel
        self.ranks = range(parallel.world)
        self.memory = [Rank(engine, place_of(parallel, rank), fill) for rank in self.ranks]
        self.kv_cache = KVCacheView(engine.blocks, engine.span, engine.views)
        model = ModelView(
            "m", "uint8", engine.layers, engine.heads, PART, engine.block, "latent" if engine.kv == "latent" else "kv"
        )
        parsed = parse_kv_transfer_config(transfer)

        def half(role: ConnectorRole, rank: int | None, make: Callable[[], Any] = make_transport) -> NixlConnector:
            config = ConnectorConfig(parsed, name, parallel, model, rank=rank, port=self.port)
            return NixlConnector(config, role, self.kv_cache, clock=clock, make_transport=make)

        self.port = free_port()
        self.noted = [Noted(make_transport()) if self._has_agent(rank) else None for rank in self.ranks]
        self.workers = []
        for rank, noted, memory in zip(self.ranks, self.noted, self.memory, strict=True):
            worker = half(ConnectorRole.WORKER, rank, lambda noted=noted: noted)  # type: ignore[misc]
            if noted is not None:
                noted.memory = memory
            worker.register_kv_caches(dict(self._layers(memory)))
            self.workers.append(worker)
        self.scheduler = half(ConnectorRole.SCHEDULER, None)
        published = {
            (place_of(parallel, rank).pp, place_of(parallel, rank).tp): metadata
            for rank, worker in enumerate(self.workers)
            if (metadata := worker.get_handshake_metadata()) is not None
        }
        if published:
            self.scheduler.set_handshake_metadata(published)
        self.aggregator = KVOutputAggregator.from_connector(self.scheduler, parallel.world)
        self.seq, self.stats, self.reasons = 0, Stats(), {}
        self.rank_results, self.sent, self.received, self.failed = [], [], [], []

    def _has_agent(self, rank: int) -> bool:
        """Replicas have none."""
        return rank // self.engine.tp % self.engine.replicas == 0

    def _layers(self, memory: Rank) -> Iterator[tuple[str, LayerView]]:
        for number, region in enumerate(memory.regions):
            at = region.base - memory.BASE + memory.bytes.ctypes.data
            kind = self.engine.groups[region.group].kind
            yield (
                f"{region.name}/{number}",
                LayerView(
                    region.name, at, region.stride, region.length, region.count, region.group, kind, cells=region.cells
                ),
            )

    # -- a request -----------------------------------------------------------------------------------------------

    def prefilled(self, id: str, load: Load) -> dict[str, Any]:
        """Compute a prompt on every rank. Returns its reference."""
        tables = load.table(self.engine, "P")
        blocks = tuple(map(tuple, tables))
        view = self._view(id, load.tokens, load.tokens + 1, {"do_remote_decode": True})
        self.scheduler.on_new_request(view)
        self.step(requests=(StepRequest(id, 0, load.tokens, blocks),))
        for memory in self.memory:
            memory.write(tables, load.tokens)
        delayed, params = self.scheduler.request_finished(view, blocks, FinishReason.LENGTH)
        assert delayed and params is not None
        self.aggregator.expect("send", id)
        return params

    def begin(self, id: str, load: Load, params: dict[str, Any]) -> RequestView:
        """A request with this reference has blocks. A state needs a token behind it."""
        n_prompt = load.tokens + any(group.kind == "state" for group in self.engine.groups)
        view = self._view(id, n_prompt, n_prompt, params)
        self.scheduler.on_new_request(view)
        n, _ = self.scheduler.get_num_new_matched_tokens(view, max(load.hits) * self.engine.span)
        assert n == load.tokens - max(load.hits) * self.engine.span
        if n:
            self.aggregator.expect("recv", id)
        ids = tuple(map(tuple, load.table(self.engine, "D")))
        self.scheduler.update_state_after_alloc(view, KVBlocks(ids, load.hits), n)
        return view

    def _view(self, id: str, n_prompt: int, n_total: int, params: dict[str, Any]) -> RequestView:
        return RequestView(id, n_prompt, n_total, params, lambda: tuple(range(n_total)))

    # -- what must be so -----------------------------------------------------------------------------------------

    def done_words(self, rank: int) -> list[tuple[str, int]]:
        """Who told this rank that it is done, and of how many."""
        noted = self.noted[rank]
        parsed = [(sender, parse_notification(message)) for sender, message in (noted.told if noted else ())]
        return [(sender, one.readers) for sender, one in parsed if isinstance(one, Done)]

    def check_fences(self, rank: int, fences: dict[str, range]) -> set[str]:
        """Of every agent that was read, its fence word was, when all data was quiet. Returns these agents."""
        noted = self.noted[rank]
        assert noted is not None
        data, words = {}, {}
        for at, (what, handle, *more) in enumerate(noted.asked):
            if what == "read":
                peer, there, nbytes = more
                (words if nbytes == WORD and there in fences[peer] else data)[handle] = at, peer
        quiet = {handle: at for at, (what, handle, *_) in enumerate(noted.asked) if what == "quiet"}
        assert quiet.keys() == data.keys() | words.keys()
        read = {peer for _, peer in data.values()}
        assert {peer for _, peer in words.values()} == read
        assert max((quiet[handle] for handle in data), default=-1) < min((at for at, _ in words.values()), default=0)
        return read

    @property
    def fences(self) -> dict[str, range]:
        """Addresses of fence words by agent."""
        found = {}
        for worker, noted in zip(self.workers, self.noted, strict=True):
            if noted is not None:
                fence = worker.worker._fence  # type: ignore[attr-defined]
                found[noted.name] = range(fence.address, fence.address + fence.size * WORD)
        return found

    def check_empty(self) -> None:
        assert self.aggregator.pending() == []
        for half in (self.scheduler, *self.workers):
            assert half.explain(0.0) == []  # type: ignore[attr-defined]
            #: a side channel keeps what it publishes, and bounded counts of who asked
            left = [line for line in left_over(half) if "._server." not in line]
            assert left == [], left
