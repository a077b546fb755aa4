"""On the wire: what we send a stock peer can read, what we get is bounded and typed, nothing escapes (C9)."""

from __future__ import annotations

import re
import tracemalloc
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvconn.config import ConnectorConfig, KVTransferConfig, ModelView, ParallelConfig
from kvconn.errors import PeerError
from kvconn.nixl import wire
from kvconn.nixl.wire import (
    AgentMetadata,
    Done,
    HandshakePayload,
    Heartbeat,
    KvconnHandshake,
    WireCodec,
    encode_done,
    encode_heartbeats,
    encode_request,
    parse_notification,
    parse_request,
    parse_timestamp,
)

FUZZ = settings(derandomize=True, database=None, deadline=None, max_examples=200)
CODEC = WireCodec()
pack = msgspec.msgpack.encode


def config(**model: Any) -> ConnectorConfig:
    view = ModelView("m", "bf16", 2, 1, 576, 16)
    return ConnectorConfig(
        KVTransferConfig("NixlConnector", "kv_both"), "E", ParallelConfig(), msgspec.structs.replace(view, **model)
    )


#: a stock engine's metadata: every field by its stock name, none of ours.
STOCK: dict[str, Any] = {
    "engine_id": "P",
    "agent_metadata": b"\x00blob",
    "kv_caches_base_addr": [4096, 8192],
    "device_id": 0,
    "num_blocks": 4,
    "block_lens": [64, 64],
    "block_strides": [64, 128],
    "kv_cache_layout": "LBHNC",
    "block_size": 16,
    "ssm_sizes": [0, 0],
    "attn_backend_name": "CPU_ATTN",
    "physical_blocks_per_logical_kv_block": 1,
}


def payload(**changes: Any) -> HandshakePayload:
    return HandshakePayload("h", pack({**STOCK, **changes}))


def peer_error(call: Callable[[], object], stage: str) -> str:
    with pytest.raises(PeerError) as caught:
        call()
    assert caught.value.peer == "P@h:1"
    assert caught.value.stage == stage
    return str(caught.value)


class TestPayload:
    def test_what_we_send_we_read_back(self) -> None:
        metadata = msgspec.convert(STOCK, AgentMetadata)
        frame = CODEC.encode_payload(config(), metadata)
        got = CODEC.decode_payload(frame, "P@h:1")
        CODEC.check(config(), got, "P@h:1")
        assert CODEC.decode_metadata(got, "P@h:1") == metadata

    def test_a_stock_peer_finds_the_two_fields_it_knows_in_a_map(self) -> None:
        frame = msgspec.msgpack.decode(CODEC.encode_payload(config(), msgspec.convert(STOCK, AgentMetadata)))
        assert isinstance(frame["compatibility_hash"], str)
        assert isinstance(frame["agent_metadata_bytes"], bytes)
        inner = msgspec.msgpack.decode(frame["agent_metadata_bytes"])
        assert STOCK.keys() <= inner.keys()
        assert [key for key in inner if key not in STOCK and key.startswith("kvconn")] == ["kvconn"]

    def test_a_stock_payload_without_ours_decodes(self) -> None:
        got = CODEC.decode_payload(pack({"compatibility_hash": "abc", "agent_metadata_bytes": pack(STOCK)}), "P@h:1")
        assert (got.compatibility_hash, got.kvconn) == ("abc", None)
        metadata = CODEC.decode_metadata(got, "P@h:1")
        assert (metadata.engine_id, metadata.kv_caches_base_addr) == ("P", [4096, 8192])
        assert (metadata.region_names, metadata.dcp_size, metadata.pcp_size) == (None, 1, 1)

    def test_unknown_keys_are_ignored_at_every_level(self) -> None:
        frame = pack(
            {
                "compatibility_hash": "abc",
                "agent_metadata_bytes": pack({**STOCK, "ple_block_len": None, "region_members": [["a"]], "new": {}}),
                "kvconn": {"version": 9, "factors": {}, "seal_key": b"key", "later": 1},
                "future": [1, 2, {"x": None}],
            }
        )
        got = CODEC.decode_payload(frame, "P@h:1")
        assert got.kvconn == KvconnHandshake(9, {}, b"key")
        assert CODEC.decode_metadata(got, "P@h:1").num_blocks == 4

    def test_a_frame_over_the_bound_is_not_decoded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(wire, "MAX_FRAME", 100)
        frame = pack({"compatibility_hash": "x" * 200, "agent_metadata_bytes": b""})
        assert f"frame of {len(frame)} bytes, at most 100" in peer_error(
            lambda: CODEC.decode_payload(frame, "P@h:1"), "handshake payload"
        )


