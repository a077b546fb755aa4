"""Peers of one worker: a Peer owns the ranks it is read from or told at, and its state. Pure; time is an argument.

Rules
1. State changes of a peer happen in this file only:

       UNKNOWN --want--> HANDSHAKING --ok--> READY --drain--> DRAINING --idle--> (forgotten)
                              |  failed                        ^
                              v                                |
                           INVALID --want after backoff--> HANDSHAKING

2. Work waits on a peer in HANDSHAKING, bounded; a failed handshake fails exactly that work and no other peer's.
3. A peer is removed only when nothing is posted under it (C6): it drains first.
4. The table is bounded; the longest idle peer drains to make room.
5. A peer is one engine with all its ranks that ours reads or tells: it is ready when all of them are, and over when one
   of them is.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection

import msgspec

from kvconn.geometry import Place
from kvconn.nixl.plan import Plan
from kvconn.params import PeerKey, peer_name

__all__ = ["Peer", "PeerKey", "PeerState", "Peers", "Source", "Work"]

#: called with the peer when it is ready, or with None and the reason; then the time.
Work = Callable[["Peer | None", str, float], None]


class PeerState(enum.Enum):
    UNKNOWN = "unknown"
    HANDSHAKING = "handshaking"
    READY = "ready"
    DRAINING = "draining"
    INVALID = "invalid"


class Source(msgspec.Struct, frozen=True):
    """A rank of a peer: the name of its loaded agent, and what our rank reads of it; nothing where it is only told."""

    agent: str
    plan: Plan

    @property
    def place(self) -> Place:
        return self.plan.source


class Peer:
    """Another engine, as one rank of ours sees it."""

    def __init__(self, key: PeerKey) -> None:
        self.key = key
        self.state = PeerState.UNKNOWN
        #: while it is ready or drains
        self.sources: tuple[Source, ...] = ()
        self.why = ""
        self.last_used = 0.0
        self.ready_at = 0.0
        #: its clock minus ours in seconds, where it says
        self.clock_offset: float | None = None
        self.posted = 0
        self._waiting: list[Work] = []
        self._backoff = 0.0
        self._retry_at = 0.0

    @property
    def name(self) -> str:
        return peer_name(self.key)

    @property
    def agents(self) -> frozenset[str]:
        """Names of its loaded agents."""
        return frozenset(source.agent for source in self.sources)

    def source(self, place: Place) -> Source | None:
        """Its rank there, while it is known."""
        return next((source for source in self.sources if source.place == place), None)

    def rank_name(self, agent: str) -> str:
        """How logs and errors call the rank with this agent; the peer's name where it has no other rank."""
        places = [source.place for source in self.sources if source.agent == agent]
        if (self.key.tp, self.key.pp) == (1, 1) or not places:
            return self.name
        return f"{self.name} pp {places[0].pp} tp {places[0].tp}"

    def want(self, work: Work, now: float, waiting_max: int) -> bool:
        """Run ``work`` when the peer is ready. True: the caller must start a handshake now."""
        self.last_used = now
        if self.state is PeerState.READY:
            work(self, "", now)
            return False
        if self.state is PeerState.DRAINING or (self.state is PeerState.INVALID and now < self._retry_at):
            work(None, self.why or "peer is draining", now)
            return False
        if len(self._waiting) >= waiting_max:
            work(None, f"{waiting_max} requests wait for this peer's handshake already", now)
            return False
        self._waiting.append(work)
        if self.state is PeerState.HANDSHAKING:
            return False
        self.state = PeerState.HANDSHAKING
        return True

    def ready(self, sources: tuple[Source, ...], now: float) -> None:
        """The handshake succeeded, with every rank: run what waited."""
        self.state, self.sources, self.why, self._backoff = PeerState.READY, sources, "", 0.0
        self.ready_at = now
        for work in self._take():
            work(self, "", now)

    def failed(self, why: str, now: float) -> float:
        """The handshake failed: fail what waited, refuse for a while (1, 2, 4 ... 60 s), which is returned."""
        self.state, self.sources, self.why = PeerState.INVALID, (), why
        self._backoff = min(60.0, self._backoff * 2 or 1.0)
        self._retry_at = now + self._backoff
        for work in self._take():
            work(None, why, now)
        return self._backoff

    def began(self) -> None:
        """A load of it is posted."""
        self.posted += 1

    def ended(self) -> None:
        """One of them is over, and quiet."""
        self.posted -= 1

    def used(self, now: float) -> None:
        """It answered: it is not idle."""
        self.last_used = now

    def drain(self, why: str) -> None:
        """Take no new work."""
        self.state, self.why = PeerState.DRAINING, why

    def _take(self) -> list[Work]:
        waiting, self._waiting = self._waiting, []
        return waiting

    @property
    def idle(self) -> bool:
        return self.posted == 0 and not self._waiting

    def __repr__(self) -> str:
        return f"Peer({self.name} {self.state.value} posted={self.posted} waiting={len(self._waiting)})"


class Peers:
    """All peers of one worker, bounded."""

    def __init__(self, peers_max: int = 4096, waiting_max: int = 4096) -> None:
        self._peers: dict[PeerKey, Peer] = {}
        self._max = peers_max
        self._waiting_max = waiting_max

    def want(self, key: PeerKey, work: Work, now: float) -> bool:
        """Run ``work`` with this peer when it is ready. True: the caller must start a handshake now."""
        peer = self._peers.get(key)
        if peer is None:
            peer = self._peers[key] = Peer(key)
        return peer.want(work, now, self._waiting_max)

    def get(self, key: PeerKey) -> Peer | None:
        return self._peers.get(key)

    def ready(self) -> list[Peer]:
        return [peer for peer in self._peers.values() if peer.state is PeerState.READY]

    def evict(self, now: float, ttl: float) -> list[Peer]:
        """Forget idle peers: drained ones, those past ``ttl`` seconds and, over the bound, the longest idle.

        Returns those that the transport must remove.
        """
        idle = sorted(
            (p for p in self._peers.values() if p.idle and p.state is not PeerState.HANDSHAKING),
            key=lambda p: p.last_used,
        )
        over = len(self._peers) - self._max
        out = [p for i, p in enumerate(idle) if i < over or now - p.last_used > ttl or p.state is PeerState.DRAINING]
        for peer in out:
            peer.drain("evicted")
            del self._peers[peer.key]
        return out

    def forget(self, peer: Peer) -> None:
        """This peer is over; the next work for its key starts from UNKNOWN."""
        if self._peers.get(peer.key) is peer:
            del self._peers[peer.key]

    def having(self, agents: Collection[str]) -> list[Peer]:
        """Peers with one of these agents: more than one where one engine has several addresses."""
        return [p for p in self._peers.values() if not p.agents.isdisjoint(agents)]

    def agents(self) -> set[str]:
        """Of all peers."""
        return {source.agent for peer in self._peers.values() for source in peer.sources}

    def clear(self) -> list[Peer]:
        """Forget all peers (our agent is gone); the caller fails them, so that nothing waits on a forgotten one."""
        out = list(self._peers.values())
        self._peers.clear()
        return out

    def __len__(self) -> int:
        return len(self._peers)

    def __repr__(self) -> str:
        states: dict[str, int] = {}
        for peer in self._peers.values():
            states[peer.state.value] = states.get(peer.state.value, 0) + 1
        return "Peers(" + " ".join(f"{k}={v}" for k, v in sorted(states.items())) + ")"
