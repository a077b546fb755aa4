"""The handshake channel: one server per engine, one client per worker.

Rules
1. The server never dies of what it receives: a frame that is not a request, or names a rank that serves nobody, is
   dropped and counted (C9). It answers from memory and holds nothing per client.
2. The client asks all peers at once from one thread; a peer that does not answer costs its own deadline only (C7).
3. Results cross to the step thread in a queue; sockets never leave their thread.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec
import zmq

from kvconn.config import LIMITS
from kvconn.errors import ConfigError
from kvconn.nixl.wire import MAX_FRAME, MAX_REQUEST, encode_request, parse_request, parse_timestamp
from kvconn.params import PeerKey

__all__ = ["HandshakeClient", "HandshakeResult", "HandshakeServer"]

log = logging.getLogger("kvconn.nixl")
_POLL_MS = 100
#: peers asked at once; each is a socket, and requests name as many peers as they like
MAX_PENDING = 128


class HandshakeServer:
    """Serves this engine's payloads on ``tcp://host:port``.

    Binds in the constructor; raises ConfigError naming the port when it is taken.
    """

    def __init__(self, host: str, port: int, payloads: Mapping[tuple[int, int], bytes]) -> None:
        self._payloads = dict(payloads)
        self.dropped = 0
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST)
        try:
            self._socket.bind(f"tcp://{host}:{port}")
        except zmq.ZMQError as err:
            self._socket.close()
            self._context.term()
            raise ConfigError(
                f"side channel: cannot listen on {host}:{port}: {err}; is another engine on this port? "
                "set VLLM_NIXL_SIDE_CHANNEL_HOST / VLLM_NIXL_SIDE_CHANNEL_PORT"
            ) from None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvconn-side-channel", daemon=True)
        self._thread.start()

    def replace(self, payloads: Mapping[tuple[int, int], bytes]) -> None:
        """Serve these from now on (a worker made a new agent)."""
        self._payloads = dict(payloads)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                if self._socket.poll(_POLL_MS):
                    self._answer(self._socket.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                continue
            except zmq.ZMQError as err:
                log.warning("side channel: %s", err)
        self._socket.close()

    def _answer(self, frames: list[bytes]) -> None:
        request = parse_request(frames[2]) if len(frames) == 3 and frames[1] == b"" else None
        payload = self._payloads.get(request) if request is not None else None
        if payload is None:
            self.dropped += 1
            return
        self._socket.send_multipart([frames[0], b"", payload, msgspec.msgpack.encode(time.perf_counter())], zmq.NOBLOCK)

    def close(self) -> None:
        """Stop and free the port. Idempotent."""
        self._stop.set()
        self._thread.join(LIMITS.end_thread)
        self._context.term() if not self._thread.is_alive() else None

    def __repr__(self) -> str:
        state = "listening" if self._thread.is_alive() else "closed"
        return f"HandshakeServer({state} payloads={len(self._payloads)} dropped={self.dropped})"


@dataclass(frozen=True)
class HandshakeResult:
    """A peer's answer, or why there is none. ``ask``: the number that :meth:`HandshakeClient.start` gave."""

    key: PeerKey
    payload: bytes | None
    why: str = ""
    #: their perf_counter minus ours, in seconds, when both are known.
    clock_offset: float | None = None
    ask: int = 0


@dataclass
class _Ask:
    number: int
    key: PeerKey
    sent: float
    deadline: float


