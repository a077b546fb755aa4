"""Which tokens are computed next, in which blocks, and when blocks are free again.

Rules
1. Connector methods are called in vLLM's order: on_new_request, get_num_new_matched_tokens (any number of times),
   update_state_after_alloc for every admission, build_connector_meta every step, request_finished, then
   update_connector_output before the sets are read.
2. From allocation to its emission a receive owns the blocks of its request, and a delayed send from finish to its
   emission, whatever became of the request (C6, C13). A connector emits a request that owes both once, at the later.
3. An id in the emitted sets that nothing here waits for is absorbed and counted.
4. While anything is delayed there is work (C12).
5. Pure: no clock, no I/O; ``now`` is an argument.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from kvconn.base import (
    BlockIds,
    Direction,
    FinishReason,
    KVBlocks,
    KVConnector,
    KVConnectorOutput,
    StepRequest,
    StepView,
)
from kvconn.engine.config import EngineConfig, cache_groups
from kvconn.engine.request import EngineRequest, Finished, FirstToken, Request, Status
from kvconn.engine.tables import Tables
from kvconn.params import wants_remote_decode

__all__ = ["Scheduled", "Scheduler", "Step"]

Expect = Callable[[Direction, str, float], None]


class Scheduled(msgspec.Struct, frozen=True):
    """One request's share of a step, for the workers: compute ``n`` tokens from ``start``.

    ``tokens`` are those from position ``token_start`` up to ``start + n``. ``sample``: the last one gives a new token.
    ``decode``: a single token after the first output; computed on every rank. ``tables``: blocks by cache group.
    """

    id: str
    start: int
    n: int
    token_start: int
    tokens: tuple[int, ...]
    tables: BlockIds
    sample: bool
    decode: bool

    @property
    def blocks(self) -> tuple[int, ...]:
        """Those of the full group."""
        return self.tables[0]


class Step(msgspec.Struct, frozen=True):
    """One step. ``view`` is what connectors see of it.

    ``loads_first``: a request of it reads KV that a connector loads synchronously, so the load precedes the forward.
    """

    requests: tuple[Scheduled, ...]
    view: StepView
    loads_first: bool = False


class Scheduler:
    """First come first served, prefill and decode in one batch, preemption of the last comer."""

    def __init__(self, config: EngineConfig, connector: KVConnector | None, expect: Expect, policy: str) -> None:
        self._config = config
        self._connector = connector
        self._expect = expect
        self._recompute = policy == "recompute"
        self.tables = Tables(config.num_blocks, config.block_tokens, cache_groups(config.model))
        self.requests: dict[str, Request] = {}
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.parked: dict[str, Request] = {}
        #: finished requests whose blocks a connector still owns
        self.delayed: dict[str, Request] = {}
        self._finished: list[str] = []
        self._preempted: list[str] = []
        self._loads_first = False
        self._draining = False
        self._events: list[FirstToken | Finished] = []
        self._seq = 0
        self.prefill_tokens = 0
        self.prefix_hit_tokens = 0
        self.external_tokens = 0
        #: emitted ids that nothing waited for
        self.absorbed = 0

    # -- requests ------------------------------------------------------------------------------------------------

    def add(self, submitted: EngineRequest, now: float) -> None:
        """Queue a request. What can never run ends at once with an error."""
        if submitted.id in self.requests:
            self._refuse(submitted, f"id {submitted.id} is in use", now)
            return
        request = Request(self._asked(submitted), self._config.block_tokens, len(self.tables.groups))
        if self._draining:
            self._refuse(submitted, "the engine was told to end; ask another one", now)
            self._never_admitted(request)
            return
        longest = self._config.num_blocks * self._config.block_tokens
        if request.n_prompt < 1 or request.max_tokens < 1 or request.n_prompt + request.max_tokens - 1 > longest:
            why = f"{request.n_prompt} prompt and {request.max_tokens} new tokens: expected 1.. and at most {longest}"
            self._refuse(submitted, why, now)
            self._never_admitted(request)
            return
        self.requests[request.id] = request
        self.waiting.append(request)
        if self._connector is not None:
            self._connector.on_new_request(request.view())

    def _asked(self, submitted: EngineRequest) -> EngineRequest:
        """A reader computes a prompt's last token, and a state can't be taken back by one: what is held for a reader
        stands before that token (as in vLLM), and the token that comes of it is nobody's. Of a prompt of one token
        nothing is held."""
        if not self._is_cut(submitted.kv_transfer_params):
            return submitted
        if len(submitted.prompt_tokens) < 2:
            return msgspec.structs.replace(submitted, kv_transfer_params=None)
        return msgspec.structs.replace(submitted, prompt_tokens=submitted.prompt_tokens[:-1], max_tokens=1)

    def _is_cut(self, params: Mapping[str, Any] | None) -> bool:
        return self._config.model.state > 0 and wants_remote_decode(params)

    def _refuse(self, submitted: EngineRequest, why: str, now: float) -> None:
        self._events.append(
            Finished(id=submitted.id, tokens=(), reason=FinishReason.ERROR, t=now, error=f"request refused: {why}")
        )

    def _never_admitted(self, request: Request) -> None:
        """Whoever holds KV for a request that will not run must hear of it, not wait for a lease's end."""
        if self._connector is not None:
            self._connector.on_new_request(request.view())
            self._connector.request_finished(request.view(), request.block_ids(), FinishReason.ERROR)
            self._finished.append(request.id)

    def abort(self, id: str, now: float) -> None:
        """End a request now; unknown and finished ones are left alone."""
        request = self.requests.get(id)
        if request is not None and request.status is not Status.FINISHED:
            self._finish(request, FinishReason.ABORT, now)

    def drain(self) -> None:
        """Refuse new requests from now on; those that are here go on."""
        self._draining = True
        if self._connector is not None:
            self._connector.drain()

    def has_work(self) -> bool:
        pending = self._connector is not None and self._connector.has_pending_push_work()
        return bool(self.requests or self._finished or self._events or pending)

    # -- a step --------------------------------------------------------------------------------------------------

    def schedule(self, now: float) -> Step:
        """Choose what the next step computes; empty when there is nothing to compute."""
        budget = self._config.max_num_batched_tokens
        chosen: list[Scheduled] = []
        shares: list[StepRequest] = []
        budget = self._schedule_running(chosen, shares, budget)
        if not self._preempted:
            self._schedule_waiting(chosen, shares, budget, now)
        self._seq += 1
        view = StepView(self._seq, tuple(shares), tuple(self._preempted), tuple(self._finished))
        self._preempted, self._finished = [], []
        loads_first, self._loads_first = self._loads_first, False
        return Step(tuple(chosen), view, loads_first)

    def _schedule_running(self, chosen: list[Scheduled], shares: list[StepRequest], budget: int) -> int:
        for request in list(self.running):
            if request.status is not Status.RUNNING or budget == 0:
                continue
            n = min(request.n_total - request.n_computed, budget)
            new = self.tables.grow(request, request.n_computed + n)
            while new is None and (self._reclaim(request) or self._preempt_last(request)):
                new = self.tables.grow(request, request.n_computed + n)
            if new is None:
                continue
            budget -= n
            self._choose(request, n, new, chosen, shares, request.n_computed)
        return budget

    def _schedule_waiting(self, chosen: list[Scheduled], shares: list[StepRequest], budget: int, now: float) -> None:
        later: list[Request] = []
        while self.waiting and budget > 0 and len(self.running) < self._config.max_num_seqs:
            request = self.waiting[0]
            fresh = not request.blocks
            if fresh:
                admitted = self._admit(request, now)
                if admitted is None:  # ask again at the next step
                    later.append(self.waiting.popleft())
                    continue
                if not admitted:
                    if self._reclaim(request):
                        continue
                    break
                if request.status is Status.PARKED:
                    self.waiting.popleft()
                    continue
            n = min(request.n_total - request.n_computed, budget)
            new = self.tables.grow(request, request.n_computed + n)
            if new is None:
                if fresh:
                    self._unadmit(request)
                if self._reclaim(request):
                    continue
                break
            if fresh:
                self._admission_stands(request)
                self._loads_first |= request.n_external > 0
            else:
                self._tell_allocated(request, 0)
            self.waiting.popleft()
            request.status = Status.RUNNING
            self.running.append(request)
            budget -= n
            self._choose(request, n, request.block_ids(), chosen, shares, 0)
        self.waiting.extendleft(reversed(later))

    def _admit(self, request: Request, now: float) -> bool | None:
        """Prefix hits and external tokens. None: not yet; False: no room; True: blocks for what is there are taken."""
        size = self._config.block_tokens
        hits = self.tables.hits(request)
        n_cached = len(hits[0])
        external, asynchronous = self._match(request, n_cached * size)
        if external is None:
            return None
        # enough for at least the first chunk, or for everything that is loaded
        if not self.tables.admit(request, hits, n_cached * size + external):
            return False
        request.n_computed = n_cached * size
        request.n_cached = n_cached
        request.n_external = external
        if external and asynchronous:
            self._admission_stands(request)
            request.status = Status.PARKED
            self.parked[request.id] = request
            self._expect("recv", request.id, now)
            request.n_computed += external
        elif external:
            request.n_computed += external
            self._leave_one_token(request)
        return True

    def _admission_stands(self, request: Request) -> None:
        """Only now, with all its blocks, an admission is counted, and its connector told, once."""
        self.prefix_hit_tokens += request.n_cached * self._config.block_tokens
        self.external_tokens += request.n_external
        self._tell_allocated(request, request.n_external)

    def _match(self, request: Request, local: int) -> tuple[int | None, bool]:
        if self._connector is None:
            return 0, False
        return self._connector.get_num_new_matched_tokens(request.view(), local)

    def _tell_allocated(self, request: Request, external: int) -> None:
        if self._connector is not None:
            blocks = KVBlocks(request.block_ids(), (request.n_cached,) * len(request.tables))
            self._connector.update_state_after_alloc(request.view(), blocks, external)

    def _unadmit(self, request: Request) -> None:
        """Back to before :meth:`_admit`: no blocks, nothing computed."""
        self.tables.give_back(request)
        request.n_computed, request.n_cached, request.n_external = 0, 0, 0

    def _reclaim(self, asking: Request) -> bool:
        """Waiting requests whose KV came hold what ``asking`` needs: take the last one's. False if others will free."""
        if self.parked or self.delayed or any(one is not asking for one in self.running):
            return False
        victim = next((one for one in reversed(self.waiting) if one.blocks and one is not asking), None)
        if victim is not None:
            self._unadmit(victim)
            self._preempted.append(victim.id)
        return victim is not None

    def _preempt_last(self, asking: Request) -> bool:
        """Preempt the last comer. False when that is the one who asks: it was preempted itself."""
        victim = self.running.pop()
        self._unadmit(victim)
        victim.status = Status.WAITING
        self.waiting.appendleft(victim)
        self._preempted.append(victim.id)
        return victim is not asking

    def _choose(
        self,
        request: Request,
        n: int,
        new: BlockIds,
        chosen: list[Scheduled],
        shares: list[StepRequest],
        token_start: int,
    ) -> None:
        start = request.n_computed
        if start < request.n_prompt:
            self.prefill_tokens += min(n, request.n_prompt - start)
        chosen.append(
            Scheduled(
                id=request.id,
                start=start,
                n=n,
                token_start=token_start,
                tokens=tuple(request.tokens[token_start : start + n]),
                tables=request.block_ids(),
                sample=start + n == request.n_total,
                decode=n == 1 and start >= request.n_prompt,
            )
        )
        shares.append(StepRequest(request.id, start, n, new))

    # -- what came of it -----------------------------------------------------------------------------------------

    def update(
        self, step: Step, tokens: dict[str, int], output: KVConnectorOutput | None, now: float
    ) -> list[FirstToken | Finished]:
        """Take the step's new tokens and the connector's aggregated output; return what the driver is told."""
        for scheduled in step.requests:
            request = self.requests.get(scheduled.id)
            if request is None or request.status is not Status.RUNNING:
                continue  # aborted while the step ran
            request.n_computed = scheduled.start + scheduled.n
            self._cache_full_blocks(request)
            if scheduled.sample:
                self._append(request, tokens[request.id], now)
        if output is not None and self._connector is not None:
            self._connector.update_connector_output(output)
            self._received(output.finished_recving or (), output.failed_recving or set(), output.failure_reasons, now)
            self._sent(output.finished_sending or ())
        events, self._events = self._events, []
        return events

    def _append(self, request: Request, token: int, now: float) -> None:
        request.tokens.append(token)
        if request.n_total == request.n_prompt + 1:
            self._events.append(FirstToken(id=request.id, t=now))
        if request.n_total - request.n_prompt >= request.max_tokens:
            self._finish(request, FinishReason.LENGTH, now)

    def _cache_full_blocks(self, request: Request) -> None:
        full = request.n_computed // self._config.block_tokens
        self.tables.cache(request, request.n_cached, full)
        request.n_cached = max(request.n_cached, full)

    def _finish(self, request: Request, reason: FinishReason, now: float, error: str | None = None) -> None:
        """End the client's request; its blocks go now, or stay with the connector (rule 2)."""
        was_parked = self.parked.pop(request.id, None) is not None
        if request.status is Status.RUNNING:
            self.running.remove(request)
        elif request.status is Status.WAITING:
            self.waiting.remove(request)
        request.status = Status.FINISHED
        delay, params = False, None
        if self._connector is not None:
            delay, params = self._connector.request_finished(request.view(), request.block_ids(), reason)
        self._finished.append(request.id)
        self._events.append(
            Finished(
                id=request.id,
                tokens=tuple(request.output) if not self._is_cut(request.params) else (),
                reason=reason,
                t=now,
                kv_transfer_params=params,
                error=error,
            )
        )
        if delay:
            self._expect("send", request.id, now)
        if delay or was_parked:
            self.delayed[request.id] = request
        else:
            self._free(request)

    def _free(self, request: Request) -> None:
        self.delayed.pop(request.id, None)
        self.tables.give_back(request)
        del self.requests[request.id]

    def _received(self, ids: Iterable[str], failed: set[str], reasons: Mapping[str, str], now: float) -> None:
        for id in ids:
            request = self.parked.pop(id, None)
            if request is None:
                self._released(id)
            elif id in failed:
                self._load_failed(request, reasons.get(id, ""), now)
            else:
                self._leave_one_token(request)
                self._cache_full_blocks(request)
                request.status = Status.WAITING
                self.waiting.appendleft(request)

    def _leave_one_token(self, request: Request) -> None:
        """The last token is computed even when its KV came: it gives the next one."""
        request.n_computed = min(request.n_computed, request.n_total - 1)

    def _load_failed(self, request: Request, why: str, now: float) -> None:
        """Policy: compute it here, or end the request. The blocks are safe: the receive was emitted."""
        request.status = Status.WAITING
        self.waiting.appendleft(request)
        if self._recompute:
            self._unadmit(request)
        else:
            self._finish(request, FinishReason.ERROR, now, error=f"KV load failed: {why}" if why else "KV load failed")

    def _sent(self, ids: Iterable[str]) -> None:
        for id in ids:
            self._released(id)

    def _released(self, id: str) -> None:
        request = self.delayed.get(id)
        if request is None:
            self.absorbed += 1
        else:
            self._free(request)

    def __repr__(self) -> str:
        return (
            f"Scheduler(running={len(self.running)} waiting={len(self.waiting)} parked={len(self.parked)} "
            f"delayed={len(self.delayed)} {self.tables!r})"
        )
