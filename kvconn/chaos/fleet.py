"""Engines in their processes: fed, stopped, killed, started again at their address, looked into, ended.

Rules
1. An engine that is gone is started again at once, at the same address. Who is gone without an order of ours is
   remembered with its last words.
2. That a fault happened is seen, not assumed: a process is gone, or stopped, or has said so.
3. :meth:`Fleet.close` leaves no process, stopped ones included.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import zmq
from msgspec.structs import replace

from kvconn.chaos.book import PREFILL, Order, Submit
from kvconn.config import LIMITS
from kvconn.engine.client import EngineProcess, Finished, FirstToken
from kvconn.engine.config import EngineConfig
from kvconn.errors import EngineDeadError
from kvconn.explain import find

__all__ = ["Fleet", "Ports"]

#: seconds that a signal may take to show
SHOWS = 5.0
#: seconds after a reader's end in which UCX may end its producer, and in which that is noticed
AFTERMATH = 30.0
RETRY = 0.01
#: connections that ask for nothing; ZMTP's greeting without a key and a client's first words; empty frames of which
#: each says that more come
IDLE = 50
HELLO = b"\xff" + bytes(8) + b"\x7f\x03\x01NULL" + bytes(48) + b"\x04\x1c\x05READY\x0bSocket-Type\0\0\0\x06DEALER"
MORE = b"\x01\x00" * 2048


class Ports:
    """Ports of peers that are no engines: one where nobody listens, one that accepts and never says a word, one that
    answers every request with bytes that mean nothing."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self._stop = threading.Event()
        self._context = zmq.Context()
        self._fool = self._context.socket(zmq.ROUTER)
        self._fool_port = self._fool.bind_to_random_port(f"tcp://{host}")
        self._thread = threading.Thread(target=self._answer, name="kvconn-chaos-peer", daemon=True)
        self._thread.start()
        self._nobody, self._silent = socket.socket(), socket.socket()
        for one in (self._nobody, self._silent):
            one.bind((host, 0))  # bound and held, so that nobody else gets it
        self._silent.listen(128)

    @property
    def all(self) -> tuple[int, int, int]:
        return self._nobody.getsockname()[1], self._silent.getsockname()[1], self._fool_port

    def _answer(self) -> None:
        rng = random.Random(0)
        while not self._stop.is_set():
            if self._fool.poll(100):
                sender = self._fool.recv_multipart()[0]
                frames = [rng.randbytes(rng.choice((0, 1, 9, 500))) for _ in range(rng.choice((1, 2, 2, 2, 3)))]
                self._fool.send_multipart([sender, b"", *frames], zmq.NOBLOCK)
        self._fool.close(0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *args: object) -> None:
        self._stop.set()
        self._thread.join(LIMITS.end_thread)
        if not self._thread.is_alive():
            self._context.term()
        self._nobody.close()
        self._silent.close()


