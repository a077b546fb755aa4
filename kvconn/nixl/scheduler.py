"""The scheduler half: opens lives, announces them, lets completed ones through.

Rules
1. Producer: when ``finished`` answers True, a send life is open over every worker of the engine, its announcement is
   in the next step's metadata, and the id is emitted as sent once, when every worker has reported that life (C1, C3).
2. Consumer: a reference is consumed at the first allocation (C10). With external tokens a receive life opens and
   the blocks are its until it is emitted as received, whatever becomes of the request; without, the producer is told
   to let go.
3. A reference nobody will read (abort, rejection, full local hit) becomes a release notification.
4. A wrong reference fails or recomputes that request by policy, is logged once and counted; nothing raises (C9).
5. A request that a reader will be sent to has a fence slot from its first scheduled step; without one nothing is held.
6. Every table empties: requests leave at ``finished``, lives and fence slots at their emission.
Time is an argument.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from kvconn.base import NO_BLOCK, BlockIds, Fact, FinishReason, KVBlocks, KVCacheView, RequestView, StepView
from kvconn.config import ConnectorConfig, NixlSettings
from kvconn.errors import RequestError
from kvconn.ledger import CompletionGate, CompletionLedger, Emit
from kvconn.metrics import Meter
from kvconn.nixl.blocks import blocks_held, blocks_to_fill, check_state
from kvconn.nixl.fence import Fence, FenceSlots, check_signature, fresh_key, prompt_digest, seal, sign
from kvconn.nixl.handshake import side_of
from kvconn.nixl.metadata import LoadSpec, NixlHandshake, NixlStep, SendSpec
from kvconn.nixl.sideserver import HandshakeServer
from kvconn.nixl.wire import WireCodec
from kvconn.params import (
    KvconnRef,
    PeerKey,
    RemoteRef,
    fresh_transfer_id,
    parse_remote,
    peer_name,
    readers_asked,
    to_params,
    wants_remote_decode,
)
from kvconn.trust import load_trust, warn_without_key

__all__ = ["NixlScheduler"]

log = logging.getLogger("kvconn.nixl")


@dataclass(slots=True)
class _Incoming:
    """What a request was handed: a reference, or why it is none."""

    ref: RemoteRef | None
    refused: str | None
    arrived: float
    consumed: bool = False
    beating: bool = False


class NixlScheduler:
    """Inputs and outputs are views and Structs only; the facade translates (docs/design.md, shape)."""

    def __init__(
        self, config: ConnectorConfig, settings: NixlSettings, kv_cache: KVCacheView, codec: WireCodec
    ) -> None:
        self._config = config
        self._codec = codec
        self._settings = settings
        self._cache = kv_cache
        role = config.kv_transfer.kv_role
        self._serves = role in ("kv_producer", "kv_both")
        self._reads = role in ("kv_consumer", "kv_both")
        self._recompute = config.kv_transfer.kv_load_failure_policy == "recompute"
        self._ranks = range(config.parallel.world)
        self._side = side_of(config)
        self.ledger = CompletionLedger()
        self._gate = CompletionGate(self.ledger)
        self.meter = Meter()
        self._incoming: dict[str, _Incoming] = {}
        #: loads that are open and may still end well
        self.loading: dict[str, RemoteRef] = {}
        self._sends: list[SendSpec] = []
        self._loads: list[LoadSpec] = []
        self._releases: list[RemoteRef] = []
        #: references whose producer is being told: ranks that have not, as bits, and until when that is waited for
        self._telling: dict[str, tuple[int, float]] = {}
        self._next_heartbeat = 0.0
        self._newcomers: list[str] = []
        self._fences = FenceSlots(kv_cache.num_blocks)
        self._to_hold: set[str] = set()
        self._draining = False
        self._lifted: list[int] = []
        self._seal_key = fresh_key()
        self._trust = load_trust(settings.kvconn)
        warn_without_key(self._trust)
        self._server: HandshakeServer | None = None
        #: of the server's refusals, those that are in the meter
        self._refused = 0
        self._published: dict[tuple[int, int], bytes] = {}

    # -- consumer ------------------------------------------------------------------------------------------------

    def arrived(self, view: RequestView, now: float) -> None:
        """Parse what the request was handed; heartbeats start with the next step."""
        if self._holds(view) and view.id not in self._fences:
            self._to_hold.add(view.id)
        if view.id in self._incoming or not self._reads:
            return
        ref: RemoteRef | None = None
        try:
            ref = self.reference(view.params)
            if ref is not None:
                check_state(self._cache.groups, ref.num_tokens, view.n_prompt)
        except RequestError as err:
            self._incoming[view.id] = _Incoming(None, str(err), now)
            self.meter.add("params_refused")
            log.warning("request %s: refused: %s", view.id, err)
            if ref is not None:  # a good one, that is of no use here
                self._releases.append(ref)
            return
        if ref is not None:
            self._incoming[view.id] = _Incoming(ref, None, now)
            self._newcomers.append(view.id)

    def reference(self, params: Mapping[str, Any] | None) -> RemoteRef | None:
        """What a request was handed, None when nothing. Raises RequestError."""
        ref = parse_remote(params, self._cache.block_size)
        if ref is not None and self._trust.key is not None:
            check_signature(self._trust.key, ref)
        return ref

    def match(self, view: RequestView, local_tokens: int, now: float) -> tuple[int | None, bool]:
        """Tokens beyond ``local_tokens`` that the producer holds; a pure function of the request until allocated."""
        self.arrived(view, now)
        incoming = self._incoming.get(view.id)
        if incoming is None or incoming.consumed:
            return 0, False
        if self.ledger.is_open(view.id, "recv"):
            return None, False  # the id of an aborted request came back before its blocks did
        if incoming.ref is None:
            available = 0 if self._recompute else view.n_prompt
        else:
            available = min(incoming.ref.num_tokens, view.n_prompt)
        external = max(0, available - local_tokens)
        return external, external > 0

    def allocated(self, view: RequestView, blocks: KVBlocks, n_external: int, now: float) -> None:
        """Blocks were given. The first call consumes the reference."""
        incoming = self._incoming.get(view.id)
        if incoming is None or incoming.consumed:
            return
        incoming.consumed = True
        if n_external > 0:
            n = self.ledger.open(view.id, "recv", {(): self._ranks}, now=now)
            self._loads.append(self._load(view, blocks, n_external, n, incoming, now))
            if incoming.ref is not None:
                self.loading[view.id] = incoming.ref
        elif incoming.ref is not None:
            self._releases.append(incoming.ref)
        incoming.ref = None  # the request goes on for long, its reference does not

    def _load(
        self, view: RequestView, blocks: KVBlocks, n_external: int, n: int, incoming: _Incoming, now: float
    ) -> LoadSpec:
        if incoming.ref is None:
            return LoadSpec(view.id, n, None, refused=incoming.refused)
        size = self._cache.block_size
        tokens = max(blocks.hashed) * size + n_external
        filled = tuple(
            blocks_to_fill(group, ids, hit, tokens, size)
            for group, ids, hit in zip(self._cache.groups, blocks.ids, blocks.hashed, strict=True)
        )
        return LoadSpec(
            view.id,
            n,
            incoming.ref,
            filled,
            blocks.hashed,
            tokens,
            waited=now - incoming.arrived,
            prompt=prompt_digest(view, incoming.ref.num_tokens),
            beating=incoming.beating,
        )

    # -- producer ------------------------------------------------------------------------------------------------

    def finished(
        self, view: RequestView, blocks: BlockIds, reason: FinishReason, now: float
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request ended: hold its blocks for a reader if it asked for one, and let go of what it never read."""
        incoming = self._incoming.pop(view.id, None)
        if incoming is not None and not incoming.consumed and incoming.ref is not None:
            self._releases.append(incoming.ref)
        if not (self._serves and wants_remote_decode(view.params)):
            return False, None
        self._to_hold.discard(view.id)
        n_tokens = view.n_total - 1  # the last sampled token has no KV
        size = self._cache.block_size
        held = tuple(blocks_held(g, ids, n_tokens, size) for g, ids in zip(self._cache.groups, blocks, strict=True))
        whole = any(held) and all(block != NO_BLOCK for ids in held for block in ids)
        complete = reason in (FinishReason.STOP, FinishReason.LENGTH) and n_tokens > 0 and whole
        fence, readers = self._fences.get(view.id), self._readers(view)
        open_already = self.ledger.is_open(view.id, "send")
        if fence is None or readers is None or self._server is None or not complete or open_already:
            if not open_already:
                self._lift(view.id)
            return False, None
        return True, to_params(self._hold(view, held, n_tokens, fence, readers, now))

    def _readers(self, view: RequestView) -> int | None:
        """How many engines will read; None when the router's word is wrong, which holds nothing."""
        try:
            return readers_asked(view.params)
        except RequestError as err:
            self.meter.add("params_refused")
            log.warning("request %s: nothing is held: %s", view.id, err)
            return None

    def drain(self) -> None:
        """The engine ends soon: who arrives from now on is not held; no reader is to be sent here any more."""
        self._draining = True

    def _holds(self, view: RequestView) -> bool:
        return self._serves and not self._draining and wants_remote_decode(view.params)

    def _lift(self, id: str) -> None:
        """No reader will be sent to this request: its word comes down with the next step."""
        slot = self._fences.close(id)
        if slot is not None:
            self._lifted.append(slot)

    def _hold(
        self, view: RequestView, held: BlockIds, n_tokens: int, fence: Fence, readers: int, now: float
    ) -> RemoteRef:
        n = self.ledger.open(view.id, "send", {(): self._ranks}, now=now)
        deadline = now + self._settings.kv_lease_duration
        ref = RemoteRef(
            engine_id=self._config.engine_id,
            transfer_id=fresh_transfer_id(),
            host=self._config.host,
            port=self._config.port,
            block_ids=held,
            num_tokens=n_tokens,
            tp_size=self._side.tp,
            pp_size=self._side.pp,
            dcp_size=self._side.dcp,
        )
        sealed = seal(self._seal_key, ref, fence, prompt_digest(view, n_tokens))
        ours = KvconnRef(fence.slot, fence.word, sealed, deadline)
        self._sends.append(SendSpec(view.id, n, ref.transfer_id, deadline, readers, fence.slot))
        self._fences.handed_out(view.id)
        ref = msgspec.structs.replace(ref, kvconn=ours)
        if self._trust.key is None:
            return ref
        return msgspec.structs.replace(ref, kvconn=msgspec.structs.replace(ours, signature=sign(self._trust.key, ref)))

    # -- steps ---------------------------------------------------------------------------------------------------

    def step(self, view: StepView, now: float) -> NixlStep | None:
        """Everything that happened since the last step, for the worker halves; None when that is nothing."""
        if self._silent(now):
            return None
        self._fences.step()
        if self._server is not None and self._server.refused > self._refused:
            self.meter.add("handshakes_refused", self._server.refused - self._refused)
            self._refused = self._server.refused
        for id in [id for id, (_, until) in self._telling.items() if until <= now]:
            del self._telling[id]
        for ref in self._releases:
            self._telling[ref.transfer_id] = (
                (1 << len(self._ranks)) - 1,
                now + 2 * self._settings.kvconn.handshake,
            )  # two rounds
        step = NixlStep(
            now,
            tuple(self._sends),
            tuple(self._loads),
            tuple(self._releases),
            self._heartbeats(now),
            self._fence(view),
            tuple(self._lifted),
        )
        self._sends, self._loads, self._releases, self._lifted = [], [], [], []
        return step

    def _silent(self, now: float) -> bool:
        """Nothing came since the last step, nothing waits for this one, nothing is due: so are most steps."""
        return not (
            self._sends
            or self._loads
            or self._releases
            or self._lifted
            or self._newcomers
            or self._to_hold
            or self._telling
            or self._fences.cooling
            or (now >= self._next_heartbeat and (self._incoming or self.loading))
            or (self._server is not None and self._server.refused > self._refused)
        )

    def _fence(self, view: StepView) -> tuple[Fence, ...]:
        """Words for the requests of this step that will be held and have none yet."""
        if not self._to_hold:
            return ()
        first = [r.id for r in view.requests if r.id in self._to_hold]
        self._to_hold.difference_update(first)
        return tuple(fence for id in first if (fence := self._fences.open(id)) is not None)

    def _heartbeats(self, now: float) -> tuple[tuple[PeerKey, tuple[str, ...]], ...]:
        due, newcomers = now >= self._next_heartbeat, self._newcomers
        if not due and not newcomers:
            return ()
        self._newcomers = []
        arrived: Iterable[_Incoming] = self._incoming.values()
        refs: list[RemoteRef] = []
        if due:
            self._next_heartbeat = now + self._settings.kv_lease_duration / 6
        else:
            arrived = [one for id in newcomers if (one := self._incoming.get(id)) is not None]
        for incoming in arrived:
            if not incoming.consumed and incoming.ref is not None:
                incoming.beating = True
                refs.append(incoming.ref)
        if due:
            refs += self.loading.values()
        wanted: dict[PeerKey, list[str]] = {}
        for ref in refs:
            wanted.setdefault(ref.peer, []).append(ref.transfer_id)
        return tuple((peer, tuple(ids)) for peer, ids in wanted.items())

    def reports(
        self, sent: Iterable[str], received: Iterable[str], failed: Iterable[str], facts: Iterable[Fact]
    ) -> Emit:
        """Filter the engine's sets (veto, never originate)."""
        about: list[Fact] = []
        for fact in facts:
            if fact.state == "released":
                self._told(fact)
                continue
            about.append(fact)
            if fact.state == "failed" and self._is_open(fact):
                self.loading.pop(fact.id, None)  # nobody wants it any more: its producer's lease may end
        emit = self._gate.reports(sent, received, failed, about)
        for id in emit.received:
            self.loading.pop(id, None)
        for id in emit.sent:
            self._fences.close(id)
        return emit

    def _is_open(self, fact: Fact) -> bool:
        life = self.ledger.get(fact.id, fact.direction)
        return life is not None and life.n == fact.n

    def _told(self, fact: Fact) -> None:
        """A rank, or several, have told a producer that nobody here reads this reference."""
        owed, until = self._telling.get(fact.id, (0, 0.0))
        owed &= ~fact.ranks
        if owed:
            self._telling[fact.id] = owed, until
        else:
            self._telling.pop(fact.id, None)

    def needs_steps(self, now: float) -> bool:
        """True while producers are still to be told to let go: their blocks would wait for the lease's end (C12)."""
        return bool(self._releases) or any(until > now for _, until in self._telling.values())

    # -- handshake and the rest ----------------------------------------------------------------------------------

    def serve(self, metadata: Mapping[tuple[int, int], NixlHandshake]) -> None:
        """Publish the serving workers' payloads, or the new ones of some. Raises ConfigError when the port is taken."""
        if not metadata:
            return
        for rank, one in metadata.items():
            self._published[rank] = self._codec.with_seal_key(one.payload, self._seal_key)
        if self._server is not None:
            self._server.replace(self._published)
        else:
            self._server = HandshakeServer(self._config.host, self._config.port, self._published, self._trust)

    def reset(self) -> bool:
        """The engine forgets its cache, or its memory moves: no word of ours stands once the next step began. Who
        reads meanwhile fails and computes; blocks that are held stay held until their lives end."""
        self._lifted += self._fences.slots()
        for id in self._fences.ids():
            if not self.ledger.is_open(id, "send"):
                self._fences.close(id)
        return True

    def explain(self, now: float) -> list[str]:
        """One line per open life that is owed something, and per request that waits to be admitted."""
        lines = [life.describe({(): "NixlConnector"}, now) for life in self.ledger.pending() if life.owed]
        for id, one in list(self._incoming.items()):
            if not one.consumed and one.ref is not None:
                beats = "heartbeats sent" if one.beating else "no heartbeat yet"
                age = f"for {now - one.arrived:.1f} s"
                lines.append(f"{id} waits to be admitted with KV at {peer_name(one.ref.peer)}, {beats}, {age}")
        return lines

    def shutdown(self) -> None:
        if self._server is not None:
            self._server.close()

    def __repr__(self) -> str:
        return (
            f"NixlScheduler({self._config.kv_transfer.kv_role} {self.ledger!r} "
            f"incoming={len(self._incoming)} loading={len(self.loading)} fences={len(self._fences)})"
        )
