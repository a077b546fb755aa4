"""A real vLLM engine, as ``tests.vllm.child`` drives one, that notes when a request gets where.

Only for one request at a time. The first of each stamp stands, but of ``computed`` the last. What is wrapped is vLLM's
own, so that stamps mean the same whose connector it is.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from tests.vllm import child

__all__: list[str] = []

#: vLLM's core rests this long after a step without tokens (``EngineCoreProc._process_engine_step``), the child half
EMPTY_STEP, CHILDS = 1e-3, 0.5e-3


class Stamped(child.Child):
    def __init__(self, arguments: dict[str, Any]) -> None:
        super().__init__(arguments)
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        self.at: dict[str, float] = {}
        self._ran = False
        worker, runner = get_kv_transfer_group(), self.core.model_executor.driver_worker.worker.model_runner
        _wrap(self.scheduler.connector, "update_state_after_alloc", after=lambda *_: self._first("admitted"))
        _wrap(worker, "start_load_kv", after=lambda *_: "admitted" in self.at and self._first("posted"))
        _wrap(worker, "get_transfer_results", after=lambda got, *_: got.finished_recving and self._first("reported"))
        _wrap(runner, "execute_model", before=self._forward)
        _wrap(runner, "sample_tokens", after=lambda *_: self.at.update(computed=time.perf_counter()))

    def _first(self, stamp: str) -> None:
        self.at.setdefault(stamp, time.perf_counter())

    def _forward(self, output: Any, *_: Any, **__: Any) -> None:
        if output.total_num_scheduled_tokens:
            self._ran = True
            self._first("forward")

    def submit(self, ticket: int, requests: list[dict[str, Any]]) -> None:
        self.at = {"added": time.perf_counter()}
        super().submit(ticket, requests)

    def step(self) -> None:
        self._ran = False
        super().step()
        if not self._ran and self.scheduler.has_requests():
            time.sleep(EMPTY_STEP - CHILDS)

    def _note(self, output: Any) -> None:
        self._first("token")
        super()._note(output)

    def stamps(self) -> dict[str, float]:
        """An order: of the last request, in seconds of ``time.perf_counter``, which processes of one host share."""
        return self.at


def _wrap(owner: Any, name: str, before: Callable[..., object] | None = None, after: Any = None) -> None:
    method = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if before is not None:
            before(*args, **kwargs)
        got = method(*args, **kwargs)
        if after is not None:
            after(got)
        return got

    setattr(owner, name, wrapped)


if __name__ == "__main__":
    child.Child = Stamped  # type: ignore[misc]
    child.main()
