"""What one worker does with its peers: shakes hands, loads and removes their agents, tells them.

Rules
1. Nothing here blocks: handshakes run on the client's thread, work waits for them in the peer.
2. An agent is removed when the last peer that has it is forgotten, and nothing is posted under it (C6).
3. A peer that cannot be told, or whose connection failed, takes no new work; when it is idle it is forgotten, so that
   the next request shakes hands anew.
Time is an argument, in seconds of the worker's clock.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from kvconn.base import KVCacheView
from kvconn.config import ConnectorConfig, NixlSettings
from kvconn.errors import PeerError, TransportError
from kvconn.geometry import RankRole, Region
from kvconn.metrics import Meter
from kvconn.nixl.agent import Agent
from kvconn.nixl.handshake import admit
from kvconn.nixl.peers import Peer, PeerKey, Peers, PeerState, Work
from kvconn.nixl.plan import Plan
from kvconn.nixl.sidechannel import HandshakeClient, HandshakeResult
from kvconn.nixl.wire import WireCodec, encode_done, encode_heartbeats

__all__ = ["Contacts"]

log = logging.getLogger("kvconn.nixl")
EVICT_EVERY = 10.0
#: transfer ids in one heartbeat: of the longest, they stay below wire.MAX_NOTIFICATION
HEARTBEAT_IDS = 256


class Contacts:
    """All peers of one worker. Without :meth:`open` there are none, and nothing is ever asked."""

    def __init__(
        self,
        config: ConnectorConfig,
        settings: NixlSettings,
        kv_cache: KVCacheView,
        role: RankRole,
        codec: WireCodec,
        agent: Agent,
        meter: Meter,
    ) -> None:
        self._config = config
        self._settings = settings
        self._block_size = kv_cache.block_size
        self._rank = role.rank
        self._codec = codec
        self._agent = agent
        self._meter = meter
        self._regions: Sequence[Region] = ()
        self._client: HandshakeClient | None = None
        self._peers = Peers(settings.kvconn.peers_max, settings.kvconn.waiting_max)
        self._next_eviction = 0.0

    def open(self, regions: Sequence[Region]) -> None:
        """Begin to shake hands; ``regions`` are what we read into."""
        self._regions = regions
        self._client = HandshakeClient(self._settings.kvconn.handshake)

    def with_peer(self, key: PeerKey, now: float, work: Work) -> None:
        """Run ``work`` with this peer: now, after its handshake, or with None and the reason."""
        if self._client is not None and self._peers.want(key, work, now):
            self._client.start(key)

    def get(self, key: PeerKey) -> Peer | None:
        return self._peers.get(key)

    # -- handshakes ----------------------------------------------------------------------------------------------

    def drain(self, now: float) -> None:
        """Answers that came since the last call: work that waited for them runs here."""
        if self._client is None:
            return
        for result in self._client.results():
            peer = self._peers.get(result.key)
            if peer is not None and peer.state is PeerState.HANDSHAKING:  # else late: asked before we forgot it
                self._finish(peer, result, now)

    def _finish(self, peer: Peer, result: HandshakeResult, now: float) -> None:
        try:
            agent, plan = self._load(peer, result)
        except (PeerError, TransportError) as err:
            self._meter.add("nixl_num_failed_handshakes")
            log.warning("rank %d: handshake failed: %s", self._rank, err)
            peer.failed(str(err), now)
        else:
            peer.ready(agent, plan, now)

    def _load(self, peer: Peer, result: HandshakeResult) -> tuple[str, Plan]:
        """Check first, load last: a peer that fails leaves nothing behind."""
        transport = self._agent.transport
        if result.payload is None or transport is None:
            raise PeerError(peer.name, "handshake", result.why or "this rank has no NIXL agent")
        blob, plan = admit(
            result.payload,
            peer.key,
            peer.name,
            self._config,
            self._regions,
            self._block_size,
            self._codec,
            self._settings.enforce_handshake_compat,
        )
        return transport.add_peer(blob), plan

    # -- telling -------------------------------------------------------------------------------------------------

    def tell_done(self, peer: Peer | None, transfer_id: str) -> None:
        """We are done with this transfer; a producer that cannot be told waits for its lease."""
        if peer is not None and peer.plan is not None:
            self._notify(peer, encode_done(transfer_id, peer.plan.readers))

    def heartbeat(self, transfer_ids: Sequence[str], peer: Peer | None, why: str, now: float) -> None:
        """These transfers are still wanted."""
        if peer is None:
            return
        for start in range(0, len(transfer_ids), HEARTBEAT_IDS):
            self._notify(peer, encode_heartbeats(transfer_ids[start : start + HEARTBEAT_IDS]))

    def _notify(self, peer: Peer, message: bytes) -> None:
        if peer.agent is None or self._agent.transport is None:
            return
        try:
            self._agent.transport.notify(peer.agent, message)
        except TransportError as err:
            self._meter.add("nixl_num_failed_notifications")
            log.warning("rank %d: cannot notify %s: %s", self._rank, peer.name, err)
            if peer.idle:  # gone or restarted; nothing of ours is posted, so that the next request shakes hands anew
                self.drop(self.same_agent(peer), "it could not be notified")

    # -- the end of peers ----------------------------------------------------------------------------------------

    def same_agent(self, peer: Peer) -> list[Peer]:
        """This peer and the others that are the same engine under another address."""
        return [peer, *self._peers.aliases(peer)]

    def drop(self, peers: Iterable[Peer], why: str) -> None:
        """They take no new work, and are forgotten once they are idle."""
        for peer in peers:
            peer.drain(why)
            if peer.idle:
                self._peers.forget(peer)
                self._remove(peer)

    def evict(self, now: float) -> None:
        """Bound the table (C7). Only peers under which nothing is posted go (C6)."""
        if now < self._next_eviction and len(self._peers) <= self._settings.kvconn.peers_max:
            return
        self._next_eviction = now + EVICT_EVERY
        for peer in self._peers.evict(now, self._settings.engine_ttl):
            self._remove(peer)

    def _remove(self, peer: Peer) -> None:
        transport = self._agent.transport
        if peer.agent is None or transport is None or self._peers.aliases(peer):
            return  # the agent is in use as long as one address of its engine is
        try:
            transport.remove_peer(peer.agent)
        except TransportError as err:
            log.warning("rank %d: cannot remove %s: %s", self._rank, peer.name, err)

    def agent_destroyed(self, why: str, now: float) -> None:
        """Our agent is gone, and with it what it knew of peers."""
        for peer in self._peers.clear():
            peer.failed(why, now)

    def close(self) -> None:
        """Idempotent."""
        if self._client is not None:
            self._client.close()
            self._client = None

    def __repr__(self) -> str:
        return repr(self._peers)
