"""Peers of several ranks whose answers are damaged, to the plans that come of them; and connections that come and go.

A rank's answer is damaged as bytes or as fields; whatever comes out is a peer's or a client's error, or plans that are
of exactly the ranks that were asked.
"""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import msgspec

from kvconn.config import ParallelConfig
from kvconn.errors import PeerError, RequestError
from kvconn.nixl.connections import Connection, Connections
from kvconn.nixl.handshake import FIRST, Greeting, Ours
from kvconn.params import PeerKey
from tests.fuzz.mutate import mutated, mutated_bytes
from tests.nixl.test_ranks import Fleet, Shape

__all__ = ["connections", "ranks"]

SHAPES = (
    Shape(ParallelConfig(tp=2), ParallelConfig(), 4),
    Shape(ParallelConfig(tp=2, dcp=2), ParallelConfig()),
    Shape(ParallelConfig(pp=2), ParallelConfig(), 4, p_tokens_first=True),
)


@cache
def _pair(shape: Shape) -> tuple[Ours, PeerKey, dict[tuple[int, int], bytes]]:
    fleet = Fleet()
    p, d = fleet.engines(shape)
    ((place, answers),) = fleet.directory.items()
    ours: Ours = d.workers[0].worker._contacts._ours  # type: ignore[attr-defined]
    key = PeerKey("P", *place, shape.p.tp, shape.p.pp, shape.p.dcp)
    for side in (p, d):
        side.close()
    return ours, key, dict(answers)


def ranks(draw: random.Random) -> bool:
    """One of the ranks of a peer says something else."""
    ours, key, answers = _pair(draw.choice(SHAPES))
    liar = draw.choice(sorted(answers))
    greeting, ask = Greeting(ours, key), [FIRST]
    try:
        while ask:
            place = ask.pop()
            frame = answers[place.pp, place.tp]
            ask += greeting.answered(place, _damaged(draw, frame) if (place.pp, place.tp) == liar else frame)
        plans = [offer.plan for offer in greeting.offers]
    except (PeerError, RequestError):
        return False
    assert greeting.done and {(plan.source.pp, plan.source.tp) for plan in plans} == answers.keys()
    return True


def _damaged(draw: random.Random, frame: bytes) -> bytes:
    if draw.random() < 0.1:
        return mutated_bytes(draw, frame)
    payload: Any = msgspec.msgpack.decode(frame)
    agent = mutated(draw, msgspec.msgpack.decode(payload["agent_metadata_bytes"]), raw=True)
    payload["agent_metadata_bytes"] = msgspec.msgpack.encode(agent)
    return msgspec.msgpack.encode(payload)


def connections(draw: random.Random) -> bool:
    """Descriptors come, go, are other files, ask, and send, in any order, told or not. True: none was ended."""
    there: dict[int, Connection] = {}
    ended: list[int] = []

    def look(fd: int, port: int, end: int | None = None) -> Connection | None:
        found = there.get(fd)
        if found is not None and found.inode == end:
            ended.append(fd)
        return found

    open, now, most = Connections(1, 6, 5.0, look), 0.0, 6
    for inode in range(draw.choice((3, 30))):
        fd, now = draw.randrange(12), now + draw.choice((0.0, 0.1, 3.0))
        kind = draw.randrange(5)
        if kind == 0:
            there[fd] = Connection(inode, "a", draw.randrange(3), draw.choice((0, 100, 1 << 20)))
            open.accepted(fd, now)
        elif kind == 1:
            there.pop(fd, None)
            if draw.random() < 0.5:
                open.ended(fd)
        elif kind == 2:
            open.asked(fd, now)
        else:
            open.sweep(now)
        assert len(open) <= most and max(open._of_peer.values(), default=0) <= most // 2, open
    there.clear()
    open.sweep(now)
    assert len(open) == 0 and not open._of_peer, open
    return not ended
