"""``kv_transfer_params``: a reference, nothing, or an error that names the field; whatever a client sends (C9)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvconn import params as p
from kvconn.errors import RequestError
from kvconn.params import KvconnRef, PeerKey, RemoteRef, fresh_transfer_id, parse_remote, to_params, wants_remote_decode

FUZZ = settings(derandomize=True, database=None, deadline=None, max_examples=200)
BLOCK = 16


def good(**changes: Any) -> dict[str, Any]:
    """A whole reference: 3 blocks of 16 tokens, 40 tokens."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [[4, 9, 2]],
        "remote_engine_id": "P",
        "remote_request_id": "x" * 22,
        "remote_host": "127.0.0.1",
        "remote_port": 5600,
        "remote_num_tokens": 40,
        "tp_size": 1,
        **changes,
    }


def without(key: str) -> dict[str, Any]:
    return {k: v for k, v in good().items() if k != key}


class TestGoodReferences:
    def test_every_field_is_taken_over(self) -> None:
        ref = parse_remote(
            good(tp_size=2, pp_size=3, dcp_size=4, kvconn={"deadline": 12.5}, remote_block_ids=[[1, 2, 3], [7]]), BLOCK
        )
        assert ref == RemoteRef(
            engine_id="P",
            transfer_id="x" * 22,
            host="127.0.0.1",
            port=5600,
            block_ids=((1, 2, 3), (7,)),
            num_tokens=40,
            tp_size=2,
            pp_size=3,
            dcp_size=4,
            kvconn=KvconnRef(deadline=12.5),
        )
        assert ref.peer == PeerKey("P", "127.0.0.1", 5600, tp=2, pp=3, dcp=4)

    def test_a_stock_producers_reference_needs_no_sizes_no_token_count_and_nothing_of_ours(self) -> None:
        params = {k: good()[k] for k in good() if k not in ("remote_num_tokens", "tp_size", "do_remote_decode")}
        ref = parse_remote(params, BLOCK)
        assert ref is not None
        assert (ref.num_tokens, ref.tp_size, ref.pp_size, ref.dcp_size, ref.kvconn) == (48, 1, 1, 1, None)

    def test_null_means_absent_for_what_has_a_default(self) -> None:
        ref = parse_remote(good(remote_num_tokens=None, tp_size=None, pp_size=None, dcp_size=None, kvconn=None), BLOCK)
        assert ref is not None
        assert (ref.num_tokens, ref.tp_size) == (48, 1)

    def test_unknown_keys_are_ignored_here_and_under_kvconn(self) -> None:
        params = good(router_trace="abc", transfer_mode="pull", kvconn={"deadline": 1.0, "from_the_future": [1]})
        assert parse_remote(params, BLOCK) is not None

    @pytest.mark.parametrize("tokens", [1, 33, 48])
    def test_blocks_may_cover_more_than_the_tokens(self, tokens: int) -> None:
        assert parse_remote(good(remote_num_tokens=tokens), BLOCK) is not None

    def test_some_groups_may_be_empty(self) -> None:
        ref = parse_remote(good(remote_block_ids=[[], [1, 2, 3]]), BLOCK)
        assert ref is not None
        assert ref.block_ids == ((), (1, 2, 3))

    @pytest.mark.parametrize("block", [0, (1 << 31) - 1])
    def test_bounds_of_block_ids_are_inclusive(self, block: int) -> None:
        assert parse_remote(good(remote_block_ids=[[block] * 3]), BLOCK) is not None

    def test_repr_is_one_readable_line(self) -> None:
        ref = parse_remote(good(remote_block_ids=[[1, 2, 3], [4]]), BLOCK)
        assert repr(ref) == f"RemoteRef({'x' * 22} of P@127.0.0.1:5600 blocks=3+1)"


class TestNoReference:
    @pytest.mark.parametrize(
        "params",
        [None, {}, [], "x", 7, {"do_remote_prefill": False}, {"do_remote_prefill": 1}, {"do_remote_prefill": "true"}],
    )
    def test_only_true_asks_for_a_remote_prefill(self, params: Any) -> None:
        assert parse_remote(params, BLOCK) is None

    @pytest.mark.parametrize(
        ("params", "wants"),
        [
            ({"do_remote_decode": True}, True),
            ({"do_remote_decode": 1}, False),
            ({"do_remote_decode": "true"}, False),
            ({"do_remote_decode": False}, False),
            ({}, False),
            (None, False),
            ([("do_remote_decode", True)], False),
        ],
    )
    def test_only_true_asks_to_keep_the_blocks(self, params: Any, wants: bool) -> None:
        assert wants_remote_decode(params) is wants