class TestCompatibility:
    def test_equal_factors_pass(self) -> None:
        theirs = CODEC.decode_payload(CODEC.encode_payload(config(), msgspec.convert(STOCK, AgentMetadata)), "P@h:1")
        CODEC.check(config(), theirs, "P@h:1")

    def test_a_mismatch_names_each_factor_in_words_ours_and_theirs(self) -> None:
        theirs = CODEC.decode_payload(
            CODEC.encode_payload(config(dtype="fp8", head_size=512), msgspec.convert(STOCK, AgentMetadata)), "P@h:1"
        )
        message = peer_error(lambda: CODEC.check(config(), theirs, "P@h:1"), "compatibility")
        assert message == "peer P@h:1, compatibility: head size: ours 576, theirs 512; kv dtype: ours bf16, theirs fp8"

    def test_a_factor_only_one_side_has_is_named(self) -> None:
        factors = {**CODEC.factors(config()), "rope": "yarn"}
        del factors["packing"]
        theirs = HandshakePayload("other", b"", KvconnHandshake(factors=factors))
        message = peer_error(lambda: CODEC.check(config(), theirs, "P@h:1"), "compatibility")
        assert "packing: ours latent, theirs absent" in message
        assert "rope: ours absent, theirs yarn" in message

    def test_a_stock_peer_gives_no_factors_and_the_message_says_so(self) -> None:
        message = peer_error(lambda: CODEC.check(config(), payload(), "P@h:1"), "compatibility")
        assert "does not say which factors" in message

    def test_a_peer_whose_factors_agree_but_whose_hash_does_not_still_gets_words(self) -> None:
        theirs = HandshakePayload("other", b"", KvconnHandshake(factors=CODEC.factors(config())))
        message = peer_error(lambda: CODEC.check(config(), theirs, "P@h:1"), "compatibility")
        assert "although every factor is equal" in message

    def test_a_peer_with_endless_factors_gets_a_bounded_message(self) -> None:
        theirs = HandshakePayload("x", b"", KvconnHandshake(factors={str(i): "y" * 100 for i in range(10_000)}))
        assert len(peer_error(lambda: CODEC.check(config(), theirs, "P@h:1"), "compatibility")) < 2100

    def test_the_hash_does_not_depend_on_the_order_of_factors(self) -> None:
        factors = CODEC.factors(config())
        assert CODEC.compatibility_hash(factors) == CODEC.compatibility_hash(dict(reversed(factors.items())))
        assert re.fullmatch(r"[0-9a-f]{64}", CODEC.compatibility_hash(factors))

    @pytest.mark.parametrize(
        "change",
        [
            {"name": "n"},
            {"dtype": "fp8"},
            {"num_layers": 3},
            {"num_kv_heads": 2},
            {"head_size": 1},
            {"packing": "kv"},
        ],
    )
    def test_every_factor_is_in_the_hash(self, change: dict[str, Any]) -> None:
        ours, theirs = CODEC.factors(config()), CODEC.factors(config(**change))
        assert CODEC.compatibility_hash(ours) != CODEC.compatibility_hash(theirs)


