"""A closed-loop router over one prefill and one decode engine, and what it measured.

Rules
1. ``concurrency`` requests are in flight, from their submission to P to their last token on D; the next one starts when
   one ends, whatever the trace's timestamps say.
2. A request goes to P with ``max_tokens=1`` and ``{"do_remote_decode": true}``; what P answers as
   ``kv_transfer_params`` goes to D with the whole prompt, unread and unchanged. D makes every token, the first one too.
3. :class:`Book` decides who is where and is fed events; :class:`Router` is the only code here that talks to engines.
4. Nothing is waited for without a bound (C7): when nothing moves for ``stall_limit`` the replay ends with a
   :class:`StallReport`, and so does a drain that leaves blocks held.
5. What is wrong is named: request, engine, and what the engine says about who owes what.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, Protocol

import msgspec

from kvconn.base import FinishReason
from kvconn.engine.client import EngineRequest, EngineStats, Finished, FirstToken
from kvconn.engine.trace import TraceRequest
from kvconn.errors import ContractError

__all__ = [
    "Book",
    "Engine",
    "Failure",
    "Leak",
    "Mismatch",
    "Offloaded",
    "Progress",
    "ReplayReport",
    "Replayed",
    "Router",
    "StallReport",
    "Watchdog",
    "decode_blocks",
    "make_report",
    "prefill_blocks",
    "run_monolithic",
]

Side = Literal["P", "D"]
#: the rank whose tokens an engine reports
OUTPUT_RANK = 0
Tokens = tuple[int, ...]
POLL = 0.002
#: seconds between looks at both engines' statistics
LOOK_EVERY = 0.25
DRAIN_LOOK = 0.05
#: statistics are a few tenths of a second old; a drain believes none that may be older than itself
SETTLE = 0.5


class Engine(Protocol):
    """What the router needs of an engine; :class:`kvconn.engine.client.EngineProcess` is one."""

    def submit(self, request: EngineRequest) -> None: ...

    def abort(self, id: str) -> None: ...

    def poll(self, timeout: float) -> Sequence[FirstToken | Finished]: ...

    def stats(self) -> EngineStats: ...


# --- what comes out -----------------------------------------------------------------------------------------------


class Failure(msgspec.Struct, frozen=True):
    """A request that ended without its tokens."""

    id: str
    side: Side
    reason: str


class Mismatch(msgspec.Struct, frozen=True):
    """A request whose tokens differ from the monolithic run, first at ``position``. None: no token there."""

    id: str
    side: Side
    position: int
    expected: int | None
    got: int | None
    rank: int = OUTPUT_RANK


class Leak(msgspec.Struct, frozen=True):
    """Blocks still held after the drain, and what the engine says about them."""

    side: Side
    blocks: int
    pending_release: int
    lines: tuple[str, ...]


class Progress(msgspec.Struct, frozen=True):
    """A look at a running replay."""

    elapsed: float
    finished: int
    total: int
    prefill: EngineStats
    decode: EngineStats

    @property
    def bytes_moved(self) -> float:
        return counter(self.decode, "nixl_bytes_transferred")

    def marks(self) -> tuple[float, ...]:
        """Changes whenever something moves: steps count only while requests run."""
        marks: list[float] = [self.finished, self.bytes_moved]
        for stats in (self.prefill, self.decode):
            steps = stats.steps if stats.running else -1
            marks += [steps, stats.running, stats.waiting, stats.pending_release, stats.kv_blocks_used]
        return tuple(marks)


class StallReport(msgspec.Struct, frozen=True):
    """Nothing moved for ``idle`` seconds. ``lines`` are the engines' own: request, ranks, child, since when."""

    idle: float
    in_flight: dict[str, Side]
    lines: tuple[str, ...]
    last: Progress


