"""Producers and consumers on one simulated network: what may happen to them, and what must be so whatever happens.

What must be so, after everything that happens
(a) nobody reads a byte that is not its prompt's: every forward reads all KV before it, every accepted load is compared;
(b) whatever a posted read may still write, released or not, belongs to an open load, and its blocks to nobody else;
(c) a delayed request is emitted once, when no life of it is open: a send when its readers are done or its lease,
    heartbeats counted, is over, and while no reader of it reads;
(d) when the faults are healed everything ends and all tables are empty; while a rank is silent, what waits for it names
    that rank and no other;
(e) a load is called stale only when its producer had let go.
Time is a manual clock's.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any
from unittest.mock import patch

from kvconn.base import Fact, WorkerFacts
from kvconn.ledger import _ranks
from kvconn.nixl.wire import Done, Heartbeat, parse_notification
from kvconn.testing import LoopbackNet, ManualClock
from kvconn.testing.holding import HoldingConnector
from tests.sim.channel import Directory, simulated
from tests.sim.engine import Engine, all_tables, leaves
from tests.sim.shapes import LEASE, Shape

SCRATCH = 5  # so few that they come back often, and run out; of one producer four ranks are read at most
P_BLOCKS, D_BLOCKS = 12, 10


@dataclass
class Send:
    """What an engine holds for readers. ``ended``: it may be let go."""

    id: str
    engine: Engine
    params: dict[str, Any]
    tokens: tuple[int, ...]
    deadline: float
    readers: int
    announced: bool = False
    #: its engine is gone
    dead: bool = False
    uses: int = 0
    #: by rank: who told it that they are done, and of how many of their engine
    done: dict[int, dict[str, int]] = field(default_factory=dict)
    deadlines: dict[int, float] = field(default_factory=dict)
    #: ranks that may let go
    ended: set[int] = field(default_factory=set)

    def read_at(self, rank: int) -> bool:
        """All readers have told this rank."""
        return sum(Fraction(1, n) for n in self.done.get(rank, {}).values()) >= self.readers

    @property
    def read(self) -> bool:
        return all(self.read_at(rank) for rank in self.engine.active)

    @property
    def may_end(self) -> bool:
        return self.dead or self.ended >= set(self.engine.active)

    @property
    def transfer_id(self) -> str:
        return str(self.params["remote_request_id"])

    @property
    def blocks(self) -> list[int]:
        return list(self.params["remote_block_ids"][0])


@dataclass
class Load:
    """Blocks that a transfer of ours may fill, from ``start`` tokens on to the end of ``tokens``."""

    engine: Engine
    tokens: tuple[int, ...]
    start: int
    blocks: tuple[int, ...]
    transfer_id: str


class World:
    """One producer after another, one or two consumers. ``counts``: what happened, by name."""

    def __init__(self, shape: Shape, seed: int = 0) -> None:
        self.shape = shape
        self.clock = ManualClock()
        self.net = LoopbackNet(seed, clock=self.clock, cuts=2)
        self.directory: Directory = {}
        self.mute = False
        self.counts: Counter[str] = Counter()
        self.sends: list[Send] = []
        self.loads: dict[tuple[str, str], Load] = {}
        self._open: dict[tuple[str, str], Send] = {}
        self._serial = itertools.count(1)
        self._stopped: set[str] = set()
        self._made: list[Engine] = []
        self.p = self.start("P", 1)
        self.consumers = [self.start(f"D{i}", 2 + i) for i in range(shape.consumers)]

    @property
    def engines(self) -> list[Engine]:
        return [self.p, *self.consumers]

    def start(self, name: str, port: int) -> Engine:
        """A new engine at this port."""
        serves = name.startswith("P")
        with simulated(self), patch("kvconn.nixl.reader.SCRATCH", SCRATCH):
            engine = Engine(
                self,
                name,
                self.shape.transfer(serves),
                parallel=self.shape.parallel(serves),
                heads=self.shape.heads,
                num_blocks=P_BLOCKS if serves else D_BLOCKS,
                port=port,
                chunk=self.shape.chunk,
                harsh=self.shape.harsh,
                clock=self.clock,
                make_transport=self.net.transport,
            )
        self._made.append(engine)
        return engine

    def close(self) -> None:
        for engine in self._made:
            engine.close()

    # -- what happens --------------------------------------------------------------------------------------------

    def submit(self, length: int, pick: int) -> None:
        """A prompt for the producer, to be read by others; prompts share beginnings, ids come back."""
        readers = 1 + pick % self.shape.consumers
        params: dict[str, Any] = {"do_remote_decode": True}
        if readers > 1:
            params["kvconn"] = {"readers": readers}
        self._add(self.p, f"p{pick % 4}", self._prompt(1 + length, pick), 1 + (pick % 3 == 2), params)

    def submit_local(self, length: int, pick: int) -> None:
        """A prompt that nobody else reads: it takes blocks, and decodes until somebody is preempted."""
        engine = self.engines[pick % len(self.engines)]
        self._add(engine, f"l{pick % 4}", self._prompt(4 + length, pick), 16, None)

    def _prompt(self, length: int, family: int) -> tuple[int, ...]:
        shared, serial = min(length, (0, 4, 6, 8)[family % 4]), next(self._serial)
        return tuple(range(family % 3 * 100, family % 3 * 100 + shared)) + tuple(
            1000 * serial + i for i in range(length - shared)
        )

    def _add(
        self, engine: Engine, id: str, tokens: tuple[int, ...], max_tokens: int, params: dict[str, Any] | None
    ) -> None:
        self.counts["rejected" if id in engine.scheduler.requests else "requests"] += 1
        engine.add(id, tokens, max_tokens, params)

    def hand(self, pick: int, how: int) -> None:
        """A reference and its prompt go to a consumer, the way a router does it; now and then not as they were."""
        if not self.sends:
            return
        send = self.sends[-1 - pick % min(3, len(self.sends))]
        engine = self.consumers[how % len(self.consumers)]
        if engine is send.engine:
            return
        params = dict(send.params)
        tokens = send.tokens + self._prompt(2, 0) if how % 4 == 1 else send.tokens
        if how == 7 and pick > 4:
            params["remote_block_ids"] = [[block + 1 for block in send.blocks]]
        if how == 6 and pick > 4:
            tokens = tokens[:-1] + self._prompt(1, 0)
        params["do_remote_decode"] = self.shape.both and how % 2 == 1
        send.uses += 1
        self.counts["references handed"] += 1
        self._add(engine, f"d{(pick + how) % 5}", tokens, 1 + how % 3, params)

    def rush(self, pick: int, how: int) -> None:
        """A reference is read while its producer does nothing."""
        self.hand(pick, how)
        engine = self.consumers[how % len(self.consumers)]
        for _ in range(3 + how % 2):
            self.step(engine)
            self.net.run()

    def meet(self, pick: int, how: int) -> None:
        """A reference's read is posted, and nothing of it has come."""
        self.hand(pick, how)
        for _ in range(2):
            self.step(self.consumers[how % len(self.consumers)])

    def step_p(self, pick: int, how: int) -> None:
        self.step(self.p)

    def step_d(self, pick: int, how: int) -> None:
        self.step(self.consumers[pick % len(self.consumers)])

    def half_step(self, pick: int, how: int) -> None:
        """A step runs, and the scheduler has not heard of it yet."""
        engine = self.engines[pick % len(self.engines)]
        if engine.name not in self._stopped:
            engine.end()
            engine.begin()
            self.counts["half steps"] += 1

    def step(self, engine: Engine) -> None:
        if engine.name in self._stopped:
            return
        self.counts["steps"] += 1
        engine.begin()
        engine.end()

    def abort(self, pick: int, how: int) -> None:
        """Of any request in any state."""
        engine = self.engines[how % len(self.engines)]
        ids = [id for id, one in engine.scheduler.requests.items() if id not in engine.scheduler.delayed]
        if ids:
            id = ids[pick % len(ids)]
            self.counts[f"aborts, {self._stage(engine, id)}"] += 1
            engine.abort(id)

    def _stage(self, engine: Engine, id: str) -> str:
        status = engine.scheduler.requests[id].status.value
        if (engine.name, id) in self.loads:
            read = engine.half._reader._reads._open.get(id)
            status = "loading, " + (
                "not begun or quiet" if read is None else "in read" if read.handles else "in handshake"
            )
        return status + (" (its step runs)" if engine.in_step else "")

    def arrive(self, pick: int, how: int) -> None:
        for _ in range(1 + how):
            self.net.step(pick)

    def arrive_all(self, pick: int, how: int) -> None:
        self.net.run()

    def wait(self, pick: int, how: int) -> None:
        self.clock.advance((0.5, 6.0, 11.0, 21.0, 31.0, 41.0, 2.0, 1.0)[pick])

    def expire(self, pick: int, how: int) -> None:
        """The producer's leases end; now and then somebody comes too late, at once."""
        self.step(self.p)
        self.clock.advance(LEASE + 1)
        self.step(self.p)
        if how % 2:
            self.rush(pick, how)

    def expire_heard(self, pick: int, how: int) -> None:
        """Heartbeats wait unread at the producer when its leases would end."""
        self.meet(pick, how)
        self.clock.advance(LEASE / 6 + 1)
        self.step(self.consumers[how % len(self.consumers)])
        self.net.run()
        self.clock.advance(LEASE + 1)
        self.step(self.p)

    # -- faults

    def fate(self, pick: int, how: int) -> None:
        """Of the next notification: lost, doubled, late, or all of it."""
        self.net.fates.append(((), (0.0, 0.0), (0.0, 25.0), (10.0,))[pick % 4])
        self.counts["fault: notification " + ("lost", "doubled", "doubled late", "late")[pick % 4]] += 1

    def break_read(self, pick: int, how: int) -> None:
        reader = self.consumers[how % len(self.consumers)].agent(pick)
        if how < 4 and not self.net.under_way():
            self.meet(pick, how)
        under_way = self.net.under_way()
        if how == 7:
            self.net.cut(reader, self.p.agent(pick // 2))
            self.counts["fault: connection cut"] += 1
        elif how < 4 and under_way:
            self.net.fail_part(under_way[pick % len(under_way)])
            self.counts["fault: part of a read failed"] += 1
        elif how == 4:
            self.net.raise_on_post(reader, pick % 3)
            self.counts["fault: post raised"] += 1

    def stop(self, pick: int, how: int) -> None:
        """A process stops: any rank. An engine waits for those that serve or read, in every step."""
        engine = self.engines[how % len(self.engines)]
        rank = pick % len(engine.ranks)
        active = rank in engine.active
        if active:
            self._stopped.add(engine.name)
            self.net.stop(engine.agent(engine.active.index(rank)))
        else:
            engine.lagging.add(rank)
        what = "consumer" if engine is not self.p else "serving rank" if active else "replica"
        self.counts[f"fault: {what} stopped"] += 1

    def cont(self, pick: int, how: int) -> None:
        for engine in self.engines:
            self._continue(engine)

    def _continue(self, engine: Engine) -> None:
        self._stopped.discard(engine.name)
        for agent in engine.agents:
            self.net.cont(agent)
        engine.lagging.clear()
        engine.catch_up()

    def kill(self, pick: int, how: int) -> None:
        """An engine dies and another one starts at its address, under its engine id or a new one."""
        old = self.engines[how % len(self.engines)]
        for agent in old.agents:
            self.net.kill(agent)
        self._stopped.discard(old.name)
        for send in self.sends:
            send.dead |= send.engine is old
        self._open = {key: send for key, send in self._open.items() if send.engine is not old}
        self.loads = {key: load for key, load in self.loads.items() if load.engine is not old}
        kind = old.name[0]
        name = old.name if pick % 2 else f"{kind}{next(self._serial) + 10}"
        new = self.start(name, old.port)
        if old is self.p:
            self.p = new
        else:
            self.consumers[self.consumers.index(old)] = new
        whose = "producer" if kind == "P" else "consumer"
        self.counts[f"fault: {whose} killed and started anew, {'same' if pick % 2 else 'new'} id"] += 1

    def mute_handshakes(self, pick: int, how: int) -> None:
        self.mute = not self.mute
        self.counts["fault: handshakes muted"] += self.mute

    def withhold(self, pick: int, how: int) -> None:
        """A rank's words come some steps late."""
        engine = self.engines[how % len(self.engines)]
        engine.withheld[pick % len(engine.ranks)] = 1 + how % 3
        self.counts["fault: outputs late"] += 1

    def repeat(self, pick: int, how: int) -> None:
        """A rank's next word comes twice, the second time some steps later."""
        engine = self.p if pick >= 4 else self.engines[how % len(self.engines)]
        engine.repeats[pick % len(engine.ranks)] = how % 4
        self.counts["fault: outputs doubled"] += 1
        if pick >= 4:
            self.submit(pick, how)
            for _ in range(4):
                self.step(engine)

    def let_go(self, pick: int, how: int) -> None:
        """Siblings that hold let go."""
        engine = self.engines[how % len(self.engines)]
        for leaf in leaves(engine.connector):
            if isinstance(leaf, HoldingConnector):
                leaf.release()

    # -- what engines tell ---------------------------------------------------------------------------------------

    def loading(self, engine: Engine, request: Any, blocks: Any, n_external: int) -> None:
        start = blocks.hashed[0] * engine.block_tokens
        tokens = tuple(request.tokens()[: start + n_external])
        key = (engine.name, request.id)
        assert key not in self.loads, f"(c) {engine.name}: {request.id} loads twice at once"
        transfer_id = str(request.params["remote_request_id"])
        self.loads[key] = Load(engine, tokens, start, tuple(blocks.ids[0]), transfer_id)
        self.counts["loads"] += 1

    def finished(self, engine: Engine, event: Any) -> None:
        params = event.kv_transfer_params
        if event.error is not None and "load failed" in event.error:
            self.counts["requests that failed for their load"] += 1
        if not params or not params.get("do_remote_prefill"):
            return
        request = engine.scheduler.requests[event.id]
        asked = (request.params or {}).get("kvconn") or {}
        tokens = tuple(request.tokens[: params["remote_num_tokens"]])
        send = Send(event.id, engine, params, tokens, self.clock() + LEASE, asked.get("readers", 1))
        assert (engine.name, event.id) not in self._open, f"(c) {engine.name}: {event.id} is held twice at once"
        self._open[engine.name, event.id] = send
        self.sends.append(send)
        self.counts["sends"] += 1

    def announced(self, engine: Engine) -> None:
        for send in self._open.values():
            send.announced |= send.engine is engine

    def polls(self, engine: Engine, rank: int) -> None:
        """A rank is about to poll: what waits for it counts before its leases are judged (C11)."""
        mine = {send.transfer_id: send for send in self._open.values() if send.engine is engine}
        for sender, message in engine.transport(rank)._inbox:
            parsed = parse_notification(message)
            if isinstance(parsed, Done) and parsed.transfer_id in mine:
                mine[parsed.transfer_id].done.setdefault(rank, {}).setdefault(sender, parsed.readers)
            elif isinstance(parsed, Heartbeat):
                for id in parsed.transfer_ids:
                    if id in mine and mine[id].announced:
                        until = mine[id].deadlines.get(rank, mine[id].deadline)
                        mine[id].deadlines[rank] = max(until, self.clock() + LEASE * 2 / 3)
        for send in mine.values():
            late = self.clock() >= send.deadlines.get(rank, send.deadline)
            if send.announced and (late or send.read_at(rank)):
                send.ended.add(rank)

    def polled(self, engine: Engine, rank: int, part: Any) -> None:
        """What a rank's poll says: is what it calls stale let go, by any rank that it read? (e)"""
        stats = dict(part.kv_connector_stats.values) if part.kv_connector_stats is not None else {}
        for name, amount in stats.items():
            if "bytes" not in name and "seconds" not in name and "descriptors" not in name:
                self.counts[f"counter {name}"] += int(amount)
        stale = sum(int(amount) for name, amount in stats.items() if name.endswith("stale_reads"))
        if not stale:
            return
        meta = part.kv_connector_worker_meta
        facts: Collection[Fact] = meta.facts if isinstance(meta, WorkerFacts) else ()
        failed = {fact.id for fact in facts if fact.direction == "recv" and fact.state == "failed"}
        ended = {send.transfer_id for send in self.sends if send.ended or send.dead}
        loads = [load for id in failed if (load := self.loads.get((engine.name, id))) is not None]
        gone = sum(1 for load in loads if load.transfer_id in ended)
        assert gone >= stale, f"(e) {engine.name}: one of {sorted(failed)} is called stale while it is held"

    def sent(self, engine: Engine, id: str) -> None:
        if (engine.name, id) in self.loads:  # both were owed, and this is the later one (C13)
            self.received(engine, id, failed=True)
            self.counts["receive and send owed together"] += 1
        send = self._open.pop((engine.name, id), None)
        if send is None:
            return  # a sibling's
        assert send.may_end, f"(c) {engine.name}: {id} was let go while its lease stood and {send.readers} may read"
        self.counts["sends, " + ("read" if send.read else "expired")] += 1
        if send.read and send.readers >= send.uses:
            reading = [handle for block in send.blocks for handle in self.reading(engine, block)]
            assert not reading, f"(c) {engine.name}: {id} was let go while reads {reading} read it"

    def received(self, engine: Engine, id: str, failed: bool) -> None:
        load = self.loads.pop((engine.name, id), None)
        assert load is not None, f"(c) {engine.name}: {id} was given back, and nothing loads it"
        writing = [handle for block in load.blocks for handle in self.writing(engine, block)]
        assert not writing, f"(b) {engine.name}: {id} was given back while reads {writing} may write it"
        self.counts["loads, " + ("failed" if failed else "accepted")] += 1
        if not failed:
            for rank in engine.ranks:
                engine.check(rank, load.blocks, load.tokens, load.start, f"the load of {id}")

    # -- what must be so -----------------------------------------------------------------------------------------

    def rows(self, engine: Engine, block: int) -> list[tuple[str, Any]]:
        """A block on every active rank, and that rank's agent."""
        return [
            (engine.agent(index), row[block]) for index, rank in enumerate(engine.active) for row in engine.caches[rank]
        ]

    def reading(self, engine: Engine, block: int) -> list[int]:
        rows = self.rows(engine, block)
        return [h for agent, row in rows for h in self.net.reading(agent, row.ctypes.data, row.nbytes)]

    def writing(self, engine: Engine, block: int) -> list[int]:
        return [h for _, row in self.rows(engine, block) for h in self.net.may_write(row.ctypes.data, row.nbytes)]

    def check(self) -> None:
        """After everything that happens."""
        for engine in self.consumers:
            self._check_writes(engine)
        self._check_owners()

    def _check_writes(self, engine: Engine) -> None:
        """(b), also of the words that fences are read to."""
        for index, rank in enumerate(engine.active):
            writes = self.net.writes(engine.agent(index))
            if writes:
                self._check_rank_writes(engine, rank, writes)

    def _check_rank_writes(self, engine: Engine, rank: int, writes: list[tuple[int, int]]) -> None:
        loading = {block for load in self.loads.values() if load.engine is engine for block in load.blocks}
        cache, half = engine.caches[rank], engine.halves[rank]
        for address, _ in writes:
            offset = address - cache.ctypes.data
            if 0 <= offset < cache.nbytes:
                block = offset % cache[0].nbytes // cache[0, 0].nbytes
                assert block in loading, f"(b) {engine.name}: a read may still write block {block}, which no load has"
                assert engine.pool.references(block) == 1, f"(b) {engine.name}: block {block} is loaded and shared"
        for word in half._reader._checks._free:
            address = half._reader._scratch.slot_address(word)
            assert not self.net.may_write(address, 8), f"(b) {engine.name}: scratch word {word} is free and written"

    def _check_owners(self) -> None:
        """Blocks of an open send or load are nobody's to give away: referenced, and in no other request's hands."""
        for send in self._open.values():
            for block in send.blocks:
                assert send.engine.pool.references(block) > 0, f"(c) {send.engine.name}: {send.id} lost block {block}"
        for (_, id), load in self.loads.items():
            for block in load.blocks:
                assert load.engine.pool.references(block) > 0, f"(b) {load.engine.name}: {id} lost block {block}"

    # -- the end -------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Heal everything but a silent replica, see it named, heal it too, and see everything end."""
        silent = set(self.p.lagging)
        if silent and self.p.name not in self._stopped:
            self.heal(silent)
            self.check_named(silent)
            self.counts["silent ranks named"] += 1
        self.heal(set())
        self.check_empty()

    def heal(self, silent: set[int]) -> None:
        """No more faults but these ranks' silence, and time enough."""
        self.mute = False
        for engine in self.engines:
            self._stopped.discard(engine.name)
            engine.lagging = set(silent) if engine is self.p else set()
            engine.withheld.clear()
            engine.repeats.clear()
            engine.catch_up()
        self.net.heal()
        for _ in range(400):
            self._round(2.0)
            if not any(engine.busy() for engine in self.engines):
                break
            if silent and self.p.scheduler.requests.keys() == self.p.scheduler.delayed.keys() and not self._open_nixl():
                break
        for _ in range(16):  # the latest notification (25 s), then one lease in which it is remembered; slots that cool
            self._round(LEASE / 6 + 1)

    def _open_nixl(self) -> bool:
        """Whether a rank that serves still holds something."""
        return any(len(self.p.halves[rank]._leases) > 0 for rank in self.p.active) or bool(self.loads)

    def _round(self, seconds: float) -> None:
        for engine in self.engines:
            self.let_go(0, self.engines.index(engine))
            self.step(engine)
            self.net.run()
        self.check()
        self.clock.advance(seconds)

    def check_named(self, silent: set[int]) -> None:
        """(d): a rank's silence has its name, and nobody else's."""
        p = self.p
        owed = {one.id: set(one.ranks) for one in p.aggregator.pending() if one.direction == "send"}
        lines = p.connector.explain(self.clock())
        for id in p.scheduler.delayed:
            ranks = owed.get(id, set())
            assert ranks and ranks <= silent, f"(d) {id} waits for {ranks}, and {silent} are silent"
            told = [line for line in lines if f"send of {id} " in line]
            word = _ranks(tuple(sorted(ranks)))
            assert any(word in line for line in told), f"(d) {id}: {word} not named in {lines}"

    def check_empty(self) -> None:
        """(d)"""
        for engine in self.engines:
            waits = list(engine.scheduler.requests.values())
            owed = [f"{one.direction} of {one.id} by {one.ranks}" for one in engine.aggregator.pending()]
            lines = engine.connector.explain(self.clock())
            assert not waits, f"(d) {engine.name} never ended {waits}; owed {owed}; {lines}"
            assert not owed and not lines, f"(d) {engine.name}: owed {owed}; {lines}"
            left = all_tables(engine)
            assert not left, f"(d) tables are not empty: {left}"
            assert engine.pool.num_used == 0, f"(d) {engine.pool!r}"
            self._check_slots(engine)
        assert not self.loads and not self._open, f"(d) {self.loads} {self._open}"
        assert not self.net.under_way(), f"(d) {self.net!r}"

    def _check_slots(self, engine: Engine) -> None:
        for rank in engine.active:
            self._check_rank_slots(engine, engine.halves[rank])

    def _check_rank_slots(self, engine: Engine, half: Any) -> None:
        assert all(peer.posted == 0 and peer.idle for peer in half._contacts._peers._peers.values()), (
            f"(d) {half._contacts._peers!r}"
        )
        if half._reader._scratch is not None:
            assert sorted(half._reader._checks._free) == list(range(SCRATCH)), (
                f"(d) {engine.name}: a scratch word is lost"
            )
        if half._fence is not None:
            assert repr(half._fence).endswith("standing=0)"), f"(d) {engine.name}: {half._fence!r}"
            for leaf in leaves(engine.connector):
                slots = getattr(getattr(leaf, "scheduler", None), "_fences", None)
                if slots is not None:
                    free = sorted([*slots._free, *slots._cooling, *slots._closed])
                    assert free == list(range(half._fence.size)), f"(d) {engine.name}: a fence slot is lost"
