"""Whole halves of two engines under hostile peers and clients: P serves, D reads, over a loopback network.

Each case changes one or more of: the parameters that D is handed, what P's side channel answers, what P is notified of.

Rules
1. Nothing is raised by either side; every request ends; tables are empty then.
2. D writes only into the blocks of the request, and says "received" only of the bytes that P had for the reference.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import msgspec

from kvconn.nixl.sideclient import HandshakeResult
from kvconn.params import PeerKey
from kvconn.testing import ManualClock
from kvconn.transport.loopback import LoopbackNet
from tests.fuzz.mutate import mutated, mutated_bytes
from tests.support import NIXL_CONSUMER, NIXL_PRODUCER, Side

__all__ = ["Engines"]

BLOCKS, MINE = [3, 4], [7, 9]


class _Client:
    """Answers every handshake with the next of ``answers``."""

    def __init__(self, answers: deque[bytes]) -> None:
        self._answers = answers
        self._numbers = itertools.count(1)
        self._results: deque[HandshakeResult] = deque()

    def start(self, key: PeerKey, pp: int = 0, tp: int = 0) -> int:
        number = next(self._numbers)
        self._results.append(HandshakeResult(key, self._answers[0], "", 0.0, number))
        return number

    def results(self) -> list[HandshakeResult]:
        out = list(self._results)
        self._results.clear()
        return out

    def close(self) -> None:
        pass


class _Server:
    """Publishes to the fuzzer."""

    refused = 0

    def __init__(self, payloads: dict[tuple[int, int], bytes], *_: Any) -> None:
        self.payload = payloads[0, 0]

    def replace(self, payloads: dict[tuple[int, int], bytes]) -> None:
        self.payload = payloads[0, 0]

    def close(self) -> None:
        pass


class Engines:
    """``one`` runs a case. Sides are made anew now and then, as engines are."""

    EVERY = 500

    def __init__(self) -> None:
        self._answers: deque[bytes] = deque([b""])
        self._serial = itertools.count(1)
        self._left = 0
        self._sides: tuple[Side, Side] | None = None

    def _make(self) -> None:
        self.close()
        self._clock = ManualClock()
        self._net = LoopbackNet(1, clock=self._clock)
        with ExitStack() as stack:
            server = stack.enter_context(
                patch("kvconn.nixl.scheduler.HandshakeServer", lambda host, port, payloads, *_: _Server(payloads))
            )
            assert server
            stack.enter_context(patch("kvconn.nixl.contacts.HandshakeClient", lambda *_, **__: _Client(self._answers)))
            made = [
                Side(name, transfer, port=5600, clock=self._clock, make_transport=self._net.transport)
                for name, transfer in (("P", NIXL_PRODUCER), ("D", NIXL_CONSUMER))
            ]
        self._sides = made[0], made[1]
        self._payload: bytes = made[0].scheduler.scheduler._server.payload  # type: ignore[attr-defined]
        self._stranger = self._net.transport("stranger")
        blob = made[0].workers[0].worker._agent.transport.metadata()  # type: ignore[attr-defined]
        self._p_agent = self._stranger.add_peer(blob)
        self._left = self.EVERY

    def one(self, draw: random.Random) -> bool:
        if not self._left or self._sides is None:
            self._make()
        assert self._sides is not None
        self._left -= 1
        (p, d), serial = self._sides, next(self._serial)
        params = p.prefill(f"p{serial}", BLOCKS, serial)
        assert params is not None
        honest = draw.random()
        self._answers[0] = self._answer(draw) if honest < 0.6 else self._payload
        given = mutated(draw, params) if honest > 0.5 else params
        self._notify(draw, params["remote_request_id"])
        d.write(list(range(d.kv_cache.num_blocks)), 0)
        before = d.caches[0]["layers.0.kv"].copy()
        taken = self._load(d, f"d{serial}", given if isinstance(given, dict) else {"do_remote_prefill": given})
        self._end(p, d, f"p{serial}", f"d{serial}")
        after = d.caches[0]["layers.0.kv"]
        others = [b for b in range(d.kv_cache.num_blocks) if b not in MINE]
        assert (before[others] == after[others]).all(), "blocks of others were written"
        good = taken and f"d{serial}" not in d.failed
        assert not good or honest < 0.6 or d.holds(MINE, serial), "bytes that are not the reference's"
        del d.failed[:], d.received[:], p.sent[:]
        d.reasons.clear()
        return good

    def _answer(self, draw: random.Random) -> bytes:
        """What P says of itself, changed somewhere."""
        if draw.random() < 0.3:
            return mutated_bytes(draw, self._payload)
        payload = msgspec.msgpack.decode(self._payload)
        if draw.random() < 0.3:
            payload = mutated(draw, payload, raw=True)
        else:
            agent = mutated(draw, msgspec.msgpack.decode(payload["agent_metadata_bytes"]), raw=True)
            payload["agent_metadata_bytes"] = msgspec.msgpack.encode(agent)
        return msgspec.msgpack.encode(payload)

    def _notify(self, draw: random.Random, transfer_id: str) -> None:
        """A stranger who may know the transfer id."""
        for _ in range(draw.randrange(3)):
            known = transfer_id if draw.random() < 0.1 else "t" * 22
            good = draw.choice((f"{known}:1", f"HB:{known},a", f"{known}:4096"))
            self._stranger.notify(self._p_agent, mutated_bytes(draw, good.encode()))

    def _load(self, d: Side, id: str, params: dict[str, Any]) -> bool:
        """Whether it is a load at all."""
        d.load(id, params, MINE)
        return d.scheduler.scheduler.ledger.get(id, "recv") is not None  # type: ignore[attr-defined]

    def _end(self, p: Side, d: Side, sent: str, received: str) -> None:
        """Until P let go and D has its blocks back: by what came, else by a lease's and a read's deadline."""
        owed = d.scheduler.scheduler.ledger  # type: ignore[attr-defined]
        for turn in range(40):
            p.step()
            d.step()
            self._net.run()
            if sent in p.sent and owed.get(received, "recv") is None:
                break
            if turn > 5:
                self._clock.advance(20.0)
        assert sent in p.sent, f"P holds {sent}"
        assert owed.get(received, "recv") is None, f"D holds {received}"
        for side in (p, d):
            assert side.aggregator.pending() == [], side.aggregator.pending()
        d.workers[0].worker._contacts._peers.clear()  # type: ignore[attr-defined]

    def close(self) -> None:
        for side in self._sides or ():
            side.close()
        self._sides = None
