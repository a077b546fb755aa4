"""An engine in a process of its own, as a driver sees it.

Rules
1. The driver's end never blocks for longer than it was told to, but in an order for which the pipe of an engine that
   stands still has no room; an engine that is gone is an EngineDeadError with its last words.
2. Orders and events cross one pipe as frozen Structs. The engine sends its statistics along, ten times a second. It
   never waits for its driver to listen (:mod:`kvconn.engine.words`).
3. :meth:`EngineProcess.shutdown` leaves no process, however the engine is.
4. Ctrl-C is the driver's alone: whatever it starts has SIGINT blocked from its first instruction on. SIGTERM tells an
   engine to drain and end: its last words say what came of it.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from kvconn.config import LIMITS
from kvconn.engine.config import EngineConfig, check
from kvconn.engine.core import EngineCore, EngineStats
from kvconn.engine.pace import Pace
from kvconn.engine.request import EngineRequest, Finished, FirstToken
from kvconn.engine.words import Words, room
from kvconn.engine.worker import die_with_parent, freeze_heap
from kvconn.errors import ConfigError, EngineDeadError

__all__ = ["EngineProcess", "EngineRequest", "EngineStats", "Finished", "FirstToken"]

_STATS_EVERY = 0.1


class EngineProcess:
    """``start`` it, ``submit`` to it, ``poll`` it, ``shutdown``. Not thread-safe."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self._process: BaseProcess | None = None
        self._pipe: Connection | None = None
        self._events: list[FirstToken | Finished] = []
        self._stats = EngineStats()
        self._workers: list[int] = []
        self._asked = self._answered = 0
        self._dead: EngineDeadError | None = None

    def start(self) -> None:
        """Start the engine and its workers and wait until they are ready. Raises ConfigError, EngineDeadError."""
        check(self.config)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["kvconn.engine.core"])
        ours, theirs = context.Pipe()
        process = context.Process(target=_engine_main, args=(self.config, theirs), name=f"kvconn-{self.config.name}")
        try:
            with _sigint_blocked():  # until the engine is ours to shut down
                process.start()
                theirs.close()
                self._process, self._pipe = process, ours
            deadline = time.monotonic() + self.config.start_timeout
            while not self._workers:
                if not self._receive(deadline - time.monotonic()):
                    raise EngineDeadError(f"engine {self.config.name}: not ready in time")
        except BaseException:
            self.shutdown()
            raise

    def submit(self, request: EngineRequest) -> None:
        """Queue a request."""
        self._send(("submit", request))

    def abort(self, id: str) -> None:
        """End a request; its ``Finished`` says ABORT."""
        self._send(("abort", id))

    def poll(self, timeout: float) -> list[FirstToken | Finished]:
        """Events since the last call; waits at most ``timeout`` seconds for the first one.

        Raises EngineDeadError only when everything that the engine said before its end has been told.
        """
        try:
            if not self._events:
                self._receive(timeout)
            while self._receive(0.0):
                pass
        except EngineDeadError:
            if not self._events:
                raise
        events, self._events = self._events, []
        return events

    def stats(self) -> EngineStats:
        """The newest statistics the engine has sent, at most a few tenths of a second old."""
        while self._receive(0.0):
            pass
        return self._stats

    @property
    def last_stats(self) -> EngineStats:
        """The newest statistics that were received, also of an engine that is gone."""
        return self._stats

    def digests(self, blocks: list[int], timeout: float = 30.0) -> list[str]:
        """Every rank's hash of these blocks' bytes."""
        self._send(("digests", blocks))
        self._digests: list[str] | None = None
        deadline = time.monotonic() + timeout
        while self._digests is None:
            if not self._receive(deadline - time.monotonic()):
                raise EngineDeadError(f"engine {self.config.name}: no digests in time")
        return self._digests

    @property
    def worker_pids(self) -> list[int]:
        return list(self._workers)

    @property
    def pid(self) -> int:
        return (self._process.pid if self._process is not None else None) or 0

    def drain(self, timeout: float) -> bool:
        """Wait until no block is held. False at the deadline. Events are kept for the next poll."""
        deadline = time.monotonic() + timeout
        while True:
            self._asked += 1
            self._send(("stats", self._asked))  # those sent on the way may be older than the last order
            while self._answered < self._asked:
                if not self._receive(deadline - time.monotonic()):
                    return False
            stats = self._stats
            if not (stats.running or stats.waiting or stats.parked or stats.kv_blocks_used):
                return True
            if time.monotonic() >= deadline:
                return False
            self._receive(_STATS_EVERY)

    def shutdown(self) -> None:
        """End the engine: asked first, killed at the deadline. Idempotent."""
        if self._process is None or self._pipe is None:
            return
        deadline = time.monotonic() + LIMITS.end_engine
        with contextlib.suppress(OSError, EOFError):
            if room(self._pipe, LIMITS.end_engine):
                self._pipe.send(("stop", None))
            while self._pipe in wait([self._pipe, self._process.sentinel], max(0.0, deadline - time.monotonic())):
                self._pipe.recv()  # it may have more to say than the pipe takes
        self._process.join(max(0.0, deadline - time.monotonic()))
        if self._process.is_alive():
            self._process.kill()  # its workers die with it
            self._process.join()
        self._pipe.close()
        self._process = self._pipe = None

    def _send(self, order: tuple[str, Any]) -> None:
        if self._pipe is None:
            raise EngineDeadError(f"engine {self.config.name}: not started, or shut down")
        try:
            self._pipe.send(order)
        except OSError:
            while self._receive(0.0):  # its last words, if any, behind what it said before
                pass
            raise EngineDeadError(f"engine {self.config.name}: is gone") from None

    def _receive(self, timeout: float) -> bool:
        """Take one message. False when none came in time."""
        if self._pipe is None:
            raise EngineDeadError(f"engine {self.config.name}: not started, or shut down")
        if self._dead is not None:
            raise self._dead
        try:
            if not self._pipe.poll(max(0.0, timeout)):
                return False
            kind, value = self._pipe.recv()
        except (EOFError, ConnectionResetError):
            self._dead = EngineDeadError(f"engine {self.config.name}: is gone without a word")
            raise self._dead from None
        if kind == "error":
            self._dead = value
            raise value
        if kind == "refused":
            raise ConfigError(value)
        if kind == "events":
            self._events += value
        elif kind == "stats":
            self._stats = value
        elif kind == "asked":
            self._answered, self._stats = value
        elif kind == "digests":
            self._digests = value
        elif kind == "ready":
            self._workers = value
        return True

    def __repr__(self) -> str:
        state = "running" if self._process is not None and self._process.is_alive() else "stopped"
        return f"EngineProcess({self.config.name} {state} workers={len(self._workers)})"


