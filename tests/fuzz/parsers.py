"""What reads hostile input and touches nothing: each target makes one bad input and asks one parser.

Rules
1. A target returns whether the input was taken. It raises when anything but the parser's own error came out, and when
   what came out is not within the bounds that the parser promises.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from kvconn.config import (
    FsTierSettings,
    KVTransferConfig,
    ModuleTierSettings,
    MultiSettings,
    NixlSettings,
    OffloadSettings,
    network,
    parse_child,
    parse_extra,
    parse_kv_transfer_config,
    parse_secondary_tiers,
)
from kvconn.engine.trace import MAX_LENGTH, read_trace, to_requests
from kvconn.errors import ConfigError, RequestError
from kvconn.nixl.fence import Fence, check_signature, seal, seal_fits, sign
from kvconn.nixl.gate import ADMITTED, BUSY, REFUSED, Gate
from kvconn.nixl.leases import SendLeases
from kvconn.nixl.names import endpoint, plain_name
from kvconn.nixl.wire import (
    MAX_HEARTBEATS,
    MAX_READERS,
    MAX_TRANSFER_ID,
    Done,
    Heartbeat,
    encode_request,
    parse_notification,
    parse_request,
    parse_timestamp,
)
from kvconn.params import (
    MAX_BLOCK_ID,
    MAX_SIZE,
    KvconnRef,
    RemoteRef,
    parse_remote,
    readers_asked,
    to_params,
    wants_remote_decode,
)
from kvconn.transport.blob import damage
from kvconn.trust import FleetKey, Trust, load_trust, numeric, read_key
from tests.fuzz.mutate import TEXTS, junk, mutated, mutated_bytes
from tests.fuzz.ranks import connections, ranks

__all__ = ["PARSERS"]

KEY = FleetKey(b"a fleet's secret of 32 bytes ...")
SEAL_KEY = b"k" * 32
PROMPT = b"p" * 32


def _holds(condition: bool, what: object) -> None:
    if not condition:
        raise AssertionError(what)


def requests(draw: random.Random) -> bool:
    """What a reader asks a side channel."""
    good = encode_request(draw.choice((0, 1, 1 << 40)), draw.choice((0, 7, -1)))
    body = mutated_bytes(draw, good) if draw.random() < 0.7 else msgspec.msgpack.encode(junk(draw, raw=True))
    found = parse_request(body)
    assert found is None or (len(found) == 2 and all(type(n) is int for n in found))
    stamp = parse_timestamp(mutated_bytes(draw, msgspec.msgpack.encode(draw.random())))
    assert stamp is None or abs(stamp) <= 1.8e308
    return found is not None


def gate(draw: random.Random) -> bool:
    """What libzmq asks about a connection, with whatever a peer had in it."""
    frames = [b"s", b"", b"1.0", b"7", b"kvconn", b"127.0.0.1", b"", b"CURVE", b"k" * 32]
    for _ in range(draw.randrange(3)):
        frames[draw.randrange(len(frames))] = draw.randbytes(draw.choice((0, 1, 32, 300)))
    frames = frames[: draw.choice((9, 9, 9, 8, 4, 3, 0))]
    reply, why = GATE.zap(frames, 0.0)
    assert not reply or (len(reply) == 8 and reply[4] in (ADMITTED, REFUSED, BUSY))
    assert (reply[4:5] == [ADMITTED]) == (not why)
    GATE.asks(draw.choice(TEXTS), 0.0)
    return not why


GATE = Gate(Trust(allow=(network("127.0.0.0/8"),), rate=1e9), [b"k" * 32])


def notifications(draw: random.Random) -> bool:
    """What peers say over NIXL, into leases that then end."""
    good = draw.choice((b"abcdefghijklmnopqrstuv:1", b"t:2", b"HB:a,b,t", b"HB:", b"t:4096"))
    message = mutated_bytes(draw, good) if draw.random() < 0.9 else draw.randbytes(draw.choice((0, 5, 2000)))
    leases = SendLeases(1.0, early_max=4)
    leases.track("r", 1, "t", 1.0, readers=draw.choice((1, 2)))
    found = parse_notification(message)
    if isinstance(found, Done):
        assert 1 <= len(found.transfer_id) <= MAX_TRANSFER_ID and 1 <= found.readers <= MAX_READERS
        for agent in ("a", "b"):
            leases.notified(found.transfer_id, agent, found.readers, 0.0)
    elif isinstance(found, Heartbeat):
        ids = found.transfer_ids
        assert len(ids) <= MAX_HEARTBEATS + 1 and all(len(one) <= MAX_TRANSFER_ID for one in ids)
        leases.heartbeat(ids, 0.5)
    leases.expire(100.0)
    assert len(leases) == 0 and "early=0" in repr(leases)
    return found is not None


def _reference() -> RemoteRef:
    ref = RemoteRef("P", "t" * 22, "10.0.0.1", 5600, ((1, 2, 3), (7,)), 48, kvconn=KvconnRef(4, 99, None, 1.5))
    sealed = seal(SEAL_KEY, ref, Fence(4, 99), PROMPT)
    ref = msgspec.structs.replace(ref, kvconn=KvconnRef(4, 99, sealed, 1.5))
    return msgspec.structs.replace(ref, kvconn=KvconnRef(4, 99, sealed, 1.5, sign(KEY, ref)))


REF = _reference()
PARAMS = to_params(REF)


def params(draw: random.Random) -> bool:
    """A client's parameters: wrong, or sealed and signed and then changed."""
    given = mutated(draw, PARAMS) if draw.random() < 0.9 else junk(draw, 3)
    if isinstance(given, dict) and draw.random() < 0.5:
        given = {**given, "do_remote_prefill": True}
    wants_remote_decode(given)
    with contextlib.suppress(RequestError):
        assert 1 <= readers_asked(given) <= MAX_SIZE
    try:
        ref = parse_remote(given, draw.choice((1, 16, 1024)))
        if ref is None:
            return False
        assert all(0 <= b <= MAX_BLOCK_ID for group in ref.block_ids for b in group) and 1 <= ref.port <= 65535
        if seal_fits(SEAL_KEY, ref, PROMPT):
            same = {"engine_id": REF.engine_id, "kvconn": REF.kvconn, "tp_size": 1, "pp_size": 1, "dcp_size": 1}
            assert msgspec.structs.replace(ref, **same) == REF, given
        check_signature(KEY, ref)
    except RequestError as err:
        _holds(len(str(err)) < 2000, err)
        return False
    assert ref == REF, given
    return True


