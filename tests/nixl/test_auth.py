"""The side channel with a fleet key, with networks, over IPv6, with names; and references that are signed.

Peers without the key are a stock engine's sockets, or ours with another key: what they get, and what they are told.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from kvconn.config import LIMITS, network
from kvconn.errors import ConfigError, RequestError
from kvconn.nixl import sideclient
from kvconn.nixl.curve import Curve
from kvconn.nixl.fence import check_signature, sign
from kvconn.nixl.names import endpoint, plain_name
from kvconn.nixl.sideclient import HandshakeClient, HandshakeResult
from kvconn.nixl.sideserver import HandshakeServer
from kvconn.nixl.wire import encode_request
from kvconn.params import KvconnRef, RemoteRef, parse_remote, to_params
from kvconn.trust import FleetKey, Trust
from tests.nixl.test_sidechannel import Clocked
from tests.support import NIXL_CONSUMER, NIXL_PRODUCER, Side, wait_until

HOST = "127.0.0.1"
PAYLOAD = b"payload of rank 0"
KEY, OTHER = FleetKey(b"the fleet's secret, 32 bytes long"), FleetKey(b"another fleet's secret, as long  ")
KEYED, OPEN = Trust(KEY), Trust()

Serve = Callable[..., tuple[HandshakeServer, int]]
Ask = Callable[..., HandshakeResult]


@pytest.fixture
def serve() -> Iterator[Serve]:
    made: list[HandshakeServer] = []

    def make(trust: Trust = OPEN, host: str = HOST) -> tuple[HandshakeServer, int]:
        server = HandshakeServer(host, 0, {(0, 0): PAYLOAD}, trust)
        made.append(server)
        return server, int(server._socket.getsockopt(zmq.LAST_ENDPOINT).rpartition(b":")[2].rstrip(b"\x00"))

    yield make
    for one in made:
        one.close()


@pytest.fixture
def client() -> Iterator[Callable[..., HandshakeClient]]:
    made: list[HandshakeClient] = []

    def make(trust: Trust = OPEN, timeout: float = 20.0, **kwargs: Any) -> HandshakeClient:
        made.append(HandshakeClient(timeout, trust=trust, **kwargs))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def ask(client: Callable[..., HandshakeClient]) -> Ask:
    def run(port: int, trust: Trust = OPEN, host: str = HOST, **kwargs: Any) -> HandshakeResult:
        asking = client(trust, **kwargs)
        asking.start(("P", host, port))
        return results(asking, 1)[0]

    return run


def results(asking: HandshakeClient, n: int) -> list[HandshakeResult]:
    got: list[HandshakeResult] = []
    wait_until(lambda: got.extend(asking.results()) is None and len(got) >= n, what=f"{n} results")
    return got


@contextlib.contextmanager
def stock(port: int, kind: int = zmq.REQ) -> Iterator[zmq.Socket[bytes]]:
    """A stock reader's socket: no mechanism, no key."""
    with zmq.Context() as context, context.socket(kind) as raw:
        raw.setsockopt(zmq.LINGER, 0)
        raw.connect(f"tcp://{HOST}:{port}")
        yield raw


def ipv6() -> bool:
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6) as probe:
        probe.bind(("::1", 0))
        return True
    return False


