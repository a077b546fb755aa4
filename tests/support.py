"""One shared helper: whole engines' worth of connector halves, without an engine, over real caches and transports.

A :class:`Side` is one engine: a scheduler half, one worker half per rank with its own cache in this process's memory,
the real aggregator between them, and :meth:`Side.step`, which calls both halves in an engine's order.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import msgspec
import numpy as np

from kvconn.aggregator import KVOutputAggregator
from kvconn.base import (
    BlockIds,
    Cells,
    ConnectorRole,
    FinishReason,
    GroupView,
    KVBlocks,
    KVCacheView,
    KVConnector,
    KVConnectorOutput,
    LayerView,
    RequestView,
    StepRequest,
    StepView,
)
from kvconn.config import ConnectorConfig, ModelView, ParallelConfig, parse_kv_transfer_config
from kvconn.engine.ports import free_ports
from kvconn.factory import get_connector_class
from kvconn.geometry import HeadShare, Share, TokenShare, place_of
from kvconn.metrics import Stats
from kvconn.nixl.handshake import side_of

BLOCK_SIZE = 16
ROW = 64  # bytes per token and layer
LAYERS = ("layers.0.kv", "layers.1.kv")


def free_port() -> int:
    """A port nobody listens on right now, and that no outgoing connection will be given."""
    return free_ports(1)[0]


def wait_until(condition: Callable[[], bool], seconds: float = 20.0, what: str = "condition") -> None:
    """Poll ``condition`` until it holds; AssertionError at the deadline."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not within {seconds} s")
        time.sleep(0.001)


NIXL_PRODUCER = {"kv_connector": "NixlConnector", "kv_role": "kv_producer"}
NIXL_CONSUMER = {"kv_connector": "NixlConnector", "kv_role": "kv_consumer"}


def multi(*children: dict[str, Any], role: str = "kv_producer") -> dict[str, Any]:
    """A MultiConnector's kv_transfer_config around ``children``."""
    return {
        "kv_connector": "MultiConnector",
        "kv_role": role,
        "kv_connector_extra_config": {"connectors": list(children)},
    }


def offload_hold(cpu_bytes: int = 1 << 20) -> dict[str, Any]:
    """The sibling that holds every request on every rank."""
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_bytes_to_use": cpu_bytes, "kvconn": {"hold": True}},
    }


COMPOSITIONS = {
    "alone": NIXL_PRODUCER,
    "in Multi": multi(NIXL_PRODUCER, offload_hold()),
    "nested": multi(multi(NIXL_PRODUCER, offload_hold()), offload_hold()),
}


class _Output:
    """A worker's output of one step, as an aggregator wants it."""

    def __init__(self, part: KVConnectorOutput | None) -> None:
        self.kv_connector_output = part


