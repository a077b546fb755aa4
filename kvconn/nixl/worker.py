"""The worker half: registers memory, keeps leases, handshakes, reads, and answers the one poll.

Contract this half keeps
- Producer: reports each announced send exactly once. The serving rank when its readers are done or the lease ended,
  after it took the request's fence word down (C8); a replicated rank (PCP > 0), which nobody reads, at the poll of the
  step whose metadata announces the release (C1).
- Consumer: reports each receive life exactly once, when every handle of it is quiet (C6), and as good only after it saw
  the fence word stand when the data had come (C8); a failure is a fact (``failed``) as soon as it is known, and the
  report says so when the blocks are safe.

Rules
1. One poll: :meth:`NixlWorker.poll` (C5). In it notifications and transfer states are read before any timeout (C11).
2. A replicated rank has no agent, no handshake metadata and no leases.
3. Nothing here blocks: handshakes run on the client's thread, reads in the transport.
4. Whatever a peer sends ends in a failed request or a counter (C9).
Time is an argument, in seconds of the worker's clock.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal, cast

import numpy as np

from kvconn.base import Direction, Fact, FactState, KVCacheView, LayerView, Published, TransferResults, WorkerFacts
from kvconn.config import LIMITS, ConnectorConfig, NixlSettings
from kvconn.errors import ConfigError, PeerError, RequestError, TransportError
from kvconn.geometry import RankRole, Region, regions_of
from kvconn.metrics import Meter
from kvconn.nixl.checks import Checks, Verdict
from kvconn.nixl.fence import WORD, Fence, FenceWords, seal_fits
from kvconn.nixl.handshake import admit, describe
from kvconn.nixl.leases import Ended, SendLeases
from kvconn.nixl.metadata import LoadSpec, NixlHandshake, NixlStep, SendSpec
from kvconn.nixl.pairing import reads
from kvconn.nixl.peers import Peer, PeerKey, Peers, PeerState, Work
from kvconn.nixl.plan import Plan
from kvconn.nixl.sidechannel import HandshakeClient, HandshakeResult
from kvconn.nixl.transfers import Reads
from kvconn.nixl.wire import (
    Done,
    Heartbeat,
    KvconnAgent,
    WireCodec,
    encode_done,
    encode_heartbeats,
    parse_notification,
)
from kvconn.params import RemoteRef, peer_name
from kvconn.transport.base import HandleState, MemoryRegion, Transport

__all__ = ["NixlWorker"]

log = logging.getLogger("kvconn.nixl")
#: fence words that may be read at once
SCRATCH = 4096
#: seconds a poll may wait for a fence word, which takes microseconds on a good day
SPIN = 200e-6
EVICT_EVERY = 10.0
#: transfer ids in one heartbeat: of the longest, they stay below wire.MAX_NOTIFICATION
HEARTBEAT_IDS = 256
#: characters of a reason that travel with a fact
WHY_MAX = 500
#: seconds until a NIXL agent that could not be made is tried again
REOPEN = 1.0


class NixlWorker:
    """One rank. ``make_transport`` is called where this rank serves or reads, and again when its agent is made anew."""

    def __init__(
        self,
        config: ConnectorConfig,
        settings: NixlSettings,
        kv_cache: KVCacheView,
        role: RankRole,
        codec: WireCodec,
        make_transport: Callable[[], Transport],
    ) -> None:
        self.role = role
        self.meter = Meter()
        self._config = config
        self._settings = settings
        self._cache = kv_cache
        self._codec = codec
        self._make_transport = make_transport
        limits = settings.kvconn
        self._regions: tuple[Region, ...] = ()
        self._transport: Transport | None = None
        self._client: HandshakeClient | None = None
        self._leases = SendLeases(settings.kv_lease_duration, limits.early_max)
        self._reads = Reads()
        self._refs: dict[str, RemoteRef] = {}
        self._started: dict[int, tuple[Peer, float, int]] = {}
        self._peers = Peers(limits.peers_max, limits.waiting_max)
        #: the word of every request of ours that readers are sent to
        self._fence: FenceWords | None = None
        #: fence slots to take down before the report, by life
        self._slots: dict[int, int] = {}
        #: fences of others that we check, and where their words are read to
        self._checks = Checks(SCRATCH)
        self._scratch: FenceWords | None = None
        self._looking: set[int] = set()
        self._warned_unfenced = False
        self._next_eviction = 0.0
        self._quarantine_max = limits.quarantine_max or max(1, int(kv_cache.num_blocks * LIMITS.quarantine_share))
        self._quarantined = 0
        #: our agent was made anew and readers must be told; when to try again if it could not be
        self._republish = False
        self._reopen_at: float | None = None
        #: lives a replicated rank has only to acknowledge: request id -> n, until the next poll.
        self._replicated_pcp_done_sending: dict[str, int] = {}
        #: announced sends whose early notifications had completed them.
        self._ended: list[Ended] = []
        self._seen: dict[Direction, int] = {"send": 0, "recv": 0}
        self._pending_loads: list[LoadSpec] = []
        self._facts: list[Fact] = []

    # -- start-up ------------------------------------------------------------------------------------------------

    def register(self, layers: Mapping[str, LayerView]) -> None:
        """Register the cache; creates the agent where this rank serves or reads. Raises ConfigError, TransportError."""
        if self._transport is not None:
            raise ConfigError("register_kv_caches: called twice on one worker half")
        self._regions = regions_of(layers.values())
        for region in self._regions:
            if not 0 <= region.group < len(self._cache.groups):
                raise ConfigError(f"layer {region.name}: cache group {region.group} of {len(self._cache.groups)}")
        if self.role.serves or self.role.reads:
            self._fence = FenceWords(self._cache.num_blocks) if self.role.serves else None
            self._scratch = FenceWords(SCRATCH) if self.role.reads else None
            self._open_transport()
        if self.role.reads:
            self._client = HandshakeClient(self._settings.kvconn.handshake)

    def _open_transport(self) -> None:
        self._transport = self._make_transport()
        cache = [
            MemoryRegion(r.base, r.span, cast('Literal["DRAM", "VRAM"]', r.mem_type), r.device_id)
            for r in self._regions
        ]
        self._transport.register(cache + [w.region() for w in (self._fence, self._scratch) if w is not None])

    def handshake(self) -> NixlHandshake | None:
        """What readers need of this rank; None where it serves nobody."""
        if self._fence is None or self._transport is None:
            return None
        fence = KvconnAgent(self._fence.address, self._fence.size)
        return describe(self._config, self._cache, self._regions, self._codec, self._transport.metadata(), fence)

    # -- a step --------------------------------------------------------------------------------------------------

    def bind(self, step: NixlStep, now: float) -> None:
        """This step's announcements, before its forward. An announcement bound before changes nothing."""
        if self._fence is not None:
            for slot in step.lifted:
                self._fence.zero(slot)
            for fence in step.fences:
                self._fence.write(fence)
        for send in step.sends:
            if self._is_new("send", send.n):
                self._announce(send, send.deadline - step.now + now)
        if self.role.replicates:
            return
        self._pending_loads.extend(load for load in step.loads if self._is_new("recv", load.n))
        for key, transfer_ids in step.heartbeats:
            self._with_peer(key, now, partial(self._heartbeat, transfer_ids))
        for ref in step.releases:
            self._with_peer(ref.peer, now, partial(self._let_go, ref))

    def _is_new(self, direction: Direction, n: int) -> bool:
        if n <= self._seen[direction]:
            return False
        self._seen[direction] = n
        return True

    def _announce(self, send: SendSpec, deadline: float) -> None:
        if not self.role.serves:
            self._replicated_pcp_done_sending[send.id] = send.n
            return
        if send.slot is not None:
            self._slots[send.n] = send.slot
        ended = self._leases.track(send.id, send.n, send.transfer_id, deadline, send.readers)
        if ended is not None:
            self._ended.append(ended)

    def start_loads(self, now: float) -> None:
        """Post this step's reads where the peer is known, start handshakes where it is not."""
        loads, self._pending_loads = self._pending_loads, []
        for load in loads:
            peer = load.ref.peer if load.ref is not None else ("", "", 0)
            blocks = sum(map(len, load.local))
            self._reads.begin(load.id, load.n, peer, now + self._settings.kvconn.read, blocks, now)
            if load.ref is None:
                self._fail(load.id, load.refused or "no reference", now)
                continue
            self._refs[load.id] = load.ref
            self._with_peer(peer, now, partial(self._post, load, load.ref))

    def _with_peer(self, key: PeerKey, now: float, work: Work) -> None:
        if self._client is not None and self._peers.want(key, work, now):
            self._client.start(key)

    def _post(self, load: LoadSpec, ref: RemoteRef, peer: Peer | None, why: str, now: float) -> None:
        if self._reads.life(load.id) != load.n:
            return  # failed while it waited for the handshake
        if peer is None or peer.plan is None or peer.agent is None or self._transport is None:
            self._fail(load.id, why or "this rank has no NIXL agent", now)
            return
        try:
            self._admit(load, ref, peer, peer.plan)
            n = ref.num_tokens
            parts = reads(peer.plan, load.local, ref.block_ids, load.hits, tokens=n, held=n)
            for part in parts:
                handle = self._transport.post_read(peer.agent, part.local, part.remote)
                self._under_way(load.id, handle, peer, part.nbytes, now)
                self.meter.add("nixl_num_descriptors", len(part.local))
            if not parts or load.id not in self._checks:
                self._reads.posted_all(load.id)
        except RequestError as err:
            self._fail(load.id, str(err), now)
        except TransportError as err:
            if err.handle is not None:  # parts may be under way (F4)
                self._under_way(load.id, err.handle, peer, 0, now)
            self._fail(load.id, f"peer {peer.name}, read: {err}", now)

    def _admit(self, load: LoadSpec, ref: RemoteRef, peer: Peer, plan: Plan) -> None:
        """May this reference be read at all? Arms its fence check. Raises RequestError."""
        if plan.fence is None:
            self._admit_unfenced(load, peer)
            return
        ours = ref.kvconn
        if ours is None or ours.slot is None or ours.word is None or not seal_fits(plan.seal_key, ref, load.prompt):
            self.meter.add("seals_refused")
            raise RequestError(
                "kv_transfer_params", f"what {peer.name} returned, unchanged (its seal does not fit)", ref
            )
        if ours.slot >= plan.fence.fence_slots:
            raise RequestError("kv_transfer_params.kvconn.slot", f"below {plan.fence.fence_slots}", ours.slot)
        if not self._checks.begin(load.id, Fence(ours.slot, ours.word)):
            raise RequestError("kv_transfer_params", f"at most {SCRATCH} loads at once", len(self._checks))

    def _admit_unfenced(self, load: LoadSpec, peer: Peer) -> None:
        """A stock peer: what is read of it can't be proved. By policy, and not after its lease must be over."""
        late = load.waited > self._settings.kv_lease_duration and not load.beating
        if self._settings.kvconn.unfenced == "refuse" or late:
            why = "waited longer than a lease" if late else "kvconn.unfenced is refuse"
            raise RequestError("kv_transfer_params", f"a reference of a peer with fences ({why})", peer.name)
        if not self._warned_unfenced:
            self._warned_unfenced = True
            log.warning("%s has no fences: what is read of it can't be proved to have been held", peer.name)
        self.meter.add("unfenced_reads")

    def _under_way(self, id: str, handle: int, peer: Peer, size: int, now: float) -> None:
        peer.posted += 1
        self._reads.posted(id, handle)
        self._started[handle] = (peer, now, size)

    def _fail(self, id: str, why: str, now: float) -> None:
        """The result of this life is failure; its blocks stay until it is quiet."""
        why = f"{why} (the load is {self._reads.age(id, now):.1f} s old)"
        if self._reads.fail(id, why, now):
            self._say(id, "recv", self._reads.life(id), "failed", why[:WHY_MAX])
            self.meter.add("nixl_num_failed_transfers")
            log.warning("rank %d: load of %s failed: %s", self.role.rank, id, why)

    def _say(self, id: str, direction: Direction, n: int, state: FactState, why: str = "") -> None:
        self._facts.append(Fact(id, direction, n, self.role.rank, state, why=why))

    # -- the poll ------------------------------------------------------------------------------------------------

    def poll(self, now: float) -> TransferResults:
        """What finished on this rank since the last poll. Consumes (C5)."""
        if self._reopen_at is not None and now >= self._reopen_at:
            self._reopen(now)
        self._drain_notifications(now)
        self._drain_transfers(now)
        self._check_fences(now)
        self._drain_handshakes(now)
        sent = self._ended_sends(now)
        for id in self._reads.overdue(now):
            self._overdue(id, now)
        self._evict_peers(now)
        self._watch_quarantine(now)
        received, failed = self._settle()
        self._gauge()
        return TransferResults(frozenset(sent), frozenset(received), frozenset(failed))

    def _drain_notifications(self, now: float) -> None:
        if self._transport is None:
            return
        for agent, message in self._transport.notifications():
            parsed = parse_notification(message)
            if isinstance(parsed, Heartbeat):
                self._leases.heartbeat(parsed.transfer_ids, now)
            elif isinstance(parsed, Done):
                ended = self._leases.notified(parsed.transfer_id, agent, parsed.readers, now)
                if ended is not None:
                    self._ended.append(ended)
            else:
                self.meter.add("notifications_malformed")

    def _drain_transfers(self, now: float) -> None:
        if self._transport is None:
            return
        for handle in self._reads.handles():
            state = self._transport.poll(handle)
            if state is HandleState.DONE:
                self._handle_done(handle, now)
            elif state is HandleState.ERR:
                self._handle_error(handle, now)

    def _check_fences(self, now: float) -> None:
        """Lives whose data is quiet: read the word, judge it; up to SPIN seconds inline, else at the next poll."""
        for id in self._reads.drained():
            self._judge(id, now)
        deadline = time.perf_counter() + SPIN
        while self._looking and time.perf_counter() < deadline:
            self._drain_transfers(now)
            for id in self._reads.drained():
                self._judge(id, now)

    def _judge(self, id: str, now: float) -> None:
        scratch = self._checks.scratch(id)
        if scratch is None or self._scratch is None:
            self._read_word(id, now)
            return
        verdict = self._checks.judge(id, self._scratch.read(scratch))
        if verdict is Verdict.HELD:
            self._reads.posted_all(id)
        elif verdict is Verdict.AGAIN:
            self._read_word(id, now)
        else:
            self.meter.add("stale_reads")
            whom = peer_name(self._refs[id].peer)
            self._fail(id, f"peer {whom}, fence: it let go of these blocks before they were read", now)

    def _read_word(self, id: str, now: float) -> None:
        ref = self._refs[id]
        peer = self._peers.get(ref.peer)
        if self._transport is None or self._scratch is None or peer is None or peer.plan is None or peer.agent is None:
            self._fail(id, "the peer is gone before its fence was read", now)
            return
        slot, scratch = self._checks.target(id)
        fence = peer.plan.fence
        remote = np.array([[fence.fence_address + slot * WORD, WORD]] if fence is not None else [], np.int64)
        local = np.array([[self._scratch.slot_address(scratch), WORD]], np.int64)
        try:
            handle = self._transport.post_read(peer.agent, local, remote)
        except TransportError as err:
            if err.handle is not None:
                self._under_way(id, err.handle, peer, 0, now)
            self._fail(id, f"peer {peer.name}, fence: {err}", now)
        else:
            self._under_way(id, handle, peer, 0, now)
            self._looking.add(handle)

    def _handle_done(self, handle: int, now: float) -> None:
        peer, started, size = self._forget(handle)
        peer.last_used = now
        self._reads.done(handle)
        if size:  # a fence word is no transfer
            self.meter.add("nixl_bytes_transferred", size)
            self.meter.add("nixl_xfer_seconds", now - started)
            self.meter.add("nixl_num_transfers")

    def _forget(self, handle: int) -> tuple[Peer, float, int]:
        """A quiet handle: only now may it be released (C6)."""
        started = self._started.pop(handle)
        started[0].posted -= 1
        self._looking.discard(handle)
        if self._transport is not None:
            self._transport.release(handle)
        return started

    def _handle_error(self, handle: int, now: float) -> None:
        """ERR is a result, not quiet (F4): the handle is quiet once its peer is known to be gone."""
        peer = self._started[handle][0]
        why = self._transport.reason(handle) if self._transport is not None else ""
        self._fail(self._reads.error(handle), f"peer {peer.name}, read: {why}", now)

    def _watch_quarantine(self, now: float) -> None:
        held = self._reads.quarantined(now)
        if not held or self._transport is None:
            return
        for peer in {self._started[h][0] for h in self._reads.errors()}:
            if peer.agent is not None and self._transport.peer_gone(peer.agent):
                self._lose(peer)
        oldest = max((age for _, age, _ in self._reads.quarantined(now)), default=0.0)
        blocks = self._reads.quarantined_blocks()
        if oldest > self._settings.kvconn.quarantine_age:
            self._recreate(f"quarantine is {oldest:.1f} s old", now)
        elif blocks > self._quarantine_max:
            self._recreate(f"{blocks} blocks are in quarantine, at most {self._quarantine_max} may be", now)

    def _gauge(self) -> None:
        """Blocks in quarantine, as changes: counters add up to what there is now."""
        blocks = self._reads.quarantined_blocks()
        if blocks != self._quarantined:
            self.meter.add("quarantined_blocks", blocks - self._quarantined)
            self._quarantined = blocks

    def _lose(self, peer: Peer) -> None:
        """The connection failed and its ERR handles are quiet. When nothing is posted any more the peer is forgotten,
        so that the next request shakes hands anew."""
        for one in (peer, *self._peers.aliases(peer)):
            for handle in self._reads.peer_gone(one.key):
                self._forget(handle)
            self._drop(one, "its connection failed")

    def _drop(self, peer: Peer, why: str) -> None:
        peer.drain(why)
        if peer.idle:
            self._peers.forget(peer)
            self._remove(peer)

    def _remove(self, peer: Peer) -> None:
        if peer.agent is None or self._transport is None or self._peers.aliases(peer):
            return  # the agent is in use as long as one address of its engine is
        try:
            self._transport.remove_peer(peer.agent)
        except TransportError as err:
            log.warning("rank %d: cannot remove %s: %s", self.role.rank, peer.name, err)

    def _recreate(self, why: str, now: float) -> None:
        """Bound the quarantine: after our agent is destroyed nothing lands (C7, F1). Fails this rank's transfers; who
        reads from it fails too, and finds the new agent at its next handshake."""
        if self._transport is None:
            return
        log.error("rank %d: %s: making a new NIXL agent; %r", self.role.rank, why, self._reads)
        self.meter.add("agent_recreations")
        self._transport.close()
        for id in self._reads.ids():
            self._fail(id, "the NIXL agent was made anew after a transfer never ended", now)
        self._reads.agent_destroyed()
        self._started.clear()
        self._looking.clear()
        for peer in self._peers.clear():
            peer.failed("the NIXL agent was made anew", now)
        self._transport = None
        self._reopen(now)

    def _reopen(self, now: float) -> None:
        """Make the new agent; while that fails loads do too, and it is tried again."""
        try:
            self._open_transport()
        except TransportError as err:
            if self._transport is not None:
                self._transport.close()  # made, but without its memory: it holds threads and sockets
            self._transport, self._reopen_at = None, now + REOPEN
            log.error("rank %d: no new NIXL agent, next try in %g s: %s", self.role.rank, REOPEN, err)
        else:
            self._reopen_at, self._republish = None, self.role.serves

    def _overdue(self, id: str, now: float) -> None:
        peer = self._peers.get(self._refs[id].peer) if id in self._refs else None
        stage = "handshake" if peer is None or peer.agent is None else "read"
        whom = peer.name if peer is not None else "unknown"
        self._fail(id, f"peer {whom}, {stage}: not done after {self._settings.kvconn.read:g} s", now)

    def _drain_handshakes(self, now: float) -> None:
        if self._client is None:
            return
        for result in self._client.results():
            peer = self._peers.get(result.key)
            if peer is not None and peer.state is PeerState.HANDSHAKING:  # else late: asked before we forgot it
                self._finish_handshake(peer, result, now)

    def _finish_handshake(self, peer: Peer, result: HandshakeResult, now: float) -> None:
        try:
            agent, plan = self._load_peer(peer, result)
        except (PeerError, TransportError) as err:
            self.meter.add("nixl_num_failed_handshakes")
            log.warning("rank %d: handshake failed: %s", self.role.rank, err)
            peer.failed(str(err), now)
        else:
            peer.ready(agent, plan, now)

    def _load_peer(self, peer: Peer, result: HandshakeResult) -> tuple[str, Plan]:
        """Check first, load last: a peer that fails leaves nothing behind."""
        if result.payload is None or self._transport is None:
            raise PeerError(peer.name, "handshake", result.why or "this rank has no NIXL agent")
        blob, plan = admit(
            result.payload,
            peer.key,
            peer.name,
            self._config,
            self._regions,
            self._cache.block_size,
            self._codec,
            self._settings.enforce_handshake_compat,
        )
        return self._transport.add_peer(blob), plan

    def _evict_peers(self, now: float) -> None:
        """Bound the peer table (C7). Only peers under which nothing is posted go (C6)."""
        if now < self._next_eviction and len(self._peers) <= self._settings.kvconn.peers_max:
            return
        self._next_eviction = now + EVICT_EVERY
        for peer in self._peers.evict(now, self._settings.engine_ttl):
            self._remove(peer)

    def _ended_sends(self, now: float) -> set[str]:
        """Sends this rank reports now: readers done, leases over, and what a replicated rank only acknowledges."""
        for ended in self._leases.expire(now):
            self._ended.append(ended)
            self.meter.add("nixl_num_kv_expired_reqs")
            log.warning("rank %d: %s was not read within its lease", self.role.rank, ended.id)
        sent: set[str] = set()
        for ended in self._ended:
            slot = self._slots.pop(ended.n, None)
            if slot is not None and self._fence is not None:
                self._fence.zero(slot)  # before the report, whatever the reason (C8)
            self._say(ended.id, "send", ended.n, "done")
            sent.add(ended.id)
        self._ended = []
        for id, n in self._replicated_pcp_done_sending.items():
            self._say(id, "send", n, "done")
            sent.add(id)
        self._replicated_pcp_done_sending.clear()
        return sent

    def _settle(self) -> tuple[set[str], set[str]]:
        received: set[str] = set()
        failed: set[str] = set()
        for over in self._reads.settle():
            self._checks.end(over.id)
            ref = self._refs.pop(over.id, None)
            peer = self._peers.get(ref.peer) if ref is not None else None
            if ref is not None:
                self._release(ref, peer, "", 0.0)
            self._say(over.id, "recv", over.n, "done" if over.failed is None else "quiet")
            received.add(over.id)
            if over.failed is not None:
                failed.add(over.id)
        return received, failed

    # -- telling the producer ------------------------------------------------------------------------------------

    def _release(self, ref: RemoteRef, peer: Peer | None, why: str, now: float) -> None:
        """Tell the producer that we are done with ``ref``; where it can't be told its lease ends it."""
        readers = peer.plan.readers if peer is not None and peer.plan is not None else 1
        self._notify(peer, encode_done(ref.transfer_id, readers))

    def _let_go(self, ref: RemoteRef, peer: Peer | None, why: str, now: float) -> None:
        """Of a reference that nobody here reads; our scheduler half keeps the engine stepping until this."""
        self._release(ref, peer, why, now)
        self._say(ref.transfer_id, "recv", 0, "released")

    def _heartbeat(self, transfer_ids: tuple[str, ...], peer: Peer | None, why: str, now: float) -> None:
        for start in range(0, len(transfer_ids), HEARTBEAT_IDS):
            self._notify(peer, encode_heartbeats(transfer_ids[start : start + HEARTBEAT_IDS]))

    def _notify(self, peer: Peer | None, message: bytes) -> None:
        if peer is None or peer.agent is None or self._transport is None:
            return
        try:
            self._transport.notify(peer.agent, message)
        except TransportError as err:
            self.meter.add("nixl_num_failed_notifications")
            log.warning("rank %d: cannot notify %s: %s", self.role.rank, peer.name, err)
            if peer.idle:  # gone or restarted; nothing of ours is posted, so that the next request shakes hands anew
                for one in (peer, *self._peers.aliases(peer)):
                    self._drop(one, "it could not be notified")

    # -- the rest ------------------------------------------------------------------------------------------------

    def take_facts(self) -> WorkerFacts | None:
        """The facts behind the sets of the last poll, failures known since, and our metadata when it is new."""
        published: tuple[Published, ...] = ()
        mine = self.handshake() if self._republish else None
        if mine is not None:
            self._republish = False
            published = (Published(self.role.coords.pp, self.role.coords.tp, mine.payload),)
        if not self._facts and not published:
            return None
        facts, self._facts = WorkerFacts(tuple(self._facts), published), []
        return facts

    def explain(self, now: float) -> list[str]:
        """One line per held send and per open load."""
        return self._leases.explain(now) + self._reads.explain(now)

    def shutdown(self) -> None:
        """Takes every word down, then destroys the agent: nothing of ours may land after this returns (F1)."""
        if self._fence is not None:
            self._fence.zero_all()
        if self._transport is not None:
            self._transport.close()
            self._transport = None
        if self._client is not None:
            self._client.close()
            self._client = None

    def __repr__(self) -> str:
        return f"NixlWorker({self.role!r} {self._leases!r} {self._reads!r} {self._peers!r})"
