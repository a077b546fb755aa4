"""Shared by the engine's tests: a scripted connector, and a scheduler driven by hand, step by step, without workers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from kvconn.base import (
    BlockIds,
    ConnectorMetadata,
    Direction,
    FinishReason,
    KVBlocks,
    KVConnector,
    KVConnectorOutput,
    RequestView,
    StepView,
    TransferResults,
)
from kvconn.engine.config import EngineConfig
from kvconn.engine.request import EngineRequest, Finished, FirstToken
from kvconn.engine.scheduler import Scheduler, Step

Answer = tuple[int | None, bool]
Event = FirstToken | Finished


class ScriptedConnector(KVConnector):
    """A scheduler half that answers from a script and writes down what it was asked.

    ``matches[id]`` is what is answered in turn, then nothing is matched; a function is called with the local tokens.
    ``holds`` are the ids whose release is delayed, with the params given to the client.
    """

    def __init__(
        self,
        matches: dict[str, list[Answer]] | Callable[[RequestView, int], Answer] | None = None,
        holds: dict[str, dict[str, Any] | None] | None = None,
    ) -> None:
        self.matches = matches if matches is not None else {}
        self.holds = holds or {}
        self.calls: list[tuple[Any, ...]] = []
        self.pending = False
        #: replaces an output before the scheduler reads it
        self.veto: Callable[[KVConnectorOutput], None] = lambda output: None

    def named(self, *names: str) -> list[tuple[Any, ...]]:
        """The calls of these methods, in order."""
        return [call for call in self.calls if call[0] in names]

    def on_new_request(self, request: RequestView) -> None:
        self.calls.append(("new", request.id))

    def get_num_new_matched_tokens(self, request: RequestView, num_computed_tokens: int) -> Answer:
        self.calls.append(("match", request.id, num_computed_tokens))
        if callable(self.matches):
            return self.matches(request, num_computed_tokens)
        script = self.matches.get(request.id)
        return script.pop(0) if script else (0, False)

    def update_state_after_alloc(self, request: RequestView, blocks: KVBlocks, num_external_tokens: int) -> None:
        self.calls.append(("allocated", request.id, blocks, num_external_tokens))

    def build_connector_meta(self, step: StepView) -> ConnectorMetadata:
        self.calls.append(("meta", step))
        return ConnectorMetadata()

    def request_finished(
        self, request: RequestView, blocks: BlockIds, reason: FinishReason
    ) -> tuple[bool, dict[str, Any] | None]:
        self.calls.append(("finished", request.id, blocks, reason))
        return request.id in self.holds, self.holds.get(request.id)

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        self.calls.append(("output", set(output.finished_sending or ()), set(output.finished_recving or ())))
        self.veto(output)

    def has_pending_push_work(self) -> bool:
        return self.pending

    def get_transfer_results(self, finished_req_ids: set[str]) -> TransferResults:
        raise AssertionError("a scheduler half is never polled")


class Bench:
    """A scheduler and the engine around it, by hand. Its "model" answers 1000, 1001, ... in the order of sampling.

    ``step`` takes what the workers are to have reported in it. ``now`` counts steps.
    """

    def __init__(self, connector: KVConnector | None = None, policy: str = "fail", **sizes: Any) -> None:
        sizes = {"num_blocks": 16, "block_size": 4, "max_num_batched_tokens": 64, "max_num_seqs": 8} | sizes
        self.config = EngineConfig(name="bench", **sizes)
        self.connector = connector
        self.expected: list[tuple[Direction, str]] = []
        self.scheduler = Scheduler(self.config, connector, self._expect, policy)
        self.last: Step | None = None
        self.events: list[Event] = []
        self.now = 0.0
        self.sampled = 0

    def _expect(self, direction: Direction, id: str, now: float) -> None:
        self.expected.append((direction, id))

    def add(self, id: str, prompt: Iterable[int] | int, max_tokens: int = 1) -> None:
        """Queue a request; a number stands for that many tokens nobody else has."""
        tokens = tuple(prompt) if not isinstance(prompt, int) else unique_tokens(id, prompt)
        self.scheduler.add(EngineRequest(id, tokens, max_tokens), self.now)

    def step(
        self, *, sent: Iterable[str] = (), received: Iterable[str] = (), failed: Iterable[str] = ()
    ) -> dict[str, tuple[int, int]]:
        """One step. Returns (start, n) of every request that was chosen."""
        step = self.schedule()
        self.finish(step, sent=sent, received=received, failed=failed)
        return {s.id: (s.start, s.n) for s in step.requests}

    def schedule(self) -> Step:
        step = self.last = self.scheduler.schedule(self.now)
        if self.connector is not None:
            self.connector.build_connector_meta(step.view)
        return step

    def finish(
        self, step: Step, *, sent: Iterable[str] = (), received: Iterable[str] = (), failed: Iterable[str] = ()
    ) -> None:
        tokens = {}
        for scheduled in step.requests:
            if scheduled.sample:
                tokens[scheduled.id] = 1000 + self.sampled
                self.sampled += 1
        output = KVConnectorOutput(set(sent) or None, set(received) | set(failed) or None, set(failed) or None)
        self.now += 1.0
        self.events += self.scheduler.update(step, tokens, output, self.now)

    def told(self, id: str) -> list[Event]:
        """What the driver was told of ``id`` so far."""
        return [event for event in self.events if event.id == id]

    def ending(self, id: str) -> Finished:
        """The one Finished of ``id``."""
        endings = [event for event in self.told(id) if isinstance(event, Finished)]
        assert len(endings) == 1, endings
        return endings[0]

    def blocks(self, id: str) -> list[int]:
        return list(self.scheduler.requests[id].blocks)

    @property
    def used(self) -> int:
        return self.scheduler.tables.num_used


def unique_tokens(name: str, count: int) -> tuple[int, ...]:
    """``count`` tokens below 512 that differ, from the first on, between short names."""
    seed = int.from_bytes(name.encode()[-3:], "big")
    return tuple((seed * 31 + index * index + 7 * index) % 509 for index in range(count))