class Side:
    """One engine's connector halves. ``get_poll`` names the poll its workers are asked with."""

    def __init__(
        self,
        name: str,
        transfer: dict[str, Any],
        *,
        pcp: int = 1,
        parallel: ParallelConfig | None = None,
        heads: int = 1,
        block_size: int = BLOCK_SIZE,
        tokens_first: bool = False,
        groups: tuple[GroupView, ...] = (GroupView("full", LAYERS),),
        num_blocks: int = 32,
        port: int | None = None,
        host: str = "127.0.0.1",
        poll: str = "get_transfer_results",
        make: Callable[..., KVConnector] | None = None,
        **kwargs: Any,
    ) -> None:
        self.name = name
        self.poll = poll
        self.tokens_first = tokens_first
        parallel = parallel or ParallelConfig(pcp=pcp)
        self.ranks = range(parallel.world)
        parsed = parse_kv_transfer_config(transfer)
        cls = make or get_connector_class(parsed)
        if parsed.kv_connector == "MultiConnector" and kwargs:
            kwargs["make_child"] = partial(_make_child, dict(kwargs))
        #: tokens of a block id, and of a block on one rank
        self.block_tokens, self.block_size = block_size * parallel.dcp, block_size
        self.kv_cache = KVCacheView(num_blocks, self.block_tokens, groups, len(LAYERS) * block_size * ROW)
        self.config = ConnectorConfig(
            kv_transfer=parsed,
            engine_id=name,
            parallel=parallel,
            model=ModelView(
                "m", "uint8", len(LAYERS), heads, ROW, block_size, packing="latent" if heads == 1 else "kv"
            ),
            host=host,
            port=port or free_port(),
        )
        self.parts = [_Part.of(self.config, rank) for rank in self.ranks]
        self.caches = [
            {name: np.zeros((num_blocks, part.heads.count * block_size * ROW), np.uint8) for name in part.layers}
            for part in self.parts
        ]
        self.workers: list[KVConnector] = []
        for rank in self.ranks:
            config = _with_rank(self.config, rank)
            worker = cls(config, ConnectorRole.WORKER, self.kv_cache, **kwargs)
            worker.register_kv_caches({n: self._layer(rank, n) for n in self.caches[rank]})
            self.workers.append(worker)
        self.scheduler: KVConnector = cls(self.config, ConnectorRole.SCHEDULER, self.kv_cache, **kwargs)
        published = {
            msgspec.structs.astuple(place_of(parallel, rank)): metadata
            for rank, worker in enumerate(self.workers)
            if (metadata := worker.get_handshake_metadata()) is not None
        }
        self.published = len(published)
        if published:
            self.scheduler.set_handshake_metadata(published)
        self.aggregator = KVOutputAggregator.from_connector(self.scheduler, parallel.world)
        self.seq = 0
        self.rank_results: list[tuple[set[str], set[str], set[str]]] = []
        self.stats = Stats()
        self.sent: list[str] = []
        self.received: list[str] = []
        self.failed: list[str] = []
        self.reasons: dict[str, str] = {}

    def step(self, finished: tuple[str, ...] = (), requests: tuple[StepRequest, ...] = ()) -> KVConnectorOutput:
        """One empty step of the engine: metadata out, every rank polled, the answer aggregated and filtered."""
        self.seq += 1
        meta = self.scheduler.build_connector_meta(StepView(self.seq, requests, finished=finished))
        return self.finish_step([self.rank_step(rank, meta, finished) for rank in self.ranks])

    def rank_step(self, rank: int, meta: Any, finished: tuple[str, ...] = ()) -> _Output:
        """What one worker does around a step."""
        worker = self.workers[rank]
        worker.handle_preemptions(meta)
        worker.bind_connector_metadata(meta)
        worker.start_load_kv()
        worker.wait_for_save()
        part = KVConnectorOutput()
        if self.poll == "get_finished":
            part.finished_sending, part.finished_recving = worker.get_finished(set(finished))
        else:
            results = worker.get_transfer_results(set(finished))
            part.finished_sending = set(results.finished_sending)
            part.finished_recving = set(results.finished_recving)
            part.failed_recving = set(results.failed_recving)
        part.kv_connector_stats = worker.get_kv_connector_stats()
        part.kv_connector_worker_meta = worker.build_connector_worker_meta()
        worker.clear_connector_metadata()
        return _Output(part)

    def finish_step(self, outputs: list[_Output]) -> KVConnectorOutput:
        """Aggregate and filter one step's outputs, remembering what was emitted."""
        self.rank_results = [
            (
                o.kv_connector_output.finished_sending or set(),
                o.kv_connector_output.finished_recving or set(),
                o.kv_connector_output.failed_recving or set(),
            )
            for o in outputs
            if o.kv_connector_output is not None
        ]
        part: KVConnectorOutput = self.aggregator.aggregate(outputs).kv_connector_output
        self.scheduler.update_connector_output(part)
        for stats in (part.kv_connector_stats, self.scheduler.get_kv_connector_stats()):
            self.stats = self.stats if stats is None else self.stats.aggregate(stats)
        self.sent += sorted(part.finished_sending or ())
        self.received += sorted(part.finished_recving or ())
        self.failed += sorted(part.failed_recving or ())
        self.reasons |= part.failure_reasons
        return part

    def prefill(
        self, id: str, blocks: list[int], seed: int, *, remote: bool = True, n_tokens: int | None = None, **extra: Any
    ) -> dict[str, Any] | None:
        """Schedule a prompt, pretend to compute it into ``blocks`` on every rank, finish it. Returns its params."""
        n_tokens = n_tokens or len(blocks) * self.block_tokens
        self.write(blocks, seed)
        params = {"do_remote_decode": remote, **extra}
        view = RequestView(id, n_tokens, n_tokens + 1, params, block_hashes=lambda: _hashes(seed, len(blocks)))
        self.scheduler.on_new_request(view)
        self.step(requests=(StepRequest(id, 0, n_tokens, self._tables(blocks)),))
        delayed, params = self.scheduler.request_finished(view, self._tables(blocks), FinishReason.LENGTH)
        if delayed:
            self.aggregator.expect("send", id)
        return params

    def _tables(self, blocks: list[int]) -> BlockIds:
        return (tuple(blocks),) * len(self.kv_cache.groups)

    def write(self, blocks: list[int], seed: int) -> None:
        """Fill ``blocks`` on every rank with the bytes of ``seed``."""
        for rank in self.ranks:
            for name, content in self.content(rank, seed, len(blocks)).items():
                self.caches[rank][name][blocks] = content.reshape(len(blocks), -1)

    def content(self, rank: int, seed: int, blocks: int) -> dict[str, Any]:
        """What the first ``blocks`` blocks of ``seed`` are on this rank, by layer: (blocks, heads, tokens, ROW), or
        tokens before heads."""
        part = self.parts[rank]
        heads = slice(part.heads.first, part.heads.first + part.heads.count)
        positions = part.positions(blocks * self.block_size)
        out = {}
        for name in part.layers:
            kv = pattern(seed, LAYERS.index(name), blocks * self.block_tokens, self.config.model.num_kv_heads)
            mine = kv[positions][:, heads].reshape(blocks, self.block_size, part.heads.count, ROW)
            out[name] = mine if self.tokens_first else mine.swapaxes(1, 2)
        return out

    def _layer(self, rank: int, name: str) -> LayerView:
        array, heads, groups = self.caches[rank][name], self.parts[rank].heads.count, self.kv_cache.groups
        group = next(index for index, group in enumerate(groups) if name in group.layers)
        cells = Cells(heads, self.block_size, ROW, ROW, heads * ROW) if self.tokens_first else None
        return LayerView(
            name, array.ctypes.data, array.strides[0], array.shape[1], array.shape[0], group, groups[group].kind,
            cells=cells,
        )  # fmt: skip

    def load(
        self,
        id: str,
        params: dict[str, Any] | None,
        blocks: list[int],
        hits: int = 0,
        tokens: tuple[int, ...] = (),
        n_tokens: int | None = None,
    ) -> RequestView:
        """Admit a request with ``params`` whose block table is ``blocks``, the first ``hits`` of them local hits."""
        n_tokens = n_tokens or len(blocks) * self.block_tokens
        view = RequestView(id, n_tokens, n_tokens, params, lambda: tokens)
        self.scheduler.on_new_request(view)
        n, _ = self.scheduler.get_num_new_matched_tokens(view, hits * self.block_tokens)
        if n:
            self.aggregator.expect("recv", id)
        table = KVBlocks(self._tables(blocks), (hits,) * len(self.kv_cache.groups))
        self.scheduler.update_state_after_alloc(view, table, n or 0)
        return view

    def holds(self, blocks: list[int], seed: int, start: int = 0, n_tokens: int | None = None) -> bool:
        """True when ``blocks`` hold the bytes of :meth:`prefill` with ``seed`` from block ``start`` on, everywhere.

        ``n_tokens``: only so many of the prompt's first, of a window its last ones.
        """
        end = n_tokens or (start + len(blocks)) * self.block_tokens
        windows = {name: group.window for group in self.kv_cache.groups for name in group.layers}
        for rank in self.ranks:
            positions = self.parts[rank].positions((start + len(blocks)) * self.block_size)[start * self.block_size :]
            for name, content in self.content(rank, seed, start + len(blocks)).items():
                first = max(0, end - (windows[name] or end))
                seen = ((positions >= first) & (positions < end)).reshape(len(blocks), self.block_size, 1)
                there = self.caches[rank][name][blocks].reshape(content[start:].shape)
                if ((there != content[start:]) & (seen[..., None] if self.tokens_first else seen[:, None])).any():
                    return False
        return True

    def close(self) -> None:
        for connector in (*self.workers, self.scheduler):
            connector.shutdown()


