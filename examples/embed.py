"""Two engines' worth of connector halves in one process: what an engine must call, in the order it must call it.

Run it: ``python examples/embed.py``. The "engines" here have one worker, no scheduler and no model: just the calls.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

import kvconn
from kvconn import ConnectorRole, FinishReason, GroupView, KVBlocks, KVCacheView, LayerView, RequestView, StepRequest

BLOCK_SIZE, ROW, BLOCKS = 16, 64, 32  # tokens, bytes per token and layer, blocks in the pool


class Engine:
    """One worker, one scheduler half, the aggregator between them."""

    def __init__(self, name: str, transfer: dict[str, Any], port: int) -> None:
        parsed = kvconn.parse_kv_transfer_config(transfer)  # every problem at once, with the path of its key
        cls: Any = kvconn.get_connector_class(parsed)
        view = KVCacheView(BLOCKS, BLOCK_SIZE, (GroupView("full", ("layer.0",)),))
        model = kvconn.ModelView("my-model", "uint8", 1, 1, ROW, BLOCK_SIZE)
        config = kvconn.ConnectorConfig(parsed, name, kvconn.ParallelConfig(), model, rank=0, port=port)
        self.cache = np.zeros((BLOCKS, BLOCK_SIZE * ROW), np.uint8)
        self.worker = cls(config, ConnectorRole.WORKER, view)
        length = self.cache.strides[0]
        self.worker.register_kv_caches(
            {"layer.0": LayerView("layer.0", self.cache.ctypes.data, length, length, BLOCKS)}
        )
        self.scheduler = cls(config, ConnectorRole.SCHEDULER, view)
        published = self.worker.get_handshake_metadata()
        if published is not None:
            self.scheduler.set_handshake_metadata({(0, 0): published})  # by (pp rank, tp rank); starts to listen
        self.aggregator = kvconn.KVOutputAggregator.from_connector(self.scheduler, world=1)
        self.seq = 0

    def step(self, *requests: StepRequest) -> kvconn.KVConnectorOutput:
        """One step, also an empty one: metadata out, forward, poll, aggregate, filter."""
        self.seq += 1
        metadata = self.scheduler.build_connector_meta(kvconn.StepView(self.seq, requests))
        self.worker.handle_preemptions(metadata)
        self.worker.bind_connector_metadata(metadata)
        # ... the forward pass writes the cache here ...
        self.worker.start_load_kv()
        self.worker.wait_for_save()
        results = self.worker.get_transfer_results(set())
        output = kvconn.KVConnectorOutput(
            finished_sending=set(results.finished_sending),
            finished_recving=set(results.finished_recving),
            failed_recving=set(results.failed_recving),
            kv_connector_worker_meta=self.worker.build_connector_worker_meta(),
        )
        self.worker.clear_connector_metadata()
        joined = self.aggregator.aggregate([_Output(output)]).kv_connector_output
        self.scheduler.update_connector_output(joined)  # before the engine reads the sets
        return joined

    def close(self) -> None:
        self.worker.shutdown()
        self.scheduler.shutdown()


class _Output:
    """A worker's output of one step; an aggregator wants this one attribute."""

    def __init__(self, part: kvconn.KVConnectorOutput) -> None:
        self.kv_connector_output = part


def main(p_port: int = 5611, d_port: int = 5612) -> tuple[bool, set[str]]:
    """Returns whether the bytes arrived, and what P may free."""
    p = Engine("P", {"kv_connector": "NixlConnector", "kv_role": "kv_producer"}, p_port)
    d = Engine("D", {"kv_connector": "NixlConnector", "kv_role": "kv_consumer"}, d_port)
    try:
        prompt = 3 * BLOCK_SIZE
        asked = RequestView("a", prompt, prompt + 1, {"do_remote_decode": True})
        p.scheduler.on_new_request(asked)
        p.step(StepRequest("a", 0, prompt, ((4, 5, 6),)))  # the request's first scheduled step
        p.cache[[4, 5, 6]] = 7
        hold, params = p.scheduler.request_finished(asked, ((4, 5, 6),), FinishReason.LENGTH)
        assert hold
        p.aggregator.expect("send", "a")  # its blocks stay until "a" is emitted as sent

        loading = RequestView("b", prompt, prompt, params)
        d.scheduler.on_new_request(loading)
        external, _ = d.scheduler.get_num_new_matched_tokens(loading, 0)
        d.aggregator.expect("recv", "b")  # its blocks are the load's until "b" is emitted as received
        d.scheduler.update_state_after_alloc(loading, KVBlocks(((1, 2, 3),), (0,)), external)
        received: set[str] = set()
        freed: set[str] = set()
        deadline = time.monotonic() + 30
        while not (received and freed) and time.monotonic() < deadline:
            received |= d.step().finished_recving or set()
            freed |= p.step().finished_sending or set()
        return bool((d.cache[[1, 2, 3]] == 7).all()), freed
    finally:
        d.close()
        p.close()


if __name__ == "__main__":
    arrived, freed = main()
    print(f"bytes arrived: {arrived}; P may free: {', '.join(sorted(freed)) or 'nothing'}")
