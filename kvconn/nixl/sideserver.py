"""The handshake channel, server's side: one server per engine.

Rules
1. The server never dies of what it receives: a frame that is not a request, or names a rank that serves nobody, is
   dropped and counted (C9). It answers from memory and holds nothing per client. Who is let in is the gate's decision.
2. What ZMQ does not bound, frames of one message and connections, is bounded by looking at the connections themselves:
   whose is over is :class:`~kvconn.nixl.connections.Connections`'s decision, and it is shut down under ZMQ's hands.
3. With a fleet key it speaks CURVE and nothing else: there is no way down.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping

import msgspec
import zmq

from kvconn.config import LIMITS
from kvconn.errors import ConfigError
from kvconn.nixl.curve import FAILURES, Curve, unasked
from kvconn.nixl.gate import Gate
from kvconn.nixl.names import endpoint, look_up
from kvconn.nixl.wire import MAX_REQUEST, parse_request
from kvconn.trust import Trust, numeric

__all__ = ["HandshakeServer"]

log = logging.getLogger("kvconn.nixl")
_POLL_MS = 100
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
