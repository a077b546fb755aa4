"""Connections of the side channel: what ZMQ leaves unbounded ends, and honest peers are served meanwhile."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import socket
import threading
from collections.abc import Iterator

import pytest
import zmq

from kvconn.nixl.connections import REQUEST, ROOM, Connection, Connections, seen
from kvconn.nixl.sideclient import HandshakeClient, HandshakeResult
from kvconn.nixl.sideserver import HandshakeServer
from kvconn.nixl.wire import encode_request
from kvconn.trust import FleetKey, Trust
from tests.fuzz.live import GREETING, READY
from tests.nixl.test_sidechannel import port_of
from tests.support import wait_until
from tests.told import Told, listening

HOST, PAYLOAD = "127.0.0.1", b"payload"
OPEN, KEYED = Trust(rate=1e9), Trust(FleetKey(b"k" * 32), rate=1e9)
#: one frame of a message that goes on
MORE = b"\x01\x00"


class Kernel:
    """Descriptors as the test says: (inode, peer, bytes)."""

    def __init__(self) -> None:
        self.there: dict[int, tuple[int, int, int]] = {}
        self.ended: list[int] = []
        self.full = False

    def look(self, fd: int, port: int, end: int | None = None) -> Connection | None:
        if self.full:
            raise OSError(errno.EMFILE, "Too many open files")
        if fd not in self.there:
            return None
        inode, peer, received = self.there[fd]
        if end == inode:
            self.ended.append(fd)
        return Connection(inode, f"peer {peer}", peer, received)

    def made(self, most: int = 8) -> Connections:
        return Connections(1, most, 30.0, self.look)


class TestDecisions:
    def test_who_never_asks_is_over_after_a_while_and_who_asks_is_not(self) -> None:
        kernel = Kernel()
        open = kernel.made()
        for fd in (3, 4):
            kernel.there[fd] = (fd, fd, 100)
            assert open.accepted(fd, 0.0) == ""
        open.asked(4, 20.0)
        assert open.sweep(30.0) == []
        assert open.sweep(31.0) == ["peer 3: no request for 30 s"]
        assert open.sweep(51.0) == ["peer 4: no request for 30 s"]
        assert kernel.ended == [3, 4] and len(open) == 0 and not open._of_peer

    def test_bytes_without_requests_are_over_and_each_good_request_has_room_of_its_own(self) -> None:
        kernel = Kernel()
        open = kernel.made()
        kernel.there[3] = (3, 3, 0)
        open.accepted(3, 0.0)
        for n in range(1, 100):
            kernel.there[3] = (3, 3, n * REQUEST)
            assert open.sweep(0.0) == []
            open.asked(3, 0.0)
        kernel.there[3] = (3, 3, 100 * REQUEST + ROOM + 1)
        assert open.sweep(0.0) == [f"peer 3: {100 * REQUEST + ROOM + 1} bytes and no request"]

    def test_of_too_many_the_one_that_was_silent_longest_is_over(self) -> None:
        kernel = Kernel()
        open = kernel.made(most=8)
        for fd in range(8):
            kernel.there[fd] = (fd, fd % 4, 0)
            open.accepted(fd, float(fd))
        open.asked(0, 9.0)
        kernel.there[8] = (8, 9, 0)
        assert "peer 1: more than 8 connections" in open.accepted(8, 10.0)
        assert kernel.ended == [1]
        for fd in range(9, 12):  # of one address half as many
            kernel.there[fd] = (fd, 9, 0)
            open.accepted(fd, 10.0)
        kernel.there[12] = (12, 9, 0)
        assert open.accepted(12, 10.0) == "peer 9: more than 4 connections"
        assert kernel.ended[-1] == 8 and len(open) == 8

    def test_a_descriptor_that_is_another_file_by_now_is_forgotten_and_never_ended(self) -> None:
        kernel = Kernel()
        open = kernel.made()
        kernel.there[3] = (3, 3, 0)
        open.accepted(3, 0.0)
        kernel.there[3] = (77, 3, 1 << 30)
        assert open.sweep(0.0) == [] and len(open) == 0 and kernel.ended == []
        assert open.accepted(5, 0.0) == "" and len(open) == 0  # gone before we looked

    def test_while_no_descriptor_is_left_nobody_is_forgotten_and_later_all_is_made_up_for(self) -> None:
        kernel = Kernel()
        open = kernel.made(most=4)
        for fd in (3, 4):
            kernel.there[fd] = (fd, fd, 0)
            open.accepted(fd, 0.0)
        kernel.full = True
        for fd in (5, 6, 7):
            kernel.there[fd] = (fd, fd, 0)
            assert open.accepted(fd, 1.0) == ""
        assert open.ended(7) is False
        del kernel.there[7]
        open.asked(4, 20.0)
        assert open.sweep(31.0) == [] and len(open) == 2
        kernel.full = False
        assert open.sweep(31.0) == ["peer 3: no request for 30 s"]
        assert kernel.ended == [3] and len(open) == 3 and not open._unseen
        assert open.sweep(62.0) == [f"peer {fd}: no request for 30 s" for fd in (4, 5, 6)]

    def test_one_of_too_many_that_cannot_be_ended_now_is_over_later(self) -> None:
        kernel = Kernel()
        open = kernel.made(most=2)

        def full_after_a_look(fd: int, port: int, end: int | None = None) -> Connection | None:
            try:
                return Kernel.look(kernel, fd, port, end)
            finally:
                kernel.full = fd == 5

        open._look = full_after_a_look
        for fd in (3, 4, 5):
            kernel.there[fd] = (fd, fd, 0)
            assert open.accepted(fd, 0.0) == ""
        assert len(open) == 3 and kernel.ended == []
        kernel.full, open._look = False, kernel.look
        assert len(open.sweep(31.0)) == 3 and kernel.ended == [3, 4, 5]


def test_with_no_descriptor_left_a_connection_is_not_taken_for_gone() -> None:
    with socket.create_server((HOST, 0)) as ours, contextlib.ExitStack() as stack:
        stack.enter_context(socket.create_connection(ours.getsockname()))
        near = stack.enter_context(ours.accept()[0])
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))  # below are 0, 1 and 2, which nobody closes
        try:
            with pytest.raises(OSError, match="Too many open files"):
                seen(near.fileno(), ours.getsockname()[1])
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_nothing_but_a_connection_at_our_port_is_looked_at_or_ended() -> None:
    read, write = os.pipe()
    with socket.create_server((HOST, 0)) as ours, socket.create_server((HOST, 0)) as other, contextlib.ExitStack() as s:
        port = ours.getsockname()[1]
        left, right = socket.socketpair()
        near = s.enter_context(socket.create_connection((HOST, other.getsockname()[1])))
        far = s.enter_context(other.accept()[0])
        for fd in (read, write, left.fileno(), ours.fileno(), near.fileno(), far.fileno(), 1 << 20):
            assert seen(fd, port) is None
            assert seen(fd, port, os.fstat(fd).st_ino if fd < 1 << 20 else 1) is None
        near.sendall(b"still there")
        assert far.recv(99) == b"still there"
        left.close()
        right.close()
    os.close(read)
    os.close(write)


@pytest.fixture(params=[OPEN, KEYED], ids=["open", "keyed"])
def server(request: pytest.FixtureRequest) -> Iterator[HandshakeServer]:
    made = HandshakeServer(HOST, 0, {(0, 0): PAYLOAD}, request.param)
    made._connections._most = 40
    yield made
    made.close()


@pytest.fixture(autouse=True)
def told() -> Iterator[Told]:
    with listening() as made:
        yield made


def served(server: HandshakeServer, trust: Trust) -> bool:
    """An honest peer's handshake, from its beginning to its end."""
    asking = HandshakeClient(20.0, trust=trust)
    got: list[HandshakeResult] = []
    try:
        asking.start(("P", HOST, port_of(server)))
        wait_until(lambda: bool(got.extend(asking.results()) or got))
        return got[0].payload == PAYLOAD
    finally:
        asking.close()


