"""What one worker does with its peers: shakes hands, loads and removes their agents, tells them.

Rules
1. Nothing here blocks: handshakes run on the client's thread, work waits for them in the peer. A peer with several
   ranks is asked twice: its first rank, then all others at once; one that does not answer fails the handshake. Its
   agents are loaded beside the step thread, one peer at a time, and begun where that needs our agent least: at the end
   of a poll.
2. An agent is removed when the last peer that has it is forgotten, and nothing is posted under it (C6).
3. A peer that cannot be told, or whose connection failed, takes no new work; when it is idle it is forgotten, so that
   the next request shakes hands anew.
Time is an argument, in seconds of the worker's clock.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Collection, Iterable, Sequence

from kvconn.config import NixlSettings
from kvconn.errors import PeerError, RequestError, TransportError
from kvconn.geometry import Place
from kvconn.metrics import Meter
from kvconn.nixl.agent import Agent
from kvconn.nixl.handshake import FIRST, Greeting, Offer, Ours
from kvconn.nixl.peers import Peer, PeerKey, Peers, PeerState, Source, Work
from kvconn.nixl.sideclient import HandshakeClient, HandshakeResult
from kvconn.nixl.wire import encode_done, encode_heartbeats
from kvconn.trust import load_trust

__all__ = ["Contacts"]

log = logging.getLogger("kvconn.nixl")
EVICT_EVERY = 10.0
#: transfer ids in one heartbeat: of the longest, they stay below wire.MAX_NOTIFICATION
HEARTBEAT_IDS = 256


class Contacts:
    """All peers of one worker. Without :meth:`open` there are none, and nothing is ever asked."""

    def __init__(self, settings: NixlSettings, rank: int, agent: Agent, meter: Meter) -> None:
        self._settings = settings
        self._rank = rank
        self._agent = agent
        self._meter = meter
        self._ours: Ours | None = None
        self._client: HandshakeClient | None = None
        self._trust = load_trust(settings.kvconn)
        self._peers = Peers(settings.kvconn.peers_max, settings.kvconn.waiting_max)
        #: by the client's number: which rank was asked, in whose handshake
        self._asked: dict[int, tuple[Peer, Greeting, Place]] = {}
        #: answers that were not looked at yet, and a peer all of whose ranks have answered: its agents are loaded next
        self._answers: deque[HandshakeResult] = deque()
        self._next: tuple[Peer, list[Offer]] | None = None
        #: whose agents are being loaded
        self._met: tuple[Peer, list[Offer]] | None = None
        #: since when, and whether that is too long
        self._met_since = 0.0
        self._overdue = False
        self._next_eviction = 0.0

    def open(self, ours: Ours) -> None:
        """Begin to shake hands, as this rank."""
        self._ours = ours
        self._client = HandshakeClient(self._settings.kvconn.handshake, trust=self._trust)

    def with_peer(self, key: PeerKey, now: float, work: Work) -> None:
        """Run ``work`` with this peer: now, after its handshake, or with None and the reason."""
        if self._ours is None or not self._peers.want(key, work, now):
            return
        peer = self._peers.get(key)
        if peer is not None:
            self._ask(peer, Greeting(self._ours, key), [FIRST])

    def get(self, key: PeerKey) -> Peer | None:
        return self._peers.get(key)

    # -- handshakes ----------------------------------------------------------------------------------------------

    def _ask(self, peer: Peer, greeting: Greeting, places: Iterable[Place]) -> None:
        if self._client is None:
            return
        for place in places:
            self._asked[self._client.start(peer.key, place.pp, place.tp)] = (peer, greeting, place)

    def drain(self, now: float) -> None:
        """Answers that came since the last call: work that waited for them runs here. Each peer's wait for the agents
        of the one before: many answers at once hold up no step."""
        if self._client is None:
            return
        self._answers += self._client.results()
        self.met(now)
        while self._answers and self._next is None:
            result = self._answers.popleft()
            peer = self._hear(result, now)
            transport = self._agent.transport
            if transport is None or transport.meets_slowly:
                if peer is not None and result.payload is not None and not self._next_is_of(peer):
                    break
            else:
                self.meet(now)
                self.met(now)

    def _next_is_of(self, peer: Peer) -> bool:
        """The next answer is of this peer too: of another of its ranks."""
        asked = self._asked.get(self._answers[0].ask) if self._answers else None
        return asked is not None and asked[0] is peer

    def _hear(self, result: HandshakeResult, now: float) -> Peer | None:
        """Whose answer it was; None when its handshake is over."""
        asked = self._asked.pop(result.ask, None)
        if asked is None:
            return None
        peer, greeting, place = asked
        try:
            self._answered(peer, greeting, place, result)
        except (PeerError, RequestError, TransportError) as err:
            self._asked = {ask: one for ask, one in self._asked.items() if one[1] is not greeting}
            self._failed(peer, err, now)
        return peer

    def _answered(self, peer: Peer, greeting: Greeting, place: Place, result: HandshakeResult) -> None:
        """Check everything first, load last: a peer that fails leaves nothing behind."""
        payload, why = result.payload, result.why
        if payload is None or self._agent.transport is None:
            whom = "" if place == FIRST else f" (its rank pp {place.pp} tp {place.tp})"
            raise PeerError(peer.name, "handshake", (why or "this rank has no NIXL agent") + whom)
        peer.clock_offset = result.clock_offset if place == FIRST else peer.clock_offset
        self._ask(peer, greeting, greeting.answered(place, payload))
        if greeting.done:
            self._next = peer, greeting.offers

    def _failed(self, peer: Peer, err: PeerError | RequestError | TransportError, now: float) -> None:
        self._meter.add("params_refused" if isinstance(err, RequestError) else "nixl_num_failed_handshakes")
        again = peer.failed(str(err), now)
        log.warning("rank %d: handshake failed, none again for %g s: %s", self._rank, again, err)

    @property
    def meets_next(self) -> bool:
        """Would :meth:`meet` begin something?"""
        return self._next is not None

    def meet(self, now: float) -> None:
        """Begin to load the agents of the next peer. Last in a poll: from here on our agent may be busy."""
        if self._next is not None and self._agent.transport is not None:
            self._met, self._next = self._next, None
            self._met_since, self._overdue = now, False
            self._agent.meet([offer.blob for offer in self._met[1]])

    def watch(self, now: float) -> None:
        """While our agent is busy: an introduction cannot be ended, so past its deadline that is said, once (C7)."""
        if self._met is None or self._overdue or now - self._met_since < self._settings.kvconn.handshake:
            return
        self._overdue = True
        self._meter.add("introductions_overdue")
        log.error(
            "rank %d: NIXL has not loaded the agents of %s within %g s. No transfer of this rank is posted or judged "
            "before it has; if it never does, restart this engine",
            self._rank, self._met[0].name, self._settings.kvconn.handshake,
        )  # fmt: skip

    def explain(self, now: float) -> list[str]:
        """One line for an introduction that is overdue."""
        met = self._met
        if met is None or not self._overdue:
            return []
        return [f"introduction of {met[0].name}: for {now - self._met_since:.1f} s, all of this rank waits for it"]

    def met(self, now: float) -> None:
        """The agents of a peer are loaded, all or none: work that waited for it runs here. Not while ours is busy."""
        if self._met is None:
            return
        (peer, offers), self._met = self._met, None
        names, error = self._agent.met()
        if error is None:
            peer.ready(tuple(Source(name, offer.plan) for name, offer in zip(names, offers, strict=True)), now)
        else:
            self._remove(set(names))
            self._failed(peer, error, now)

    @property
    def next_due(self) -> float:
        """When :meth:`drain` or :meth:`evict` may find something to do; at once while somebody is asked."""
        if (
            self._asked
            or self._answers
            or self._next
            or self._met
            or len(self._peers) > self._settings.kvconn.peers_max
        ):
            return -math.inf
        return self._next_eviction if len(self._peers) else math.inf

    # -- telling -------------------------------------------------------------------------------------------------

    def tell_done(self, peer: Peer | None, transfer_id: str) -> None:
        """We are done with this transfer; a producer that cannot be told waits for its lease."""
        if peer is not None:
            self._tell(peer, [(one.agent, encode_done(transfer_id, one.plan.readers)) for one in peer.sources])

    def heartbeat(self, transfer_ids: Sequence[str], peer: Peer | None, why: str, now: float) -> None:
        """These transfers are still wanted."""
        if peer is None:
            return
        for start in range(0, len(transfer_ids), HEARTBEAT_IDS):
            message = encode_heartbeats(transfer_ids[start : start + HEARTBEAT_IDS])
            self._tell(peer, [(one.agent, message) for one in peer.sources])

    def _tell(self, peer: Peer, messages: Iterable[tuple[str, bytes]]) -> None:
        """A message to each agent."""
        lost = [agent for agent, message in messages if not self._notify(peer, agent, message)]
        if lost and peer.idle:  # gone or restarted: the next request shakes hands anew
            self.drop(lost, "it could not be notified")

    def _notify(self, peer: Peer, agent: str, message: bytes) -> bool:
        transport = self._agent.transport
        if transport is None:
            return True  # our loss: the peer is as good as before
        try:
            transport.notify(agent, message)
        except TransportError as err:
            self._meter.add("nixl_num_failed_notifications")
            log.warning("rank %d: cannot notify %s: %s", self._rank, peer.rank_name(agent), err)
            return False
        return True

    # -- the end of peers ----------------------------------------------------------------------------------------

    def drop(self, agents: Collection[str], why: str) -> None:
        """Peers with one of these agents take no new work, and are forgotten once they are idle."""
        for peer in self._peers.having(agents):
            peer.drain(why)
            self.rests(peer)

    def rests(self, peer: Peer) -> None:
        """Something of this peer ended: forget it if that was the last, and it takes no new work."""
        if peer.state is PeerState.DRAINING and peer.idle and self._peers.get(peer.key) is peer:
            self._peers.forget(peer)
            self._remove(peer.agents)

    def evict(self, now: float) -> None:
        """Bound the table (C7). Only peers under which nothing is posted go (C6)."""
        if now < self._next_eviction and len(self._peers) <= self._settings.kvconn.peers_max:
            return
        self._next_eviction = now + EVICT_EVERY
        self._remove({agent for peer in self._peers.evict(now, self._settings.engine_ttl) for agent in peer.agents})

    def _remove(self, agents: Iterable[str]) -> None:
        """Forget those of these agents that no peer has any more, nor is about to: an engine may have several
        addresses."""
        transport = self._agent.transport
        if transport is None:
            return
        for agent in set(agents) - self._peers.agents() - self._agent.introduced:
            try:
                transport.remove_peer(agent)
            except TransportError as err:
                log.warning("rank %d: cannot remove a peer's agent: %s", self._rank, err)

    def agent_destroyed(self, why: str, now: float) -> None:
        """Our agent is gone, and with it what it knew of peers."""
        self._asked.clear()
        self._answers.clear()
        self._next = self._met = None
        for peer in self._peers.clear():
            peer.failed(why, now)

    def close(self) -> None:
        """Idempotent."""
        if self._client is not None:
            self._client.close()
            self._client = None

    def __repr__(self) -> str:
        return repr(self._peers)
