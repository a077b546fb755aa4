"""The loads of one worker: read what a reference names, prove that it was held, settle.

Contract this part keeps
- Each receive life is reported exactly once, when every handle of it is quiet (C6), and as good only after the fence
  word was seen to stand when the data had come (C8). A failure is a fact (``failed``) as soon as it is known, and the
  report says so when the blocks are safe.

Rules
1. What the lives are doing is :class:`~kvconn.nixl.transfers.Reads`'s to know, fence checks are
   :class:`~kvconn.nixl.checks.Checks`'s; this module moves bytes as they say.
2. Whatever a peer or a client sends ends in a failed life or a counter (C9).
Time is an argument, in seconds of the worker's clock.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from kvconn.base import NO_BLOCK, FactState, KVCacheView
from kvconn.config import LIMITS, NixlSettings
from kvconn.errors import RequestError, TransportError
from kvconn.geometry import Place
from kvconn.metrics import Meter
from kvconn.nixl.agent import Agent
from kvconn.nixl.checks import Checks, Verdict
from kvconn.nixl.contacts import Contacts
from kvconn.nixl.fence import WORD, Fence, FenceWords, seal_fits
from kvconn.nixl.metadata import LoadSpec
from kvconn.nixl.pairing import Ints, Read, permuted, reads
from kvconn.nixl.peers import Peer, PeerState, Source
from kvconn.nixl.permute import put_in_order
from kvconn.nixl.plan import Permute
from kvconn.nixl.transfers import Reads, Settled
from kvconn.params import PeerKey, RemoteRef, peer_name
from kvconn.transport.base import HandleState, Transport

__all__ = ["SPIN", "Reader"]

log = logging.getLogger("kvconn.nixl")
#: fence words that may be read at once
SCRATCH = 16384
#: seconds a poll may wait for a fence word, which takes microseconds on a good day
SPIN = 200e-6
#: seconds after the last post or end for which the next one is near
NEAR = 0.1
#: characters of a reason that travel with a fact
WHY_MAX = 500


@dataclass(slots=True)
class _Posted:
    """A handle that is not quiet: the peer and which of its ranks. ``size`` in bytes, 0 where that counts as none."""

    peer: Peer
    agent: str
    began: float
    size: int = 0


@dataclass(slots=True)
class _Load:
    """A life with a reference. ``peer``: once its reads were posted there; ``orders``: what to do when all has come."""

    ref: RemoteRef
    peer: Peer | None = None
    orders: Sequence[tuple[Permute, Ints]] = ()
    #: when its reference came to this engine
    came: float = 0.0

    def late(self) -> str:
        """Whether its lease was over when it came. A reason for people, never for us: another reader's heartbeats may
        have prolonged it, and the fence knows."""
        ends = self.ref.kvconn.deadline if self.ref.kvconn is not None else None
        if self.peer is None or self.peer.clock_offset is None or ends is None:
            return ""
        over = self.came - (ends - self.peer.clock_offset)
        return f"; it came here {over:.1f} s after its lease, unless somebody prolonged that" if over > 0 else ""


class Reader:
    """Without :meth:`open` it reads nothing. ``say(request id, n, state, why)`` is told what becomes of a life."""

    def __init__(
        self,
        settings: NixlSettings,
        kv_cache: KVCacheView,
        rank: int,
        agent: Agent,
        contacts: Contacts,
        meter: Meter,
        say: Callable[[str, int, FactState, str], None],
    ) -> None:
        self._settings = settings
        self._rank = rank
        self._agent = agent
        self._contacts = contacts
        self._meter = meter
        self._say = say
        self._reads = Reads()
        self._pending: list[LoadSpec] = []
        self._loads: dict[str, _Load] = {}
        self._posted: dict[int, _Posted] = {}
        #: fences of others that we check, and where their words are read to
        self._checks = Checks(SCRATCH)
        self._scratch: FenceWords | None = None
        self._looking: set[int] = set()
        #: when something was last posted or done, and whether something was posted since the last :meth:`settle`
        self._moved_at = 0.0
        self._fresh = False
        self._warned_unfenced = False
        self._quarantine_max = settings.kvconn.quarantine_max or max(
            1, int(kv_cache.num_blocks * LIMITS.quarantine_share)
        )
        self._quarantined = 0

    def open(self) -> FenceWords:
        """This rank will read. Returns where fence words are read to, which must be registered."""
        self._scratch = FenceWords(SCRATCH)
        return self._scratch

    # -- loads ---------------------------------------------------------------------------------------------------

    def accept(self, loads: Iterable[LoadSpec]) -> None:
        """Announced with this step; :meth:`start` begins them."""
        self._pending.extend(loads)

    def start(self, now: float) -> None:
        """Post the reads of this step where the peer is known, start handshakes where it is not."""
        loads, self._pending = self._pending, []
        if loads:
            self._moved_at = now
        for load in loads:
            peer = self._key(load.ref)
            blocks = sum(block != NO_BLOCK for group in load.local for block in group)
            self._reads.begin(load.id, load.n, peer, now + self._settings.kvconn.read, blocks, now)
            if load.ref is None or peer is None:
                self._fail(load.id, load.refused or "no reference", now, told=load.refused is not None)
                continue
            self._loads[load.id] = _Load(load.ref, came=now - load.waited)
            self._contacts.with_peer(peer, now, partial(self._post, load, load.ref))

    def _key(self, ref: RemoteRef | None) -> PeerKey | None:
        """Whom it is of, by the one key that its known peer has: loads are many."""
        if ref is None:
            return None
        known = self._contacts.get(ref.peer)
        return ref.peer if known is None else known.key

    def _post(self, load: LoadSpec, ref: RemoteRef, peer: Peer | None, why: str, now: float) -> None:
        if self._reads.life(load.id) != load.n:
            return  # failed while it waited for the handshake
        transport = self._agent.transport
        if peer is None or transport is None:
            self._fail(load.id, why or "this rank has no NIXL agent", now)
            return
        if peer.state is not PeerState.READY:  # it was lost by work that waited with this
            self._fail(load.id, f"peer {peer.name}: {peer.why}", now)
            return
        try:
            fence = self._admit(load, ref, peer, now)
            planned = self._plan(load, ref, peer)
            sources = [source for source, read in planned if read]
            if fence is not None and sources:
                self._arm(load.id, fence, sources)
        except RequestError as err:
            self._fail(load.id, str(err), now)
            return
        mine = self._loads[load.id]
        mine.peer, mine.orders = peer, permuted([source.plan for source in sources], load.local) or ()
        peer.began()
        for source, read in planned:
            for one in read:
                if not self._post_one(transport, load.id, peer, source, one, now):
                    return
        if load.id not in self._checks:
            self._reads.posted_all(load.id)

    def _plan(self, load: LoadSpec, ref: RemoteRef, peer: Peer) -> list[tuple[Source, tuple[Read, ...]]]:
        """What is to be read of each of its ranks. Raises RequestError, before anything is posted."""
        return [
            (source, reads(source.plan, load.local, ref.block_ids, load.hits, tokens=load.tokens, held=ref.num_tokens))
            for source in peer.sources
        ]

    def _post_one(self, transport: Transport, id: str, peer: Peer, source: Source, read: Read, now: float) -> bool:
        """Post; False when that failed, and the life with it."""
        try:
            handle = transport.post_read(
                source.agent,
                read.local,
                read.remote,
                local_mem=read.local_mem,
                remote_mem=read.remote_mem,
                local_device=read.local_device,
                remote_device=read.remote_device,
            )
        except TransportError as err:
            if err.handle is not None:  # parts may be under way (F4)
                self._under_way(id, err.handle, _Posted(peer, source.agent, now))
            self._fail(id, f"peer {peer.rank_name(source.agent)}, read: {err}", now)
            return False
        self._under_way(id, handle, _Posted(peer, source.agent, now, read.nbytes))
        self._meter.add("nixl_num_descriptors", len(read.local))
        return True

    def _admit(self, load: LoadSpec, ref: RemoteRef, peer: Peer, now: float) -> Fence | None:
        """May this reference be read at all, and what is its fence? Raises RequestError."""
        plan = peer.sources[0].plan if peer.sources else None
        if plan is None:
            return None
        if plan.fence is None:
            self._admit_unfenced(load, peer, now)
            return None
        ours = ref.kvconn
        if ours is None or ours.slot is None or ours.word is None or not seal_fits(plan.seal_key, ref, load.prompt):
            self._meter.add("seals_refused")
            raise RequestError(
                "kv_transfer_params", f"what {peer.name} returned, unchanged (its seal does not fit)", ref
            )
        return Fence(ours.slot, ours.word)

    def _arm(self, id: str, fence: Fence, sources: Sequence[Source]) -> None:
        """Its word will be looked at in each of these ranks. Raises RequestError."""
        slots = min(source.plan.fence.fence_slots for source in sources if source.plan.fence is not None)
        if fence.slot >= slots:
            raise RequestError("kv_transfer_params.kvconn.slot", f"below {slots}", fence.slot)
        if not self._checks.begin(id, fence, [source.place for source in sources]):
            raise RequestError("kv_transfer_params", f"at most {SCRATCH} fence words read at once", len(self._checks))

    def _admit_unfenced(self, load: LoadSpec, peer: Peer, now: float) -> None:
        """A stock peer: what is read of it can't be proved. By policy, and not after its lease must be over: heartbeats
        were sent only since it was ready."""
        lease, came = self._settings.kv_lease_duration, now - load.waited - self._reads.age(load.id, now)
        late = now - came > lease and not (load.beating and peer.ready_at <= came + lease)
        if self._settings.kvconn.unfenced == "refuse" or late:
            why = "waited longer than a lease" if late else "kvconn.unfenced is refuse"
            raise RequestError("kv_transfer_params", f"a reference of a peer with fences ({why})", peer.name)
        if not self._warned_unfenced:
            self._warned_unfenced = True
            log.warning("%s has no fences: what is read of it can't be proved to have been held", peer.name)
        self._meter.add("unfenced_reads")

    def _under_way(self, id: str, handle: int, posted: _Posted) -> None:
        self._reads.posted(id, handle, posted.agent)
        self._posted[handle] = posted
        self._moved_at, self._fresh = posted.began, True

    def _fail(self, id: str, why: str, now: float, told: bool = False) -> None:
        """The result of this life is failure; its blocks stay until it is quiet. ``told``: it was said before."""
        why = f"{why} (the load is {self._reads.age(id, now):.1f} s old)"
        if self._reads.fail(id, why, now):
            self._say(id, self._reads.life(id), "failed", why[:WHY_MAX])
            self._meter.add("nixl_num_failed_transfers")
            level = logging.INFO if told else logging.WARNING
            log.log(level, "rank %d: load of %s failed: %s", self._rank, id, why)

    def patience(self, now: float, rests: bool) -> float:
        """Seconds that a poll may look on for an end that is near. ``rests``: nobody computes meanwhile."""
        transport = self._agent.transport
        if transport is None or not self._reads.expecting:
            return 0.0
        if rests:
            return transport.patience if now - self._moved_at < NEAR else 0.0
        return min(transport.patience, SPIN) if self._fresh else 0.0

    @property
    def expecting(self) -> bool:
        """Something is open, and nothing is over yet."""
        return self._reads.expecting

    @property
    def waiting(self) -> bool:
        """Would :meth:`start` begin something?"""
        return bool(self._pending)

    @property
    def idle(self) -> bool:
        """Nothing is open, so that a poll has nothing to look at."""
        return not self._pending and not self._reads

    # -- the poll ------------------------------------------------------------------------------------------------

    def drain(self, now: float) -> None:
        """Look at reads whose turn it is, and at the fences of those whose data has come."""
        turn = self._reads.to_poll()
        self._look(self._looking.union(turn) if self._looking else turn, now)
        self._check_fences(now)

    def _look(self, handles: Iterable[int], now: float) -> None:
        if self._agent.transport is None:
            return
        for handle, state in self._agent.transport.over(handles):
            if state is HandleState.DONE:
                self._handle_done(handle, now)
            else:
                self._handle_error(handle, now)

    def _check_fences(self, now: float) -> None:
        """Lives whose data is quiet: read the word, judge it; up to SPIN seconds inline, else at the next poll."""
        for id in self._reads.drained():
            self._judge(id, now)
        deadline = time.perf_counter() + SPIN
        while self._looking and time.perf_counter() < deadline:
            self._look(list(self._looking), now)
            for id in self._reads.drained():
                self._judge(id, now)

    def _judge(self, id: str, now: float) -> None:
        scratch = self._scratch
        verdict = self._checks.judge(id, scratch.read) if scratch is not None else Verdict.STALE
        if verdict is Verdict.HELD:
            self._reads.posted_all(id)
        elif verdict is Verdict.STALE:
            self._meter.add("stale_reads")
            mine = self._loads[id]
            why = f"it let go of these blocks before they were read{mine.late()}"
            self._fail(id, f"peer {peer_name(mine.ref.peer)}, fence: {why}", now)
        else:
            for place, slot, word in self._checks.targets(id):
                if not self._read_word(id, place, slot, word, now):
                    return

    def _read_word(self, id: str, place: Place, slot: int, word: int, now: float) -> bool:
        """Begin to read one rank's word; False when that failed, and the life with it."""
        transport, peer = self._agent.transport, self._contacts.get(self._loads[id].ref.peer)
        source = peer.source(place) if peer is not None else None
        if transport is None or self._scratch is None or peer is None or source is None or source.plan.fence is None:
            self._fail(id, "the peer is gone before its fence was read", now)
            return False
        remote = np.array([[source.plan.fence.fence_address + slot * WORD, WORD]], np.int64)
        local = np.array([[self._scratch.slot_address(word), WORD]], np.int64)
        try:
            handle = transport.post_read(source.agent, local, remote)
        except TransportError as err:
            if err.handle is not None:
                self._under_way(id, err.handle, _Posted(peer, source.agent, now))
            self._fail(id, f"peer {peer.rank_name(source.agent)}, fence: {err}", now)
            return False
        self._under_way(id, handle, _Posted(peer, source.agent, now))
        self._looking.add(handle)
        return True

    def _handle_done(self, handle: int, now: float) -> None:
        posted = self._forget(handle)
        posted.peer.used(now)
        self._moved_at = now
        self._reads.done(handle)
        if posted.size:  # a fence word is no transfer
            self._meter.add("nixl_bytes_transferred", posted.size)
            self._meter.add("nixl_xfer_seconds", now - posted.began)
            self._meter.add("nixl_num_transfers")

    def _forget(self, handle: int) -> _Posted:
        """A quiet handle: only now may it be released (C6)."""
        posted = self._posted.pop(handle)
        self._looking.discard(handle)
        if self._agent.transport is not None:
            self._agent.transport.release(handle)
        return posted

    def _handle_error(self, handle: int, now: float) -> None:
        """ERR is a result, not quiet (F4): the handle is quiet once its peer is known to be gone."""
        posted = self._posted[handle]
        self._looking.discard(handle)
        why = self._agent.transport.reason(handle) if self._agent.transport is not None else ""
        self._fail(self._reads.error(handle), f"peer {posted.peer.rank_name(posted.agent)}, read: {why}", now)

    def over_quarantine(self, now: float) -> str | None:
        """Frees what lost connections had kept; why our agent must be made anew to bound the rest, or None (C7)."""
        transport = self._agent.transport
        if transport is None or not self._reads.quarantined(now):
            return None
        for agent in {self._posted[handle].agent for handle in self._reads.errors()}:
            if transport.peer_gone(agent):
                self._lose(agent)
        oldest = max((age for _, age, _ in self._reads.quarantined(now)), default=0.0)
        if oldest > self._settings.kvconn.quarantine_age:
            return f"quarantine is {oldest:.1f} s old"
        blocks = self._reads.quarantined_blocks()
        if blocks > self._quarantine_max:
            return f"{blocks} blocks are in quarantine, at most {self._quarantine_max} may be"
        return None

    def _lose(self, agent: str) -> None:
        """The connection failed and its ERR handles are quiet."""
        for handle in self._reads.agent_gone(agent):
            self._forget(handle)
        self._contacts.drop((agent,), "its connection failed")

    def agent_destroyed(self, now: float) -> None:
        """Nothing lands any more: every load fails and is quiet."""
        for id in self._reads.ids():
            self._fail(id, "the NIXL agent was made anew after a transfer never ended", now)
        self._reads.agent_destroyed()
        self._posted.clear()
        self._looking.clear()

    def expire(self, now: float) -> None:
        """Fail loads that are past their deadline. Call after :meth:`drain` (C11)."""
        late = [handle for id in self._reads.overdue(now) for handle in self._reads.handles_of(id)]
        if late:
            self._look(late, now)
            self._check_fences(now)
        for id in self._reads.overdue(now):
            self._overdue(id, now)

    def _overdue(self, id: str, now: float) -> None:
        peer = self._contacts.get(self._loads[id].ref.peer) if id in self._loads else None
        stage = "handshake" if peer is None or not peer.sources else "read"
        whom = peer.name if peer is not None else "unknown"
        self._fail(id, f"peer {whom}, {stage}: not done after {self._settings.kvconn.read:g} s", now)

    def settle(self) -> tuple[set[str], set[str]]:
        """Lives that are over: received, and which of them failed. Tells their producers."""
        self._fresh = False
        received: set[str] = set()
        failed: set[str] = set()
        for over in self._reads.settle():
            self._checks.end(over.id)
            why = self._put_in_order(over) if over.failed is None else over.failed
            load = self._loads.pop(over.id, None)
            if load is not None:
                self._let_go(load)
            self._say(over.id, over.n, "done" if why is None else "quiet", "")
            received.add(over.id)
            if why is not None:
                failed.add(over.id)
        self._gauge()
        return received, failed

    def _let_go(self, load: _Load) -> None:
        if load.peer is not None:
            load.peer.ended()
        self._contacts.tell_done(self._contacts.get(load.ref.peer), load.ref.transfer_id)
        if load.peer is not None:
            self._contacts.rests(load.peer)

    def _put_in_order(self, over: Settled) -> str | None:
        """What has come, as this cache has it; why that could not be."""
        try:
            for permute, blocks in self._loads[over.id].orders:
                put_in_order(permute, blocks)
        except RuntimeError as err:  # torch's, which has no narrower name for a device that is full
            why = f"its blocks could not be put in order: {err}"
            self._say(over.id, over.n, "failed", why[:WHY_MAX])
            self._meter.add("nixl_num_failed_transfers")
            log.warning("rank %d: load of %s failed: %s", self._rank, over.id, why)
            return why
        return None

    def _gauge(self) -> None:
        """Blocks in quarantine, as changes: counters add up to what there is now."""
        blocks = self._reads.quarantined_blocks()
        if blocks != self._quarantined:
            self._meter.add("quarantined_blocks", blocks - self._quarantined)
            self._quarantined = blocks

    def explain(self, now: float) -> list[str]:
        """One line per open load."""
        return self._reads.explain(now)

    def __repr__(self) -> str:
        return repr(self._reads)
