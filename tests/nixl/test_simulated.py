"""Both halves of the NIXL connector under random schedules, on a simulated network and a manual clock.

Rules
1. The halves, the aggregator and the ledger are the real ones; the network, the clock and the handshake channel are
   simulated. Nothing moves but by a rule of :class:`Machine`.
2. What must hold: (a) D never hands over bytes other than the prompt's; (b) D never gives back memory that a read may
   still write, scratch words included; (c) P lets go of each send once, and only after a reader was done or its lease,
   heartbeats counted, was over; (d) when the faults are healed everything ends and all tables are empty.
3. The blocks of a send are overwritten the moment that it is emitted, those of a load are cleared.
4. Each mutant breaks one line of the contract and must be caught.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from kvconn.base import FinishReason, RequestView
from kvconn.nixl import worker as worker_module
from kvconn.nixl.checks import Checks, Verdict
from kvconn.nixl.peers import PeerKey
from kvconn.nixl.sidechannel import HandshakeResult
from kvconn.nixl.transfers import Reads, Settled
from kvconn.nixl.wire import Heartbeat, parse_notification
from kvconn.nixl.worker import NixlWorker
from kvconn.testing import LoopbackNet, ManualClock
from tests.support import BLOCK_SIZE, LAYERS, NIXL_CONSUMER, NIXL_PRODUCER, Side

pytestmark = pytest.mark.timeout(120)

LEASE, READ, QUARANTINE = 30.0, 20.0, 40.0
SCRATCH = 3  # so few that they come back often, and run out
BLOCKS = 8
EXTRA = {"kv_connector_extra_config": {"kvconn": {"read": READ, "quarantine_age": QUARANTINE}}}

Directory = dict[tuple[str, int], dict[tuple[int, int], bytes]]


class FakeServer:
    """Publishes payloads in a dictionary."""

    def __init__(self, directory: Directory, host: str, port: int, payloads: Mapping[tuple[int, int], bytes]) -> None:
        self._directory, self._place = directory, (host, port)
        self.replace(payloads)

    def replace(self, payloads: Mapping[tuple[int, int], bytes]) -> None:
        self._directory[self._place] = dict(payloads)

    def close(self) -> None:
        self._directory.pop(self._place, None)


class FakeClient:
    """Answers at the next look, out of the dictionary."""

    def __init__(self, directory: Directory, timeout: float) -> None:
        self._directory = directory
        self._results: list[HandshakeResult] = []

    def start(self, key: PeerKey, pp: int = 0, tp: int = 0) -> None:
        found = self._directory.get(key[1:], {}).get((pp, tp))
        why = "" if found is not None else "no answer"
        self._results.append(HandshakeResult(key, found, why))

    def results(self) -> list[HandshakeResult]:
        results, self._results = self._results, []
        return results

    def close(self) -> None:
        pass


@dataclass
class Send:
    params: dict[str, Any]
    blocks: list[int]
    seed: int
    deadline: float
    alive: bool = True
    read: bool = False
    emitted: bool = False

    @property
    def transfer_id(self) -> str:
        return str(self.params["remote_request_id"])


@dataclass
class Load:
    view: RequestView
    blocks: list[int]
    hits: int
    send: Send
    aborted: bool = False


class World:
    """One producer after another, one consumer, and what must be so of them."""

    def __init__(self, seed: int) -> None:
        self.clock = ManualClock()
        self.net = LoopbackNet(seed, clock=self.clock, cuts=2)
        self.directory: Directory = {}
        self.ids = itertools.count(1)
        self.sends: dict[str, Send] = {}
        self.loads: dict[str, Load] = {}
        self.sides: list[Side] = []
        self.d = self.side("D", {**NIXL_CONSUMER, **EXTRA})
        self.d_free = list(range(BLOCKS))
        self.start_producer()

    def side(self, name: str, transfer: dict[str, Any]) -> Side:
        with ExitStack() as stack:
            for target, fake in (
                ("kvconn.nixl.worker.HandshakeClient", lambda *a: FakeClient(self.directory, *a)),
                ("kvconn.nixl.scheduler.HandshakeServer", lambda *a: FakeServer(self.directory, *a)),
                ("kvconn.nixl.worker.SCRATCH", SCRATCH),
            ):
                stack.enter_context(patch(target, fake))
            side = Side(
                name,
                transfer,
                num_blocks=BLOCKS,
                port=next(self.ids),
                clock=self.clock,
                make_transport=self.net.transport,
            )
        self.sides.append(side)
        return side

    def start_producer(self) -> None:
        self.p = self.side(f"P{next(self.ids)}", NIXL_PRODUCER)
        self.p_free = list(range(BLOCKS))

    # -- what happens

    def prefill(self, n_blocks: int) -> None:
        if len(self.p_free) < n_blocks:
            return
        id, blocks = f"send-{next(self.ids)}", [self.p_free.pop(0) for _ in range(n_blocks)]
        seed = next(self.ids)
        self.hear()
        params = self.p.prefill(id, blocks, seed)
        assert params is not None
        self.sends[id] = Send(params, blocks, seed, self.clock() + LEASE)
        self.see_sent()

    def step_p(self) -> None:
        self.hear()
        self.p.step()
        self.see_sent()

    def step_d(self) -> None:
        self.d.step()
        self.see_received()

    def load(self, pick: int, hits: int) -> None:
        if not self.sends or len(self.d_free) < 2:
            return
        send = list(self.sends.values())[-1 - pick % min(3, len(self.sends))]
        blocks = [self.d_free.pop(0) for _ in send.blocks]
        hits = min(hits, len(blocks) - 1)
        id = f"load-{next(self.ids)}"
        self.loads[id] = Load(self.d.load(id, send.params, blocks, hits), blocks, hits, send)

    def expire_heard(self) -> None:
        """Heartbeats wait unread at P when the lease would end."""
        self.step_d()
        self.net.run()
        self.clock.advance(LEASE + 1)
        self.step_p()

    def expire(self) -> None:
        self.step_p()
        self.clock.advance(LEASE + 1)
        self.step_p()

    def arrive_all(self) -> None:
        self.net.run()
        self.step_d()

    def load_and_step(self, pick: int, hits: int, rounds: int, arrive: bool) -> None:
        self.load(pick, hits)
        for _ in range(rounds):
            self.step_d()
            self.net.run(None if arrive else 0)

    def abandon(self, pick: int) -> None:
        """A request with a reference goes before it was given blocks."""
        if self.sends:
            send = list(self.sends.values())[pick % len(self.sends)]
            n_tokens = len(send.blocks) * BLOCK_SIZE
            view = RequestView(f"gone-{next(self.ids)}", n_tokens, n_tokens, send.params, tuple)
            self.d.scheduler.on_new_request(view)
            self.d.scheduler.request_finished(view, ((),), FinishReason.ABORT)
            send.read = True

    def abort(self, pick: int) -> None:
        if self.loads:
            load = list(self.loads.values())[pick % len(self.loads)]
            if not load.aborted:
                load.aborted = True
                self.d.scheduler.request_finished(load.view, (tuple(load.blocks),), FinishReason.ABORT)

    def kill_producer(self) -> None:
        """And start another one. What the dead one held is nobody's business any more."""
        self.net.kill(agent_of(self.p))
        self.p.scheduler.shutdown()
        for send in self.sends.values():
            send.alive = False
        self.start_producer()

    def fault(self, kind: str, pick: int) -> None:
        ours, theirs, under_way = agent_of(self.d), agent_of(self.p), self.net.under_way()
        if kind == "stop":
            self.net.stop(theirs)
        elif kind == "cont":
            self.net.cont(theirs)
        elif kind == "fail part" and under_way:
            self.net.fail_part(under_way[pick % len(under_way)])
        elif kind == "raise on post":
            self.net.raise_on_post(ours, pick % 3)
        elif kind == "cut":
            self.net.cut(ours, theirs)
        elif kind == "kill":
            self.kill_producer()
        elif kind == "fate":
            self.net.fates.append(FATES[pick % len(FATES)])

    # -- what must be so

    def hear(self) -> None:
        """Heartbeats that P is about to read: they count before its leases are judged (C11)."""
        for _, message in transport_of(self.p)._inbox:
            parsed = parse_notification(message)
            if isinstance(parsed, Heartbeat):
                for send in self.sends.values():
                    if send.transfer_id in parsed.transfer_ids:
                        send.deadline = max(send.deadline, self.clock() + LEASE * 2 / 3)

    def see_sent(self) -> None:
        ids, self.p.sent = self.p.sent, []
        for id in ids:
            send = self.sends[id]
            assert not send.emitted, f"(c) {id} was emitted twice"
            assert send.read or self.clock() >= send.deadline, f"(c) {id} was let go while its lease stood"
            send.emitted = True
            self.p.write(send.blocks, next(self.ids))  # somebody else's prompt
            self.p_free += send.blocks

    def see_received(self) -> None:
        ids, failed = self.d.received, set(self.d.failed)
        self.d.received, self.d.failed = [], []
        for id in ids:
            load = self.loads.pop(id)  # KeyError: given back twice
            writing = [handle for block in load.blocks for handle in self.may_write(block)]
            assert not writing, f"(b) {id} was given back while reads {writing} may write it"
            if id not in failed:
                ours = load.blocks[load.hits :]
                assert self.d.holds(ours, load.send.seed, start=load.hits), f"(a) {id} has another prompt's bytes"
            load.send.read = True
            for name in LAYERS:
                self.d.caches[0][name][load.blocks] = 0
            self.d_free += load.blocks
            if not load.aborted:
                self.d.scheduler.request_finished(load.view, (tuple(load.blocks),), FinishReason.LENGTH)

    def may_write(self, block: int) -> list[int]:
        rows = [self.d.caches[0][name][block] for name in LAYERS]
        return [handle for row in rows for handle in self.net.may_write(row.ctypes.data, row.nbytes)]

    def check_scratch(self) -> None:
        half = half_of(self.d)
        for word in half._checks._free:
            assert not self.net.may_write(half._scratch.slot_address(word), 8), f"(b) scratch word {word} is free"

    def heal(self) -> None:
        """No more faults, and time enough."""
        for name in list(self.net.agents):
            self.net.cont(name)
            self.net._to_raise.pop(name, None)
        self.net.fates.clear()
        for _ in range(20):
            self.step_d()
            self.net.run()
            self.step_p()
            self.net.run()
            self.clock.advance(5.0)

    def check_empty(self) -> None:
        assert not self.loads, f"(d) never given back: {list(self.loads)}"
        owed = [id for id, send in self.sends.items() if send.alive and not send.emitted]
        assert not owed, f"(d) never emitted: {owed}"
        p, d = half_of(self.p), half_of(self.d)
        assert [len(p._leases), len(p._leases._early), p._slots, p._ended] == [0, 0, {}, []], f"(d) {p!r}"
        assert repr(p._fence).endswith("standing=0)"), "(d) a word stands"
        assert [len(d._reads), d._reads._by_handle, d._reads._errors, d._refs] == [0, {}, set(), {}], f"(d) {d!r}"
        assert [d._started, d._looking, d._pending_loads, len(d._checks)] == [{}, set(), [], 0], f"(d) {d!r}"
        assert sorted(d._checks._free) == list(range(SCRATCH)), "(d) a scratch word is lost"
        assert all(peer.posted == 0 and peer.idle for peer in d._peers._peers.values()), f"(d) {d._peers!r}"
        for side in (self.p, self.d):
            assert transport_of(side)._reads == {} and side.aggregator.pending() == [], f"(d) {side.name}"
            text = repr(side.scheduler)
            assert "incoming=0 loading=0 fences=0" in text and not side.scheduler.explain(0.0), f"(d) {text}"
        assert self.net.under_way() == [], f"(d) {self.net!r}"

    def close(self) -> None:
        for side in self.sides:
            side.close()