def trust_of(server: HandshakeServer) -> Trust:
    return KEYED if server._gate._client_keys else OPEN


def test_a_message_without_an_end_ends_with_its_connection(told: Told) -> None:
    """Frames of 2 bytes that say that more come: ZMQ keeps them all, until the connection is over."""
    server = HandshakeServer(HOST, 0, {(0, 0): PAYLOAD}, OPEN)
    try:
        sent = 0
        with socket.create_connection((HOST, port_of(server)), timeout=20) as raw, contextlib.suppress(OSError):
            raw.sendall(GREETING + READY)
            said = b""
            while b"READY" not in said:
                said += raw.recv(4096)
            while sent < 1 << 30:
                sent += raw.send(MORE * 4096)
        assert sent < 1 << 30, "the connection was ended"
        assert served(server, OPEN)
        told.exactly(("side channel: refused a peer", HOST, "bytes and no request"))
        wait_until(lambda: len(server._connections) == 0)
    finally:
        server.close()


def test_an_answer_without_an_end_ends_that_handshake_long_before_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that a client names. Others are asked and heard meanwhile."""
    monkeypatch.setattr("kvconn.nixl.sideclient.MAX_ANSWER", 1 << 20)
    server = HandshakeServer(HOST, 0, {(0, 0): PAYLOAD}, OPEN)
    asking = HandshakeClient(600.0)
    got: list[HandshakeResult] = []
    listener = socket.create_server((HOST, 0))

    def answer() -> None:
        with listener.accept()[0] as raw, contextlib.suppress(OSError):
            raw.settimeout(20)
            raw.sendall(GREETING + READY)
            said = b""
            while b"READY" not in said:
                said += raw.recv(4096)
            while True:
                raw.sendall(MORE * 4096)

    hostile = threading.Thread(target=answer)
    hostile.start()
    try:
        asking.start(("P", HOST, listener.getsockname()[1]))
        asking.start(("P", HOST, port_of(server)))
        wait_until(lambda: got.extend(asking.results()) is None and len(got) == 2)
        why = [result.why for result in got if result.payload is None]
        assert len(why) == 1 and "bytes and no end, at most 1048576 are read" in why[0], got
        assert "pending=0" in repr(asking)
        hostile.join(20)
        assert not hostile.is_alive(), "its connection was ended"
    finally:
        asking.close()
        listener.close()
        server.close()


def test_connections_that_say_nothing_are_bounded_and_end_while_honest_peers_are_served(
    server: HandshakeServer, told: Told
) -> None:
    trust, idle = trust_of(server), []
    try:
        for n in range(200):
            idle.append(socket.create_connection((HOST, port_of(server)), timeout=20))
            if n % 50 == 49:
                assert served(server, trust)
                assert len(server._connections) <= 40
        server._connections._idle = 0.5  # now: until here it is their number that ends them
        wait_until(lambda: len(server._connections) == 0, what="all are over")
        for one in idle:
            one.settimeout(20)
            with contextlib.suppress(ConnectionError):
                while one.recv(4096):  # the server's greeting, then its end
                    pass
    finally:
        for one in idle:
            one.close()
    told.exactly(("side channel: refused a peer", HOST, "more than 20 connections"))


def test_a_connection_with_requests_stays_and_one_that_stopped_asking_ends(server: HandshakeServer) -> None:
    """Many honest peers at once, from one address, more than may be idle there: all are answered."""
    trust, answers = trust_of(server), []

    def ask() -> None:
        answers.append(served(server, trust))

    threads = [threading.Thread(target=ask) for _ in range(30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert answers == [True] * 30
    server._connections._idle = 0.5
    wait_until(lambda: len(server._connections) == 0)


def test_good_requests_without_end_are_no_reason_to_end_a_connection() -> None:
    server = HandshakeServer(HOST, 0, {(0, 0): PAYLOAD}, OPEN)
    try:
        with zmq.Context() as context, context.socket(zmq.DEALER) as raw:
            raw.setsockopt(zmq.LINGER, 0)
            raw.setsockopt(zmq.RECONNECT_IVL, -1)  # it would not come back
            raw.connect(f"tcp://{HOST}:{port_of(server)}")
            for _ in range(2 * ROOM // len(encode_request(0, 0))):
                raw.send_multipart([b"", encode_request(0, 0)])
                assert raw.poll(20_000)
                raw.recv_multipart()
    finally:
        server.close()
