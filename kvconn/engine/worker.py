"""One rank: model, cache, the connector's worker half, in a process of its own.

Rules
1. The connector is called in vLLM's order: handle_preemptions, bind_connector_metadata, the forward with its layer
   hooks, start_load_kv, wait_for_save, the poll, stats, worker metadata, clear_connector_metadata. Asynchronous loads
   start after the forward; a step with a synchronous one calls start_load_kv before it instead. An empty step is the
   same without the forward.
2. A worker obeys one pipe and ends with it: end of file, or the death of its parent, is its end.
3. What goes wrong here is told to the engine, a ConfigError as its problems, all else as text; the engine ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import hashlib
import logging
import math
import os
import signal
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import torch

from kvconn.base import ConnectorMetadata, ConnectorRole, KVConnector, KVConnectorOutput, LayerView
from kvconn.config import ConnectorConfig, KVTransferConfig
from kvconn.engine.config import EngineConfig, cache_groups, kv_cache_view, layer_names, model_view
from kvconn.engine.content import ContentAddressed
from kvconn.engine.model import Model, make_model
from kvconn.engine.portion import Portion
from kvconn.engine.ranks import connect
from kvconn.engine.scheduler import Step
from kvconn.errors import ConfigError
from kvconn.explain import ExplainServer
from kvconn.factory import get_connector_class

__all__ = ["WorkerOutput", "connector_config", "die_with_parent", "freeze_heap", "worker_main"]

_PR_SET_PDEATHSIG = 1


@dataclass
class WorkerOutput:
    """One rank's answer to one step."""

    tokens: dict[str, int] = field(default_factory=dict)
    kv_connector_output: KVConnectorOutput | None = None
    min_margin: float = math.inf


class Worker:
    """One rank's step loop body."""

    def __init__(self, config: EngineConfig, transfer: KVTransferConfig | None, engine_id: str, rank: int) -> None:
        self._config = config
        torch.set_num_threads(1)
        self._ranks = connect(config.parallel, rank, config.store, config.step_timeout)
        self._model: Model = make_model(config, self._ranks)
        portion = self._portion = Portion.of(config.model, config.parallel, rank)
        self._groups = cache_groups(config.model)
        self._names = layer_names(config.model)[portion.first_layer : portion.first_layer + portion.n_layers]
        self._connector: KVConnector | None = None
        self._explains: ExplainServer | None = None
        if transfer is not None:
            cls: Any = get_connector_class(transfer)
            self._connector = cls(
                connector_config(config, transfer, engine_id, rank), ConnectorRole.WORKER, kv_cache_view(config)
            )
            self._register()
            connector: Any = self._connector
            self._explains = ExplainServer(connector.explain, connector.__repr__, engine_id, "worker", rank)

    def _register(self) -> None:
        layers = {}
        for name, cache, group in zip(self._names, self._model.caches, self._portion.groups, strict=True):
            stride, kind, at = cache[0].nbytes, self._groups[group].kind, cache.data_ptr()
            lengths = [stride] if kind != "state" else self._portion.state_bytes(self._config.model)
            for number, length in enumerate(lengths):
                layers[f"{name}/{number}" if number else name] = LayerView(
                    name, at, stride, length, len(cache), group, kind
                )
                at += length
        if self._connector is not None:
            self._connector.register_kv_caches(layers)

    def handshake(self) -> Any:
        """What this rank publishes."""
        return self._connector.get_handshake_metadata() if self._connector is not None else None

    def step(self, step: Step, metadata: ConnectorMetadata | None) -> WorkerOutput:
        """Rule 1."""
        connector = self._connector
        if connector is None or metadata is None:
            return self._output(self._forward(step), None)
        connector.handle_preemptions(metadata)
        connector.bind_connector_metadata(metadata)
        if step.loads_first:
            connector.start_load_kv()
        tokens = self._forward(step)
        if not step.loads_first:
            connector.start_load_kv()
        connector.wait_for_save()
        results = connector.get_transfer_results(set(step.view.finished))
        part = KVConnectorOutput(
            finished_sending=set(results.finished_sending) or None,
            finished_recving=set(results.finished_recving) or None,
            failed_recving=set(results.failed_recving) or None,
            invalid_block_ids=connector.get_block_ids_with_load_errors(),
            kv_connector_stats=connector.get_kv_connector_stats(),
            kv_connector_worker_meta=connector.build_connector_worker_meta(),
        )
        connector.clear_connector_metadata()
        return self._output(tokens, part)

    def _forward(self, step: Step) -> dict[str, int]:
        if isinstance(self._model, ContentAddressed):  # before the forward: an id may be back in the step that ends it
            self._model.forget(step.view.finished)
        if not step.requests:
            return {}
        return self._model.forward(step.requests, self._before_layer, self._after_layer)

    def _before_layer(self, index: int) -> None:
        if self._connector is not None:
            self._connector.wait_for_layer_load(self._names[index])

    def _after_layer(self, index: int) -> None:
        if self._connector is not None:
            self._connector.save_kv_layer(self._names[index])

    def _output(self, tokens: dict[str, int], part: KVConnectorOutput | None) -> WorkerOutput:
        return WorkerOutput(tokens, part, self._model.min_margin)

    def digest(self, blocks: Sequence[int]) -> str:
        """sha256 over these blocks' bytes in every layer. For tests: equal on all replicas."""
        digest = hashlib.sha256()
        for cache in self._model.caches:
            digest.update(cache[list(blocks)].contiguous().view(torch.int64).numpy().tobytes())
        return digest.hexdigest()

    def close(self) -> None:
        if self._explains is not None:
            self._explains.close()
        if self._connector is not None:
            self._connector.shutdown()
        self._ranks.close()