class HandshakeClient:
    """Asks peers for their metadata in the background. ``start`` and ``results`` are called by the step thread."""

    def __init__(self, timeout: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self._timeout = timeout
        self._clock = clock
        self._asks: deque[tuple[int, PeerKey, int, int]] = deque()
        self._results: deque[HandshakeResult] = deque()
        self._numbers = itertools.count(1)
        self._context = zmq.Context()
        self._context.setsockopt(zmq.MAX_SOCKETS, 65000)
        self._stop = threading.Event()
        self._wake_in = self._context.socket(zmq.PAIR)
        self._wake_in.setsockopt(zmq.LINGER, 0)
        self._wake_in.bind("inproc://wake")
        self._wake_out = self._context.socket(zmq.PAIR)
        self._wake_out.setsockopt(zmq.LINGER, 0)
        self._wake_out.connect("inproc://wake")
        self._pending: dict[zmq.Socket[bytes], _Ask] = {}
        self._thread = threading.Thread(target=self._run, name="kvconn-handshakes", daemon=True)
        self._thread.start()

    def start(self, key: PeerKey, pp: int = 0, tp: int = 0) -> int:
        """Ask the peer at ``key`` for the payload of its (pp, tp) worker; the number that its one result will have."""
        number = next(self._numbers)
        self._asks.append((number, key, pp, tp))
        with contextlib.suppress(zmq.Again):  # full: the thread is awake anyway
            self._wake_out.send(b"", zmq.NOBLOCK)
        return number

    def results(self) -> list[HandshakeResult]:
        """Answers and failures since the last call."""
        out: list[HandshakeResult] = []
        while self._results:
            out.append(self._results.popleft())
        return out

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake_in, zmq.POLLIN)
        try:
            while not self._stop.is_set():
                for socket, _ in poller.poll(self._wait_ms()):
                    if socket is self._wake_in:
                        self._wake_in.recv()
                    else:
                        self._receive(poller, socket)
                self._expire(poller)
                while self._asks and len(self._pending) < MAX_PENDING:
                    self._ask(poller, *self._asks.popleft())
        finally:  # an open socket would hang close()
            for socket in self._pending:
                socket.close()
            self._wake_in.close()

    def _wait_ms(self) -> int:
        if not self._pending:
            return 1000
        first = min(ask.deadline for ask in self._pending.values())
        return max(1, min(1000, int((first - self._clock()) * 1000) + 1))

    def _ask(self, poller: zmq.Poller, number: int, key: PeerKey, pp: int, tp: int) -> None:
        host, port = key.host, key.port
        now = self._clock()
        try:
            socket = self._context.socket(zmq.DEALER)
        except zmq.ZMQError as err:
            self._results.append(HandshakeResult(key, None, f"no socket: {err}", ask=number))
            return
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME)
        try:
            if not _plain_host(host):
                raise zmq.ZMQError(msg=f"not a host name or address: {host!r}")
            socket.connect(f"tcp://{host}:{port}")
            socket.send_multipart([b"", encode_request(pp, tp)], zmq.NOBLOCK)
        except zmq.ZMQError as err:
            socket.close()
            self._results.append(HandshakeResult(key, None, f"cannot connect: {err}", ask=number))
            return
        self._pending[socket] = _Ask(number, key, now, now + self._timeout)
        poller.register(socket, zmq.POLLIN)

    def _receive(self, poller: zmq.Poller, socket: zmq.Socket[bytes]) -> None:
        try:
            frames = socket.recv_multipart(zmq.NOBLOCK)
        except zmq.ZMQError:
            return
        ask = self._finish(poller, socket)
        now = self._clock()
        if len(frames) != 3 or frames[0] != b"":
            self._results.append(
                HandshakeResult(ask.key, None, f"expected 3 frames, got {len(frames)}", ask=ask.number)
            )
            return
        theirs = parse_timestamp(frames[2])
        offset = None if theirs is None else theirs - (ask.sent + now) / 2
        self._results.append(HandshakeResult(ask.key, frames[1], "", offset, ask.number))

    def _expire(self, poller: zmq.Poller) -> None:
        now = self._clock()
        for socket in [s for s, ask in self._pending.items() if ask.deadline <= now]:
            ask = self._finish(poller, socket)
            self._results.append(
                HandshakeResult(ask.key, None, f"no answer within {self._timeout:g} s", ask=ask.number)
            )

    def _finish(self, poller: zmq.Poller, socket: zmq.Socket[bytes]) -> _Ask:
        poller.unregister(socket)
        socket.close()
        return self._pending.pop(socket)

    def close(self) -> None:
        """Stop the thread, close every socket. Idempotent."""
        if self._stop.is_set():
            return
        self._stop.set()
        with contextlib.suppress(zmq.ZMQError):
            self._wake_out.send(b"", zmq.NOBLOCK)
        self._thread.join(LIMITS.end_thread)
        self._wake_out.close()
        if not self._thread.is_alive():
            self._context.term()

    def __repr__(self) -> str:
        state = "closed" if self._stop.is_set() else "running"
        return f"HandshakeClient({state} pending={len(self._pending)})"


def _plain_host(host: str) -> bool:
    """ZMQ endpoints have a grammar (``tcp://source;destination``): only names and addresses go in."""
    return bool(host) and all(c.isalnum() or c in ".-_:[]%" for c in host)
