"""A scripted engine with the driver's methods: for the router's and the commands' own logic, not for connectors.

It computes nothing: token ``i`` of a prompt is a fixed function of both. What goes wrong is scripted by request id.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from kvconn.base import FinishReason
from kvconn.engine.client import EngineRequest, EngineStats, Finished, FirstToken
from kvconn.engine.config import EngineConfig
from kvconn.engine.trace import TraceRequest

BLOCK = 16


def tokens_for(prompt: Sequence[int], n: int) -> tuple[int, ...]:
    return tuple((sum(prompt) * 31 + i * 7) % 251 for i in range(n))


def trace_requests(n: int, length: int = 20, output: int = 4) -> list[TraceRequest]:
    return [TraceRequest(f"line-{i}", tuple(range(i, i + length)), output) for i in range(1, n + 1)]


class Clock:
    """A clock that every poll of a :class:`FakeEngine` moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class FakeEngine:
    """Ends one request per poll. Blocks of a prefill stay held until ``peer`` finished the request (or for ever)."""

    def __init__(self, clock: Clock, *, total_blocks: int = 1000) -> None:
        self.clock = clock
        self.total_blocks = total_blocks
        self.waiting: deque[EngineRequest] = deque()
        self.held: dict[str, int] = {}
        self.submitted: list[EngineRequest] = []
        self.aborted: list[str] = []
        self.peer: FakeEngine | None = None
        self.releases = True
        self.errors: dict[str, str] = {}
        self.reasons: dict[str, FinishReason] = {}
        self.wrong: set[str] = set()
        self.silent: set[str] = set()
        #: what it says, and what it says about every request that it holds
        self.stalls: tuple[str, ...] = ()
        self.names = ""
        self.connector: dict[str, float] = {}
        self.min_margin = 1.0
        self.most_held = 0

    def submit(self, request: EngineRequest) -> None:
        self.submitted.append(request)
        self.waiting.append(request)

    def abort(self, id: str) -> None:
        self.aborted.append(id)
        self.waiting = deque(request for request in self.waiting if request.id != id)

    def poll(self, timeout: float) -> list[FirstToken | Finished]:
        self.clock.now += 0.25
        request = next((one for one in self.waiting if one.id not in self.silent), None)
        if request is None or sum(self.held.values()) + self._size(request) > self.total_blocks:
            return []
        self.waiting.remove(request)
        return self._finish(request)

    def stats(self) -> EngineStats:
        return EngineStats(
            waiting=len(self.waiting),
            pending_release=len(self.held),
            kv_blocks_used=sum(self.held.values()),
            kv_blocks_total=self.total_blocks,
            min_margin=self.min_margin,
            stalls=self.stalls + tuple(self.names.format(id=id) for id in self.held if self.names),
            connector=self.connector,
        )

    def _finish(self, request: EngineRequest) -> list[FirstToken | Finished]:
        id = request.id
        if id in self.errors:
            return [Finished(id=id, tokens=(), reason=FinishReason.ERROR, t=self.clock.now, error=self.errors[id])]
        tokens = tokens_for(request.prompt_tokens, request.max_tokens)
        if id in self.wrong:
            tokens = (*tokens[:-1], tokens[-1] + 1)
        params = None
        if request.kv_transfer_params is not None and request.kv_transfer_params.get("do_remote_decode"):
            params = {"do_remote_prefill": True, "from": id}
            self.held[id] = self._size(request)
            self.most_held = max(self.most_held, len(self.held))
        elif self.peer is not None and self.peer.releases:
            self.peer.held.pop(id)
        reason = self.reasons.get(id, FinishReason.LENGTH)
        first = FirstToken(id=id, t=self.clock.now)
        last = Finished(id=id, tokens=tokens, reason=reason, kv_transfer_params=params, t=self.clock.now + 1.0)
        return [first, last]

    def _size(self, request: EngineRequest) -> int:
        return -(-len(request.prompt_tokens) // BLOCK)


def pair(clock: Clock, *, prefill_blocks: int = 1000) -> tuple[FakeEngine, FakeEngine]:
    prefill, decode = FakeEngine(clock, total_blocks=prefill_blocks), FakeEngine(clock)
    decode.peer = prefill
    return prefill, decode


class Fleet:
    """Stands where the commands look for ``EngineProcess``: makes scripted engines P, D and M and remembers them."""

    def __init__(self, script: Callable[[dict[str, FakeEngine]], None] = lambda engines: None) -> None:
        self.engines: dict[str, FakeEngine] = {}
        self.configs: dict[str, EngineConfig] = {}
        self.clock = Clock()
        self.alive: set[str] = set()
        self._script = script

    def __call__(self, config: EngineConfig) -> FakeEngine:
        engine = _Started(self, config)
        self.engines[config.name], self.configs[config.name] = engine, config
        if config.name == "D":
            engine.peer = self.engines["P"]
            self._script(self.engines)
        return engine


class _Started(FakeEngine):
    def __init__(self, fleet: Fleet, config: EngineConfig) -> None:
        super().__init__(fleet.clock, total_blocks=config.num_blocks)
        self._fleet, self._name, self.config = fleet, config.name, config

    def start(self) -> None:
        self._fleet.alive.add(self._name)

    def shutdown(self) -> None:
        self._fleet.alive.discard(self._name)
