"""Receive lives of one worker: what is posted, what is quiet, what failed. Pure; time is an argument.

Rules
1. *Failed* and *released* are two events (C6): a life is failed as soon as that is known, and its blocks are given
   back only when every handle of it is quiet.
2. A handle is quiet when it was seen DONE, or ERR with its peer gone. ERR alone is not quiet (F4), nor is a
   released handle (F1).
3. Every life has a deadline; past it the life is failed, and its blocks stay in quarantine until quiet (C7).
4. Each life settles once.
5. Cost follows events, not what is open: what a poll asks for is kept as it changes, deadlines lie in a heap, and a
   poll looks at a bounded number of handles, in turn.
"""

from __future__ import annotations

import heapq
from itertools import islice
from typing import Final

import msgspec

from kvconn.params import PeerKey, peer_name

__all__ = ["LOOKS", "Reads", "Settled"]

#: handles a poll looks at: asking NIXL costs about a microsecond each. With more under way each is looked at every few
#: polls; those that are about to decide a life (fence words) are looked at in every one.
LOOKS: Final = 256


class Settled(msgspec.Struct, frozen=True):
    """A life whose blocks nothing of ours can write any more."""

    id: str
    n: int
    failed: str | None


class _Read(msgspec.Struct, gc=False):
    id: str
    n: int
    deadline: float
    peer: PeerKey | None
    blocks: int
    began: float
    posting: bool = True
    posted: bool = False
    #: mostly one or a few
    handles: tuple[int, ...] = ()
    failed: str | None = None
    failed_at: float | None = None

    @property
    def quarantine(self) -> tuple[float, str] | None:
        """Of a failed life that is not quiet: when it failed, and why."""
        if not self.handles or self.failed is None or self.failed_at is None:
            return None
        return self.failed_at, self.failed


