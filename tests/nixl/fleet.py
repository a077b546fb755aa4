"""Many producers and many consumers on one simulated network, whole halves each, and requests between all pairs.

Every table of every half is watched while it goes: none may hold more than what is under way, and peers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tests.nixl.pairs import Net, halves
from tests.sim.tables import tables
from tests.support import NIXL_CONSUMER, Side

BLOCKS = [5, 6]


class Fleet:
    """``size`` producers, as many consumers."""

    def __init__(self, size: int, settings: dict[str, Any] | None = None) -> None:
        self.size = size
        self.net = Net()
        reads = {**NIXL_CONSUMER, "kv_connector_extra_config": {"kvconn": settings or {}}}
        self.producers = [self.net.producer(f"P{i}", port=2 * i + 1, num_blocks=8) for i in range(size)]
        self.consumers = [self.net.side(f"D{i}", reads, port=2 * i + 2, num_blocks=8) for i in range(size)]
        self.requests = 0
        #: the most that a table of a half has held, by ``Class.attribute``
        self.most: dict[str, int] = {}

    def round(self, turn: int) -> None:
        """One request for each consumer, of producer ``turn`` places on; all are under way together."""
        ids: list[str] = []
        for index, d in enumerate(self.consumers):
            p = self.producers[(index + turn) % self.size]
            id = f"{index}.{turn}"
            self.net.load(d, id, p.prefill(id, BLOCKS, seed=index + turn), BLOCKS)
            ids.append(id)
        self._watch(self.consumers[turn % self.size])
        for index, (d, id) in enumerate(zip(self.consumers, ids, strict=True)):
            self._read(d, id)
            if not d.holds(BLOCKS, seed=index + turn):
                raise AssertionError(f"{id}: not what its producer wrote")
            self.net.end(id)
        for p in self.producers:
            p.step()
        self.requests += len(ids)
        self._watch(self.producers[turn % self.size])

    def _read(self, d: Side, id: str) -> None:
        for _ in range(20):
            if id in d.received:
                break
            d.step()
            self.net.net.run()
        if d.failed or id not in d.received:
            raise AssertionError(f"{id}: {d.reasons.get(id)}, {d.workers}")
        d.received.clear()

    def restart(self, index: int) -> None:
        """A producer dies and comes back at its address, as another engine."""
        p = self.producers[index]
        self.net.net.kill(p.workers[0].worker._agent.transport.name)  # type: ignore[attr-defined]
        self.net.sides.remove(p)
        port = p.config.port
        p.close()
        self.producers[index] = self.net.producer(f"{p.name} again", port=port, num_blocks=8)

    def peers(self) -> int:
        """The most peers that a consumer knows."""
        return max(len(d.workers[0].worker._contacts._peers) for d in self.consumers)  # type: ignore[attr-defined]

    def _watch(self, side: Side) -> None:
        for half in halves(side):
            for _, name, table in tables(half):
                self.most[name] = max(self.most.get(name, 0), len(table))

    def over(self, most: int, but: Iterable[str]) -> dict[str, int]:
        """Tables that have held more than ``most``."""
        return {name: n for name, n in self.most.items() if n > most and name not in but}

    def sound(self) -> None:
        """Nothing is owed, nothing under way, every table is empty."""
        self.net.sound()

    def close(self) -> None:
        self.net.close()
