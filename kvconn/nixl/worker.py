"""The worker half: registers memory, keeps leases and fence words, and answers the one poll. Reading is the reader's.

Contract this half keeps
- Producer: reports each announced send exactly once. The serving rank when its readers are done or the lease ended,
  after it took the request's fence word down (C8); a replicated rank (PCP > 0), which nobody reads, at the poll of the
  step whose metadata announces the release (C1).
- Consumer: what :class:`~kvconn.nixl.reader.Reader` says.

Rules
1. One poll: :meth:`NixlWorker.poll` (C5). In it notifications and transfer states are read before any timeout (C11).
   Without news, and before anything is due, it ends there.
2. A replicated rank has no agent, no handshake metadata and no leases.
3. Nothing here blocks: handshakes run on the client's thread, reads in the transport. While our agent is busy with a
   new peer nothing is asked of it: what would be waits for the next poll.
4. Whatever a peer sends ends in a failed request or a counter (C9).
Time is an argument, in seconds of the worker's clock.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Literal, cast

from kvconn.base import (
    NO_RESULTS,
    Direction,
    Fact,
    FactState,
    KVCacheView,
    LayerView,
    Published,
    TransferResults,
    WorkerFacts,
)
from kvconn.config import ConnectorConfig, NixlSettings
from kvconn.errors import ConfigError
from kvconn.geometry import RankRole, Region, place_of, regions_of, spans
from kvconn.metrics import Meter
from kvconn.nixl.agent import Agent
from kvconn.nixl.contacts import Contacts
from kvconn.nixl.fence import FenceWords
from kvconn.nixl.handshake import Ours, describe, rank_cache
from kvconn.nixl.leases import Ended, SendLeases
from kvconn.nixl.metadata import NixlHandshake, NixlStep, SendSpec
from kvconn.nixl.peers import Peer, PeerKey, Work
from kvconn.nixl.reader import SPIN, Reader
from kvconn.nixl.wire import Done, Heartbeat, WireCodec, parse_notification
from kvconn.params import RemoteRef
from kvconn.transport.base import MemoryRegion, Transport

__all__ = ["NixlWorker"]

log = logging.getLogger("kvconn.nixl")
#: seconds between two looks at what takes longer than SPIN
NAP = 50e-6


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
        #: where peers find this rank
        self._place = place_of(config.parallel, role.rank)
        self._cache = kv_cache
        self._codec = codec
        self._regions: tuple[Region, ...] = ()
        self._agent = Agent(make_transport, role.rank)
        self._contacts = Contacts(settings, role.rank, self._agent, self.meter)
        self._reader = Reader(
            settings, kv_cache, role.rank, self._agent, self._contacts, self.meter, self._say_received
        )
        self._leases = SendLeases(settings.kv_lease_duration, settings.kvconn.early_max)
        #: the word of every request of ours that readers are sent to
        self._fence: FenceWords | None = None
        #: fence slots to take down before the report, by life
        self._slots: dict[int, int] = {}
        #: our agent was made anew and readers must be told
        self._republish = False
        #: no token is computed in this step, and loads are open
        self.rests = False
        #: :meth:`start_loads` may have something to start
        self.loads_wait = False
        #: until then nothing but a step or a notification can change anything here
        self._next_due = -math.inf
        #: lives a replicated rank has only to acknowledge: request id -> n, until the next poll.
        self._replicated_pcp_done_sending: dict[str, int] = {}
        #: announced sends whose early notifications had completed them.
        self._ended: list[Ended] = []
        self._seen: dict[Direction, int] = {"send": 0, "recv": 0}
        self._facts: list[Fact] = []
        #: what is to be told to peers, and waits while our agent is busy
        self._put_off: list[tuple[PeerKey, Work]] = []

    # -- start-up ------------------------------------------------------------------------------------------------

    def register(self, layers: Mapping[str, LayerView]) -> None:
        """Register the cache; creates the agent where this rank serves or reads. Raises ConfigError, TransportError."""
        if self._agent.transport is not None:
            raise ConfigError("register_kv_caches: called twice on one worker half")
        self._regions = regions_of(layers.values())
        for region in self._regions:
            if not 0 <= region.group < len(self._cache.groups):
                raise ConfigError(f"layer {region.name}: cache group {region.group} of {len(self._cache.groups)}")
        if not (self.role.serves or self.role.reads):
            return
        memory = [
            MemoryRegion(base, length, cast('Literal["DRAM", "VRAM"]', kind), device)
            for base, length, kind, device in spans(self._regions)
        ]
        if self.role.serves:
            self._fence = FenceWords(self._cache.num_blocks)
            memory.append(self._fence.region())
        if self.role.reads:
            memory.append(self._reader.open().region())
        self._agent.open(memory)
        if self.role.reads:
            cache = rank_cache(self._config, self._cache, self._regions)
            enforce = self._settings.enforce_handshake_compat
            self._contacts.open(Ours(self._config, cache, self._place, self._codec, enforce))

    def handshake(self) -> NixlHandshake | None:
        """What readers need of this rank; None where it serves nobody."""
        if self._fence is None or self._agent.transport is None:
            return None
        blob = self._agent.transport.metadata()
        return describe(self._config, self._cache, self._regions, self._codec, blob, self._fence)

    # -- a step --------------------------------------------------------------------------------------------------

    def bind(self, step: NixlStep, now: float) -> None:
        """This step's announcements, before its forward. An announcement bound before changes nothing."""
        self._next_due = -math.inf
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
        self._reader.accept(load for load in step.loads if self._is_new("recv", load.n))
        self.loads_wait = self._reader.waiting
        self._put_off += [(key, partial(self._contacts.heartbeat, ids)) for key, ids in step.heartbeats]
        self._put_off += [(ref.peer, partial(self._let_go, ref)) for ref in step.releases]
        if not self._agent.busy:
            self._tell_peers(now)

    def _tell_peers(self, now: float) -> None:
        work, self._put_off = self._put_off, []
        for key, one in work:
            self._contacts.with_peer(key, now, one)

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
        """Begin this step's loads, after its forward began; after the poll that finds our agent busy no more, if it is
        busy now."""
        if not self._agent.busy:
            self._reader.start(now)
            self.loads_wait = False

    def _let_go(self, ref: RemoteRef, peer: Peer | None, why: str, now: float) -> None:
        """Of a reference that nobody here reads; our scheduler half keeps the engine stepping until this."""
        self._contacts.tell_done(peer, ref.transfer_id)
        self._say(ref.transfer_id, "recv", 0, "released")

    def _say(self, id: str, direction: Direction, n: int, state: FactState, why: str = "") -> None:
        self._facts.append(Fact(id, direction, n, self.role.rank, state, why=why))

    def _say_received(self, id: str, n: int, state: FactState, why: str) -> None:
        self._say(id, "recv", n, state, why)

    # -- the poll ------------------------------------------------------------------------------------------------

    def poll(self, now: float) -> TransferResults:
        """What finished on this rank since the last poll. Consumes (C5). While our agent is busy that is nothing, and
        nothing is judged: no state can be read (C11)."""
        if self._agent.busy:
            self._contacts.watch(now)
            return NO_RESULTS
        transport = self._agent.transport
        news = transport.notifications() if transport is not None else ()
        if not news and now < self._next_due:
            return NO_RESULTS
        self._contacts.met(now)
        self._tell_peers(now)
        self._reader.start(now)
        if self._agent.due(now):
            self._reopen(now)
        self._take_notifications(news, now)
        self._contacts.drain(now)
        self._reader.drain(now)  # after it: work that waited for a handshake is posted, and may be done
        self._look_on(now)
        sent = self._ended_sends(now)
        self._reader.expire(now)
        self._contacts.evict(now)
        why = self._reader.over_quarantine(now)
        if why is not None:
            self._recreate(why, now)
        received, failed = self._reader.settle()
        self._contacts.meet(now)
        self._next_due = self._when_due()
        return TransferResults(frozenset(sent), frozenset(received), frozenset(failed))

    def _look_on(self, now: float) -> None:
        """An engine asks once per step, and sleeps after one without tokens: what ends within that time is seen now."""
        patience = 0.0 if self._ended else self._reader.patience(now, self.rests)
        began = time.perf_counter()
        while (spent := time.perf_counter() - began) < patience:
            if self._contacts.meets_next or not self._reader.expecting:
                return
            if spent > SPIN:  # the pump goes on, and the peer may need this core; who yields it waits longer
                time.sleep(NAP)
            self._contacts.drain(now)
            self._reader.drain(now)

    def _when_due(self) -> float:
        """When this half has something to do by itself."""
        if self._ended or not self._reader.idle:
            return -math.inf
        return min(self._leases.next_due, self._contacts.next_due, self._agent.next_due)

    def _take_notifications(self, news: Sequence[tuple[str, bytes]], now: float) -> None:
        for agent, message in news:
            parsed = parse_notification(message)
            if isinstance(parsed, Heartbeat):
                self._leases.heartbeat(parsed.transfer_ids, now)
            elif isinstance(parsed, Done):
                ended = self._leases.notified(parsed.transfer_id, agent, parsed.readers, now)
                if ended is not None:
                    self._ended.append(ended)
            else:
                self.meter.add("notifications_malformed")

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

    def _recreate(self, why: str, now: float) -> None:
        """Bound the quarantine: after our agent is destroyed nothing lands (C7, F1). Fails this rank's transfers; who
        reads from it fails too, and finds the new agent at its next handshake."""
        log.error("rank %d: %s: making a new NIXL agent; %r", self.role.rank, why, self._reader)
        self.meter.add("agent_recreations")
        transport = self._agent.transport
        self._agent.destroy()
        if transport is not None:  # what came since this poll began is true all the same
            self._take_notifications(transport.notifications(), now)
        self._reader.agent_destroyed(now)
        self._contacts.agent_destroyed("the NIXL agent was made anew", now)
        self._reopen(now)

    def _reopen(self, now: float) -> None:
        if self._agent.reopen(now):
            self._republish = self.role.serves

    # -- the rest ------------------------------------------------------------------------------------------------

    def take_facts(self) -> WorkerFacts | None:
        """The facts behind the sets of the last poll, failures known since, and our metadata when it is new."""
        if not self._facts and not self._republish:
            return None
        published: tuple[Published, ...] = ()
        mine = self.handshake() if self._republish else None
        if mine is not None:
            self._republish = False
            published = (Published(self._place.pp, self._place.tp, mine.payload),)
        if not self._facts and not published:
            return None
        facts, self._facts = WorkerFacts(tuple(self._facts), published), []
        return facts

    def explain(self, now: float) -> list[str]:
        """One line per held send and per open load, and for an introduction that is overdue."""
        return self._leases.explain(now) + self._reader.explain(now) + self._contacts.explain(now)

    def shutdown(self) -> None:
        """Takes every word down, then destroys the agent: nothing of ours may land after this returns (F1)."""
        if self._fence is not None:
            self._fence.zero_all()
        try:
            self._agent.destroy()
        finally:
            self._contacts.close()

    def __repr__(self) -> str:
        return f"NixlWorker({self.role!r} {self._leases!r} {self._reader!r} {self._contacts!r})"
