"""``kvconn plan --from``: a running producer's geometry, asked over its side channel as a reader would.

Rules
1. Only ranks that the peer itself, or the operator, says it has are asked: a stock peer's listener dies of others.
2. Whatever the peer answers is a PeerError or a :class:`~kvconn.nixl.survey.Peer`; every wait ends with the client's.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Final

from kvconn.config import LIMITS
from kvconn.errors import ConfigError, PeerError
from kvconn.geometry import Place, Side
from kvconn.nixl.routes import MAX_PP, MAX_TP
from kvconn.nixl.shape import Shape
from kvconn.nixl.sideclient import HandshakeClient
from kvconn.nixl.survey import Peer
from kvconn.nixl.wire import AgentMetadata, WireCodec
from kvconn.params import PeerKey
from kvconn.trust import Trust, read_key

__all__ = ["address_of", "peer_at"]

FIRST: Final = Place(0, 0)
#: seconds between two looks at the client's results
LOOK: Final = 0.01


def address_of(given: str) -> tuple[str, int]:
    """``host:port``. Raises ConfigError."""
    host, colon, port = given.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not (port.isascii() and port.isdigit() and 0 < int(port[:6]) < 65536):
        raise ConfigError(f"--from: expected host:port, got {given!r}")
    return host, int(port)


def peer_at(address: tuple[str, int], described: Shape | None, key_file: str | None) -> Peer:
    """Ask every rank of the engine there. ``described``: sizes of a peer that says none (stock).

    Raises ConfigError, PeerError.
    """
    client = HandshakeClient(LIMITS.handshake, trust=Trust(key=read_key(key_file) if key_file is not None else None))
    try:
        return _peer(client, PeerKey("", *address), described)
    finally:
        client.close()


def _peer(client: HandshakeClient, key: PeerKey, described: Shape | None) -> Peer:
    codec = WireCodec()
    name = f"{key.host}:{key.port}"
    payload = codec.decode_payload(_ask(client, key, [FIRST], name)[FIRST], name)
    first = codec.decode_metadata(payload, name)
    factors = dict(payload.kvconn.factors) if payload.kvconn is not None else {}
    side = _side(first, factors, described, name)
    places = [Place(pp, tp) for pp in range(side.pp) for tp in range(side.tp)]
    frames = _ask(client, key, places, name)
    ranks = {place: codec.decode_metadata(codec.decode_payload(frames[place], name), name) for place in places}
    others = {metadata.engine_id for metadata in ranks.values()} - {first.engine_id}
    if others:
        raise PeerError(name, "handshake", f"ranks of {len(others) + 1} engines answered; it restarted, ask again")
    return Peer(side, ranks, factors)


def _side(first: AgentMetadata, factors: dict[str, str], described: Shape | None, name: str) -> Side:
    """The sizes the peer says, else those of the description."""
    ours = first.kvconn
    if ours is None and described is None:
        raise ConfigError(f"--p: {name} does not say how many ranks it has (it is not kvconn); describe it too")
    heads = factors.get("kv heads", "")
    latent = factors.get("packing") == "latent"
    if ours is None or not (heads.isascii() and heads.isdigit() and len(heads) < 6):
        if described is None:
            raise ConfigError(f"--p: {name} does not say how many KV heads it has; describe it too")
        side = described.side
    else:
        side = Side(1 if latent else int(heads), ours.tp, ours.pp, first.dcp_size, ours.interleave)
    if not (1 <= side.tp <= MAX_TP and 1 <= side.pp <= MAX_PP):
        raise PeerError(name, "handshake", f"impossible sizes: {side}")
    return side


def _ask(client: HandshakeClient, key: PeerKey, places: Iterable[Place], name: str) -> dict[Place, bytes]:
    """Their payloads. Raises PeerError where one does not answer."""
    waiting = {client.start(key, place.pp, place.tp): place for place in places}
    found: dict[Place, bytes] = {}
    end = time.monotonic() + 2 * LIMITS.handshake
    while waiting and time.monotonic() < end:
        for result in client.results():
            place = waiting.pop(result.ask, None)
            if place is not None and result.payload is None:
                raise PeerError(name, "handshake", f"pp{place.pp} tp{place.tp}: {result.why}")
            if place is not None and result.payload is not None:
                found[place] = result.payload
        time.sleep(LOOK)
    if waiting:
        raise PeerError(name, "handshake", f"{len(waiting)} ranks did not answer")
    return found
