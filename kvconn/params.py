"""``kv_transfer_params``: parsed once, bounded, frozen.

Rules
1. A client's object becomes a :class:`RemoteRef` or a :class:`RequestError` that names the field; nothing else
   comes out of this module, and nothing past it sees the client's dict (C9).
2. Unknown keys are ignored: routers and other connectors add their own. Ours sit under ``kvconn``.
3. The keys are vLLM's (pull mode), so that a stock engine can be on the other side.
"""

from __future__ import annotations

import math
import re
import secrets
import string
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import msgspec

from kvconn.base import BlockIds
from kvconn.errors import RequestError

__all__ = [
    "KvconnRef",
    "PeerKey",
    "RemoteRef",
    "fresh_transfer_id",
    "parse_remote",
    "readers_asked",
    "to_params",
    "wants_remote_decode",
]

MAX_BLOCKS = 1 << 20
MAX_BLOCK_ID = (1 << 31) - 1
MAX_GROUPS = 64
MAX_STRING = 512
MAX_TOKENS = 1 << 27
MAX_SIZE = 4096
_WORD = re.compile(r"[0-9a-f]{16}")
_BASE62 = string.digits + string.ascii_letters


class KvconnRef(msgspec.Struct, frozen=True, omit_defaults=True):
    """What kvconn adds to a reference.

    ``slot`` and ``word`` are the producer's fence for it, ``seal`` its HMAC in hex, ``signature`` the HMAC in hex with
    the fleet's key (kvconn.nixl.fence), ``deadline`` the first end of its lease on the producer's perf_counter, in
    seconds.
    """

    slot: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)] | None = None
    word: Annotated[int, msgspec.Meta(gt=0)] | None = None
    seal: Annotated[str, msgspec.Meta(max_length=64)] | None = None
    deadline: float | None = None
    signature: Annotated[str, msgspec.Meta(max_length=64)] | None = None


class PeerKey(NamedTuple):
    """Another engine as a reference names it: id, address of its side channel, and sizes.

    The sizes are in the key so that a wrong one costs the requests that name it, and nobody who names the right one.
    """

    engine: str
    host: str
    port: int
    tp: int = 1
    pp: int = 1
    dcp: int = 1


class RemoteRef(msgspec.Struct, frozen=True):
    """Blocks that a producer holds for one reader. ``block_ids`` per cache group cover ``num_tokens`` tokens."""

    engine_id: str
    transfer_id: str
    host: str
    port: int
    block_ids: BlockIds
    num_tokens: int
    tp_size: int = 1
    pp_size: int = 1
    dcp_size: int = 1
    kvconn: KvconnRef | None = None

    @property
    def peer(self) -> PeerKey:
        """Whom it is of."""
        return PeerKey(self.engine_id, self.host, self.port, self.tp_size, self.pp_size, self.dcp_size)

    def __repr__(self) -> str:
        blocks = "+".join(str(len(g)) for g in self.block_ids)
        return f"RemoteRef({self.transfer_id} of {peer_name(self.peer)} blocks={blocks})"


def peer_name(peer: PeerKey) -> str:
    """How logs, errors and ``explain`` call the peer of this key."""
    return f"{peer.engine}@{peer.host}:{peer.port}"


def fresh_transfer_id() -> str:
    """An opaque, unguessable id: 22 characters of base62, about 131 bits."""
    return "".join(secrets.choice(_BASE62) for _ in range(22))


def wants_remote_decode(params: Mapping[str, Any] | None) -> bool:
    """True when the router asks this engine to keep the prompt's blocks for a reader."""
    return isinstance(params, Mapping) and params.get("do_remote_decode") is True


def parse_remote(params: Mapping[str, Any] | None, block_size: int) -> RemoteRef | None:
    """The reference a consumer was handed, or None when the request has none.

    ``block_size`` is ours, for a reference that does not say how many tokens it is of; whether its blocks hold them is
    known after the handshake. Raises RequestError naming the first field that is missing, of the wrong type or out of
    bounds.
    """
    if not isinstance(params, Mapping) or params.get("do_remote_prefill") is not True:
        return None
    block_ids = _block_ids(params.get("remote_block_ids"))
    longest = max(len(group) for group in block_ids)
    num_tokens = _int(params, "remote_num_tokens", 1, MAX_TOKENS, default=longest * block_size)
    return RemoteRef(
        engine_id=_text(params, "remote_engine_id"),
        transfer_id=_text(params, "remote_request_id"),
        host=_text(params, "remote_host"),
        port=_int(params, "remote_port", 1, 65535),
        block_ids=block_ids,
        num_tokens=num_tokens,
        tp_size=_int(params, "tp_size", 1, MAX_SIZE, default=1),
        pp_size=_int(params, "pp_size", 1, MAX_SIZE, default=1),
        dcp_size=_int(params, "dcp_size", 1, MAX_SIZE, default=1),
        kvconn=_kvconn(params.get("kvconn")),
    )