class Replayed(msgspec.Struct, frozen=True):
    """What a replay saw, before anything is compared. ``handoffs`` are seconds from P's finish to D's first token."""

    total: int
    tokens: dict[str, Tokens]
    first_tokens: dict[str, Tokens]
    failures: tuple[Failure, ...]
    handoffs: tuple[float, ...]
    stall: StallReport | None
    leaks: tuple[Leak, ...]
    last: Progress
    wall: float


class Offloaded(msgspec.Struct, frozen=True):
    """What offloading did on one engine. Blocks are the engine's; bytes are summed over its ranks.

    ``asked``: blocks of prompts that the engine did not have itself; ``hits_*``: those of them that a tier brought, so
    that ``tokens_loaded`` tokens were neither computed nor read from elsewhere.
    """

    asked: int
    hits_host: int
    hits_files: int
    tokens_loaded: int
    bytes_stored: int
    bytes_loaded: int
    stores_skipped: int


class ReplayReport(msgspec.Struct, frozen=True):
    """The table of a replay. ``compared`` requests were held against the monolithic run.

    ``min_margin``: the smallest difference of the two best logits; below ``margin_floor`` equal KV need not mean equal
    tokens.
    """

    total: int
    finished: int
    compared: int
    failures: tuple[Failure, ...]
    mismatches: tuple[Mismatch, ...]
    leaks: tuple[Leak, ...]
    stall: StallReport | None
    prefill_blocks_used: int
    prefill_blocks_total: int
    decode_blocks_used: int
    decode_blocks_total: int
    bytes_moved: int
    gb_per_s: float
    transfers: int
    descriptors: int
    handoff_p50_ms: float
    handoff_p95_ms: float
    blocks_stored: int
    blocks_deduplicated: int
    offload: dict[Side, Offloaded]
    duplicates_absorbed: int
    leases_expired: int
    failed_loads: int
    stale_reads: int
    references_refused: int
    unfenced_reads: int
    prefix_hit_tokens: int
    min_margin: float
    margin_floor: float
    wall_s: float


# --- sizes --------------------------------------------------------------------------------------------------------


def prefill_blocks(requests: Sequence[TraceRequest], concurrency: int, block_size: int) -> int:
    """P's pool: the largest request plus half of what is in flight on average, so that it holds fewer than are."""
    sizes = [math.ceil((len(request.prompt) + 1) / block_size) for request in requests]
    in_flight = sum(sizes) / len(sizes) * min(concurrency, len(sizes))
    return max(sizes) + math.ceil(in_flight / 2)


def decode_blocks(requests: Sequence[TraceRequest], concurrency: int, block_size: int) -> int:
    """D's pool: any ``concurrency`` requests in a row, prompt and output."""
    sizes = [math.ceil((len(request.prompt) + request.output_length) / block_size) + 1 for request in requests]
    return max(sum(sizes[i : i + concurrency]) for i in range(max(1, len(sizes) - concurrency + 1)))


# --- who is where -------------------------------------------------------------------------------------------------


