"""What clients want, where it is, what they do to it, and whether every word of the engines is right. Pure.

Rules
1. A request is done when a decode engine gave all its tokens and they are right. One that ended otherwise is tried
   again, later each time. One that no engine says anything about for ``patience`` seconds is lost, and so is one that
   failed ``TRIES`` times.
2. Every token of every engine is compared, also those of requests that ended early.
3. A prank is what a client, a router or a peer does to one try of a request. It counts when it was done, and as
   survived when its request is done. It is played on the first try, so that the request can end well.
4. An abort races with the end of what it aborts. One that comes too late is given to another request, sooner; so as
   many land as were drawn, and some of them late in their request.
Time is an argument, in seconds.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvconn.base import FinishReason
from kvconn.engine.client import EngineRequest, Finished, FirstToken

__all__ = ["ABORTS", "PRANKS", "Book", "Cut", "Order", "Shares", "Submit", "Wrong"]

Tokens = tuple[int, ...]
PREFILL = "P"
TRIES = 40
#: seconds until a request is tried again, times the tries so far, at most
AGAIN, AGAIN_MOST = 0.2, 3.0
#: seconds an abort comes after its request, at most: it begins with this, halves when one came too late, and grows by a
#: tenth with each that did not. And the second of two readers
ABORT_WITHIN, SECOND_WITHIN = 0.1, 2.0
#: a request that nobody says a word of for so long makes room for another, of at most so many at once
STUCK, MOST_STUCK = 1.0, 4
#: tokens that no pool has room for
TOO_LONG = 1 << 20

ABORTS = ("abort on P", "abort on D")
#: what else is done to one request: the answer of P is never read; it comes back changed; it names a port where nobody
#: listens, or somebody who never answers, or who answers nonsense; two engines read it; D can not admit it
PRANKS = (
    "never read",
    "params changed",
    "nobody at the peer",
    "peer never answers",
    "peer answers nonsense",
    "read twice",
    "refused by D",
)


class Submit(msgspec.Struct, frozen=True):
    """Give this request to that engine."""

    where: str
    request: EngineRequest


class Cut(msgspec.Struct, frozen=True):
    """Abort this request on that engine."""

    where: str
    id: str


Order = Submit | Cut


class Wrong(msgspec.Struct, frozen=True):
    """An engine's tokens that are not the request's."""

    id: str
    where: str
    expected: Tokens
    got: Tokens


class Shares(msgspec.Struct, frozen=True):
    """Of all requests: how many are aborted, and on how many a prank is played."""

    aborts: float = 0.05
    pranks: float = 0.1


@dataclass
class _Request:
    n: int
    prompt: Tokens
    expected: Tokens
    prank: str | None
    tries: int = 0
    #: pranks and faults that hit it, by name
    hit: list[str] = field(default_factory=list)


@dataclass
class _Try:
    id: str
    request: _Request
    prank: str | None
    since: float
    on: set[str] = field(default_factory=set)
    right: bool = False


class Book:
    """``wants`` makes requests: number -> (prompt, all tokens it must give). ``ports``: nobody's, a silent
    peer's, a fool's."""

    def __init__(
        self,
        wants: Callable[[int], tuple[Tokens, Tokens]],
        decoders: Sequence[str],
        ports: tuple[int, int, int],
        *,
        concurrency: int,
        shares: Shares,
        patience: float,
        rng: random.Random,
    ) -> None:
        self._wants = wants
        self._decoders = tuple(decoders)
        self._ports = ports
        self._concurrency = concurrency
        self._shares = shares
        self._patience = patience
        self._rng = rng
        self._numbers = itertools.count(1)
        self._serial = itertools.count()
        self._tries: dict[str, _Try] = {}
        #: requests that wait to be tried again; orders for later, with their try
        self._again: list[tuple[float, int, _Request]] = []
        self._later: list[tuple[float, int, str, Order]] = []
        self.open = True
        self.asked = 0
        self.done = 0
        self.retried = 0
        #: aborts that were drawn, of them those that came too late and wait for others, how long each kind waits
        self.drawn = 0
        self._owed: deque[str] = deque()
        self._within = dict.fromkeys(ABORTS, ABORT_WITHIN)
        self.injected: Counter[str] = Counter()
        self.survived: Counter[str] = Counter()
        self.lost: list[str] = []
        self.wrong: list[Wrong] = []
        #: requests done per engine that gave them their tokens
        self.served: Counter[str] = Counter()

    @property
    def in_flight(self) -> int:
        return len(self._tries) + len(self._again)

    # -- what to do now ------------------------------------------------------------------------------------------

    def due(self, now: float) -> list[Order]:
        """New requests, requests tried again, aborts whose time has come."""
        orders: list[Order] = []
        while self._again and self._again[0][0] <= now:
            orders += self._try(heapq.heappop(self._again)[2], now)
        for _ in range(self._room(now) if self.open else 0):
            orders += self._try(self._new(), now)
        while self._later and self._later[0][0] <= now:
            _, _, id, order = heapq.heappop(self._later)
            if id in self._tries and order.where in self._tries[id].on:
                orders.append(order)
        return orders

    def _room(self, now: float) -> int:
        """How many new requests may come. What is stuck on an engine that stands keeps no other from its work."""
        stuck = sum(1 for one in self._tries.values() if now - one.since > STUCK)
        most = self._concurrency * MOST_STUCK
        return min(self._concurrency + stuck, most) - self.in_flight

    def _new(self) -> _Request:
        self.asked += 1
        n, draw = next(self._numbers), self._rng.random()
        prank = None
        if draw < self._shares.aborts:
            prank = self._rng.choice(ABORTS)
            self.drawn += 1
        elif draw < self._shares.aborts + self._shares.pranks:
            prank = self._rng.choice(PRANKS)
        elif self._owed:
            prank = self._owed.popleft()
        return _Request(n, *self._wants(n), prank)

    def _try(self, request: _Request, now: float) -> list[Order]:
        request.tries += 1
        prank = request.prank if request.tries == 1 else None
        one = _Try(f"r{request.n}.{request.tries}", request, prank, now, {PREFILL})
        self._tries[one.id] = one
        if prank == "abort on P":
            self._after(self._within[prank], one, Cut(PREFILL, one.id), now)
        return [Submit(PREFILL, EngineRequest(one.id, request.prompt, 1, {"do_remote_decode": True}))]

    def _after(self, seconds: float, one: _Try, order: Order, now: float) -> None:
        """``order`` at some time within ``seconds``, if its engine has the try then."""
        heapq.heappush(self._later, (now + self._rng.uniform(0.0, seconds), next(self._serial), one.id, order))

    # -- what engines say ----------------------------------------------------------------------------------------

    def told(self, where: str, event: FirstToken | Finished, now: float) -> list[Order]:
        """An engine said something."""
        one = self._tries.get(event.id)
        if one is None or where not in one.on:
            return []
        one.since = now
        if isinstance(event, FirstToken):
            return []
        one.on.discard(where)
        self._compare(one, where, tuple(event.tokens))
        if event.reason is FinishReason.ABORT and one.prank in ABORTS:
            self._hit(one, one.prank)
        if where != PREFILL:
            self._decoded(one, where, event, now)
            return []
        if event.reason is not FinishReason.LENGTH or event.kv_transfer_params is None:
            self._over(one, now)
            return []
        return self._hand_over(one, event.kv_transfer_params, now)

    def _compare(self, one: _Try, where: str, got: Tokens) -> None:
        expected = one.request.expected
        if got != expected[: len(got)]:
            self.wrong.append(Wrong(one.id, where, expected, got))

    def _hit(self, one: _Try, what: str) -> None:
        self.injected[what] += 1
        one.request.hit.append(what)

    def _hand_over(self, one: _Try, params: Mapping[str, Any], now: float) -> list[Order]:
        """P has computed it; what the router does now."""
        request, prank, n_new = one.request, one.prank, len(one.request.expected)
        if prank is not None and prank in PRANKS:
            self._hit(one, prank)
        if prank == "never read":
            self._over(one, now)
            return []
        if prank == "params changed":
            params = _changed(params)
        elif prank == "nobody at the peer":
            params = {**params, "remote_port": self._ports[0]}
        elif prank == "peer never answers":
            params = {**params, "remote_port": self._ports[1]}
        elif prank == "peer answers nonsense":
            params = {**params, "remote_port": self._ports[2]}
        elif prank == "refused by D":
            n_new = TOO_LONG
        readers = self._decoders if prank == "read twice" else (self._rng.choice(self._decoders),)
        one.on.update(readers)
        if prank == "abort on D":
            self._after(self._within[prank], one, Cut(readers[0], one.id), now)
        reads = [Submit(where, EngineRequest(one.id, request.prompt, n_new, params)) for where in readers]
        for late in reads[1:]:
            self._after(SECOND_WITHIN, one, late, now)
        return list(reads[:1])

    def _decoded(self, one: _Try, where: str, event: Finished, now: float) -> None:
        if event.reason is FinishReason.LENGTH and tuple(event.tokens) == one.request.expected:
            one.right = True
            self.served[where] += 1
        if not one.on:
            self._over(one, now)

    def died(self, where: str, now: float) -> None:
        """An engine is gone: whoever was on it alone is tried again."""
        for one in [one for one in self._tries.values() if where in one.on]:
            one.on.discard(where)
            if not one.on:
                self._over(one, now)

    def _over(self, one: _Try, now: float) -> None:
        """No engine has this try any more."""
        del self._tries[one.id]
        request = one.request
        if one.prank in ABORTS:
            self._landed(one.prank, one.prank in request.hit)
        if one.right:
            self.done += 1
            self.served[PREFILL] += 1
            self.survived.update(request.hit)
        elif request.tries >= TRIES:
            self.lost.append(f"{one.id}: not done after {TRIES} tries")
        else:
            self.retried += 1
            heapq.heappush(self._again, (now + min(AGAIN * request.tries, AGAIN_MOST), request.n, request))

    def _landed(self, prank: str, landed: bool) -> None:
        """An abort's try is over; whether the abort came in time."""
        self._within[prank] = min(ABORT_WITHIN, self._within[prank] * (1.1 if landed else 0.5))
        if not landed:
            self._owed.append(prank)

    def judge(self, now: float) -> list[Order]:
        """Tries that engines are silent about for too long are lost, and taken back."""
        orders: list[Order] = []
        for one in [one for one in self._tries.values() if now - one.since > self._patience]:
            on = " and ".join(sorted(one.on))
            self.lost.append(f"{one.id}: no word from {on} for {self._patience:g} s")
            orders += [Cut(where, one.id) for where in sorted(one.on)]
            del self._tries[one.id]
        return orders

    def give_up(self) -> None:
        """Whatever is not done is lost."""
        left = [*(one.request for one in self._tries.values()), *(request for _, _, request in self._again)]
        self.lost += [f"r{request.n}: not done when time was over" for request in left]
        self._tries.clear()
        self._again.clear()

    def __iter__(self) -> Iterator[str]:
        return iter(self._tries)

    def __repr__(self) -> str:
        return (
            f"Book(asked={self.asked} done={self.done} in flight={self.in_flight} retried={self.retried}"
            f" lost={len(self.lost)} wrong={len(self.wrong)})"
        )


def _changed(params: Mapping[str, Any]) -> dict[str, Any]:
    """What P answered with its first block another one."""
    blocks = [list(group) for group in params["remote_block_ids"]]
    blocks[0][0] += 1
    return {**params, "remote_block_ids": blocks}
