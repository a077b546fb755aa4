"""The handshake channel: one server per engine, one client per worker.

Rules
1. The server never dies of what it receives: a frame that is not a request, or names a rank that serves nobody, is
   dropped and counted (C9). It answers from memory and holds nothing per client. Who is let in is the gate's decision.
2. The client asks all peers at once from one thread; a peer that does not answer costs its own deadline only, and so
   does a name that nobody resolves (C7). It connects to addresses only, and only to those in ``kvconn.allow``.
3. Results cross to the step thread in a queue; sockets never leave their thread.
4. With a fleet key either side speaks CURVE and nothing else: there is no way down.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import msgspec
import zmq

from kvconn.config import LIMITS
from kvconn.errors import ConfigError
from kvconn.nixl.curve import FAILURES, Curve, refusal, unasked
from kvconn.nixl.gate import Gate
from kvconn.nixl.names import LookUp, Names, endpoint, look_up, plain_name
from kvconn.nixl.wire import MAX_FRAME, MAX_REQUEST, encode_request, parse_request, parse_timestamp
from kvconn.params import PeerKey
from kvconn.trust import Trust, numeric

__all__ = ["HandshakeClient", "HandshakeResult", "HandshakeServer"]

log = logging.getLogger("kvconn.nixl")
_POLL_MS = 100
#: peers asked at once; each is two sockets, and requests name as many peers as they like
MAX_PENDING = 128
#: milliseconds between two tries to connect grow to this
_RECONNECT_MS = 1000
_DOMAIN = b"kvconn"
#: answers that one connection may leave unread; more are dropped
UNREAD = 4
#: bytes: CURVE's own commands are longer than any request
_CURVE_ROOM = 1024


class HandshakeServer:
    """Serves this engine's payloads on ``tcp://host:port``, to whom ``trust`` allows.

    Binds in the constructor; raises ConfigError naming the port when it is taken.
    """

    def __init__(
        self, host: str, port: int, payloads: Mapping[tuple[int, int], bytes], trust: Trust | None = None
    ) -> None:
        self._payloads = dict(payloads)
        self.dropped = 0
        self.refused = 0
        trust = trust or Trust()
        curve = Curve.of(trust.key) if trust.key is not None else None
        self._gate = Gate(trust, curve.client_public if curve is not None else None)
        self._told: dict[str, float] = {}
        self._context = zmq.Context()
        self._zap = self._context.socket(zmq.ROUTER)
        self._zap.setsockopt(zmq.LINGER, 0)
        self._zap.bind("inproc://zeromq.zap.01")
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST if curve is None else MAX_REQUEST + _CURVE_ROOM)
        self._socket.setsockopt(zmq.SNDHWM, UNREAD)
        self._socket.setsockopt(zmq.HANDSHAKE_IVL, int(LIMITS.handshake * 1000))
        self._socket.zap_domain = _DOMAIN
        if curve is not None:
            curve.serve(self._socket)
        self._monitor = self._socket.get_monitor_socket(FAILURES)
        self._bind(host, port)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvconn-side-channel", daemon=True)
        self._thread.start()

    def _bind(self, host: str, port: int) -> None:
        try:
            address = host if host == "*" or numeric(host) is not None else look_up(host)[0]
            self._socket.setsockopt(zmq.IPV6, int(":" in address))
            self._socket.bind(endpoint(address, port))
        except (OSError, zmq.ZMQError) as err:
            self._close_sockets()
            self._context.term()
            raise ConfigError(
                f"side channel: cannot listen on {host}:{port}: {err}; is another engine on this port? "
                "set VLLM_NIXL_SIDE_CHANNEL_HOST / VLLM_NIXL_SIDE_CHANNEL_PORT"
            ) from None

    def replace(self, payloads: Mapping[tuple[int, int], bytes]) -> None:
        """Serve these from now on (a worker made a new agent)."""
        self._payloads = dict(payloads)

    def _run(self) -> None:
        poller = zmq.Poller()
        work = {self._zap: self._judge, self._socket: self._answer, self._monitor: self._note}
        for socket in work:
            poller.register(socket, zmq.POLLIN)
        while not self._stop.is_set():
            try:
                for socket, _ in poller.poll(_POLL_MS):
                    work[socket]()
            except zmq.Again:
                continue
            except zmq.ZMQError as err:
                log.warning("side channel: %s", err)
        self._close_sockets()

    def _judge(self) -> None:
        reply, why = self._gate.zap(self._zap.recv_multipart(zmq.NOBLOCK), time.monotonic())
        if why:
            self._refuse("gate", why)
        if reply:
            self._zap.send_multipart(reply, zmq.NOBLOCK)

    def _note(self) -> None:
        """A connection ended in its handshake. Which side sees first that they speak different protocols is chance."""
        if unasked(self._monitor.recv_multipart(zmq.NOBLOCK)):
            self._refuse("keys", "a connection did not get through the handshake: a stock engine, or another fleet key")

    def _refuse(self, kind: str, why: str) -> None:
        """Count it; say it once in a while."""
        self.refused += 1
        now = time.monotonic()
        if now - self._told.get(kind, -LIMITS.complain) >= LIMITS.complain:
            self._told[kind] = now
            log.warning("side channel: refused a peer (%d until now): %s", self.refused, why)

    def _answer(self) -> None:
        frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
        body = frames[2] if len(frames) == 3 and len(frames[1]) == 0 else None
        request = parse_request(body.bytes) if body is not None else None
        payload = self._payloads.get(request) if request is not None else None
        if body is None or payload is None:
            self.dropped += 1
            return
        address = str(body.get("Peer-Address"))
        if not self._gate.asks(address, time.monotonic()):
            self._refuse("requests", f"{address} asks too often (kvconn.handshake_rate)")
            return
        clock = msgspec.msgpack.encode(time.perf_counter())
        self._socket.send_multipart([frames[0].bytes, b"", payload, clock], zmq.NOBLOCK)

    def _close_sockets(self) -> None:
        self._socket.disable_monitor()
        for socket in (self._monitor, self._socket, self._zap):
            socket.close(0)

    def close(self) -> None:
        """Stop and free the port. Idempotent."""
        self._stop.set()
        self._thread.join(LIMITS.end_thread)
        self._context.term() if not self._thread.is_alive() else None

    def __repr__(self) -> str:
        state = "listening" if self._thread.is_alive() else "closed"
        counts = f"payloads={len(self._payloads)} dropped={self.dropped} refused={self.refused}"
        return f"HandshakeServer({state} {counts})"


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
    pp: int
    tp: int
    #: set when it is begun, and when it is sent
    deadline: float = 0.0
    sent: float = 0.0
    #: where to, once that is known
    addresses: list[str] = field(default_factory=list)
    hint: str = ""


class _Line:
    """One peer being asked: a socket, and a monitor that says why it cannot be."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], ask: _Ask) -> None:
        self.ask = ask
        self.socket = context.socket(zmq.DEALER)
        try:
            self.socket.setsockopt(zmq.LINGER, 0)
            self.socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME)
            self.socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MS)
            self.monitor = self.socket.get_monitor_socket(FAILURES)
        except zmq.ZMQError:
            self.socket.close()
            raise

    def send(self, address: str, curve: Curve | None) -> None:
        """Raises ZMQError."""
        if curve is not None:
            curve.ask(self.socket)
        self.socket.setsockopt(zmq.IPV6, int(":" in address))
        self.socket.connect(endpoint(address, self.ask.key[2]))
        with contextlib.suppress(zmq.Again):  # refused before we could ask: the monitor says why
            self.socket.send_multipart([b"", encode_request(self.ask.pp, self.ask.tp)], zmq.NOBLOCK)

    def close(self) -> None:
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close()


