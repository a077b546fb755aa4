"""Chaos and soak: one prefill engine and two decode engines under load, faults among them, and what came of it.

Rules
1. P has two ranks under ``MultiConnector[NixlConnector, OffloadingConnector with hold]``; of the D's one fails a
   request whose KV it can not have, the other computes it. All in content-addressed mode: a token proves every byte
   before it.
2. Right tokens are computed in this process by the same function of the prompt, over a cache that no transfer touches.
3. It ends: load stops at its time or number, then every wait has a deadline, and no process is left (C7).
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import msgspec
from msgspec.structs import replace

from kvconn.chaos.book import Book, Shares, Wrong
from kvconn.chaos.faults import Director, Fault, faults
from kvconn.chaos.fleet import Fleet, Ports
from kvconn.chaos.samples import Sample, Sampler
from kvconn.config import ParallelConfig
from kvconn.engine.config import EngineConfig, ModelSpec
from kvconn.engine.content import ContentAddressed
from kvconn.engine.ports import free_ports
from kvconn.engine.ranks import Alone, Ranks
from kvconn.engine.scheduler import Scheduled

__all__ = ["Oracle", "Report", "Row", "Settings", "run"]

BLOCK = 16
MODEL = ModelSpec(mode="content-addressed", n_layers=2)
DECODERS = ("D1", "D2")
#: deadlines of the engines, short so that minutes see many of them end
HANDSHAKE, READ, LEASE, DRAIN, QUARANTINE = 2.0, 2.0, 3.0, 5.0, 30.0
#: a request is lost when no engine says a word of it for so long; the end waits so long for what is left
PATIENCE, SETTLE = 60.0, 90.0
POLL = 0.002
SAY_EVERY = 5.0


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """``minutes`` or ``requests`` end the load. ``engines``: faults of whole engines too."""

    minutes: float | None = None
    requests: int | None = None
    seed: int = 0
    concurrency: int = 12
    engines: bool = True
    shares: Shares = Shares()
    #: tokens of a prompt, and of an answer, at most
    prompt: int = 200
    answer: int = 12
    #: of the engines; empty: as it is in our own environment
    ucx_tls: str = "tcp"


class Row(msgspec.Struct, frozen=True):
    """One kind of fault."""

    name: str
    injected: int
    survived: int


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it. ``died``: engines that ended although nobody ended them; ``aborted``: of F6 (docs/design.md)."""

    asked: int
    done: int
    retried: int
    seconds: float
    faults: tuple[Row, ...]
    lost: tuple[str, ...]
    wrong: tuple[Wrong, ...]
    leaked: tuple[str, ...]
    died: tuple[str, ...]
    counters: dict[str, float]
    samples: tuple[Sample, ...] = ()
    aborted: tuple[str, ...] = ()
    #: requests that were drawn to be aborted; those that were are among the faults
    drawn: int = 0
    #: no engine was ended or stopped, so that everything should have stayed flat
    soaked: bool = False

    @property
    def injected(self) -> int:
        return sum(row.injected for row in self.faults)

    @property
    def sound(self) -> bool:
        survived = sum(row.survived for row in self.faults)
        bad = self.lost or self.wrong or self.leaked or self.died
        return not bad and self.done == self.asked and survived == self.injected