ROWS = [
    {"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [1, 2]},
    {"timestamp": 27, "input_length": 512, "output_length": 1, "hash_ids": [1]},
]
SHM = "/dev/shm"
SCRATCH = tempfile.TemporaryDirectory(prefix="kvconn-fuzz-", dir=SHM if os.path.isdir(SHM) else None)
FILE = Path(SCRATCH.name) / "input"


def traces(draw: random.Random) -> bool:
    """A trace file, from bytes that are no text to rows that are nearly right."""
    if draw.random() < 0.5:
        data = mutated_bytes(draw, b"\n".join(msgspec.json.encode(row) for row in ROWS))
    else:
        data = b"\n".join(_json(mutated(draw, row)) for row in ROWS)
    FILE.write_bytes(data)
    try:
        rows = read_trace(FILE)
        assert all(1 <= row.input_length <= MAX_LENGTH for row in rows)
        if sum(row.input_length + row.output_length for row in rows) < 2_000:
            to_requests(rows, scale=draw.choice((1, 2, 3)), block_size=16, vocab_size=512)
    except ConfigError as err:
        _holds(len(err.problems) <= 8, err)
        return False
    return True


def _json(value: Any) -> bytes:
    try:
        return msgspec.json.encode(value)
    except (UnicodeEncodeError, OverflowError):  # a lone surrogate or a huge number, which JSON text can hold
        return json.dumps(value).encode()


CONFIG: dict[str, Any] = {
    "kv_connector": "MultiConnector", "kv_role": "kv_both", "engine_id": "P", "kv_load_failure_policy": "fail",
    "kv_connector_extra_config": {"connectors": [
        {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kvconn": {"quorum": 1}, "kv_connector_extra_config": {
            "backends": ["UCX"], "num_threads": 4, "kv_lease_duration": 30, "enforce_handshake_compat": True,
            "kvconn": {"handshake": 10.0, "progress": "pump", "unfenced": "refuse", "allow": ["10.0.0.0/8", "fd00::/8"],
                       "require_auth": False, "handshake_rate": 5, "quarantine_max": 7}}},
        {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": {
            "cpu_bytes_to_use": 1 << 20, "spec_name": "TieringOffloadingSpec", "kvconn": {"hold": True},
            "secondary_tiers": [{"type": "fs", "root_dir": "/tmp/x", "max_bytes": 5},
                                {"type": "C", "module_path": "m", "settings": {}}]}},
    ]},
}  # fmt: skip
NO_CONFIG = (FsTierSettings, ModuleTierSettings)


