"""A host name with several addresses: whichever of them serves is found, within one deadline."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Sequence

import pytest
import zmq

from kvconn.errors import ConfigError
from kvconn.nixl.sideclient import MAX_TRIED, HandshakeClient, HandshakeResult
from kvconn.nixl.sideserver import HandshakeServer
from kvconn.trust import FleetKey, Trust
from tests.nixl.test_sidechannel import port_of
from tests.support import wait_until

GOOD, PAYLOAD = "127.0.0.1", b"payload"
KEYS = [Trust(FleetKey(bytes([n]) * 32)) for n in range(2)]


@pytest.fixture(params=[Trust(), KEYS[0]], ids=["open", "keyed"])
def trust(request: pytest.FixtureRequest) -> Trust:
    found: Trust = request.param
    return found


@pytest.fixture
def server(trust: Trust) -> Iterator[HandshakeServer]:
    made = HandshakeServer(GOOD, 0, {(0, 0): PAYLOAD}, trust)
    yield made
    made.close()


def ask(port: int, addresses: Sequence[str], trust: Trust, timeout: float = 20.0) -> HandshakeResult:
    """Its only answer."""
    asking = HandshakeClient(timeout, trust=trust, look_up=lambda name: list(addresses))
    got: list[HandshakeResult] = []
    try:
        asking.start(("P", "a.name", port))
        wait_until(lambda: bool(got.extend(asking.results()) or got))
        assert "pending=0" in repr(asking)
        return got[0]
    finally:
        asking.close()


@pytest.mark.parametrize("others", [["127.0.0.2"], ["127.0.0.2", "127.0.0.3"]])
def test_addresses_where_nobody_listens_are_passed_over(
    server: HandshakeServer, trust: Trust, others: list[str]
) -> None:
    assert ask(port_of(server), [*others, GOOD], trust).payload == PAYLOAD


def test_one_that_accepts_and_never_speaks_is_passed_over(server: HandshakeServer, trust: Trust) -> None:
    port = port_of(server)
    with socket.create_server(("127.0.0.2", port)):
        assert ask(port, ["127.0.0.2", GOOD], trust).payload == PAYLOAD


def test_one_that_refuses_us_for_good_is_passed_over(server: HandshakeServer, trust: Trust) -> None:
    """A stock engine, or another fleet's, at one address: only when all refuse it is over before its deadline."""
    port = port_of(server)
    stranger = HandshakeServer("127.0.0.2", port, {(0, 0): b"wrong"}, KEYS[1] if trust.key is None else Trust())
    try:
        assert ask(port, ["127.0.0.2", GOOD], trust).payload == PAYLOAD
        alone = ask(port, ["127.0.0.2"], trust)
        assert alone.payload is None and "key" in alone.why
    finally:
        stranger.close()


def test_when_none_answers_all_share_one_deadline_and_the_reason_says_how_many(trust: Trust) -> None:
    with socket.create_server(("127.0.0.2", 0)) as listener:
        port = listener.getsockname()[1]
        why = ask(port, ["127.0.0.2", "127.0.0.3", "127.0.0.4"], trust, 0.3).why
    assert why.startswith("no answer within 0.3 s from any of 3 addresses")


def test_so_many_are_tried_and_no_more(server: HandshakeServer, trust: Trust) -> None:
    port, nobody = port_of(server), [f"127.0.1.{n}" for n in range(MAX_TRIED)]
    assert ask(port, [*nobody[1:], GOOD], trust).payload == PAYLOAD
    assert f"any of {MAX_TRIED} addresses" in ask(port, [*nobody, GOOD], trust, 0.3).why


def back_at(port: int, trust: Trust | None = None) -> HandshakeServer:
    """As soon as ZMQ has given the port back, which it does in a thread of its own."""
    made: list[HandshakeServer] = []

    def one() -> bool:
        with contextlib.suppress(ConfigError):
            made.append(HandshakeServer(GOOD, port, {(0, 0): PAYLOAD}, trust or Trust()))
        return bool(made)

    wait_until(one)
    return made[0]


def test_a_peer_that_hangs_up_unheard_is_asked_again_within_the_deadline() -> None:
    """It ended between our request and its answer, and is back."""
    with zmq.Context() as context:
        first = context.socket(zmq.ROUTER)
        port = first.bind_to_random_port(f"tcp://{GOOD}")
        asking = HandshakeClient(20.0)
        try:
            asking.start(("P", GOOD, port))
            assert first.poll(10_000)
            first.close(0)
            second = back_at(port)
            got: list[HandshakeResult] = []
            wait_until(lambda: bool(got.extend(asking.results()) or got))
            second.close()
            assert got[0].payload == PAYLOAD
        finally:
            asking.close()