def half_of(side: Side) -> Any:
    connector: Any = side.workers[0]
    return connector.worker


def transport_of(side: Side) -> Any:
    return half_of(side)._transport


def agent_of(side: Side) -> str:
    return str(transport_of(side).name)


SMALL = st.integers(0, 7)
FAULTS = ("stop", "cont", "fail part", "raise on post", "cut", "kill", "fate", "fate")
FATES = ((), (0.0, 0.0), (0.0, 25.0), (10.0,))


class Machine(RuleBasedStateMachine):
    """What may happen in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(seed=0)
        self.bad = False

    def do(self, action: Callable[[], object]) -> None:
        try:
            action()
        except BaseException:
            self.bad = True
            raise

    @rule(blocks=st.integers(1, 2))
    def prefill(self, blocks: int) -> None:
        self.do(lambda: self.world.prefill(blocks))

    @rule(pick=SMALL, hits=st.integers(0, 1))
    def load(self, pick: int, hits: int) -> None:
        self.do(lambda: self.world.load(pick, hits))

    @rule(pick=SMALL)
    def load_and_meet(self, pick: int) -> None:
        """Up to the posted read."""
        self.do(lambda: self.world.load_and_step(pick, hits=0, rounds=2, arrive=False))

    @rule(pick=SMALL)
    def load_whole(self, pick: int) -> None:
        self.do(lambda: self.world.load_and_step(pick, hits=1, rounds=3, arrive=True))

    @rule(pick=SMALL, allocated=st.booleans())
    def leave(self, pick: int, allocated: bool) -> None:
        self.do(lambda: self.world.abort(pick) if allocated else self.world.abandon(pick))

    @rule()
    def step_p(self) -> None:
        self.do(self.world.step_p)

    @rule()
    def step_d(self) -> None:
        self.do(self.world.step_d)

    @rule(choices=st.lists(SMALL, min_size=1, max_size=6))
    def arrive(self, choices: list[int]) -> None:
        self.do(lambda: [self.world.net.step(choice) for choice in choices])

    @rule()
    def arrive_all(self) -> None:
        self.do(self.world.arrive_all)

    @rule(seconds=st.sampled_from([0.5, 6.0, 21.0, 31.0]))
    def wait(self, seconds: float) -> None:
        self.do(lambda: self.world.clock.advance(seconds))

    @rule()
    def expire(self) -> None:
        self.do(self.world.expire)

    @rule()
    def expire_heard(self) -> None:
        self.do(self.world.expire_heard)

    @rule(kind=st.sampled_from(FAULTS), pick=SMALL)
    def fault(self, kind: str, pick: int) -> None:
        self.do(lambda: self.world.fault(kind, pick))

    @invariant()
    def scratch_words_are_quiet(self) -> None:
        self.do(self.world.check_scratch)

    def finish(self) -> None:
        self.world.check_empty()

    def teardown(self) -> None:
        try:
            if not self.bad:
                self.world.heal()
                self.finish()
        finally:
            self.world.close()


class Hunt(Machine):
    """For mutants: what is left in tables does not count, the memory itself must show it."""

    def finish(self) -> None:
        pass


RUN = settings(
    derandomize=True,
    deadline=None,
    database=None,
    max_examples=300,
    stateful_step_count=40,
    suppress_health_check=list(HealthCheck),
    report_multiple_bugs=False,
    print_blob=False,
)
#: enough to find what the mutants do, and no time spent on making it short
HUNT = settings(RUN, phases=[Phase.generate], max_examples=1500)


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    log = logging.getLogger("kvconn.nixl")
    monkeypatch.setattr(worker_module, "SPIN", 0.0)  # nothing moves meanwhile
    before = log.level
    log.setLevel(logging.CRITICAL + 1)
    yield
    log.setLevel(before)


def test_sound_under_every_schedule() -> None:
    run_state_machine_as_test(Machine, settings=RUN)


# --- mutants


def fence_after_report() -> AbstractContextManager[Any]:
    """The word comes down one poll after the report."""
    original = NixlWorker._ended_sends
    late: dict[int, list[int]] = {}

    def mutant(self: NixlWorker, now: float) -> set[str]:
        if self._fence is None:
            return original(self, now)
        slots = late.setdefault(id(self), [])
        for slot in slots:
            self._fence.zero(slot)
        slots.clear()
        with patch.object(self._fence, "zero", slots.append):
            return original(self, now)

    return patch.object(NixlWorker, "_ended_sends", mutant)


def no_fence_check() -> AbstractContextManager[Any]:
    return patch.object(Checks, "judge", lambda self, id, word: Verdict.HELD)


def free_on_failure() -> AbstractContextManager[Any]:
    """A failed life gives its blocks back at once."""

    def mutant(self: Reads) -> list[Settled]:
        over = [r for r in self._open.values() if r.failed is not None or not (r.handles or r.posting)]
        for read in over:
            del self._open[read.id]
        return [Settled(read.id, read.n, read.failed) for read in over]

    return patch.object(Reads, "settle", mutant)


def err_is_quiet() -> AbstractContextManager[Any]:
    """ERR taken for the end of a read."""
    original = NixlWorker._handle_error

    def mutant(self: NixlWorker, handle: int, now: float) -> None:
        original(self, handle, now)
        self._forget(handle)
        self._reads.done(handle)

    return patch.object(NixlWorker, "_handle_error", mutant)


def lease_before_drain() -> AbstractContextManager[Any]:
    """Leases judged before the notifications are read (C11)."""
    original = NixlWorker.poll

    def mutant(self: NixlWorker, now: float) -> Any:
        self._ended += self._leases.expire(now)
        return original(self, now)

    return patch.object(NixlWorker, "poll", mutant)


MUTANTS = {
    "fence after the report": (fence_after_report, r"\(a\)"),
    "no fence check": (no_fence_check, r"\(a\)"),
    "free on failure instead of quiet": (free_on_failure, r"\(b\)"),
    "ERR is quiet": (err_is_quiet, r"\(b\)"),
    "lease judged before draining": (lease_before_drain, r"\(c\)"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_caught(name: str) -> None:
    mutant, what = MUTANTS[name]
    with mutant(), pytest.raises(AssertionError, match=what):
        run_state_machine_as_test(Hunt, settings=HUNT)