def connector_config(
    config: EngineConfig, transfer: KVTransferConfig, engine_id: str, rank: int | None
) -> ConnectorConfig:
    """What a connector half of this engine is constructed from."""
    return ConnectorConfig(
        kv_transfer=transfer,
        engine_id=engine_id,
        parallel=config.parallel,
        model=model_view(config),
        rank=rank,
        host=config.host,
        port=config.port,
    )


def worker_main(
    config: EngineConfig, transfer: KVTransferConfig | None, engine_id: str, rank: int, pipe: Connection
) -> None:
    """Body of a worker process: orders in, answers out, until the pipe ends or says stop."""
    die_with_parent()
    for told in (signal.SIGINT, signal.SIGTERM):
        signal.signal(told, signal.SIG_IGN)  # the engine decides when a worker ends
    os.environ.update(config.env)
    logging.basicConfig(level=logging.WARNING, format=f"{config.name} rank {rank}: %(message)s")
    worker: Worker | None = None
    try:
        worker = Worker(config, transfer, engine_id, rank)
        freeze_heap()
        pipe.send((True, None))
        _obey(worker, pipe)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the engine is gone
    except Exception as err:  # noqa: BLE001 - whatever it is, the engine must hear of it
        _tell(pipe, err)
    finally:
        if worker is not None:
            worker.close()
        pipe.close()


def _obey(worker: Worker, pipe: Connection) -> None:
    while True:
        order, args = pipe.recv()
        if order == "stop":
            return
        pipe.send((True, getattr(worker, order)(*args)))


def _tell(pipe: Connection, err: Exception) -> None:
    told = err.problems if isinstance(err, ConfigError) else "".join(traceback.format_exception(err))
    with contextlib.suppress(OSError):
        pipe.send((False, told))


def freeze_heap() -> None:
    """What start-up made stays: to look through all of torch again stops a step for 80 ms."""
    gc.freeze()


def die_with_parent() -> None:
    """Ask Linux to kill this process when its parent ends, however it ends; elsewhere the pipe's end must do."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