def config(draw: random.Random) -> bool:
    """An operator's configuration, all of it, as text and as an object."""
    given = mutated(draw, CONFIG)
    raw: Any = given
    if draw.random() < 0.3:
        raw = mutated_bytes(draw, _json(given))
    try:
        _settings(parse_kv_transfer_config(raw))
    except ConfigError as err:
        _holds(all(problem.startswith("kv_transfer_config") for problem in err.problems), err)
        return False
    return True


def _settings(parsed: KVTransferConfig) -> None:
    for child in parse_extra(MultiSettings, parsed).connectors:
        transfer = parse_child(child, "kv_transfer_config.connectors").kv_transfer
        if transfer.kv_connector == "NixlConnector":
            settings = parse_extra(NixlSettings, transfer).kvconn
            load_trust(msgspec.structs.replace(settings, key_file=None))
        else:
            parse_secondary_tiers(parse_extra(OffloadSettings, transfer), "kv_transfer_config.secondary_tiers")


def keys(draw: random.Random) -> bool:
    """A key file's content, mode and name."""
    FILE.write_bytes(
        mutated_bytes(draw, (b"s" * draw.choice((0, 31, 32, 64, 4096, 5000)) + b"\n") * draw.choice((1, 2)))
    )
    FILE.chmod(draw.choice((0o600, 0o600, 0o400, 0o644, 0o660)))
    name = str(FILE) if draw.random() < 0.8 else draw.choice(TEXTS)
    try:
        return len(read_key(name).fingerprint) == 8
    except ConfigError as err:
        _holds("sssss" not in str(err), err)
        return False
    finally:
        FILE.chmod(0o600)


def hosts(draw: random.Random) -> bool:
    """A host out of a client's parameters: whatever ZMQ would be given is an address and nothing else."""
    good = draw.choice(("10.0.0.1", "fd00::1", "[fd00::1]", "host.example", "fe80::1%eth0", "::ffff:10.0.0.1", "a;b"))
    text = mutated(draw, good)
    text = text if isinstance(text, str) else str(text)
    where = numeric(text)
    if where is not None:
        named = endpoint(str(where), 5)
        assert named.startswith("tcp://") and not set(named[6:]) & set(";/\n\0 ,*"), named
        Trust(allow=(network("10.0.0.0/8"),)).allows(where)
    elif plain_name(text):
        assert text.isascii() and not set(text) & set(":;/%[]\n\0 ,*")
    with contextlib.suppress(ValueError):
        network(text)
    return where is not None


def _field(name: bytes, data: bytes) -> bytes:
    return name + len(data).to_bytes(8, "little") + data + b"|"


def _number(name: bytes, value: int, size: int = 8) -> bytes:
    return _field(name, value.to_bytes(size, "little"))


BLOB = b"nixlSerDes|" + b"".join((
    _field(b"Agent", b"name"), _number(b"Conns", 1), _field(b"t", b"UCX"), _field(b"c", b"address"),
    _field(b"", b"MemSection"), _number(b"nixlSecElms", 1), _field(b"bknd", b"UCX"),
    _field(b"nixlDList", b"nixlSDList"),
    _number(b"t", 0, 4), _number(b"n", 2), _field(b"", bytes(35)), _field(b"", bytes(35)),
))  # fmt: skip
assert damage(BLOB) is None, damage(BLOB)


def blobs(draw: random.Random) -> bool:
    """NIXL's metadata of a peer."""
    return damage(mutated_bytes(draw, BLOB)) is None


#: target -> its share of all cases
PARSERS = {
    requests: 12, gate: 8, notifications: 14, params: 16, config: 5, traces: 4, keys: 2, hosts: 8, blobs: 10,
    ranks: 4, connections: 4,
}  # fmt: skip
