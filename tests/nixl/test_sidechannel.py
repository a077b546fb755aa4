"""The handshake channel over real sockets on loopback: hostile clients, silent servers, and an end of it."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

import msgspec
import pytest
import zmq

from kvconn.errors import ConfigError
from kvconn.nixl.sideclient import HandshakeClient, HandshakeResult
from kvconn.nixl.sideserver import HandshakeServer
from kvconn.nixl.wire import MAX_REQUEST, encode_request
from kvconn.params import PeerKey
from kvconn.trust import Trust
from tests.support import free_port, wait_until

HOST = "127.0.0.1"
PAYLOADS = {(0, 0): b"payload of rank 0", (0, 1): b"payload of rank 1"}


@pytest.fixture
def server() -> Iterator[HandshakeServer]:
    made = HandshakeServer(HOST, free_port(), PAYLOADS)
    yield made
    made.close()


@pytest.fixture
def client() -> Iterator[Callable[[float], HandshakeClient]]:
    made: list[HandshakeClient] = []

    def make(timeout: float) -> HandshakeClient:
        made.append(HandshakeClient(timeout))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def dealer() -> Iterator[Callable[[int], zmq.Socket[bytes]]]:
    """Raw sockets connected to a server of ours."""
    context = zmq.Context()
    sockets: list[zmq.Socket[bytes]] = []

    def make(port: int) -> zmq.Socket[bytes]:
        raw = context.socket(zmq.DEALER)
        raw.setsockopt(zmq.LINGER, 0)
        raw.connect(f"tcp://{HOST}:{port}")
        sockets.append(raw)
        return raw

    yield make
    for raw in sockets:
        raw.close()
    context.term()


@pytest.fixture
def router() -> Iterator[tuple[zmq.Socket[bytes], int]]:
    """A peer whose answers the test writes."""
    context = zmq.Context()
    raw = context.socket(zmq.ROUTER)
    raw.setsockopt(zmq.LINGER, 0)
    port = raw.bind_to_random_port(f"tcp://{HOST}")
    yield raw, port
    raw.close()
    context.term()


@pytest.fixture
def silent() -> Iterator[int]:
    """A port that accepts connections and never says a word."""
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        listener.listen(64)
        yield listener.getsockname()[1]


def port_of(server: HandshakeServer) -> int:
    return int(server._socket.getsockopt(zmq.LAST_ENDPOINT).rpartition(b":")[2].rstrip(b"\x00"))


def key(port: int, host: str = HOST) -> PeerKey:
    return PeerKey("P", host, port)


def answers(client: HandshakeClient, n: int, seconds: float = 20.0) -> list[HandshakeResult]:
    """The next ``n`` results."""
    got: list[HandshakeResult] = []

    def enough() -> bool:
        got.extend(client.results())
        return len(got) >= n

    wait_until(enough, seconds, what=f"{n} results")
    return got


def ask_raw(raw: zmq.Socket[bytes], pp: int = 0, tp: int = 0) -> list[bytes]:
    """A good request on a raw socket and its reply."""
    raw.send_multipart([b"", encode_request(pp, tp)])
    assert raw.poll(10_000), "no reply"
    return raw.recv_multipart()


class Clocked:
    """A client whose time we make."""

    def __init__(self, timeout: float, trust: Trust = Trust()) -> None:  # noqa: B008 - frozen
        self.now = 0.0
        self.results: list[HandshakeResult] = []
        self.asking = HandshakeClient(timeout, trust=trust, clock=lambda: self.now)

    def rounds(self, n: int) -> None:
        """``n`` whole rounds of its thread: an ask that is refused at once comes back in each."""
        for _ in range(n):
            number = self.asking.start(PeerKey("refused", "a;b", 1))
            wait_until(lambda number=number: self._came(number))

    def _came(self, number: int) -> bool:
        new = self.asking.results()
        self.results += [result for result in new if result.key[0] != "refused"]
        return any(result.ask == number for result in new)

    def passes(self, seconds: float) -> None:
        """Time in which its thread runs all the while."""
        for _ in range(int(seconds / 0.125)):
            self.now += 0.125
            self.rounds(1)

    def __enter__(self) -> Clocked:
        return self

    def __exit__(self, *_: object) -> None:
        self.asking.close()


class TestServer:
    def test_a_good_request_is_answered_with_delimiter_payload_and_clock(
        self, server: HandshakeServer, dealer: Callable[[int], zmq.Socket[bytes]]
    ) -> None:
        before = time.perf_counter()
        delimiter, payload, clock = ask_raw(dealer(port_of(server)), 0, 1)
        assert (delimiter, payload) == (b"", b"payload of rank 1")
        assert before <= msgspec.msgpack.decode(clock, type=float) <= time.perf_counter()

    def test_a_stock_req_socket_is_served(self, server: HandshakeServer) -> None:
        with zmq.Context() as context, context.socket(zmq.REQ) as req:
            req.setsockopt(zmq.LINGER, 0)
            req.connect(f"tcp://{HOST}:{port_of(server)}")
            req.send(encode_request(0, 0))
            assert req.poll(10_000)
            assert req.recv_multipart()[0] == b"payload of rank 0"

    @pytest.mark.parametrize(
        "frames",
        [
            [b""],
            [b"", b""],
            [b"", b"garbage"],
            [b"", b"\x91" * 200],
            [b"not a delimiter", encode_request(0, 0)],
            [b"", encode_request(0, 0), b"more"],
            [encode_request(0, 0)],
            [b"x"] * 30,
            [b"", encode_request(0, 7)],
            [b"", encode_request(-1, 0)],
            [b"", encode_request(1 << 60, 0)],
        ],
    )
    def test_a_wrong_frame_is_dropped_counted_and_does_not_stop_the_server(
        self, server: HandshakeServer, dealer: Callable[[int], zmq.Socket[bytes]], frames: list[bytes]
    ) -> None:
        raw = dealer(port_of(server))
        for _ in range(3):
            raw.send_multipart(frames)
        assert ask_raw(raw)[1] == b"payload of rank 0"
        assert server.dropped == 3
        assert raw.poll(0) == 0  # nothing but the good request was answered

    def test_a_request_over_the_bound_costs_that_client_its_connection_and_nobody_else_anything(
        self, server: HandshakeServer, dealer: Callable[[int], zmq.Socket[bytes]]
    ) -> None:
        hostile, good = dealer(port_of(server)), dealer(port_of(server))
        hostile.send_multipart([b"", b"x" * (MAX_REQUEST + 1)])
        hostile.send_multipart([b"", b"x" * (1 << 20)])
        assert ask_raw(good)[1] == b"payload of rank 0"

    def test_bytes_that_are_not_zmq_do_not_stop_the_server(
        self, server: HandshakeServer, dealer: Callable[[int], zmq.Socket[bytes]]
    ) -> None:
        for junk in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, b""):
            with socket.create_connection((HOST, port_of(server)), timeout=10) as raw:
                raw.sendall(junk)
        assert ask_raw(dealer(port_of(server)))[1] == b"payload of rank 0"

    def test_a_client_that_never_reads_does_not_stop_the_server(
        self, server: HandshakeServer, dealer: Callable[[int], zmq.Socket[bytes]]
    ) -> None:
        deaf = dealer(port_of(server))
        deaf.setsockopt(zmq.RCVHWM, 1)
        for _ in range(500):
            with contextlib.suppress(zmq.Again):
                deaf.send_multipart([b"", encode_request(0, 0)], zmq.NOBLOCK)
        assert ask_raw(dealer(port_of(server)))[1] == b"payload of rank 0"

    def test_a_socket_with_nothing_to_read_after_all_costs_the_round_of_nobody_else(
        self, monkeypatch: pytest.MonkeyPatch, dealer: Callable[[int], zmq.Socket[bytes]]
    ) -> None:
        asked, swept = threading.Event(), threading.Event()

        def nothing(_: HandshakeServer) -> None:
            asked.set()
            raise zmq.Again

        monkeypatch.setattr(HandshakeServer, "_answer", nothing)
        monkeypatch.setattr(HandshakeServer, "_sweep", lambda *_: swept.set() if asked.is_set() else None)
        server = HandshakeServer(HOST, free_port(), PAYLOADS)
        try:
            dealer(port_of(server)).send_multipart([b"", encode_request(0, 0)])
            assert swept.wait(20)
        finally:
            server.close()

    def test_replaced_payloads_are_served_from_then_on(
        self, server: HandshakeServer, dealer: Callable[[int], zmq.Socket[bytes]]
    ) -> None:
        raw = dealer(port_of(server))
        server.replace({(0, 0): b"a new agent"})
        assert ask_raw(raw)[1] == b"a new agent"

    def test_a_taken_port_is_a_config_error_that_names_it(self, server: HandshakeServer) -> None:
        port = port_of(server)
        with pytest.raises(ConfigError, match=rf"cannot listen on {HOST}:{port}: .*VLLM_NIXL_SIDE_CHANNEL_PORT"):
            HandshakeServer(HOST, port, PAYLOADS)

    def test_close_is_idempotent_and_frees_the_port(self) -> None:
        port = free_port()
        for _ in range(3):
            server = HandshakeServer(HOST, port, PAYLOADS)
            server.close()
            server.close()
        assert "closed" in repr(server)

    def test_repr_is_one_line(self, server: HandshakeServer) -> None:
        assert repr(server) == "HandshakeServer(listening payloads=2 dropped=0 refused=0)"


class TestClient:
    def test_an_answer_carries_the_payload_and_the_offset_of_the_clocks(
        self, server: HandshakeServer, client: Callable[[float], HandshakeClient]
    ) -> None:
        asking = client(10.0)
        number = asking.start(key(port_of(server)), tp=1)
        (result,) = answers(asking, 1)
        assert (result.key, result.payload, result.why) == (key(port_of(server)), b"payload of rank 1", "")
        assert result.ask == number
        assert result.clock_offset is not None
        assert abs(result.clock_offset) < 10.0  # one process, one clock: at most the round trip

    def test_a_peer_that_never_answers_costs_its_own_deadline_only(
        self, server: HandshakeServer, silent: int, client: Callable[[float], HandshakeClient]
    ) -> None:
        asking = client(1.0)
        for _ in range(10):
            asking.start(key(silent))
        asking.start(key(free_port()))  # nobody listens there
        asking.start(key(port_of(server)))
        results = answers(asking, 12)
        assert results[0].payload == b"payload of rank 0"
        assert [(r.payload, r.why) for r in results[1:]] == [(None, "no answer within 1 s")] * 11

    def test_each_handshake_has_its_own_deadline(self, silent: int) -> None:
        with Clocked(10.0) as one:
            for name in ("first", "second"):
                one.asking.start(PeerKey(name, HOST, silent))
                one.rounds(1)
                one.passes(5.0)
            one.rounds(2)  # at 10: the second of them begins after the deadlines of the first were judged
            assert [result.key[0] for result in one.results] == ["first"]
            one.passes(5.0)
            one.rounds(2)
            assert [result.key[0] for result in one.results] == ["first", "second"]

    def test_time_in_which_our_process_stood_still_does_not_count_against_a_peer(
        self, router: tuple[zmq.Socket[bytes], int], silent: int
    ) -> None:
        peer, port = router
        with Clocked(2.0) as one:
            one.asking.start(key(port))
            one.asking.start(PeerKey("silent", HOST, silent))
            asked = peer.recv_multipart()
            one.passes(1.0)
            one.now += 30.0  # at once
            one.rounds(2)
            assert one.results == []
            peer.send_multipart([asked[0], b"", b"payload", b""])
            wait_until(lambda: one.rounds(1) or bool(one.results))
            assert [(result.payload, result.why) for result in one.results] == [(b"payload", "")]
            one.passes(1.5)  # 1 was left; when it last looked before it stood still, it knows to a step or two
            one.rounds(2)
            assert [result.why for result in one.results[1:]] == ["no answer within 2 s"]

    def test_a_server_that_comes_up_within_the_deadline_is_reached(
        self, client: Callable[[float], HandshakeClient]
    ) -> None:
        port = free_port()
        asking = client(20.0)
        asking.start(key(port))
        late = HandshakeServer(HOST, port, PAYLOADS)
        try:
            assert answers(asking, 1)[0].payload == b"payload of rank 0"
        finally:
            late.close()

    def test_an_unknown_rank_is_no_answer(self, server: HandshakeServer) -> None:
        with Clocked(2.0) as one:
            one.asking.start(key(port_of(server)), tp=9)
            wait_until(lambda: server.dropped == 1)
            one.passes(2.0)
            one.rounds(2)
            assert [result.why for result in one.results] == ["no answer within 2 s"]
        assert server.dropped >= 1  # it is asked again after a while

    @pytest.mark.parametrize(
        ("reply", "why"),
        [
            ([b""], "expected 3 frames, got 1"),
            ([b"", b"payload"], "expected 3 frames, got 2"),
            ([b"x", b"payload", b"\x00"], "expected 3 frames, got 3"),
            ([b"", b"", b"", b""], "expected 3 frames, got 4"),
            ([b"", b"payload", b"not a clock"], ""),
        ],
    )
    def test_a_wrong_answer_fails_that_handshake_and_a_wrong_clock_only_the_offset(
        self,
        router: tuple[zmq.Socket[bytes], int],
        client: Callable[[float], HandshakeClient],
        reply: list[bytes],
        why: str,
    ) -> None:
        peer, port = router
        asking = client(20.0)
        asking.start(key(port))
        assert peer.poll(10_000)
        identity, *request = peer.recv_multipart()
        assert request == [b"", encode_request(0, 0)]
        peer.send_multipart([identity, *reply])
        (result,) = answers(asking, 1)
        assert (result.payload, result.why) == (None if why else b"payload", why)
        assert result.clock_offset is None

    @pytest.mark.parametrize(
        "host", ["a;b", "127.0.0.1:1;127.0.0.1", "", " ", "h/x", "*", "a\x00b", "tcp://h", "a,b", "h\n"]
    )
    def test_a_host_that_is_zmqs_grammar_and_no_name_is_refused(
        self, server: HandshakeServer, client: Callable[[float], HandshakeClient], host: str
    ) -> None:
        asking = client(20.0)
        asking.start(key(port_of(server), host))
        asking.start(key(port_of(server)))
        refused, good = answers(asking, 2)
        assert (refused.payload, refused.key[1]) == (None, host)
        assert "not a host name or address" in refused.why
        assert good.payload == b"payload of rank 0"

    def test_a_port_out_of_range_fails_that_handshake_only(self, server: HandshakeServer) -> None:
        with Clocked(2.0) as one:
            for port in (70_000, -1, port_of(server)):
                one.asking.start(key(port))
            wait_until(lambda: one.rounds(1) or len(one.results) == 2)
            one.passes(2.0)
            one.rounds(2)
            refused, good, late = one.results
        assert refused.why.startswith("cannot connect: ")
        assert good.payload == b"payload of rank 0"
        assert late.why == "no answer within 2 s"

    def test_many_peers_are_asked_at_once(
        self, server: HandshakeServer, client: Callable[[float], HandshakeClient]
    ) -> None:
        asking = client(20.0)
        for _ in range(200):
            asking.start(key(port_of(server)))
        assert {r.payload for r in answers(asking, 200)} == {b"payload of rank 0"}
        assert asking.results() == []

    def test_close_is_idempotent_with_handshakes_under_way_and_does_not_wait_for_them(
        self, silent: int, client: Callable[[float], HandshakeClient]
    ) -> None:
        asking = client(600.0)
        asking.start(key(silent))
        wait_until(lambda: "pending=1" in repr(asking))
        asking.close()
        asking.close()
        assert not asking._thread.is_alive()
        assert repr(asking).startswith("HandshakeClient(closed ")

    def test_repr_is_one_line(self, client: Callable[[float], HandshakeClient]) -> None:
        assert repr(client(1.0)) == "HandshakeClient(running pending=0 naming=0)"