WRONG_TEXT: list[Any] = [None, "", "a\nb", "a\x00", "\ud800", "x" * 513, 7, b"bytes", ["x"], {"a": 1}, True]
WRONG_INT: list[Any] = [0, -1, 1.0, "1", True, [1], {}, 1 << 70, float("nan")]
NEED = "kv_transfer_params."
CASES: list[tuple[str, str, Any]] = [
    *(("remote_engine_id", "remote_engine_id", v) for v in WRONG_TEXT),
    *(("remote_request_id", "remote_request_id", v) for v in WRONG_TEXT),
    *(("remote_host", "remote_host", v) for v in WRONG_TEXT),
    *(("remote_port", "remote_port", v) for v in [None, *WRONG_INT, 65536]),
    *(("remote_num_tokens", "remote_num_tokens", v) for v in [*WRONG_INT, (1 << 27) + 1]),
    *((key, key, v) for key in ("tp_size", "pp_size", "dcp_size") for v in [*WRONG_INT, 4097]),
    *(("remote_block_ids", "remote_block_ids", v) for v in [None, 7, "123", b"\1", {}, {"0": [1]}, [], [[]], [[], []]]),
    *(("remote_block_ids", "remote_block_ids", v) for v in [[[1]] * 65]),
    *(("remote_block_ids", "remote_block_ids[0]", v) for v in [[7], ["12"], [b"\1"], [None], [{}], [{"a": 1}]]),
    *(
        ("remote_block_ids", "remote_block_ids[1]", [[1, 2, 3], [bad]])
        for bad in [-1, 1 << 31, 1.0, "1", None, True, [1], 1 << 80]
    ),
    *(("kvconn", "kvconn", v) for v in [7, "x", [1], {"deadline": "soon"}, {"deadline": [1]}, {"deadline": True}]),
    *(("kvconn", "kvconn", v) for v in [{1: 2}, {"deadline": 10**400}]),
    *(("kvconn", "kvconn.deadline", {"deadline": v}) for v in [float("nan"), float("inf"), float("-inf")]),
]


class TestWrongFields:
    @pytest.mark.parametrize(("key", "field", "value"), CASES)
    def test_a_wrong_field_is_named(self, key: str, field: str, value: Any) -> None:
        with pytest.raises(RequestError) as caught:
            parse_remote(good(**{key: value}), BLOCK)
        assert caught.value.field == NEED + field
        assert str(caught.value).startswith(f"{NEED}{field}: ")

    @pytest.mark.parametrize(
        "key", ["remote_block_ids", "remote_engine_id", "remote_request_id", "remote_host", "remote_port"]
    )
    def test_a_missing_field_is_named(self, key: str) -> None:
        with pytest.raises(RequestError) as caught:
            parse_remote(without(key), BLOCK)
        assert caught.value.field == NEED + key

    def test_blocks_may_be_larger_than_ours(self) -> None:
        ref = parse_remote(good(remote_num_tokens=49), BLOCK)
        assert ref is not None and (ref.num_tokens, len(ref.block_ids[0])) == (49, 3)

    def test_too_many_blocks_are_refused_before_they_are_read(self) -> None:
        with pytest.raises(RequestError) as caught:
            parse_remote(good(remote_block_ids=[range(p.MAX_BLOCKS + 1)]), BLOCK)
        assert caught.value.field == NEED + "remote_block_ids[0]"

    def test_an_error_quotes_a_huge_value_in_short(self) -> None:
        with pytest.raises(RequestError) as caught:
            parse_remote(good(remote_host=["x" * 10_000]), BLOCK)
        assert len(str(caught.value)) < 250

    def test_an_error_survives_a_value_that_cannot_be_shown(self) -> None:
        class Hostile:
            def __repr__(self) -> str:
                raise RuntimeError("no")

        with pytest.raises(RequestError, match="got <Hostile>"):
            parse_remote(good(remote_host=Hostile()), BLOCK)