class Fleet:
    """Engines by name; a context manager. The engine named P serves. Not thread-safe."""

    def __init__(self, configs: Sequence[EngineConfig]) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="kvconn-chaos-"))  # mode 0700, as explain's sockets ask
        env = {"KVCONN_RUN_DIR": str(self._folder)}
        self._configs = {one.name: replace(one, env=one.env | env) for one in configs}
        self._engines: dict[str, EngineProcess] = {}
        self._gone: dict[str, str] = {}
        #: engines that an order of ours ends, until they are back
        self.doomed: set[str] = set()
        #: by name: engines started anew under another engine id
        self._generation: Counter[str] = Counter()
        #: engines that ended without an order of ours, and their last words
        self.died: list[str] = []
        #: producers that UCX ended after it ended their reader (docs/design.md, F6), and their last words
        self.aborted: list[str] = []
        self._reader_ended = float("-inf")
        #: counters of engines that are gone
        self._before: Counter[str] = Counter()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._configs)

    def start(self) -> None:
        """Start all. Raises ConfigError, EngineDeadError."""
        for name in self._configs:
            self._start(name)

    def _start(self, name: str) -> None:
        config = self._configs[name]
        if config.kv_transfer_config is not None:
            named = {**config.kv_transfer_config, "engine_id": f"{name}-{os.getpid()}-{self._generation[name]}"}
            config = replace(config, kv_transfer_config=named)
        engine = EngineProcess(config)
        self._engines[name] = engine
        engine.start()

    # -- load ----------------------------------------------------------------------------------------------------

    def give(self, order: Order) -> None:
        """An order; one to an engine that is gone does nothing."""
        try:
            engine = self._engines[order.where]
            if isinstance(order, Submit):
                engine.submit(order.request)
            else:
                engine.abort(order.id)
        except EngineDeadError as err:
            self._gone.setdefault(order.where, str(err))

    def poll(self, name: str, timeout: float) -> Sequence[FirstToken | Finished]:
        """What an engine said since; nothing from one that is gone."""
        if name in self._gone:
            return ()
        try:
            return self._engines[name].poll(timeout)
        except EngineDeadError as err:
            self._gone[name] = str(err)
            return ()

    def bury(self) -> list[str]:
        """Start again what is gone; returns the names. Raises EngineDeadError when one does not come up."""
        gone, self._gone = self._gone, {}
        for name, words in gone.items():
            if name not in self.doomed:
                (self.aborted if self._is_f6(name, words) else self.died).append(f"{name}: {words}")
            self.doomed.discard(name)
            self._before.update(self._engines[name].last_stats.connector)
            self._engines[name].shutdown()
            self._start(name)
        return list(gone)

    def _is_f6(self, name: str, words: str) -> bool:
        recent = time.monotonic() - self._reader_ended < AFTERMATH
        return name == PREFILL and recent and f"ended with {-signal.SIGABRT}" in words

    # -- faults --------------------------------------------------------------------------------------------------

    def pids(self, name: str) -> list[int]:
        engine = self._engines[name]
        return [engine.pid, *engine.worker_pids]

    def kill(self, name: str, rng: random.Random, rank: bool, same_id: bool) -> bool:
        """SIGKILL the engine, or one of its ranks. True: it is dead."""
        if not same_id:
            self._generation[name] += 1
        self._end(name)
        pid = rng.choice(self._engines[name].worker_pids) if rank else self._engines[name].pid
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        return _shows(lambda: _state(pid) in "ZX")

    def _end(self, name: str) -> None:
        self.doomed.add(name)
        if name != PREFILL:
            self._reader_ended = time.monotonic()

    def stop(self, name: str) -> bool:
        """SIGSTOP every process of it. True: all stand."""
        pids = self.pids(name)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        return _shows(lambda: all(_state(pid) == "T" for pid in pids))

    def go_on(self, name: str) -> None:
        """SIGCONT."""
        for pid in self.pids(name):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def tell_to_end(self, name: str) -> bool:
        """SIGTERM to every process of it; it drains."""
        self._generation[name] += 1
        self._end(name)
        for pid in self.pids(name):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        return True

    def garbage(self, name: str, rng: random.Random) -> bool:
        """Bytes that are no ZMQ, and a connection that says nothing more, at its side channel. True: it took them."""
        config = self._configs[name]
        taken = 0
        for _ in range(20):
            with contextlib.suppress(OSError), socket.create_connection((config.host, config.port), SHOWS) as one:
                one.sendall(rng.randbytes(rng.randint(1, 4096)))
                taken += 1
        return taken > 0

    def flood(self, name: str) -> bool:
        """Connections that ask for nothing, and a message without an end, at its side channel. True: that was ended."""
        config = self._configs[name]
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            made = [
                stack.enter_context(socket.create_connection((config.host, config.port), SHOWS)) for _ in range(IDLE)
            ]
            made[-1].sendall(HELLO)
            made[-1].recv(64)
            deadline = time.monotonic() + SHOWS
            try:
                while time.monotonic() < deadline:
                    made[-1].sendall(MORE)
            except TimeoutError:
                return False
            except OSError:
                return True
        return False

    # -- looking -------------------------------------------------------------------------------------------------

    def counters(self) -> dict[str, float]:
        """All engines' connector counters, those of engines that are gone included."""
        total = Counter(self._before)
        for engine in self._engines.values():
            total.update(engine.last_stats.connector)
        return dict(total)

    def held(self) -> dict[str, int]:
        """KV blocks in use per engine."""
        return {name: engine.last_stats.kv_blocks_used for name, engine in self._engines.items()}

    def summaries(self) -> list[str]:
        """What every connector half says of itself."""
        return [report.summary for report in find(self._folder)[0]]

    def leaks(self, seconds: float) -> list[str]:
        """Whatever an engine still holds, or a table still has, ``seconds`` after nothing is asked of it any more."""
        found = []
        for name, engine in self._engines.items():
            try:
                if not engine.drain(seconds):
                    found.append(f"{name}: {engine.stats()}")
            except EngineDeadError as err:
                self.died.append(f"{name}: {err}")
        deadline = time.monotonic() + seconds
        while (lines := self._owed()) and time.monotonic() < deadline:
            time.sleep(RETRY)
        return found + lines

    def _owed(self) -> list[str]:
        reports, problems = find(self._folder)
        lines = [f"{report.engine_id} {report.half}: {line}" for report in reports for line in report.lines]
        return lines + problems

    def close(self) -> None:
        """End every engine. Idempotent."""
        for engine in self._engines.values():
            for pid in (engine.pid, *engine.worker_pids):
                with contextlib.suppress(ProcessLookupError):
                    if pid:
                        os.kill(pid, signal.SIGCONT)
        for engine in self._engines.values():
            engine.shutdown()
        self._engines.clear()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Fleet({', '.join(map(repr, self._engines.values()))} died={len(self.died)})"


def _state(pid: int) -> str:
    """The letter of /proc; X for a process that is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"


def _shows(condition: Any) -> bool:
    deadline = time.monotonic() + SHOWS
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(RETRY)
    return True
