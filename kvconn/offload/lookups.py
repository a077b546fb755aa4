"""What the secondary tiers seem to have of a request's blocks: asked on threads, answered when known.

Rules
1. The engine's thread never touches a disk: it asks, waits a moment (``LIMITS.lookup_inline``) for a disk that is
   quick, and looks later whether there is an answer. Waiting for the next step would cost a request more than that.
2. One question per request; it is bounded, has a deadline, and is forgotten with the request (C10).
3. An answer is a hint. A key that could not be fetched is taken out of all answers.
4. A tier that was too slow is not asked for a while: every request would wait for it in vain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvconn.config import LIMITS
from kvconn.offload.jobs import JobTable, Number
from kvconn.offload.runner import Runner
from kvconn.offload.tiers.base import MAX_KEY, SecondaryTier

__all__ = ["Lookups"]

THREADS = 2


@dataclass
class _Question:
    """``found`` is written by one thread before its job returns, and read after that."""

    id: str
    keys: tuple[bytes, ...]
    found: set[bytes] = field(default_factory=set)


class Lookups:
    """Questions to ``tiers``, at most ``limit`` waiting."""

    def __init__(self, tiers: Sequence[SecondaryTier], limit: int) -> None:
        self._tiers = tiers
        self._table: JobTable[_Question] = JobTable(limit, attached=False)
        self._runner = Runner("kvconn-offload-lookup", THREADS, self._table, self._ask) if tiers else None
        self._limit = limit
        self._serial = 0
        #: the newest question that was waited for
        self._waited: Number = (0, 0)
        #: questions not answered yet, and by request their numbers
        self._open: dict[Number, _Question] = {}
        self._numbers: dict[str, Number] = {}
        self._answers: dict[str, set[bytes]] = {}
        self._rests_until = float("-inf")

    def usable(self, now: float) -> bool:
        """There is a tier, and it is not resting."""
        return bool(self._tiers) and now >= self._rests_until

    def rest(self, until: float) -> None:
        """Ask nobody before then."""
        self._rests_until = until

    def ask(self, id: str, keys: Sequence[bytes], deadline: float) -> None:
        """Begin to find out which of ``keys`` can be fetched. Asked before: nothing."""
        self._drain()
        if id in self._numbers or id in self._answers:
            return
        self._serial += 1
        number = self._numbers[id] = (self._serial, 0)
        question = self._open[number] = _Question(id, tuple(keys))
        self._table.add(number, question, deadline)

    def soon(self, id: str, now: float) -> set[bytes] | None:
        """The answer, waited for a moment, once a question (rule 1)."""
        number = self._numbers.get(id)
        if number is not None and number > self._waited:
            self._waited = number
            self._table.settle(number, LIMITS.lookup_inline)
        return self.answer(id, now)

    def roomy(self) -> bool:
        """Another question would not wait behind many: what is asked ahead of its turn must not crowd out the rest."""
        return len(self._open) < self._limit // 2

    def answer(self, id: str, now: float) -> set[bytes] | None:
        """Keys that seem to be there; None: not known yet, or not asked."""
        self._table.expire(now)
        self._drain()
        return self._answers.get(id)

    def _drain(self) -> None:
        """Take in what the threads found; nobody may want it any more."""
        for ended in self._table.take_ended():
            question = self._open.pop(ended.number, None)
            if question is not None:
                del self._numbers[question.id]
                self._answers[question.id] = question.found if ended.fine else set()

    def forget(self, id: str) -> None:
        """Nobody waits for this answer any more."""
        number = self._numbers.pop(id, None)
        if number is not None:
            del self._open[number]
        self._answers.pop(id, None)

    def missed(self, key: bytes) -> None:
        """It was not there after all."""
        for answer in self._answers.values():
            answer.discard(key)

    def _ask(self, number: Number, question: _Question) -> bool:
        keys = [key for key in question.keys if 0 < len(key) <= MAX_KEY]
        for tier in self._tiers:
            question.found.update(key for key, there in zip(keys, tier.present(keys), strict=True) if there)
        return True

    def close(self) -> None:
        """Stop asking. Idempotent."""
        if self._runner is not None:
            self._runner.close(LIMITS.end_disk)
        for tier in self._tiers:
            tier.close()

    def __len__(self) -> int:
        return len(self._open) + len(self._answers)