class TestRoundTrip:
    TEXT = st.text(st.characters(categories=["L", "N", "P"]), min_size=1, max_size=40)

    @FUZZ
    @given(
        engine=TEXT,
        transfer=TEXT,
        host=TEXT,
        port=st.integers(1, 65535),
        groups=st.lists(st.lists(st.integers(0, (1 << 31) - 1), max_size=6), min_size=1, max_size=3).filter(any),
        data=st.data(),
        sizes=st.tuples(*[st.integers(1, 4096)] * 3),
        ours=st.none()
        | st.builds(
            KvconnRef,
            slot=st.none() | st.integers(0, 2**31 - 1),
            word=st.none() | st.integers(1, 2**64 - 1),
            seal=st.none() | st.text("0123456789abcdef", max_size=64),
            deadline=st.none() | st.floats(allow_nan=False, allow_infinity=False),
        ),
    )
    def test_what_a_producer_writes_a_consumer_reads_back_through_json(
        self,
        engine: str,
        transfer: str,
        host: str,
        port: int,
        groups: list[list[int]],
        data: st.DataObject,
        sizes: tuple[int, int, int],
        ours: KvconnRef | None,
    ) -> None:
        num_tokens = data.draw(st.integers(1, max(map(len, groups)) * BLOCK))
        ref = RemoteRef(engine, transfer, host, port, tuple(map(tuple, groups)), num_tokens, *sizes, kvconn=ours)
        params = json.loads(json.dumps(to_params(ref)))
        assert parse_remote(params, BLOCK) == ref
        assert not wants_remote_decode(params)

    def test_the_keys_are_vllms_and_ours_sit_under_kvconn(self) -> None:
        ref = RemoteRef("P", "t", "h", 1, ((1,),), 3)
        assert set(to_params(ref)) == {
            "do_remote_prefill",
            "do_remote_decode",
            "remote_block_ids",
            "remote_engine_id",
            "remote_request_id",
            "remote_host",
            "remote_port",
            "remote_num_tokens",
            "remote_blocks_expiry_time",
            "tp_size",
            "pp_size",
            "dcp_size",
            "transfer_mode",
        }
        fenced = to_params(msgspec.structs.replace(ref, kvconn=KvconnRef(deadline=2.0)))
        assert fenced["kvconn"] == {"deadline": 2.0}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.binary(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=8) | st.sampled_from(sorted(good())), inner, max_size=5)
        | st.tuples(inner)
    ),
    max_leaves=12,
)


class TestHostileClients:
    @staticmethod
    def outcome(parse: Callable[[], object]) -> None:
        """Only a reference, None or a RequestError may come out."""
        try:
            result = parse()
        except RequestError as err:
            result = err
        named = isinstance(result, RequestError) and result.field.startswith(NEED)
        assert named or result is None or isinstance(result, RemoteRef)

    @FUZZ
    @given(params=JSON, block_size=st.integers(1, 1024))
    def test_anything_at_all(self, params: Any, block_size: int) -> None:
        self.outcome(lambda: parse_remote(params, block_size))
        wants_remote_decode(params)

    @FUZZ
    @given(changes=st.dictionaries(st.sampled_from([*sorted(good()), "pp_size", "dcp_size", "kvconn"]), JSON))
    def test_a_good_reference_with_anything_in_its_fields(self, changes: dict[str, Any]) -> None:
        self.outcome(lambda: parse_remote({**good(), **changes, "do_remote_prefill": True}, BLOCK))

    @FUZZ
    @given(groups=st.lists(st.lists(JSON, max_size=3) | JSON, max_size=4), ours=JSON)
    def test_anything_for_block_ids_and_for_ours(self, groups: list[Any], ours: Any) -> None:
        self.outcome(lambda: parse_remote(good(remote_block_ids=groups, kvconn=ours), BLOCK))


def test_transfer_ids_are_22_characters_of_base62_and_never_the_same() -> None:
    ids = {fresh_transfer_id() for _ in range(2000)}
    assert len(ids) == 2000
    assert all(re.fullmatch(r"[0-9A-Za-z]{22}", id) for id in ids)
    assert len(set("".join(ids))) == 62  # every character is in use


class TestLoneSurrogates:
    """Python's JSON reads them; they must end in a RequestError like anything else (C9)."""

    GOOD = to_params(RemoteRef("P", "t", "h", 1, ((1,),), 3, kvconn=KvconnRef(1, 2, "ab")))

    @pytest.mark.parametrize("where", ["slot", "word", "seal", "deadline", "\ud800"])
    def test_in_a_field_of_ours(self, where: str) -> None:
        with pytest.raises(RequestError):
            parse_remote({**self.GOOD, "kvconn": {**self.GOOD["kvconn"], where: "\ud800"}}, 16)

    def test_in_place_of_ours(self) -> None:
        with pytest.raises(RequestError):
            parse_remote({**self.GOOD, "kvconn": "\ud800"}, 16)
