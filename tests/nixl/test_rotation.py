"""A fleet changes its key one engine at a time: old, old and new, new and old, new."""

from __future__ import annotations

import itertools
import socket
import threading
from pathlib import Path

import msgspec
import pytest

from kvconn.errors import ConfigError, RequestError
from kvconn.nixl.curve import Turns
from kvconn.nixl.fence import check_signature, sign
from kvconn.nixl.sideserver import HandshakeServer
from kvconn.params import KvconnRef, RemoteRef
from kvconn.trust import FleetKey, Trust, read_key
from tests.nixl.test_addresses import ask
from tests.nixl.test_sidechannel import port_of

OLD, NEW = b"o" * 32, b"n" * 32
STAGES = [FleetKey(OLD), FleetKey(OLD, NEW), FleetKey(NEW, OLD), FleetKey(NEW)]
REF = RemoteRef("P", "t", "127.0.0.1", 5600, ((1, 2, 3), ()), 48, kvconn=KvconnRef(4, 99, "5" * 64, 1.5))
#: engines of two stages that may be up together
TOGETHER = [(a, b) for a, b in itertools.product(range(4), range(4)) if abs(a - b) <= 1]


def signed(key: FleetKey) -> RemoteRef:
    assert REF.kvconn is not None
    return msgspec.structs.replace(REF, kvconn=msgspec.structs.replace(REF.kvconn, signature=sign(key, REF)))


@pytest.mark.parametrize(("server", "client"), TOGETHER)
def test_engines_of_neighbouring_stages_shake_hands_and_take_references(server: int, client: int) -> None:
    made = HandshakeServer("127.0.0.1", 0, {(0, 0): b"payload"}, Trust(STAGES[server]))
    try:
        assert ask(port_of(made), ["127.0.0.1"], Trust(STAGES[client])).payload == b"payload"
    finally:
        made.close()
    check_signature(STAGES[client], signed(STAGES[server]))


def test_the_first_and_the_last_stage_refuse_each_other() -> None:
    made = HandshakeServer("127.0.0.1", 0, {(0, 0): b"payload"}, Trust(STAGES[0]))
    try:
        why = ask(port_of(made), ["127.0.0.1"], Trust(STAGES[3]), 0.5).why
        assert "perhaps its fleet key is not ours" in why
        stranger = FleetKey(b"x" * 32, b"y" * 32)
        assert "perhaps its fleet key is not ours" in ask(port_of(made), ["127.0.0.1"], Trust(stranger), 0.5).why
    finally:
        made.close()
    with pytest.raises(RequestError, match="signature"):
        check_signature(STAGES[3], signed(STAGES[0]))


def test_a_server_that_restarts_amid_handshakes_costs_no_key() -> None:
    """It hangs up on both keys, comes back, and has the first: whatever was tried before, its turn comes again."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    back: list[HandshakeServer] = []

    def restart() -> None:
        listener.settimeout(20)
        for _ in range(2):
            with listener.accept()[0] as raw:
                raw.recv(10)
        listener.close()
        back.append(HandshakeServer("127.0.0.1", port, {(0, 0): b"payload"}, Trust(STAGES[0])))

    server = threading.Thread(target=restart)
    server.start()
    try:
        assert ask(port, ["127.0.0.1"], Trust(STAGES[1])).payload == b"payload"
    finally:
        server.join(20)
        for made in back:
            made.close()


def test_keys_take_turns_and_what_a_replaced_connection_says_is_not_heard() -> None:
    old, new = 0, 1
    turns = Turns(2)
    assert turns.begins(0.0) == old and turns.begins(9.0) is None
    assert turns.failed(10.0) and not turns.failed(10.0), "once for each connection"
    assert turns.begins(10.0) is None and turns.begins(10.02) == new
    now, rests = 20.0, []
    for _ in range(6):
        assert turns.failed(now)
        rests.append(next(n for n in range(1, 200) if turns.begins(now + n / 100 + 1e-6) is not None) / 100)
        now += 10
    assert rests == [0.1, 0.01, 0.2, 0.01, 0.4, 0.01]


@pytest.mark.parametrize("keys", [0, 1])
def test_one_key_or_none_is_tried_again_after_rests_that_grow(keys: int) -> None:
    turns, now, rests = Turns(keys), 0.0, []
    assert turns.begins(now) == 0 and turns.begins(now) is None
    for _ in range(6):
        assert turns.failed(now) and not turns.failed(now)
        rest = next(n for n in range(1, 200) if turns.begins(now + n / 100 + 1e-6) == 0) / 100
        rests.append(rest)
        now += 10
    assert rests == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]


def test_among_several_addresses_each_is_tried_with_each_key() -> None:
    made = HandshakeServer("127.0.0.1", 0, {(0, 0): b"payload"}, Trust(STAGES[3]))
    other = HandshakeServer("127.0.0.2", port_of(made), {(0, 0): b"wrong"}, Trust(FleetKey(b"x" * 32)))
    try:
        found = ask(port_of(made), ["127.0.0.2", "127.0.0.3", "127.0.0.1"], Trust(STAGES[1]))
        assert found.payload == b"payload"
    finally:
        made.close()
        other.close()


def in_file(tmp_path: Path, text: bytes) -> FleetKey:
    file = tmp_path / "fleet.key"
    file.write_bytes(text)
    file.chmod(0o600)
    return read_key(str(file))


def test_a_file_has_a_secret_on_each_line_or_is_one_secret_of_any_bytes(tmp_path: Path) -> None:
    def prints(key: FleetKey) -> list[str]:
        return [one.fingerprint for one in key.accepted]

    for both in (OLD + b"\n" + NEW + b" \r\n\n", b"\n" + OLD + b"\n \n\n" + NEW):
        assert prints(in_file(tmp_path, both)) == [FleetKey(OLD).fingerprint, FleetKey(NEW).fingerprint]
    for one in (b"short\n" + OLD[1:], bytes(range(128, 160)) + b"\nshort", b"a b" * 16 + b"\n\n" + b"c d" * 16):
        assert prints(in_file(tmp_path, one)) == [FleetKey(one).fingerprint]
    for many in ([OLD, OLD], [bytes([65 + n]) * 32 for n in range(5)]):
        with pytest.raises(ConfigError, match="at most 4 different secrets"):
            in_file(tmp_path, b"\n".join(many))
    assert repr(FleetKey(OLD, NEW)) == f"FleetKey({FleetKey(OLD).fingerprint} {FleetKey(NEW).fingerprint})"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (b"# the old one\n" + OLD + b"\n" + NEW, 1),
        (b"\n" + OLD + b"\n\n" + NEW[1:] + b"\n", 4),
        (OLD + b"\n" + b"n n" * 16, 2),
        (bytes(range(128, 160)) + b"\n" + OLD, 1),
    ],
    ids=["a comment", "one cut short", "white space inside", "other bytes"],
)
def test_a_line_that_is_no_secret_beside_one_that_is_is_named_and_not_quoted(
    tmp_path: Path, text: bytes, line: int
) -> None:
    """It would be one secret that no other engine has, and the fleet would fall apart without a word."""
    with pytest.raises(ConfigError, match=rf"fleet\.key: line {line}: expected 32 or more printable") as caught:
        in_file(tmp_path, text)
    assert not any(part in str(caught.value) for part in ("old one", "oooo", "nnnn", "n n"))