IMPOSSIBLE: list[tuple[str, dict[str, Any]]] = [
    ("block_lens", {"block_lens": [64]}),
    ("block_strides", {"block_strides": [64, 64, 64]}),
    ("region_num_blocks", {"region_num_blocks": [4]}),
    ("region_group_ids", {"region_group_ids": []}),
    ("region_names", {"region_names": ["a"]}),
    ("region_mem_types", {"region_mem_types": ["DRAM"] * 3}),
    ("impossible", {"num_blocks": 0}),
    ("num_blocks", {"num_blocks": -4}),
    ("impossible", {"block_size": 0}),
    ("impossible", {"kv_caches_base_addr": [], "block_lens": [], "block_strides": []}),
    ("block_lens <= block_strides", {"block_lens": [0, 64]}),
    ("block_lens", {"block_lens": [-1, 64]}),
    ("block_lens <= block_strides", {"block_strides": [64, 63]}),
    ("kv_caches_base_addr", {"kv_caches_base_addr": [-1, 0]}),
    ("kv_caches_base_addr", {"kv_caches_base_addr": [0, 1 << 63]}),
    ("block_strides", {"block_strides": [64, (1 << 64) - 1]}),
    ("address space", {"block_strides": [64, (1 << 63) - 1]}),
    ("address space", {"kv_caches_base_addr": [0, (1 << 63) - 64]}),
    ("address space", {"num_blocks": 1 << 62}),
    ("malformed", {"kv_caches_base_addr": None}),
    ("malformed", {"kv_caches_base_addr": ["a", "b"]}),
    ("malformed", {"agent_metadata": "text"}),
    ("malformed", {"num_blocks": 4.5}),
    ("malformed", {"engine_id": None}),
    ("malformed", {"ssm_sizes": [1]}),
    ("length <= 512", {"engine_id": "e" * 513}),
    ("length <= 512", {"region_names": ["a", "b" * 513]}),
    ("length >= 1", {"agent_metadata": b""}),
]


class TestMetadata:
    @pytest.mark.parametrize(("word", "change"), IMPOSSIBLE)
    def test_impossible_numbers_are_the_peers_fault_and_named(self, word: str, change: dict[str, Any]) -> None:
        assert word in peer_error(lambda: CODEC.decode_metadata(payload(**change), "P@h:1"), "agent metadata")

    @pytest.mark.parametrize("key", sorted(STOCK.keys() - {"ssm_sizes", "attn_backend_name"}))
    def test_a_missing_field_is_named(self, key: str) -> None:
        rest = {k: v for k, v in STOCK.items() if k != key}
        if key == "physical_blocks_per_logical_kv_block":
            assert CODEC.decode_metadata(HandshakePayload("h", pack(rest)), "P@h:1").device_id == 0
            return
        assert key in peer_error(
            lambda: CODEC.decode_metadata(HandshakePayload("h", pack(rest)), "P@h:1"), "agent metadata"
        )

    def test_more_regions_than_any_engine_has_are_refused(self) -> None:
        n = (1 << 16) + 1
        change = {"kv_caches_base_addr": [0] * n, "block_lens": [1] * n, "block_strides": [1] * n}
        found = peer_error(lambda: CODEC.decode_metadata(payload(**change), "P@h:1"), "agent metadata")
        assert "length <= 65536" in found

    def test_layers_in_shared_regions_are_as_few_as_regions(self) -> None:
        """Each layer becomes a region: a frame well below the bound made 640,000, and held up a step for a second."""
        for n, refused in ((1 << 10, False), ((1 << 10) + 1, True)):
            members = [[("", 0, None)] * 64] * n
            change = {"kv_caches_base_addr": [4096] * n, "block_lens": [1] * n, "block_strides": [1] * n}
            said = payload(**change, kvconn=wire.KvconnAgent(4096, 1, members=members))
            assert len(said.agent_metadata_bytes) < wire.MAX_FRAME // 8
            if refused:
                found = peer_error(lambda said=said: CODEC.decode_metadata(said, "P@h:1"), "agent metadata")
                assert "kvconn.members: 65600 layers, at most 65536 are read" in found
            else:
                assert CODEC.decode_metadata(said, "P@h:1").kvconn is not None

    def test_a_list_is_refused_by_the_length_it_claims_and_not_made(self) -> None:
        """One byte an entry on the wire, eight and more in memory."""
        endless = pack({**STOCK, "kv_caches_base_addr": [0] * 8_000_000})
        tracemalloc.start()
        try:
            peer_error(lambda: CODEC.decode_metadata(HandshakePayload("h", endless), "P@h:1"), "agent metadata")
            assert tracemalloc.get_traced_memory()[1] < 1 << 20
        finally:
            tracemalloc.stop()

    def test_factors_are_few_and_short(self) -> None:
        for factors in ({str(i): "" for i in range(65)}, {"a" * 513: ""}, {"a": "b" * 4097}):
            frame = pack({"compatibility_hash": "h", "agent_metadata_bytes": b"", "kvconn": {"factors": factors}})
            assert "length <= " in peer_error(lambda f=frame: CODEC.decode_payload(f, "P@h:1"), "handshake payload")


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.text(max_size=9)
    | st.binary(),
    lambda x: st.lists(x, max_size=4) | st.dictionaries(st.text(max_size=9) | st.sampled_from(sorted(STOCK)), x),
    max_leaves=10,
)
#: frames that lie about their length or nest without end.
NASTY = [
    b"",
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\x91" * 100_000,
    b"\x81\xa1x" + b"\x91" * 1_000_000,
    b"\x81\xa1\xff\x01",
    b"\xc1",
    pack({"compatibility_hash": "a", "agent_metadata_bytes": b""}) + b"tail",
]


