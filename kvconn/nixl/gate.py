"""Who may shake hands with this engine, and how often. Pure; time is an argument, in seconds.

Rules
1. A connection is judged by its address first (``kvconn.allow``), then by how often that address came, then by its key.
   Nothing of a peer that is refused is read.
2. Requests are counted as well, since one connection may send many.
3. The table of addresses is bounded; the one that was quiet for longest is forgotten. An IPv6 peer is its /64: it may
   choose the rest of its address.
4. What libzmq asks (ZAP, rfc.zeromq.org/spec/27) is answered in every case, an answer it does not understand with a
   refusal: a connection without an answer would stay.
"""

from __future__ import annotations

import hmac
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from kvconn.config import LIMITS
from kvconn.trust import Address, Trust, numeric

__all__ = ["ADMITTED", "BUSY", "REFUSED", "Gate", "RateLimit", "neighbourhood"]

#: status codes of ZAP; a peer of ours turns them into words
ADMITTED: Final = b"200"
REFUSED: Final = b"400"
BUSY: Final = b"500"
#: seconds' worth of the rate that may come at once: a fleet starts all together
BURST: Final = 10.0
ZAP_VERSION: Final = b"1.0"


def neighbourhood(address: Address) -> int:
    """A number for whom this address belongs to: itself, of IPv6 its /64."""
    return int(address) if address.version == 4 else -1 - (int(address) >> 64)


class RateLimit:
    """A bucket of tokens per address, ``rate`` new ones per second, at most ``size`` addresses."""

    def __init__(self, rate: float, size: int = LIMITS.addresses_max) -> None:
        self._rate = rate
        self._full = rate * BURST
        self._size = size
        #: address -> tokens left and when that was; the quiet ones first
        self._buckets: OrderedDict[int, tuple[float, float]] = OrderedDict()

    def take(self, address: Address, now: float) -> bool:
        """One more from this address; False when it came too often."""
        key = neighbourhood(address)
        tokens, since = self._buckets.pop(key, (self._full, now))
        tokens = min(self._full, tokens + max(0.0, now - since) * self._rate)
        self._buckets[key] = (tokens - 1, now) if tokens >= 1 else (tokens, now)
        if len(self._buckets) > self._size:
            self._buckets.popitem(last=False)
        return tokens >= 1

    def __len__(self) -> int:
        return len(self._buckets)


class Gate:
    """Judges connections and requests. ``client_keys``: the public keys that a peer may have; empty: any, or none."""

    def __init__(self, trust: Trust, client_keys: Sequence[bytes] = ()) -> None:
        self._trust = trust
        self._client_keys = tuple(client_keys)
        self._connections = RateLimit(trust.rate)
        self._requests = RateLimit(trust.rate)

    def connects(self, address: str, mechanism: bytes, credentials: Sequence[bytes], now: float) -> tuple[bytes, str]:
        """A status code and, unless it is ADMITTED, why."""
        where = numeric(address)
        if where is None or not self._trust.allows(where):
            return REFUSED, f"{address} is not in kvconn.allow"
        if not self._connections.take(where, now):
            return BUSY, f"{address} shakes hands more than {self._trust.rate:g} times a second"
        if not self._client_keys:
            return ADMITTED, ""
        given = credentials[0] if mechanism == b"CURVE" and credentials else b""
        if not any(hmac.compare_digest(given, one) for one in self._client_keys):
            return REFUSED, f"{address} has another key"
        return ADMITTED, ""

    def asks(self, address: str, now: float) -> bool:
        """May this request be answered?"""
        where = numeric(address)
        return where is not None and self._requests.take(where, now)

    def zap(self, frames: Sequence[bytes], now: float) -> tuple[list[bytes], str]:
        """The reply to one question of libzmq's, as it comes to a ROUTER, and why the peer is refused.

        ``[sender, b"", version, request id, domain, address, identity, mechanism, credentials ...]``. The list is empty
        for what is no question.
        """
        if len(frames) < 4 or frames[1] != b"":
            return [], "not a ZAP request"
        code, why = REFUSED, "a ZAP request that cannot be read"
        if len(frames) >= 8 and frames[2] == ZAP_VERSION:
            address = frames[5].decode("ascii", "replace")
            code, why = self.connects(address, frames[7], frames[8:], now)
        return [frames[0], b"", ZAP_VERSION, frames[3], code, why.encode(), b"", b""], why
