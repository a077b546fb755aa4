"""One vLLM engine in this process, driven by JSON lines: orders on stdin, answers on the descriptor in ENGINE_FD.

The engine steps by itself whenever it has work, as a server's does, unless told to hold still. ``argv[1]`` is the
JSON of ``LLM``'s arguments.
"""

from __future__ import annotations

import hashlib
import json
import os
import select
import sys
from typing import Any


class Child:
    def __init__(self, arguments: dict[str, Any]) -> None:
        from vllm import LLM

        self.llm = LLM(**arguments)
        self.engine = self.llm.llm_engine
        self.core = self.engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.blocks: dict[str, list[list[int]]] = {}
        self.waiting: dict[str, tuple[int, dict[str, Any]]] = {}
        self.done: dict[int, list[dict[str, Any]]] = {}
        self.size: dict[int, int] = {}
        self.names: dict[str, str] = {}
        self.still = False

    # -- orders: each takes its arguments by name and answers something that JSON has ------------------------------

    def submit(self, ticket: int, requests: list[dict[str, Any]]) -> None:
        from vllm import SamplingParams

        self.size[ticket], self.done[ticket] = len(requests), []
        for k, one in enumerate(requests):
            id = one.get("id") or f"t{ticket}-{k}"
            extra = {"kv_transfer_params": one["params"]} if "params" in one else None
            sampling = SamplingParams(temperature=0, max_tokens=one["max_tokens"], ignore_eos=True, extra_args=extra)
            self.waiting[id] = (ticket, {"index": k, "id": id})
            self.engine.add_request(id, {"prompt_token_ids": one["prompt"]}, sampling)

    def abort(self, ids: list[str]) -> None:
        self.engine.abort_request(ids)

    def hold(self, on: bool) -> None:
        self.still = on

    def state(self) -> dict[str, Any]:
        pool = self.scheduler.kv_cache_manager.block_pool
        connector = self.scheduler.connector
        inner = getattr(connector, "inner", None)
        return {
            "free": pool.get_num_free_blocks(),
            "total": pool.num_gpu_blocks,
            "requests": sorted(self.scheduler.requests),
            "idle": not self.scheduler.has_requests(),
            "owed": inner.explain(0.0) if inner is not None else [],
            "connector": repr(connector),
        }

    def metrics(self) -> dict[str, float]:
        """Samples by name, labels summed, as a server's /metrics has them."""
        from prometheus_client import REGISTRY

        out: dict[str, float] = {}
        for family in REGISTRY.collect():
            for sample in family.samples:
                if not sample.name.endswith(("_bucket", "_created")):
                    out[sample.name] = out.get(sample.name, 0.0) + sample.value
        return out

    def reset(self) -> bool:
        return bool(self.llm.reset_prefix_cache())

    def digest(self, id: str | None = None, blocks: list[int] | None = None, count: int | None = None) -> str:
        """sha256 of the first ``count`` blocks of request ``id``, or of ``blocks``, over all layers."""
        ids = (blocks if blocks is not None else self.blocks[id or ""][0])[:count]
        out = hashlib.sha256()
        for cache in self._caches():
            out.update(cache[ids].contiguous().numpy().tobytes())
        return out.hexdigest()

    def _caches(self) -> list[Any]:
        return list(self.core.model_executor.driver_worker.worker.model_runner.kv_caches)

    def overwrite(self, blocks: list[int] | None = None) -> None:
        """These blocks, or all."""
        for cache in self._caches():
            cache[slice(None) if blocks is None else blocks] = 7.0

    def value(self, expression: str) -> str:
        return repr(eval(expression, {"child": self, "core": self.core, "scheduler": self.scheduler, "llm": self.llm}))

    # -- the loop ---------------------------------------------------------------------------------------------------

    def step(self) -> None:
        for output in self.engine.step():
            self._note(output)
        manager = self.scheduler.kv_cache_manager
        for id in self.scheduler.requests:
            ids = [list(group) for group in manager.get_block_ids(id)]
            if any(ids):
                self.blocks[id] = ids
                self.blocks[id.rsplit("-", 1)[0]] = ids  # without what the front end appended

    def _note(self, output: Any) -> None:
        if not output.finished:
            return
        ticket, answer = self.waiting.pop(output.request_id)
        one = output.outputs[0]
        answer.update(
            tokens=list(one.token_ids),
            params=output.kv_transfer_params,
            cached=output.num_cached_tokens,
            reason=str(one.finish_reason),
        )
        self.done[ticket].append(answer)

    def finished(self) -> list[int]:
        return [ticket for ticket, answers in self.done.items() if len(answers) == self.size[ticket]]

    def take(self, ticket: int) -> list[dict[str, Any]]:
        return sorted(self.done.pop(ticket), key=lambda answer: answer["index"])


def main() -> None:
    out = os.fdopen(int(os.environ["ENGINE_FD"]), "w", buffering=1)

    def say(**what: Any) -> None:
        out.write(json.dumps(what) + "\n")

    child = Child(json.loads(sys.argv[1]))
    say(ticket=0, answer="ready")
    rest = b""
    while True:
        busy = child.scheduler.has_requests() and not child.still
        if busy:
            child.step()
            for ticket in child.finished():
                say(ticket=ticket, answer=child.take(ticket))
        if not select.select([0], [], [], 0.0005 if busy else 0.05)[0]:
            continue
        chunk = os.read(0, 1 << 20)
        if not chunk:
            break
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            order = json.loads(line)
            name, ticket, arguments = order["order"], order["ticket"], order["arguments"]
            if name == "quit":
                child.engine.engine_core.shutdown()
                say(ticket=ticket, answer="bye")
                os._exit(0)
            if name == "submit":
                child.submit(ticket, **arguments)
            else:
                say(ticket=ticket, answer=getattr(child, name)(**arguments))


if __name__ == "__main__":
    main()