@contextlib.contextmanager
def _sigint_blocked() -> Iterator[None]:
    resource_tracker.ensure_running()  # starting it would unblock SIGINT
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)  # a Ctrl-C of meanwhile is raised here


def _engine_main(config: EngineConfig, pipe: Connection) -> None:
    """Body of the engine's process."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver decides
    os.environ.update(config.env)
    logging.basicConfig(level=logging.WARNING, format=f"{config.name}: %(message)s")
    core: EngineCore | None = None
    words = Words(pipe)
    try:
        core = EngineCore(config)
        freeze_heap()
        with _told_to_end(core) as wake:
            words.say("ready", core.executor.pids())
            why = _loop(core, pipe, words, wake)
        if why:
            core.close()  # who hears them may rely on it that nothing of this engine can be read any more
            _last(words, "error", EngineDeadError(f"engine {config.name}: {why}"))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the driver is gone
    except ConfigError as err:  # as its problems: an exception is pickled as its text
        _last(words, "refused", err.problems)
    except EngineDeadError as err:
        _last(words, "error", err)
    except Exception as err:  # the driver must hear of it
        logging.getLogger("kvconn.engine").exception("engine %s failed", config.name)
        _last(words, "error", EngineDeadError(f"engine {config.name}: {type(err).__name__}: {err}"))
    finally:
        if core is not None:
            core.close()
        pipe.close()


def _last(words: Words, kind: str, what: object) -> None:
    with contextlib.suppress(OSError):
        words.last(kind, what, LIMITS.end_worker)


@contextlib.contextmanager
def _told_to_end(core: EngineCore) -> Iterator[int]:
    """SIGTERM drains ``core``; gives a file that becomes readable then, so that an idle engine wakes."""
    readable, writable = os.pipe()
    os.set_blocking(writable, False)
    before = signal.signal(signal.SIGTERM, lambda signum, frame: None)
    signal.set_wakeup_fd(writable)
    try:
        yield readable
    finally:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, before)
        os.close(readable)
        os.close(writable)


def _loop(core: EngineCore, pipe: Connection, words: Words, wake: int) -> str:
    """Until the driver says stop, or a drain is over. Returns what came of the drain."""
    next_stats = 0.0
    pause: float | None = 0.0
    pace = Pace(time.monotonic())
    while True:
        words.flush()
        if core.drained():
            why, events = core.end()
            words.events(events)
            words.stats(core.stats())
            return why
        if not core.has_work():
            words.stats(core.stats())
            pause = _STATS_EVERY if words.waiting else None
        while ready := wait([pipe, wake, *core.executor.ends], pause):
            pause = 0.0
            pace.moved(time.monotonic())
            core.executor.check()
            if wake in ready and signal.SIGTERM in os.read(wake, 64):
                core.drain()
            if pipe in ready:
                order, value = pipe.recv()
                if order == "stop":
                    return ""
                _obey(core, words, order, value)
        if not core.has_work():
            continue
        busy, events = core.step()
        words.events(events)
        now = time.monotonic()
        if now >= next_stats:
            next_stats = now + _STATS_EVERY
            words.stats(core.stats())
        pause = pace.pause(busy, bool(core.scheduler.waiting), now)


def _obey(core: EngineCore, words: Words, order: str, value: Any) -> None:
    if order == "submit":
        core.add(value)
    elif order == "abort":
        core.abort(value)
    elif order == "stats":
        words.say("asked", (value, core.stats()))
    elif order == "digests":
        words.say("digests", core.executor.digests(value))