def to_params(ref: RemoteRef) -> dict[str, Any]:
    """The ``kv_transfer_params`` a producer returns for ``ref``; :func:`parse_remote` reads them back."""
    params: dict[str, Any] = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [list(group) for group in ref.block_ids],
        "remote_engine_id": ref.engine_id,
        "remote_request_id": ref.transfer_id,
        "remote_host": ref.host,
        "remote_port": ref.port,
        "remote_num_tokens": ref.num_tokens,
        "remote_blocks_expiry_time": None,
        "tp_size": ref.tp_size,
        "pp_size": ref.pp_size,
        "dcp_size": ref.dcp_size,
        "transfer_mode": "pull",
    }
    if ref.kvconn is not None:
        params["kvconn"] = msgspec.to_builtins(ref.kvconn)
        if ref.kvconn.word is not None:  # as text: routers that read JSON numbers as doubles would round it
            params["kvconn"]["word"] = f"{ref.kvconn.word:016x}"
    return params


def _block_ids(value: object) -> BlockIds:
    field = "kv_transfer_params.remote_block_ids"
    if not isinstance(value, Sequence) or isinstance(value, str | bytes) or not 1 <= len(value) <= MAX_GROUPS:
        raise RequestError(field, f"1..{MAX_GROUPS} lists of block ids", value)
    groups: list[tuple[int, ...]] = []
    for index, group in enumerate(value):
        if not isinstance(group, Sequence) or isinstance(group, str | bytes) or len(group) > MAX_BLOCKS:
            raise RequestError(f"{field}[{index}]", f"a list of at most {MAX_BLOCKS} block ids", group)
        for block in group:
            if type(block) is not int or not 0 <= block <= MAX_BLOCK_ID:
                raise RequestError(f"{field}[{index}]", f"block ids 0..{MAX_BLOCK_ID}", block)
        groups.append(tuple(group))
    if not any(groups):
        raise RequestError(field, "at least one block", value)
    return tuple(groups)


def _text(params: Mapping[str, Any], key: str) -> str:
    value = params.get(key)
    if not isinstance(value, str) or not 1 <= len(value) <= MAX_STRING or not value.isprintable():
        raise RequestError(f"kv_transfer_params.{key}", f"a printable string of 1..{MAX_STRING} characters", value)
    return value


def _int(params: Mapping[str, Any], key: str, low: int, high: int, default: int | None = None) -> int:
    value = params.get(key)
    if value is None and default is not None:
        return default
    if type(value) is not int or not low <= value <= high:
        raise RequestError(f"kv_transfer_params.{key}", f"an integer {low}..{high}", value)
    return value


def readers_asked(params: Mapping[str, Any] | None) -> int:
    """``kvconn.readers`` of the router's request to the producer: how many engines will read. Default 1.

    Raises RequestError.
    """
    ours = params.get("kvconn") if isinstance(params, Mapping) else None
    if ours is None:
        return 1
    if not isinstance(ours, Mapping):
        raise RequestError("kv_transfer_params.kvconn", "an object", ours)
    value = ours.get("readers", 1)
    if type(value) is not int or not 1 <= value <= MAX_SIZE:
        raise RequestError("kv_transfer_params.kvconn.readers", f"an integer 1..{MAX_SIZE}", value)
    return value


def _kvconn(value: object) -> KvconnRef | None:
    if value is None:
        return None
    if isinstance(value, Mapping) and value.get("word") is not None:
        word = value["word"]
        if not isinstance(word, str) or not _WORD.fullmatch(word):
            raise RequestError("kv_transfer_params.kvconn.word", "16 hexadecimal digits", word)
        value = {**value, "word": int(word, 16)}
    try:
        ref = msgspec.convert(value, KvconnRef, strict=True)
    except (msgspec.ValidationError, UnicodeError) as err:  # JSON may hold lone surrogates
        raise RequestError("kv_transfer_params.kvconn", str(err), value) from None
    for name, text in (("seal", ref.seal), ("signature", ref.signature)):
        if text is not None and not text.isascii():
            raise RequestError(f"kv_transfer_params.kvconn.{name}", "hexadecimal digits", text)
    if ref.deadline is not None and not math.isfinite(ref.deadline):
        raise RequestError("kv_transfer_params.kvconn.deadline", "a finite number of seconds", ref.deadline)
    return ref