class Reads:
    """Receive lives by request id (one per id is open at a time; the scheduler half opens them)."""

    def __init__(self) -> None:
        self._open: dict[str, _Read] = {}
        #: a handle's life, and the agent it reads from
        self._by_handle: dict[int, tuple[_Read, str]] = {}
        self._errors: set[int] = set()
        #: handles that may still change, whose turn it is first
        self._turns: dict[int, None] = {}
        self._deadlines: list[tuple[float, int, str]] = []
        # lives by what they wait for, kept by _sort
        self._drained: dict[str, None] = {}
        self._over: dict[str, _Read] = {}
        self._quarantine: dict[str, _Read] = {}
        self._quarantined_blocks = 0
        #: lives of which something came since the last :meth:`settle`
        self._moved: set[str] = set()

    def begin(self, id: str, n: int, peer: PeerKey | None, deadline: float, blocks: int = 0, now: float = 0.0) -> None:
        """A life arrived. It settles only after :meth:`posted_all` or :meth:`fail`. ``blocks``: how many it fills."""
        assert id not in self._open, f"the scheduler half opened {id} twice"
        self._open[id] = _Read(id, n, deadline, peer, blocks, now)
        heapq.heappush(self._deadlines, (deadline, n, id))

    def posted(self, id: str, handle: int, agent: str) -> None:
        """A handle of this life is under way, from the peer's rank with this agent."""
        read = self._open[id]
        read.handles = (*read.handles, handle)
        read.posted = True
        self._by_handle[handle] = read, agent
        self._turns[handle] = None
        self._moved.add(id)
        self._sort(read)

    def posted_all(self, id: str) -> None:
        """Nothing more will be posted for this life."""
        read = self._open[id]
        read.posting = False
        self._sort(read)

    def fail(self, id: str, why: str, now: float) -> bool:
        """The result is failure; the first reason stands. False when the life is not open or failed already."""
        read = self._open.get(id)
        if read is None or read.failed is not None:
            return False
        read.failed, read.failed_at, read.posting = why, now, False
        self._sort(read)
        return True

    def _sort(self, read: _Read) -> None:
        """After a change: is it drained, over, in quarantine, or does it wait for its handles?"""
        self._drained.pop(read.id, None)
        if not read.handles and read.posting and read.posted:
            self._drained[read.id] = None
        if not read.handles and not read.posting:
            self._over[read.id] = read
        else:
            self._over.pop(read.id, None)
        if (read.id in self._quarantine) == (read.quarantine is not None):
            return
        if read.quarantine is not None:
            self._quarantine[read.id] = read
            self._quarantined_blocks += read.blocks
        else:
            del self._quarantine[read.id]
            self._quarantined_blocks -= read.blocks

    def to_poll(self, looks: int = LOOKS) -> list[int]:
        """Handles that may still change, the next ``looks`` of them, in turn."""
        if len(self._turns) <= looks:
            return list(self._turns)
        turn = list(islice(self._turns, looks))
        for handle in turn:  # to the end
            del self._turns[handle]
        self._turns.update(dict.fromkeys(turn))
        return turn

    def done(self, handle: int) -> None:
        """The transport said DONE: quiet."""
        self._quiet(handle)

    def error(self, handle: int) -> str:
        """The transport said ERR: not quiet. Returns the life's id; the caller fails it."""
        self._errors.add(handle)
        self._turns.pop(handle, None)
        return self._by_handle[handle][0].id

    def errors(self) -> list[int]:
        """Handles in ERR that are not known to be quiet."""
        return list(self._errors)

    def agent_gone(self, agent: str) -> list[int]:
        """This rank of a peer is gone: its ERR handles are quiet. Returns the handles that became so."""
        gone = [h for h in self._errors if self._by_handle[h][1] == agent]
        for handle in gone:
            self._quiet(handle)
        return gone

    def agent_destroyed(self) -> None:
        """Our own agent is gone: nothing lands any more (F1), every handle is quiet. The caller failed the lives."""
        for handle in list(self._by_handle):
            self._quiet(handle)

    def _quiet(self, handle: int) -> None:
        self._errors.discard(handle)
        self._turns.pop(handle, None)
        read, _ = self._by_handle.pop(handle, (None, ""))
        if read is not None:
            read.handles = tuple(one for one in read.handles if one != handle)
            self._moved.add(read.id)
            self._sort(read)

    def handles_of(self, id: str) -> list[int]:
        """Handles of an open life that are not known to be quiet."""
        return list(self._open[id].handles)

    def overdue(self, now: float) -> list[str]:
        """Ids whose deadline has passed, that have not failed yet, and of which nothing came in this poll. Judge after
        their states were read (C11): a poll that comes late finds what came in time."""
        due: list[tuple[float, int, str]] = []
        while self._deadlines:
            deadline, n, id = self._deadlines[0]
            read = self._open.get(id)
            waits = read is not None and read.n == n and read.failed is None
            if waits and deadline > now:
                break
            heapq.heappop(self._deadlines)
            if waits:
                due.append((deadline, n, id))
        for one in due:  # until its caller fails it
            heapq.heappush(self._deadlines, one)
        return [id for _, _, id in due if id not in self._over and id not in self._moved]

    def drained(self) -> list[str]:
        """Ids whose posted handles are all quiet and good, and for which more may be posted."""
        return list(self._drained)

    def settle(self) -> list[Settled]:
        """Lives that are over: everything quiet, and either failed or fully posted."""
        self._moved.clear()
        over, self._over = self._over, {}
        for id in over:
            del self._open[id]
        if not self._open:
            self._deadlines.clear()
        return [Settled(read.id, read.n, read.failed) for read in over.values()]

    @property
    def expecting(self) -> bool:
        """Lives are open, and none is over yet."""
        return bool(self._open) and not self._over

    def quarantined(self, now: float) -> list[tuple[str, float, str]]:
        """Failed lives that are not quiet: id, age of the failure in seconds, reason."""
        held = ((read.id, read.quarantine) for read in self._quarantine.values())
        return [(id, now - since[0], since[1]) for id, since in held if since is not None]

    def quarantined_blocks(self) -> int:
        """Blocks of failed lives that are not quiet."""
        return self._quarantined_blocks

    def explain(self, now: float) -> list[str]:
        """One line per open life."""
        lines = []
        for read in list(self._open.values()):
            left = f"{read.deadline - now:.1f} s to its deadline"
            held = read.quarantine
            if held is not None:
                left = f"in quarantine for {now - held[0]:.1f} s: {held[1]}"
            stage = f"{len(read.handles)} reads" if read.posted else "handshake"
            whom = peer_name(read.peer) if read.peer is not None else "nobody"
            lines.append(f"recv of {read.id} (life {read.n}) from {whom}: {stage}, {read.blocks} blocks, {left}")
        return lines

    def life(self, id: str) -> int:
        """n of the open life of this id, 0 when none is open."""
        read = self._open.get(id)
        return 0 if read is None else read.n

    def age(self, id: str, now: float) -> float:
        """Seconds since the open life of this id began."""
        read = self._open.get(id)
        return 0.0 if read is None else now - read.began

    def ids(self) -> list[str]:
        """Ids of the open lives."""
        return list(self._open)

    def __len__(self) -> int:
        return len(self._open)

    def __repr__(self) -> str:
        failed = sum(1 for r in self._open.values() if r.failed is not None)
        return f"Reads(open={len(self._open)} handles={len(self._by_handle)} quarantined={failed})"
