"""What peers send to the transport: damaged metadata, which NIXL believes, and notifications without end."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvconn.errors import TransportError
from kvconn.transport import nixl
from kvconn.transport.base import MemoryRegion
from kvconn.transport.blob import agent_of, damage
from kvconn.transport.nixl import NixlTransport
from tests.fuzz.mutate import mutated_bytes


@pytest.fixture(scope="module")
def blob() -> bytes:
    """A real agent's, of two regions."""
    memory = np.zeros(1 << 16, np.uint8)
    transport = NixlTransport(progress="poll")
    try:
        transport.register([MemoryRegion(memory.ctypes.data, 4096), MemoryRegion(memory.ctypes.data + 8192, 4096)])
        return transport.metadata()
    finally:
        transport.close()


def field(name: bytes, data: bytes) -> bytes:
    return name + len(data).to_bytes(8, "little") + data + b"|"


def test_a_real_one_has_no_damage(blob: bytes) -> None:
    assert damage(blob) is None


def test_an_agent_without_memory_has_none_either() -> None:
    transport = NixlTransport(progress="poll")
    try:
        assert damage(transport.metadata()) is None
    finally:
        transport.close()


def test_every_cut_and_every_addition_is_damage(blob: bytes) -> None:
    for end in range(len(blob)):
        assert damage(blob[:end]) is not None
    assert damage(blob + b"|") == "1 bytes behind its end"


def test_every_length_and_count_that_lies_is_damage(blob: bytes) -> None:
    """Each 8 bytes that say how much follows, made one less, one more, and huge."""
    for name in (b"Agent", b"Conns", b"|t", b"|c", b"|", b"nixlSecElms", b"bknd", b"nixlDList", b"|n"):
        at = blob.index(name + (b"" if name != b"|" else b"\n\0\0\0\0\0\0\0MemSection")) + len(name)
        size = int.from_bytes(blob[at : at + 8], "little")
        for lie in (size - 1, size + 1, 0, 1 << 31, (1 << 64) - 1):
            assert damage(blob[:at] + lie.to_bytes(8, "little") + blob[at + 8 :]) is not None, (name, lie)
    kind = blob.index(b"|t\x04") + len(b"|t") + 8
    assert "at most 4" in (damage(blob[:kind] + b"\5\0\0\0" + blob[kind + 4 :]) or "")
    count = blob.index(b"|n\x08") + len(b"|n") + 8
    assert damage(blob[:count] + (1 << 40).to_bytes(8, "little") + blob[count + 8 :]) is not None


def test_nothing_is_raised_and_nothing_is_slow(blob: bytes) -> None:
    draw = random.Random(1)
    found = [damage(mutated_bytes(draw, blob)) for _ in range(5000)]
    assert 2500 < sum(one is not None for one in found) < 5000
    endless = b"nixlSerDes|" + field(b"Agent", b"a") + field(b"Conns", (1 << 63).to_bytes(8, "little"))
    assert damage(endless) is not None


def test_a_blob_tells_whose_it_is_whatever_else_is_wrong_with_it(blob: bytes) -> None:
    name = agent_of(blob)
    assert name is not None and agent_of(blob[:-1]) == name and field(b"Agent", name.encode()) in blob
    for nobody in (b"", b"x", bytes(1000), blob[:20], blob.replace(name.encode(), b"\xff" * len(name))):
        assert agent_of(nobody) is None


def test_of_many_peers_only_the_one_that_a_blob_names_is_looked_at(
    blob: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    class ByName(dict[str, Any]):
        def __iter__(self) -> Iterator[str]:
            raise AssertionError("all peers were looked through")

    transport = NixlTransport(progress="poll")
    try:
        with monkeypatch.context() as patch:
            patch.setattr(transport, "_peers", ByName())
            patch.setattr(transport._agent, "add_remote_agent", lambda blob: (agent_of(blob) or "").encode())
            assert transport.add_peer(blob) == transport.add_peer(blob) == agent_of(blob)
            with pytest.raises(TransportError, match="known by another blob"):
                transport.add_peer(blob[:-1])
            transport._peers.clear()
    finally:
        transport.close()


def test_nixl_never_sees_a_damaged_one(blob: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    transport = NixlTransport(progress="poll")
    try:
        with monkeypatch.context() as patch:
            patch.setattr(transport._agent, "add_remote_agent", lambda blob: pytest.fail("NIXL was given it"))
            with pytest.raises(TransportError, match="the peer sent a damaged blob: "):
                transport.add_peer(blob.replace(b"nixlSerDes|Agent", b"nixlSerDes|Agent\xff"))
    finally:
        transport.close()


def test_the_shape_of_another_nixl_is_left_to_it(blob: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our own agent's blob says which shape is installed."""
    monkeypatch.setattr(nixl, "damage", lambda blob: "not as we know it")
    transport = NixlTransport(progress="poll")
    try:
        with monkeypatch.context() as patch:
            patch.setattr(transport._agent, "add_remote_agent", lambda blob: b"their name")
            assert transport.add_peer(blob) == "their name"
            transport._peers.clear()
    finally:
        transport.close()


def test_unread_notifications_are_bounded_in_bytes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl, "MAX_NOTIFICATION_BYTES", 10)
    transport = NixlTransport(progress="poll")
    try:
        with monkeypatch.context() as patch:
            patch.setattr(transport._agent, "get_new_notifs", lambda: {"a": [b"12345678", b"123", b"12"]})
            assert transport.notifications() == [("a", b"12345678"), ("a", b"12")]
            assert transport.notifications() == [("a", b"12345678"), ("a", b"12")]  # room again
        assert transport.dropped_notifications == 2
    finally:
        transport.close()
