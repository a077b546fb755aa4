"""A producer in a process of its own: real reads between processes, and a peer that may be stopped or killed.

``Producer`` runs a :class:`tests.support.Side` in a fresh interpreter and gives it orders over a pipe. Every order has
a deadline; leaving the context kills the process.
"""

from __future__ import annotations

import logging
import os
import random
import signal
import subprocess
import sys
import time
from multiprocessing.connection import Client, Listener
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import msgspec

from tests.support import wait_until

DEADLINE = 30.0


def limit(worker: Any, **limits: float) -> None:
    """From now on a NIXL worker has these: short ones are not for the first contact, which takes what it takes."""
    for part in (worker._reader, worker._contacts):
        part._settings = msgspec.structs.replace(
            part._settings, kvconn=msgspec.structs.replace(part._settings.kvconn, **limits)
        )
    worker._contacts._client._timeout = worker._contacts._settings.kvconn.handshake


class Producer:
    """The driver's end. ``lease`` in seconds; ``env`` for the child only, e.g. UCX_TLS; ``name`` is its engine id.

    ``reads``: it is a consumer instead. ``pause``: seconds between its steps; ``prefix``: of its command.
    """

    def __init__(
        self,
        lease: float = 30.0,
        env: dict[str, str] | None = None,
        name: str = "P",
        reads: bool = False,
        pause: float = 0.0,
        prefix: tuple[str, ...] = (),
        **side: Any,
    ) -> None:
        with Listener(None, "AF_UNIX") as listener:
            self._process = subprocess.Popen(
                [*prefix, sys.executable, "-m", "tests.nixl.producer", str(listener.address)],
                env={**os.environ, **(env or {})},
            )
            self._pipe = listener.accept()
        self._pipe.send(("start", (lease, name, reads, pause, side)))
        self._answer()

    def order(self, name: str, *args: Any) -> Any:
        """Give an order and wait for its answer."""
        self._pipe.send((name, args))
        return self._answer()

    def _answer(self) -> Any:
        if not self._pipe.poll(DEADLINE):
            raise AssertionError("the producer did not answer in time")
        ok, value = self._pipe.recv()
        if not ok:
            raise AssertionError(f"the producer failed: {value}")
        return value

    def stop(self) -> None:
        """Returns when every thread of it has stopped: until then its pump may still serve a read."""
        os.kill(self._process.pid, signal.SIGSTOP)
        wait_until(self._stopped, DEADLINE, "the producer stops")

    def _stopped(self) -> bool:
        tasks = Path(f"/proc/{self._process.pid}/task").iterdir()
        try:
            return all((task / "stat").read_text().rpartition(")")[2].split()[0] == "T" for task in tasks)
        except OSError:  # a thread ended meanwhile
            return False

    def cont(self) -> None:
        os.kill(self._process.pid, signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(DEADLINE)

    def __enter__(self) -> Producer:
        return self

    def __exit__(self, kind: type[BaseException] | None, err: BaseException | None, tb: TracebackType | None) -> None:
        self.kill()
        self._pipe.close()


class _Child:
    """The other end: obeys, and steps its engine while it has nothing to obey."""

    def __init__(self, lease: float, name: str, reads: bool, pause: float, side: dict[str, Any]) -> None:
        from tests.support import NIXL_CONSUMER, NIXL_PRODUCER, Side
        from tests.told import Told

        self._told = Told()
        logging.getLogger("kvconn").addHandler(self._told)
        limits = {"kv_lease_duration": lease, "kvconn": side.pop("kvconn", {})}
        transfer = {**(NIXL_CONSUMER if reads else NIXL_PRODUCER), "kv_connector_extra_config": limits}
        self.side = Side(name, transfer, **side)
        self.frozen = False
        self.pause = pause
        self._reuse: dict[str, tuple[list[int], int]] = {}
        self._seen = 0

    def tick(self) -> None:
        """One step, unless frozen; blocks whose release was reported are overwritten at once, as under pressure."""
        if self.frozen:
            return
        self.side.step()
        for id in self.side.sent[self._seen :]:
            blocks, seed = self._reuse.pop(id, ([], 0))
            if blocks:
                self.side.write(blocks, seed)
        self._seen = len(self.side.sent)

    def lease(self, seconds: float) -> None:
        """Of what is prefilled from now on; and a heartbeat prolongs by two thirds of it."""
        half: Any = self.side.scheduler
        half.scheduler._settings = msgspec.structs.replace(half.scheduler._settings, kv_lease_duration=seconds)
        for worker in cast("list[Any]", self.side.workers):
            worker.worker._leases._lease, worker.worker._leases._extension = seconds, seconds * 2 / 3

    def limits(self, limits: dict[str, float]) -> None:
        """What its worker may take from now on."""
        half: Any = self.side.workers[0]
        limit(half.worker, **limits)

    def prefill(self, id: str, blocks: list[int], seed: int, reuse_seed: int | None = None) -> Any:
        if reuse_seed is not None:
            self._reuse[id] = (blocks, reuse_seed)
        return self.side.prefill(id, blocks, seed)

    def load(self, id: str, params: Any, blocks: list[int], poll: bool = True) -> int:
        """Admit a request; without ``poll`` its read is posted and nobody looks. Returns how many handles are out."""
        from kvconn.base import StepView

        self.side.load(id, params, blocks)
        worker: Any = self.side.workers[0]
        worker.bind_connector_metadata(self.side.scheduler.build_connector_meta(StepView(self.side.seq)))
        worker.start_load_kv()
        self.frozen = not poll
        return len(worker.worker._reader._reads.to_poll())

    def results(self) -> tuple[list[str], list[str], dict[str, str]]:
        return list(self.side.received), list(self.side.failed), dict(self.side.reasons)

    def holds(self, blocks: list[int], seed: int) -> bool:
        return self.side.holds(blocks, seed)

    def left(self) -> list[str]:
        """Whatever it still holds or is owed."""
        lines = [f"{pending}" for pending in self.side.aggregator.pending()]
        now = time.perf_counter()
        return lines + [line for half in (self.side.scheduler, *self.side.workers) for line in half.explain(now)]

    def told(self) -> list[str]:
        """What its operator was told since the last call."""
        return self._told.take()

    def sent(self) -> list[str]:
        return list(self.side.sent)

    def stats(self) -> dict[str, float]:
        return dict(self.side.stats.values)


def _serve(address: str) -> None:
    with Client(address) as pipe:
        child: Any = None
        while True:
            if child is None or pipe.poll(child.pause):
                name, args = pipe.recv()
                try:
                    if name == "start":
                        child, value = _Child(*args), None
                    else:
                        value = getattr(child, name)(*args)
                    pipe.send((True, value))
                except Exception as err:  # noqa: BLE001 - the test must hear of it
                    pipe.send((False, repr(err)))
            child.tick()


def races(
    count: int, seed: int, lease: float = 0.004, env: dict[str, str] | None = None, scattered: bool = False
) -> dict[str, int]:
    """Force ``count`` reads against leases that are ending while the blocks are overwritten on release.

    A lease that all reads miss, or none, is doubled or halved: how long one takes is this machine's affair. There are
    more reads, at most ten times as many, until some were in time and some were overwritten.
    ``scattered``: D's blocks descend, so that nothing joins and the parts are many and small.
    Returns how many were accepted, how many of those were not whole (must be 0), how many were refused, and how many of
    the refused had really been overwritten: the reads that a transport alone calls DONE.
    """
    from tests.support import NIXL_CONSUMER, Side, wait_until

    rng = random.Random(seed)
    blocks = list(range(48))
    mine = blocks[::-1] if scattered else blocks
    out = {"accepted": 0, "accepted but not whole": 0, "refused": 0, "refused and not whole": 0}
    d = Side("D", NIXL_CONSUMER, num_blocks=64)
    try:
        with Producer(lease, env, num_blocks=64) as p:
            window = dict(out)
            for n in range(10 * count):
                if n >= count and out["accepted"] and out["refused and not whole"]:
                    break
                if n and n % 20 == 0:
                    if out["accepted"] == window["accepted"]:
                        lease *= 2
                    elif out["refused"] == window["refused"]:
                        lease /= 2
                    window = dict(out)
                    p.order("lease", lease)
                good, other = 2 * n, 2 * n + 1
                params = p.order("prefill", f"r{n}", blocks, good, other)
                end = time.perf_counter() + rng.uniform(0, 2 * lease)
                while time.perf_counter() < end:
                    pass
                view = d.load(f"d{n}", params, mine)
                wait_until(lambda n=n: d.step() is not None and len(d.received) == n + 1)  # type: ignore[misc]
                whole = d.holds(mine, good)
                if d.failed and d.failed[-1] == f"d{n}":
                    out["refused"] += 1
                    out["refused and not whole"] += not whole
                else:
                    out["accepted"] += 1
                    out["accepted but not whole"] += not whole
                from kvconn.base import FinishReason

                d.scheduler.request_finished(view, (tuple(mine),), FinishReason.STOP)
                wait_until(lambda n=n: f"r{n}" in p.order("sent")[-2:])  # type: ignore[misc]
    finally:
        d.close()
    return out


if __name__ == "__main__":
    _serve(sys.argv[1])
