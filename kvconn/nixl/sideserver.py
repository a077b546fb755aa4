"""The handshake channel, server's side: one server per engine.

Rules
1. The server never dies of what it receives: a frame that is not a request, or names a rank that serves nobody, is
   dropped and counted (C9). It answers from memory and holds nothing per client. Who is let in is the gate's decision.
2. What ZMQ does not bound, frames of one message and connections, is bounded by looking at the connections themselves:
   whose is over is :class:`~kvconn.nixl.connections.Connections`'s decision, and it is shut down under ZMQ's hands.
3. With a fleet key it speaks CURVE and nothing else: there is no way down.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Mapping

import msgspec
import zmq

from kvconn.config import LIMITS
from kvconn.errors import ConfigError
from kvconn.nixl.connections import Connections
from kvconn.nixl.curve import CONNECTIONS, FAILURES, Curve, noted
from kvconn.nixl.gate import Gate
from kvconn.nixl.names import endpoint, look_up
from kvconn.nixl.wire import MAX_REQUEST, parse_request
from kvconn.transport import blame
from kvconn.trust import Trust, numeric

__all__ = ["HandshakeServer"]

log = logging.getLogger("kvconn.nixl")
_POLL_MS = 100
#: seconds between two looks at the connections: what one may send meanwhile is what ZMQ's one thread can read
_SWEEP = 0.1
_DOMAIN = b"kvconn"
#: answers that one connection may leave unread; more are dropped
UNREAD = 4
#: bytes: CURVE's own commands are longer than any request
_CURVE_ROOM = 1024


class HandshakeServer:
    """Serves this engine's payloads on ``tcp://host:port``, to whom ``trust`` allows.

    Binds in the constructor; raises ConfigError naming the port when it is taken, TransportError where the system gives
    no thread or socket for it.
    """

    def __init__(
        self, host: str, port: int, payloads: Mapping[tuple[int, int], bytes], trust: Trust | None = None
    ) -> None:
        self._payloads = dict(payloads)
        self.dropped = 0
        self.refused = 0
        trust = trust or Trust()
        curves = [Curve.of(key) for key in trust.key.accepted] if trust.key is not None else []
        curve = curves[0] if curves else None
        self._gate = Gate(trust, [one.client_public for one in curves])
        self._told: dict[str, float] = {}
        self._next_sweep = 0.0
        self._unasked = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvconn-side-channel", daemon=True)
        self._context = zmq.Context()
        try:
            self._open(curve)
            self._connections = Connections(self._bind(host, port))
            self._thread.start()
        except ConfigError:
            self._context.destroy(0)
            raise
        except (RuntimeError, zmq.ZMQError) as err:
            self._context.destroy(0)
            raise blame.without("the side channel's server", err) from err

    def _open(self, curve: Curve | None) -> None:
        """Its sockets. Raises ZMQError."""
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
        self._monitor = self._watch()

    def _watch(self) -> zmq.Socket[bytes]:
        """A monitor that forgets nothing, however many connections come while we look elsewhere."""
        self._socket.monitor("inproc://kvconn.monitor", FAILURES | CONNECTIONS)
        monitor = self._context.socket(zmq.PAIR)
        monitor.setsockopt(zmq.RCVHWM, 0)
        monitor.connect("inproc://kvconn.monitor")
        return monitor

    def _bind(self, host: str, port: int) -> int:
        """The port that it is then."""
        try:
            address = host if host == "*" or numeric(host) is not None else look_up(host)[0]
            self._socket.setsockopt(zmq.IPV6, int(":" in address))
            self._socket.bind(endpoint(address, port))
        except (OSError, zmq.ZMQError) as err:
            raise ConfigError(
                f"side channel: cannot listen on {host}:{port}: {err}; is another engine on this port? "
                "set VLLM_NIXL_SIDE_CHANNEL_HOST / VLLM_NIXL_SIDE_CHANNEL_PORT"
            ) from None
        return int(self._socket.get_string(zmq.LAST_ENDPOINT).rpartition(":")[2])

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
                    with contextlib.suppress(zmq.Again):  # that socket's alone: the others are ready
                        work[socket]()
                self._sweep(time.monotonic())
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
        """A connection came or went. Which side sees first that they speak different protocols is chance."""
        told = noted(self._monitor.recv_multipart(zmq.NOBLOCK))
        if told.unasked:  # and the next that we hear is which connection that was
            self._unasked = True
        if told.went is not None:
            if not self._connections.ended(told.went) and self._unasked:
                self._refuse("keys", "a connection did not get through its handshake: a stock engine, or another key")
            self._unasked = False
        if told.came is not None and (why := self._connections.accepted(told.came, time.monotonic())):
            self._refuse("connections", why)

    def _sweep(self, now: float) -> None:
        if now >= self._next_sweep:
            self._next_sweep = now + _SWEEP
            for why in self._connections.sweep(now):
                self._refuse("connections", why)

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
        with contextlib.suppress(zmq.ZMQError):  # a libzmq that does not say: it is idle for us, and comes again
            self._connections.asked(int(body.get(zmq.SRCFD)), time.monotonic())
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
        if not self._thread.is_alive():
            self._context.term()

    def __repr__(self) -> str:
        state = "listening" if self._thread.is_alive() else "closed"
        counts = f"payloads={len(self._payloads)} dropped={self.dropped} refused={self.refused}"
        return f"HandshakeServer({state} {counts})"