class _Bell:
    """Wakes the client's thread, from any thread, also after the end."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._closed = False

    def ring(self) -> None:
        with self._lock, contextlib.suppress(BlockingIOError):
            if not self._closed:
                os.eventfd_write(self.fd, 1)

    def heard(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self.fd)


class HandshakeClient:
    """Asks peers for their metadata in the background. ``start`` and ``results`` are called by the step thread."""

    def __init__(
        self,
        timeout: float,
        clock: Callable[[], float] = time.perf_counter,
        trust: Trust | None = None,
        look_up: LookUp = look_up,
    ) -> None:
        self._timeout = timeout
        self._clock = clock
        self._trust = trust or Trust()
        self._curve = Curve.of(self._trust.key) if self._trust.key is not None else None
        self._numbers = itertools.count(1)
        self._asks: deque[_Ask] = deque()
        self._results: deque[HandshakeResult] = deque()
        self._lines: dict[int | zmq.Socket[bytes], _Line] = {}
        self._pending = 0
        #: asks whose name is being looked up, and look-ups that ended
        self._naming: dict[str, list[_Ask]] = {}
        self._named: deque[tuple[str, list[str], str]] = deque()
        self._names = Names(self._name_found, look_up)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.setsockopt(zmq.MAX_SOCKETS, 65000)
        self._stop = threading.Event()
        self._bell = _Bell()
        self._thread = threading.Thread(target=self._run, name="kvconn-handshakes", daemon=True)
        self._thread.start()

    def start(self, key: PeerKey, pp: int = 0, tp: int = 0) -> int:
        """Ask the peer at ``key`` for the payload of its (pp, tp) worker; the number that its one result will have."""
        ask = _Ask(next(self._numbers), key, pp, tp)
        if len(self._asks) >= LIMITS.peers_max:
            self._fail(ask, f"{LIMITS.peers_max} handshakes wait already")
            return ask.number
        self._asks.append(ask)
        self._bell.ring()
        return ask.number

    def results(self) -> list[HandshakeResult]:
        """Answers and failures since the last call."""
        out: list[HandshakeResult] = []
        while self._results:
            out.append(self._results.popleft())
        return out

    # -- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._bell.fd, zmq.POLLIN)
        try:
            while not self._stop.is_set():
                for source, _ in poller.poll(self._wait_ms()):
                    line = self._lines.get(source)
                    if line is None:  # the bell, or a line that this round has ended
                        self._bell.heard()
                    elif source is line.socket:
                        self._receive(poller, line)
                    else:
                        self._refused(poller, line)
                self._expire(poller)
                while self._named:
                    self._take_names(*self._named.popleft())
                while self._asks and self._pending < MAX_PENDING:
                    self._begin(poller, self._asks.popleft())
        finally:  # an open socket would hang close()
            for line in set(self._lines.values()):
                line.close()

    def _wait_ms(self) -> int:
        first = min((ask.deadline for ask in self._under_way()), default=None)
        if first is None:
            return 1000
        return max(1, min(1000, int((first - self._clock()) * 1000) + 1))

    def _under_way(self) -> Iterator[_Ask]:
        yield from (line.ask for line in self._lines.values())
        for asks in self._naming.values():
            yield from asks

    def _fail(self, ask: _Ask, why: str) -> None:
        self._results.append(HandshakeResult(ask.key, None, why, ask=ask.number))

    def _begin(self, poller: zmq.Poller, ask: _Ask) -> None:
        """Where is it, and may it be there? Then ask, or look its name up first."""
        ask.deadline = ask.deadline or self._clock() + self._timeout
        host = ask.key[1]
        if not ask.addresses and numeric(host) is None:
            self._look_up(ask, host)
            return
        known = [where for text in ask.addresses or [host] if (where := numeric(text)) is not None]
        allowed = [where for where in known if self._trust.allows(where)]
        if allowed:
            self._ask(poller, ask, str(allowed[0]))
        else:
            self._fail(ask, f"{' and '.join(map(str, known[:4]))} is not in kvconn.allow")

    def _look_up(self, ask: _Ask, name: str) -> None:
        if not plain_name(name):
            self._fail(ask, f"cannot connect: not a host name or address: {name!r}")
        elif name in self._naming and len(self._naming[name]) < LIMITS.names_max:
            self._naming[name].append(ask)
        elif name not in self._naming and self._names.ask(name):
            self._naming[name] = [ask]
        else:
            self._fail(ask, f"too many names are being looked up to look up {name!r} as well")

    def _name_found(self, name: str, addresses: list[str], why: str) -> None:
        """On a thread of ``Names``."""
        self._named.append((name, addresses, why))
        self._bell.ring()

    def _take_names(self, name: str, addresses: list[str], why: str) -> None:
        for ask in self._naming.pop(name, ()):
            ask.addresses = addresses
            if addresses:
                self._asks.appendleft(ask)
            else:
                self._fail(ask, f"cannot connect: the name {name!r} leads to no address: {why}")

    def _ask(self, poller: zmq.Poller, ask: _Ask, address: str) -> None:
        ask.sent = self._clock()
        try:
            line = _Line(self._context, ask)
        except zmq.ZMQError as err:
            self._fail(ask, f"no socket: {err}")
            return
        try:
            line.send(address, self._curve)
        except zmq.ZMQError as err:
            line.close()
            self._fail(ask, f"cannot connect: {err}")
            return
        self._pending += 1
        for source in (line.socket, line.monitor):
            self._lines[source] = line
            poller.register(source, zmq.POLLIN)

    def _receive(self, poller: zmq.Poller, line: _Line) -> None:
        try:
            frames = line.socket.recv_multipart(zmq.NOBLOCK)
        except zmq.ZMQError:
            return
        self._finish(poller, line)
        ask, now = line.ask, self._clock()
        if len(frames) != 3 or frames[0] != b"":
            self._fail(ask, f"expected 3 frames, got {len(frames)}")
            return
        theirs = parse_timestamp(frames[2])
        offset = None if theirs is None else theirs - (ask.sent + now) / 2
        self._results.append(HandshakeResult(ask.key, frames[1], "", offset, ask.number))

    def _refused(self, poller: zmq.Poller, line: _Line) -> None:
        try:
            found = refusal(line.monitor.recv_multipart(zmq.NOBLOCK), self._curve is not None)
        except zmq.ZMQError:
            return
        if found is not None:
            line.ask.hint = found.why
        if found is not None and found.final:
            self._finish(poller, line)
            self._fail(line.ask, found.why)

    def _expire(self, poller: zmq.Poller) -> None:
        now = self._clock()
        for line in {line for line in self._lines.values() if line.ask.deadline <= now}:
            self._finish(poller, line)
            hint = f"; {line.ask.hint}" if line.ask.hint else ""
            self._fail(line.ask, f"no answer within {self._timeout:g} s{hint}")
        for name, asks in self._naming.items():  # the name stays until its look-up ends: it is asked for once
            for ask in [ask for ask in asks if ask.deadline <= now]:
                asks.remove(ask)
                self._fail(ask, f"the name {name!r} was not resolved within {self._timeout:g} s")

    def _finish(self, poller: zmq.Poller, line: _Line) -> None:
        for source in (line.socket, line.monitor):
            poller.unregister(source)
            del self._lines[source]
        line.close()
        self._pending -= 1

    # -- the end -------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop the thread, close every socket. Idempotent."""
        if self._stop.is_set():
            return
        self._stop.set()
        self._names.close()
        self._bell.ring()
        self._thread.join(LIMITS.end_thread)
        if not self._thread.is_alive():
            self._bell.close()
            self._context.term()

    def __repr__(self) -> str:
        state = "closed" if self._stop.is_set() else "running"
        return f"HandshakeClient({state} pending={self._pending} naming={len(self._naming)})"
