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
from collections.abc import Callable, Iterable
from functools import partial

import numpy as np

from kvconn.base import FactState, KVCacheView
from kvconn.config import LIMITS, NixlSettings
from kvconn.errors import RequestError, TransportError
from kvconn.metrics import Meter
from kvconn.nixl.agent import Agent
from kvconn.nixl.checks import Checks, Verdict
from kvconn.nixl.contacts import Contacts
from kvconn.nixl.fence import WORD, Fence, FenceWords, seal_fits
from kvconn.nixl.metadata import LoadSpec
from kvconn.nixl.pairing import pair_blocks, ranges
from kvconn.nixl.peers import Peer
from kvconn.nixl.plan import Plan
from kvconn.nixl.transfers import Reads
from kvconn.params import RemoteRef, peer_name
from kvconn.transport.base import HandleState

__all__ = ["Reader"]

log = logging.getLogger("kvconn.nixl")
#: fence words that may be read at once
SCRATCH = 4096
#: seconds a poll may wait for a fence word, which takes microseconds on a good day
SPIN = 200e-6
#: characters of a reason that travel with a fact
WHY_MAX = 500


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
        self._refs: dict[str, RemoteRef] = {}
        self._started: dict[int, tuple[Peer, float, int]] = {}
        #: fences of others that we check, and where their words are read to
        self._checks = Checks(SCRATCH)
        self._scratch: FenceWords | None = None
        self._looking: set[int] = set()
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
        for load in loads:
            peer = load.ref.peer if load.ref is not None else ("", "", 0)
            blocks = sum(map(len, load.local))
            self._reads.begin(load.id, load.n, peer, now + self._settings.kvconn.read, blocks, now)
            if load.ref is None:
                self._fail(load.id, load.refused or "no reference", now)
                continue
            self._refs[load.id] = load.ref
            self._contacts.with_peer(peer, now, partial(self._post, load, load.ref))

    def _post(self, load: LoadSpec, ref: RemoteRef, peer: Peer | None, why: str, now: float) -> None:
        if self._reads.life(load.id) != load.n:
            return  # failed while it waited for the handshake
        if peer is None or peer.plan is None or peer.agent is None or self._agent.transport is None:
            self._fail(load.id, why or "this rank has no NIXL agent", now)
            return
        try:
            self._admit(load, ref, peer, peer.plan)
            runs = pair_blocks(load.local, ref.block_ids, load.hits, peer.plan.remote_blocks)
            local, remote = ranges(peer.plan, runs)
            if len(local):
                handle = self._agent.transport.post_read(peer.agent, local, remote)
                self._under_way(load.id, handle, peer, int(local[:, 1].sum()), now)
                self._meter.add("nixl_num_descriptors", len(local))
            if not len(local) or load.id not in self._checks:
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
            self._meter.add("seals_refused")
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
        self._meter.add("unfenced_reads")

    def _under_way(self, id: str, handle: int, peer: Peer, size: int, now: float) -> None:
        peer.began()
        self._reads.posted(id, handle)
        self._started[handle] = (peer, now, size)

    def _fail(self, id: str, why: str, now: float) -> None:
        """The result of this life is failure; its blocks stay until it is quiet."""
        why = f"{why} (the load is {self._reads.age(id, now):.1f} s old)"
        if self._reads.fail(id, why, now):
            self._say(id, self._reads.life(id), "failed", why[:WHY_MAX])
            self._meter.add("nixl_num_failed_transfers")
            log.warning("rank %d: load of %s failed: %s", self._rank, id, why)

    # -- the poll ------------------------------------------------------------------------------------------------

    def drain(self, now: float) -> None:
        """Look at every read, and at the fences of those whose data has come."""
        self._drain_transfers(now)
        self._check_fences(now)

    def _drain_transfers(self, now: float) -> None:
        if self._agent.transport is None:
            return
        for handle in self._reads.handles():
            state = self._agent.transport.poll(handle)
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
            self._meter.add("stale_reads")
            whom = peer_name(self._refs[id].peer)
            self._fail(id, f"peer {whom}, fence: it let go of these blocks before they were read", now)

    def _read_word(self, id: str, now: float) -> None:
        ref = self._refs[id]
        peer = self._contacts.get(ref.peer)
        transport = self._agent.transport
        if transport is None or self._scratch is None or peer is None or peer.plan is None or peer.agent is None:
            self._fail(id, "the peer is gone before its fence was read", now)
            return
        slot, scratch = self._checks.target(id)
        fence = peer.plan.fence
        remote = np.array([[fence.fence_address + slot * WORD, WORD]] if fence is not None else [], np.int64)
        local = np.array([[self._scratch.slot_address(scratch), WORD]], np.int64)
        try:
            handle = transport.post_read(peer.agent, local, remote)
        except TransportError as err:
            if err.handle is not None:
                self._under_way(id, err.handle, peer, 0, now)
            self._fail(id, f"peer {peer.name}, fence: {err}", now)
        else:
            self._under_way(id, handle, peer, 0, now)
            self._looking.add(handle)

    def _handle_done(self, handle: int, now: float) -> None:
        peer, started, size = self._forget(handle)
        peer.used(now)
        self._reads.done(handle)
        if size:  # a fence word is no transfer
            self._meter.add("nixl_bytes_transferred", size)
            self._meter.add("nixl_xfer_seconds", now - started)
            self._meter.add("nixl_num_transfers")

    def _forget(self, handle: int) -> tuple[Peer, float, int]:
        """A quiet handle: only now may it be released (C6)."""
        started = self._started.pop(handle)
        started[0].ended()
        self._looking.discard(handle)
        if self._agent.transport is not None:
            self._agent.transport.release(handle)
        return started

    def _handle_error(self, handle: int, now: float) -> None:
        """ERR is a result, not quiet (F4): the handle is quiet once its peer is known to be gone."""
        peer = self._started[handle][0]
        why = self._agent.transport.reason(handle) if self._agent.transport is not None else ""
        self._fail(self._reads.error(handle), f"peer {peer.name}, read: {why}", now)

    def over_quarantine(self, now: float) -> str | None:
        """Frees what lost connections had kept; why our agent must be made anew to bound the rest, or None (C7)."""
        transport = self._agent.transport
        if transport is None or not self._reads.quarantined(now):
            return None
        for peer in {self._started[h][0] for h in self._reads.errors()}:
            if peer.agent is not None and transport.peer_gone(peer.agent):
                self._lose(peer)
        oldest = max((age for _, age, _ in self._reads.quarantined(now)), default=0.0)
        if oldest > self._settings.kvconn.quarantine_age:
            return f"quarantine is {oldest:.1f} s old"
        blocks = self._reads.quarantined_blocks()
        if blocks > self._quarantine_max:
            return f"{blocks} blocks are in quarantine, at most {self._quarantine_max} may be"
        return None

    def _lose(self, peer: Peer) -> None:
        """The connection failed and its ERR handles are quiet."""
        same = self._contacts.same_agent(peer)
        for one in same:
            for handle in self._reads.peer_gone(one.key):
                self._forget(handle)
        self._contacts.drop(same, "its connection failed")

    def agent_destroyed(self, now: float) -> None:
        """Nothing lands any more: every load fails and is quiet."""
        for id in self._reads.ids():
            self._fail(id, "the NIXL agent was made anew after a transfer never ended", now)
        self._reads.agent_destroyed()
        self._started.clear()
        self._looking.clear()

    def expire(self, now: float) -> None:
        """Fail loads that are past their deadline. Call after :meth:`drain` (C11)."""
        for id in self._reads.overdue(now):
            self._overdue(id, now)

    def _overdue(self, id: str, now: float) -> None:
        peer = self._contacts.get(self._refs[id].peer) if id in self._refs else None
        stage = "handshake" if peer is None or peer.agent is None else "read"
        whom = peer.name if peer is not None else "unknown"
        self._fail(id, f"peer {whom}, {stage}: not done after {self._settings.kvconn.read:g} s", now)

    def settle(self) -> tuple[set[str], set[str]]:
        """Lives that are over: received, and which of them failed. Tells their producers."""
        received: set[str] = set()
        failed: set[str] = set()
        for over in self._reads.settle():
            self._checks.end(over.id)
            ref = self._refs.pop(over.id, None)
            if ref is not None:
                self._contacts.tell_done(self._contacts.get(ref.peer), ref.transfer_id)
            self._say(over.id, over.n, "done" if over.failed is None else "quiet", "")
            received.add(over.id)
            if over.failed is not None:
                failed.add(over.id)
        self._gauge()
        return received, failed

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