class TestHostileFrames:
    @staticmethod
    def only_peer_errors(frame: bytes) -> None:
        for call in (
            lambda: CODEC.decode_payload(frame, "p"),
            lambda: CODEC.decode_metadata(HandshakePayload("h", frame), "p"),
        ):
            try:
                call()
            except PeerError as err:
                assert len(str(err)) < 3000  # noqa: PT017 - most frames are refused, some are not
        request, timestamp = parse_request(frame), parse_timestamp(frame)
        assert request is None or all(type(x) is int for x in request)
        assert timestamp is None or abs(timestamp) < float("inf")

    @pytest.mark.parametrize("frame", NASTY, ids=lambda f: f[:5].hex())
    def test_lying_and_endless_frames(self, frame: bytes) -> None:
        self.only_peer_errors(frame)

    @FUZZ
    @given(frame=st.binary(max_size=64))
    def test_any_bytes(self, frame: bytes) -> None:
        self.only_peer_errors(frame)

    @FUZZ
    @given(value=JSON)
    def test_any_well_formed_message(self, value: Any) -> None:
        self.only_peer_errors(pack(value))

    @FUZZ
    @given(changes=st.dictionaries(st.sampled_from(sorted(STOCK)), JSON | st.lists(st.integers(-1, 1 << 63))))
    def test_good_metadata_with_anything_in_its_fields(self, changes: dict[str, Any]) -> None:
        self.only_peer_errors(pack({**STOCK, **changes}))

    @FUZZ
    @given(at=st.integers(0, 400), byte=st.integers(0, 255), cut=st.integers(0, 400))
    def test_a_good_payload_with_a_byte_flipped_or_its_end_cut(self, at: int, byte: int, cut: int) -> None:
        good = CODEC.encode_payload(config(), msgspec.convert(STOCK, AgentMetadata))
        broken = bytearray(good)
        broken[at % len(good)] = byte
        self.only_peer_errors(bytes(broken))
        self.only_peer_errors(good[: cut % len(good)])