class Oracle:
    """A request's right tokens: number -> (prompt, all that it must give), the same for a seed every time."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._blocks = (settings.prompt + settings.answer) // BLOCK + 1
        config = EngineConfig(name="oracle", num_blocks=self._blocks, block_size=BLOCK, model=MODEL)
        self._model = ContentAddressed(config, Ranks(config.parallel, 0, lambda members: Alone()))
        #: prompts begin like one of these, so that prefix caches have hits
        rng = random.Random(settings.seed)
        self._heads = [tuple(rng.choices(range(MODEL.vocab_size), k=2 * BLOCK)) for _ in range(4)]

    def __call__(self, number: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        rng = random.Random(f"{self._settings.seed} {number}")
        head = rng.choice(self._heads) if rng.random() < 0.5 else ()
        n = rng.randint(1, max(1, self._settings.prompt - len(head)))
        prompt = head + tuple(rng.choices(range(MODEL.vocab_size), k=n))
        return prompt, self._answer(prompt, rng.randint(1, self._settings.answer))

    def _answer(self, prompt: tuple[int, ...], n: int) -> tuple[int, ...]:
        tables, answer, start = (tuple(range(self._blocks)),), [], 0
        tokens = prompt
        for _ in range(n):
            step = Scheduled("oracle", start, len(tokens), start, tokens, tables, True, start > 0)
            answer.append(self._model.forward([step], _nothing, _nothing)["oracle"])
            start, tokens = start + len(tokens), (answer[-1],)
        self._model.forget(["oracle"])
        return tuple(answer)


def _nothing(layer: int) -> None:
    pass


def configs(settings: Settings) -> list[EngineConfig]:
    """P, then the D's. P's pool holds about half of what is in flight."""
    per_request = -(-(settings.prompt + settings.answer) // BLOCK)
    num_blocks = per_request * (settings.concurrency // 2 + 1)
    # no agent is made anew while P stands: P would be ended by UCX when it goes on (docs/design.md, F6)
    limits = {"handshake": HANDSHAKE, "read": READ, "quarantine_age": QUARANTINE, "quarantine_max": num_blocks}
    extra: dict[str, Any] = {"kv_lease_duration": LEASE, "kvconn": limits}
    nixl = {"kv_connector": "NixlConnector", "kv_role": "kv_producer", "kv_connector_extra_config": extra}
    offload = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_bytes_to_use": 16 << 20, "kvconn": {"hold": True}},
    }
    both = {"connectors": [nixl, offload]}
    serving = {"kv_connector": "MultiConnector", "kv_role": "kv_producer", "kv_connector_extra_config": both}
    base = EngineConfig(
        name="P",
        num_blocks=num_blocks,
        block_size=BLOCK,
        max_num_seqs=settings.concurrency,
        model=MODEL,
        env={"UCX_TLS": settings.ucx_tls} if settings.ucx_tls else {},
        drain=DRAIN,
    )
    ports = free_ports(1 + len(DECODERS))
    made = [replace(base, parallel=ParallelConfig(pcp=2), kv_transfer_config=serving, port=ports[0])]
    for name, policy, port in zip(DECODERS, ("fail", "recompute"), ports[1:], strict=True):
        reading = nixl | {"kv_role": "kv_consumer", "kv_load_failure_policy": policy}
        made.append(replace(base, name=name, kv_transfer_config=reading, port=port))
    return made


def run(settings: Settings, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> Report:
    """Load and faults, then the end. Raises ConfigError, EngineDeadError when an engine can not be started."""
    with Ports() as ports, Fleet(configs(settings)) as fleet:
        say("starting P (2 ranks), D1 and D2")
        fleet.start()
        return _Run(settings, fleet, ports, say, clock).go()


class _Run:
    def __init__(
        self, settings: Settings, fleet: Fleet, ports: Ports, say: Callable[[str], None], clock: Callable[[], float]
    ) -> None:
        self._settings, self._fleet, self._say, self._clock = settings, fleet, say, clock
        self._rng = random.Random(settings.seed)
        self._began = clock()
        self._book = Book(
            Oracle(settings),
            DECODERS,
            ports.all,
            concurrency=settings.concurrency,
            shares=settings.shares,
            patience=PATIENCE,
            rng=random.Random(self._rng.random()),
        )
        kinds = faults(READ, LEASE) if settings.engines else ()
        self._director = Director(kinds, DECODERS, random.Random(self._rng.random()), self._began)
        self._sampler = Sampler(
            lambda: [pid for name in fleet.names for pid in fleet.pids(name)],
            lambda: sum(fleet.held().values()),
            fleet.summaries if not settings.engines else tuple,
            self._began,
        )
        self._happened = False
        self._next_word = self._began

    def go(self) -> Report:
        while not self._enough():
            self._tick()
            self._begin_fault()
            self._end_fault()
        self._settle()
        self._book.give_up()
        leaked = self._fleet.leaks(LEASE + READ + HANDSHAKE + DRAIN)
        return self._report(leaked)

    def _enough(self) -> bool:
        minutes, requests = self._settings.minutes, self._settings.requests
        if requests is not None and self._book.asked >= requests:
            return True
        return minutes is not None and self._clock() - self._began >= minutes * 60

    def _tick(self) -> None:
        """Once around: orders out, events in, the dead replaced."""
        book, fleet = self._book, self._fleet
        for order in (*book.due(self._clock()), *book.judge(self._clock())):
            fleet.give(order)
        for name in fleet.names:
            for event in fleet.poll(name, POLL):
                for order in book.told(name, event, self._clock()):
                    fleet.give(order)
        for name in fleet.bury():
            book.died(name, self._clock())
        self._director.look(book.served)
        self._sampler.look(book.done, self._clock())
        if self._clock() >= self._next_word:
            self._next_word = self._clock() + SAY_EVERY
            self._say(f"  {self._clock() - self._began:5.0f} s  {book!r}  KV in use {fleet.held()}")

    def _begin_fault(self) -> None:
        now = self._clock()
        if (drawn := self._director.draw(now)) is not None:
            self._say(f"  {now - self._began:5.0f} s  {drawn[1]}: {drawn[0].name}")
            self._happened = self._inject(*drawn)

    def _inject(self, fault: Fault, where: str) -> bool:
        if fault.kind in ("kill", "kill rank"):
            return self._fleet.kill(where, self._rng, fault.kind == "kill rank", fault.same_id)
        if fault.kind == "stop":
            return self._fleet.stop(where)
        if fault.kind == "drain":
            return self._fleet.tell_to_end(where)
        if fault.kind == "flood":
            return self._fleet.flood(where)
        return self._fleet.garbage(where, self._rng)

    def _end_fault(self) -> None:
        if (ending := self._director.ending(self._clock())) is None:
            return
        fault, where = ending
        if fault.kind == "stop":
            self._fleet.go_on(where)
        elif where in self._fleet.doomed:
            return  # not gone and back yet
        self._director.over(self._happened, self._book.served, self._clock())

    def _settle(self) -> None:
        """Load goes on until every fault was seen to be survived; then until nothing is in flight."""
        deadline = self._clock() + SETTLE
        while self._director.busy and self._clock() < deadline:
            self._tick()
            self._end_fault()
        self._book.open = False
        while self._book.in_flight and self._clock() < deadline:
            self._tick()

    def _report(self, leaked: list[str]) -> Report:
        book, director = self._book, self._director
        injected, survived = book.injected + director.injected, book.survived + director.survived
        return Report(
            asked=book.asked,
            done=book.done,
            retried=book.retried,
            seconds=self._clock() - self._began,
            faults=tuple(Row(name, injected[name], survived[name]) for name in injected),
            lost=tuple(book.lost),
            wrong=tuple(book.wrong),
            leaked=tuple(leaked),
            died=tuple(self._fleet.died),
            aborted=tuple(self._fleet.aborted),
            drawn=book.drawn,
            counters=self._fleet.counters(),
            samples=tuple(self._sampler.samples),
            soaked=not self._settings.engines,
        )