def pattern(seed: int, layer: int, tokens: int, heads: int = 1) -> Any:
    """Bytes nobody else writes: shape (tokens, heads, ROW)."""
    rng = np.random.default_rng((seed, layer))
    return rng.integers(0, 256, (tokens, heads, ROW), dtype=np.uint8)


def blocks_of(seed: int, layer: int, blocks: int) -> Any:
    """The same of one head, shape (blocks, bytes of a block)."""
    return pattern(seed, layer, blocks * BLOCK_SIZE).reshape(blocks, -1)


class _Part(msgspec.Struct, frozen=True):
    """What one rank keeps of a prompt."""

    layers: tuple[str, ...]
    heads: HeadShare
    tokens: TokenShare

    @classmethod
    def of(cls, config: ConnectorConfig, rank: int) -> _Part:
        place = place_of(config.parallel, rank)
        share = Share.of(side_of(config), place.tp)
        assert share is not None
        per_stage = -(-len(LAYERS) // config.parallel.pp)
        return cls(LAYERS[place.pp * per_stage : (place.pp + 1) * per_stage], share.heads, share.tokens)

    def positions(self, n: int) -> Any:
        """Where in the prompt the first ``n`` tokens of this rank are."""
        turn, within = np.divmod(np.arange(n), self.tokens.interleave)
        return (turn * self.tokens.dcp + self.tokens.rank) * self.tokens.interleave + within


def _hashes(seed: int, blocks: int) -> list[bytes]:
    return [f"{seed}:{index}".encode() for index in range(blocks)]


def _make_child(kwargs: dict[str, Any], cls: Any, *args: Any) -> KVConnector:
    """A Multi's child on the same clock as the Multi, however deep."""
    if cls.__name__ == "MultiConnector":
        return cast(KVConnector, cls(*args, **kwargs, make_child=partial(_make_child, kwargs)))
    return cast(KVConnector, cls(*args, **kwargs))


def _with_rank(config: ConnectorConfig, rank: int) -> ConnectorConfig:
    return msgspec.structs.replace(config, rank=rank)