class TestKey:
    def test_two_engines_of_one_fleet_shake_hands(self, serve: Serve, ask: Ask) -> None:
        server, port = serve(KEYED)
        assert ask(port, KEYED).payload == PAYLOAD
        assert server.refused == 0

    def test_a_stock_reader_gets_nothing_and_is_counted(self, serve: Serve, ask: Ask) -> None:
        server, port = serve(KEYED)
        with stock(port) as raw:
            raw.send(encode_request(0, 0))
            wait_until(lambda: server.refused >= 1)
            assert raw.poll(0) == 0
            assert ask(port, KEYED).payload == PAYLOAD  # and others are served

    def test_a_reader_without_a_key_is_told_at_once_to_set_one(self, serve: Serve, ask: Ask) -> None:
        _, port = serve(KEYED)
        result = ask(port, OPEN, timeout=600.0)
        assert result.payload is None and "it wants the fleet's key: set kvconn.key_file here" in result.why

    def test_a_stock_producer_is_refused_at_once_and_named_as_that(self, ask: Ask) -> None:
        with zmq.Context() as context, context.socket(zmq.ROUTER) as raw:
            port = raw.bind_to_random_port(f"tcp://{HOST}")
            result = ask(port, KEYED, timeout=600.0)
            assert raw.poll(0) == 0  # not even the request
        assert result.payload is None and "it has no fleet key: a stock engine, or one without" in result.why

    def test_another_fleets_key_opens_neither_side(self, serve: Serve) -> None:
        server, port = serve(KEYED)
        with Clocked(2.0, Trust(OTHER)) as one:
            one.asking.start(("P", HOST, port))
            one.rounds(1)
            wait_until(lambda: any(line.ask.hint for line in list(one.asking._lines.values())))
            one.passes(2.0)
            one.rounds(2)
            (result,) = one.results
        assert result.payload is None and "perhaps its fleet key is not ours" in result.why
        assert server.refused >= 1

    def test_a_client_that_knows_the_servers_public_key_alone_stays_outside(self, serve: Serve) -> None:
        server, port = serve(KEYED)
        with zmq.Context() as context, context.socket(zmq.DEALER) as raw:
            raw.setsockopt(zmq.LINGER, 0)
            raw.curve_serverkey = Curve.of(KEY).server_public
            raw.curve_publickey, raw.curve_secretkey = zmq.curve_keypair()
            raw.connect(f"tcp://{HOST}:{port}")
            raw.send_multipart([b"", encode_request(0, 0)])
            wait_until(lambda: server.refused >= 1)
            assert raw.poll(0) == 0

    def test_what_is_sent_cannot_be_read_on_the_way(self, serve: Serve, ask: Ask) -> None:
        _, port = serve(KEYED)
        seen = bytearray()
        with socket.create_server((HOST, 0)) as listener:
            relay = threading.Thread(target=_relay, args=(listener, port, seen), daemon=True)
            relay.start()
            assert ask(listener.getsockname()[1], KEYED).payload == PAYLOAD
        relay.join(10)
        assert b"CURVE" in seen and PAYLOAD not in seen and b"get_meta" not in seen

    def test_keys_are_in_no_text(self) -> None:
        curve = Curve.of(KEY)
        for secret in (curve.server_secret, curve.client_secret):
            assert secret.hex() not in repr(curve) and repr(secret) not in repr(curve)
        assert len({curve.server_public, curve.client_public, *(Curve.of(OTHER).__dict__.values())}) == 6


def _relay(listener: socket.socket, port: int, seen: bytearray) -> None:
    """One connection, both ways, everything of it kept."""
    theirs, _ = listener.accept()
    with theirs, socket.create_connection((HOST, port)) as ours:
        back = threading.Thread(target=_pump, args=(ours, theirs, seen), daemon=True)
        back.start()
        _pump(theirs, ours, seen)
        back.join(10)


def _pump(source: socket.socket, to: socket.socket, seen: bytearray) -> None:
    with contextlib.suppress(OSError):
        while part := source.recv(4096):
            seen += part
            to.sendall(part)
        to.shutdown(socket.SHUT_RDWR)


