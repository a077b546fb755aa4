"""A real server and a real client on loopback, sent what is no message: neither thread ends, and good ones are served.

Rules
1. After every case a good request on another connection is answered; after every hostile answer the client has a
   result, good or bad, within its deadline.
"""

from __future__ import annotations

import contextlib
import random
import socket
import time

import msgspec
import zmq

from kvconn.nixl.sideclient import HandshakeClient
from kvconn.nixl.sideserver import HandshakeServer
from kvconn.nixl.wire import encode_request
from kvconn.params import PeerKey
from kvconn.trust import FleetKey, Trust
from tests.fuzz.mutate import mutated_bytes

__all__ = ["Live"]

HOST = "127.0.0.1"
PAYLOAD = b"payload"
KEY = Trust(FleetKey(b"a fleet's secret of 32 bytes ..."), rate=1e9)
#: ZMTP 3.1, NULL, then a READY command of a DEALER and one message
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01NULL" + bytes(16) + b"\x00" + bytes(31)
READY = b"\x04\x1c\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
MESSAGE = b"\x01\x00\x00" + bytes([len(encode_request(0, 0))]) + encode_request(0, 0)


class Live:
    """One server without and one with a key, one hostile peer, one client. ``one`` runs a case."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._servers = [HandshakeServer(HOST, 0, {(0, 0): PAYLOAD}, trust) for trust in (Trust(rate=1e9), KEY)]
        self._ports = [
            int(server._socket.getsockopt(zmq.LAST_ENDPOINT).rpartition(b":")[2].rstrip(b"\0"))
            for server in self._servers
        ]
        self._hostile = self._context.socket(zmq.ROUTER)
        self._hostile_port = self._hostile.bind_to_random_port(f"tcp://{HOST}")
        self._good, self._bad = self._dealer(), self._dealer()
        self._client = HandshakeClient(20.0)
        self._keyed = HandshakeClient(20.0, trust=KEY)

    def _dealer(self) -> zmq.Socket[bytes]:
        raw = self._context.socket(zmq.DEALER)
        raw.setsockopt(zmq.LINGER, 0)
        raw.connect(f"tcp://{HOST}:{self._ports[0]}")
        return raw

    def one(self, draw: random.Random) -> bool:
        kind = draw.randrange(10)
        if kind < 5:
            self._frames(draw)
        elif kind < 7:
            self._bytes(draw)
        else:
            self._answers(draw)
        return False

    def _frames(self, draw: random.Random) -> None:
        """Whole messages of the wrong frames."""
        frames = [b"", encode_request(0, 1)]
        for _ in range(draw.randrange(3)):
            frames.insert(draw.randrange(len(frames) + 1), draw.randbytes(draw.choice((0, 1, 200))))
        self._bad.send_multipart([mutated_bytes(draw, frame)[:256] for frame in frames])
        self._served()

    def _served(self) -> None:
        self._good.send_multipart([b"", encode_request(0, 0)])
        assert self._good.poll(20_000), "a good request was not answered"
        assert self._good.recv_multipart()[1] == PAYLOAD
        while self._bad.poll(0):
            self._bad.recv_multipart()

    def _bytes(self, draw: random.Random) -> None:
        """A connection that says something like ZMTP; half of them get through the handshake first."""
        hello, said = GREETING + READY, MESSAGE * draw.choice((1, 3))
        if draw.random() < 0.5:
            hello = mutated_bytes(draw, hello)
        else:
            said = mutated_bytes(draw, said)
        index = draw.randrange(2)
        with socket.create_connection((HOST, self._ports[index]), timeout=20) as raw, contextlib.suppress(OSError):
            raw.sendall(hello)
            raw.settimeout(0.005)
            with contextlib.suppress(TimeoutError):  # of a bad hello it may wait for more
                raw.recv(4096)
            raw.sendall(said)
        if index:
            assert _asked(self._keyed, self._ports[1]) == PAYLOAD
        else:
            self._served()

    def _answers(self, draw: random.Random) -> None:
        """A peer's answer to our client."""
        self._client.start(PeerKey("P", HOST, self._hostile_port))
        assert self._hostile.poll(20_000)
        identity = self._hostile.recv_multipart()[0]
        frames = [b"", mutated_bytes(draw, PAYLOAD * draw.choice((1, 1, 1000))), msgspec.msgpack.encode(draw.random())]
        if draw.random() < 0.5:
            frames[draw.randrange(3)] = draw.randbytes(9)
        if draw.random() < 0.3:
            frames = frames[: draw.randrange(4)] + [b"x"] * draw.randrange(3)
        self._hostile.send_multipart([identity, *(frames or [b""])])
        _result(self._client)

    def close(self) -> None:
        ours = (*self._servers, self._client, self._keyed)
        ended = [repr(one) for one in ours if not one._thread.is_alive()]
        for one in ours:
            one.close()
        for raw in (self._good, self._bad, self._hostile):
            raw.close(0)
        self._context.term()
        assert not ended, f"threads have ended: {ended}"


def _asked(client: HandshakeClient, port: int) -> bytes | None:
    client.start(PeerKey("P", HOST, port))
    return _result(client)


def _result(client: HandshakeClient) -> bytes | None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and client._thread.is_alive():
        for result in client.results():
            return result.payload
        time.sleep(20e-6)
    raise AssertionError(f"no result: {client!r}")
