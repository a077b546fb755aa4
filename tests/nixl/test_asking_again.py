"""Peers that do not answer the first time: a handshake lasts until its deadline, whatever ends its connections."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest
import zmq

from kvconn.nixl.sideclient import HandshakeClient
from kvconn.nixl.sideserver import HandshakeServer
from kvconn.nixl.wire import MAX_FRAME, encode_request
from kvconn.trust import FleetKey, Trust
from tests.nixl.test_addresses import GOOD, PAYLOAD, ask, back_at
from tests.nixl.test_sidechannel import Clocked, answers, key, port_of
from tests.support import wait_until

OURS, OTHER = b"k" * 32, b"o" * 32
#: what the asker has; its peer has our key alone, if any
TRUSTS = [Trust(), Trust(FleetKey(OURS)), Trust(FleetKey(OTHER, OURS))]
#: what somebody else says on a port that was P's, or will be
STRANGERS = [b"SSH-2.0-x\r\n", b"HTTP/1.1 400 no\r\n\r\n", b"\xff" + bytes(8) + b"\x7f\x01", b""]


@pytest.fixture
def router() -> Iterator[tuple[zmq.Socket[bytes], int]]:
    with zmq.Context() as context:
        raw = context.socket(zmq.ROUTER)
        raw.setsockopt(zmq.LINGER, 0)
        yield raw, raw.bind_to_random_port(f"tcp://{GOOD}")
        raw.close()


def test_a_request_that_nobody_heard_is_sent_again(router: tuple[zmq.Socket[bytes], int]) -> None:
    """ZMQ's monitor tells of a hang-up before its socket knows: what is sent then is lost, and nothing says so."""
    peer, port = router
    with Clocked(5.0) as one:
        one.asking.start(key(port))
        assert peer.poll(10_000)
        peer.recv_multipart()  # and is lost
        one.passes(0.5)
        assert not peer.poll(0), "it may be on its way"
        one.passes(0.75)
        assert peer.poll(10_000)
        identity, *request = peer.recv_multipart()
        assert request == [b"", encode_request(0, 0)]
        peer.send_multipart([identity, b"", PAYLOAD, b""])
        wait_until(lambda: one.rounds(1) or bool(one.results))
        assert [result.payload for result in one.results] == [PAYLOAD]


@pytest.mark.parametrize("trust", TRUSTS, ids=["open", "keyed", "two keys"])
@pytest.mark.parametrize("said", STRANGERS)
def test_a_peer_is_found_where_somebody_else_was_a_moment_ago(trust: Trust, said: bytes) -> None:
    """libzmq takes some of what they say for a breach of protocol, after which it does not connect again by itself."""
    asking = HandshakeClient(20.0, trust=trust)
    with contextlib.closing(asking):
        with socket.create_server((GOOD, 0)) as listener:
            port = listener.getsockname()[1]
            asking.start(key(port))
            listener.settimeout(20)
            theirs, _ = listener.accept()
            with theirs, contextlib.suppress(OSError):  # it hangs up first, perhaps
                theirs.sendall(said)
                theirs.shutdown(socket.SHUT_WR)
                while theirs.recv(1 << 16):
                    pass
        with contextlib.closing(back_at(port, Trust(FleetKey(OURS)) if trust.key is not None else Trust())):
            assert answers(asking, 1)[0].payload == PAYLOAD


def test_an_answer_over_the_bound_ends_in_words_and_its_peer_may_do_better(
    router: tuple[zmq.Socket[bytes], int],
) -> None:
    peer, port = router
    asking = HandshakeClient(20.0)
    with contextlib.closing(asking):
        asking.start(key(port))
        for payload in (bytes(MAX_FRAME + 1), PAYLOAD):
            assert peer.poll(10_000)
            identity, *_ = peer.recv_multipart()
            peer.send_multipart([identity, b"", payload, b""])
        assert answers(asking, 1)[0].payload == PAYLOAD
    with Clocked(5.0) as one:
        one.asking.start(key(port))
        assert peer.poll(10_000)
        identity, *_ = peer.recv_multipart()
        peer.send_multipart([identity, b"", bytes(MAX_FRAME + 1), b""])
        wait_until(lambda: one.passes(0.25) or bool(one.results))
        assert [result.why for result in one.results] == [
            f"no answer within 5 s; the connection ended without an answer of at most {MAX_FRAME} bytes"
        ]


def test_one_address_twice_is_one_address(router: tuple[zmq.Socket[bytes], int]) -> None:
    server = HandshakeServer(GOOD, 0, {(0, 0): PAYLOAD}, Trust(FleetKey(OURS)))
    with contextlib.closing(server):
        refused = ask(port_of(server), [GOOD, f"::ffff:{GOOD}", GOOD], Trust())
        assert refused.payload is None and "kvconn.key_file" in refused.why, "all of it has refused, and at once"