class Book:
    """Where every request is. Decides what is submitted next; talks to nobody.

    A request is queued, then on P, then on D, then has tokens or a failure.
    """

    def __init__(self, requests: Sequence[TraceRequest], concurrency: int) -> None:
        self._concurrency = concurrency
        self._requests = {request.id: request for request in requests}
        self._queue = deque(requests)
        self.on: dict[str, Side] = {}
        self.tokens: dict[str, Tokens] = {}
        self.first_tokens: dict[str, Tokens] = {}
        self.failures: list[Failure] = []
        self.handoffs: list[float] = []
        self._prefilled_at: dict[str, float] = {}

    @property
    def total(self) -> int:
        return len(self._requests)

    @property
    def ended(self) -> int:
        return len(self.tokens) + len(self.failures)

    def admit(self) -> list[EngineRequest]:
        """What P gets now."""
        admitted = []
        while self._queue and len(self.on) < self._concurrency:
            request = self._queue.popleft()
            self.on[request.id] = "P"
            admitted.append(EngineRequest(request.id, request.prompt, 1, {"do_remote_decode": True}))
        return admitted

    def from_prefill(self, event: FirstToken | Finished) -> EngineRequest | None:
        """P said something; returns what D gets for it."""
        if isinstance(event, FirstToken) or self.on.get(event.id) != "P":
            return None
        if not _complete(event) or event.kv_transfer_params is None:
            self._fail(event.id, "P", _why(event) if not _complete(event) else "no kv_transfer_params came back")
            return None
        request = self._requests[event.id]
        self.on[event.id] = "D"
        self.first_tokens[event.id] = tuple(event.tokens)
        self._prefilled_at[event.id] = event.t
        return EngineRequest(event.id, request.prompt, request.output_length, event.kv_transfer_params)

    def from_decode(self, event: FirstToken | Finished) -> None:
        """D said something."""
        if self.on.get(event.id) != "D":
            return
        if isinstance(event, FirstToken):
            if event.id in self._prefilled_at:
                self.handoffs.append(event.t - self._prefilled_at.pop(event.id))
        elif not _complete(event):
            self._fail(event.id, "D", _why(event))
        else:
            del self.on[event.id]
            self.tokens[event.id] = tuple(event.tokens)

    def _fail(self, id: str, side: Side, reason: str) -> None:
        del self.on[id]
        self.failures.append(Failure(id, side, reason))

    def __repr__(self) -> str:
        sides = list(self.on.values())
        return (
            f"Book(queued={len(self._queue)} P={sides.count('P')} D={sides.count('D')}"
            f" tokens={len(self.tokens)} failed={len(self.failures)} of={self.total})"
        )


class Watchdog:
    """When did something last move? Time is an argument."""

    def __init__(self, limit: float, now: float) -> None:
        self._limit = limit
        self._marks: tuple[float, ...] = ()
        self._moved = now

    def idle(self, marks: tuple[float, ...], now: float) -> float:
        """Seconds since ``marks`` last changed."""
        if marks != self._marks:
            self._marks, self._moved = marks, now
        return now - self._moved

    def expired(self, marks: tuple[float, ...], now: float) -> bool:
        return self.idle(marks, now) >= self._limit


# --- driving ------------------------------------------------------------------------------------------------------


