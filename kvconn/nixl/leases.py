"""Sends of one serving worker: who may still read, until when. Pure; time is an argument.

Rules
1. A send is held from :meth:`SendLeases.track` until its readers are done or its lease ended; each ends it once.
2. A notification that comes before its send is announced waits, bounded in number and by one lease, and counts when
   the announcement comes (C1).
3. Readers are identified by the agent a notification came from. A rank is done when the sum of 1/n over distinct
   agents reaches the readers asked for; an agent that contradicts itself is ignored.
4. A heartbeat moves the deadline to now + two thirds of the lease, never back.
5. Cost follows events: deadlines live in a heap whose stale entries are skipped when they come up.
Deadlines are seconds of the worker's clock.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from fractions import Fraction

import msgspec

__all__ = ["Ended", "SendLeases"]


class Ended(msgspec.Struct, frozen=True):
    """A send that nobody reads any more. ``expired``: its lease ran out before its readers were done."""

    id: str
    n: int
    transfer_id: str
    expired: bool


class _Send(msgspec.Struct, order=True, gc=False):
    """``due``: its place in the heap, by which it is ordered; a heartbeat moves ``deadline`` alone (rule 5).

    ``heard``: agents, and the n that each said; None while that is nobody, so most sends for most of their time.
    """

    due: float
    id: str
    n: int
    transfer_id: str
    readers: int
    deadline: float
    heard: dict[str, int] | None

    @property
    def done(self) -> bool:
        if not self.heard:
            return False
        return sum((Fraction(1, n) for n in self.heard.values()), Fraction(0)) >= self.readers


@dataclass(slots=True)
class _Early:
    since: float
    heard: dict[str, int] = field(default_factory=dict)


class SendLeases:
    """Held sends by transfer id."""

    def __init__(self, lease: float, early_max: int = 4096) -> None:
        self._extension = lease * 2 / 3
        self._early_max = early_max
        self._held: dict[str, _Send] = {}
        self._heap: list[_Send] = []
        self._lease = lease
        self._early: OrderedDict[str, _Early] = OrderedDict()
        #: notifications that changed nothing: late, repeated, contradicting, or dropped to stay bounded.
        self.ignored = 0

    def track(self, id: str, n: int, transfer_id: str, deadline: float, readers: int = 1) -> Ended | None:
        """Hold a send. Returns its end when early notifications have completed it already."""
        if transfer_id in self._held:
            self.ignored += 1
            return None
        early = self._early.pop(transfer_id, None)
        send = _Send(deadline, id, n, transfer_id, readers, deadline, early.heard if early else None)
        if send.done:
            return Ended(id, n, transfer_id, expired=False)
        self._held[transfer_id] = send
        heapq.heappush(self._heap, send)
        return None

    def notified(self, transfer_id: str, agent: str, n: int, now: float) -> Ended | None:
        """``agent`` is done; ``n`` ranks of its engine read from this rank."""
        send = self._held.get(transfer_id)
        if send is None:
            self._remember(transfer_id, agent, n, now)
            return None
        if send.heard is None:
            send.heard = {}
        elif agent in send.heard:
            self.ignored += 1
            return None
        send.heard[agent] = n
        if not send.done:
            return None
        del self._held[transfer_id]
        return Ended(send.id, send.n, transfer_id, expired=False)

    def _remember(self, transfer_id: str, agent: str, n: int, now: float) -> None:
        heard = self._early.setdefault(transfer_id, _Early(now)).heard
        if agent in heard or len(heard) >= self._early_max:
            self.ignored += 1
        else:
            heard[agent] = n
        while len(self._early) > self._early_max:
            self._early.popitem(last=False)
            self.ignored += 1

    def heartbeat(self, transfer_ids: Iterable[str], now: float) -> None:
        """A reader still means to read these."""
        for transfer_id in transfer_ids:
            send = self._held.get(transfer_id)
            if send is not None and now + self._extension > send.deadline:
                send.deadline = now + self._extension

    @property
    def next_due(self) -> float:
        """When :meth:`expire` may find something; a heartbeat may have moved it since."""
        first = self._heap[0].due if self._heap else math.inf
        if self._early:
            first = min(first, next(iter(self._early.values())).since + self._lease)
        return first

    def expire(self, now: float) -> list[Ended]:
        """Sends whose deadline has passed. Call after notifications were drained (C11)."""
        ended: list[Ended] = []
        while self._heap and (self._heap[0].due <= now or not self._holds(self._heap[0])):
            send = heapq.heappop(self._heap)
            if not self._holds(send):
                continue
            if send.deadline > now:
                send.due = send.deadline
                heapq.heappush(self._heap, send)
                continue
            del self._held[send.transfer_id]
            ended.append(Ended(send.id, send.n, send.transfer_id, expired=True))
        while self._early and next(iter(self._early.values())).since <= now - self._lease:
            self._early.popitem(last=False)
            self.ignored += 1
        return ended

    def _holds(self, send: _Send) -> bool:
        return self._held.get(send.transfer_id) is send

    def explain(self, now: float) -> list[str]:
        """One line per held send."""
        return [
            f"lease of {send.id} (life {send.n}): heard {len(send.heard or ())} of {send.readers} readers, "
            f"{send.deadline - now:.1f} s left"
            for send in list(self._held.values())
        ]

    def __len__(self) -> int:
        return len(self._held)

    def __repr__(self) -> str:
        return f"SendLeases(held={len(self._held)} early={len(self._early)} ignored={self.ignored})"