class TestRequests:
    def test_a_request_is_stocks_bytes(self) -> None:
        assert encode_request(1, 3) == b"\x93\xc4\x0cget_meta_msg\x01\x03"
        assert parse_request(encode_request(1, 3)) == (1, 3)

    @pytest.mark.parametrize(
        "body",
        [
            b"",
            b"get_meta_msg",
            pack(("get_meta_msg", "0", 0)),
            pack((b"get_meta", 0, 0)),
            pack((b"get_meta_msg", 0)),
            pack((b"get_meta_msg", 0, 0, 0)),
            pack((b"get_meta_msg", 0.5, 0)),
            pack((b"get_meta_msg", None, True)),
            pack({"a": 1}),
            pack((b"get_meta_msg", 0, 0)) + b"\x00" * 300,
        ],
    )
    def test_anything_else_is_none(self, body: bytes) -> None:
        assert parse_request(body) is None

    def test_a_request_over_the_bound_is_not_decoded(self) -> None:
        body = pack((b"get_meta_msg", 0, 0))
        assert parse_request(body + b" " * (wire.MAX_REQUEST - len(body) + 1)) is None

    @pytest.mark.parametrize(("frame", "value"), [(pack(12.5), 12.5), (pack(3), 3.0)])
    def test_a_timestamp_is_a_number(self, frame: bytes, value: float) -> None:
        assert parse_timestamp(frame) == value

    @pytest.mark.parametrize("value", [None, "1.0", True, [1.0], float("nan"), float("inf"), b"1"])
    def test_any_other_timestamp_is_none(self, value: Any) -> None:
        assert parse_timestamp(pack(value)) is None


class TestNotifications:
    @pytest.mark.parametrize(
        ("message", "parsed"),
        [
            (b"abc:1", Done("abc", 1)),
            (b"a:b:c:4096", Done("a:b:c", 4096)),
            (b"HB:a,b", Heartbeat(("a", "b"))),
            (b"HB:", Heartbeat(())),
            (b"HB:a,,b,", Heartbeat(("a", "b"))),
            (b"HB:x:1", Heartbeat(("x:1",))),
            ("gr\u00fc\u00dfe:2".encode(), Done("gr\u00fc\u00dfe", 2)),
        ],
    )
    def test_the_grammar(self, message: bytes, parsed: object) -> None:
        assert parse_notification(message) == parsed

    @pytest.mark.parametrize(
        "message",
        [
            b"",
            b":",
            b":1",
            b"abc",
            b"abc:",
            b"abc:0",
            b"abc:-1",
            b"abc:+1",
            b"abc: 1",
            b"abc:1.0",
            b"abc:4097",
            b"abc:00001",
            b"abc:" + b"9" * 5000,
            "abc:\u0661".encode(),
            "abc:\u00b2".encode(),
            b"\xff\xfe:1",
            b"HB:\xff",
            b"PUSH_REG:\x80",
            b"x" * 513 + b":1",
            b"HB:" + b"a" * (1 << 20),
        ],
    )
    def test_anything_else_is_none(self, message: bytes) -> None:
        assert parse_notification(message) is None

    @FUZZ
    @given(message=st.binary(max_size=40) | st.text(max_size=40).map(str.encode) | st.from_regex(rb"\A.*:[0-9]{1,5}\Z"))
    def test_nothing_escapes_and_what_comes_out_is_bounded(self, message: bytes) -> None:
        parsed = parse_notification(message)
        if isinstance(parsed, Done):
            assert 1 <= parsed.readers <= wire.MAX_READERS
            assert 1 <= len(parsed.transfer_id) <= wire.MAX_TRANSFER_ID
        elif parsed is not None:
            assert all(parsed.transfer_ids)

    @FUZZ
    @given(
        ids=st.lists(st.from_regex(r"\A[0-9A-Za-z]{22}\Z"), min_size=1, max_size=5),
        readers=st.integers(1, wire.MAX_READERS),
    )
    def test_what_we_send_we_read_back(self, ids: list[str], readers: int) -> None:
        assert parse_notification(encode_done(ids[0], readers)) == Done(ids[0], readers)
        assert parse_notification(encode_heartbeats(ids)) == Heartbeat(tuple(ids))