class Router:
    """Drives one prefill and one decode engine through ``requests``. One use."""

    def __init__(
        self,
        prefill: Engine,
        decode: Engine,
        requests: Sequence[TraceRequest],
        *,
        concurrency: int,
        stall_limit: float,
        drain_limit: float,
        on_progress: Callable[[Progress], None] = lambda progress: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._prefill = prefill
        self._decode = decode
        self._book = Book(requests, concurrency)
        self._stall_limit = stall_limit
        self._drain_limit = drain_limit
        self._on_progress = on_progress
        self._clock = clock
        self._began = clock()

    def run(self) -> Replayed:
        """Every request, then the drain. Raises only when an engine itself is gone (EngineDeadError)."""
        self._began = self._clock()
        stall = self._serve()
        wall = self._clock() - self._began
        last = self._look() if stall is None else stall.last
        leaks: tuple[Leak, ...] = ()
        if stall is None:
            last = self._drain(last)
            leaks = _leaks(last)
        book = self._book
        return Replayed(
            total=book.total,
            tokens=book.tokens,
            first_tokens=book.first_tokens,
            failures=tuple(book.failures),
            handoffs=tuple(book.handoffs),
            stall=stall,
            leaks=leaks,
            last=last,
            wall=wall,
        )

    def _serve(self) -> StallReport | None:
        """Until every request ended, or nothing moves."""
        watchdog = Watchdog(self._stall_limit, self._clock())
        next_look = self._clock()
        while self._book.ended < self._book.total:
            self._route()
            now = self._clock()
            if now < next_look:
                continue
            next_look = now + LOOK_EVERY
            progress = self._look()
            self._on_progress(progress)
            if watchdog.expired(progress.marks(), now):
                return self._stalled(progress, watchdog.idle(progress.marks(), now))
        return None

    def _route(self) -> None:
        for request in self._book.admit():
            self._prefill.submit(request)
        for event in self._prefill.poll(self._patience("P")):
            forwarded = self._book.from_prefill(event)
            if forwarded is not None:
                self._decode.submit(forwarded)
        for event in self._decode.poll(self._patience("D")):
            self._book.from_decode(event)

    def _patience(self, side: Side) -> float:
        """Who waits for an engine that has nothing to say hears the other one late."""
        return POLL if side in self._book.on.values() else 0.0

    def _stalled(self, progress: Progress, idle: float) -> StallReport:
        """Name it first, then take back what is in flight."""
        report = StallReport(idle, dict(self._book.on), _lines(progress), progress)
        for id, side in report.in_flight.items():
            (self._prefill if side == "P" else self._decode).abort(id)
        return report

    def _drain(self, progress: Progress) -> Progress:
        """Until neither engine holds a block, or ``drain_limit`` is over (C12: delayed frees are work)."""
        began = self._clock()
        settled, deadline = began + SETTLE, began + self._drain_limit
        while (now := self._clock()) < settled or (now < deadline and _leaks(progress)):
            self._prefill.poll(DRAIN_LOOK)
            self._decode.poll(POLL)
            progress = self._look()
        self._on_progress(progress)
        return progress

    def _look(self) -> Progress:
        elapsed = self._clock() - self._began
        return Progress(elapsed, self._book.ended, self._book.total, self._prefill.stats(), self._decode.stats())


def run_monolithic(
    engine: Engine,
    requests: Sequence[TraceRequest],
    *,
    stall_limit: float,
    on_progress: Callable[[int, int], None] = lambda finished, total: None,
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, Tokens]:
    """The same requests on one engine without a connector: tokens by request id. Raises ContractError if it cannot."""
    tokens: dict[str, Tokens] = {}
    for request in requests:
        engine.submit(EngineRequest(request.id, request.prompt, request.output_length, None))
    moved = clock()
    while len(tokens) < len(requests):
        for event in engine.poll(DRAIN_LOOK):
            moved = clock()
            if isinstance(event, Finished):
                if not _complete(event):
                    raise ContractError(f"monolithic run: {event.id} ended with {_why(event)}")
                tokens[event.id] = tuple(event.tokens)
        if clock() - moved > stall_limit:
            missing = [request.id for request in requests if request.id not in tokens]
            raise ContractError(f"monolithic run: nothing moved for {stall_limit:g} s, without tokens: {missing[:8]}")
        on_progress(len(tokens), len(requests))
    return tokens


def _complete(event: Finished) -> bool:
    return event.error is None and event.reason in (FinishReason.STOP, FinishReason.LENGTH)


def _why(event: Finished) -> str:
    return event.error or f"reason {event.reason.value}"


def _lines(progress: Progress) -> tuple[str, ...]:
    return tuple(f"{side}: {line}" for side, stats in _sides(progress) for line in stats.stalls)


def _leaks(progress: Progress) -> tuple[Leak, ...]:
    return tuple(
        Leak(side, stats.kv_blocks_used, stats.pending_release, tuple(stats.stalls))
        for side, stats in _sides(progress)
        if stats.kv_blocks_used or stats.pending_release
    )


def _sides(progress: Progress) -> tuple[tuple[Side, EngineStats], tuple[Side, EngineStats]]:
    return ("P", progress.prefill), ("D", progress.decode)


# --- comparing ----------------------------------------------------------------------------------------------------


def make_report(replayed: Replayed, expected: Mapping[str, Tokens] | None, margin_floor: float = 0.0) -> ReplayReport:
    """The table; ``expected`` are the monolithic run's tokens, None when there was none."""
    last = replayed.last
    seconds = counter(last.decode, "nixl_xfer_seconds")
    hits = last.prefill.prefix_hit_tokens + last.decode.prefix_hit_tokens
    handoffs = sorted(replayed.handoffs)
    return ReplayReport(
        total=replayed.total,
        finished=len(replayed.tokens),
        compared=sum(1 for id in replayed.tokens if id in expected) if expected is not None else 0,
        failures=replayed.failures,
        mismatches=tuple(_mismatches(replayed, expected)) if expected is not None else (),
        leaks=replayed.leaks,
        stall=replayed.stall,
        prefill_blocks_used=last.prefill.kv_blocks_used,
        prefill_blocks_total=last.prefill.kv_blocks_total,
        decode_blocks_used=last.decode.kv_blocks_used,
        decode_blocks_total=last.decode.kv_blocks_total,
        bytes_moved=int(last.bytes_moved),
        gb_per_s=last.bytes_moved / seconds / 1e9 if seconds else 0.0,
        transfers=int(counter(last.decode, "nixl_num_transfers")),
        descriptors=int(counter(last.decode, "nixl_num_descriptors")),
        handoff_p50_ms=percentile(handoffs, 0.50) * 1e3,
        handoff_p95_ms=percentile(handoffs, 0.95) * 1e3,
        blocks_stored=int(counter(last.prefill, "offload_blocks_stored")),
        blocks_deduplicated=int(counter(last.prefill, "offload_blocks_deduplicated")),
        offload={side: _offloaded(stats) for side, stats in _sides(last)},
        duplicates_absorbed=_both(last, "duplicates_absorbed"),
        leases_expired=int(counter(last.prefill, "nixl_num_kv_expired_reqs")),
        failed_loads=int(counter(last.decode, "nixl_num_failed_transfers")),
        stale_reads=_both(last, "stale_reads"),
        references_refused=_both(last, "params_refused") + _both(last, "seals_refused"),
        unfenced_reads=_both(last, "unfenced_reads"),
        prefix_hit_tokens=hits,
        min_margin=min(last.prefill.min_margin, last.decode.min_margin),
        margin_floor=margin_floor,
        wall_s=replayed.wall,
    )


def _offloaded(stats: EngineStats) -> Offloaded:
    return Offloaded(
        asked=int(counter(stats, "offload_blocks_asked")),
        hits_host=int(counter(stats, "offload_hit_blocks_host")),
        hits_files=int(counter(stats, "offload_hit_blocks_secondary")),
        tokens_loaded=int(counter(stats, "offload_tokens_loaded")),
        bytes_stored=int(counter(stats, "kv_offload_store_bytes")),
        bytes_loaded=int(counter(stats, "kv_offload_load_bytes")),
        stores_skipped=int(counter(stats, "kv_offload_stores_skipped")),
    )


def counter(stats: EngineStats, name: str) -> float:
    """A connector counter; one that never counted is 0."""
    return float(stats.connector.get(name, 0))


def _both(progress: Progress, name: str) -> int:
    return sum(int(counter(stats, name)) for _, stats in _sides(progress))


def percentile(ascending: Sequence[float], share: float) -> float:
    """The smallest value that ``share`` of all do not exceed; 0.0 of nothing."""
    return ascending[max(0, math.ceil(share * len(ascending)) - 1)] if ascending else 0.0


def _mismatches(replayed: Replayed, expected: Mapping[str, Tokens]) -> Iterator[Mismatch]:
    for id, tokens in replayed.tokens.items():
        first, wanted = replayed.first_tokens[id], expected[id]
        if first and first != wanted[:1]:  # a producer that keeps states stops before the last token and says nothing
            yield Mismatch(id, "P", 0, _at(wanted, 0), _at(first, 0))
        if tokens != wanted:
            length = max(len(tokens), len(wanted))
            position = next(i for i in range(length) if _at(tokens, i) != _at(wanted, i))
            yield Mismatch(id, "D", position, _at(wanted, position), _at(tokens, position))


def _at(tokens: Tokens, position: int) -> int | None:
    return tokens[position] if position < len(tokens) else None