class TestNetworks:
    def test_the_server_lets_in_only_these(self, serve: Serve, ask: Ask) -> None:
        server, port = serve(Trust(allow=(network("10.0.0.0/8"),)))
        result = ask(port, timeout=600.0)
        assert result.payload is None and "our address is not in its kvconn.allow" in result.why
        with stock(port, zmq.DEALER) as raw:
            raw.send_multipart([b"", encode_request(0, 0)])
            wait_until(lambda: server.refused >= 2)
            assert raw.poll(0) == 0
        _, port = serve(Trust(allow=(network("10.0.0.0/8"), network("127.0.0.0/8"))))
        assert ask(port).payload == PAYLOAD

    def test_a_client_connects_only_to_these(self, client: Callable[..., HandshakeClient]) -> None:
        """What a request's parameters name is not even touched."""
        asking = client(Trust(allow=(network("127.0.0.1/32"),)), look_up=lambda name: ["127.0.0.2"])
        with socket.create_server(("127.0.0.2", 0)) as listener:
            listener.setblocking(False)
            for host in ("127.0.0.2", "::ffff:127.0.0.2", "[::ffff:127.0.0.2]", "a.name"):
                asking.start(("P", host, listener.getsockname()[1]))
            for result in results(asking, 4):
                assert result.payload is None and "127.0.0.2 is not in kvconn.allow" in result.why
            with pytest.raises(BlockingIOError):
                listener.accept()

    def test_a_name_with_one_good_address_leads_there_and_nowhere_else(self, serve: Serve, ask: Ask) -> None:
        _, port = serve()
        trust = Trust(allow=(network("127.0.0.1"),))
        assert ask(port, trust, "a.name", look_up=lambda name: ["127.0.0.9", "127.0.0.1"]).payload == PAYLOAD

    def test_too_many_handshakes_of_one_address_are_refused_for_a_while_and_others_are_not(
        self, serve: Serve, ask: Ask, client: Callable[..., HandshakeClient], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("kvconn.nixl.gate.BURST", 4000.0)  # four at once, and no more while this test runs
        server, port = serve(Trust(rate=1e-3))
        asking = client(timeout=600.0)
        for _ in range(8):
            asking.start(("P", HOST, port))
        found = results(asking, 8)
        refused = [r.why for r in found if r.payload is None]
        assert refused and all("too many handshakes from our address" in why for why in refused)
        assert [r.payload for r in found].count(PAYLOAD) >= 4
        assert server.refused >= len(refused)

    def test_requests_over_one_connection_are_counted_too(self, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("kvconn.nixl.gate.BURST", 4000.0)
        server, port = serve(Trust(rate=1e-3))
        with stock(port, zmq.DEALER) as raw:
            for _ in range(200):
                raw.send_multipart([b"", encode_request(0, 0)])
            for _ in range(4):
                assert raw.poll(20_000)
                raw.recv_multipart()
            wait_until(lambda: server.refused >= 196)
            assert raw.poll(0) == 0
        assert server.refused == 196

    def test_refusals_are_said_once_in_a_while(self, serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
        server, port = serve(Trust(allow=(network("10.0.0.0/8"),)))
        with caplog.at_level(logging.WARNING, "kvconn.nixl"):
            for n in range(1, 6):
                with stock(port):
                    wait_until(lambda n=n: server.refused >= n)
        told = [r.message for r in caplog.records if "refused a peer" in r.message]
        assert len([m for m in told if "127.0.0.1 is not in kvconn.allow" in m]) == 1


class TestNames:
    def test_a_name_that_hangs_delays_no_address_and_no_other_name(
        self, serve: Serve, client: Callable[..., HandshakeClient]
    ) -> None:
        _, port = serve()
        hangs = threading.Event()

        def look_up(name: str) -> list[str]:
            if name == "slow":
                hangs.wait(60)
            return [HOST]

        asking = client(look_up=look_up, timeout=60.0)
        try:
            for host in ("slow", "slow", "quick", HOST):
                asking.start(("P", host, port))
            quick = results(asking, 2)
            assert {r.key[1] for r in quick} == {"quick", HOST} and all(r.payload == PAYLOAD for r in quick)
        finally:
            hangs.set()
        assert [r.payload for r in results(asking, 2)] == [PAYLOAD] * 2

    def test_a_name_has_the_handshakes_deadline_and_its_late_answer_is_thrown_away(
        self, client: Callable[..., HandshakeClient]
    ) -> None:
        hangs = threading.Event()
        asking = client(look_up=lambda name: [HOST] if hangs.wait(60) else [], timeout=0.2)
        try:
            asking.start(("P", "slow", 9))
            (result,) = results(asking, 1)
            assert result.why == "the name 'slow' was not resolved within 0.2 s"
        finally:
            hangs.set()
        wait_until(lambda: "naming=0" in repr(asking))
        assert asking.results() == [] and "pending=0" in repr(asking)

    def test_what_waits_for_names_is_bounded(self, client: Callable[..., HandshakeClient]) -> None:
        hangs = threading.Event()
        asking = client(look_up=lambda name: [name] if hangs.wait(60) else [], timeout=60.0)
        more = 50
        try:
            for i in range(LIMITS.names_max + LIMITS.name_threads + more):
                asking.start(("P", f"slow{i}", 9))
            for _ in range(LIMITS.names_max + more):
                asking.start(("P", "slow0", 9))
            why = {r.why.partition(" to look up")[0] for r in results(asking, 2 * more)}
            assert why == {"too many names are being looked up"}
        finally:
            hangs.set()

    def test_handshakes_that_wait_are_bounded(
        self, client: Callable[..., HandshakeClient], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sideclient, "MAX_PENDING", 0)
        asking = client()
        for _ in range(LIMITS.peers_max + 3):
            asking.start(("P", HOST, 9))
        assert [r.why for r in asking.results()] == [f"{LIMITS.peers_max} handshakes wait already"] * 3

    def test_a_name_without_an_address_says_so(self, ask: Ask) -> None:
        def fail(name: str) -> list[str]:
            raise OSError("Name or service not known")

        assert (
            "the name 'nowhere' leads to no address: Name or service not known"
            in ask(9, host="nowhere", look_up=fail).why
        )

    def test_close_does_not_wait_for_a_name(self, client: Callable[..., HandshakeClient]) -> None:
        hangs = threading.Event()
        asking = client(look_up=lambda name: [HOST] if hangs.wait(60) else [], timeout=60.0)
        asking.start(("P", "slow", 9))
        wait_until(lambda: "naming=1" in repr(asking))
        asking.close()
        assert not asking._thread.is_alive()
        hangs.set()  # its answer comes to a closed client, and harms nobody
        wait_until(lambda: not any(t.is_alive() for t in asking._names._threads))

    def test_localhost_is_resolved_by_the_system(self, serve: Serve, ask: Ask) -> None:
        _, port = serve(host="localhost")
        assert ask(port, host="localhost").payload == PAYLOAD

    @pytest.mark.parametrize("host", ["a", "a.b-c.d_e", "host.", "1e100", "x" * 253])
    def test_a_host_name(self, host: str) -> None:
        assert plain_name(host)

    @pytest.mark.parametrize("host", ["", "a;b", "a:b", "-a", "a b", "é", "x" * 254, "a\n", "a/b", "*", "eth0;1.2.3.4"])
    def test_no_host_name(self, host: str) -> None:
        assert not plain_name(host)

    def test_an_endpoint_has_brackets_where_zmq_wants_them(self) -> None:
        assert endpoint("10.0.0.1", 5) == "tcp://10.0.0.1:5"
        assert endpoint("fd00::1", 5) == endpoint("[fd00::1]", 5) == "tcp://[fd00::1]:5"


@pytest.mark.skipif(not ipv6(), reason="this machine has no IPv6")
class TestIpv6:
    @pytest.mark.parametrize("trust", [OPEN, KEYED])
    @pytest.mark.parametrize("host", ["::1", "[::1]"])
    def test_either_side_may_be_there(self, serve: Serve, ask: Ask, host: str, trust: Trust) -> None:
        _, port = serve(trust, host)
        assert ask(port, trust, host).payload == PAYLOAD

    def test_a_server_for_both_sees_ipv4_peers_as_that(self, serve: Serve, ask: Ask) -> None:
        _, port = serve(Trust(allow=(network("127.0.0.0/8"),)), "::")
        assert ask(port).payload == PAYLOAD
        assert "not in its kvconn.allow" in ask(port, host="::1").why

    def test_a_name_that_has_only_that(self, serve: Serve, ask: Ask) -> None:
        _, port = serve(host="::1")
        assert ask(port, host="six", look_up=lambda name: ["::1"]).payload == PAYLOAD


# --- references ---------------------------------------------------------------------------------------------------

REF = RemoteRef("P", "t", HOST, 5600, ((1, 2, 3), ()), 48, kvconn=KvconnRef(4, 99, "5" * 64, 1.5))


def signed(ref: RemoteRef, key: FleetKey = KEY) -> RemoteRef:
    ours = ref.kvconn or KvconnRef()
    return msgspec.structs.replace(ref, kvconn=msgspec.structs.replace(ours, signature=sign(key, ref)))


class TestSignature:
    def test_what_a_producer_signs_a_reader_takes_also_through_json(self) -> None:
        check_signature(KEY, signed(REF))
        through = parse_remote(msgspec.json.decode(msgspec.json.encode(to_params(signed(REF)))), 16)
        assert through == signed(REF)
        check_signature(KEY, through)

    def test_every_field_is_under_it(self) -> None:
        changes: dict[str, Any] = {
            "engine_id": "Q", "transfer_id": "u", "host": "10.0.0.1", "port": 1, "block_ids": ((1, 2, 4), ()),
            "num_tokens": 47, "tp_size": 2, "pp_size": 2, "dcp_size": 2,
        }  # fmt: skip
        ours: dict[str, Any] = {"slot": 5, "word": 98, "seal": "6" * 64, "deadline": 2.5, "signature": "0" * 64}
        good = signed(REF)
        assert changes.keys() | {"kvconn"} == set(RemoteRef.__struct_fields__)
        assert ours.keys() == set(KvconnRef.__struct_fields__)
        edited = [msgspec.structs.replace(good, **{k: v}) for k, v in changes.items()]
        edited += [
            msgspec.structs.replace(good, kvconn=msgspec.structs.replace(good.kvconn, **{k: v}))
            for k, v in ours.items()
        ]
        for ref in edited:
            with pytest.raises(RequestError, match="it does not fit: another fleet key, or edited"):
                check_signature(KEY, ref)

    def test_another_fleets_is_none(self) -> None:
        with pytest.raises(RequestError, match="another fleet key"):
            check_signature(KEY, signed(REF, OTHER))

    @pytest.mark.parametrize("ours", [None, KvconnRef(4, 99, "5" * 64, 1.5)])
    def test_a_reference_without_one_is_a_stock_producers(self, ours: KvconnRef | None) -> None:
        with pytest.raises(RequestError, match=r"its producer is stock, or has no kvconn\.key_file"):
            check_signature(KEY, msgspec.structs.replace(REF, kvconn=ours))


@pytest.fixture
def sides(tmp_path: Path) -> Iterator[Callable[..., Side]]:
    """Engines on real NIXL, with the key file that they are told."""
    made: list[Side] = []

    def make(name: str, base: dict[str, Any], secret: str | None = None, **kvconn: Any) -> Side:
        if secret is not None:
            path = tmp_path / f"{name}.key"
            path.write_text(secret)
            path.chmod(0o600)
            kvconn["key_file"] = str(path)
        made.append(Side(name, {**base, "kv_connector_extra_config": {"kvconn": kvconn}}))
        return made[-1]

    yield make
    for one in made:
        one.close()


SECRET = "s" * 32


def read(p: Side, d: Side, params: dict[str, Any] | None, id: str = "r") -> None:
    d.load(id, params, [3, 4])
    wait_until(lambda: p.step() is not None and d.step() is not None and id in d.received, what=repr(d.workers[0]))


class TestEngines:
    def test_with_one_key_blocks_are_read_and_freed(self, sides: Callable[..., Side]) -> None:
        p, d = sides("P", NIXL_PRODUCER, SECRET), sides("D", NIXL_CONSUMER, SECRET, require_auth=True)
        params = p.prefill("a", [3, 4], 1)
        assert params is not None and len(params["kvconn"]["signature"]) == 64
        read(p, d, params)
        assert d.failed == [] and d.holds([3, 4], 1)
        wait_until(lambda: p.step() is not None and p.sent == ["a"])

    def test_an_edited_or_stock_reference_fails_before_anybody_is_asked(self, sides: Callable[..., Side]) -> None:
        p, d = sides("P", NIXL_PRODUCER, SECRET), sides("D", NIXL_CONSUMER, SECRET)
        with socket.create_server((HOST, 0)) as listener:
            listener.setblocking(False)
            params = p.prefill("a", [3, 4], 1)
            assert params is not None
            port = listener.getsockname()[1]
            unsigned = {k: v for k, v in params["kvconn"].items() if k != "signature"}
            for index, bad in enumerate(
                ({"remote_port": port}, {"kvconn": None, "remote_port": port}, {"kvconn": unsigned})
            ):
                read(p, d, {**params, **bad}, f"r{index}")
            with pytest.raises(BlockingIOError):
                listener.accept()
        assert d.failed == ["r0", "r1", "r2"] and d.stats.values["params_refused"] == 3
        assert "another fleet key, or edited" in d.reasons["r0"] and "its producer is stock" in d.reasons["r1"]
        assert repr(d.workers[0]).count("Peers()") == 1  # nobody became a peer

    @pytest.mark.parametrize(
        ("theirs", "ours", "why"),
        [
            (SECRET, None, "it wants the fleet's key: set kvconn.key_file here"),
            (None, SECRET, "its producer is stock, or has no kvconn.key_file"),
            ("t" * 32, SECRET, "another fleet key, or edited"),
        ],
    )
    def test_engines_that_do_not_share_a_key_fail_the_load_and_say_why(
        self,
        sides: Callable[..., Side],
        theirs: str | None,
        ours: str | None,
        why: str,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        caplog.set_level(logging.CRITICAL, "kvconn")
        p, d = sides("P", NIXL_PRODUCER, theirs), sides("D", NIXL_CONSUMER, ours)
        read(p, d, p.prefill("a", [3, 4], 1))
        assert d.failed == ["r"] and why in d.reasons["r"]

    def test_who_was_refused_is_counted_once(self, sides: Callable[..., Side]) -> None:
        p = sides("P", NIXL_PRODUCER, SECRET)
        with stock(p.config.port):
            wait_until(lambda: p.step() is not None and p.stats.values.get("handshakes_refused", 0) >= 1)
        half: Any = p.scheduler
        wait_until(lambda: p.step() is not None and half.scheduler._refused == half.scheduler._server.refused)
        assert p.stats.values["handshakes_refused"] == half.scheduler._refused

    def test_a_host_outside_of_the_networks_fails_the_load_and_says_so(
        self, sides: Callable[..., Side], caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.CRITICAL, "kvconn")
        p, d = sides("P", NIXL_PRODUCER), sides("D", NIXL_CONSUMER, allow=["10.0.0.0/8"])
        read(p, d, p.prefill("a", [3, 4], 1))
        assert d.failed == ["r"] and "127.0.0.1 is not in kvconn.allow" in d.reasons["r"]

    @pytest.mark.parametrize("role", [NIXL_PRODUCER, NIXL_CONSUMER])
    def test_no_engine_starts_without_the_key_that_it_must_have(
        self, sides: Callable[..., Side], role: dict[str, Any]
    ) -> None:
        with pytest.raises(ConfigError, match=r"kvconn\.require_auth"):
            sides("X", role, require_auth=True)
