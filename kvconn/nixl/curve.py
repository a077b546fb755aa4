"""The side channel under CURVE: keys from the fleet's secret, and what libzmq's refusals mean in words.

Rules
1. Two key pairs come out of the secret, one for whoever serves and one for whoever asks. Every engine of the fleet can
   make both, nobody else can make either: a reader speaks only to a server that has the first, and a server's gate lets
   in only who has the second. Each session has fresh keys besides (CURVE), so that a secret lost later opens no traffic
   that was recorded before.
2. Where a connection ends unanswered the next of several keys is tried, after the last the first again: it may not
   have been the key, but a server that was about to go.
3. A refusal that trying again cannot mend ends a handshake at once, in words; others are remembered for the deadline.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import msgspec
import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from kvconn.nixl.gate import BUSY
from kvconn.trust import FleetKey

__all__ = ["CONNECTIONS", "FAILURES", "Curve", "Noted", "Refusal", "Turns", "noted", "refusal"]

#: what monitors are asked for: who did not get through; who is there
FAILURES = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
CONNECTIONS = zmq.EVENT_ACCEPTED | zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED


@dataclass(frozen=True)
class Curve:
    """Both key pairs, 32 bytes each."""

    server_public: bytes
    server_secret: bytes = field(repr=False)
    client_public: bytes
    client_secret: bytes = field(repr=False)

    @classmethod
    def of(cls, key: FleetKey) -> Curve:
        server, client = key.derive("side channel, server"), key.derive("side channel, client")
        return cls(_public(server), server, _public(client), client)

    def serve(self, socket: zmq.Socket[bytes]) -> None:
        """Before ``bind``."""
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = self.server_public, self.server_secret

    def ask(self, socket: zmq.Socket[bytes]) -> None:
        """Before ``connect``."""
        socket.curve_serverkey = self.server_public
        socket.curve_publickey, socket.curve_secretkey = self.client_public, self.client_secret


class Turns:
    """Which of so many keys is tried at one endpoint, and when. Pure; time is an argument, in seconds.

    Between two tries is a rest, and what a connection says then is said of the one that is no more. The rest is a short
    one up to the last key, and grows from there. One key, or none, is tried again and again by the same rule: after
    what libzmq takes for a breach of protocol it does not connect again by itself.
    """

    SHORT: Final = 0.01
    FIRST: Final = 0.1
    LONGEST: Final = 1.0

    def __init__(self, keys: int) -> None:
        self._keys = max(1, keys)
        self._begun = 0
        self._again = 0.0
        self.resting = True

    def begins(self, now: float) -> int | None:
        """Which key to connect with now; None: not yet, or it is being tried."""
        if not self.resting or now < self._again:
            return None
        self.resting = False
        self._begun += 1
        return (self._begun - 1) % self._keys

    def failed(self, now: float) -> bool:
        """True: that was the try of now, its connection is to be given up."""
        if self.resting:
            return False
        rounds, left = divmod(self._begun, self._keys)
        self._again = now + (self.SHORT if left else min(self.LONGEST, self.FIRST * 2 ** min(rounds - 1, 8)))
        self.resting = True
        return True


def _public(secret: bytes) -> bytes:
    return bytes(z85.decode(zmq.curve_public(z85.encode(secret))))


@dataclass(frozen=True)
class Refusal:
    """Why no handshake came about, and at which endpoint. ``final``: trying that again within the deadline is of no
    use."""

    why: str
    final: bool
    where: bytes = b""


class Noted(msgspec.Struct, frozen=True):
    """What a monitor says: descriptors of connections that came and went, or, of a server's, that one ended in its
    handshake, and not because the gate said so. ``where``: the endpoint."""

    where: bytes = b""
    came: int | None = None
    went: int | None = None
    unasked: bool = False


def noted(message: list[bytes]) -> Noted:
    """Of a monitor of a server, or of a client."""
    told = parse_monitor_message(message)
    event, fd, where = told["event"], int(told["value"]), told["endpoint"]
    if event in (zmq.EVENT_ACCEPTED, zmq.EVENT_CONNECTED):
        return Noted(where, came=fd)
    if event & (zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED):
        return Noted(where, went=fd)
    return Noted(where, unasked=bool(event & FAILURES & ~zmq.EVENT_HANDSHAKE_FAILED_AUTH))


def refusal(message: list[bytes], keyed: bool) -> Refusal | None:
    """What a monitor's message (one of FAILURES) says to whoever asked, with a key or without."""
    told = parse_monitor_message(message)
    event, value, where = told["event"], told["value"], told["endpoint"]
    if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        if value == int(BUSY):
            why = "it refuses us for now: too many handshakes from our address (kvconn.handshake_rate)"
            return Refusal(why, True, where)
        why = "it refuses us: our address is not in its kvconn.allow, or our fleet key is not its"
        return Refusal(why, True, where)
    if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
        if keyed:
            return Refusal("it has no fleet key: a stock engine, or one without kvconn.key_file", True, where)
        return Refusal("it wants the fleet's key: set kvconn.key_file here", True, where)
    if event & FAILURES:
        ends = "its fleet key is not ours" if keyed else "it does not speak our protocol"
        return Refusal(f"it ended the handshake; perhaps {ends}", False, where)
    return None
